"""Frozen dataclasses as arrays of plain values, driven by their type hints and a table of bounds. Pure.

A dataclass is an array of its fields, in their order; where the hint is a union of dataclasses it begins with the tag
of the member. There are no maps, no keys, no defaults: what is not exactly what the hint says is refused with the path
of the field. The wire (`wire.message_schema`) and the ledger (`core.ledger.entries`) are made of the same codecs.

A hint may be: `int`, `float` (finite), `bool`, `str`, `bytes`, an enum, a dataclass, `tuple[X, ...]`, `X | None`,
a union of dataclasses that have a tag. Anything else is refused when the codec is built, and so is a number, string,
bytes or tuple without a bound (`core.shapes`); names of regions are bounded by their pattern.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from itertools import count, repeat
from typing import Any, Final

from diloco_node.core.shapes import (
    REGION_FIELDS,
    Bound,
    Bounds,
    Check,
    Items,
    Octets,
    OutOfBounds,
    Real,
    Text,
    Whole,
    bound_of,
    check_bool,
    check_region,
    number_check,
    octets_check,
    show,
    show_number,
    text_check,
)

_SCALARS: Final[dict[type, tuple[type, Callable[[Any], Check]]]] = {
    int: (Whole, number_check),
    float: (Real, number_check),
    str: (Text, text_check),
    bytes: (Octets, octets_check),
}

Codec = tuple[Check, Check]
"""Write and read: each returns the value in its other form, or raises OutOfBounds."""

DEPTH_MAX: Final = 8
"""Arrays within each other in one message."""

_NO_BOUND: Final = "{where}: needs a bound of kind {kind} in core/bounds.py or wire/field_bounds.py, found {found}"


class ArrayCodecs:
    """Builds codecs by one table of bounds (`bound_of`).

    Args:
        tags: of dataclasses that are members of a union.
        is_lenient: whether numbers of other libraries are written: what stays here may be another than others read.
    """

    def __init__(self, bounds: Bounds, tags: Mapping[type, int], *, is_lenient: bool = False) -> None:
        self._bounds, self._tags, self._is_lenient = bounds, tags, is_lenient

    def codec(self, cls: type, *, skip: int = 0) -> Codec:
        """Build the codec of an array of fields. skip: places (0 or 1) that are left at its front for the tag.

        Raises TypeError: a hint that can't be encoded; a field without a bound.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        bounds = [bound_of(self._bounds, cls.__name__, name) for name in names]
        hints = typing.get_type_hints(cls)
        fields = zip(names, bounds, strict=True)
        built = [self._hint(hints[name], bound, f"{cls.__name__}.{name}") for name, bound in fields]
        encoders, decoders = [encode for encode, _ in built], [decode for _, decode in built]
        places = [f".{name}" for name in names]
        pairs = relations(names, bounds)
        length, is_short = len(names) + skip, may_be_short(cls)

        def encode(value: Any) -> list[Any]:
            if type(value) is not cls:
                raise OutOfBounds(f"expected {cls.__name__}, got {type(value).__name__}")
            values = [getattr(value, name) for name in names]
            try:
                fields = [encode_field(field) for encode_field, field in zip(encoders, values, strict=True)]
            except OutOfBounds:
                raise _named(places, encoders, values) from None
            if pairs:
                check_relations(names, fields, pairs)
            if is_short and not fields[-1]:
                fields.pop()
            return [None, *fields] if skip else fields

        def decode(fields: Any) -> Any:
            if is_short and type(fields) is list:
                fields = whole_array(fields, length)
            if type(fields) is not list or len(fields) != length:
                raise OutOfBounds(f"expected {cls.__name__} with {len(names)} fields, got {_shape(fields, skip)}")
            own_fields = fields[1:] if skip else fields
            try:
                values = [decode_field(field) for decode_field, field in zip(decoders, own_fields, strict=True)]
            except OutOfBounds:
                raise _named(places, decoders, own_fields) from None
            if pairs:
                check_relations(names, values, pairs)
            return cls(*values)

        return encode, decode

    def _hint(self, hint: Any, bound: Bound | None, where: str) -> Codec:
        """Encoder and decoder of a field. where: class and name. Raises TypeError."""
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union(typing.get_args(hint), bound, where)
        if origin is tuple:
            return self._tuple(typing.get_args(hint), bound, where)
        if isinstance(hint, type):
            if hint in (int, float, bool, str, bytes):
                return _scalar(hint, bound, where, self._is_lenient)
            if issubclass(hint, Enum):
                return _enum(hint)
            if dataclasses.is_dataclass(hint):
                return self.codec(hint, skip=0)
        raise TypeError(f"no encoding for a field of type {hint!r}")

    def _union(self, members: tuple[Any, ...], bound: Bound | None, where: str) -> Codec:
        kinds = [member for member in members if member is not types.NoneType]
        if len(kinds) == 1:
            encode, decode = self._hint(kinds[0], bound, where)
        else:
            encode, decode = self._tagged(kinds)
        if len(kinds) == len(members):
            return encode, decode
        return (
            lambda value: None if value is None else encode(value),
            lambda value: None if value is None else decode(value),
        )

    def _tagged(self, members: list[Any]) -> Codec:
        by_type: dict[type, tuple[int, Check]] = {}
        by_tag: dict[int, Check] = {}
        for cls in members:
            if cls not in self._tags:
                raise TypeError(f"{cls!r} is in a union, but has no tag in the schema")
            encode_member, decode_member = self.codec(cls, skip=1)
            by_type[cls] = (self._tags[cls], encode_member)
            by_tag[self._tags[cls]] = decode_member

        def encode(value: Any) -> list[Any]:
            encoder = by_type.get(type(value))
            if encoder is None:
                raise OutOfBounds(f"{type(value).__name__} is not a member of the union")
            fields: list[Any] = encoder[1](value)
            fields[0] = encoder[0]
            return fields

        def decode(fields: Any) -> Any:
            if type(fields) is not list or not fields or type(fields[0]) is not int:
                raise OutOfBounds("expected an array that begins with a tag")
            decoder = by_tag.get(fields[0])
            if decoder is None:
                raise OutOfBounds(f"unknown tag {fields[0]}")
            return decoder(fields)

        return encode, decode

    def _tuple(self, items: tuple[Any, ...], bound: Bound | None, where: str) -> Codec:
        if len(items) != 2 or items[1] is not Ellipsis:
            raise TypeError(f"no encoding for a tuple of {items!r}: only for tuple[X, ...]")
        if not isinstance(bound, Items):
            raise TypeError(_NO_BOUND.format(where=where, kind="Items", found=bound))
        encode, decode = self._hint(items[0], bound.of, where)
        return (
            items_check(encode, bound, container=tuple, make=list),
            items_check(decode, bound, container=list, make=tuple),
        )


