"""A ceiling on bytes per second, and how much goes out at once under it. Integers: bytes, bytes/s, nanoseconds.

In any window of time the pieces that a bucket lets go add up to at most rate x window + `burst_bytes(rate)` (or one
piece, if that is more), also right after idle time: with a burst of 30 ms that is 100.3 % of ten seconds, with 150 ms
101.5 %.
"""

from __future__ import annotations

from typing import Final

from diloco_node.numeric import NS_PER_S

LATE_NS: Final = 20_000_000
"""A bucket saves up one piece and so much more in idle time: a timer that is late by less loses nothing. On a link as
fast as the budget a burst stands in the queue for as long, before every heartbeat."""

BURST_NS_MAX: Final = 150_000_000
"""On a machine whose timers are later (`set_lateness`) a bucket saves up more, but never more than this."""

DEBT_NS_MAX: Final = 10 * NS_PER_S
"""A bucket pays for as long at most. Else acknowledgements, and bytes that were under way when the rate was lowered,
would stop bulk for minutes; a link that has no turn for one minute is given up."""

PIECE_NS: Final = 10_000_000
PIECE_BYTES_MIN: Final = 16 * 2**10
PIECE_BYTES_MAX: Final = 2**20
"""A piece is so long, or so large: smaller ones cost more CPU time a byte, the largest is one chunk."""

PIECE_NS_MAX: Final = 100_000_000
PIECE_BYTES_LEAST: Final = 1024
"""Below 1.3 Mbit/s pieces get smaller than PIECE_BYTES_MIN: one of 16 KiB would be over the ceiling by itself."""


def piece_bytes(rate_bytes_per_s: int) -> int:
    """How much is released at once: 10 ms of the rate, 16 KiB to 1 MiB, but never more than 100 ms of the rate."""
    usual = min(max(rate_bytes_per_s * PIECE_NS // NS_PER_S, PIECE_BYTES_MIN), PIECE_BYTES_MAX)
    return max(PIECE_BYTES_LEAST, min(usual, rate_bytes_per_s * PIECE_NS_MAX // NS_PER_S))


def burst_bytes(rate_bytes_per_s: int, late_ns: int = LATE_NS) -> int:
    """Return the bytes that a bucket of this rate may hold: 30 ms of it from 13 to 800 Mbit/s, at most 120 ms from 82
    kbit/s. late_ns: of timers, from LATE_NS up to what BURST_NS_MAX leaves."""
    usual = piece_bytes(rate_bytes_per_s) + rate_bytes_per_s * LATE_NS // NS_PER_S
    wish_bytes = piece_bytes(rate_bytes_per_s) + rate_bytes_per_s * late_ns // NS_PER_S
    return max(usual, min(wish_bytes, rate_bytes_per_s * BURST_NS_MAX // NS_PER_S))


class TokenBucket:
    """A ceiling on bytes per second, at least 1; None: no limit. Time never goes back between calls. burst: what it may
    hold, from the start; None: `burst_bytes`, and it starts empty."""

    def __init__(self, rate_bytes_per_s: int | None, *, now_ns: int, burst: int | None = None) -> None:
        self._level = 0 if burst is None else burst * NS_PER_S  # bytes x 10^9, so that a ns adds exactly `rate`
        self._at_ns = now_ns
        self._late_ns = LATE_NS
        self._lost = 0
        self._burst_set = burst
        self._burst = 0
        self._set(rate_bytes_per_s)

    def _set(self, rate_bytes_per_s: int | None) -> None:
        """The burst is asked for some times for each piece, so it is kept."""
        if rate_bytes_per_s is not None and rate_bytes_per_s < 1:
            raise ValueError(f"a rate of {rate_bytes_per_s} bytes/s; it must be at least 1, or None")
        self.rate_bytes_per_s = rate_bytes_per_s
        if rate_bytes_per_s is not None:
            self._burst = burst_bytes(rate_bytes_per_s, self._late_ns) if self._burst_set is None else self._burst_set
            self._level = max(min(self._level, self._burst * NS_PER_S), -rate_bytes_per_s * DEBT_NS_MAX)

    def set_rate(self, rate_bytes_per_s: int | None, *, now_ns: int) -> None:
        """Change the ceiling from now on. Savings shrink to the new burst, debts to DEBT_NS_MAX of the new rate."""
        self._accrue(now_ns)
        if self.rate_bytes_per_s is None:
            self._level = 0
        self._set(rate_bytes_per_s)

    def set_lateness(self, late_ns: int, *, now_ns: int) -> None:
        """Save up for timers that are so late."""
        self._accrue(now_ns)
        self._late_ns = late_ns
        self._set(self.rate_bytes_per_s)

    def ready_at_ns(self, size_bytes: int, *, now_ns: int) -> int:
        """When a piece of this size may go, `now_ns` if at once; one over the burst when the bucket is full."""
        if self.rate_bytes_per_s is None:
            return now_ns
        missing = min(size_bytes, self._burst) * NS_PER_S - self._level_at(now_ns)
        return now_ns if missing <= 0 else now_ns + -(-missing // self.rate_bytes_per_s)

    def try_spend(self, size_bytes: int, *, now_ns: int) -> bool:
        """Take a piece if it may go now; whether it does."""
        if self.ready_at_ns(size_bytes, now_ns=now_ns) > now_ns:
            return False
        self.charge(size_bytes, now_ns=now_ns)
        return True

    def charge(self, size_bytes: int, *, now_ns: int) -> int:
        """Count bytes that nobody asked for. Returns for how many ns the bucket is in debt, DEBT_NS_MAX at most."""
        self._accrue(now_ns)
        if self.rate_bytes_per_s is None:
            return 0
        self._level = max(self._level - size_bytes * NS_PER_S, -self.rate_bytes_per_s * DEBT_NS_MAX)
        return max(0, -(self._level // self.rate_bytes_per_s))

    def refund(self, size_bytes: int) -> None:
        """Give back what was spent and not used."""
        self._level += size_bytes * NS_PER_S  # what is over the burst is cut off when the level is read

    def debt_bytes(self, *, now_ns: int) -> int:
        """How far it is below zero, rounded up; 0 without a limit."""
        return 0 if self.rate_bytes_per_s is None else max(0, -(self._level_at(now_ns) // NS_PER_S))

    def lost_bytes(self, *, now_ns: int) -> int:
        """Return what could have been sent since start and was not, because the bucket was full; 0 without a limit."""
        self._accrue(now_ns)
        return self._lost // NS_PER_S

    def _level_at(self, now_ns: int) -> int:
        assert self.rate_bytes_per_s is not None
        return min(self._level + self.rate_bytes_per_s * max(0, now_ns - self._at_ns), self._burst * NS_PER_S)

    def _accrue(self, now_ns: int) -> None:
        if self.rate_bytes_per_s is not None:
            level = self._level_at(now_ns)
            self._lost += self._level + self.rate_bytes_per_s * max(0, now_ns - self._at_ns) - level
            self._level = level
        self._at_ns = max(self._at_ns, now_ns)
