"""The bandwidth budget on its receiving side: who may send us how much.

Each peer is granted a share of the ingress ceiling: those with a demand share it max-min fairly (nobody gets more than
its demand, and what it leaves goes to the others); while nobody has a demand all have equal shares, so that the first
ones to begin need not request one. The sum of what is granted never exceeds the ceiling: a share grows only after those
that shrink have been sent, and the peers had time to obey. Bytes are wire bytes, time is integer nanoseconds.

The back-stop for a peer that does not obey: `read_at_ns` says from when its bulk stream may be read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from diloco_node.numeric import NS_PER_S
from diloco_node.transport.pacing.egress_budget import PPM, Overhead
from diloco_node.transport.pacing.token_bucket import TokenBucket

SETTLE_NS: Final = 150_000_000
"""From sending a peer a smaller share to giving the difference to another: a round trip, and a release under way."""

IDLE_SHARE: Final = 50
"""While others are busy the idle peers together keep a 50th of the ceiling: for control, and their first piece."""

CHANGE_PPM_MIN: Final = 20_000
"""A share that changes by less than 2 % is not sent."""

ALLOWANCE_NS: Final = 250_000_000
ALLOWANCE_BYTES: Final = 64 * 2**10
"""Time by which a peer may be ahead of its share before it is not read: grants and bytes under way cross each other."""

DEBT_FREE_NS: Final = 150_000_000
"""The shares of the next second are less by what arrived beyond the ceiling, up to half of them. Bytes of one reading
of the kernel's counters, ten times a second, are free."""

UNLIMITED: Final = 0
"""In a grant: no limit."""

DEMAND_MAX: Final = 1 << 62
"""A demand without a bound of its own."""


@dataclass(slots=True)
class _Grant:
    """The demand and the share of one peer. granted: the last grant sent on this link, None: none yet.

    before, until_ns: an earlier, larger grant that may still be in use until then.
    unlearnt_bytes: read since the kernel's counters were last taken.
    """

    bucket: TokenBucket
    demand_bytes_per_s: int = 0
    peer_rate: int | None = None
    granted: int | None = None
    before: int = 0
    until_ns: int = 0
    is_connected: bool = False
    overhead: Overhead = field(default_factory=Overhead)
    unlearnt_bytes: int = 0
    measured_bytes: int = 0

    def in_use(self, now_ns: int) -> int:
        """The most that it may be sending now."""
        grant = self.granted or 0
        return max(grant, self.before) if now_ns < self.until_ns else grant


