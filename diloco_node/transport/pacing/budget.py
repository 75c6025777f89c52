"""The bandwidth budget of a region, on its sending side: who may send how much, and when.

A token bucket for the region, one for each peer below it, and in each peer four lanes: control first (it never waits,
it is only counted), then rounds by deadline, then recovery, then measurement. What is counted are **wire bytes**: what
was handed to the link times an overhead that is learnt from the kernel's counters; acknowledgements and retransmissions
are charged as the kernel counts them. Integers throughout: bytes, bytes per second, nanoseconds.

The caller's duties, for each piece of bulk (see `EgressBudget`):

1. `ask` with the piece's size as it will be handed to the link; at most one piece of a peer and lane waits.
2. `release`, whenever something was asked, a limit changed, or `wake_at_ns` has come: those pieces may go now.
3. `charge_control` for every frame of the control lane, `measured` for what the kernel counted.

In any window of time the pieces released add up to at most rate x window + `burst_bytes(rate)` (or one piece, if that
is more), also right after idle time: with a burst of 30 ms that is 100.3 % of ten seconds, with 150 ms 101.5 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

NS_PER_S: Final = 1_000_000_000

LATE_NS: Final = 20_000_000
"""A bucket saves up one piece and so much more in idle time. A timer that is late by less loses nothing; on a link as
fast as the budget a burst stands in the queue for as long, before every heartbeat.
"""

BURST_NS_MAX: Final = 150_000_000
"""On a machine whose timers are later (`set_lateness`) a bucket saves up more, but never more than this."""

PIECE_NS: Final = 10_000_000
PIECE_BYTES_MIN: Final = 16 * 2**10
PIECE_BYTES_MAX: Final = 2**20

PIECE_NS_MAX: Final = 100_000_000
"""Below 1.3 Mbit/s pieces get smaller than PIECE_BYTES_MIN: one of 16 KiB would be over the ceiling by itself."""

PIECE_BYTES_LEAST: Final = 1024

STARVING_NS: Final = 2_000_000_000
"""A piece that has waited for so long goes first: strict order between lanes must not break a transfer's link."""

PPM: Final = 1_000_000
OVERHEAD_PPM_FIRST: Final = 1_060_000
OVERHEAD_PPM_MIN: Final = 1_000_000
OVERHEAD_PPM_MAX: Final = 1_250_000

OVERHEAD_PRIOR_BYTES: Final = 10**6
"""How much traffic the first guess of 6 % weighs."""

OVERHEAD_MEMORY_BYTES: Final = 64 * 2**20
"""Older traffic than about this counts less and less: a route changes, and with it the size of a packet."""

CONTROL_FRAME_BYTES: Final = 120
"""Headers around one small frame: Ethernet 14, IP 20, TCP 32, TLS 22, HTTP/2 and gRPC 14, and some HTTP/2 frames."""


class BudgetLane(IntEnum):
    """What traffic is for; a smaller number goes first."""

    CONTROL = 0
    ROUNDS = 1
    RECOVERY = 2
    MEASUREMENT = 3


class LimitSource(IntEnum):
    """Who limits what we send to a peer; the smallest of them counts."""

    PEER = 0
    """`[budget.per_peer]` of this region."""

    GRANT = 1
    """The receiver's share for us."""

    DELAY = 2
    """The link's queue is growing (`core.delay`)."""


