"""Strict msgpack for messages: an array `[tag, field, field, ...]`, built and checked by `core.array_codec`.

There are no maps and no ext types. Decoding raises `ProtocolViolation` (a peer's fault); encoding raises `TypeError` or
`ValueError` (ours).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar

import msgpack

from diloco_node.core.array_codec import DEPTH_MAX, ArrayCodecs
from diloco_node.core.shapes import Bounds, Check, OutOfBounds
from diloco_node.core.unpacking import SHORT_BYTES, unpack, unpack_short
from diloco_node.errors import ProtocolViolation

VALUES_MIN: Final = 256
"""So many arrays and scalars a message may hold however short it has to be."""

ITEMS_MAX: Final = 65_536
"""Length of one array, before anything is built of it."""

T = TypeVar("T")


class Schema(Generic[T]):
    """A union of messages with one numeric tag each.

    Args:
        table: tag -> dataclass, for messages. Tags are part of the protocol: never reuse one.
        inner: the same for members of unions inside of messages. Tags may not overlap with those of `table`.
        bounds: of every field, as `core.shapes.bound_of` finds them. bytes_max: of a message, encoded.

    Raises TypeError: a hint that can't be encoded; a field without a bound.
    ValueError: a type or a tag that occurs twice.
    """

    def __init__(
        self,
        table: Mapping[int, type],
        *,
        bounds: Bounds,
        inner: Mapping[int, type] | None = None,
        bytes_max: int = 4 * 2**20,
    ) -> None:
        self._bytes_max = bytes_max
        # The longest values are floats, of more than 8 bytes. So decoding takes at most ten times the message's limit.
        self._values_max = max(VALUES_MIN, bytes_max // 8)
        tags: dict[type, int] = {}
        for tag, cls in [*table.items(), *(inner or {}).items()]:
            if cls in tags or tag in tags.values():
                raise ValueError(f"{cls.__name__} or its tag {tag} is in the schema twice")
            tags[cls] = tag
        codecs = ArrayCodecs(bounds, tags, is_lenient=True)
        self._encoders: dict[type, tuple[int, Check]] = {}
        self._decoders: dict[int, tuple[str, Check]] = {}
        for tag, cls in table.items():
            encode, decode = codecs.codec(cls, skip=1)
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
        if len(data) > self._bytes_max:
            raise ValueError(f"{type(message).__name__} takes {len(data)} bytes, the limit is {self._bytes_max}")
        return data

    def decode(self, data: bytes | memoryview) -> T:
        """The message that the bytes hold. Raises ProtocolViolation: not just one well-formed message; which field."""
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
        if len(data) > self._bytes_max:
            raise ProtocolViolation(f"a message of {len(data)} bytes; the limit is {self._bytes_max}")
        if len(data) <= SHORT_BYTES:
            return unpack_short(data)
        return unpack(data, depth_max=DEPTH_MAX, values_max=self._values_max, items_max=ITEMS_MAX)
