"""The two halves of a session's connections over pipes: whatever the connections do, the same bytes arrive."""

import asyncio
import contextlib
import os
import random
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.messages import BulkHeader, MergedStripe, Payload
from diloco_node.core.types import Ballot
from diloco_node.errors import LinkLost, PayloadCorrupt, PeerError, ProtocolViolation
from diloco_node.transport import bundle
from diloco_node.transport.bundle import Bundle
from diloco_node.transport.inbound import DECODING_MAX, BulkInbound
from diloco_node.transport.kernel.wire_meter import WireMeter
from diloco_node.transport.outbound import TRANSFERS_WAITING_MAX, BulkOutbound
from diloco_node.transport.pacing.link_stats import BULK_CONNECTIONS_MAX
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.wire import envelope as e
from diloco_node.wire.message_tables import BULK_LANES
from tests.kit.connections_kit import HEADER, chunk
from tests.kit.transport_kit import DEADLINE_S, Recorder
from tests.kit.waiting import eventually

# ---- the two halves over pipes ---------------------------------------------------------------------------------------


class Pipe:
    """One connection: a write returns when there is room, and the test decides when a frame arrives."""

    def __init__(self, room: int) -> None:
        self.frames: deque[bytes] = deque()
        self.room = asyncio.Semaphore(room)
        self.written = 0
        self.fails: LinkLost | None = None

    async def write(self, frame: bytes) -> None:
        await self.room.acquire()
        if self.fails is not None:
            raise self.fails
        self.frames.append(frame)
        self.written += 1

    async def read(self) -> bytes:
        raise AssertionError("the test reads")

    def close(self, error: PeerError | None = None) -> None:
        """Nothing to close."""


class Halves:
    """A sender and a receiver joined by pipes; frames arrive in an order that a seed chooses."""

    def __init__(self, count: int, room: int, rng: random.Random, pool: ThreadPoolExecutor) -> None:
        self.rng = rng
        self.handler = Recorder()
        self.pipes = [Pipe(room) for _ in range(count)]
        self.pacer = Pacer(["b"], meter=WireMeter(), send=lambda _peer, _message: None)
        self.pacer.piece_bytes = lambda _peer: rng.randrange(1, 2_000)  # type: ignore[method-assign]
        self.out = BulkOutbound("b", self.pipes[0], pool, self.pacer)
        for pipe in self.pipes[1:]:
            self.out.add(pipe)
        self.inbound = BulkInbound("a", self.handler, pool)
        self.feeding: dict[int, asyncio.Task[None]] = {}

    async def deliver(self) -> None:
        """Frames arrive for ever; a connection whose frame waits delivers nothing more until that is taken."""
        while True:
            for index, task in list(self.feeding.items()):
                if task.done():
                    task.result()
                    del self.feeding[index]
            ready = [i for i, pipe in enumerate(self.pipes) if pipe.frames and i not in self.feeding]
            if ready:
                index = self.rng.choice(ready)
                pipe = self.pipes[index]
                pipe.room.release()
                self.feeding[index] = asyncio.create_task(self.inbound.feed(pipe.frames.popleft(), index))
            await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.out.run()), asyncio.create_task(self.deliver())]
        try:
            yield
        finally:
            for task in [*tasks, *self.feeding.values()]:
                task.cancel()
            await asyncio.gather(*tasks, *self.feeding.values(), return_exceptions=True)
            await self.inbound.close()
            self.pacer.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, BULK_CONNECTIONS_MAX), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_whatever_the_connections_do_the_same_bytes_arrive(count: int, room: int, seed: int, is_random: bool) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        halves = Halves(count, room, rng, ThreadPoolExecutor(1))
        handed_over: list[tuple[BulkHeader, bytes]] = []
        for number in range(rng.randrange(1, 8)):
            header = rng.choice(
                [Payload(number, 0, bytes(32)), MergedStripe(Ballot(1, number), 0, 0, 1, bytes(32), 0, 1)]
            )
            size = rng.choice([0, 1, rng.randrange(20_000)])
            handed_over.append((header, rng.randbytes(size) if is_random else bytes([number + 1]) * size))
        async with halves.running():
            work = [asyncio.create_task(halves.out.transfer(header, memoryview(body))) for header, body in handed_over]
            given_up = rng.choice([None, *work])
            if given_up is not None and rng.random() < 0.5:
                for _ in range(rng.randrange(60)):
                    await asyncio.sleep(0)
                given_up.cancel()
            async with asyncio.timeout(DEADLINE_S):
                results = await asyncio.gather(*work, return_exceptions=True)
                kept = [one for one, result in zip(handed_over, results, strict=True) if result is None]
                await eventually(lambda: not halves.inbound.is_open and not any(pipe.frames for pipe in halves.pipes))
        expected = dict(kept)
        got = {header: body for _, header, body, is_whole in halves.handler.closed if is_whole}
        assert {header: got.get(header) for header in expected} == expected
        assert all(body == dict(handed_over)[header] for header, body in got.items())
        assert len(halves.handler.closed) == len(halves.handler.opened)

    asyncio.run(run())