def _scalar(hint: type, bound: Bound | None, where: str, is_lenient: bool) -> Codec:
    if hint is bool:
        return check_bool, check_bool
    if hint is str and where.rpartition(".")[2] in REGION_FIELDS:
        return check_region, check_region
    kind, make = _SCALARS[hint]
    if not isinstance(bound, kind):
        raise TypeError(_NO_BOUND.format(where=where, kind=kind.__name__, found=bound))
    check = make(bound)
    return (_number(hint, check, is_lenient=is_lenient) if hint in (int, float) else check), check


def _enum(cls: type[Enum]) -> Codec:
    by_value = {member.value: member for member in cls}
    if not all(type(value) in (str, int) for value in by_value):
        raise TypeError(f"{cls.__name__}: only enums of str or int can be encoded")

    def encode(value: Any) -> Any:
        if type(value) is not cls:
            raise OutOfBounds(f"expected {cls.__name__}, got {type(value).__name__}")
        return value.value

    def decode(value: Any) -> Any:
        # Only str and int are looked up: True would find 1, and a list can't be hashed.
        member = by_value.get(value) if type(value) in (str, int) else None
        if member is None:
            raise OutOfBounds(f"not a value of {cls.__name__}: {show(value)}")
        return member

    return encode, decode


def _number(kind: type, check: Check, *, is_lenient: bool) -> Check:
    """The encoder of a number: what is none of this kind becomes one first, if it can."""

    def encode(value: Any) -> Any:
        try:
            return check(value)
        except OutOfBounds:
            if type(value) is kind:
                raise
        if kind is float and type(value) is int:
            return check(float(value))  # a sum began with it
        is_number = hasattr(value, "__index__" if kind is int else "__float__")
        if is_lenient and is_number and not isinstance(value, (bool, str, bytes)):
            with suppress(TypeError):
                return check(operator.index(value) if kind is int else float(value))  # numpy's are welcome
        raise OutOfBounds(f"expected {kind.__name__}, got {type(value).__name__}")

    return encode


