"""The bandwidth budget through real transports: on loopback what must not depend on speed, and on links of their own
what the kernel's interface counters say.

`test_egress_budget.py` has the property over every window. A ceiling holds at the first attempt. What needs time to
show is measured beside a control in the same run, and again before it counts as wrong.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest
from budget_link import Found, NoNamespace, Options, quantile, run_link
from control_wan import run_arm, slow_lines

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.messages import BulkHeader, MergedStripe, Message, Payload, PayloadRequested, State
from diloco_node.core.types import Ballot, RateLimits
from diloco_node.errors import LinkLost
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.namespaces import Place
from diloco_node.transport.kernel.wire_meter import PeerTraffic, WireMeter
from diloco_node.transport.pacing.grants import ALLOWANCE_BYTES, ALLOWANCE_NS, DEMAND_MAX
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from diloco_node.wire.link_messages import IngressDemand, IngressGranted
from diloco_node.wire.measure_messages import Probe
from diloco_node.wire.message_tables import BudgetLane
from tests.kit.transport_kit import DEADLINE_S, Mesh, Recorder, address, rogue

MB = 10**6
ROUNDS, RECOVERY = BudgetLane.ROUNDS, BudgetLane.RECOVERY


# ---- the pacer by itself ---------------------------------------------------------------------------------------------


class Clock:
    """Time for the decisions; the timers of the loop are real, so what waits is released by hand."""

    def __init__(self) -> None:
        self.now_ns = 10**9
        self.minute = 0


@pytest.fixture
async def clock() -> Clock:
    return Clock()


@pytest.fixture
async def sent() -> list[tuple[str, Message]]:
    return []


@pytest.fixture
async def pacer(clock: Clock, sent: list[tuple[str, Message]]) -> AsyncIterator[Pacer]:
    made = Pacer(
        ["b", "c"],
        meter=WireMeter(),
        send=lambda peer, message: sent.append((peer, message)),
        now_ns=lambda: clock.now_ns,
        minute_of_day=lambda: clock.minute,
    )
    yield made
    made.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_without_a_limit_nothing_waits(pacer: Pacer) -> None:
    for _ in range(100):
        await asyncio.wait_for(pacer.acquire("b", ROUNDS, 2**20, ()), DEADLINE_S)
    assert pacer.status()["peers"]["b"]["lanes"]["rounds"]["used_bytes"] > 100 * 2**20
    assert pacer.status()["share_used"] is None


async def test_a_piece_waits_for_its_turn_and_goes_when_the_limit_is_lifted(pacer: Pacer) -> None:
    pacer.set_plan(BudgetPlan(RateLimits(egress=12_500)))
    waiting = asyncio.create_task(pacer.acquire("b", ROUNDS, 10_000_000, ()))
    await settle()
    assert not waiting.done()
    pacer.set_plan(BudgetPlan())
    await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_cancelled_piece_leaves_its_place_to_the_next(pacer: Pacer, clock: Clock) -> None:
    pacer.set_plan(BudgetPlan(RateLimits(egress=12_500)))
    first = asyncio.create_task(pacer.acquire("b", ROUNDS, 1000, ()))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    clock.now_ns += 10**9
    await asyncio.wait_for(pacer.acquire("b", ROUNDS, 1000, ()), DEADLINE_S)


async def test_a_grant_is_obeyed_and_what_waits_is_reported(pacer: Pacer, sent: list[tuple[str, Message]]) -> None:
    pacer.transfer_started("b", ROUNDS, 100)
    assert sent == [], "a peer that shares nothing out is told nothing"
    assert pacer.take_message("b", IngressGranted(20_000))
    assert sent == [("b", IngressDemand(DEMAND_MAX))]
    assert pacer.status()["peers"]["b"]["egress_bytes_per_s"] == 20_000
    assert pacer.status()["peers"]["b"]["limited_by"] == "grant"
    assert pacer.take_message("b", IngressGranted(0))
    assert pacer.status()["peers"]["b"]["egress_bytes_per_s"] is None
    assert not pacer.take_message("b", Message.__args__[0](1, True, 1, 1, b"", True))  # type: ignore[attr-defined]
    pacer.transfer_ended("b", 100)


async def test_what_could_be_sent_is_bounded_by_our_own_limits(pacer: Pacer, sent: list[tuple[str, Message]]) -> None:
    pacer.set_plan(BudgetPlan(RateLimits(egress=50_000), (("b", RateLimits(egress=30_000)),)))
    pacer.take_message("b", IngressGranted(20_000))
    pacer.take_message("c", IngressGranted(20_000))
    pacer.transfer_started("b", ROUNDS, 1)
    pacer.transfer_started("c", ROUNDS, 1)
    assert sent == [("b", IngressDemand(30_000)), ("c", IngressDemand(50_000))]


async def test_a_lost_link_forgets_its_grant(pacer: Pacer) -> None:
    pacer.take_message("b", IngressGranted(1))
    waiting = asyncio.create_task(pacer.acquire("b", RECOVERY, 10**6, ()))
    await settle()
    assert not waiting.done()
    pacer.link_down("b")
    await asyncio.wait_for(waiting, DEADLINE_S)


async def test_links_are_granted_shares_as_they_come_up(
    pacer: Pacer, sent: list[tuple[str, Message]], clock: Clock
) -> None:
    pacer.link_up("b")
    assert sent == [], "no ceiling, no grant"
    pacer.set_plan(BudgetPlan(RateLimits(ingress=1_000_000)))
    assert sent == [("b", IngressGranted(1_000_000))]
    pacer.link_up("c")
    assert sent[1] == ("b", IngressGranted(500_000))
    clock.now_ns += 10**9
    pacer.take_message("c", IngressDemand(DEMAND_MAX))
    assert ("c", IngressGranted(500_000)) in sent or sent[-1] == ("b", IngressGranted(20_000))


async def test_the_schedule_is_followed_by_the_wall_clock(pacer: Pacer, clock: Clock) -> None:
    plan = BudgetPlan.from_plain(
        {
            "limits": {"egress": 100_000, "ingress": None},
            "peers": [],
            "schedule": [{"start_minute": 60, "end_minute": 120, "limits": {"egress": 900_000, "ingress": None}}],
        }
    )
    pacer.set_plan(plan)
    assert pacer.status()["peers"]["b"]["egress_bytes_per_s"] == 100_000
    clock.minute = 60
    pacer.sample()
    assert pacer.status()["peers"]["b"]["egress_bytes_per_s"] == 900_000
    clock.minute = 120
    pacer.sample()
    assert pacer.status()["peers"]["b"]["egress_bytes_per_s"] == 100_000


async def test_where_the_kernel_does_not_tell_traffic_is_an_estimate(pacer: Pacer) -> None:
    assert pacer.try_acquire("b", ROUNDS, 1000)
    pacer.control_sent("b", 80)
    pacer.was_read("b", 200)
    pacer.was_read("b", 100, is_bulk=False)
    assert pacer.traffic("b") == PeerTraffic(1060 + 200, 318, is_measured=False)
    assert pacer.traffic("c") == PeerTraffic(0, 0, is_measured=False)


async def test_a_peer_beyond_its_share_is_not_read_for_a_while(pacer: Pacer, clock: Clock) -> None:
    pacer.set_plan(BudgetPlan(RateLimits(ingress=1_000_000)))
    pacer.link_up("b")
    await asyncio.wait_for(pacer.until_readable("b"), DEADLINE_S)
    pacer.was_read("b", 1_000_000)
    reading = asyncio.create_task(pacer.until_readable("b"))
    await asyncio.sleep(0.01)
    assert not reading.done()
    clock.now_ns += 10 * 10**9
    await asyncio.wait_for(reading, DEADLINE_S)


async def test_the_share_used_counts_only_time_with_work(pacer: Pacer, clock: Clock) -> None:
    pacer.set_plan(BudgetPlan(RateLimits(egress=1_000_000)))
    clock.now_ns += 3600 * 10**9
    pacer.transfer_started("b", ROUNDS, 10_000)
    await asyncio.wait_for(pacer.acquire("b", ROUNDS, 10_000, ()), DEADLINE_S)
    clock.now_ns += 15_600_000  # 10,600 are earned again, 5,000 more are lost
    assert pacer.status()["peers"]["b"]["waiting_bytes"] == 10_000, "until its end it may have to go again"
    pacer.transfer_ended("b", 10_000)
    clock.now_ns += 3600 * 10**9
    status = pacer.status()
    assert status["used_bytes"] == 10_600
    assert status["allowed_bytes"] == 15_600
    assert status["share_used"] == 10_600 / 15_600
    assert status["peers"]["b"]["waiting_bytes"] == 0
    assert status["peers"]["b"]["lanes"]["rounds"] == {"wanted_bytes": 10_600, "used_bytes": 10_600}


# ---- through transports on loopback ----------------------------------------------------------------------------------


async def linked(mesh: Mesh, at_a: BudgetPlan, at_b: BudgetPlan | None = None) -> tuple[GrpcTransport, Recorder]:
    """a, which dials b, and what b gets."""
    b, at_b_handler = await mesh.start("b", {"a": None}, budget=at_b or BudgetPlan())
    a, at_a_handler = await mesh.start("a", {"b": address(b)}, budget=at_a)
    await at_a_handler.until(lambda: at_a_handler.is_up.get("b"))
    await at_b_handler.until(lambda: at_b_handler.is_up.get("a"))
    return a, at_b_handler


async def whole_headers(handler: Recorder, count: int) -> list[BulkHeader]:
    """So many transfers have ended: the headers of those that arrived whole, in order."""
    await handler.until(lambda: len(handler.closed) >= count)
    return [header for _, header, _, is_whole in handler.closed if is_whole]


@pytest.mark.parametrize("side", ["egress", "ingress", "peer"])
async def test_a_transfer_takes_as_long_as_the_budget_says(mesh: Mesh, side: str) -> None:
    rate = 1 * MB
    limits = {"egress": RateLimits(egress=rate), "ingress": RateLimits(), "peer": RateLimits()}[side]
    peers = (("b", RateLimits(egress=rate)),) if side == "peer" else ()
    at_b = BudgetPlan(RateLimits(ingress=rate)) if side == "ingress" else BudgetPlan()
    a, b_handler = await linked(mesh, BudgetPlan(limits, peers), at_b)
    if side == "ingress":
        async with asyncio.timeout(DEADLINE_S):
            while a.budget_status()["peers"]["b"]["limited_by"] != "grant":  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
    body = os.urandom(MB // 2)
    started_s = time.monotonic()
    await asyncio.wait_for(a.transfer("b", Payload(0, 0, bytes(32)), memoryview(body)), DEADLINE_S)
    assert await whole_headers(b_handler, 1) == [Payload(0, 0, bytes(32))]
    assert time.monotonic() - started_s > 0.4
    assert a.budget_status()["peers"]["b"]["lanes"]["recovery"]["used_bytes"] > MB // 2
    assert b_handler.messages == [], "grants are the transports' own business"


async def test_a_budget_that_is_raised_lets_a_waiting_transfer_go(mesh: Mesh) -> None:
    a, b_handler = await linked(mesh, BudgetPlan(RateLimits(egress=12_500)))
    moving = asyncio.create_task(a.transfer("b", Payload(0, 0, bytes(32)), memoryview(os.urandom(4 * MB))))
    await asyncio.sleep(0.05)
    assert not moving.done()
    a.pacer.set_plan(BudgetPlan())
    assert a.pacer.plan == BudgetPlan()
    await asyncio.wait_for(moving, DEADLINE_S)
    assert len(await whole_headers(b_handler, 1)) == 1


async def test_control_does_not_wait_for_bulk_that_waits_for_the_budget(mesh: Mesh) -> None:
    a, b_handler = await linked(mesh, BudgetPlan(RateLimits(egress=1000)))
    moving = asyncio.create_task(a.transfer("b", Payload(0, 0, bytes(32)), memoryview(os.urandom(4 * MB))))
    await settle()
    requests = [PayloadRequested(0, version, bytes(32)) for version in range(200)]
    for message in requests:
        assert a.send("b", message)
    await b_handler.until(lambda: len(b_handler.messages) >= len(requests))
    assert b_handler.messages == [("a", message) for message in requests]
    assert not moving.done()
    assert a.budget_status()["peers"]["b"]["lanes"]["recovery"]["used_bytes"] < MB, "hours are left of it"
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)


async def test_a_round_overtakes_a_recovery_that_is_on_its_way(mesh: Mesh) -> None:
    a, b_handler = await linked(mesh, BudgetPlan(RateLimits(egress=2 * MB)))
    state = State(0, 0, bytes(32))
    stripe = MergedStripe(Ballot(1, 1), 0, 0, 1, bytes(32), 0, 1)
    slow = asyncio.create_task(a.transfer("b", state, memoryview(os.urandom(2 * MB))))
    await b_handler.until(lambda: b_handler.opened)
    await asyncio.wait_for(a.transfer("b", stripe, memoryview(os.urandom(100_000))), DEADLINE_S)
    assert not slow.done()
    await asyncio.wait_for(slow, DEADLINE_S)
    assert await whole_headers(b_handler, 2) == [stripe, state]


async def test_rounds_go_by_their_ballot(mesh: Mesh) -> None:
    a, b_handler = await linked(mesh, BudgetPlan(RateLimits(egress=2 * MB)))
    stripes = [MergedStripe(Ballot(1, number), 0, 0, 1, bytes(32), 0, 1) for number in (5, 9, 8, 7)]
    body = memoryview(os.urandom(100_000))
    await asyncio.wait_for(asyncio.gather(*(a.transfer("b", stripe, body) for stripe in stripes)), DEADLINE_S)
    numbers = [header.ballot.number for header in await whole_headers(b_handler, 4)]  # type: ignore[union-attr]
    assert numbers == [5, 7, 8, 9]


async def test_a_measurement_waits_its_turn(mesh: Mesh) -> None:
    a, _ = await linked(mesh, BudgetPlan(RateLimits(egress=1 * MB)))
    started_s = time.monotonic()
    for _ in range(20):
        await asyncio.wait_for(a.transfer("b", Probe(1), memoryview(os.urandom(20_000))), DEADLINE_S)
    assert time.monotonic() - started_s > 0.3
    assert a.budget_status()["peers"]["b"]["lanes"]["measurement"]["used_bytes"] > 400_000


async def test_a_peer_that_ignores_its_share_is_read_at_that_share(mesh: Mesh) -> None:
    rate = 2 * MB
    b, at_b = await mesh.start("b", {"a": None}, budget=BudgetPlan(RateLimits(ingress=rate)))
    at_b.refuses = {Payload}
    streams = await rogue(mesh, b)
    bulk = streams[e.Lane.BULK]
    piece = os.urandom(64 * 1024)
    accepted, started_s = 0, time.monotonic()

    async def flood() -> None:
        nonlocal accepted
        await bulk.write(e.encode_begin(0, Payload(0, 0, bytes(32)), 2**34))
        while True:
            await bulk.write(e.encode_chunk(0, accepted, len(piece), piece, is_compressed=False))
            accepted += len(piece)

    flooding = asyncio.create_task(flood())
    await asyncio.sleep(2.0)
    flooding.cancel()
    with contextlib.suppress(asyncio.CancelledError, LinkLost):
        await flooding
    lasted_s = time.monotonic() - started_s
    # Beyond the share: what it may be ahead, and what gRPC and the kernel hold for a reader that does not read. Read as
    # it comes, loopback takes ten times as much.
    buffers = 12 * 2**20
    print(f"{accepted} bytes in {lasted_s:.2f} s")
    assert accepted <= rate * lasted_s + ALLOWANCE_BYTES + rate * ALLOWANCE_NS / 1e9 + buffers
    for stream in streams.values():
        await stream.aclose()


# ---- what an interface counts ----------------------------------------------------------------------------------------

RATE = 12_500_000
ATTEMPTS = 5

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare: the budget is NOT checked against an interface's counters on this machine",
)


def measure(options: Options, namespace: str = "") -> Found:
    """Run both sides of a link."""
    try:
        return run_link(options, namespace)
    except NoNamespace:
        pytest.skip("this machine lets nobody make a network namespace")


@needs_root
@pytest.mark.system
@pytest.mark.alone
def test_the_interface_never_counts_more_than_the_budget_and_comes_near_it() -> None:
    """100 Mbit/s out by our own bucket and in by grants, without segmentation offload.

    From the first byte on at most what was saved up and one piece are ahead of the budget: 2 % of ten seconds. That is
    so at every moment, however late everybody is. In windows that begin later a reader that stood still may take at
    once what waited for it in the kernel. How much there is in windows, and how near to the budget, is for
    `benchmarks/budget.py` to tell; here the best second of a few runs is nearly all of it, or of what two sides
    without a budget get out of this machine.
    """
    ways = ("in", "out")
    free = measure(Options(seconds=2.0, settle_s=0.0))
    could = {way: min(RATE, free.most_per_s(way, 1.0)) for way in ways}
    most = dict.fromkeys(ways, 0.0)
    for _ in range(ATTEMPTS):
        found = measure(Options(egress_a=RATE, ingress_a=RATE, seconds=10.0, settle_s=0.0))
        for way in ways:
            assert found.ahead_s(way, RATE) <= 0.2, way
            most[way] = max(most[way], found.most_per_s(way, 1.0))
        print({way: (found.ahead_s(way, RATE), most[way] / RATE, could[way] / RATE) for way in ways})
        if all(most[way] >= 0.8 * could[way] for way in ways):
            return
    raise AssertionError(f"in the best second of {ATTEMPTS} runs {most} bytes/s of {RATE}; without a budget {could}")


@pytest.fixture
def lines() -> Iterator[Sequence[Place]]:
    """The places of a link of 10 Mbit/s and 40 ms, and of one that stays idle."""
    if fault := emulation.emulation_fault():
        pytest.skip(f"heartbeats on a slow link are NOT checked on this machine: {fault}")
    with slow_lines() as places:
        yield places


@pytest.mark.system
@pytest.mark.alone
@needs_root
def test_control_does_not_wait_for_the_queue_that_bulk_could_make(lines: Sequence[Place]) -> None:
    """10 Mbit/s, both directions loaded, beside the same where bulk fills the queue.

    What the machine adds by being late is in both, and in the idle link's round trips; and the quicker round trips say
    whether a queue stands there, also where many come late. How late these are is for `benchmarks/control_wan.py`.
    """
    tried, arms = [], {"budget", "no_budget"}
    for _ in range(ATTEMPTS):
        full = run_arm(lines, "full_queue", seconds=5.0, settle_s=2.0)
        full_s = quantile(full.control_s, 0.25) - quantile(full.idle_s, 0.25)
        for arm in sorted(arms):
            found = run_arm(lines, arm, seconds=5.0, settle_s=2.0)
            waited_s = quantile(found.control_s, 0.25) - quantile(found.idle_s, 0.25)
            used = min(found.used_per_s(way) / max(full.used_per_s(way), 1.0) for way in ("in", "out"))
            tried.append((arm, waited_s, full_s, used))
            print(f"{arm}: control waits {waited_s:.3f} s, full queue {full_s:.3f} s; {used:.2f} of the line used")
            if waited_s < full_s / 2 and used > 0.1:
                arms.remove(arm)
        if not arms:
            return
    raise AssertionError(f"(arm, seconds that control waits, with a full queue, share of the line used): {tried}")