class IngressGrants:
    """Shares of the ingress ceiling, without a limit at first, and the back-stop.

    After every change of the region's rate, each call of `set_peer_rate`, `demand_reported`, `link_up`, `link_down` and
    `count_on_wire`, and at `wake_at_ns`: send what `due` returns.

    Attributes:
        region: the bucket of all peers together.
    """

    def __init__(self, peers: Iterable[str], *, now_ns: int) -> None:
        self._peers: dict[str, _Grant] = {}
        self.region = TokenBucket(None, now_ns=now_ns)
        for peer in sorted(peers):
            self.add_peer(peer, now_ns=now_ns)

    def add_peer(self, peer: str, *, now_ns: int) -> None:
        """Share with one more peer, which is not connected yet."""
        self._peers[peer] = _Grant(TokenBucket(None, now_ns=now_ns))

    def set_peer_rate(self, peer: str, rate_bytes_per_s: int | None) -> None:
        """Change what one peer may send at most; None: no limit of its own."""
        self._peers[peer].peer_rate = rate_bytes_per_s

    def demand_reported(self, peer: str, bytes_per_s: int) -> None:
        """Take a peer's report of what it could send now: 0 nothing, DEMAND_MAX as much as it gets."""
        self._peers[peer].demand_bytes_per_s = min(max(0, bytes_per_s), DEMAND_MAX)

    def link_up(self, peer: str) -> None:
        """A link came up: the peer must get its share."""
        entry = self._peers[peer]
        entry.is_connected, entry.granted = True, None

    def link_down(self, peer: str, *, now_ns: int) -> None:
        """The link went down: nothing more comes from there."""
        entry = self._peers[peer]
        entry.before, entry.until_ns = entry.in_use(now_ns), now_ns + SETTLE_NS
        entry.is_connected, entry.granted, entry.demand_bytes_per_s = False, None, 0

    def due(self, *, now_ns: int) -> list[tuple[str, int]]:
        """Grants to send now: (peer, bytes/s), UNLIMITED for none. They count as sent."""
        targets = self.targets(now_ns=now_ns)
        news = {peer: target for peer, target in targets.items() if self._is_news(self._peers[peer], target)}
        # First all that shrink: what they give up is free for the others after they had time to obey.
        first = [peer for peer, target in news.items() if target <= (self._peers[peer].granted or 0)]
        messages = []
        for peer in first + [peer for peer in news if peer not in first]:
            grant = self._give(peer, news[peer], now_ns)
            if grant is not None:
                messages.append((peer, grant))
        return messages

    def wake_at_ns(self, *, now_ns: int) -> int | None:
        """When a share that had to wait can grow; None: none waits."""
        targets = self.targets(now_ns=now_ns)
        if not any(self._is_news(self._peers[peer], target) for peer, target in targets.items()):
            return None
        times = [entry.until_ns for entry in self._peers.values() if entry.until_ns > now_ns]
        return min(times, default=None)

    def targets(self, *, now_ns: int) -> dict[str, int]:
        """Return the rate that each connected peer should have, UNLIMITED without a limit."""
        entries = {peer: entry for peer, entry in self._peers.items() if entry.is_connected}
        rate = self.region.rate_bytes_per_s
        if rate is None:
            return {peer: entry.peer_rate or UNLIMITED for peer, entry in entries.items()}
        debt = self.region.debt_bytes(now_ns=now_ns) - rate * DEBT_FREE_NS // NS_PER_S
        free = rate - min(max(0, debt), rate // 2)
        busy = {peer: entry.demand_bytes_per_s for peer, entry in entries.items() if entry.demand_bytes_per_s}
        idle = [peer for peer in entries if peer not in busy]
        if not busy:
            busy, idle = dict.fromkeys(entries, DEMAND_MAX), []
        idle_share = free // IDLE_SHARE // len(idle) if idle else 0
        caps = {peer: min(demand, entries[peer].peer_rate or DEMAND_MAX) for peer, demand in busy.items()}
        shares = max_min(free - idle_share * len(idle), caps) | dict.fromkeys(idle, idle_share)
        return {peer: max(1, share) for peer, share in sorted(shares.items())}

    def last_grant(self, peer: str) -> int | None:
        """Return the last grant of a peer; UNLIMITED: no limit; None: nothing yet on this link."""
        return self._peers[peer].granted

    def _is_news(self, entry: _Grant, target: int) -> bool:
        grant = entry.granted
        if grant is None:
            return target != UNLIMITED
        if UNLIMITED in (grant, target):
            return grant != target
        return abs(target - grant) * PPM >= CHANGE_PPM_MIN * grant

    def _give(self, peer: str, target: int, now_ns: int) -> int | None:
        entry = self._peers[peer]
        rate = self.region.rate_bytes_per_s
        if rate is not None:
            rest_bytes = sum(rival.in_use(now_ns) for name, rival in self._peers.items() if name != peer)
            room = max(1, rate - rest_bytes)
            is_less = entry.granted not in (None, UNLIMITED) and target <= (entry.granted or 0)
            target = target if is_less else min(target, room)
            if not self._is_news(entry, target):
                return None
        if entry.granted is not None and target < entry.granted:
            entry.before, entry.until_ns = entry.in_use(now_ns), now_ns + SETTLE_NS
        entry.granted = target
        entry.bucket.set_rate(target or None, now_ns=now_ns)
        return target

    def count_arrival(self, peer: str, frame_bytes: int, *, now_ns: int) -> None:
        """A frame of bulk was read."""
        entry = self._peers[peer]
        entry.unlearnt_bytes += frame_bytes
        entry.bucket.charge(entry.overhead.wire_bytes(frame_bytes), now_ns=now_ns)

    def read_at_ns(self, peer: str, *, now_ns: int) -> int:
        """From when this peer's bulk may be read; `now_ns` for one that keeps to its share."""
        bucket = self._peers[peer].bucket
        rate = bucket.rate_bytes_per_s
        if rate is None:
            return now_ns
        over = bucket.debt_bytes(now_ns=now_ns) - ALLOWANCE_BYTES - rate * ALLOWANCE_NS // NS_PER_S
        return now_ns if over <= 0 else now_ns + -(-over * NS_PER_S // rate)

    def count_on_wire(self, peer: str, wire_bytes: int, *, now_ns: int) -> None:
        """Take the kernel's count of bytes from a peer since start, headers and acknowledgements included."""
        entry = self._peers[peer]
        new = max(0, wire_bytes - entry.measured_bytes)
        entry.measured_bytes = wire_bytes
        read, entry.unlearnt_bytes = entry.unlearnt_bytes, 0
        if read >= ALLOWANCE_BYTES:
            entry.overhead.learn(read, new)
        self.region.charge(new, now_ns=now_ns)


def max_min(total: int, caps: Mapping[str, int]) -> dict[str, int]:
    """Share `total` among those with a cap each: nobody could get more without taking from one that has less. A
    rest beyond all caps is left over."""
    shares: dict[str, int] = {}
    left_bytes, waiting = total, sorted(caps, key=lambda peer: (caps[peer], peer))
    while waiting:
        peer = waiting.pop(0)
        shares[peer] = min(caps[peer], left_bytes // (len(waiting) + 1))
        left_bytes -= shares[peer]
    return shares
