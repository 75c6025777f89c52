"""wire/message_schema.py: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from dataclasses import dataclass
from enum import Enum, StrEnum

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.shapes import Bound, Items, Octets, Real, Text, Whole, bound_of, is_region_name
from diloco_node.errors import ProtocolViolation
from diloco_node.wire.message_schema import Schema
from diloco_node.wire.message_tables import CONTROL, HEADERS
from tests.kit.hostile import DOCUMENTS, TEXTS


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float


@dataclass(frozen=True, slots=True)
class Circle:
    centre: Point
    radius: float


@dataclass(frozen=True, slots=True)
class Label:
    text: str


@dataclass(frozen=True, slots=True)
class Everything:
    number: int
    real: float
    flag: bool
    text: str
    data: bytes
    colour: Colour
    level: Level
    point: Point
    maybe: Point | None
    count: int | None
    shape: Circle | Label
    maybe_shape: Circle | Label | None
    many: tuple[int, ...]
    span_start: int
    span_stop: int
    rows: tuple[tuple[float, ...], ...]
    points: tuple[Point, ...]
    members: tuple[str, ...]
    learner: str


@dataclass(frozen=True, slots=True)
class Small:
    number: int
    text: str


@dataclass(frozen=True, slots=True)
class Reals:
    values: tuple[float, ...]


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
WHOLE, REAL = Whole(INT64_MIN, INT64_MAX), Real()
BOUNDS: dict[str, Bound] = {
    "number": WHOLE,
    "real": REAL,
    "text": Text(1024),
    "data": Octets((2, 4)),
    "count": WHOLE,
    "many": Items(65_536, WHOLE),
    "span_start": WHOLE,
    "span_stop": Whole(INT64_MIN, INT64_MAX, above="span_start"),
    "rows": Items(65_536, Items(65_536, REAL)),
    "points": Items(3),
    "members": Items(64, is_set=True),
    "x": WHOLE,
    "y": REAL,
    "radius": REAL,
    "values": Items(65_536, REAL),
}

SCHEMA: Schema[Everything | Small | Reals | Point] = Schema(
    {1: Everything, 2: Small, 3: Reals, 4: Point}, bounds=BOUNDS, inner={10: Circle, 11: Label}
)

EXAMPLE = Everything(
    -5,
    0.1,
    True,
    "hé",
    b"\x00\xff",
    Colour.BLUE,
    Level.HIGH,
    Point(1, -2.5),
    None,
    None,
    Label("x"),
    Circle(Point(0, 0.0), 1e-300),
    (1, 2, 3),
    7,
    8,
    ((1.0,), (), (2.0, 3.0)),
    (Point(1, 1.0), Point(2, 2.0)),
    ("eu-west", "us-east"),
    "a",
)


def fields_of(message: object) -> list[object]:
    """The array as it travels, to be tampered with."""
    return msgpack.unpackb(SCHEMA.encode(message), use_list=True)  # type: ignore[arg-type]


def refusal(fields: object) -> str:
    with pytest.raises(ProtocolViolation) as caught:
        SCHEMA.decode(msgpack.packb(fields))
    return str(caught.value)


def replaced(field: str, value: object) -> str:
    """Why the example with another value in one field is refused."""
    fields = fields_of(EXAMPLE)
    names = [f.name for f in dataclasses.fields(Everything)]
    fields[1 + names.index(field)] = value
    return refusal(fields)


def test_a_message_comes_back_equal_and_of_the_same_types() -> None:
    back = SCHEMA.decode(SCHEMA.encode(EXAMPLE))
    assert back == EXAMPLE
    assert isinstance(back, Everything)
    assert type(back.rows) is tuple
    assert type(back.rows[0]) is tuple
    assert type(back.level) is Level


@given(
    st.builds(Small, st.integers(INT64_MIN, INT64_MAX), st.text(max_size=60, alphabet=st.characters(codec="utf-8")))
    | st.builds(Reals, st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20).map(tuple))
)
def test_any_value_in_range_survives(message: Small | Reals) -> None:
    assert repr(SCHEMA.decode(SCHEMA.encode(message))) == repr(message)


@pytest.mark.parametrize("number", [INT64_MIN, INT64_MAX, 0, -1, 2**32])
def test_int64_edges_are_in_range(number: int) -> None:
    assert SCHEMA.decode(SCHEMA.encode(Small(number, ""))) == Small(number, "")


def test_an_int_beyond_int64_is_refused_on_both_sides() -> None:
    with pytest.raises(ValueError, match=r"Small\.number: 2\^63 is above 2\^63 - 1$"):
        SCHEMA.encode(Small(INT64_MAX + 1, ""))
    assert "Small.number" in refusal([2, INT64_MAX + 1, ""])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("number", True, "expected int, got bool"),
        ("number", 1.0, "expected int, got float"),
        ("number", None, "expected int"),
        ("number", [], "expected int"),
        ("real", 1, "expected float, got int"),
        ("real", float("nan"), "not finite"),
        ("real", float("inf"), "not finite"),
        ("flag", 1, "expected bool"),
        ("text", b"x", "expected str"),
        ("text", "x" * 1025, "over 1024"),
        ("data", "x", "expected bytes"),
        ("data", b"xyz", "3 bytes, expected 2 or 4 bytes"),
        ("colour", "green", "not a value of Colour"),
        ("colour", ["red"], "not a value of Colour"),
        ("level", True, "not a value of Level"),
        ("level", 3, "not a value of Level"),
        ("point", None, ".point"),
        ("point", [1], "expected Point with 2 fields, got an array of 1"),
        ("point", [1, 2.0, 3], "an array of 3"),
        ("point", [1, "x"], ".point.y: expected float, got str"),
        ("maybe", 0, ".maybe"),
        ("count", "x", "expected int"),
        ("shape", None, "begins with a tag"),
        ("shape", [], "begins with a tag"),
        ("shape", [4, 1, 2.0], "unknown tag 4"),
        ("shape", [True, "x"], "begins with a tag"),
        ("shape", [10, [0, 0.0], "r"], ".shape.radius"),
        ("many", 1, "expected an array"),
        ("many", [1, 2, "x"], ".many[2]: expected int"),
        ("many", [*range(1, 10), None], ".many[9]"),
        ("many", [1, True], ".many[1]: expected int, got bool"),
        ("many", [1, 2**63], ".many[1]: 2^63 is above 2^63 - 1"),
        ("span_stop", 7, ".span_stop: 7 with span_start 7"),
        ("rows", [[1.0], [2]], ".rows[1][0]: expected float"),
        ("points", [[1, 1.0], [2, 2]], ".points[1].y"),
        ("points", [[1, 1.0]] * 4, "4 items; the limit is 3"),
        ("members", ["us-east", "eu", "us-east"], "an item is there twice"),
        ("members", ["us-east", "US"], ".members[1]"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(field: str, value: object, says: str) -> None:
    message = replaced(field, value)
    assert f"Everything.{field}" in message
    assert says in message
    assert message.isprintable()


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=list(DOCUMENTS))
def test_hostile_documents_are_refused_with_a_protocol_violation(document: bytes) -> None:
    """By this schema, and by that of the run's messages; tests/transport sends them to a listener."""
    for schema in (SCHEMA, CONTROL, HEADERS):
        with pytest.raises(ProtocolViolation) as caught:
            schema.decode(document)
        assert str(caught.value).isprintable()


