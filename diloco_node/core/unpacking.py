"""msgpack from outside: measured before anything is built of it.

msgpack's own limits are not enough. It knows no depth, makes a list of the claimed length before the items are there
(60 kB of nested claims took 80 MB), and a byte can be a whole list. So the bytes are walked once without building
anything: how deep, how many values, nothing but arrays and scalars, and every claim covered by bytes that are there.
"""

from __future__ import annotations

from typing import Any, Final

import msgpack

from diloco_node.errors import ProtocolViolation

SHORT_BYTES: Final = 512
"""Lists in each other that each claim as many items as there are bytes: 700 kB, for a moment."""

_FLOAT64: Final = b"\xcb"
_FLOAT64_BYTES: Final = 9
_RUN_MIN: Final = 4


def _fixed_sizes() -> tuple[int, ...]:
    """By the first byte of a value: how long the whole of it is, 0 where that is not said by that byte alone."""
    sizes = [0] * 256
    for kind in (*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)):
        sizes[kind] = 1
    for kind in range(0xA0, 0xC0):  # a short string
        sizes[kind] = 1 + (kind & 0x1F)
    for kind, size in ((0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9), (0xCA, 5), (0xCB, 9)):
        sizes[kind] = size
    for kind, size in ((0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9)):
        sizes[kind] = size
    return tuple(sizes)


_SIZES: Final = _fixed_sizes()
_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes and longer strings: the size of the length that follows."""

_COUNTS: Final = {0xDC: 2, 0xDD: 4}
"""Longer arrays: the size of the count that follows."""


def unpack(data: bytes | memoryview, *, depth_max: int, values_max: int, items_max: int) -> Any:
    """The value that the bytes hold, arrays as lists; memory is spent only for what is within the limits.

    depth_max: arrays within each other. values_max: arrays and scalars altogether. items_max: of one array.

    Raises ProtocolViolation: over a limit, a map or an ext type, text that is not UTF-8, or not exactly one whole
    value.
    """
    whole = bytes(data)
    check_bounds(whole, depth_max=depth_max, values_max=values_max, items_max=items_max)
    return _unpacked(whole)


def unpack_short(data: bytes | memoryview) -> Any:
    """The value that at most `SHORT_BYTES` hold, for who looks at the type and length of everything in it.

    It is not measured before: the walk would take longer than the rest, and no claim takes more than it holds bytes.

    Raises ProtocolViolation: text that is not UTF-8, or not exactly one whole value. An empty map or ext type passes.
    """
    assert len(data) <= SHORT_BYTES, len(data)
    return _unpacked(bytes(data))


def _unpacked(whole: bytes) -> Any:
    try:
        return msgpack.unpackb(whole, use_list=True, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise ProtocolViolation(f"not a well-formed message: {type(error).__name__}: {str(error)[:200]}") from None


def check_bounds(data: bytes, *, depth_max: int, values_max: int, items_max: int) -> None:
    """Check that `unpack` may unpack this. Arguments and errors as there."""
    at, values, values_left = 0, 1, 1
    above: list[int] = []
    size_of, end = _SIZES, len(data)
    while values_left or above:
        if not values_left:
            values_left = above.pop()
            continue
        values_left -= 1
        if at >= end:
            raise ProtocolViolation(f"cut short: a value is missing after {end} bytes")
        kind = data[at]
        size = size_of[kind]
        if size:
            at += size
        elif kind in _LENGTHS:
            width = _LENGTHS[kind]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big")
        else:
            at, count = (at + 1, kind & 0x0F) if 0x90 <= kind <= 0x9F else _long_array(data, at, kind)
            values += count
            if values > values_max or count > min(items_max, end - at) or len(above) >= depth_max:
                place = f"at depth {len(above) + 1}, after {values - count} values"
                raise ProtocolViolation(f"an array of {count} items in {end - at} bytes, {place}: too much")
            # The long vectors are floats: looked at in one go.
            if count >= _RUN_MIN and data[at : at + count * _FLOAT64_BYTES : _FLOAT64_BYTES] == _FLOAT64 * count:
                at += count * _FLOAT64_BYTES
                count = 0
            above.append(values_left)
            values_left = count
    if at != end:
        raise ProtocolViolation(f"{end} bytes where one value takes {at}")


def _long_array(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """Where the items of the array begin, and how many it claims. Raises ProtocolViolation: it is no array."""
    width = _COUNTS.get(kind)
    if width is None:
        raise ProtocolViolation(f"byte {at} begins a map or an ext type (0x{kind:02x}): arrays and scalars only")
    return at + 1 + width, int.from_bytes(data[at + 1 : at + 1 + width], "big")