async def test_a_connection_that_stands_still_holds_up_what_it_has_and_no_more() -> None:
    halves = Halves(3, 4, random.Random(1), ThreadPoolExecutor(1))
    stuck = halves.pipes[2]
    stuck.room = asyncio.Semaphore(1)
    halves.pacer.piece_bytes = lambda _peer: 1_000  # type: ignore[method-assign]

    async def deliver_but_one() -> None:
        while True:
            for index, pipe in enumerate(halves.pipes[:2]):
                while pipe.frames:
                    pipe.room.release()
                    frame = pipe.frames.popleft()
                    halves.feeding[len(halves.feeding)] = asyncio.create_task(halves.inbound.feed(frame, index))
            await asyncio.sleep(0)

    running, delivering = asyncio.create_task(halves.out.run()), asyncio.create_task(deliver_but_one())
    moving = asyncio.create_task(halves.out.transfer(HEADER, memoryview(os.urandom(200_000))))
    # Begin, all chunks but two, and the end.
    await eventually(lambda: halves.pipes[0].written + halves.pipes[1].written == 200)
    assert stuck.written == 1
    await asyncio.wait_for(moving, DEADLINE_S)
    assert not halves.handler.closed, "the receiver waits for the chunk on the other connection"
    for task in (running, delivering, *halves.feeding.values()):
        task.cancel()
    await asyncio.gather(running, delivering, *halves.feeding.values(), return_exceptions=True)
    halves.pacer.close()


async def test_frames_take_turns_where_all_are_free_and_the_first_is_waited_for() -> None:
    pipes = [Pipe(100) for _ in range(3)]
    made = Bundle("b", pipes[0])
    for pipe in pipes[1:]:
        made.add(pipe)
    counts: list[int] = []
    for number in range(9):
        await made.until_free()
        await made.write(b"x", counts)
        await eventually(lambda number=number: sum(pipe.written for pipe in pipes) == number + 1)
    assert [pipe.written for pipe in pipes] == [3, 3, 3]
    assert counts == [3, 3, 3]
    pipes[0].room = asyncio.Semaphore(0)
    first, second = made.write_first(b"begin"), made.write_first(b"end")
    for number in range(4):
        await made.write(b"y", counts)
        await eventually(lambda number=number: sum(pipe.written for pipe in pipes) == 10 + number)
    assert [pipe.written for pipe in pipes] == [3, 5, 5]
    assert counts == [3, 5, 5]
    pipes[0].room.release()
    await asyncio.wait_for(first, DEADLINE_S)
    assert not second.done()
    pipes[0].room.release()
    await asyncio.wait_for(second, DEADLINE_S)
    assert list(pipes[0].frames)[-2:] == [b"begin", b"end"]


@pytest.mark.parametrize("count", [1, 2])
async def test_what_is_handed_to_the_first_connection_keeps_its_order(count: int) -> None:
    pipes = [Pipe(100) for _ in range(count)]
    made = Bundle("b", pipes[0])
    for pipe in pipes[1:]:
        pipe.room = asyncio.Semaphore(0)
        made.add(pipe)
        await made.write(b"stuck", [])  # the first is next, and the other one then never free
        await made.write(b"stuck", [])
    begin = made.write_first(b"begin")
    await made.write(b"chunk", [])
    end = made.write_first(b"end")
    await asyncio.wait_for(asyncio.gather(begin, end), DEADLINE_S)
    assert list(pipes[0].frames)[-3:] == [b"begin", b"chunk", b"end"]
    await made.close()


