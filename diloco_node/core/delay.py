"""Cutting what is sent to one peer when the queue on its link grows, so that a heartbeat is on time.

What tells is the queue in our own direction (`core.oneway`), as far as the kernel's round trips have it too: these know
no clock but ours, and no loop that stands still. Where our direction is not known, the round trip alone must do; it
has the other direction's queue in it.

A long link is searched first: the rate doubles from a little. A queue then shows late, so what it says is only that the
link is full; what the link carries is seen while that queue is drained, and there we go on. From then on the rate grows
slowly at first and twice as fast each second without a queue. A short queue takes back what the rate grew by while it
could not be seen, a longer one is cut to what arrived, less what drains it. Below what is known to be carried growth is
fast, and a burst of work after idle time begins near it. A limit that limits nothing is taken away.
"""

from __future__ import annotations

from typing import Final

from diloco_node.core.carried import Carried
from diloco_node.core.oneway import RECENT_NS
from diloco_node.transport.pacing.budget import NS_PER_S, piece_bytes

# ---- what is a queue -------------------------------------------------------------------------------------------------

EXCESS_NS_MIN: Final = 20_000_000
"""A shorter queue is none: on a short link 1.5 times the least is less than the noise of a busy machine."""

QUEUE_NS: Final = 12_000_000
"""On a long link, where our own direction is known, a longer queue is cut; and one longer than a piece of bulk takes at
the rate that we send with: on a slow line the pieces of several peers meet."""

CALM: Final = 3
"""While the queue is longer than a third of what is cut, nothing grows."""

LONG_RTT_NS: Final = 5_000_000

UNKNOWN_NS: Final = NS_PER_S
"""Our own direction is known as soon as some pings have come back: before that nothing is cut for a round trip alone,
and nothing grows."""

# ---- cuts ------------------------------------------------------------------------------------------------------------

CUT_NUMERATOR: Final = 4
CUT_DENOMINATOR: Final = 5
"""A cut for a round trip, of which we don't know how much is our queue."""

CRUISE_PPM: Final = 950_000
"""Of what was carried, when the queue is gone."""

DRAIN_NS: Final = 400_000_000
"""So fast a queue is drained: after a cut for 20 ms the rate is 5 % lower than it will be then; never below a half."""

HASTY_DRAIN_PPM: Final = 600_000
"""Of what was carried: after a hasty cut the queue is longer than it was seen to be."""

CUT_PAUSE_NS_MIN: Final = 200_000_000
"""Between two cuts, or two round trips if that is longer: a cut shows only after what is under way has arrived, and in
the queue of our own direction after another RECENT_NS."""

IN_VAIN_CUTS: Final = 6
"""A queue of ours is drained by one or two cuts, by four where the line has become far slower; one that stands after so
many is a longer way, or somebody else's."""

LITTLE_PPM: Final = 700_000
"""Of the rate after a cut when little is known of what the link carries: less than a second of work lies behind it, or
something else held us back, and what was carried is what there was to carry."""

TRICKLE_FACTOR: Final = 8
"""What lets through a smaller part than this of what was carried of late, like the grant of a peer that takes us for
idle, will soon let through more; and the queue is not ours."""

HELD_PPM: Final = 800_000
"""But the link is what holds us back if less than this part of what everything else lets through was carried."""

DOUBT_NUMERATOR: Final = 4
DOUBT_DENOMINATOR: Final = 5
"""Less than this part of what the link is known to carry may be a machine that stood still: the rate grows back fast,
once."""

PEAK_FADING_NS: Final = 10 * NS_PER_S
"""How fast the memory of what was carried fades. No cut for a round trip alone goes below half of the peak: of two that
send to each other the unlucky one would be cut to nothing.
"""

# ---- growth, in millionths a second ----------------------------------------------------------------------------------

PPM: Final = 1_000_000
GROWTH_PPM_PER_S: Final = 10_000
NEAR_GROWTH_PPM_PER_S: Final = 30_000
"""After a cut growth begins with 1 % a second, and is at most 3 % near the rate that was too much: from NEAR_LOW of it,
up to which growth is FAR_GROWTH_PPM_PER_S, to NEAR_HIGH. From there on it doubles every second again.
"""

