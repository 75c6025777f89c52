"""The fast way takes what is right, and leaves what is wrong to the slow one."""

from dataclasses import dataclass
from typing import Any

from diloco_node.wire.unrolled import unrolled


@dataclass(frozen=True, slots=True)
class Pair:
    count: int
    name: str


class Refused(Exception):
    pass


def check_name(value: Any) -> str:
    if type(value) is not str:
        raise Refused
    return value


def whole(value: Any) -> int:
    return int(value)


def built(skip: int = 0) -> tuple[Any, Any]:
    fields = [("count", whole), ("name", check_name)]
    return unrolled(
        Pair,
        fields,
        fields,
        skip=skip,
        slow=(lambda _: "slow", lambda _: "slow"),
        error=Refused,
        written_out={whole: "type({v}) is int and 0 <= {v} <= 9"},
    )


def test_right_values_go_there_and_back() -> None:
    for skip in (0, 1):
        encode, decode = built(skip)
        assert encode(Pair(3, "x")) == [None] * skip + [3, "x"]
        assert decode([7] * skip + [3, "x"]) == Pair(3, "x")


def test_every_wrong_field_type_and_length_goes_the_slow_way() -> None:
    encode, decode = built()
    for wrong in (Pair(10, "x"), Pair(True, "x"), Pair(1, 2), [1, "x"], None):  # type: ignore[arg-type]
        assert encode(wrong) == "slow", wrong
    for fields in ([-1, "x"], [True, "x"], [1, b"x"], [1], [1, "x", 2], (1, "x"), None):
        assert decode(fields) == "slow", fields
