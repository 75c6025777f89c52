"""Links by their round trip: near ones on which nothing is compressed, far ones that are paced after a cut."""

from __future__ import annotations

import asyncio

import pytest

from diloco_node.core.budget_plan import BudgetPlan
from diloco_node.core.delay import IN_VAIN_CUTS
from diloco_node.core.messages import Payload
from diloco_node.core.types import RateLimits
from diloco_node.errors import PeerError
from diloco_node.transport import outbound as outbound_module
from diloco_node.transport.kernel.wire_meter import LinkCounters, WireMeter
from diloco_node.transport.outbound import BulkOutbound
from diloco_node.transport.pacing.budget import LATE_NS, BudgetLane, burst_bytes
from diloco_node.transport.pacing.pacer import FAST_RTT_NS, GATHER_NS, PING_BUSY_S, PING_HASTY_S, Pacer
from diloco_node.wire.envelope import TransferChunk, decode_bulk


class FakeMeter(WireMeter):
    def __init__(self, rtt_min_ns: int) -> None:
        super().__init__()
        self.rtt_min_ns = rtt_min_ns

    def sample(self) -> None:
        """Nothing to read."""

    def link(self, peer: str) -> LinkCounters | None:
        return LinkCounters(0, 0, 0, 0, 2 * self.rtt_min_ns, self.rtt_min_ns)


class FakeStream:
    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def read(self) -> bytes:
        raise AssertionError("nobody reads")

    async def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    def close(self, error: PeerError | None = None) -> None:
        """Nothing to close."""


def pacer_with(rtt_min_ns: int, *, is_sampled: bool = True, plan: BudgetPlan | None = None) -> Pacer:
    pacer = Pacer(["b"], meter=FakeMeter(rtt_min_ns), send=lambda _peer, _message: None)
    if plan is not None:
        pacer.set_plan(plan)
    if is_sampled:
        pacer._sampled()
    return pacer


async def test_a_link_is_fast_when_it_is_known_to_be_near_and_nothing_limits_it() -> None:
    assert pacer_with(FAST_RTT_NS - 1).is_fast("b")
    assert not pacer_with(FAST_RTT_NS).is_fast("b")
    assert not pacer_with(0).is_fast("b"), "not known"
    assert not pacer_with(FAST_RTT_NS - 1, is_sampled=False).is_fast("b")
    limited = BudgetPlan(RateLimits(egress=10**9))
    assert not pacer_with(FAST_RTT_NS - 1, plan=limited).is_fast("b")
    pacer = pacer_with(FAST_RTT_NS - 1)
    pacer.lost("b")
    assert not pacer.is_fast("b"), "the next link may be another one"
    pacer.close()


@pytest.mark.parametrize("is_near", [True, False])
async def test_chunks_are_compressed_only_where_the_link_is_not_fast(is_near: bool) -> None:
    stream = FakeStream()
    pacer = pacer_with(FAST_RTT_NS - 1 if is_near else FAST_RTT_NS)
    bulk = BulkOutbound("b", stream, _NoThreads(), pacer)
    running = asyncio.create_task(bulk.run())
    await bulk.transfer(Payload(0, 1, bytes(32)), memoryview(bytes(outbound_module.INLINE_BYTES_MAX)))
    running.cancel()
    chunks = [frame for frame in map(decode_bulk, stream.frames) if isinstance(frame, TransferChunk)]
    assert chunks
    assert all(chunk.is_compressed is not is_near for chunk in chunks)
    pacer.close()


MS = 1_000_000
FAR_NS = 40 * MS


class FarLink(FakeMeter):
    """A link to b on a clock of its own: it carries what is sent, and a queue stands in our direction."""

    def __init__(self) -> None:
        super().__init__(FAR_NS)
        self.now_ns = self.sent = self.queue_ns = 0
        self.paces: list[int | None] = []
        self.paced_connections: set[int] = set()
        self.pacer = Pacer(["b"], meter=self, send=lambda _peer, _message: None, now_ns=lambda: self.now_ns)

    def link(self, peer: str) -> LinkCounters | None:
        return LinkCounters(self.sent, 0, 0, self.sent, self.rtt_min_ns + self.queue_ns, self.rtt_min_ns)

    def pace(self, peer: str, rate_bytes_per_s: int | None, *, connections: int = 1) -> None:
        self.paces.append(rate_bytes_per_s)
        self.paced_connections.add(connections)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.now_ns += 100 * MS
            self.sent += (self.pacer._peers["b"].link.delay.rate_bytes_per_s or 10**7) // 10
            for _ in range(4):
                self.pacer.echoed("b", sent_ns=self.now_ns, arrived_ns=self.now_ns + self.queue_ns)
            self.pacer._sampled()

    def work(self) -> None:
        self.pacer._sampled()
        self.pacer.begin("b", BudgetLane.ROUNDS, 10**9)


async def test_the_kernel_paces_after_a_cut_and_a_new_connection_not_before_one() -> None:
    link = FarLink()
    link.work()
    link.run(1)
    assert link.paces == [], "no rate is known to be too much"
    link.queue_ns = 50 * MS
    link.run(1)
    assert link.paces[-1] is not None
    link.pacer.end("b")
    link.pacer.lost("b")
    link.paces.clear()
    link.queue_ns = 0
    link.work()
    link.run(0.5)
    assert link.paces == []
    link.pacer.close()


async def test_a_way_that_has_become_longer_is_measured_anew_after_a_few_cuts() -> None:
    link = FarLink()
    link.work()
    link.run(3)
    link.queue_ns = 50 * MS
    link.run(30)
    assert 1 <= link.pacer._peers["b"].link.delay.cuts <= IN_VAIN_CUTS + 2
    link.pacer.close()


