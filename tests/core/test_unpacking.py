"""Bytes are measured before they are unpacked: what msgpack would build of them is let through, and no more."""

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco_node.core.unpacking import unpack
from diloco_node.errors import ProtocolViolation

WIDE = {"depth_max": 64, "values_max": 10**6, "items_max": 10**6}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=20), max_leaves=60)


def depth_of(value: Any) -> int:
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def count_of(value: Any) -> int:
    return 1 + sum(map(count_of, value)) if isinstance(value, list) else 1


def longest_of(value: Any) -> int:
    return max(len(value), *map(longest_of, value), 0) if isinstance(value, list) else 0


def limits_of(value: Any) -> dict[str, int]:
    return {"depth_max": depth_of(value), "values_max": count_of(value), "items_max": longest_of(value)}


@given(values)
@example([1.5] * 100)
@example([[1.5] * 4, [2.5] * 3, [1.5, 1.5, 1.5, 0]])
@example(["x" * 70_000, b"y" * 70_000, "x" * 300, b"y" * 300, [None] * 70_000])
def test_what_is_within_the_limits_is_unpacked(value: Any) -> None:
    data = msgpack.packb(value)
    assert unpack(data, **limits_of(value)) == value
    assert unpack(memoryview(data), **WIDE) == value


@given(values)
@example([1.5] * 100)
def test_each_limit_holds_to_the_last_one(value: Any) -> None:
    data = msgpack.packb(value)
    right = limits_of(value)
    for name, limit in right.items():
        if isinstance(value, list) and limit:
            with pytest.raises(ProtocolViolation, match="too much"):
                unpack(data, **(right | {name: limit - 1}))


@given(values, st.binary(min_size=1, max_size=4))
def test_every_prefix_and_everything_longer_is_refused(value: Any, more: bytes) -> None:
    data = msgpack.packb(value)
    for length in range(min(len(data), 300)):
        with pytest.raises(ProtocolViolation):
            unpack(data[:length], **WIDE)
    with pytest.raises(ProtocolViolation):
        unpack(data + more, **WIDE)


@given(st.binary(max_size=60))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xca" + struct.pack(">f", 1.5))
@example(b"\x94" + b"\xcb" * 40)
@example(b"\x94" + b"\xcb" * 35)
def test_any_bytes_are_what_msgpack_makes_of_them_or_refused(data: bytes) -> None:
    try:
        result = unpack(data, **WIDE)
    except ProtocolViolation:
        return
    assert msgpack.packb(result, use_single_float=False) == msgpack.packb(msgpack.unpackb(data))


@pytest.mark.parametrize("data", [b"\x80", b"\x81\x01\x02", b"\xde\x00\x00", b"\xd4\x01\x00", b"\xc7\x00\x05", b"\xc1"])
def test_maps_and_ext_types_are_named(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="byte 1 begins a map or an ext type"):
        unpack(b"\x91" + data, **WIDE)