def burst_bytes(rate_bytes_per_s: int, late_ns: int = LATE_NS) -> int:
    """What a bucket of this rate may hold: 30 ms of it from 13 to 800 Mbit/s, at most 120 ms from 82 kbit/s.

    Args:
        late_ns: how late timers are, at least LATE_NS; what is over BURST_NS_MAX with the piece does not count.
    """
    usual = piece_bytes(rate_bytes_per_s) + rate_bytes_per_s * LATE_NS // NS_PER_S
    wished = piece_bytes(rate_bytes_per_s) + rate_bytes_per_s * late_ns // NS_PER_S
    return max(usual, min(wished, rate_bytes_per_s * BURST_NS_MAX // NS_PER_S))


def piece_bytes(rate_bytes_per_s: int | None) -> int:
    """How much is released at once: 10 ms of the rate, 16 KiB to 1 MiB, but never more than 100 ms of the rate."""
    if rate_bytes_per_s is None:
        return PIECE_BYTES_MAX
    usual = min(max(rate_bytes_per_s * PIECE_NS // NS_PER_S, PIECE_BYTES_MIN), PIECE_BYTES_MAX)
    return max(PIECE_BYTES_LEAST, min(usual, rate_bytes_per_s * PIECE_NS_MAX // NS_PER_S))


class TokenBucket:
    """A ceiling on bytes per second. Time never goes back between calls; a bucket starts empty.

    Args:
        rate_bytes_per_s: at least 1; None: no limit.
        now_ns: when it starts.
    """

    def __init__(self, rate_bytes_per_s: int | None, *, now_ns: int) -> None:
        self._rate = _checked(rate_bytes_per_s)
        self._level = 0  # bytes x 10^9, negative: in debt; so that a nanosecond adds exactly `rate`
        self._at_ns = now_ns
        self._late_ns = LATE_NS
        self._lost = 0
        self._follow()

    @property
    def rate_bytes_per_s(self) -> int | None:
        """The ceiling; None: no limit."""
        return self._rate

    def _follow(self) -> None:
        """The rate or the lateness changed: what it may hold is asked for some times for each piece."""
        self._burst = burst_bytes(self._rate, self._late_ns) if self._rate is not None else 0

    def set_rate(self, rate_bytes_per_s: int | None, *, now_ns: int) -> None:
        """Change the ceiling from now on; what was saved up shrinks to the new burst, debts stay."""
        self._accrue(now_ns)
        if self._rate is None:
            self._level = 0
        self._rate = _checked(rate_bytes_per_s)
        self._follow()
        if self._rate is not None:
            self._level = min(self._level, self._burst * NS_PER_S)

    def set_lateness(self, late_ns: int, *, now_ns: int) -> None:
        """Save up for timers that are so late."""
        self._accrue(now_ns)
        self._late_ns = late_ns
        self._follow()
        if self._rate is not None:
            self._level = min(self._level, self._burst * NS_PER_S)

    def ready_at_ns(self, size_bytes: int, *, now_ns: int) -> int:
        """When a piece of this size may go, `now_ns` if at once. One over the burst goes when the bucket is full."""
        if self._rate is None:
            return now_ns
        needed = min(size_bytes, self._burst) * NS_PER_S
        missing = needed - self._level_at(now_ns)
        return now_ns if missing <= 0 else now_ns + -(-missing // self._rate)

    def spend(self, size_bytes: int, *, now_ns: int) -> None:
        """Take a piece that may go now."""
        assert self.ready_at_ns(size_bytes, now_ns=now_ns) <= now_ns, f"{size_bytes} bytes were not allowed yet"
        self.charge(size_bytes, now_ns=now_ns)

    def charge(self, size_bytes: int, *, now_ns: int) -> None:
        """Count bytes that nobody asked for: the bucket may go into debt."""
        self._accrue(now_ns)
        if self._rate is not None:
            self._level -= size_bytes * NS_PER_S

    def debt_bytes(self, *, now_ns: int) -> int:
        """How far it is below zero, rounded up; 0 without a limit."""
        return 0 if self._rate is None else max(0, -(self._level_at(now_ns) // NS_PER_S))

    def _level_at(self, now_ns: int) -> int:
        assert self._rate is not None
        earned = self._rate * max(0, now_ns - self._at_ns)
        return min(self._level + earned, self._burst * NS_PER_S)

    def lost_bytes(self, *, now_ns: int) -> int:
        """What could have been sent since start and was not, because the bucket was full; 0 without a limit."""
        self._accrue(now_ns)
        return self._lost // NS_PER_S

    def _accrue(self, now_ns: int) -> None:
        if self._rate is not None:
            level = self._level_at(now_ns)
            self._lost += self._level + self._rate * max(0, now_ns - self._at_ns) - level
            self._level = level
        self._at_ns = max(self._at_ns, now_ns)


def _checked(rate_bytes_per_s: int | None) -> int | None:
    if rate_bytes_per_s is not None and rate_bytes_per_s < 1:
        raise ValueError(f"a rate of {rate_bytes_per_s} bytes/s; it must be at least 1, or None")
    return rate_bytes_per_s


class Overhead:
    """Wire bytes for each byte that is handed to the link, learnt; 6 % to begin with."""

    def __init__(self) -> None:
        self._handed = OVERHEAD_PRIOR_BYTES
        self._wire = OVERHEAD_PRIOR_BYTES * OVERHEAD_PPM_FIRST // PPM

    @property
    def ppm(self) -> int:
        """Wire bytes for a million bytes handed over."""
        return min(max(self._wire * PPM // self._handed, OVERHEAD_PPM_MIN), OVERHEAD_PPM_MAX)

    def wire_bytes(self, handed_bytes: int) -> int:
        """What so many bytes will be on the wire, rounded up."""
        return -(-handed_bytes * self.ppm // PPM)

    def learn(self, handed_bytes: int, wire_bytes: int) -> None:
        """What was handed over and what the kernel sent in the same time; a backlog between them evens out."""
        self._handed += handed_bytes
        self._wire += wire_bytes
        while self._handed > OVERHEAD_MEMORY_BYTES:
            self._handed //= 2
            self._wire //= 2


@dataclass(slots=True)
class LaneUse:
    """What one lane to one peer wanted and used, in wire bytes since start."""

    wanted_bytes: int = 0
    used_bytes: int = 0


@dataclass(slots=True)
class _Piece:
    """A piece that waits. `order` decides among pieces that could go: lane, urgency, turn."""

    peer: str
    lane: BudgetLane
    handed_bytes: int
    order: tuple[int, tuple[int, ...], int]
    asked_ns: int


@dataclass(slots=True)
class _Peer:
    """One peer's bucket and what is known of its traffic."""

    bucket: TokenBucket
    limits: dict[LimitSource, int] = field(default_factory=dict)
    waiting: dict[BudgetLane, _Piece] = field(default_factory=dict)
    overhead: Overhead = field(default_factory=Overhead)
    lanes: dict[BudgetLane, LaneUse] = field(default_factory=lambda: {lane: LaneUse() for lane in BudgetLane})
    handed_bulk_bytes: int = 0
    handed_control_bytes: int = 0
    learnt_bulk_bytes: int = 0
    learnt_control_bytes: int = 0
    charged_bytes: int = 0
    measured_data_bytes: int = 0
    measured_other_bytes: int = 0
    correction_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerUse:
    """What goes to one peer, for people.

    Attributes:
        rate_bytes_per_s: what it may get now, None without a limit. limited_by: whose limit that is, "": the region's.
        overhead_ppm: as learnt.
        correction_bytes: acknowledgements, retransmissions, and what the overhead did not foresee.
        lanes: wire bytes by lane.
    """

    rate_bytes_per_s: int | None
    limited_by: str
    overhead_ppm: int
    correction_bytes: int
    lanes: dict[BudgetLane, LaneUse]


class EgressBudget:
    """Region, then peer, then lane. See the module's docstring for who calls what.

    Args:
        peers: their names. now_ns: when it starts. Without `set_region_rate` and `set_limit` there is no limit.
    """

    def __init__(self, peers: Iterable[str], *, now_ns: int) -> None:
        self._region = TokenBucket(None, now_ns=now_ns)
        self._peers = {peer: _Peer(TokenBucket(None, now_ns=now_ns)) for peer in sorted(peers)}
        self._turns = 0

    # ---- limits ------------------------------------------------------------------------------------------------------

    @property
    def region_rate_bytes_per_s(self) -> int | None:
        """The ceiling of all peers together; None: no limit."""
        return self._region.rate_bytes_per_s

    def set_region_rate(self, rate_bytes_per_s: int | None, *, now_ns: int) -> None:
        """Change the ceiling of all peers together; None: no limit."""
        self._region.set_rate(rate_bytes_per_s, now_ns=now_ns)

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
        self._region.set_lateness(late_ns, now_ns=now_ns)
        for entry in self._peers.values():
            entry.bucket.set_lateness(late_ns, now_ns=now_ns)

    def lost_bytes(self, *, now_ns: int) -> int:
        """What the region's ceiling would have let through since start, and nobody sent in time."""
        return self._region.lost_bytes(now_ns=now_ns)

    def is_limited(self, peer: str) -> bool:
        """Whether anything limits what this peer gets."""
        return self._region.rate_bytes_per_s is not None or self._peers[peer].bucket.rate_bytes_per_s is not None

    def rate_bytes_per_s(self, peer: str) -> int | None:
        """What this peer may get if nobody else wants anything; None: no limit."""
        rates = (self._region.rate_bytes_per_s, self._peers[peer].bucket.rate_bytes_per_s)
        return min((rate for rate in rates if rate is not None), default=None)

    def held_bytes_per_s(self, peer: str, *, beside: int) -> int | None:
        """What this peer may get by everything but the limit for delay; None: no limit.

        Args:
            beside: how many other peers there is something to send to; they have shares of the region's ceiling.
        """
        rates = [limit for source, limit in self._peers[peer].limits.items() if source is not LimitSource.DELAY]
        if self._region.rate_bytes_per_s is not None:
            rates.append(max(1, self._region.rate_bytes_per_s // (beside + 1)))
        return min(rates, default=None)

    def piece_bytes(self, peer: str) -> int:
        """How much to hand to this peer's link at once."""
        return piece_bytes(self.rate_bytes_per_s(peer))

    # ---- asking and sending ------------------------------------------------------------------------------------------

    def ready_at_ns(self, peer: str, handed_bytes: int, *, now_ns: int) -> int:
        """When a piece for this peer could go if nobody else wanted anything."""
        entry = self._peers[peer]
        wire_bytes = entry.overhead.wire_bytes(handed_bytes)
        by_peer = entry.bucket.ready_at_ns(wire_bytes, now_ns=now_ns)
        return max(by_peer, self._region.ready_at_ns(wire_bytes, now_ns=now_ns))

    def spend(self, peer: str, lane: BudgetLane, handed_bytes: int, *, now_ns: int) -> None:
        """Send a piece that may go now (`ready_at_ns`), past those that wait."""
        was_allowed = self._spend(self._peers[peer], lane, handed_bytes, now_ns)
        assert was_allowed, f"{handed_bytes} bytes to {peer} were not allowed yet"

    def try_spend(self, peer: str, lane: BudgetLane, handed_bytes: int, *, now_ns: int) -> bool:
        """Send a piece if it may go now and no other one waits for what it would take: short for `ask` and `release`.

        Returns:
            Whether it goes; it counts as sent then, and nothing has changed if not.
        """
        entry = self._peers[peer]
        rivals = (entry,) if self._region.rate_bytes_per_s is None else self._peers.values()
        return not any(one.waiting for one in rivals) and self._spend(entry, lane, handed_bytes, now_ns)

    def _spend(self, entry: _Peer, lane: BudgetLane, handed_bytes: int, now_ns: int) -> bool:
        wire_bytes = entry.overhead.wire_bytes(handed_bytes)
        buckets = (entry.bucket, self._region)
        if any(bucket.ready_at_ns(wire_bytes, now_ns=now_ns) > now_ns for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.charge(wire_bytes, now_ns=now_ns)
        entry.handed_bulk_bytes += handed_bytes
        entry.charged_bytes += wire_bytes
        entry.lanes[lane].used_bytes += wire_bytes
        return True

    def ask(self, peer: str, lane: BudgetLane, handed_bytes: int, urgency: tuple[int, ...], *, now_ns: int) -> None:
        """A piece wants to go.

        Args:
            lane: not CONTROL, which never waits. handed_bytes: as it will be handed to the link.
            urgency: within a lane the smallest goes first; peers with the same take turns.
        """
        waiting = self._peers[peer].waiting
        assert lane is not BudgetLane.CONTROL
        assert lane not in waiting, f"a piece for {peer} waits in lane {lane.name} already"
        self._turns += 1
        waiting[lane] = _Piece(peer, lane, handed_bytes, (int(lane), urgency, self._turns), now_ns)

    def withdraw(self, peer: str, lane: BudgetLane) -> None:
        """The piece that waits, if one does, is not wanted any more."""
        self._peers[peer].waiting.pop(lane, None)

    def release(self, *, now_ns: int) -> list[tuple[str, BudgetLane]]:
        """The pieces that may go now, in this order; they are counted as sent."""
        released: list[tuple[str, BudgetLane]] = []
        while (piece := self._next(now_ns)) is not None and self._region_ready_at_ns(piece, now_ns) <= now_ns:
            del self._peers[piece.peer].waiting[piece.lane]
            self.spend(piece.peer, piece.lane, piece.handed_bytes, now_ns=now_ns)
            released.append((piece.peer, piece.lane))
        return released

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

    def _waiting(self) -> Iterable[_Piece]:
        return (piece for entry in self._peers.values() for piece in entry.waiting.values())

    def _next(self, now_ns: int) -> _Piece | None:
        """The first in order among those that their own peer's limit lets go; it may still wait for the region."""
        ready = [piece for piece in self._waiting() if self._peer_ready_at_ns(piece, now_ns) <= now_ns]

        def order(piece: _Piece) -> tuple[bool, tuple[int, tuple[int, ...], int]]:
            return (now_ns - piece.asked_ns < STARVING_NS, piece.order)

        return min(ready, key=order, default=None)

    def _peer_ready_at_ns(self, piece: _Piece, now_ns: int) -> int:
        entry = self._peers[piece.peer]
        return entry.bucket.ready_at_ns(entry.overhead.wire_bytes(piece.handed_bytes), now_ns=now_ns)

    def _region_ready_at_ns(self, piece: _Piece, now_ns: int) -> int:
        wire_bytes = self._peers[piece.peer].overhead.wire_bytes(piece.handed_bytes)
        return self._region.ready_at_ns(wire_bytes, now_ns=now_ns)

    # ---- what did not ask --------------------------------------------------------------------------------------------

    def charge_control(self, peer: str, handed_bytes: int, *, now_ns: int) -> None:
        """A frame of the control lane goes out: it does not wait, bulk waits for it."""
        wire_bytes = handed_bytes + CONTROL_FRAME_BYTES
        entry = self._peers[peer]
        use = entry.lanes[BudgetLane.CONTROL]
        use.wanted_bytes += wire_bytes
        use.used_bytes += wire_bytes
        entry.handed_control_bytes += handed_bytes
        self._charge(entry, wire_bytes, now_ns)
        entry.charged_bytes += wire_bytes

    def want(self, peer: str, lane: BudgetLane, handed_bytes: int) -> None:
        """Somebody asked for a transfer of this size (before compression); for people only."""
        entry = self._peers[peer]
        entry.lanes[lane].wanted_bytes += entry.overhead.wire_bytes(handed_bytes)

    def measured(self, peer: str, *, data_bytes: int, other_bytes: int, now_ns: int) -> None:
        """What the kernel counted as sent to a peer since start: learns the overhead, charges what was not foreseen.

        Args:
            data_bytes: payload sent for the first time, with its headers. It lags behind what was handed over, by what
                the link still holds: so only a surplus is a fact.
            other_bytes: pure acknowledgements and retransmissions, with headers.
        """
        entry = self._peers[peer]
        data = data_bytes - entry.measured_data_bytes
        other = other_bytes - entry.measured_other_bytes
        entry.measured_data_bytes, entry.measured_other_bytes = data_bytes, other_bytes
        bulk = entry.handed_bulk_bytes - entry.learnt_bulk_bytes
        control = entry.handed_control_bytes - entry.learnt_control_bytes
        entry.learnt_bulk_bytes, entry.learnt_control_bytes = entry.handed_bulk_bytes, entry.handed_control_bytes
        if bulk >= max(PIECE_BYTES_MIN, 16 * control):
            entry.overhead.learn(bulk + control, max(0, data))
        surplus = max(0, data_bytes - entry.charged_bytes)
        entry.charged_bytes += surplus
        unforeseen = surplus + max(0, other)
        entry.correction_bytes += unforeseen
        self._charge(entry, unforeseen, now_ns)

    def _charge(self, entry: _Peer, wire_bytes: int, now_ns: int) -> None:
        entry.bucket.charge(wire_bytes, now_ns=now_ns)
        self._region.charge(wire_bytes, now_ns=now_ns)

    # ---- for people --------------------------------------------------------------------------------------------------

    def use(self, peer: str) -> PeerUse:
        """What a peer may get, wanted and used; the counters are the live ones."""
        entry = self._peers[peer]
        rate = self.rate_bytes_per_s(peer)
        sources = [source for source, limit in sorted(entry.limits.items()) if limit == rate]
        limited_by = sources[0].name.lower() if sources else ""
        return PeerUse(rate, limited_by, entry.overhead.ppm, entry.correction_bytes, entry.lanes)