def test_a_part_is_no_message() -> None:
    assert "unknown message tag 10" in refusal([10, [0, 0.0], 1.0])


@pytest.mark.parametrize(
    "data",
    [
        b"\xdc\xea\x5f" * 1000 + b"\x00" * 57_000,  # 1,000 nested arrays of 59,999 items each
        b"\x91" * 60_000,
        b"\xdc\xea\x60" + b"\x90" * 60_000,  # each byte a list
        (b"\x99" + b"\xdc\xea\x60" * 8 + b"\x00" * 4) * 100,
        b"\xdc\xff\xff" * 7 + b"\xc0" * 60_000,
    ],
)
def test_hostile_bytes_are_refused_before_memory_is_spent(data: bytes) -> None:
    # Counted by Python's allocator: the process's peak hides it once it was higher.
    schema: Schema[Small] = Schema({2: Small}, bounds=BOUNDS, bytes_max=64 * 2**10)
    assert len(data) <= 64 * 2**10
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            schema.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_random_bytes_and_mutations_never_raise_anything_else() -> None:
    seed = 20_251
    print("seed", seed)
    rng = random.Random(seed)
    whole = SCHEMA.encode(EXAMPLE)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            back = SCHEMA.decode(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
        except ProtocolViolation:
            continue
        # What is accepted is a message of ours: it can be sent again.
        assert SCHEMA.decode(SCHEMA.encode(back)) == back


def test_a_message_over_the_total_limit_is_refused_on_both_sides() -> None:
    tight: Schema[Small] = Schema({2: Small}, bounds=BOUNDS, bytes_max=20)
    assert tight.decode(tight.encode(Small(1, "x" * 16))) == Small(1, "x" * 16)
    with pytest.raises(ValueError, match="the limit is 20"):
        tight.encode(Small(1, "x" * 17))
    with pytest.raises(ProtocolViolation, match="the limit is 20"):
        tight.decode(SCHEMA.encode(Small(1, "x" * 17)))


def test_limits_count_utf8_bytes_not_characters() -> None:
    tight: Schema[Small] = Schema({2: Small}, bounds={"number": WHOLE, "text": Text(8)})
    assert tight.encode(Small(1, "é" * 4))
    with pytest.raises(ValueError, match="over 8 bytes"):
        tight.encode(Small(1, "é" * 5))


@pytest.mark.parametrize(
    "message",
    [
        Small(True, "x"),
        Small(1.0, "x"),  # type: ignore[arg-type]
        Small(1, b"x"),  # type: ignore[arg-type]
        Reals((float("nan"),)),
        Reals((float("inf"),)),
        Reals(("1.0",)),  # type: ignore[arg-type]
        Reals([1.0]),  # type: ignore[arg-type]
        dataclasses.replace(EXAMPLE, learner="Not A Region"),
        dataclasses.replace(EXAMPLE, shape=Point(1, 1.0)),
        dataclasses.replace(EXAMPLE, maybe=Label("x")),
        dataclasses.replace(EXAMPLE, colour="red"),
    ],
)
def test_our_own_mistakes_are_found_when_encoding(message: Everything | Small | Reals) -> None:
    with pytest.raises(ValueError, match=type(message).__name__):
        SCHEMA.encode(message)


def test_a_type_outside_of_the_table_is_not_a_message() -> None:
    with pytest.raises(TypeError, match="Label is not a message"):
        SCHEMA.encode(Label("x"))  # type: ignore[arg-type]


def test_numpy_scalars_and_whole_numbers_become_plain_floats_and_ints() -> None:
    np = pytest.importorskip("numpy")
    back = SCHEMA.decode(SCHEMA.encode(Reals((np.float32(0.1), np.float64(0.2), 3))))
    assert back == Reals((float(np.float32(0.1)), 0.2, 3.0))
    assert SCHEMA.decode(SCHEMA.encode(Small(np.int64(7), "x"))) == Small(7, "x")
    mixed = dataclasses.replace(EXAMPLE, many=(1, np.int64(7)))
    assert SCHEMA.decode(SCHEMA.encode(mixed)) == dataclasses.replace(EXAMPLE, many=(1, 7))


def test_a_schema_refuses_hints_it_can_not_check() -> None:
    @dataclass
    class Loose:
        anything: object

    @dataclass
    class Mapping:
        table: dict[str, int]

    @dataclass
    class Listed:
        values: list[int]

    for cls in (Loose, Mapping, Listed, int):
        with pytest.raises(TypeError):
            Schema({1: cls}, bounds=BOUNDS)
    with pytest.raises(TypeError, match="no tag"):
        Schema({1: Everything}, bounds=BOUNDS)
    with pytest.raises(ValueError, match="twice"):
        Schema({1: Small, 2: Small}, bounds=BOUNDS)
    with pytest.raises(ValueError, match="twice"):
        Schema({1: Small}, bounds=BOUNDS, inner={1: Label})


@pytest.mark.parametrize("field", ["number", "text"])
def test_a_field_without_a_bound_is_not_built(field: str) -> None:
    without = {name: bound for name, bound in BOUNDS.items() if name != field}
    with pytest.raises(TypeError, match=rf"Small\.{field}: needs a bound of kind"):
        Schema({1: Small}, bounds=without)
    with pytest.raises(TypeError, match=rf"Small\.{field}: needs a bound of kind"):
        Schema({1: Small}, bounds=without | {field: Items(3)})


def test_a_bound_is_found_by_class_then_by_name_then_by_the_end_of_the_name() -> None:
    assert bound_of({"Small.number": Whole(0, 1), "number": Whole(0, 2)}, "Small", "number") == Whole(0, 1)
    assert bound_of({"number": Whole(0, 2), "*_number": Whole(0, 3)}, "Small", "number") == Whole(0, 2)
    assert bound_of({"*_ns": Whole(0, 3)}, "Small", "span_ns") == Whole(0, 3)
    assert bound_of({"*_ns": Whole(0, 3)}, "Small", "ns_span") is None


def test_region_names() -> None:
    assert is_region_name("us-east-1")
    assert is_region_name("a" * 63)
    for name in ("A", "a_b", "a.b", "a\n", "witness", *TEXTS):
        assert not is_region_name(name), name


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_hostile_text_is_no_name_and_is_never_shown_as_it_is(text: str) -> None:
    for field, value in (("learner", text), ("members", ["eu", text]), ("colour", text)):
        message = replaced(field, value)
        assert f"Everything.{field}" in message
        assert message.isprintable()
        assert len(message) < 300
