"""Carries the bandwidth budget out on the event loop: pieces wait here until they may go, and grants go back and forth.

The decisions are made in `pacing.egress_budget` (what goes out) and `pacing.grants` (what peers may send). This module
has the clock, the timers and the futures; `link_stats` has what the kernel counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import structlog

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.numeric import NS_PER_S
from diloco_node.ticks import to_tick_s
from diloco_node.transport.kernel.wire_meter import PeerTraffic, WireMeter
from diloco_node.transport.pacing.egress_budget import OVERHEAD_PPM_FIRST, PPM, EgressBudget, LimitSource
from diloco_node.transport.pacing.grants import DEMAND_MAX, UNLIMITED, IngressGrants
from diloco_node.transport.pacing.link_stats import LinkWatch
from diloco_node.transport.pacing.token_bucket import LATE_NS, PIECE_BYTES_MAX, piece_bytes
from diloco_node.wire.link_messages import IngressDemand, IngressGranted, LinkMessage
from diloco_node.wire.message_tables import BudgetLane, ControlMessage

_log = structlog.get_logger(part="transport")

SAMPLE_IDLE_S: Final = 1.0
SAMPLE_BUSY_S: Final = 0.1
"""Between two readings of the kernel's counters, which take about 0.3 ms; busy: something is limited or on its way."""

TIMER_S: Final = 0.001
"""Timers of the loop have this grain: one that is set to less would fire early, and again."""

COALESCE_NS: Final = 20_000_000
"""Where the kernel spreads out what it is handed, a piece that has to wait waits for so long more, and all that may go
by then goes together: what a loop does first after it slept costs far more than the rest. The buckets save up for it.
Not while pieces of several lanes wait: of what was saved up the later lane would get a part."""

LATENESS_FADING: Final = 64
"""A 64th of the lateness of timers is forgotten at each sample: half of it in four seconds."""

IDLE_AFTER_S: Final = 0.3
"""A peer gets a demand of 0 when nothing has waited for it for a while: the next stripe is often close behind."""

UNMEASURED_ACKS_PPM: Final = 23_000
"""Where the kernel does not count them: an acknowledgement of 66 bytes for every two segments."""

FAST_RTT_NS: Final = 1_000_000
"""A link with a shorter round trip is the same machine or room, and carries more than zstd makes of it per core."""

PIECE_S: Final = 0.02
PIECE_FREE_BYTES_MIN: Final = 64 * 2**10
"""Without a limit a piece is 20 ms of what the link carries: what was handed over can't be held back any more."""


@dataclass(slots=True)
class _PeerState:
    """The shell's facts about one peer. link: what the kernel counted, and what follows from it.

    transfers: queued or on their way, `waiting_bytes` before compression. idle: the timer that reports their end.
    reported_demand: the last IngressDemand on this link. is_granted: the peer shares out what it may receive.
    read_bytes: of all frames.
    is_linked: by a link of the transport, whose sockets the kernel counts.
    """

    link: LinkWatch
    is_linked: bool = True
    transfers: int = 0
    waiting_bytes: int = 0
    idle: asyncio.TimerHandle | None = None
    reported_demand: int = 0
    is_granted: bool = False
    read_bytes: int = 0


