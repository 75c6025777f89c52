"""How long what we send to one peer stands in queues on its way, our own direction alone.

A round trip has the queues of both directions in it: of two sides that both send, each would slow down for the other's
queue. So a ping carries our clock, and its echo the peer's clock when it came. The difference is the way there plus how
far the two clocks are apart, which nobody knows; but the least difference of the last minutes was (nearly) without a
queue, and what is above it is one. Clocks that drift apart by 50 millionths shift that by 5 ms in the longest window.

A ping also waits for loops that stand still, on either side. The least of the last few pings does not.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Final

from diloco_node.transport.pacing.budget import NS_PER_S

BASE_SLOT_NS: Final = 10 * NS_PER_S
BASE_SLOTS: Final = 10
"""The least way there is looked for in the last 90 to 100 seconds, in slots of ten."""

RECENT_NS: Final = 250_000_000
RECENT_MIN: Final = 4
RECENT_MAX: Final = 32
"""The queue is the least of the last quarter of a second, of four pings at least: a single one may have met a machine
that was busy, or stood behind one piece of bulk."""

HASTY_NS_MIN: Final = 60_000_000


def hasty_ns(rtt_min_ns: int) -> int:
    """While rates change fast the queue is the least of so long: pings come more often, and what BBR probes with stands
    for about a round trip."""
    return min(max(HASTY_NS_MIN, rtt_min_ns * 5 // 4), RECENT_NS)


class OneWayQueue:
    """The queue towards one peer, from pings and their echoes. Both clocks are monotonic, each with its own zero."""

    def __init__(self) -> None:
        self._base: deque[tuple[int, int]] = deque(maxlen=BASE_SLOTS)  # (slot, least difference in it)
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_MAX)  # (when it was echoed, difference)

    def echoed(self, *, sent_ns: int, arrived_ns: int, now_ns: int) -> None:
        """An echo came.

        Args:
            sent_ns: when we sent the ping, our clock. arrived_ns: when the peer got it, its clock. now_ns: ours.
        """
        difference = arrived_ns - sent_ns
        slot = now_ns // BASE_SLOT_NS
        if self._base and self._base[-1][0] == slot:
            self._base[-1] = (slot, min(difference, self._base[-1][1]))
        else:
            self._base.append((slot, difference))
        self._recent.append((now_ns, difference))

    def queue_ns(self, *, now_ns: int, recent_ns: int = RECENT_NS) -> int | None:
        """How long the queue is, of the pings of so late; None while too few echoes came of late to tell."""
        if len(self._recent) < RECENT_MIN or now_ns - self._recent[-RECENT_MIN][0] > 2 * RECENT_NS:
            return None
        last = islice(reversed(self._recent), RECENT_MIN)
        least = [difference for _, difference in last]
        least += [difference for at_ns, difference in self._recent if now_ns - at_ns <= recent_ns]
        oldest = now_ns // BASE_SLOT_NS - BASE_SLOTS
        return min(least) - min(difference for slot, difference in self._base if slot > oldest)

    def reset(self) -> None:
        """The link is a new one, perhaps to another clock."""
        self._base.clear()
        self._recent.clear()
