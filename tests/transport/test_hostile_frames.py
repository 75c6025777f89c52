"""Frames that a member of the run makes to do harm, over the real listener: the link is dropped, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zstandard

from diloco_node.codec.payload import compress_chunk
from diloco_node.core.messages import Payload
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import Mesh, address, meshed, rogue

SIZE = 2**16
BEGIN = e.encode_begin(0, Payload(1, 2, bytes(32)), SIZE)


def zstd(body: bytes, **settings: int | bool) -> bytes:
    return zstandard.ZstdCompressor(**{"write_checksum": True, **settings}).compress(body)  # type: ignore[arg-type]


def chunk(body: bytes) -> list[tuple[e.Lane, bytes]]:
    """A transfer of SIZE bytes that begins and ends with this compressed chunk."""
    return [
        (e.Lane.BULK, BEGIN),
        (e.Lane.BULK, e.encode_chunk(0, 0, SIZE, body, is_compressed=True)),
        (e.Lane.BULK, e.encode_end(0, [1])),
    ]


def window_log(exponent: int) -> bytes:
    """A frame that is right, but for the window that it asks for."""
    parameters = zstandard.ZstdCompressionParameters(window_log=exponent, write_checksum=True, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(bytes(SIZE)) + stream.flush()


def flipped(body: bytes) -> bytes:
    out = bytearray(body)
    out[len(out) // 2] ^= 4
    return bytes(out)


GOOD = bytes(compress_chunk(memoryview(bytes(range(256)) * (SIZE // 256)))[1])
CONTROL = b"\x02"
"""A control frame that holds a message; its msgpack follows."""

ATTACKS = {
    "a bomb of 128 MiB": chunk(zstd(bytes(2**27))),
    "13 bytes that declare a terabyte": chunk(bytes.fromhex("28b52ffde0") + struct.pack("<Q", 2**40)),
    "a window of 128 MiB": chunk(window_log(27)),
    "two frames": chunk(zstd(bytes(SIZE)) + zstd(bytes(SIZE))),
    "a skippable frame in front": chunk(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd(bytes(SIZE))),
    "no checksum": chunk(zstd(bytes(SIZE), write_checksum=False)),
    "a flipped bit": chunk(flipped(GOOD)),
    "a truncated frame": chunk(GOOD[:-5]),
    "a pickle": chunk(b"\x80\x05\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."),
    "an array of 2^32 - 1": [(e.Lane.CONTROL, CONTROL + b"\xdd\xff\xff\xff\xff")],
    "100,000 arrays in each other": [(e.Lane.CONTROL, CONTROL + b"\x91" * 100_000)],
    "a map": [(e.Lane.CONTROL, CONTROL + b"\x82\x01\x01\x01\x02")],
    "an ext type": [(e.Lane.CONTROL, CONTROL + b"\x92\x03\xc7\x02\x05ab")],
    "a text of 3 MiB": [(e.Lane.CONTROL, CONTROL + b"\x92\x03\xdb" + struct.pack(">I", 3 * 2**20) + bytes(3 * 2**20))],
    "a pickle as a message": [(e.Lane.CONTROL, b"\x80\x05\x95\x1d\x00\x00\x00")],
    "a NaN where a number is": [(e.Lane.CONTROL, CONTROL + b"\x92\x03\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00")],
}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with meshed(tmp_path) as made:
        yield made


@pytest.mark.parametrize("frames", ATTACKS.values(), ids=list(ATTACKS))
async def test_it_costs_the_sender_its_link_and_nobody_else(mesh: Mesh, frames: list[tuple[e.Lane, bytes]]) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    for lane, frame in frames:
        await made[lane].write(frame)
    await at_b.until(lambda: not at_b.is_up["a"])
    assert sum(b.rejections.values()) == 1
    assert set(b.rejections) <= {("a", "protocol"), ("a", "corrupt")}
    assert all(not whole for *_, whole in at_b.closed), "none of it was handed on"
    assert at_b.messages == []
    assert at_b.changes.count(("c", False)) == 0
    for stream in made.values():
        await stream.aclose()


async def test_the_same_frames_without_the_fault_are_taken(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    for lane, frame in chunk(GOOD):
        await made[lane].write(frame)
    await at_b.until(lambda: at_b.closed)
    assert at_b.closed[0][2:] == (bytes(range(256)) * (SIZE // 256), True)
    for stream in made.values():
        await stream.aclose()
