"""Links by their round trip: on short ones nothing is compressed, long ones are paced at the ceiling."""

import asyncio

import pytest

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.messages import Payload
from diloco_node.core.types import RateLimits
from diloco_node.errors import PeerError
from diloco_node.transport import outbound as outbound_module
from diloco_node.transport.kernel.wire_meter import LinkCounters, WireMeter
from diloco_node.transport.outbound import BulkOutbound
from diloco_node.transport.pacing.pacer import COALESCE_NS, FAST_RTT_NS, PIECE_FREE_BYTES_MIN, Pacer
from diloco_node.transport.pacing.token_bucket import LATE_NS, PIECE_BYTES_MAX, burst_bytes
from diloco_node.wire.envelope import TransferChunk, decode_bulk
from diloco_node.wire.message_tables import BudgetLane


class FakeMeter(WireMeter):
    def __init__(self, rtt_min_ns: int) -> None:
        super().__init__()
        self.rtt_min_ns = rtt_min_ns

    def sample(self) -> None:
        """Nothing to read."""

    def link(self, peer: str) -> LinkCounters | None:
        return LinkCounters(rtt_min_ns=self.rtt_min_ns)


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
        pacer.sample()
    return pacer


async def test_a_link_is_fast_when_it_is_known_to_be_near_and_nothing_limits_it() -> None:
    assert pacer_with(FAST_RTT_NS - 1).is_fast("b")
    assert not pacer_with(FAST_RTT_NS).is_fast("b")
    assert not pacer_with(0).is_fast("b"), "not known"
    assert not pacer_with(FAST_RTT_NS - 1, is_sampled=False).is_fast("b")
    limited = BudgetPlan(RateLimits(egress=10**9))
    assert not pacer_with(FAST_RTT_NS - 1, plan=limited).is_fast("b")
    pacer = pacer_with(FAST_RTT_NS - 1)
    pacer.link_down("b")
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
LONG_RTT_NS = 40 * MS


class RemoteLink(FakeMeter):
    """A link to b on a clock of its own; it carries 10 MB/s."""

    def __init__(self) -> None:
        super().__init__(LONG_RTT_NS)
        self.now_ns = self.sent = 0
        self.paces: list[int | None] = []
        self.pacer = Pacer(["b"], meter=self, send=lambda _peer, _message: None, now_ns=lambda: self.now_ns)

    def link(self, peer: str) -> LinkCounters | None:
        return LinkCounters(self.sent, 0, 0, self.sent, rtt_min_ns=self.rtt_min_ns)

    def pace(self, peer: str, rate_bytes_per_s: int | None, *, connections: int = 1) -> None:
        self.paces.append(rate_bytes_per_s)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            self.now_ns += 100 * MS
            self.sent += 10**6
            self.pacer.sample()

    def work(self) -> None:
        self.pacer.sample()
        self.pacer.transfer_started("b", BudgetLane.ROUNDS, 10**9)


async def test_a_ceiling_is_the_kernels_as_well_on_a_long_round_trip() -> None:
    """What waits in the socket while BBR looks for the least round trip would leave at the line's rate."""
    link = RemoteLink()
    link.work()
    link.run(0.5)
    assert link.paces == [], "nothing limits it"
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=10**6), (("b", RateLimits(egress=10**5)),)))
    link.run(0.1)
    assert link.paces == [10**5], "its own limit is the smaller one"
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=10**6)))
    link.run(0.1)
    assert link.paces[1:] == [10**6]
    link.pacer.set_plan(BudgetPlan())
    link.run(0.2)
    assert link.paces[2:] == [None]
    link.pacer.close()


async def test_a_new_link_is_paced_before_work_begins_on_it() -> None:
    link = RemoteLink()
    link.now_ns = 10**9
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=10**6)))
    link.pacer.link_up("b")
    assert link.paces == [10**6]
    link.pacer.close()


async def test_a_piece_without_a_limit_is_20_ms_of_what_the_link_carries() -> None:
    link = RemoteLink()
    assert link.pacer.piece_bytes("b") == PIECE_FREE_BYTES_MIN, "not known yet"
    link.work()
    link.run(0.2)
    assert link.pacer.piece_bytes("b") == 200_000
    link.sent += 10**8
    link.run(0.1)
    assert link.pacer.piece_bytes("b") == PIECE_BYTES_MAX
    link.pacer.close()


async def until_asked(pacer: Pacer, lane: BudgetLane) -> tuple[asyncio.Task[None], float]:
    """A piece that has to wait, and for how much longer than it must it will, in seconds; at least that."""
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    while pacer.try_acquire("b", lane, pacer.piece_bytes("b")):
        pass
    task = asyncio.create_task(pacer.acquire("b", lane, pacer.piece_bytes("b"), ()))
    await asyncio.sleep(0)
    wake_ns = pacer._egress.wake_at_ns(now_ns=pacer._now_ns())
    assert wake_ns is not None
    assert pacer._release_timer is not None
    return task, pacer._release_timer.when() - before_s - (wake_ns - pacer._now_ns()) / 10**9


@pytest.mark.parametrize(("rtt_min_ns", "connections"), [(LONG_RTT_NS, 1), (LONG_RTT_NS, 2), (FAST_RTT_NS, 1)])
async def test_pieces_that_the_kernel_spreads_out_are_gathered(rtt_min_ns: int, connections: int) -> None:
    link = RemoteLink()
    link.rtt_min_ns = rtt_min_ns
    link.pacer.set_plan(BudgetPlan(RateLimits(egress=10**6)))
    link.now_ns += 10**9
    link.pacer.has_connections("b", connections)
    link.work()
    assert bool(link.paces) is (rtt_min_ns == LONG_RTT_NS)
    is_spread = rtt_min_ns == LONG_RTT_NS and connections == 1
    link.now_ns += 10**9
    saved, piece, rate = 0, link.pacer.piece_bytes("b"), link.pacer.status()["peers"]["b"]["egress_bytes_per_s"]
    while link.pacer.try_acquire("b", BudgetLane.ROUNDS, 1000):
        saved += 1060
    late_ns = LATE_NS + COALESCE_NS if is_spread else LATE_NS
    assert burst_bytes(rate, late_ns) - 1060 <= saved <= burst_bytes(rate, late_ns)
    waiting, more_s = await until_asked(link.pacer, BudgetLane.ROUNDS)
    assert (more_s >= COALESCE_NS / 10**9) is is_spread
    link.now_ns += COALESCE_NS + 2 * 17 * MS
    link.pacer.release()
    await asyncio.wait_for(waiting, 60)
    assert link.pacer.try_acquire("b", BudgetLane.ROUNDS, piece) or not is_spread
    urgent, _ = await until_asked(link.pacer, BudgetLane.ROUNDS)
    later, more_s = await until_asked(link.pacer, BudgetLane.RECOVERY)
    assert more_s < COALESCE_NS / 10**9, "of what is gathered the later lane would get a part"
    for task in (urgent, later):
        task.cancel()
    await asyncio.gather(urgent, later, return_exceptions=True)
    link.pacer.close()


class _NoThreads:
    def submit(self, *_: object) -> None:
        raise AssertionError("small chunks need no thread")