NEAR_LOW_PPM: Final = 900_000
NEAR_HIGH_PPM: Final = 1_030_000
FAR_GROWTH_PPM_PER_S: Final = 1_000_000

ROUGH_GROWTH_PPM_PER_S: Final = 100_000
"""At most near the rate that was too much after a hasty cut; it begins with NEAR_GROWTH_PPM_PER_S."""

HASTY_PPM_PER_S: Final = 100_000
"""What grows faster is far over the link's rate by the time that a queue is seen (`DelayCut.is_hasty`)."""

FREE_GROWTH_PPM_PER_S: Final = 10_000_000
"""While no rate is known to be too much: doubled every tenth of a second. No faster ever."""

FREE_AHEAD_PPM: Final = 1_500_000
"""But never to more than so much of what was carried: what a link does not carry is known a round trip and a queue
later, and by then a queue has grown by half of that time."""

USED_PPM: Final = 850_000
USED_SLOW_PPM: Final = 900_000
"""It grows while so much of it is sent. A limit far above what is carried holds nobody back, and a queue that comes by
itself then costs more than a tenth. What the kernel paces stays up to 7 % below it: headers, and BBR's own rhythm.
"""

UNSEEN_NS: Final = 400_000_000
UNSEEN_PPM_MAX: Final = 100_000
"""What the rate grew by in so long before a short queue was seen is taken back at once, up to a tenth."""

TRIM_PPM_PER_S: Final = 10_000
"""And while it stands the rate shrinks: else a third of what is cut would stand for long, in each direction. Not below
NEAR_LOW of what was too much, for the queue may be somebody else's."""

# ---- limits that come and go -----------------------------------------------------------------------------------------

FREE_FACTOR: Final = 4
"""A limit of so many times what is sent limits nothing, and is taken away."""

CARRIED_NS: Final = NS_PER_S
CARRIED_FREE_NS: Final = 300_000_000
"""What a link carries is seen over a second: acknowledgements come in a bunch when the other direction's queue drains.
While the rate is still being doubled the second was not full.
"""

START_BYTES: Final = 32 * 2**10
START_RTT_NS: Final = 40_000_000
"""On a link of at least LONG_RTT_NS work begins with so much per round trip, or in so long if that is less."""

STEADY_NS: Final = 2 * NS_PER_S

KNOWN_NS: Final = 60 * NS_PER_S
KNOWN_PPM: Final = 750_000
"""And after idle time with so much of what the link was seen to carry at a cut of the last minute."""

RATE_BYTES_PER_S_MIN: Final = 16 * 2**10