async def test_a_ceiling_is_the_kernels_as_well_on_a_far_link() -> None:
    """What waits in the socket while BBR looks for the least round trip would leave at the line's rate."""
    link = FarLink()
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=10**6)))
    link.work()
    link.run(0.5)
    assert link.paces[-1] == 10**6
    link.queue_ns = 50 * MS
    link.run(1)
    cut = link.paces[-1]
    assert cut is not None
    assert cut < 10**6, "a cut counts, too"
    link.pacer.set_plan(BudgetPlan())
    link.pacer.lost("b")
    link.queue_ns = 0
    link.paces.clear()
    link.work()
    link.run(0.5)
    assert link.paces == []
    link.pacer.close()


async def until_asked(pacer: Pacer, lane: BudgetLane) -> tuple[asyncio.Task[None], float]:
    """A piece that has to wait, and for how much longer than it must it will, in seconds; at least that."""
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    while pacer.turn_now("b", lane, pacer.piece_bytes("b")):
        pass
    task = asyncio.create_task(pacer.turn("b", lane, pacer.piece_bytes("b"), ()))
    await asyncio.sleep(0)
    wake_ns = pacer._egress.wake_at_ns(now_ns=pacer._now_ns())
    assert wake_ns is not None
    assert pacer._release_timer is not None
    return task, pacer._release_timer.when() - before_s - (wake_ns - pacer._now_ns()) / 10**9


@pytest.mark.parametrize(("rtt_min_ns", "connections"), [(FAR_NS, 1), (FAR_NS, 2), (FAST_RTT_NS, 1)])
async def test_pieces_that_the_kernel_spreads_out_are_gathered(rtt_min_ns: int, connections: int) -> None:
    link = FarLink()
    link.rtt_min_ns = rtt_min_ns
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=10**6)))
    link.now_ns += 10**9
    link.pacer.has_connections("b", connections)
    link.work()
    assert bool(link.paces) is (rtt_min_ns == FAR_NS)
    is_spread = rtt_min_ns == FAR_NS and connections == 1
    link.now_ns += 10**9
    saved, piece, rate = 0, link.pacer.piece_bytes("b"), link.pacer.status()["peers"]["b"]["egress_bytes_per_s"]
    while link.pacer.turn_now("b", BudgetLane.ROUNDS, 1000):
        saved += 1060
    late_ns = LATE_NS + GATHER_NS if is_spread else LATE_NS
    assert burst_bytes(rate, late_ns) - 1060 <= saved <= burst_bytes(rate, late_ns)
    waiting, more_s = await until_asked(link.pacer, BudgetLane.ROUNDS)
    assert (more_s >= GATHER_NS / 10**9) is is_spread
    link.now_ns += GATHER_NS + 2 * 17 * MS
    link.pacer._release()
    await asyncio.wait_for(waiting, 60)
    assert link.pacer.turn_now("b", BudgetLane.ROUNDS, piece) or not is_spread
    urgent, _ = await until_asked(link.pacer, BudgetLane.ROUNDS)
    later, more_s = await until_asked(link.pacer, BudgetLane.RECOVERY)
    assert more_s < GATHER_NS / 10**9, "of what is gathered the later lane would get a part"
    for task in (urgent, later):
        task.cancel()
    await asyncio.gather(urgent, later, return_exceptions=True)
    link.pacer.close()


@pytest.mark.parametrize("pause_ms", [0, 50, 500])
async def test_what_went_out_before_a_transfer_began_is_no_part_of_its_rate(pause_ms: int) -> None:
    link = FarLink()

    def carry(ms: int) -> None:
        link.now_ns += ms * MS
        link.sent += 10_000 * ms

    link.work()
    state = link.pacer._peers["b"].link
    for _ in range(20):
        carry(100)
        link.pacer._sampled()
    carry(90)
    link.pacer.end("b")
    link.now_ns += pause_ms * MS
    link.pacer.begin("b", BudgetLane.ROUNDS, 10**9)
    carry(10)
    link.pacer._sampled()
    assert state.rate_bytes_per_s <= 10**7
    assert state.busiest_bytes_per_s <= 10**7
    for _ in range(3):
        carry(100)
        link.pacer._sampled()
    assert state.rate_bytes_per_s == 10**7, "nor is the idle time"
    link.pacer.close()


async def test_a_new_link_is_known_before_work_begins_on_it() -> None:
    link = FarLink()
    link.now_ns = 10**9
    link.pacer.connected("b")
    link.pacer.begin("b", BudgetLane.ROUNDS, 10**9)
    status = link.pacer.status()["peers"]["b"]
    assert status["limited_by"] == "delay"
    assert 0 < status["egress_bytes_per_s"] < 10**6
    link.pacer.close()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_pings_are_more_frequent_while_the_limit_changes_fast(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = FarLink()
    link.work()
    link.run(0.3)
    if is_cut:
        link.queue_ns = 50 * MS
        link.run(0.5)
        link.queue_ns = 0
        link.run(0.8)
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await link.pacer.until_ping("b", 1.0)
    assert slept == [PING_BUSY_S if is_cut else PING_HASTY_S]
    link.pacer.close()


class _NoThreads:
    def submit(self, *_: object) -> None:
        raise AssertionError("small chunks need no thread")


async def test_peers_that_something_is_on_its_way_to_share_what_the_ceiling_lets_through() -> None:
    link = FarLink()
    link.pacer = Pacer(["b", "c"], meter=link, send=lambda _peer, _message: None, now_ns=lambda: link.now_ns)
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=900_000)))
    link.work()
    link.run(0.3)
    assert link.pacer._peers["b"].link.delay._held == 900_000
    link.pacer.begin("c", BudgetLane.ROUNDS, 10**9)
    link.run(0.3)
    assert link.pacer._peers["b"].link.delay._held == 450_000
    link.pacer.close()