@pytest.mark.parametrize("count", [1, 2])
async def test_who_waits_for_a_connection_is_not_passed_over_by_who_has_it(count: int) -> None:
    pipes = [Pipe(0) for _ in range(count)]
    made = Bundle("b", pipes[0])
    for pipe in pipes[1:]:
        made.add(pipe)
    order: list[str] = []

    async def send(name: str, frames: int) -> None:
        for _ in range(frames):
            await made.until_free()
            await made.write(name.encode(), [])
            order.append(name)

    busy = asyncio.create_task(send("busy", 100))
    await asyncio.sleep(0)
    late = asyncio.create_task(send("late", 1))
    await asyncio.sleep(0)
    for _ in range(101):
        for pipe in pipes:
            pipe.room.release()
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(busy, late), DEADLINE_S)
    assert order.index("late") <= 2 * count
    await made.close()


async def test_a_cancelled_wait_for_a_connection_takes_none() -> None:
    pipe = Pipe(0)
    made = Bundle("b", pipe)
    writing = made.write_first(b"a")
    waiting = [asyncio.create_task(made.write(b"b", [])), asyncio.create_task(made.until_free())]
    await asyncio.sleep(0)
    waiting[0].cancel()
    pipe.room.release()  # the connection is given to the one that was cancelled in the same moment
    await writing
    await asyncio.wait_for(waiting[1], DEADLINE_S)
    pipe.room.release()
    await asyncio.wait_for(made.write_first(b"c"), DEADLINE_S)
    assert list(pipe.frames) == [b"a", b"c"]


async def test_a_write_that_fails_is_reported_and_stalls_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = [Pipe(10), Pipe(10)]
    made = Bundle("b", pipes[0])
    made.add(pipes[1])
    pipes[0].fails = LinkLost("gone")
    await made.write(b"x", [])
    with pytest.raises(LinkLost, match="gone"):
        await asyncio.wait_for(made.until_failed(), DEADLINE_S)
    monkeypatch.setattr(bundle, "WRITE_S", 0.01)
    for count in (1, 2):
        stalled = Bundle("b", Pipe(0))
        if count > 1:
            stalled.add(Pipe(0))
        writing = asyncio.create_task(stalled.write(b"x", []))
        with pytest.raises(LinkLost, match="b: too slow: it did not take 1 bytes"):
            await asyncio.wait_for(stalled.until_failed(), DEADLINE_S)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await stalled.close()


async def test_the_one_timer_goes_on_with_the_writes_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "WRITE_S", 0.02)
    pipe = Pipe(1)
    made = Bundle("b", pipe)
    failed = asyncio.create_task(made.until_failed())
    await made.write(b"x", [])
    await eventually(lambda: made._timer is None)
    assert not failed.done(), "it has returned"
    writing = made.write_first(b"xy")
    with pytest.raises(LinkLost, match="it did not take 2 bytes"):
        await asyncio.wait_for(failed, DEADLINE_S)
    assert not writing.done()
    await made.close()


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [
        pytest.param(2 * bundle.WRITE_S, 3, id="the loop stands still: the timer comes before what gRPC has"),
        pytest.param(1.0, 22, id="the peer reads what lies before it, 1 MiB, at a share of 50 kB/s"),
    ],
)
async def test_a_small_frame_waits_for_a_loop_that_stands_still_and_for_what_lies_before_it(
    monkeypatch: pytest.MonkeyPatch, step_s: float, steps: int
) -> None:
    loop, pipe, passed_s = asyncio.get_running_loop(), Pipe(1), [0.0]
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s[0])
    made = Bundle("b", pipe)
    await made.write(bytes(2**20), [])
    writing = asyncio.create_task(made.write(b"x", []))
    await asyncio.sleep(0)
    for _ in range(steps):
        passed_s[0] += step_s
        for _ in range(3):
            await asyncio.sleep(0)
        assert not made._failed.is_set()
    pipe.room.release()
    await writing
    await made.close()