class DelayCut:
    """The limit of one peer. Call `begin` when there is work after idle time, then `measured` some times a second."""

    def __init__(self) -> None:
        self._rate: int | None = None
        self._carried = Carried()
        self._peak = 0
        self._at_ns = 0
        self._growth_ppm = FREE_GROWTH_PPM_PER_S  # a second; FREE_GROWTH_PPM_PER_S: no rate is known to be too much
        self._grown_ppm = FREE_GROWTH_PPM_PER_S  # how fast it grew last
        self._grown_at_ns = 0
        self._has_grown = False  # since a short queue was last seen
        self._too_much = 0  # what the link carried at the last cut; 0: not known
        self._is_doubted = False  # whether the last cut said far less than _too_much
        self._cruise = 0  # what to go on with when the queue that was cut is gone; 0: it is
        self._is_draining = False  # the queue of a hasty cut
        self._is_rough = False  # whether the last cut was a hasty one
        self._cut_at_ns = 0
        self._cut_again_at_ns = 0
        self._cuts_in_a_row = 0  # of our own direction, without its queue having been gone in between
        self._held: int | None = None  # what everything else lets through
        self._unknown_ns = 0  # for how long our own direction has not been known
        self._is_long = False
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
    def seen_bytes_per_s(self) -> int | None:
        """What the link carried of late, or else at the last cut; never more than the limit. None: no limit."""
        seen = self._carried.lately(CARRIED_NS) if self._carried.is_whole else self._too_much
        return self._rate if not seen or self._rate is None else min(seen, self._rate)

    @property
    def is_steady(self) -> bool:
        """Whether the link has carried for a second what it is known to, without a cut of late or fast growth."""
        if self.is_hasty or self._at_ns - self._cut_at_ns < STEADY_NS or not self._carried.is_whole:
            return False
        return self._carried.lately(CARRIED_NS) * DOUBT_DENOMINATOR >= self._too_much * DOUBT_NUMERATOR

    @property
    def is_hasty(self) -> bool:
        """Whether the rate changes so fast that queues must be seen sooner: ask more often, over a shorter time."""
        is_fast = self._grown_ppm > HASTY_PPM_PER_S and not self._is_held
        return self._rate is not None and (self._is_draining or is_fast)

    @property
    def is_in_vain(self) -> bool:
        """Whether cut after cut left the queue as it was: it is not ours. Then call `begin_again`."""
        return self._cuts_in_a_row >= IN_VAIN_CUTS

    def begin_again(self) -> None:
        """What queues were measured from has been forgotten: grow from here as if after a first cut."""
        self._cuts_in_a_row = 0
        self._cruise = 0
        self._is_draining = False
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
        self._carried.clear()
        if self._rate is not None or rtt_min_ns < LONG_RTT_NS:
            return
        known = 0
        if self._too_much and now_ns - self._cut_at_ns < KNOWN_NS:
            known = self._too_much * KNOWN_PPM // PPM
            self._growth_ppm = self._grown_ppm = GROWTH_PPM_PER_S
        start = START_BYTES * NS_PER_S // min(rtt_min_ns, START_RTT_NS)
        self._rate = max(self._peak * 9 // 10, known, start, RATE_BYTES_PER_S_MIN)

    def measured(
        self,
        *,
        rtt_ns: int,
        rtt_min_ns: int,
        queue_ns: int | None,
        sent_bytes_per_s: int,
        carried_bytes_per_s: int,
        now_ns: int,
        held_bytes_per_s: int | None = None,
    ) -> None:
        """How long a round trip takes now, at least, and what went out to the peer meanwhile.

        Args:
            rtt_ns, rtt_min_ns: of the link, positive. queue_ns: in our own direction; None: not known.
            sent_bytes_per_s: since the last call.
            carried_bytes_per_s: what was acknowledged since the last call: with a queue, what the link can carry.
            held_bytes_per_s: what budget and grant let through to the peer; None: no limit.
        """
        self._held = held_bytes_per_s
        elapsed_ns = min(max(0, now_ns - self._at_ns), NS_PER_S)
        self._at_ns = now_ns
        self._unknown_ns = self._unknown_ns + elapsed_ns if queue_ns is None else 0
        excess_ns = rtt_ns - rtt_min_ns if queue_ns is None else min(queue_ns, rtt_ns - rtt_min_ns)
        limit_ns = rtt_limit_ns(rtt_min_ns) - rtt_min_ns if queue_ns is None else self._queue_limit_ns(rtt_min_ns)
        is_calm = excess_ns * CALM <= limit_ns if queue_ns is not None else excess_ns <= limit_ns
        self._peak = max(carried_bytes_per_s, self._peak - self._peak * elapsed_ns // PEAK_FADING_NS)
        self._carried.remember(
            elapsed_ns,
            sent_bytes_per_s=sent_bytes_per_s,
            carried_bytes_per_s=carried_bytes_per_s,
            is_queueing=not is_calm,
        )
        if excess_ns > limit_ns:
            if now_ns >= self._cut_again_at_ns and self._is_told(sent_bytes_per_s, is_own=queue_ns is not None):
                self._cut(excess_ns, rtt_ns, is_own=queue_ns is not None, now_ns=now_ns)
            self._is_long = True
            return
        self._is_long = False
        self._cuts_in_a_row = 0
        if not is_calm:
            self._trim(elapsed_ns)
            return
        if self._is_draining:
            self._drained(rtt_ns)
        elif self._cruise:
            if now_ns >= self._cut_again_at_ns:
                self._rate, self._cruise = self._cruise, 0
        elif self._rate is not None and (queue_ns is not None or self._unknown_ns >= UNKNOWN_NS):
            self._grow(self._rate, sent_bytes_per_s, elapsed_ns)
        self._carried.drained()

    def reset(self) -> None:
        """The link is a new one."""
        self._rate, self._cruise, self._too_much, self._peak = None, 0, 0, 0
        self._growth_ppm = self._grown_ppm = FREE_GROWTH_PPM_PER_S
        self._has_grown = self._is_doubted = self._is_draining = self._is_rough = self._is_long = False
        self._cuts_in_a_row = self._unknown_ns = 0
        self._carried.clear()

    def _queue_limit_ns(self, rtt_min_ns: int) -> int:
        if rtt_min_ns < LONG_RTT_NS or self._rate is None:
            return EXCESS_NS_MIN
        rate = self._held if self._held is not None and self._is_held else self._rate
        return max(QUEUE_NS, piece_bytes(rate) * NS_PER_S // rate)

    @property
    def _is_held(self) -> bool:
        """Whether something else lets through less than the limit here."""
        return self._held is not None and (self._rate is None or self._held <= self._rate)

    def _is_told(self, sent_bytes_per_s: int, *, is_own: bool) -> bool:
        """Whether a long queue is to be cut for. Without our own direction what the socket still held when the rate was
        cut goes out as fast as ever, and only then another cut tells; and once alone may be a machine that stood still.
        """
        obeys = self._rate is None or sent_bytes_per_s * 10 <= self._rate * 11
        return is_own or (self._is_long and obeys and self._unknown_ns >= UNKNOWN_NS)

    # ---- less --------------------------------------------------------------------------------------------------------

    def _cut(self, excess_ns: int, rtt_ns: int, *, is_own: bool, now_ns: int) -> None:
        is_hasty = is_own and self.is_hasty
        if is_own and not is_hasty and self._knows_little:
            self._cut_a_little(rtt_ns, now_ns)
            return
        if is_own:
            # Work that has just begun may have too little behind it for the first two.
            known = (self._carried.full or self._carried.most) if is_hasty else 0
            carried = known or self._carried_lately()
            self._cuts_in_a_row += 1
            self._cruise = max(carried * CRUISE_PPM // PPM, RATE_BYTES_PER_S_MIN)
            drain = carried * HASTY_DRAIN_PPM // PPM if is_hasty else self._cruise
            self._rate = max(drain - carried * excess_ns // DRAIN_NS, self._cruise // 2, RATE_BYTES_PER_S_MIN)
        else:
            carried = min(self._rate or self._carried_lately(), self._carried_lately())
            self._cruise = 0
            self._rate = max(carried * CUT_NUMERATOR // CUT_DENOMINATOR, self._peak // 2, RATE_BYTES_PER_S_MIN)
        self._learn(max(carried, self._rate))
        self._is_draining = self._is_rough = is_hasty
        self._growth_ppm = self._grown_ppm = NEAR_GROWTH_PPM_PER_S if is_hasty else GROWTH_PPM_PER_S
        self._was_cut(rtt_ns, is_own=is_own, now_ns=now_ns)

    def _was_cut(self, rtt_ns: int, *, is_own: bool, now_ns: int) -> None:
        self._cut_at_ns = now_ns
        self._cut_again_at_ns = now_ns + max(2 * rtt_ns, CUT_PAUSE_NS_MIN) + (RECENT_NS if is_own else 0)
        self.cuts += 1

    @property
    def _knows_little(self) -> bool:
        """Whether what was carried says little of the link."""
        if self._rate is None and self._held is None:
            return False
        if not self._carried.is_whole:
            return True
        return self._held is not None and self._is_held and self._carried_lately() * PPM >= self._held * HELD_PPM

    def _cut_a_little(self, rtt_ns: int, now_ns: int) -> None:
        """Send less than now; and grow back fast, for nothing was learnt."""
        base = self._rate or 0
        if self._held is not None and self._is_held:
            base = self._held if self._held * TRICKLE_FACTOR >= self._peak else self._peak
        rate = max(base * LITTLE_PPM // PPM, RATE_BYTES_PER_S_MIN)
        self._rate = rate if self._rate is None else min(rate, self._rate)
        self._cruise, self._is_draining, self._is_rough = 0, False, False
        self._growth_ppm = self._grown_ppm = HASTY_PPM_PER_S
        self._cuts_in_a_row += 1
        self._was_cut(rtt_ns, is_own=True, now_ns=now_ns)

    def _carried_lately(self) -> int:
        return self._carried.lately(CARRIED_FREE_NS if self.is_searching else CARRIED_NS)

    def _learn(self, carried: int) -> None:
        """What the link carries, seen at a cut; far less than before is believed when it is seen again."""
        is_less = carried * DOUBT_DENOMINATOR < self._too_much * DOUBT_NUMERATOR
        if not is_less or self._is_doubted:
            self._too_much = carried
        self._is_doubted = is_less and not self._is_doubted

    def _drained(self, rtt_ns: int) -> None:
        """The queue of a hasty cut is gone: go on with what was carried while it stood."""
        if self._carried.full:
            self._too_much = self._carried.full
            self._cruise = max(self._too_much * CRUISE_PPM // PPM, RATE_BYTES_PER_S_MIN)
        elif self._at_ns < self._cut_at_ns + rtt_ns:
            # Before the cut could be seen: the sender or the machine stood still. What the link carries is not known.
            self._too_much, self._growth_ppm = 0, HASTY_PPM_PER_S
        self._rate, self._cruise, self._is_draining = self._cruise, 0, False

    def _trim(self, elapsed_ns: int) -> None:
        """A short queue stands: what the rate grew by while it could not be seen was too much."""
        if self._rate is None or self._cruise or self.is_searching:
            return
        least = self._too_much * NEAR_LOW_PPM // PPM
        if self._rate <= least:
            return
        less_ppm = TRIM_PPM_PER_S * elapsed_ns // NS_PER_S
        if self._has_grown:
            less_ppm += min(self._grown_ppm * UNSEEN_NS // NS_PER_S, UNSEEN_PPM_MAX)
        self._rate = max(least, self._rate - self._rate * less_ppm // PPM)
        self._growth_ppm = self._grown_ppm = GROWTH_PPM_PER_S
        self._has_grown = False

    # ---- more --------------------------------------------------------------------------------------------------------

    def _grow(self, rate: int, sent_bytes_per_s: int, elapsed_ns: int) -> None:
        if self._carried.is_whole and rate > FREE_FACTOR * max(self._carried.sent_most, RATE_BYTES_PER_S_MIN):
            self._rate = None
            self._growth_ppm = self._grown_ppm = FREE_GROWTH_PPM_PER_S
            return
        is_far = rate * PPM <= self._too_much * NEAR_LOW_PPM
        # Else of a second: BBR's probe is a quarter more in an eighth of the time, and that is not the limit's doing.
        is_quick = is_far or self.is_hasty
        sent = sent_bytes_per_s if is_quick else self._carried.sent
        used_ppm = USED_PPM if is_quick else USED_SLOW_PPM
        if sent * PPM < used_ppm * rate:
            # Something else limits: how much more the link would carry is not known.
            if self._at_ns - self._grown_at_ns > CARRIED_NS:
                self._grown_ppm = 0
            return
        growth = self._growth(rate, elapsed_ns)
        ahead = rate + rate * growth // PPM * elapsed_ns // NS_PER_S + 1
        if is_far:
            ahead = min(ahead, self._too_much * NEAR_LOW_PPM // PPM + 1)
        elif self.is_searching:
            ahead = max(rate, min(ahead, self._carried.most * FREE_AHEAD_PPM // PPM))
        self._rate = ahead
        self._grown_ppm, self._grown_at_ns, self._has_grown = growth, self._at_ns, True

    def _growth(self, rate: int, elapsed_ns: int) -> int:
        """How fast to grow, by how near the rate is to what was too much."""
        if rate * PPM <= self._too_much * NEAR_LOW_PPM:
            return FAR_GROWTH_PPM_PER_S
        self._is_doubted = False
        # Doubled in a second, by the linear approximation: elapsed times are a tenth of that.
        grown = self._growth_ppm + self._growth_ppm * elapsed_ns // NS_PER_S
        if rate * PPM > self._too_much * NEAR_HIGH_PPM:
            self._growth_ppm = min(grown, FREE_GROWTH_PPM_PER_S)
        else:
            self._growth_ppm = min(grown, ROUGH_GROWTH_PPM_PER_S if self._is_rough else NEAR_GROWTH_PPM_PER_S)
        return self._growth_ppm


def rtt_limit_ns(rtt_min_ns: int) -> int:
    """Above this a link has a queue: 1.5 times the least, and at least EXCESS_NS_MIN over it."""
    return max(rtt_min_ns * 3 // 2, rtt_min_ns + EXCESS_NS_MIN)
