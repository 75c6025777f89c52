"""Frames that a member of the run makes to do harm, over the real listener: the link is dropped, and nothing else."""

import asyncio
import os
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zstandard
from structlog.testing import capture_logs

from diloco_node.codec.payload import compress_chunk
from diloco_node.core.messages import Message, Payload, ReductionReported, Refused
from diloco_node.core.types import Ballot
from diloco_node.errors import LinkLost
from diloco_node.transport.streams import DialedStream
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from tests.kit.hostile import DOCUMENTS
from tests.kit.transport_kit import Mesh, Recorder, address, rogue
from tests.kit.waiting import eventually

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
    """The good frame, but for the window that it asks for."""
    assert GOOD[4] == 0x64, "our frame is a single segment: the window descriptor is left out"
    return GOOD[:4] + bytes([0x44, (exponent - 10) << 3]) + GOOD[5:]


def flipped(body: bytes) -> bytes:
    out = bytearray(body)
    out[len(out) // 2] ^= 4
    return bytes(out)


GOOD = bytes(compress_chunk(memoryview(bytes(range(256)) * (SIZE // 256)))[1])
CONTROL = b"\x02"
"""A control frame that holds a message; its msgpack follows."""

REFUSED = Refused(1, 77, "gone")
REPORTED = ReductionReported(Ballot(1, 2), 0, (0.5,), ((0.25,),), bytes(32))
VERSION, REASON, NORM = b"M", b"\xa4gone", b"\xcb" + struct.pack(">d", 0.5)
LONG_TEXT = b"\xdb" + struct.pack(">I", 3 * 2**20) + bytes(3 * 2**20)
TERABYTE = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 2**40)
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
PICKLE = pickle.dumps(os.system, 5)
NAN = b"\xcb\x7f\xf8" + bytes(6)


def control(frame: bytes) -> list[tuple[e.Lane, bytes]]:
    return [(e.Lane.CONTROL, frame)]


def changed(message: Message, field: bytes, value: bytes) -> list[tuple[e.Lane, bytes]]:
    """A message that is right but for one field."""
    before, after = e.encode_control(message).split(field)
    return control(before + value + after)


ATTACKS = {
    "a bomb of 128 MiB": (chunk(zstd(bytes(2**27))), "declares 134217728 bytes"),
    "13 bytes that declare a terabyte": (chunk(TERABYTE), "declares 1099511627776 bytes"),
    "a window of 128 MiB": (chunk(window_log(27)), "window_too_large"),
    "two frames": (chunk(zstd(bytes(SIZE)) + zstd(bytes(SIZE))), "trailing_data"),
    "a skippable frame in front": (chunk(SKIPPABLE + zstd(bytes(SIZE))), "declares 4 bytes"),
    "no checksum": (chunk(zstd(bytes(SIZE), write_checksum=False)), "checksum: the frame has none"),
    "a flipped bit": (chunk(flipped(GOOD)), "doesn't match checksum"),
    "a truncated frame": (chunk(GOOD[:-5]), "did not decompress full frame"),
    "a pickle": (chunk(PICKLE), "do not begin with a zstd frame"),
    "an array of 2^32 - 1": (control(CONTROL + b"\xdd\xff\xff\xff\xff"), "4294967295 exceeds max_array_len"),
    "100,000 arrays in each other": (control(CONTROL + b"\x91" * 100_000), "at depth 9"),
    "a map": (changed(REFUSED, VERSION, b"\x82\x01\x01\x01\x02"), "exceeds max_map_len"),
    "an ext type": (changed(REFUSED, VERSION, b"\xc7\x02\x05ab"), "exceeds max_ext_len"),
    "a text of 3 MiB": (changed(REFUSED, REASON, LONG_TEXT), "Refused.reason: a string over 1024 bytes"),
    "a pickle as a message": (control(PICKLE), "frame kind 128"),
    "a NaN where a number is": (changed(REPORTED, NORM, NAN), "squared_norms[0]: nan is not finite"),
}
"""Frames, and what is said of them."""

MUTANTS = 200
REPLAYS = 500
CANCELLED = 100

CLASSES_FOUND: list[str] = []
"""What any pickle that was read in this process has asked for."""


def _watch_pickles(event: str, given: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        CLASSES_FOUND.append(f"{given}")


sys.addaudithook(_watch_pickles)  # for good: no hook can be taken away


@pytest.fixture(autouse=True)
def no_pickle() -> Iterator[None]:
    """Whatever came, nobody took it for a pickle."""
    CLASSES_FOUND.clear()
    yield
    assert CLASSES_FOUND == []


def test_a_pickle_that_is_read_would_be_seen() -> None:
    assert pickle.loads(PICKLE) is os.system
    assert CLASSES_FOUND == ["('posix', 'system')"]
    CLASSES_FOUND.clear()


@pytest.mark.parametrize(("frames", "reason"), ATTACKS.values(), ids=list(ATTACKS))
async def test_it_costs_the_sender_its_link_and_nobody_else(
    mesh: Mesh, frames: list[tuple[e.Lane, bytes]], reason: str
) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    with capture_logs() as lines:
        with suppress(LinkLost):  # the first frame may cost the link before the last one is written
            for lane, frame in frames:
                await made[lane].write(frame)
        await at_b.until(lambda: not at_b.is_up["a"])
    [said] = [line["error"] for line in lines if line["event"] == "rejected"]
    assert reason in said
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
    for lane, frame in [*chunk(GOOD), *changed(REFUSED, VERSION, VERSION), *changed(REPORTED, NORM, NORM)]:
        await made[lane].write(frame)
    await at_b.until(lambda: at_b.closed and len(at_b.messages) == 2)
    assert at_b.messages == [("a", REFUSED), ("a", REPORTED)]
    assert at_b.closed[0][2:] == (bytes(range(256)) * (SIZE // 256), True)
    for stream in made.values():
        await stream.aclose()


class Breaker:
    """Region a, which sends what costs it its link, and comes again; c is linked with b all the time."""

    def __init__(self, mesh: Mesh, b: GrpcTransport, at_b: Recorder) -> None:
        self.mesh, self.b, self.at_b = mesh, b, at_b
        self.made: dict[e.Lane, DialedStream] = {}
        self.refused = 0

    async def send(self, lane: e.Lane, frame: bytes) -> None:
        """Over the link that there is, or a new one."""
        if not self.at_b.is_up.get("a"):
            await self.close()
            self.made = await rogue(self.mesh, self.b)
            await self.at_b.until(lambda: self.at_b.is_up.get("a"))
        with suppress(LinkLost):
            await self.made[lane].write(frame)

    async def until_refused(self) -> None:
        """The link is gone, and nobody is shut out for it: the next frame is to come over the listener, too."""
        await self.at_b.until(lambda: not self.at_b.is_up["a"])
        self.refused += 1
        self.b.lift_quarantine("a")

    async def close(self) -> None:
        """Of what is left."""
        for stream in self.made.values():
            await stream.aclose()


async def test_every_hostile_document_costs_the_link_over_the_listener(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    breaker = Breaker(mesh, b, at_b)
    for name, document in DOCUMENTS.items():
        await breaker.send(e.Lane.CONTROL, CONTROL + document)
        await breaker.until_refused()
        assert b.rejections == {("a", "protocol"): breaker.refused}, name
    await breaker.close()
    assert breaker.refused == len(DOCUMENTS) >= 50
    assert at_b.messages == []
    assert at_c.changes == [("b", True)]


async def test_mutated_messages_are_refused_or_taken_and_nothing_else(mesh: Mesh) -> None:
    seed = 12
    print("seed", seed)
    rng = random.Random(seed)
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    breaker = Breaker(mesh, b, at_b)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    right = [e.encode_control(REFUSED), e.encode_control(REPORTED)]
    for number in range(MUTANTS):
        frame = bytearray(right[number % 2])
        for _ in range(1 + number % 4):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        taken = len(at_b.messages)
        await breaker.send(e.Lane.CONTROL, bytes(frame))
        await at_b.until(lambda taken=taken: not at_b.is_up["a"] or len(at_b.messages) > taken)
        if not at_b.is_up["a"]:
            await breaker.until_refused()
    await breaker.close()
    assert breaker.refused + len(at_b.messages) == MUTANTS
    assert sum(b.rejections.values()) == breaker.refused > MUTANTS // 4
    assert {peer for peer, _ in b.rejections} == {"a"}
    assert faults == []
    assert at_c.changes == [("b", True)]


async def test_a_captured_message_is_handed_on_as_often_as_it_comes_and_is_no_offence(mesh: Mesh) -> None:
    """That a contribution counts once is the core's part: tests/core/rounds/test_history.py."""
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    frame = e.encode_control(REPORTED)
    for _ in range(REPLAYS):
        await made[e.Lane.CONTROL].write(frame)
    await at_b.until(lambda: len(at_b.messages) == REPLAYS)
    assert at_b.messages == [("a", REPORTED)] * REPLAYS
    assert at_b.changes == [("a", True)]
    assert b.rejections == {}
    for stream in made.values():
        await stream.aclose()


async def test_uploads_that_are_cancelled_leave_no_task_and_no_buffer(mesh: Mesh) -> None:
    """Each in the middle of a transfer, as the handler of its call waits for more."""
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    _, at_c = await mesh.start("c", {"b": address(b)})
    await at_c.until(lambda: at_c.is_up.get("b"))
    breaker = Breaker(mesh, b, at_b)
    for number in range(1, CANCELLED + 1):
        await breaker.send(e.Lane.BULK, BEGIN)
        await breaker.send(e.Lane.BULK, e.encode_chunk(0, 0, SIZE, GOOD, is_compressed=True))
        await at_b.until(lambda number=number: len(at_b.opened) == number)
        await breaker.close()
        await at_b.until(lambda: not at_b.is_up["a"])
    assert [whole for *_, whole in at_b.closed] == [False] * CANCELLED, "each buffer is given back"
    await eventually(lambda: not [name for name in task_names() if name.endswith(" a")])
    await eventually(lambda: sum(name.startswith("HandleExceptions") for name in task_names()) == len(e.Lane))
    assert at_c.changes == [("b", True)]
    assert b.rejections == {}


def task_names() -> list[str]:
    """Tasks of a link have the peer's name at their end; those of gRPC for a call on the server begin as it does."""
    return [task.get_name() for task in asyncio.all_tasks()]
