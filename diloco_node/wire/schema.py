"""Strict msgpack for frozen dataclasses, driven by their type hints.

A message is an array `[tag, field, field, ...]` in the order of the dataclass's fields. A dataclass inside it is an
array of its fields; where the hint is a union of dataclasses it begins with the tag of the member. There are no maps,
no ext types, no keys, no defaults: what is not exactly what the hint says is refused with the path of the field.

What a hint may be: `int` (int64), `float` (finite), `bool`, `str`, `bytes`, an enum, a dataclass, `tuple[X, ...]`,
`tuple[X, Y]`, `X | None`, a union of dataclasses that have a tag. Anything else is refused when the schema is built.

Decoding raises `ProtocolViolation` (a peer's fault); encoding raises `TypeError` or `ValueError` (ours).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, NoReturn, TypeVar

import msgpack

from diloco_node.core.unpacking import SHORT_BYTES, unpack, unpack_short
from diloco_node.errors import ProtocolViolation
from diloco_node.wire.unrolled import unrolled

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1

REGION_PATTERN: Final = re.compile(r"[a-z0-9-]{1,63}")
"""What a region may be called: it becomes part of file names, log lines and certificate names."""

REGION_FIELDS: Final = frozenset(
    {"hears", "leader", "learner", "learners", "members", "peer", "reducer", "region", "regions"}
)
"""Fields of type `str` or `tuple[str, ...]` with one of these names hold region names, and are checked as such."""

DEPTH_MAX: Final = 8
"""Nested dataclasses and tuples in one message, told from the hints when the schema is built."""

VALUES_MIN: Final = 256
"""So many arrays and scalars a message may hold however short it has to be."""

T = TypeVar("T")

_Encode = Callable[[Any], Any]
_Decode = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may hold.

    Attributes:
        message_bytes_max: encoded size.
        str_bytes_max: UTF-8 bytes of one string. bytes_max: length of one bytes field.
        items_max: length of one tuple.
    """

    message_bytes_max: int = 4 * 2**20
    str_bytes_max: int = 1024
    bytes_max: int = 4096
    items_max: int = 65_536

    @property
    def values_max(self) -> int:
        """Arrays and scalars in one message: the longest ones are floats, of more than 8 bytes. Bounds what decoding
        takes to about ten times the message's limit."""
        return max(VALUES_MIN, self.message_bytes_max // 8)


def is_region_name(name: str) -> bool:
    """Whether a region may have this name: `[a-z0-9-]`, 1 to 63 characters."""
    return REGION_PATTERN.fullmatch(name) is not None


class _Mismatch(Exception):
    """Carries the path of the wrong field upwards; grows at each level, so that a right message pays nothing."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found
        self.path = ""

    def within(self, part: str) -> _Mismatch:
        self.path = part + self.path
        return self


class Schema(Generic[T]):
    """A union of messages with one numeric tag each. Encoders and decoders are built once, in the constructor.

    Args:
        table: tag -> dataclass, for messages. Tags are part of the protocol: never reuse one.
        parts: tag -> dataclass, for dataclasses that occur inside a message as a member of a union. They are no
            messages by themselves. Tags may not overlap with those of `table`.
        limits: sizes that encode and decode hold.

    Raises:
        TypeError: a hint that can't be encoded, or is nested deeper than `DEPTH_MAX`.
        ValueError: a type or a tag that occurs twice.
    """

    def __init__(
        self, table: Mapping[int, type], *, parts: Mapping[int, type] | None = None, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._tags: dict[type, int] = {}
        for tag, cls in [*table.items(), *(parts or {}).items()]:
            if cls in self._tags or tag in self._tags.values():
                raise ValueError(f"{cls.__name__} or its tag {tag} is in the schema twice")
            self._tags[cls] = tag
        self._built: dict[type, tuple[_Encode, _Decode]] = {}
        self._encoders: dict[type, tuple[int, _Encode]] = {}
        self._decoders: dict[int, tuple[str, _Decode]] = {}
        for tag, cls in table.items():
            encode, decode = self._dataclass(cls, skip=1, depth=1)
            self._encoders[cls] = (tag, encode)
            self._decoders[tag] = (cls.__name__, decode)

    def encode(self, message: T) -> bytes:
        """The message as bytes.

        Raises:
            TypeError: it is not one of the schema's messages, or a field has another type than its hint.
            ValueError: a field or the whole is over a limit, or a float is not finite.
        """
        found = self._encoders.get(type(message))
        if found is None:
            raise TypeError(f"{type(message).__name__} is not a message of this schema")
        tag, encode = found
        try:
            fields = encode(message)
        except _Mismatch as error:
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

        Raises:
            ProtocolViolation: anything but exactly one well-formed message of this schema; names the field.
        """
        fields = self._unpack(data)
        if type(fields) is not list or not fields or type(fields[0]) is not int:
            raise ProtocolViolation("a message must be an array that begins with a tag")
        found = self._decoders.get(fields[0])
        if found is None:
            raise ProtocolViolation(f"unknown message tag {fields[0]}")
        name, decode = found
        try:
            message: T = decode(fields)
        except _Mismatch as error:
            raise ProtocolViolation(f"{name}{error.path}: {error.found}") from None
        return message

    def _unpack(self, data: bytes | memoryview) -> Any:
        limits = self.limits
        if len(data) > limits.message_bytes_max:
            raise ProtocolViolation(f"a message of {len(data)} bytes; the limit is {limits.message_bytes_max}")
        if len(data) <= SHORT_BYTES:
            return unpack_short(data)
        return unpack(data, depth_max=DEPTH_MAX, values_max=limits.values_max, items_max=limits.items_max)

    def _dataclass(self, cls: type, *, skip: int, depth: int) -> tuple[_Encode, _Decode]:
        """Encoder and decoder of an array of fields; `skip` (0 or 1) places are left at its front for the tag."""
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"{cls!r} is not a dataclass")
        if depth > DEPTH_MAX:
            raise TypeError(f"{cls.__name__} is nested deeper than {DEPTH_MAX}")
        hints = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        built = [self._hint(hints[name], name in REGION_FIELDS, depth=depth) for name in names]
        encoders = [(name, encode) for name, (encode, _) in zip(names, built, strict=True)]
        decoders = [(name, decode) for name, (_, decode) in zip(names, built, strict=True)]
        count = len(names) + skip

        def encode(value: Any) -> list[Any]:
            if type(value) is not cls:
                raise _Mismatch(f"expected {cls.__name__}, got {type(value).__name__}")
            fields: list[Any] = [None] * skip
            for name, encode_field in encoders:
                try:
                    fields.append(encode_field(getattr(value, name)))
                except _Mismatch as error:
                    raise error.within(f".{name}") from None
            return fields

        def decode(fields: Any) -> Any:
            if type(fields) is not list or len(fields) != count:
                raise _Mismatch(f"expected {cls.__name__} with {count - skip} fields, got {_shape(fields, skip)}")
            values = []
            at = skip
            for name, decode_field in decoders:
                try:
                    values.append(decode_field(fields[at]))
                except _Mismatch as error:
                    raise error.within(f".{name}") from None
                at += 1
            return cls(*values)

        return unrolled(
            cls, encoders, decoders, skip=skip, slow=(encode, decode), refused=_Mismatch, written_out=_CHECKS
        )

    def _hint(self, hint: Any, is_region: bool, *, depth: int) -> tuple[_Encode, _Decode]:
        origin = typing.get_origin(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union(typing.get_args(hint), is_region, depth=depth)
        if origin is tuple:
            return self._tuple(typing.get_args(hint), is_region, depth=depth + 1)
        if isinstance(hint, type):
            if hint in (int, float, bool, str, bytes):
                return self._scalar(hint, is_region)
            if issubclass(hint, Enum):
                return _enum(hint)
            if dataclasses.is_dataclass(hint):
                return self._dataclass(hint, skip=0, depth=depth + 1)
        raise TypeError(f"no encoding for a field of type {hint!r}")

    def _scalar(self, hint: type, is_region: bool) -> tuple[_Encode, _Decode]:
        if hint is int:
            return _encode_int, _decode_int
        if hint is float:
            return _encode_float, _decode_float
        if hint is bool:
            return _check_bool, _check_bool
        if hint is bytes:
            check_bytes = _bytes_check(self.limits.bytes_max)
            return check_bytes, check_bytes
        check_str = _check_region if is_region else _str_check(self.limits.str_bytes_max)
        return check_str, check_str

    def _union(self, members: tuple[Any, ...], is_region: bool, *, depth: int) -> tuple[_Encode, _Decode]:
        some = [member for member in members if member is not types.NoneType]
        if len(some) == 1:
            encode, decode = self._hint(some[0], is_region, depth=depth)
        else:
            encode, decode = self._tagged(some, depth=depth + 1)
        if len(some) == len(members):
            return encode, decode
        return (
            lambda value: None if value is None else encode(value),
            lambda value: None if value is None else decode(value),
        )

    def _tagged(self, members: list[Any], *, depth: int) -> tuple[_Encode, _Decode]:
        by_type: dict[type, tuple[int, _Encode]] = {}
        by_tag: dict[int, _Decode] = {}
        for cls in members:
            if cls not in self._tags:
                raise TypeError(f"{cls!r} is in a union, but has no tag in the schema")
            encode_member, decode_member = self._dataclass(cls, skip=1, depth=depth)
            by_type[cls] = (self._tags[cls], encode_member)
            by_tag[self._tags[cls]] = decode_member

        def encode(value: Any) -> list[Any]:
            found = by_type.get(type(value))
            if found is None:
                raise _Mismatch(f"{type(value).__name__} is not a member of the union")
            fields: list[Any] = found[1](value)
            fields[0] = found[0]
            return fields

        def decode(fields: Any) -> Any:
            if type(fields) is not list or not fields or type(fields[0]) is not int:
                raise _Mismatch("expected an array that begins with a tag")
            found = by_tag.get(fields[0])
            if found is None:
                raise _Mismatch(f"unknown tag {fields[0]}")
            return found(fields)

        return encode, decode

    def _tuple(self, items: tuple[Any, ...], is_region: bool, *, depth: int) -> tuple[_Encode, _Decode]:
        if depth > DEPTH_MAX:
            raise TypeError(f"a tuple is nested deeper than {DEPTH_MAX}")
        if len(items) == 2 and items[1] is Ellipsis:
            encode, decode = self._hint(items[0], is_region, depth=depth)
            return (
                _each(encode, container=tuple, items_max=self.limits.items_max, make=list),
                _each(decode, container=list, items_max=self.limits.items_max, make=tuple),
            )
        built = [self._hint(item, is_region, depth=depth) for item in items]
        return (
            _fixed([encode for encode, _ in built], container=tuple, make=list),
            _fixed([decode for _, decode in built], container=list, make=tuple),
        )


def _each(convert: _Encode, *, container: Any, items_max: int, make: Any) -> _Encode:
    is_float = convert in (_encode_float, _decode_float)

    def convert_all(values: Any) -> Any:
        if type(values) is not container:
            raise _Mismatch(f"expected an array, got {type(values).__name__}")
        if len(values) > items_max:
            raise _Mismatch(f"{len(values)} items; the limit is {items_max}")
        # Finite floats have a finite sum, or else each is looked at.
        if is_float and set(map(type, values)) == {float} and math.isfinite(sum(values)):
            return make(values)
        try:
            return make(map(convert, values))
        except _Mismatch:
            _name_item(convert, values)

    return convert_all


def _name_item(convert: _Encode, values: Any) -> NoReturn:
    """Find the wrong item again, for its index: the right case must not pay for the counting."""
    for index, value in enumerate(values):
        try:
            convert(value)
        except _Mismatch as error:
            raise error.within(f"[{index}]") from None
    raise AssertionError("an item that was wrong is right now")


def _fixed(converters: list[_Encode], *, container: Any, make: Any) -> _Encode:
    def convert_all(values: Any) -> Any:
        if type(values) is not container or len(values) != len(converters):
            raise _Mismatch(f"expected an array of {len(converters)}, got {_shape(values, 0)}")
        converted = []
        for index, (convert, value) in enumerate(zip(converters, values, strict=True)):
            try:
                converted.append(convert(value))
            except _Mismatch as error:
                raise error.within(f"[{index}]") from None
        return make(converted)

    return convert_all


def _enum(cls: type[Enum]) -> tuple[_Encode, _Decode]:
    by_value = {member.value: member for member in cls}
    if not all(type(value) in (str, int) for value in by_value):
        raise TypeError(f"{cls.__name__}: only enums of str or int can be encoded")

    def encode(value: Any) -> Any:
        if type(value) is not cls:
            raise _Mismatch(f"expected {cls.__name__}, got {type(value).__name__}")
        return value.value

    def decode(value: Any) -> Any:
        # Only str and int are looked up: True would find 1, and a list can't be hashed.
        found = by_value.get(value) if type(value) in (str, int) else None
        if found is None:
            raise _Mismatch(f"not a value of {cls.__name__}: {_show(value)}")
        return found

    return encode, decode


def _encode_int(value: Any) -> int:
    if type(value) is not int:
        if isinstance(value, bool):
            raise _Mismatch("expected int, got bool")
        try:
            value = operator.index(value)  # numpy's integers are welcome
        except TypeError:
            raise _Mismatch(f"expected int, got {type(value).__name__}") from None
    return _decode_int(value)


def _decode_int(value: Any) -> int:
    if type(value) is not int:
        raise _Mismatch(f"expected int, got {type(value).__name__}")
    if not INT64_MIN <= value <= INT64_MAX:
        raise _Mismatch(f"{value} is outside of int64")
    return value


def _encode_float(value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
            raise _Mismatch(f"expected float, got {type(value).__name__}")
        value = float(value)  # numpy's floats, and ints that a sum began with
    return _decode_float(value)


def _decode_float(value: Any) -> float:
    if type(value) is not float:
        raise _Mismatch(f"expected float, got {type(value).__name__}")
    if not math.isfinite(value):
        raise _Mismatch(f"{value} is not finite")
    return value


def _check_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _Mismatch(f"expected bool, got {type(value).__name__}")
    return value


def _check_region(value: Any) -> str:
    if type(value) is not str:
        raise _Mismatch(f"expected str, got {type(value).__name__}")
    # The same few names again and again: what is remembered is bounded.
    if not _is_region(value):
        raise _Mismatch(f"{_show(value)} is no region name ([a-z0-9-], 1 to 63)")
    return value


_is_region: Final = functools.lru_cache(maxsize=256)(is_region_name)


def _str_check(bytes_max: int) -> _Decode:
    def check(value: Any) -> str:
        if type(value) is not str:
            raise _Mismatch(f"expected str, got {type(value).__name__}")
        # A character takes up to four bytes; only strings that could be too long are measured.
        if len(value) * 4 > bytes_max and len(value.encode("utf-8", "replace")) > bytes_max:
            raise _Mismatch(f"a string over {bytes_max} bytes")
        return value

    return check


def _bytes_check(bytes_max: int) -> _Decode:
    def check(value: Any) -> bytes:
        if type(value) is not bytes:
            raise _Mismatch(f"expected bytes, got {type(value).__name__}")
        if len(value) > bytes_max:
            raise _Mismatch(f"{len(value)} bytes; the limit is {bytes_max}")
        return value

    return check


def _shape(value: Any, skip: int) -> str:
    if type(value) in (list, tuple):
        return f"an array of {len(value) - skip}"
    return type(value).__name__


def _show(value: Any) -> str:
    """A value for an error message: short, and escaped, for it comes from outside."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


_CHECKS: Final[dict[_Encode, str]] = {
    **dict.fromkeys((_encode_int, _decode_int), f"type({{v}}) is int and {INT64_MIN} <= {{v}} <= {INT64_MAX}"),
    _check_bool: "({v} is True or {v} is False)",
}
"""Of the conversions that leave a right value as it is: the same check, written out where it is needed."""
