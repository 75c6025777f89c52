"""Cutting what is sent to one peer when the queue on its link grows, so that a heartbeat is on time.

What tells is the queue in our own direction (`core.oneway`), as far as the kernel's round trips have it too: these know
no clock but ours, and no loop that stands still. Where our direction is not known, the round trip alone must do; it
has the other direction's queue in it. When more is sent than the link carries, the rate is cut to what arrived, less
what drains the queue, and goes on a little below it. Then it grows, slowly at first and twice as fast each second
without a queue. On a long link a burst of work after idle time begins at the rate that is known to be carried, or
doubles from a little. A limit that limits nothing is taken away.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from diloco_node.core.budget import NS_PER_S, piece_bytes
from diloco_node.core.oneway import RECENT_NS

EXCESS_NS_MIN: Final = 20_000_000
"""A shorter queue is none: on a short link 1.5 times the least is less than the noise of a busy machine."""

QUEUE_NS: Final = 12_000_000
"""On a long link, where our own direction is known, a longer queue is cut; and one longer than a piece of bulk."""

CALM: Final = 3
"""While the queue is longer than a third of what is cut, nothing grows."""

CUT_NUMERATOR: Final = 4
CUT_DENOMINATOR: Final = 5
"""A cut for a round trip, of which we don't know how much is our queue."""

CRUISE_PPM: Final = 950_000
"""Of what was carried, when the queue is gone."""

DRAIN_NS: Final = 400_000_000
"""So fast a queue is drained: after a cut for 20 ms the rate is 5 % lower than it will be then; never below a half."""

CUT_PAUSE_NS_MIN: Final = 200_000_000
"""Between two cuts, or two round trips if that is longer: a cut shows only after what is under way has arrived, and in
the queue of our own direction after another RECENT_NS."""

IN_VAIN_CUTS: Final = 6
"""A queue of ours is drained by one or two cuts, by four where the line has become far slower; one that stands after so
many is a longer way, or somebody else's."""

PPM: Final = 1_000_000
GROWTH_PPM_PER_S: Final = 10_000
NEAR_GROWTH_PPM_PER_S: Final = 30_000
"""After a cut growth begins with 1 % a second, and is at most 3 % near the rate that was too much: from NEAR_LOW of it,
up to which growth is FAR_GROWTH_PPM_PER_S, to NEAR_HIGH. From there on it doubles every second again.
"""

NEAR_LOW_PPM: Final = 900_000
NEAR_HIGH_PPM: Final = 1_030_000
FAR_GROWTH_PPM_PER_S: Final = 1_000_000

FREE_GROWTH_PPM_PER_S: Final = 10_000_000
"""While no rate is known to be too much: doubled every tenth of a second. No faster ever."""

FREE_FACTOR: Final = 4
"""A limit of so many times what is sent limits nothing, and is taken away."""

CARRIED_NS: Final = NS_PER_S
CARRIED_FREE_NS: Final = 300_000_000
"""What a link carries is seen over a second: acknowledgements come in a bunch when the other direction's queue drains.
While the rate is still being doubled the second was not full.
"""

PEAK_FADING_NS: Final = 10 * NS_PER_S
"""How fast the memory of what was carried fades. No cut for a round trip alone goes below half of the peak: of two that
send to each other the unlucky one would be cut to nothing.
"""

LONG_RTT_NS: Final = 5_000_000
START_BYTES: Final = 32 * 2**10
"""On a link of at least LONG_RTT_NS work begins with so much per round trip."""

RATE_BYTES_PER_S_MIN: Final = 16 * 2**10


