"""Several bulk connections in one session: over real gRPC on loopback, and both halves over pipes of a test's own."""

import asyncio
import contextlib
import os
import random

import pytest

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.messages import MergedStripe, Payload, State
from diloco_node.core.types import Ballot, RateLimits
from diloco_node.errors import ConfigError, LinkLost, PeerError
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.transport.pacing import link_stats
from diloco_node.transport.pacing.link_stats import BULK_CONNECTIONS_MAX
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from diloco_node.wire.envelope import TRANSFER_CONNECTIONS_MAX
from diloco_node.wire.measure_messages import Probe
from diloco_node.wire.message_tables import TransferHeader
from tests.kit.connections_kit import HEADER, joining
from tests.kit.transport_kit import DEADLINE_S, Mesh, Recorder, address, rogue
from tests.kit.waiting import eventually

MIB = 2**20


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
    await eventually(lambda: a.pacer._peers["b"].link.rtt_min_ns)
    assert a.pacer.target_connections("b") == 1
    assert a.peer_status()["b"].connections == 1


async def test_the_number_follows_what_the_link_is_worth_and_never_falls(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_stats, "buffer_bytes", lambda: 8 * MIB)
    a, at_a, _, at_b = await mesh.pair()
    state = a.pacer._peers["b"].link
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
    a.pacer._peers["b"].link.rtt_min_ns = 40_000_000
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
    await more.write(e.JOINED_FRAME)
    await eventually(lambda: b.peer_status()["a"].connections == 2)
    assert at_b.changes == [("a", True)]
    assert b.rejections == {}
    for stream in [*made.values(), more]:
        await stream.aclose()


async def test_so_many_connections_there_are_not(mesh: Mesh) -> None:
    for count in (0, TRANSFER_CONNECTIONS_MAX + 1):
        with pytest.raises(ConfigError, match="bulk connections"):
            await mesh.start("a", {"b": None}, connections=count)
