"""Several bulk connections in one session: over real gRPC on loopback, and both halves over pipes of a test's own."""

import asyncio
import contextlib
import dataclasses
import os
import random
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.messages import BulkHeader, MergedStripe, Payload, RequestVoteReply, State
from diloco_node.core.types import Ballot, RateLimits
from diloco_node.errors import ConfigError, LinkLost, PayloadCorrupt, PeerError, ProtocolViolation
from diloco_node.transport import bundle
from diloco_node.transport.bundle import Bundle
from diloco_node.transport.connections import BULK_CONNECTIONS_MAX
from diloco_node.transport.inbound import DECODING_MAX, BulkInbound
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.transport.kernel.wire_meter import WireMeter
from diloco_node.transport.outbound import TRANSFERS_WAITING_MAX, BulkOutbound
from diloco_node.transport.pacing import link_stats
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.streams import DialedStream
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from diloco_node.wire.envelope import TRANSFER_CONNECTIONS_MAX
from diloco_node.wire.measure_messages import Probe
from diloco_node.wire.message_tables import BULK_LANES, TransferHeader
from tests.kit.transport_kit import DEADLINE_S, FAST, Mesh, Recorder, address, connect_as, hello_of, read_on, rogue
from tests.kit.waiting import eventually

MIB = 2**20
HEADER = Payload(1, 2, bytes(32))


async def wide_pair(mesh: Mesh, count: int) -> tuple[GrpcTransport, Recorder, GrpcTransport, Recorder]:
    """a and b with so many bulk connections on both sides."""
    a, at_a, b, at_b = await mesh.pair(connections=count)
    await eventually(lambda: a.peer_status()["b"].connections == count)
    await eventually(lambda: b.peer_status()["a"].connections == count)
    return a, at_a, b, at_b


# ---- over real connections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, BULK_CONNECTIONS_MAX + 1))
async def test_bodies_of_all_sizes_and_lanes_arrive_whole_in_both_directions(mesh: Mesh, count: int) -> None:
    a, at_a, b, at_b = await wide_pair(mesh, count)
    seed = 5
    print("seed", seed)
    rng = random.Random(seed)
    sizes = [0, 1, 70_000, MIB, 3 * MIB + 12_345, 9 * MIB + 1]
    bodies = [rng.randbytes(size) if index % 2 else rng.randbytes(1) * size for index, size in enumerate(sizes)]
    headers: list[TransferHeader] = [MergedStripe(Ballot(1, n), 0, 0, 1, bytes(32), 0, 1) for n in range(3)]
    headers += [Payload(n, 0, bytes(32)) for n in range(2)]
    headers.append(Probe(1))
    expected = list(zip(headers, bodies, strict=True))
    work = [a.transfer("b", header, memoryview(body)) for header, body in expected]
    work += [b.transfer("a", header, memoryview(body)) for header, body in expected]
    await asyncio.wait_for(asyncio.gather(*work), DEADLINE_S)
    for handler, peer in ((at_b, "a"), (at_a, "b")):
        await handler.until(lambda handler=handler: len(handler.closed) == len(expected))
        got = {header: (who, body, whole) for who, header, body, whole in handler.closed}
        assert got == {header: (peer, body, True) for header, body in expected}
        stripes = [header for _, header, _, _ in handler.closed if isinstance(header, MergedStripe)]
        assert stripes == headers[:3], "those of one lane in their order"
    assert at_a.changes == [("b", True)]
    assert at_b.changes == [("a", True)]


async def test_every_connection_carries_its_part(mesh: Mesh) -> None:
    a, _, _, at_b = await wide_pair(mesh, 3)
    body = os.urandom(24 * MIB)
    await a.transfer("b", HEADER, memoryview(body))
    await at_b.until(lambda: at_b.closed)
    assert at_b.closed == [("a", HEADER, body, True)]
    a.meter.sample()
    sent = sorted(counters.bytes_sent for owner, counters in a.meter._live.values() if owner == "b")
    assert len(sent) == 4
    assert sent[0] < MIB, "control"
    assert min(sent[1:]) > MIB


async def test_near_links_stay_with_one(mesh: Mesh) -> None:
    a, _, _, at_b = await mesh.pair()
    await a.transfer("b", HEADER, memoryview(os.urandom(32 * MIB)))
    await at_b.until(lambda: at_b.closed)
    await eventually(lambda: a.pacer.link_watch("b").rtt_min_ns)
    assert a.pacer.target_connections("b") == 1
    assert a.peer_status()["b"].connections == 1


