"""wire/field_bounds.py: each field of each message has a bound, kept on both sides; docs/protocol.md says what more."""

import dataclasses
import re
import types as python_types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
import pytest

from diloco_node.config.schema import REGIONS_MAX
from diloco_node.config.units import RATE_BYTES_PER_S_MAX
from diloco_node.core import bounds as core_bounds
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.replication import BATCH_ENTRIES_MAX
from diloco_node.core.ledger.summary import RunSummary
from diloco_node.core.merge.fragments import FRAGMENTS_MAX, TENSORS_MAX, VALUES_MAX
from diloco_node.core.merge.stripes import STRIPES_MAX
from diloco_node.core.rounds.discards import REPORTED_MAX
from diloco_node.core.shapes import REGION_FIELDS, Bound, Items, Octets, Real, Text, Whole, bound_of
from diloco_node.core.types import BLOCK_VALUES, DiscardedBody, EntryBody
from diloco_node.errors import ProtocolViolation
from diloco_node.transport.pacing.grants import DEMAND_MAX
from diloco_node.wire import message_schema
from diloco_node.wire.envelope import TRANSFER_CONNECTIONS_MAX, Hello
from diloco_node.wire.field_bounds import BOUNDS, RATE_FREE_MAX
from diloco_node.wire.learner_link import ToDaemon, ToLearner
from diloco_node.wire.message_schema import Schema
from diloco_node.wire.message_tables import BULK_HEADERS, ENTRY_BODIES, MESSAGES
from diloco_node.wire.run_shown import RunShown
from tests.kit.repository import ROOT

SECTIONS: dict[str, list[type]] = {
    "Messages between regions": list(MESSAGES.values()),
    "Headers of bulk transfers": list(BULK_HEADERS.values()),
    "The first frames of a connection": [Hello, RunShown],
    "From the learner to its daemon": list(typing.get_args(ToDaemon)),
    "From the daemon to its learner": list(typing.get_args(ToLearner)),
}


def dataclasses_in(classes: list[type]) -> list[type]:
    found: list[type] = []
    waiting = list(classes)
    while waiting:
        cls = waiting.pop(0)
        if cls not in found:
            found.append(cls)
            hints = typing.get_type_hints(cls)
            waiting += [leaf for hint in hints.values() for leaf in leaves(hint) if dataclasses.is_dataclass(leaf)]
    return found


def leaves(hint: Any) -> list[Any]:
    inner = [one for one in typing.get_args(hint) if one not in (Ellipsis, python_types.NoneType)]
    return [leaf for one in inner for leaf in leaves(one)] if inner else [hint]


CLASSES = dataclasses_in([cls for section in SECTIONS.values() for cls in section])
FIELDS = [(cls, field.name) for cls in CLASSES for field in dataclasses.fields(cls)]


def least(hint: Any, bound: Bound | None, name: str) -> Any:
    """The least value that a field may have."""
    (leaf, *_) = leaves(hint)
    if typing.get_origin(hint) is tuple:
        return ()
    if dataclasses.is_dataclass(leaf):
        return an_example(leaf)
    if isinstance(leaf, type) and issubclass(leaf, Enum):
        return next(iter(leaf))
    if leaf is bool:
        return False
    if leaf is str:
        return "a" if name in REGION_FIELDS else ""
    if isinstance(bound, Octets):
        return bytes(bound.lengths[0] if bound.lengths else 0)
    assert isinstance(bound, (Whole, Real)), (name, bound)
    return max(bound.lowest, 1) if isinstance(bound, Whole) and bound.above else bound.lowest


def an_example(cls: Any) -> Any:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return cls(*(least(hints[name], bound_of(BOUNDS, cls.__name__, name), name) for name in names))


