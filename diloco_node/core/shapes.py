"""Limits of single fields: bounds as values, and the checks that are made of them. Pure.

A check takes a value and returns it, or raises `OutOfBounds` with what was found. `core.array_codec` makes those of
a dataclass of them, for messages and for entries of the ledger alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from sys import float_info
from types import MappingProxyType
from typing import Any, Final

from diloco_node.core.member_kind import WITNESS_NAME

REGION_PATTERN: Final = re.compile(r"[a-z0-9-]{1,63}")
"""The form of a region's name: it becomes part of file names, log lines and certificate names."""

REGION_NAMES: Final = f"1 to 63 of a-z, 0-9 and '-', and not {WITNESS_NAME!r}, which is the bucket beside two regions"
"""The same in words."""

REGION_FIELDS: Final = frozenset(
    {"hears", "leader", "learner", "learners", "members", "peer", "reducer", "region", "regions", "successor"}
)
"""Fields of type `str` or `tuple[str, ...]` with one of these names hold region names, and are checked as such."""

SHOWN_CHARACTERS_MAX: Final = 80
"""Longest text of a value in an error message."""

POWER_MIN: Final = 20
"""From 2^20 on a power of two is shown as one."""

LEFT_OUT: Final = MappingProxyType({"is_left_out": True})
"""Metadata of a dataclass's last field, a tuple: while it is empty, its place in the array is left out."""

Check = Callable[[Any], Any]


def is_region_name(name: str) -> bool:
    """Whether a region may have this name: see REGION_NAMES."""
    return name != WITNESS_NAME and REGION_PATTERN.fullmatch(name) is not None


class OutOfBounds(Exception):
    """Carries the path of the wrong field upwards; grows at each level, so that a right value pays nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.found = text
        self.path = ""

    def within(self, place: str) -> OutOfBounds:
        """The same, found one level further out."""
        self.path = place + self.path
        return self


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer, both ends included; greater than (`above`) or at least (`since`) another field of its dataclass."""

    lowest: int
    highest: int
    above: str = ""
    since: str = ""


@dataclass(frozen=True, slots=True)
class Real:
    """A finite float, both ends included."""

    lowest: float = -float_info.max
    highest: float = float_info.max


@dataclass(frozen=True, slots=True)
class Text:
    """A string of so many bytes of UTF-8."""

    bytes_max: int


@dataclass(frozen=True, slots=True)
class Octets:
    """Bytes of exactly one of these lengths, or of any up to a limit (`most`); 0: none but `lengths`."""

    lengths: tuple[int, ...]
    most: int = 0

    def __str__(self) -> str:
        return f"at most {self.most:,} bytes" if self.most else f"{' or '.join(map(str, self.lengths))} bytes"


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple of so many items at most; `is_set`: no item twice.

    of: the bound of each; None where the type of the items says it (a dataclass, a region).
    """

    most: int
    of: Bound | None = None
    is_set: bool = False


Bound = Whole | Real | Text | Octets | Items

Bounds = Mapping[str, Bound]
"""By `Class.field`, by `field` where the meaning is the same everywhere, or by `*_ending` of a field's name."""


def bound_of(bounds: Bounds, class_name: str, field_name: str) -> Bound | None:
    """The bound of a field: by class and name, else by name, else by the end of its name; None: it has none."""
    ending = "*_" + field_name.rpartition("_")[2]
    candidates = (bounds.get(key) for key in (f"{class_name}.{field_name}", field_name, ending))
    return next((bound for bound in candidates if bound is not None), None)


def number_check(bound: Whole | Real) -> Check:
    """Return the check of an integer, or of a float. bool is none, and NaN is in no range."""
    lowest, highest, kind = bound.lowest, bound.highest, int if isinstance(bound, Whole) else float

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise OutOfBounds(f"expected {kind.__name__}, got {type(value).__name__}")
        if lowest <= value <= highest:
            return value
        raise OutOfBounds(_outside(value, bound))

    return check


def text_check(bound: Text) -> Check:
    """Return the check of a string."""
    bytes_max = bound.bytes_max

    def check(value: Any) -> str:
        if type(value) is not str:
            raise OutOfBounds(f"expected str, got {type(value).__name__}")
        # A character takes up to four bytes; only strings that could be too long are measured.
        if len(value) * 4 > bytes_max and len(value.encode("utf-8", "replace")) > bytes_max:
            raise OutOfBounds(f"a string over {bytes_max} bytes")
        return value

    return check


def octets_check(bound: Octets) -> Check:
    """Return the check of bytes."""
    lengths, most = bound.lengths, bound.most

    def check(value: Any) -> bytes:
        if type(value) is not bytes:
            raise OutOfBounds(f"expected bytes, got {type(value).__name__}")
        if len(value) not in lengths and (not most or len(value) > most):
            raise OutOfBounds(f"{len(value)} bytes, expected {bound}")
        return value

    return check


def check_bool(value: Any) -> bool:
    """Check true and false."""
    if type(value) is not bool:
        raise OutOfBounds(f"expected bool, got {type(value).__name__}")
    return value


def check_region(value: Any) -> str:
    """Check a region's name."""
    if type(value) is not str:
        raise OutOfBounds(f"expected str, got {type(value).__name__}")
    if REGION_PATTERN.fullmatch(value) is None:
        raise OutOfBounds(f"{show(value)} is no region name ([a-z0-9-], 1 to 63)")
    return value


def show(value: Any) -> str:
    """A value for an error message: short, and escaped, for it comes from outside."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 3] + "..."


def show_number(value: float) -> str:
    """A number, as a power of two where it is a large one (or one less)."""
    if type(value) is int and abs(value) >= 1 << POWER_MIN:
        sign, size = ("-" if value < 0 else ""), abs(value)
        if size & (size - 1) == 0:
            return f"{sign}2^{size.bit_length() - 1}"
        if size & (size + 1) == 0:
            return f"{sign}(2^{size.bit_length()} - 1)" if sign else f"2^{size.bit_length()} - 1"
    return str(value)


def _outside(value: float, bound: Whole | Real) -> str:
    if not isfinite(value):
        return f"{value} is not finite"
    if value < bound.lowest:
        return f"{show_number(value)} is below {show_number(bound.lowest)}"
    return f"{show_number(value)} is above {show_number(bound.highest)}"
