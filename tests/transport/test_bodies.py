"""Bodies of transfers on their way: whole, in order, or given back."""

import asyncio
import os
import random
import threading

import pytest

from diloco_node.core.messages import Payload, RequestVoteReply, State
from diloco_node.errors import LinkLost
from diloco_node.transport import bundle, inbound
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import (
    DEADLINE_S,
    Mesh,
    address,
    read_on,
    rogue,
)
from tests.kit.waiting import eventually


async def test_bodies_of_all_sizes_arrive_whole_and_in_order(mesh: Mesh) -> None:
    a, _, _, at_b = await mesh.pair()
    seed = 11
    print("seed", seed)
    rng = random.Random(seed)
    mib = 2**20
    sizes = [0, 1, 255, 64 * 1024, 64 * 1024 + 1, mib - 1, mib, mib + 1, 3 * mib + 12_345]
    bodies = [rng.randbytes(size) if index % 2 else bytes(size) for index, size in enumerate(sizes)]
    bodies.append(rng.randbytes(mib) + bytes(2 * mib) + rng.randbytes(77))
    work = [a.transfer("b", Payload(index, 0, bytes(32)), memoryview(body)) for index, body in enumerate(bodies)]
    await asyncio.wait_for(asyncio.gather(*work), DEADLINE_S)
    await at_b.until(lambda: len(at_b.closed) == len(bodies))
    assert [(header.fragment, whole) for _, header, _, whole in at_b.closed] == [(i, True) for i in range(len(bodies))]
    assert [body for _, _, body, _ in at_b.closed] == bodies


async def test_both_directions_carry_transfers_at_once(mesh: Mesh) -> None:
    a, at_a, b, at_b = await mesh.pair()
    body = os.urandom(8 * 2**20)
    moving = [
        a.transfer("b", Payload(0, 0, bytes(32)), memoryview(body)),
        b.transfer("a", State(0, 0, bytes(32)), memoryview(body)),
    ]
    await asyncio.wait_for(asyncio.gather(*moving), DEADLINE_S)
    await at_a.until(lambda: at_a.closed)
    await at_b.until(lambda: at_b.closed)
    assert at_a.closed == [("b", State(0, 0, bytes(32)), body, True)]
    assert at_b.closed == [("a", Payload(0, 0, bytes(32)), body, True)]


