"""Failure detection: how long a sender that lives may be silent, by the silences that were measured.

The limit is twice the longest gap between two messages of late. That is forgotten within half a minute: it stays near
the 99th percentile. On an idle machine the floor is longer, for heartbeats come every 200 ms. Where processes wait for
a processor, the limit follows.

Source: Hayashibara et al., "The phi accrual failure detector" (2004), which follows the distribution of gaps.
Deviation: the upper end of the measured gaps, for a normal distribution's tail is too thin for a starved machine.
"""

from __future__ import annotations

from typing import Final

MARGIN: Final = 2
"""Factor on the longest gap of late."""

CEILING: Final = 16
"""The limit is at most this many times its floor: 16 s by default."""

FORGETTING: Final = 15
"""Shorter gaps that together last for so many floors take two thirds of the excess off the longest one."""


class Cadence:
    """The gaps between the messages of one sender. floor_ns: a silence up to this is never too long.

    Attributes:
        heard_at_ns: the last message; None when the next one ends no gap, as after a lost link.
        longest_ns: the longest gap of late.
        limit_ns: how long the sender may be silent now; from `floor_ns` to CEILING times that.
    """

    def __init__(self, floor_ns: int) -> None:
        self.heard_at_ns: int | None = None
        self.limit_ns = floor_ns
        self._floor_ns = floor_ns
        self.longest_ns = 0

    def hear(self, now_ns: int) -> None:
        """A message came."""
        if self.heard_at_ns is not None:
            self.observe(now_ns - self.heard_at_ns)
        self.heard_at_ns = now_ns

    def observe(self, gap_ns: int) -> None:
        """Learn a gap, or for how long the own process stood still, which would have been one."""
        floor_ns = self._floor_ns
        gap_ns = min(gap_ns, CEILING * floor_ns)
        excess_ns = self.longest_ns - gap_ns
        # By time and not by count: a leader hears 15 answers to one heartbeat.
        forgotten_ns = excess_ns * min(gap_ns, FORGETTING * floor_ns) // (FORGETTING * floor_ns)
        self.longest_ns -= forgotten_ns if excess_ns > 0 else excess_ns
        self.limit_ns = max(floor_ns, min(MARGIN * self.longest_ns, CEILING * floor_ns))

    def excuse(self, late_ns: int, now_ns: int) -> bool:
        """The own process stood still for longer than is usual: what came meanwhile waits to be read.

        Then this silence begins anew; returns whether it does. The limit allows for the usual already.
        """
        is_news = late_ns > self.longest_ns
        if is_news:
            self.observe(late_ns)
        if not is_news or self.heard_at_ns is None:
            return False
        self.heard_at_ns = now_ns
        return True