class Pacer:
    """The budget of one transport. All methods run on its event loop.

    send: queues a control message to a peer. now_ns: monotonic. minute_of_day: of the wall clock, for the schedule.
    """

    def __init__(
        self,
        peers: Iterable[str],
        *,
        meter: WireMeter,
        send: Callable[[str, LinkMessage], object],
        now_ns: Callable[[], int] = time.monotonic_ns,
        minute_of_day: Callable[[], int] | None = None,
    ) -> None:
        self._meter = meter
        self._send = send
        self._now_ns = now_ns
        # The only wall clock here: ceilings may differ by the time of day.
        self._minute_of_day = minute_of_day or _local_minute
        # The budget as set; the ceilings of this minute are in `_egress` and `_grants`.
        self.plan = BudgetPlan()
        self._egress = EgressBudget((), now_ns=now_ns())
        self._grants = IngressGrants((), now_ns=now_ns())
        self._peers: dict[str, _PeerState] = {}
        # A future for each piece that waits in `_egress`; it is done when the piece counts as sent.
        self._waiting: dict[tuple[str, BudgetLane], asyncio.Future[None]] = {}
        # At most one of each is armed: for the next piece that may go, and for the next grant that may grow.
        self._release_timer: asyncio.TimerHandle | None = None
        self._grant_timer: asyncio.TimerHandle | None = None
        # Set when `run` has to look before its time.
        self._woken = asyncio.Event()
        # True while a transfer to any peer is under way.
        self._is_busy = False
        # Bytes while transfers were under way: that went out, and that the ceiling would have let through.
        self._allowed_bytes = 0
        self._used_bytes = 0
        # The counters as they were when those two were brought up to date.
        self._used_before = self._lost_before = 0
        # How late timers have been, at least LATE_NS; it fades.
        self._late_ns = LATE_NS
        # How long pieces may be gathered: 0 unless the kernel spreads them out on all busy links.
        self._coalesce_ns = 0
        for name in sorted(peers):
            self.add_peer(name)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def add_peer(self, peer: str, *, is_linked: bool = True) -> None:
        """Share the budget with one more peer. `is_linked`: by a link of the transport; else bytes are estimated."""
        now_ns = self._now_ns()
        self._peers[peer] = _PeerState(LinkWatch(peer, self._meter), is_linked)
        self._egress.add_peer(peer, now_ns=now_ns)
        self._grants.add_peer(peer, now_ns=now_ns)
        self._limit(peer, now_ns)

    def _limit(self, peer: str, now_ns: int) -> None:
        limits = self.plan.peer_limits(peer)
        self._egress.set_limit(peer, LimitSource.PEER, limits.egress, now_ns=now_ns)
        self._grants.set_peer_rate(peer, limits.ingress)

    def set_plan(self, plan: BudgetPlan) -> None:
        """Change the budget from now on."""
        self.plan = plan
        self._follow_plan()
        now_ns = self._now_ns()
        for peer in self._peers:
            self._limit(peer, now_ns)
        self.release()
        self._grant()
        self._woken.set()

    def _follow_plan(self) -> None:
        """Set the ceilings of this minute, where they have changed."""
        limits, now_ns = self.plan.limits_at(self._minute_of_day()), self._now_ns()
        if limits.egress != self._egress.region.rate_bytes_per_s:
            self._count_use(now_ns)
            self._egress.region.set_rate(limits.egress, now_ns=now_ns)
            _log.info("budget", egress_bytes_per_s=limits.egress)
        if limits.ingress != self._grants.region.rate_bytes_per_s:
            self._grants.region.set_rate(limits.ingress, now_ns=now_ns)
            _log.info("budget", ingress_bytes_per_s=limits.ingress)

    def _ceiling_out(self, peer: str) -> int | None:
        """Return the most that may be sent to a peer, by our own budget; None: no limit."""
        return _least(self._egress.region.rate_bytes_per_s, self.plan.peer_limits(peer).egress)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def piece_bytes(self, peer: str) -> int:
        """How many bytes of a body to put into one frame."""
        if (limit := self._egress.rate_bytes_per_s(peer)) is not None:
            return piece_bytes(limit)
        rate = self._peers[peer].link.rate_bytes_per_s
        return min(max(int(rate * PIECE_S), PIECE_FREE_BYTES_MIN), PIECE_BYTES_MAX)

    def is_fast(self, peer: str) -> bool:
        """Whether the link is so fast, and nothing limits it, that compressing costs more time than it saves."""
        return 0 < self._peers[peer].link.rtt_min_ns < FAST_RTT_NS and self._egress.rate_bytes_per_s(peer) is None

    def transfer_started(self, peer: str, lane: BudgetLane, raw_bytes: int) -> None:
        """A transfer was asked for."""
        state = self._peers[peer]
        state.transfers += 1
        state.waiting_bytes += raw_bytes
        if state.transfers == 1:
            self._follow_lateness()
        self._egress.count_demand(peer, lane, raw_bytes)
        if state.idle is not None:
            state.idle.cancel()
            state.idle = None
        self._report_demand(peer)
        if not self._is_busy:
            self._is_busy = True
            self._used_before = self._used_now()
            self._lost_before = self._egress.region.lost_bytes(now_ns=self._now_ns())
            self._woken.set()

    def transfer_ended(self, peer: str, raw_bytes: int) -> None:
        """It is over, for better or worse."""
        state = self._peers[peer]
        state.transfers -= 1
        state.waiting_bytes -= raw_bytes
        if not any(entry.transfers for entry in self._peers.values()):
            self._count_use(self._now_ns())
            self._is_busy = False
        if not state.transfers and state.reported_demand:
            state.idle = asyncio.get_running_loop().call_later(IDLE_AFTER_S, self._report_demand, peer)

    def try_acquire(self, peer: str, lane: BudgetLane, handed_bytes: int) -> bool:
        """Whether a piece may go at once; it counts as sent then. If not, wait for its `acquire`."""
        return self._egress.try_spend(peer, lane, handed_bytes, now_ns=self._now_ns())

    async def acquire(self, peer: str, lane: BudgetLane, handed_bytes: int, urgency: tuple[int, ...]) -> None:
        """Wait until a piece may go; it counts as sent when this returns."""
        if self.try_acquire(peer, lane, handed_bytes):
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._egress.request(peer, lane, handed_bytes, urgency, now_ns=self._now_ns())
        self._waiting[peer, lane] = waiting
        try:
            self.release()
            await waiting
        finally:
            if self._waiting.get((peer, lane)) is waiting:
                del self._waiting[peer, lane]
                self._egress.withdraw(peer, lane)

    def control_sent(self, peer: str, frame_bytes: int) -> None:
        """A frame of the control lane goes out."""
        self._egress.charge_control(peer, frame_bytes, now_ns=self._now_ns())

    def release(self) -> None:
        """Let go what may go, and set the timer for the next."""
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        now_ns = self._now_ns()
        for key in self._egress.release(now_ns=now_ns):
            waiting = self._waiting.pop(key)
            if not waiting.done():
                waiting.set_result(None)
        wake_ns = self._egress.wake_at_ns(now_ns=now_ns)
        if wake_ns is not None:
            coalesce_ns = self._coalesce_ns if self._egress.is_level() else 0
            delay_s = max((wake_ns + coalesce_ns - now_ns) / NS_PER_S, TIMER_S)
            due_ns = now_ns + int(delay_s * NS_PER_S)
            self._release_timer = asyncio.get_running_loop().call_later(delay_s, self._release_late, due_ns)

    def _release_late(self, due_ns: int) -> None:
        """A release by timer; how late it is, is how late the next ones may be."""
        late_ns = self._now_ns() - due_ns
        if late_ns > self._late_ns:
            self._late_ns = late_ns
            self._follow_lateness(at_ns=due_ns)
        self.release()

    def _follow_lateness(self, *, at_ns: int | None = None) -> None:
        """Let the buckets catch up on time lost to late timers, and gather pieces that the kernel spreads out."""
        is_spread = all(state.link.is_spread for state in self._peers.values() if state.transfers)
        self._coalesce_ns = COALESCE_NS if is_spread else 0
        self._egress.set_lateness(self._late_ns + self._coalesce_ns, now_ns=self._now_ns() if at_ns is None else at_ns)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    async def until_readable(self, peer: str) -> None:
        """Wait until the peer's bulk stream may be read: at once for one that keeps to its share."""
        now_ns = self._now_ns()
        while (at_ns := self._grants.read_at_ns(peer, now_ns=now_ns)) > now_ns:
            await asyncio.sleep(min((at_ns - now_ns) / NS_PER_S, SAMPLE_IDLE_S))
            now_ns = self._now_ns()

    def was_read(self, peer: str, frame_bytes: int, *, is_bulk: bool = True) -> None:
        """A frame was read."""
        self._peers[peer].read_bytes += frame_bytes
        if is_bulk:
            self._grants.count_arrival(peer, frame_bytes, now_ns=self._now_ns())

    # ---- links and grants --------------------------------------------------------------------------------------------

    def link_up(self, peer: str) -> None:
        """A session begins: the peer must hear of its share before it sends."""
        self._grants.link_up(peer)
        self.sample()  # the handshakes have told the round trip, by which the kernel paces from the first byte on

    def has_connections(self, peer: str, count: int) -> None:
        """So many carry bulk now."""
        self._peers[peer].link.connections = count

    def target_connections(self, peer: str) -> int:
        """How many bulk connections the link is worth, by what is known of it now."""
        out = self._ceiling_out(peer)
        into = _least(self._grants.region.rate_bytes_per_s, self.plan.peer_limits(peer).ingress)
        ceiling = None if out is None or into is None else max(out, into)
        return self._peers[peer].link.target_connections(ceiling_bytes_per_s=ceiling)

    def link_down(self, peer: str) -> None:
        """A session has ended."""
        state, now_ns = self._peers[peer], self._now_ns()
        state.reported_demand, state.is_granted = 0, False
        state.link.reset()
        self._egress.set_limit(peer, LimitSource.GRANT, None, now_ns=now_ns)
        self._grants.link_down(peer, now_ns=now_ns)
        self.release()
        self._grant()

    def take_message(self, peer: str, message: ControlMessage) -> bool:
        """Take a control message if it is about the budget; whether it was."""
        if isinstance(message, IngressGranted):
            self._peers[peer].is_granted = message.bytes_per_s != UNLIMITED
            rate = max(1, message.bytes_per_s) if message.bytes_per_s != UNLIMITED else None
            self._egress.set_limit(peer, LimitSource.GRANT, rate, now_ns=self._now_ns())
            self._report_demand(peer)
            self.release()
            return True
        if isinstance(message, IngressDemand):
            self._grants.demand_reported(peer, message.bytes_per_s)
            self._grant()
            return True
        return False

    def _report_demand(self, peer: str) -> None:
        """Report what we could send, to a peer that shares out what it may receive, when that has changed."""
        state = self._peers[peer]
        state.idle = None
        demand = (self._ceiling_out(peer) or DEMAND_MAX) if state.transfers else 0
        if demand != state.reported_demand and (state.is_granted or not demand):
            state.reported_demand = demand
            self._send(peer, IngressDemand(demand))

    def _grant(self) -> None:
        """Send the shares that have changed, and set the timer for those that may grow later."""
        if self._grant_timer is not None:
            self._grant_timer.cancel()
            self._grant_timer = None
        now_ns = self._now_ns()
        for peer, rate in self._grants.due(now_ns=now_ns):
            self._send(peer, IngressGranted(rate))
        wake_ns = self._grants.wake_at_ns(now_ns=now_ns)
        if wake_ns is not None:
            delay_s = max((wake_ns - now_ns) / NS_PER_S, TIMER_S)
            self._grant_timer = asyncio.get_running_loop().call_later(delay_s, self._grant)

    # ---- what the kernel counted -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the kernel's counters now and then. Ends only by cancellation."""
        while True:
            rates = (self._egress.region.rate_bytes_per_s, self._grants.region.rate_bytes_per_s)
            if rates != (None, None) or any(state.transfers for state in self._peers.values()):
                await asyncio.sleep(SAMPLE_BUSY_S)
            else:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(to_tick_s(SAMPLE_IDLE_S)):
                        await self._woken.wait()
                        continue
            self.sample()

    def sample(self) -> None:
        """Take what the kernel counts now. On the loop: to a thread and back costs more."""
        self._meter.sample()
        now_ns = self._now_ns()
        for peer, state in self._peers.items():
            self._take_counters(peer, state, now_ns)
        self._follow_plan()
        # A tenth of a second of lateness is a burst that other traffic of the region would wait behind: it fades.
        self._late_ns = max(LATE_NS, self._late_ns - self._late_ns // LATENESS_FADING)
        self._follow_lateness()
        self.release()
        self._grant()

    def _take_counters(self, peer: str, state: _PeerState, now_ns: int) -> None:
        link = self._meter.link(peer) if state.is_linked else None
        if link is None:
            acks = state.read_bytes * UNMEASURED_ACKS_PPM // PPM
            self._egress.learn_overhead(peer, data_bytes=0, other_bytes=acks, now_ns=now_ns)
            self._grants.count_on_wire(peer, state.read_bytes * OVERHEAD_PPM_FIRST // PPM, now_ns=now_ns)
            return
        self._egress.learn_overhead(
            peer, data_bytes=link.first_bytes_out, other_bytes=link.other_bytes_out, now_ns=now_ns
        )
        self._grants.count_on_wire(peer, link.bytes_in, now_ns=now_ns)
        state.link.take(link, is_busy=state.transfers > 0, now_ns=now_ns)
        state.link.pace(self._ceiling_out(peer))

    def close(self) -> None:
        """Drop the timers."""
        for timer in (self._release_timer, self._grant_timer, *(state.idle for state in self._peers.values())):
            if timer is not None:
                timer.cancel()
        self._release_timer = self._grant_timer = None

    # ---- for people --------------------------------------------------------------------------------------------------

    def traffic(self, peer: str) -> PeerTraffic:
        """Wire bytes with a peer since start, as of the last sample; an estimate where the kernel does not tell."""
        if (meter := self._meter.traffic(peer)) is not None:
            return meter
        out = sum(lane.used_bytes for lane in self._egress.use(peer).lanes.values())
        into = self._peers[peer].read_bytes * OVERHEAD_PPM_FIRST // PPM
        return PeerTraffic(out, into, is_measured=False)

    def _used_now(self) -> int:
        uses = [self._egress.use(peer) for peer in self._peers]
        return sum(use.correction_bytes + sum(lane.used_bytes for lane in use.lanes.values()) for use in uses)

    def _count_use(self, now_ns: int) -> None:
        """Add up what was used and what the ceiling allowed while something waited to be sent."""
        if not self._is_busy:
            return
        rate, used_bytes = self._egress.region.rate_bytes_per_s, self._used_now()
        lost_bytes = self._egress.region.lost_bytes(now_ns=now_ns)
        if rate is not None:
            self._used_bytes += used_bytes - self._used_before
            self._allowed_bytes += used_bytes - self._used_before + lost_bytes - self._lost_before
        self._used_before, self._lost_before = used_bytes, lost_bytes

    def status(self) -> dict[str, Any]:
        """Ceilings, shares, and bytes in demand, allowed and used; plain values for JSON. `share_used`: of what the
        egress ceiling allowed while something waited to be sent."""
        self._count_use(self._now_ns())
        limits = self.plan.limits_at(self._minute_of_day())
        return {
            "egress_bytes_per_s": limits.egress,
            "ingress_bytes_per_s": limits.ingress,
            "allowed_bytes": self._allowed_bytes,
            "used_bytes": self._used_bytes,
            "share_used": self._used_bytes / self._allowed_bytes if self._allowed_bytes else None,
            "peers": {peer: self._peer_status(peer) for peer in self._peers},
        }

    def _peer_status(self, peer: str) -> dict[str, Any]:
        use = self._egress.use(peer)
        return {
            "egress_bytes_per_s": self._egress.rate_bytes_per_s(peer),
            "limited_by": self._egress.limited_by(peer),
            "granted_bytes_per_s": self._grants.last_grant(peer) or None,
            "overhead": use.overhead.ppm / PPM,
            "correction_bytes": use.correction_bytes,
            "waiting_bytes": self._peers[peer].waiting_bytes,
            "lanes": {
                lane.name.lower(): {"wanted_bytes": account.demand_bytes, "used_bytes": account.used_bytes}
                for lane, account in use.lanes.items()
            },
        }


def _least(*rates: int | None) -> int | None:
    return min((rate for rate in rates if rate is not None), default=None)


def _local_minute() -> int:
    now = time.localtime()
    return now.tm_hour * 60 + now.tm_min
