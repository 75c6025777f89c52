"""Strict msgpack for frozen dataclasses, driven by their type hints and a table of bounds.

A message is an array `[tag, field, field, ...]` in the order of the dataclass's fields. A dataclass inside it is an
array of its fields; where the hint is a union of dataclasses it begins with the tag of the member. There are no maps,
no ext types, no keys, no defaults: what is not exactly what the hint says is refused with the path of the field.

A hint may be: `int`, `float` (finite), `bool`, `str`, `bytes`, an enum, a dataclass, `tuple[X, ...]`, `X | None`,
a union of dataclasses that have a tag. Anything else is refused when the schema is built, and so is a number, string,
bytes or tuple without a bound (`core.shapes`); names of regions are bounded by their pattern.

Decoding raises `ProtocolViolation` (a peer's fault); encoding raises `TypeError` or `ValueError` (ours).
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeVar

import msgpack

from diloco_node.core.shapes import (
    REGION_FIELDS,
    REGION_PATTERN,
    Bound,
    Bounds,
    Check,
    Items,
    OutOfBounds,
    bound_of,
    check_relations,
    items_check,
    may_be_short,
    relations,
    scalar_check,
    show,
    whole_array,
)
from diloco_node.core.unpacking import SHORT_BYTES, unpack, unpack_short
from diloco_node.errors import ProtocolViolation

DEPTH_MAX: Final = 8
"""Nested dataclasses and tuples in one message, told from the hints when the schema is built."""

VALUES_MIN: Final = 256
"""So many arrays and scalars a message may hold however short it has to be."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one message, whatever its fields may hold.

    Attributes:
        message_bytes_max: encoded size. items_max: length of one array, before anything is built of it.
    """

    message_bytes_max: int = 4 * 2**20
    items_max: int = 65_536

    @property
    def values_max(self) -> int:
        """Arrays and scalars in one message: the longest ones are floats, of more than 8 bytes. Bounds what decoding
        takes to about ten times the message's limit."""
        return max(VALUES_MIN, self.message_bytes_max // 8)


def is_region_name(name: str) -> bool:
    """Whether a region may have this name: `[a-z0-9-]`, 1 to 63 characters."""
    return REGION_PATTERN.fullmatch(name) is not None


class Schema(Generic[T]):
    """A union of messages with one numeric tag each. Encoders and decoders are built once, in the constructor.

    Args:
        table: tag -> dataclass, for messages. Tags are part of the protocol: never reuse one.
        inner: tag -> dataclass, for dataclasses that occur inside a message as a member of a union. They are no
            messages by themselves. Tags may not overlap with those of `table`.
        bounds: of every field, as `core.shapes.bound_of` finds them. limits: sizes that encode and decode hold.

    Raises TypeError: a hint that can't be encoded, or is nested deeper than `DEPTH_MAX`; a field without a bound.
    ValueError: a type or a tag that occurs twice.
    """

    def __init__(
        self,
        table: Mapping[int, type],
        *,
        bounds: Bounds,
        inner: Mapping[int, type] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._bounds = bounds
        self._tags: dict[type, int] = {}
        for tag, cls in [*table.items(), *(inner or {}).items()]:
            if cls in self._tags or tag in self._tags.values():
                raise ValueError(f"{cls.__name__} or its tag {tag} is in the schema twice")
            self._tags[cls] = tag
        self._encoders: dict[type, tuple[int, Check]] = {}
        self._decoders: dict[int, tuple[str, Check]] = {}
        for tag, cls in table.items():
            encode, decode = self._dataclass(cls, skip=1, depth=1)
            self._encoders[cls] = (tag, encode)
            self._decoders[tag] = (cls.__name__, decode)

    def encode(self, message: T) -> bytes:
        """The message as bytes.

        Raises TypeError: it is not one of the schema's messages, or a field has another type than its hint. ValueError:
        a field or the whole is over a limit, or a float is not finite.
        """
        encoder = self._encoders.get(type(message))
        if encoder is None:
            raise TypeError(f"{type(message).__name__} is not a message of this schema")
        tag, encode = encoder
        try:
            fields = encode(message)
        except OutOfBounds as error:
            raise ValueError(f"{type(message).__name__}{error.path}: {error.found}") from None
        fields[0] = tag
        data: bytes = msgpack.packb(fields)
        if len(data) > self.limits.message_bytes_max:
            raise ValueError(
                f"{type(message).__name__} takes {len(data)} bytes, the limit is {self.limits.message_bytes_max}"
            )
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """The message that the bytes hold.

        Raises ProtocolViolation: anything but exactly one well-formed message of this schema; names the field.
        """
        fields = self._unpack(data)
        if type(fields) is not list or not fields or type(fields[0]) is not int:
            raise ProtocolViolation("a message must be an array that begins with a tag")
        decoder = self._decoders.get(fields[0])
        if decoder is None:
            raise ProtocolViolation(f"unknown message tag {fields[0]}")
        name, decode = decoder
        try:
            message: T = decode(fields)
        except OutOfBounds as error:
            raise ProtocolViolation(f"{name}{error.path}: {error.found}") from None
        return message

    def _unpack(self, data: bytes | memoryview) -> Any:
        limits = self.limits
        if len(data) > limits.message_bytes_max:
            raise ProtocolViolation(f"a message of {len(data)} bytes; the limit is {limits.message_bytes_max}")
        if len(data) <= SHORT_BYTES:
            return unpack_short(data)
        return unpack(data, depth_max=DEPTH_MAX, values_max=limits.values_max, items_max=limits.items_max)

    def _dataclass(self, cls: type, *, skip: int, depth: int) -> tuple[Check, Check]:
        """Encoder and decoder of an array of fields; `skip` (0 or 1) places are left at its front for the tag."""
        if depth > DEPTH_MAX:
            raise TypeError(f"{cls.__name__} is nested deeper than {DEPTH_MAX}")
        names = [field.name for field in dataclasses.fields(cls)]
        bounds = [bound_of(self._bounds, cls.__name__, name) for name in names]
        built = self._fields(cls, names, bounds, depth=depth)
        encoders, decoders = [encode for encode, _ in built], [decode for _, decode in built]
        pairs = relations(names, bounds)
        count, is_short = len(names) + skip, may_be_short(cls)

        def encode(value: Any) -> list[Any]:
            if type(value) is not cls:
                raise OutOfBounds(f"expected {cls.__name__}, got {type(value).__name__}")
            values = [getattr(value, name) for name in names]
            try:
                fields = [encode_field(field) for encode_field, field in zip(encoders, values, strict=True)]
            except OutOfBounds:
                raise _named_field(names, encoders, values) from None
            if pairs:
                check_relations(names, fields, pairs)
            if is_short and not fields[-1]:
                fields.pop()
            return [None, *fields] if skip else fields

        def decode(fields: Any) -> Any:
            if is_short and type(fields) is list:
                fields = whole_array(fields, count)
            if type(fields) is not list or len(fields) != count:
                raise OutOfBounds(f"expected {cls.__name__} with {count - skip} fields, got {_shape(fields, skip)}")
            own_fields = fields[1:] if skip else fields
            try:
                values = [decode_field(field) for decode_field, field in zip(decoders, own_fields, strict=True)]
            except OutOfBounds:
                raise _named_field(names, decoders, own_fields) from None
            if pairs:
                check_relations(names, values, pairs)
            return cls(*values)

        return encode, decode

    def _fields(
        self, cls: type, names: list[str], bounds: list[Bound | None], *, depth: int
    ) -> list[tuple[Check, Check]]:
        hints = typing.get_type_hints(cls)
        built = []
        for name, bound in zip(names, bounds, strict=True):
            try:
                built.append(self._hint(hints[name], bound, name in REGION_FIELDS, depth=depth))
            except OutOfBounds as error:
                raise TypeError(f"{cls.__name__}.{name}: {error.found}") from None
        return built

    def _hint(self, hint: Any, bound: Bound | None, is_region: bool, *, depth: int) -> tuple[Check, Check]:
        """Encoder and decoder of a field. Raises OutOfBounds when it has no bound, or one of another kind."""
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union(typing.get_args(hint), bound, is_region, depth=depth)
        if origin is tuple:
            return self._tuple(typing.get_args(hint), bound, is_region, depth=depth + 1)
        if isinstance(hint, type):
            if hint in (int, float, bool, str, bytes):
                return _scalar(hint, bound, is_region)
            if issubclass(hint, Enum):
                return _enum(hint)
            if dataclasses.is_dataclass(hint):
                return self._dataclass(hint, skip=0, depth=depth + 1)
        raise TypeError(f"no encoding for a field of type {hint!r}")

    def _union(
        self, members: tuple[Any, ...], bound: Bound | None, is_region: bool, *, depth: int
    ) -> tuple[Check, Check]:
        kinds = [member for member in members if member is not types.NoneType]
        if len(kinds) == 1:
            encode, decode = self._hint(kinds[0], bound, is_region, depth=depth)
        else:
            encode, decode = self._tagged(kinds, depth=depth + 1)
        if len(kinds) == len(members):
            return encode, decode
        return (
            lambda value: None if value is None else encode(value),
            lambda value: None if value is None else decode(value),
        )

    def _tagged(self, members: list[Any], *, depth: int) -> tuple[Check, Check]:
        by_type: dict[type, tuple[int, Check]] = {}
        by_tag: dict[int, Check] = {}
        for cls in members:
            if cls not in self._tags:
                raise TypeError(f"{cls!r} is in a union, but has no tag in the schema")
            encode_member, decode_member = self._dataclass(cls, skip=1, depth=depth)
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

    def _tuple(
        self, items: tuple[Any, ...], bound: Bound | None, is_region: bool, *, depth: int
    ) -> tuple[Check, Check]:
        if depth > DEPTH_MAX:
            raise TypeError(f"a tuple is nested deeper than {DEPTH_MAX}")
        if len(items) != 2 or items[1] is not Ellipsis:
            raise TypeError(f"no encoding for a tuple of {items!r}: only for tuple[X, ...]")
        if not isinstance(bound, Items):
            raise OutOfBounds(_NO_BOUND.format(kind="Items", found=bound))
        encode, decode = self._hint(items[0], bound.of, is_region, depth=depth)
        return (
            items_check(encode, bound, container=tuple, make=list),
            items_check(decode, bound, container=list, make=tuple),
        )


_NO_BOUND: Final = "needs a bound of kind {kind} in core/bounds.py or wire/field_bounds.py, found {found}"


def _scalar(hint: type, bound: Bound | None, is_region: bool) -> tuple[Check, Check]:
    check = scalar_check(hint, bound, is_region=is_region)
    if check is None:
        kind = {int: "Whole", float: "Real", str: "Text", bytes: "Octets"}[hint]
        raise OutOfBounds(_NO_BOUND.format(kind=kind, found=bound))
    convert = {int: _as_int, float: _as_float}.get(hint)
    return (check if convert is None else _lenient(hint, check, convert)), check


def _enum(cls: type[Enum]) -> tuple[Check, Check]:
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


def _lenient(kind: type, check: Check, convert: Check) -> Check:
    """The encoder of a number: what is one of another library becomes ours first."""

    def encode(value: Any) -> Any:
        try:
            return check(value)
        except OutOfBounds:
            if type(value) is kind:
                raise
        return check(convert(value))

    return encode


def _as_int(value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # numpy's integers are welcome
        except TypeError:
            pass
    raise OutOfBounds(f"expected int, got {type(value).__name__}")


def _as_float(value: Any) -> float:
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise OutOfBounds(f"expected float, got {type(value).__name__}")
    return float(value)  # numpy's floats, and ints that a sum began with


def _named_field(names: list[str], checks: list[Check], values: Sequence[Any]) -> OutOfBounds:
    """Find the wrong field again, for its name: the right case must not pay for it."""
    for name, check, value in zip(names, checks, values, strict=True):
        try:
            check(value)
        except OutOfBounds as error:
            return error.within(f".{name}")
    raise AssertionError("a field that was wrong is right now")


def _shape(value: Any, skip: int) -> str:
    if type(value) in (list, tuple):
        return f"an array of {len(value) - skip}"
    return type(value).__name__