def edges(hint: Any, bound: Bound | None, name: str) -> tuple[list[Any], list[Any]]:
    """(values at the edge that pass, values just outside) of a field."""
    (leaf, *_) = leaves(hint)
    if isinstance(bound, Items):
        many = [f"r{number}" for number in range(bound.most + 1)] if leaf is str else None
        if isinstance(bound.of, Items):
            inside: list[Any] = [((),) * bound.most]
            outside: list[Any] = [((),) * (bound.most + 1)]
        else:
            item = least(leaf, bound.of, name)
            inside = [tuple(many[:-1]) if many else (item,) * bound.most]
            outside = [tuple(many) if many else (item,) * (bound.most + 1)]
        if bound.is_set:
            outside.append(("a", "a"))
        if bound.of is not None:
            item_inside, item_outside = edges(typing.get_args(hint)[0], bound.of, name)
            inside += [(value,) for value in item_inside]
            outside += [(value,) for value in item_outside]
        elif leaf is str:
            outside.append(("../etc",))
        return inside, outside
    if leaf is str and name in REGION_FIELDS:
        return ["a" * 63], ["a" * 64, "", "A"]
    if isinstance(bound, Text):
        return ["x" * bound.bytes_max, "é" * (bound.bytes_max // 2)], ["x" * (bound.bytes_max + 1)]
    if isinstance(bound, Octets) and bound.most:
        return [b"", bytes(bound.most)], [bytes(bound.most + 1)]
    if isinstance(bound, Octets):
        return [bytes(length) for length in bound.lengths], [
            bytes(length + change) for length in bound.lengths for change in (-1, 1) if length + change >= 0
        ]
    if isinstance(bound, Whole):
        lowest = least(leaf, bound, name)
        return [lowest, bound.highest], [bound.lowest - 1, bound.highest + 1]
    if isinstance(bound, Real):
        next_up = float("inf") if bound.highest > 1e300 else bound.highest * (1 + 1e-15)
        below = [-5e-324] if bound.lowest == 0.0 else [float("-inf")]
        return [bound.lowest, bound.highest], [next_up, *below, float("nan")]
    assert bound is None, (name, bound)
    return [least(hint, bound, name)], [7.25]  # of another type: a bool, an enum or a dataclass


def as_it_travels(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        tags = [tag for tag, cls in ENTRY_BODIES.items() if type(value) is cls and cls is not DiscardedBody]
        return tags + [as_it_travels(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, Enum):
        return value.value
    return [as_it_travels(item) for item in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_value_at_the_edge_passes_and_one_just_outside_is_refused_by_name(
    cls: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_schema, "ITEMS_MAX", 70_000)  # the bound of the field refuses it, not the limit of all
    parts = {tag: body for tag, body in ENTRY_BODIES.items() if body is not cls}
    schema: Schema[Any] = Schema({1: cls}, bounds=BOUNDS, inner=parts, bytes_max=16 * 2**20)
    bound = bound_of(BOUNDS, cls.__name__, name)
    inside, outside = edges(typing.get_type_hints(cls)[name], bound, name)
    example = an_example(cls)
    at = 1 + [field.name for field in dataclasses.fields(cls)].index(name)
    for value in inside:
        message = dataclasses.replace(example, **{name: value})
        if name == "block_start":
            message = dataclasses.replace(message, block_start=max(0, value - 1), block_stop=core_bounds.BLOCKS_MAX)
        if name == "step_from":
            message = dataclasses.replace(message, step_to=core_bounds.STEP_MAX)
        assert schema.decode(schema.encode(message)) == message
    plain = msgpack.unpackb(schema.encode(example))
    plain += [None] * (at + 1 - len(plain))  # a last field that was left out
    for value in outside:
        with pytest.raises((ValueError, TypeError), match=rf"^{cls.__name__}\.{name}"):
            schema.encode(dataclasses.replace(example, **{name: value}))
        plain[at] = as_it_travels(value)
        with pytest.raises(ProtocolViolation, match=rf"^{cls.__name__}\.{name}"):
            schema.decode(msgpack.packb(plain))


ENTRY_FIELDS = [(cls, field.name) for cls in ENTRY_BODIES.values() for field in dataclasses.fields(cls)]


@pytest.mark.parametrize(
    ("cls", "name"), ENTRY_FIELDS, ids=lambda part: part if isinstance(part, str) else part.__name__
)
def test_an_entry_holds_the_same_bounds_wherever_it_comes_from(cls: type[EntryBody], name: str) -> None:
    _, outside = edges(typing.get_type_hints(cls)[name], bound_of(BOUNDS, cls.__name__, name), name)
    for value in outside:
        with pytest.raises(ValueError, match=rf"^{cls.__name__}\.{name}"):
            seal(1, 1, ZERO_HASH, dataclasses.replace(an_example(cls), **{name: value}))


def test_the_bounds_are_those_of_the_parts_that_make_the_values() -> None:
    assert core_bounds.REGIONS == REGIONS_MAX
    assert core_bounds.FRAGMENTS == FRAGMENTS_MAX
    assert core_bounds.PIECES == TENSORS_MAX
    assert core_bounds.STRIPES == REGIONS_MAX + STRIPES_MAX
    assert core_bounds.RATE_MAX >= RATE_BYTES_PER_S_MAX
    assert core_bounds.BLOCKS_MAX == VALUES_MAX // BLOCK_VALUES + TENSORS_MAX
    assert BOUNDS["entries"] == Items(BATCH_ENTRIES_MAX)
    assert BOUNDS["bodies"] == Items(REPORTED_MAX)
    assert DEMAND_MAX == RATE_FREE_MAX
    assert BOUNDS["connection"] == Whole(0, TRANSFER_CONNECTIONS_MAX - 1)


def test_no_bound_is_for_a_field_that_is_not_there() -> None:
    summed_up = [(cls, field.name) for cls in dataclasses_in([RunSummary]) for field in dataclasses.fields(cls)]
    used = {f"{cls.__name__}.{name}" for cls, name in FIELDS + summed_up} | {name for _, name in FIELDS}
    assert [key for key in BOUNDS if not key.startswith("*") and key not in used] == []


PAGE = Path(ROOT, "docs", "protocol.md")


def fields_on_the_page() -> list[str]:
    """`Class.field` of each row: what a value must mean beyond its bound."""
    first_cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`([A-Z]\w+\.\w+)`", cell)]


def test_the_page_names_fields_of_the_messages_each_once() -> None:
    names = fields_on_the_page()
    unknown = set(names) - {f"{cls.__name__}.{name}" for cls, name in FIELDS}
    assert not unknown, f"docs/protocol.md has what is not in the code: {unknown}"
    assert len(set(names)) == len(names) > 100, "a field is there twice, or rows are lost"