async def test_a_transfer_whose_end_was_not_written_fails_with_the_link() -> None:
    pipe = Pipe(2)  # begin, one chunk
    pacer = Pacer(["b"], meter=WireMeter(), send=lambda _peer, _message: None)
    out = BulkOutbound("b", pipe, ThreadPoolExecutor(1), pacer)
    running = asyncio.create_task(out.run())
    moving = asyncio.create_task(out.transfer(HEADER, memoryview(b"x" * 100)))
    await eventually(lambda: out._ending)
    out.close("the link went down")
    with pytest.raises(LinkLost, match="the link went down"):
        await asyncio.wait_for(moving, DEADLINE_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    pacer.close()


async def test_no_more_chunks_of_a_peer_are_decoded_at_once_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from diloco_node.transport import inbound as inbound_module

    may_decode, working, decoding_max, lock = threading.Event(), [0], [0], threading.Lock()

    def decode(data: memoryview, target: memoryview) -> None:
        with lock:
            working[0] += 1
            decoding_max[0] = max(decoding_max[0], working[0])
        assert may_decode.wait(DEADLINE_S)
        with lock:
            working[0] -= 1
        if bytes(data) == b"bad":
            raise PayloadCorrupt("not zstd")
        target[:] = b"y" * target.nbytes

    monkeypatch.setattr(inbound_module, "decompress_chunk", decode)
    handler, pool = Recorder(), ThreadPoolExecutor(16)
    inbound = BulkInbound("a", handler, pool)
    size = 100_000
    await inbound.feed(e.encode_begin(0, HEADER, 12 * size))
    frames = [(n % 4, e.encode_chunk(0, n * size, size, b"z", is_compressed=True)) for n in range(12)]

    async def read(connection: int) -> None:
        for index, frame in frames:
            if index == connection:
                await inbound.feed(frame, connection)

    readers = [asyncio.create_task(read(connection)) for connection in range(4)]
    await eventually(lambda: working[0] == DECODING_MAX)
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(task.done() for task in readers[1:])
    may_decode.set()
    await asyncio.wait_for(asyncio.gather(*readers), DEADLINE_S)
    await asyncio.wait_for(inbound.feed(e.encode_end(0, [3, 3, 3, 3])), DEADLINE_S)
    assert decoding_max[0] == DECODING_MAX
    assert handler.closed == [("a", HEADER, b"y" * 12 * size, True)]
    await inbound.feed(e.encode_begin(1, HEADER, size))
    await inbound.feed(e.encode_chunk(1, 0, size, b"bad", is_compressed=True), 1)
    with pytest.raises(PayloadCorrupt):
        await asyncio.wait_for(inbound.feed(e.encode_end(1, [0, 1])), DEADLINE_S)
    await inbound.close()
    assert [whole for *_, whole in handler.closed] == [True, False]


async def test_an_aborted_transfer_gives_its_buffer_back_and_skips_what_still_comes() -> None:
    handler = Recorder()
    inbound = BulkInbound("a", handler, ThreadPoolExecutor(1))
    await inbound.feed(e.encode_begin(0, HEADER, 100))
    aborting = asyncio.create_task(inbound.feed(e.encode_abort(0, "", [0, 2])))
    await asyncio.sleep(0)
    assert handler.closed == [("a", HEADER, bytes(100), False)]
    assert not aborting.done()
    await inbound.feed(chunk(0, 0, 10), 1)
    assert inbound.is_open
    await inbound.feed(chunk(0, 10, 10), 1)
    await asyncio.wait_for(aborting, DEADLINE_S)
    assert not inbound.is_open
    with pytest.raises(ProtocolViolation, match="not open"):
        await inbound.feed(chunk(0, 20, 10), 1)
    assert len(handler.closed) == 1


async def test_a_transfer_that_is_cancelled_before_its_turn_is_not_read_any_more() -> None:
    halves = Halves(1, 0, random.Random(1), ThreadPoolExecutor(1))
    before = MergedStripe(Ballot(1, 1), 0, 0, 1, bytes(32), 0, 1)
    queue = halves.out.queues[BULK_LANES[type(HEADER)]]
    async with halves.running():
        running = asyncio.create_task(halves.out.transfer(before, memoryview(bytes(10))))
        body = memoryview(bytearray(100))
        moving = asyncio.create_task(halves.out.transfer(HEADER, body))
        await eventually(lambda: queue.current)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        body.release()
        halves.pipes[0].room.release()
        await asyncio.wait_for(running, DEADLINE_S)
        await eventually(lambda: queue.current is None)
        await asyncio.wait_for(halves.out.transfer(HEADER, memoryview(b"after")), DEADLINE_S)
        await eventually(lambda: len(halves.handler.closed) == 2)
    assert [body for *_, body, _ in halves.handler.closed] == [bytes(10), b"after"]


async def test_all_who_wait_for_a_place_hear_that_the_link_is_lost() -> None:
    halves = Halves(1, 0, random.Random(1), ThreadPoolExecutor(1))
    async with halves.running():
        count = 3 * TRANSFERS_WAITING_MAX
        work = [asyncio.create_task(halves.out.transfer(HEADER, memoryview(b"x"))) for _ in range(count)]
        await eventually(lambda: halves.out.queues[BULK_LANES[type(HEADER)]].waiting.full())
        halves.out.close("gone")
        done, waiting = await asyncio.wait(work, timeout=DEADLINE_S)
    assert not waiting
    assert {str(task.exception()) for task in done} == {"b: gone"}
