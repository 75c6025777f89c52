"""The bandwidth budget of a region, on its sending side: who may send how much, and when.

A token bucket for the region, one for each peer below it, and in each peer four lanes: control, which is only counted,
then rounds by deadline, recovery, measurement. It counts **wire bytes**: those that were handed to the link, times an
overhead that is learnt from the kernel's counters; acknowledgements and retransmissions as the kernel counts them.
Integers throughout: bytes, bytes per second, nanoseconds.

The caller's duties, for each piece of bulk (see `EgressBudget`):

1. `try_spend`; where that says no, `request` with the size as it will be handed over, one of a peer and lane at a time.
2. `release`, whenever something was asked, a limit changed, or `wake_at_ns` has come: those pieces may go now.
3. `charge_control` for every frame of the control lane, `learn_overhead` for what the kernel counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from diloco_node.transport.pacing.token_bucket import PIECE_BYTES_MIN, TokenBucket
from diloco_node.wire.message_tables import BudgetLane

STARVING_NS: Final = 2_000_000_000
"""A piece that has waited for so long goes first: strict order between lanes must not break a transfer's link."""

PPM: Final = 1_000_000

OVERHEAD_PPM_FIRST: Final = 1_060_000
"""TCP, TLS, HTTP/2 and gRPC around chunks of bulk, as it is on a line with packets of 1,500 bytes."""

OVERHEAD_PPM_MAX: Final = 1_250_000
"""A path with more is taken for one with so much; what it has beyond is charged when the kernel has counted it."""

OVERHEAD_PRIOR_BYTES: Final = 10**6
"""How much traffic the first guess of 6 % weighs."""

OVERHEAD_MEMORY_BYTES: Final = 64 * 2**20
"""Older traffic than about this counts less and less: a route changes, and with it the size of a packet."""

CONTROL_FRAME_BYTES: Final = 120
"""Headers around one small frame: Ethernet 14, IP 20, TCP 32, TLS 22, HTTP/2 and gRPC 14, and some HTTP/2 frames."""


class LimitSource(IntEnum):
    """Origins of a limit of what we send to a peer; the smallest limit counts."""

    PEER = 0
    """`[budget.per_peer]` of this region."""

    GRANT = 1
    """The receiver's share for us."""