async def test_the_number_follows_what_the_link_is_worth_and_never_falls(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_stats, "buffer_bytes", lambda: 8 * MIB)
    a, at_a, _, at_b = await mesh.pair()
    state = a.pacer.link_watch("b")
    a.pacer.set_plan(BudgetPlan(RateLimits(egress=10**9, ingress=10**6)))
    take, state.take = state.take, lambda *_, **__: None  # type: ignore[method-assign]
    state.rtt_min_ns = 12_000_000
    await eventually(lambda: a.peer_status()["b"].connections == 3)
    state.rtt_min_ns = 6_000_000
    assert a.pacer.target_connections("b") == 2
    state.take = take  # type: ignore[method-assign]
    await a.transfer("b", HEADER, memoryview(b"x" * MIB))
    await at_b.until(lambda: at_b.closed)
    assert a.peer_status()["b"].connections == 3
    a.links["b"].drop("a test wants it")
    await at_a.until(lambda: at_a.changes[-1] == ("b", True) and len(at_a.changes) == 3)
    assert a.peer_status()["b"].connections < 3, "a new session begins with one"


async def test_a_long_lossy_link_gets_all_connections_if_congestion_control_goes_by_loss(mesh: Mesh) -> None:
    a, _, _, _ = await mesh.pair()
    a.pacer.link_watch("b").rtt_min_ns = 40_000_000
    a.meter.tcp = lambda _peer: TcpCounters(8 * MIB, 8 * MIB // 100, 40_000_000)  # type: ignore[method-assign]
    assert a.pacer.target_connections("b") == 1
    a.meter.goes_by_loss = True
    assert a.pacer.target_connections("b") == BULK_CONNECTIONS_MAX
    a.meter.tcp = lambda _peer: TcpCounters(4 * MIB - 1, MIB, 40_000_000)  # type: ignore[method-assign]
    assert a.pacer.target_connections("b") == 1, "too little was sent to tell"


async def test_a_cancelled_transfer_leaves_no_chunk_for_the_next(mesh: Mesh) -> None:
    a, _, _, at_b = await wide_pair(mesh, 3)
    for number in range(5):
        before = len(at_b.closed)
        task = asyncio.create_task(a.transfer("b", Payload(number, 0, bytes(32)), memoryview(os.urandom(MIB) * 48)))
        await at_b.until(lambda number=number: at_b.opened and at_b.opened[-1][1] == Payload(number, 0, bytes(32)))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        body = os.urandom(3 * MIB)
        await a.transfer("b", State(number, 0, bytes(32)), memoryview(body))
        await at_b.until(lambda before=before: len(at_b.closed) == before + 2)
        assert at_b.closed[-1] == ("a", State(number, 0, bytes(32)), body, True)
    assert at_b.changes == [("a", True)]


async def test_a_connection_that_dies_in_the_middle_ends_the_session_and_another_one_comes(mesh: Mesh) -> None:
    a, at_a, b, at_b = await wide_pair(mesh, 3)
    moving = asyncio.create_task(a.transfer("b", HEADER, memoryview(os.urandom(MIB) * 128)))
    await at_b.until(lambda: at_b.opened)
    session = a.links["b"].session
    assert session is not None
    session.streams[2].close()
    with pytest.raises(LinkLost):
        await moving
    await at_b.until(lambda: ("a", False) in at_b.changes)
    assert [whole for _, _, _, whole in at_b.closed] == [False]
    await at_a.until(lambda: at_a.is_up["b"])
    await at_b.until(lambda: at_b.is_up["a"])
    await eventually(lambda: a.peer_status()["b"].connections == 3)
    await eventually(lambda: b.peer_status()["a"].connections == 3)
    await a.transfer("b", Payload(9, 9, bytes(32)), memoryview(b"x" * 5 * MIB))
    await at_b.until(lambda: len(at_b.closed) == 2)
    assert at_b.closed[-1] == ("a", Payload(9, 9, bytes(32)), b"x" * 5 * MIB, True)
    assert a.rejections == b.rejections == {}


async def test_a_peer_that_refuses_more_is_no_reason_to_end(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    tried = asyncio.Event()

    async def refuse(*_: object) -> PeerError | None:
        tried.set()
        raise LinkLost("no more than one here")

    monkeypatch.setattr(b.links["a"], "_accept_more", refuse)
    a, at_a = await mesh.start("a", {"b": address(b)}, connections=4)
    await asyncio.wait_for(tried.wait(), DEADLINE_S)
    await a.transfer("b", HEADER, memoryview(b"x" * 3 * MIB))
    await at_b.until(lambda: at_b.closed)
    assert a.peer_status()["b"].connections == b.peer_status()["a"].connections == 1
    assert at_a.changes == [("b", True)]


async def test_a_greeting_that_breaks_off_costs_the_session_nothing(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    for _ in range(2):  # after the hello, and after the answer to it
        more = await joining(mesh, b, 1)
        await more.aclose()
        await eventually(lambda: b.links["a"].session and not b.links["a"].session.is_joining)
    more = await joining(mesh, b, 1)
    await more.write(e.encode_joined())
    await eventually(lambda: b.peer_status()["a"].connections == 2)
    assert at_b.changes == [("a", True)]
    assert b.rejections == {}
    for stream in [*made.values(), more]:
        await stream.aclose()


async def test_so_many_connections_there_are_not(mesh: Mesh) -> None:
    for count in (0, TRANSFER_CONNECTIONS_MAX + 1):
        with pytest.raises(ConfigError, match="bulk connections"):
            await mesh.start("a", {"b": None}, connections=count)


# ---- who may join ----------------------------------------------------------------------------------------------------


async def joining(mesh: Mesh, b: GrpcTransport, connection: int, **changes: Any) -> DialedStream:
    """A further bulk connection to b's session with a, up to b's answer."""
    stream = await connect_as(mesh, mesh.identity("a"), b, e.Lane.BULK)
    await stream.write(hello_of(changes.pop("region", "a"), e.Lane.BULK, connection=connection, **changes))
    e.decode_hello(await stream.read())
    return stream


async def refused(mesh: Mesh, b: GrpcTransport, **changes: Any) -> None:
    """Try to join, and read until the stream ends, which raises LinkLost."""
    await read_on(await joining(mesh, b, **changes))


@pytest.mark.parametrize(
    ("changes", "error", "strikes"),
    [
        ({"dial": 2}, "not up", {}),
        ({"instance_id": b"j" * 16}, "not up", {}),
        ({"connection": 2}, "not the next one", {}),
        ({"region": "c"}, "identity_mismatch", {("a", "identity_mismatch"): 1}),
        ({"run_id": "run2"}, "run_id", {("a", "incompatible"): 1}),
    ],
)
async def test_what_does_not_belong_to_the_session_is_refused_and_the_session_goes_on(
    mesh: Mesh, changes: dict[str, Any], error: str, strikes: dict[tuple[str, str], int]
) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    with pytest.raises(LinkLost, match=error):
        await refused(mesh, b, **{"connection": 1, **changes})
    assert b.rejections == strikes
    assert b.peer_status()["a"].connections == 1
    await made[e.Lane.CONTROL].write(e.encode_control(RequestVoteReply(1, True, True, b"")))
    await at_b.until(lambda: at_b.messages)
    assert at_b.changes == [("a", True)]
    for stream in made.values():
        await stream.aclose()


async def test_another_region_can_not_join_a_session_that_is_not_its_own(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    stream = await connect_as(mesh, mesh.identity("c"), b, e.Lane.BULK)
    await stream.write(hello_of("c", e.Lane.BULK, connection=1))
    with pytest.raises(LinkLost, match="not up"):
        await stream.read()
    assert b.peer_status()["a"].connections == 1
    for one in [*made.values(), stream]:
        await one.aclose()


async def test_an_index_is_taken_once(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    first = await joining(mesh, b, 1)
    with pytest.raises(LinkLost, match="not the next one"):  # while the first is being greeted
        await joining(mesh, b, 1)
    await first.write(e.encode_joined())
    await eventually(lambda: b.peer_status()["a"].connections == 2)
    with pytest.raises(LinkLost, match="not the next one"):
        await joining(mesh, b, 1)
    assert at_b.changes == [("a", True)]
    for stream in [*made.values(), first]:
        await stream.aclose()


async def test_a_connection_that_is_not_used_is_forgotten(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    # From here on: the link itself may take as long as this machine needs.
    link = b.links["a"]
    link.env = dataclasses.replace(link.env, times=dataclasses.replace(FAST, hello_s=0.2))
    stream = await joining(mesh, b, 1)
    with pytest.raises(LinkLost, match="was not used"):
        await read_on(stream)
    assert b.peer_status()["a"].connections == 1
    assert at_b.changes == [("a", True)]
    for one in [*made.values(), stream]:
        await one.aclose()


async def test_the_dialing_side_notices_another_process_at_the_address(mesh: Mesh) -> None:
    a, _, b, _ = await mesh.pair()
    session = b.links["a"].session
    assert session is not None
    with pytest.raises(LinkLost, match="another process answers"):
        await a.links["b"].dial_more(address(b), b"j" * 16, a.links["b"].dials, 1)
    await eventually(lambda: not session.is_joining)
    assert a.peer_status()["b"].connections == b.peer_status()["a"].connections == 1


# ---- broken peers ----------------------------------------------------------------------------------------------------

BEGIN = e.encode_begin(0, HEADER, 100)


def chunk(transfer: int, offset: int, size: int) -> bytes:
    return e.encode_chunk(transfer, offset, size, b"x" * size, is_compressed=False)


@pytest.mark.parametrize(
    "frames",
    [
        [(1, BEGIN)],
        [(1, e.encode_end(0))],
        [(1, e.encode_abort(0, ""))],
        [(1, e.encode_joined())],
        [(0, chunk(0, 0, 3)), (0, BEGIN)],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (1, chunk(0, 40, 60))],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (1, chunk(0, 0, 50))],
        [(0, BEGIN), (1, chunk(0, 50, 51))],
        [(0, BEGIN), (1, chunk(0, 50, 50)), (1, chunk(0, 0, 50))],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (1, chunk(0, 51, 49)), (0, e.encode_end(0, [1, 1]))],
        [(0, BEGIN), (1, chunk(0, 0, 50)), (1, chunk(0, 50, 25)), (0, e.encode_end(0, [0, 1]))],
        [(0, BEGIN), (0, e.encode_end(0, [0, 1])), (1, chunk(0, 0, 99))],
        [(1, chunk(1, 0, 50)), (0, e.encode_begin(2, HEADER, 100))],
    ],
)
async def test_a_broken_peer_costs_its_link_and_is_counted(mesh: Mesh, frames: list[tuple[int, bytes]]) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    more = await joining(mesh, b, 1)
    await more.write(e.encode_joined())
    with contextlib.suppress(LinkLost):  # the first frame may cost the link before the last one is written
        for connection, frame in frames:
            await (more if connection else made[e.Lane.BULK]).write(frame)
    await at_b.until(lambda: not at_b.is_up["a"])
    assert b.rejections == {("a", "protocol"): 1}
    assert len(at_b.closed) == len(at_b.opened)
    assert not any(whole for *_, whole in at_b.closed)
    for stream in [*made.values(), more]:
        await stream.aclose()


@pytest.mark.parametrize(
    "frames",
    [
        [(1, chunk(0, 0, 100)), (1, chunk(0, 100, 100))],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (0, e.encode_end(0, [1, 1]))],
        [(0, BEGIN), (0, e.encode_abort(0, "", [0, 1]))],
    ],
    ids=["a chunk whose transfer never begins", "an end without its chunks", "an abort without its chunks"],
)
async def test_what_never_comes_on_another_connection_is_waited_for_until_a_deadline(
    mesh: Mesh, frames: list[tuple[int, bytes]]
) -> None:
    b, at_b = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, transfer_silent_s=0.5, silent_s=1e9))
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    more = await joining(mesh, b, 1)
    await more.write(e.encode_joined())
    for connection, frame in frames:
        await (more if connection else made[e.Lane.BULK]).write(frame)
    await at_b.until(lambda: not at_b.is_up["a"])
    assert "too slow: nothing of an open transfer" in b.peer_status()["a"].error
    assert b.rejections == {}
    assert len(at_b.closed) == len(at_b.opened)
    for stream in [*made.values(), more]:
        await stream.aclose()


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
    monkeypatch.setattr(bundle, "STALL_MIN_S", 0.01)
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
    monkeypatch.setattr(bundle, "STALL_MIN_S", 0.02)
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