async def test_control_goes_on_while_the_receiver_can_not_decode(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    may_decode = threading.Event()
    original = inbound.decompress_chunk

    def wait_and_decompress(data: bytes | memoryview, target: memoryview) -> None:
        assert may_decode.wait(DEADLINE_S)
        original(data, target)

    monkeypatch.setattr(inbound, "decompress_chunk", wait_and_decompress)
    monkeypatch.setattr(inbound, "INLINE_BYTES_MAX", 0)
    monkeypatch.setattr(Pacer, "is_fast", lambda _self, _peer: False)  # else nothing is compressed on loopback
    b, at_b = await mesh.start("b", {"a": None}, executor=mesh.another_executor())
    a, at_a = await mesh.start("a", {"b": address(b)})
    await at_a.until(lambda: at_a.is_up.get("b"))
    moving = asyncio.create_task(a.transfer("b", Payload(0, 0, bytes(32)), memoryview(bytes(8 * 2**20))))
    await at_b.until(lambda: at_b.opened)
    for term in range(50):
        a.send("b", RequestVoteReply(term, True, True, b""))
        await at_b.until(lambda term=term: len(at_b.messages) == term + 1)
    assert not at_b.closed
    may_decode.set()
    await moving
    await at_b.until(lambda: at_b.closed)
    assert at_b.closed == [("a", Payload(0, 0, bytes(32)), bytes(8 * 2**20), True)]


async def test_a_buffer_is_given_back_only_when_no_thread_writes_into_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_decode = threading.Event()
    writing = threading.Event()

    def wait_and_write(data: bytes | memoryview, target: memoryview) -> None:
        writing.set()
        assert may_decode.wait(DEADLINE_S)
        target[:] = b"\xee" * target.nbytes

    monkeypatch.setattr(inbound, "decompress_chunk", wait_and_write)
    b, at_b = await mesh.start("b", {"a": None}, executor=mesh.another_executor())
    made = await rogue(mesh, b)
    await made[e.Lane.BULK].write(e.encode_begin(0, Payload(1, 2, bytes(32)), 2**20))
    await made[e.Lane.BULK].write(e.encode_chunk(0, 0, 2**20, b"zstd", is_compressed=True))
    await eventually(writing.is_set)
    await made[e.Lane.BULK].write(b"garbage")
    with pytest.raises(LinkLost, match="frame kind 103"):  # the session is over, but for the thread
        await read_on(made[e.Lane.CONTROL])
    assert not at_b.closed
    may_decode.set()
    await at_b.until(lambda: at_b.closed)
    assert at_b.closed == [("a", Payload(1, 2, bytes(32)), b"\xee" * 2**20, False)]
    for stream in made.values():
        await stream.aclose()


async def test_a_typed_view_is_sent_as_its_bytes(mesh: Mesh) -> None:
    a, _, _, at_b = await mesh.pair()
    view = memoryview(bytearray(b"\x01\x02\x03\x04" * 2)).cast("I")
    await a.transfer("b", Payload(0, 0, bytes(32)), view)
    await at_b.until(lambda: at_b.closed)
    assert at_b.closed[0][2] == b"\x01\x02\x03\x04" * 2


async def test_a_transfer_that_is_not_wanted_is_skipped(mesh: Mesh) -> None:
    a, _, _, at_b = await mesh.pair()
    at_b.refuses.add(State)
    await a.transfer("b", State(0, 0, bytes(32)), memoryview(os.urandom(3 * 2**20)))
    await a.transfer("b", Payload(1, 0, bytes(32)), memoryview(b"wanted"))
    await at_b.until(lambda: at_b.closed)
    assert at_b.closed == [("a", Payload(1, 0, bytes(32)), b"wanted", True)]
    assert [type(header) for _, header, _ in at_b.opened] == [State, Payload]


async def test_a_cancelled_transfer_is_reported_as_broken_and_the_link_goes_on(mesh: Mesh) -> None:
    a, _, _, at_b = await mesh.pair()
    task = asyncio.create_task(a.transfer("b", Payload(0, 0, bytes(32)), memoryview(bytes(64 * 2**20))))
    await at_b.until(lambda: at_b.opened)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await a.transfer("b", Payload(1, 0, bytes(32)), memoryview(b"next"))
    await at_b.until(lambda: len(at_b.closed) == 2)
    assert [(header.fragment, whole) for _, header, _, whole in at_b.closed] == [(0, False), (1, True)]
    assert at_b.changes == [("a", True)]


async def test_transfers_fail_with_link_lost_when_the_link_dies_and_buffers_are_given_back(mesh: Mesh) -> None:
    a, at_a, b, at_b = await mesh.pair()
    body = memoryview(os.urandom(2**20) * 128)
    tasks = [asyncio.create_task(a.transfer("b", Payload(index, 0, bytes(32)), body)) for index in range(3)]
    await at_b.until(lambda: at_b.opened)
    await b.stop()
    for task in tasks:
        with pytest.raises(LinkLost, match="b"):
            await task
    assert [whole for _, _, _, whole in at_b.closed] == [False]
    assert at_b.changes[-1] == ("a", False)
    await at_a.until(lambda: not at_a.is_up["b"])
    with pytest.raises(LinkLost, match="b: the link is down"):
        await a.transfer("b", Payload(9, 0, bytes(32)), memoryview(b"x"))


async def test_a_peer_that_does_not_read_is_too_slow(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "WRITE_S", 0.3)
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    with pytest.raises(LinkLost, match="too slow"):
        await b.transfer("a", Payload(0, 0, bytes(32)), memoryview(os.urandom(2**20) * 64))
    await at_b.until(lambda: not at_b.is_up["a"])
    assert "too slow" in b.peer_status()["a"].error
    for stream in made.values():
        await stream.aclose()