class Overhead:
    """Wire bytes for each byte that is handed to the link, learnt; 6 % to begin with."""

    def __init__(self) -> None:
        self._handed = OVERHEAD_PRIOR_BYTES
        self._wire = OVERHEAD_PRIOR_BYTES * OVERHEAD_PPM_FIRST // PPM

    @property
    def ppm(self) -> int:
        """Wire bytes for a million bytes handed over."""
        return min(max(self._wire * PPM // self._handed, PPM), OVERHEAD_PPM_MAX)

    def wire_bytes(self, handed_bytes: int) -> int:
        """Return how many bytes so many will be on the wire, rounded up."""
        return -(-handed_bytes * self.ppm // PPM)

    def learn(self, handed_bytes: int, wire_bytes: int) -> None:
        """Learn from what was handed over and what the kernel sent in the same time. A backlog evens out."""
        self._handed += handed_bytes
        self._wire += wire_bytes
        while self._handed > OVERHEAD_MEMORY_BYTES:
            self._handed //= 2
            self._wire //= 2


@dataclass(slots=True)
class LaneUse:
    """The demand and the use of one lane to one peer, in wire bytes since start."""

    demand_bytes: int = 0
    used_bytes: int = 0


@dataclass(slots=True)
class _WaitingPiece:
    """A piece that waits. `order` decides among pieces that could go: lane, urgency, sequence."""

    peer: str
    lane: BudgetLane
    handed_bytes: int
    order: tuple[int, tuple[int, ...], int]
    requested_ns: int


@dataclass(slots=True)
class PeerBudget:
    """A peer's bucket, and the counters of its traffic. lanes: wire bytes.

    unlearnt_bulk_bytes, unlearnt_control_bytes: handed to the link since the kernel's counters were last read.
    charged_bytes: taken from the buckets, of what the kernel counts as data.
    correction_bytes: acknowledgements, retransmissions, and what the overhead did not foresee.
    """

    bucket: TokenBucket
    limits: dict[LimitSource, int] = field(default_factory=dict)
    waiting: dict[BudgetLane, _WaitingPiece] = field(default_factory=dict)
    overhead: Overhead = field(default_factory=Overhead)
    lanes: dict[BudgetLane, LaneUse] = field(default_factory=lambda: {lane: LaneUse() for lane in BudgetLane})
    unlearnt_bulk_bytes: int = 0
    unlearnt_control_bytes: int = 0
    charged_bytes: int = 0
    measured_data_bytes: int = 0
    measured_other_bytes: int = 0
    correction_bytes: int = 0


class EgressBudget:
    """Region, then peer, then lane; without a limit at first. The module says who calls what.

    Attributes:
        region: the bucket of all peers together.
    """

    def __init__(self, peers: Iterable[str], *, now_ns: int) -> None:
        self.region = TokenBucket(None, now_ns=now_ns)
        self._peers: dict[str, PeerBudget] = {}
        self._requests = 0
        for peer in sorted(peers):
            self.add_peer(peer, now_ns=now_ns)

    def add_peer(self, peer: str, *, now_ns: int) -> None:
        """Send to one more peer, which has no limit of its own yet."""
        self._peers[peer] = PeerBudget(TokenBucket(None, now_ns=now_ns))

    def set_limit(self, peer: str, source: LimitSource, rate_bytes_per_s: int | None, *, now_ns: int) -> None:
        """Change one of the limits of a peer; None takes it away."""
        entry = self._peers[peer]
        if rate_bytes_per_s is None:
            entry.limits.pop(source, None)
        else:
            entry.limits[source] = rate_bytes_per_s
        entry.bucket.set_rate(min(entry.limits.values(), default=None), now_ns=now_ns)

    def set_lateness(self, late_ns: int, *, now_ns: int) -> None:
        """How late the caller's timers are: what a late one misses may follow at once, within BURST_NS_MAX."""
        self.region.set_lateness(late_ns, now_ns=now_ns)
        for entry in self._peers.values():
            entry.bucket.set_lateness(late_ns, now_ns=now_ns)

    def rate_bytes_per_s(self, peer: str) -> int | None:
        """Return the rate that this peer may get if nobody else wants anything; None: no limit."""
        rates = (self.region.rate_bytes_per_s, self._peers[peer].bucket.rate_bytes_per_s)
        return min((rate for rate in rates if rate is not None), default=None)

    def try_spend(self, peer: str, lane: BudgetLane, handed_bytes: int, *, now_ns: int) -> bool:
        """Send a piece if it may go now and none waits for what it would take; whether it goes, and counts as sent."""
        entry = self._peers[peer]
        rivals = (entry,) if self.region.rate_bytes_per_s is None else self._peers.values()
        return not any(rival.waiting for rival in rivals) and self._spend(entry, lane, handed_bytes, now_ns)

    def _spend(self, entry: PeerBudget, lane: BudgetLane, handed_bytes: int, now_ns: int) -> bool:
        wire_bytes = entry.overhead.wire_bytes(handed_bytes)
        if any(bucket.ready_at_ns(wire_bytes, now_ns=now_ns) > now_ns for bucket in (entry.bucket, self.region)):
            return False
        self._charge(entry, wire_bytes, now_ns)
        entry.unlearnt_bulk_bytes += handed_bytes
        entry.charged_bytes += wire_bytes
        entry.lanes[lane].used_bytes += wire_bytes
        return True

    def request(self, peer: str, lane: BudgetLane, handed_bytes: int, urgency: tuple[int, ...], *, now_ns: int) -> None:
        """Have a piece of so many bytes for the link wait, not in lane CONTROL. urgency: the smallest goes first."""
        waiting = self._peers[peer].waiting
        assert lane is not BudgetLane.CONTROL
        assert lane not in waiting, f"a piece for {peer} waits in lane {lane.name} already"
        self._requests += 1
        waiting[lane] = _WaitingPiece(peer, lane, handed_bytes, (int(lane), urgency, self._requests), now_ns)

    def withdraw(self, peer: str, lane: BudgetLane) -> None:
        """The piece that waits, if one does, is cancelled."""
        self._peers[peer].waiting.pop(lane, None)

    def release(self, *, now_ns: int) -> list[tuple[str, BudgetLane]]:
        """The pieces that may go now, in this order; they are counted as sent."""
        ready: list[tuple[str, BudgetLane]] = []
        while (piece := self._next(now_ns)) is not None and self._region_ready_at_ns(piece, now_ns) <= now_ns:
            entry = self._peers[piece.peer]
            del entry.waiting[piece.lane]
            was_allowed = self._spend(entry, piece.lane, piece.handed_bytes, now_ns)
            assert was_allowed, f"{piece.handed_bytes} bytes to {piece.peer} were not allowed yet"
            ready.append((piece.peer, piece.lane))
        return ready

    def wake_at_ns(self, *, now_ns: int) -> int | None:
        """When `release` is worth calling next; None while nothing waits."""
        piece = self._next(now_ns)
        if piece is not None:
            return self._region_ready_at_ns(piece, now_ns)
        times = [self._peer_ready_at_ns(piece, now_ns) for piece in self._waiting()]
        return min(times, default=None)

    def is_level(self) -> bool:
        """Whether no piece that waits is to go before another one for what it is for: several may go at once then."""
        return len({piece.order[:2] for piece in self._waiting()}) <= 1

    def _waiting(self) -> Iterable[_WaitingPiece]:
        return (piece for entry in self._peers.values() for piece in entry.waiting.values())

    def _next(self, now_ns: int) -> _WaitingPiece | None:
        """The first in order among those that their own peer's limit lets go; it may still wait for the region."""
        ready = [piece for piece in self._waiting() if self._peer_ready_at_ns(piece, now_ns) <= now_ns]

        def order(piece: _WaitingPiece) -> tuple[bool, tuple[int, tuple[int, ...], int]]:
            return (now_ns - piece.requested_ns < STARVING_NS, piece.order)

        return min(ready, key=order, default=None)

    def _peer_ready_at_ns(self, piece: _WaitingPiece, now_ns: int) -> int:
        entry = self._peers[piece.peer]
        return entry.bucket.ready_at_ns(entry.overhead.wire_bytes(piece.handed_bytes), now_ns=now_ns)

    def _region_ready_at_ns(self, piece: _WaitingPiece, now_ns: int) -> int:
        wire_bytes = self._peers[piece.peer].overhead.wire_bytes(piece.handed_bytes)
        return self.region.ready_at_ns(wire_bytes, now_ns=now_ns)

    def charge_control(self, peer: str, handed_bytes: int, *, now_ns: int) -> None:
        """A frame of the control lane goes out: it does not wait, bulk waits for it."""
        wire_bytes = handed_bytes + CONTROL_FRAME_BYTES
        entry = self._peers[peer]
        use = entry.lanes[BudgetLane.CONTROL]
        use.demand_bytes += wire_bytes
        use.used_bytes += wire_bytes
        entry.unlearnt_control_bytes += handed_bytes
        entry.charged_bytes += wire_bytes
        self._charge(entry, wire_bytes, now_ns)

    def count_demand(self, peer: str, lane: BudgetLane, handed_bytes: int) -> None:
        """A transfer of this size was requested (before compression); for people only."""
        entry = self._peers[peer]
        entry.lanes[lane].demand_bytes += entry.overhead.wire_bytes(handed_bytes)

    def learn_overhead(self, peer: str, *, data_bytes: int, other_bytes: int, now_ns: int) -> None:
        """Take the kernel's count of bytes to a peer since start: learn the overhead, charge the unforeseen.

        data_bytes: payload sent for the first time, with headers; it lags behind by what the link still holds, so only
        a surplus is a fact. other_bytes: pure acknowledgements and retransmissions, with headers.
        """
        entry = self._peers[peer]
        data = data_bytes - entry.measured_data_bytes
        new_other_bytes = other_bytes - entry.measured_other_bytes
        entry.measured_data_bytes, entry.measured_other_bytes = data_bytes, other_bytes
        bulk, control = entry.unlearnt_bulk_bytes, entry.unlearnt_control_bytes
        entry.unlearnt_bulk_bytes = entry.unlearnt_control_bytes = 0
        if bulk >= max(PIECE_BYTES_MIN, 16 * control):
            entry.overhead.learn(bulk + control, max(0, data))
        surplus = max(0, data_bytes - entry.charged_bytes)
        entry.charged_bytes += surplus
        unforeseen = surplus + max(0, new_other_bytes)
        entry.correction_bytes += unforeseen
        self._charge(entry, unforeseen, now_ns)

    def _charge(self, entry: PeerBudget, wire_bytes: int, now_ns: int) -> None:
        entry.bucket.charge(wire_bytes, now_ns=now_ns)
        self.region.charge(wire_bytes, now_ns=now_ns)

    def use(self, peer: str) -> PeerBudget:
        """The demand and the use of a peer, to be read only."""
        return self._peers[peer]

    def limited_by(self, peer: str) -> str:
        """Say whose limit bounds what this peer may get; "": the region's, or nobody's."""
        rate = self.rate_bytes_per_s(peer)
        sources = [source for source, limit in sorted(self._peers[peer].limits.items()) if limit == rate]
        return sources[0].name.lower() if sources else ""