def _named(places: Iterable[str], checks: Iterable[Check], values: Iterable[Any]) -> OutOfBounds:
    """Find the wrong field or item again, for its place: the right case must not pay for it."""
    for place, check, value in zip(places, checks, values, strict=False):
        try:
            check(value)
        except OutOfBounds as error:
            return error.within(place)
    raise AssertionError("what was wrong is right now")


def _shape(value: Any, skip: int) -> str:
    if type(value) in (list, tuple):
        return f"an array of {len(value) - skip}"
    return type(value).__name__


def may_be_short(kind: type) -> bool:
    """Whether the last field of a dataclass is left out while it is empty."""
    return any("is_left_out" in field.metadata for field in dataclasses.fields(kind)[-1:])


def whole_array(plain: list[Any], count: int) -> list[Any]:
    """The array with its last place, which was left out if it was empty. Raises OutOfBounds: it is there and empty."""
    if len(plain) == count and not plain[-1]:
        raise OutOfBounds("its last field is empty, and is not left out")
    return [*plain, []] if len(plain) == count - 1 else plain


def items_check(item_check: Check, bound: Items, *, container: Any, make: Any) -> Check:
    """Return the check of an array, which is `container` before and `make(...)` after."""
    most, is_set, whole = bound.most, bound.is_set, bound.of if isinstance(bound.of, Whole) else None

    def check(values: Any) -> Any:
        if type(values) is not container:
            raise OutOfBounds(f"expected an array, got {type(values).__name__}")
        if len(values) > most:
            raise OutOfBounds(f"{len(values)} items; the limit is {most}")
        try:
            items = make(values if whole is not None and _are_within(values, whole) else map(item_check, values))
        except OutOfBounds:
            raise _named((f"[{index}]" for index in count()), repeat(item_check), values) from None
        if is_set and len(set(items)) != len(items):
            raise OutOfBounds("an item is there twice")
        return items

    return check


def _are_within(values: Any, bound: Whole) -> bool:
    """Whether all are plain integers within a bound: without a call for each, for rows of the data are many."""
    return set(map(type, values)) == {int} and bound.lowest <= min(values) <= max(values) <= bound.highest


def relations(names: list[str], bounds: list[Bound | None]) -> list[tuple[int, int, int]]:
    """(place, place of the other, least difference) of the fields that are bounded by another one."""
    pairs = []
    for place, bound in enumerate(bounds):
        neighbour = (bound.above or bound.since) if isinstance(bound, Whole) else ""
        if isinstance(bound, Whole) and neighbour:
            pairs.append((place, names.index(neighbour), 1 if bound.above else 0))
    return pairs


def check_relations(names: list[str], values: list[Any], pairs: list[tuple[int, int, int]]) -> None:
    """Check that the fields of one dataclass go together. Raises OutOfBounds: they don't."""
    for place, neighbour, least in pairs:
        if values[place] - values[neighbour] < least:
            text = f"{show_number(values[place])} with {names[neighbour]} {show_number(values[neighbour])}"
            raise OutOfBounds(text).within(f".{names[place]}")