class DelayCut:
    """The limit of one peer. Call `begin` when there is work after idle time, then `measured` some times a second."""

    def __init__(self) -> None:
        self._rate: int | None = None
        self._growth_ppm = FREE_GROWTH_PPM_PER_S  # a second; FREE_GROWTH_PPM_PER_S: no rate is known to be too much
        self._too_much = 0  # what the link carried at the last cut
        self._cruise = 0  # what to go on with when the queue that was cut is gone; 0: it is
        self._samples: deque[tuple[int, int, int]] = deque()  # (ns, bytes sent, carried in them) of the last second
        self._peak = 0
        self._cut_at_ns = 0
        self._cut_again_at_ns = 0
        self._at_ns = 0
        self._is_long = False
        self._cuts_in_a_row = 0  # of our own direction, without its queue having been gone in between
        self.cuts = 0
        """How often the rate was cut."""

    @property
    def rate_bytes_per_s(self) -> int | None:
        """What may be sent; None: no limit."""
        return self._rate

    @property
    def is_searching(self) -> bool:
        """Whether no rate is known to be too much."""
        return self._growth_ppm == FREE_GROWTH_PPM_PER_S

    @property
    def is_in_vain(self) -> bool:
        """Whether cut after cut left the queue as it was: it is not ours. Then call `begin_again`."""
        return self._cuts_in_a_row >= IN_VAIN_CUTS

    def begin_again(self) -> None:
        """What queues were measured from has been forgotten: grow from here as if after a first cut."""
        self._cuts_in_a_row = 0
        self._cruise = 0
        self._too_much = self._rate or 0

    def has_cut_lately(self, *, now_ns: int) -> bool:
        """Whether the link had a queue in the last seconds: a burst would make another."""
        return self.cuts > 0 and now_ns - self._cut_at_ns < PEAK_FADING_NS

    def begin(self, *, rtt_min_ns: int, now_ns: int) -> None:
        """Work begins.

        Args:
            rtt_min_ns: the link's least round-trip time, 0: not known.
        """
        self._at_ns = now_ns
        self._samples.clear()
        if self._rate is None and rtt_min_ns >= LONG_RTT_NS:
            self._rate = max(self._peak * 9 // 10, START_BYTES * NS_PER_S // rtt_min_ns, RATE_BYTES_PER_S_MIN)

    def measured(
        self,
        *,
        rtt_ns: int,
        rtt_min_ns: int,
        queue_ns: int | None,
        sent_bytes_per_s: int,
        carried_bytes_per_s: int,
        now_ns: int,
    ) -> None:
        """How long a round trip takes now, at least, and what went out to the peer meanwhile.

        Args:
            rtt_ns, rtt_min_ns: of the link, positive. queue_ns: in our own direction; None: not known.
            sent_bytes_per_s: since the last call.
            carried_bytes_per_s: what was acknowledged since the last call: with a queue, what the link can carry.
        """
        elapsed_ns = min(max(0, now_ns - self._at_ns), NS_PER_S)
        self._at_ns = now_ns
        self._remember(sent_bytes_per_s, carried_bytes_per_s, elapsed_ns)
        excess_ns = rtt_ns - rtt_min_ns if queue_ns is None else min(queue_ns, rtt_ns - rtt_min_ns)
        limit_ns = rtt_limit_ns(rtt_min_ns) - rtt_min_ns if queue_ns is None else self._queue_limit_ns(rtt_min_ns)
        if excess_ns > limit_ns:
            # Without our own direction: what the socket still held when the rate was cut goes out as fast as ever, and
            # only then another cut tells; and once alone may be a machine that stood still.
            obeys = self._rate is None or sent_bytes_per_s * 10 <= self._rate * 11
            if now_ns >= self._cut_again_at_ns and (queue_ns is not None or (self._is_long and obeys)):
                self._cut(excess_ns, rtt_ns, is_own=queue_ns is not None, now_ns=now_ns)
            self._is_long = True
            return
        self._is_long = False
        self._cuts_in_a_row = 0
        if queue_ns is not None and excess_ns * CALM > limit_ns:
            return
        if self._cruise:
            if now_ns >= self._cut_again_at_ns:
                self._rate, self._cruise = self._cruise, 0
        elif self._rate is not None:
            self._grow(self._rate, sent_bytes_per_s, elapsed_ns)

    def reset(self) -> None:
        """The link is a new one."""
        self._rate, self._cruise, self._too_much, self._peak = None, 0, 0, 0
        self._growth_ppm = FREE_GROWTH_PPM_PER_S
        self._cuts_in_a_row = 0
        self._samples.clear()

    def _queue_limit_ns(self, rtt_min_ns: int) -> int:
        if rtt_min_ns < LONG_RTT_NS or self._rate is None:
            return EXCESS_NS_MIN
        return max(QUEUE_NS, piece_bytes(self._rate) * NS_PER_S // self._rate)

    def _remember(self, sent_bytes_per_s: int, carried_bytes_per_s: int, elapsed_ns: int) -> None:
        self._peak = max(carried_bytes_per_s, self._peak - self._peak * elapsed_ns // PEAK_FADING_NS)
        sent, carried = sent_bytes_per_s * elapsed_ns // NS_PER_S, carried_bytes_per_s * elapsed_ns // NS_PER_S
        self._samples.append((elapsed_ns, sent, carried))
        while sum(ns for ns, _, _ in self._samples) - self._samples[0][0] >= CARRIED_NS:
            self._samples.popleft()

    def _carried(self) -> int:
        """What the link carries, bytes/s, if it was full; not more than was sent: acknowledgements come in bunches."""
        window_ns = CARRIED_FREE_NS if self._growth_ppm == FREE_GROWTH_PPM_PER_S else CARRIED_NS
        ns = sent = carried = 0
        for sample_ns, sample_sent, sample_carried in reversed(self._samples):
            ns, sent, carried = ns + sample_ns, sent + sample_sent, carried + sample_carried
            if ns >= window_ns:
                break
        return min(sent, carried) * NS_PER_S // ns if ns else 0

    def _cut(self, excess_ns: int, rtt_ns: int, *, is_own: bool, now_ns: int) -> None:
        carried = self._carried()
        if is_own:
            self._cuts_in_a_row += 1
            self._cruise = max(carried * CRUISE_PPM // PPM, RATE_BYTES_PER_S_MIN)
            self._rate = max(self._cruise - carried * excess_ns // DRAIN_NS, self._cruise // 2, RATE_BYTES_PER_S_MIN)
        else:
            carried = carried if self._rate is None else min(self._rate, carried)
            self._cruise = 0
            self._rate = max(carried * CUT_NUMERATOR // CUT_DENOMINATOR, self._peak // 2, RATE_BYTES_PER_S_MIN)
        self._too_much = max(carried, self._rate)
        self._growth_ppm = GROWTH_PPM_PER_S
        self._cut_at_ns = now_ns
        self._cut_again_at_ns = now_ns + max(2 * rtt_ns, CUT_PAUSE_NS_MIN) + (RECENT_NS if is_own else 0)
        self.cuts += 1

    def _grow(self, rate: int, sent_bytes_per_s: int, elapsed_ns: int) -> None:
        seen_ns = sum(ns for ns, _, _ in self._samples)
        if seen_ns >= CARRIED_NS and rate > FREE_FACTOR * max(self._carried(), RATE_BYTES_PER_S_MIN):
            self._rate, self._growth_ppm = None, FREE_GROWTH_PPM_PER_S
            return
        if 20 * sent_bytes_per_s < 17 * rate:
            return  # something else limits: how much more the link would carry is not known
        # Doubled in a second, by the linear approximation: elapsed times are a tenth of that.
        grown = self._growth_ppm + self._growth_ppm * elapsed_ns // NS_PER_S
        if rate * PPM > self._too_much * NEAR_HIGH_PPM:
            growth = self._growth_ppm = min(grown, FREE_GROWTH_PPM_PER_S)
        elif rate * PPM > self._too_much * NEAR_LOW_PPM:
            growth = self._growth_ppm = min(grown, NEAR_GROWTH_PPM_PER_S)
        else:
            growth = FAR_GROWTH_PPM_PER_S
        self._rate = rate + rate * growth // PPM * elapsed_ns // NS_PER_S + 1


def rtt_limit_ns(rtt_min_ns: int) -> int:
    """Above this a link has a queue: 1.5 times the least, and at least EXCESS_NS_MIN over it."""
    return max(rtt_min_ns * 3 // 2, rtt_min_ns + EXCESS_NS_MIN)
