"""core/delay.py: against links with a queue, simulated in steps of a tenth of a second."""

from __future__ import annotations

import pytest

from diloco_node.core.delay import QUEUE_NS, RATE_BYTES_PER_S_MIN, START_BYTES, DelayCut, rtt_limit_ns
from diloco_node.transport.pacing.budget import NS_PER_S
from tests.link_kit import VirtualLink

MS = 1_000_000
TICK_NS = 100 * MS


class Link:
    """A bottleneck with a queue; the sender sends as much as its limit allows, or `greedy` bytes/s without one.

    `knows_direction`: our own direction's queue is measured, too. `other_ns`: the other direction's queue. `held`: what
    budget and grant let through.
    """

    def __init__(
        self,
        capacity: int,
        rtt_ns: int,
        *,
        greedy: int = 10**9,
        queue_ns_max: int = 400 * MS,
        knows_direction: bool = True,
        held: int | None = None,
    ) -> None:
        self.held = held
        self.capacity, self.rtt_ns, self.greedy, self.queue_ns_max = capacity, rtt_ns, greedy, queue_ns_max
        self.knows_direction = knows_direction
        self.other_ns = 0
        self.queue = self.now_ns = 0
        self.cut = DelayCut()
        self.rtts_ns: list[int] = []
        self.queues_ns: list[int] = []
        self.carried: list[int] = []

    @property
    def rtt_now_ns(self) -> int:
        return self.rtt_ns + self.other_ns + self.queue_ns

    @property
    def queue_ns(self) -> int:
        return self.queue * NS_PER_S // self.capacity

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            limit = self.cut.rate_bytes_per_s
            rate = min(one for one in (self.greedy, limit, self.held) if one is not None)
            offered = rate // 10
            passes = min(self.queue + offered, self.capacity // 10)
            self.queue = min(self.queue + offered - passes, self.capacity * self.queue_ns_max // NS_PER_S)
            self.now_ns += TICK_NS
            self.cut.measured(
                rtt_ns=self.rtt_now_ns,
                rtt_min_ns=self.rtt_ns,
                queue_ns=self.queue_ns if self.knows_direction else None,
                sent_bytes_per_s=min(rate, passes * 10),
                carried_bytes_per_s=passes * 10,
                now_ns=self.now_ns,
                held_bytes_per_s=self.held,
            )
            self.queues_ns.append(self.queue_ns)
            self.rtts_ns.append(self.rtt_now_ns)
            self.carried.append(passes * 10)


LINKS = [(1_250_000, 40), (12_500_003, 20), (1_250_000, 1), (250_000_007, 100)]


@pytest.mark.parametrize(("capacity", "rtt_ms"), LINKS)
def test_the_own_queue_stays_short_and_the_link_is_used(capacity: int, rtt_ms: int) -> None:
    link = Link(capacity, rtt_ms * MS)
    link.run(5)
    link.queues_ns.clear()
    link.carried.clear()
    link.run(120)
    late = [queue for queue in link.queues_ns if queue > QUEUE_NS + 13 * MS]
    assert len(late) <= len(link.queues_ns) // 50
    assert sum(link.carried) >= len(link.carried) * capacity * 95 // 100


@pytest.mark.parametrize(("capacity", "rtt_ms"), LINKS)
def test_round_trips_alone_do_where_the_direction_is_not_known(capacity: int, rtt_ms: int) -> None:
    link = Link(capacity, rtt_ms * MS, knows_direction=False)
    link.run(5)
    link.rtts_ns.clear()
    link.carried.clear()
    link.run(120)
    late = [rtt for rtt in link.rtts_ns if rtt > rtt_limit_ns(link.rtt_ns) + 20 * MS]
    assert len(late) <= len(link.rtts_ns) // 50
    assert sum(link.carried) >= len(link.carried) * capacity * 85 // 100


def test_the_queue_of_the_other_direction_is_not_ours_to_cut() -> None:
    link = Link(12_500_000, 40 * MS)
    link.run(20)
    cuts = link.cut.cuts
    link.other_ns, link.greedy = 80 * MS, 11_000_000
    link.carried.clear()
    link.run(30)
    assert link.cut.cuts == cuts
    assert sum(link.carried[20:]) >= len(link.carried[20:]) * 10_900_000


def test_what_only_our_clocks_call_a_queue_is_none() -> None:
    """A loop that stands still, or clocks that drift: the kernel's round trips know nothing of it."""
    cut = DelayCut()
    for tick in range(1, 100):
        cut.measured(
            rtt_ns=45 * MS,
            rtt_min_ns=40 * MS,
            queue_ns=300 * MS,
            sent_bytes_per_s=10**6,
            carried_bytes_per_s=10**6,
            now_ns=tick * TICK_NS,
        )
    assert cut.cuts == 0
    assert cut.rate_bytes_per_s is None


def test_a_link_that_never_queues_is_never_limited() -> None:
    link = Link(10**9, MS, greedy=10**8)
    link.cut.begin(rtt_min_ns=MS, now_ns=link.now_ns)
    link.run(60)
    assert link.cut.cuts == 0
    assert link.cut.rate_bytes_per_s is None


@pytest.mark.parametrize("share", [1.1, 1.5, 4, 30])
def test_a_line_that_carries_less_than_the_budget_is_found(share: float) -> None:
    capacity = 300_007
    link = Link(capacity, 8 * MS, held=int(capacity * share))
    link.cut.begin(rtt_min_ns=8 * MS, now_ns=link.now_ns)
    link.run(15)
    link.queues_ns.clear()
    link.carried.clear()
    link.run(60)
    late = [queue for queue in link.queues_ns if queue > 80 * MS]
    assert len(late) <= len(link.queues_ns) // 50, "a piece takes 55 ms there"
    assert sum(link.carried) >= len(link.carried) * capacity * 85 // 100


def test_work_on_a_long_link_begins_with_little_and_soon_fills_it() -> None:
    link = Link(250_000_000, 50 * MS, greedy=249_000_000)
    link.cut.begin(rtt_min_ns=50 * MS, now_ns=link.now_ns)
    assert link.cut.rate_bytes_per_s == START_BYTES * 25
    link.run(2)
    assert link.carried[-1] > 200_000_000
    assert link.cut.cuts == 0


def test_work_begins_again_at_what_the_link_was_seen_to_carry() -> None:
    link = Link(10_000_000, 50 * MS)
    link.cut.begin(rtt_min_ns=50 * MS, now_ns=link.now_ns)
    link.run(20)
    link.greedy = 100_000
    link.run(4)
    assert link.cut.rate_bytes_per_s is None, "a limit that limits nothing is taken away"
    link.greedy = 10**9
    link.cut.begin(rtt_min_ns=50 * MS, now_ns=link.now_ns)
    rate = link.cut.rate_bytes_per_s
    assert rate is not None
    assert 4_000_000 < rate < 10_000_000
    link.rtts_ns.clear()
    link.run(10)
    assert max(link.rtts_ns) < 120 * MS


def test_a_known_limit_is_not_changed_by_beginning() -> None:
    link = Link(1_250_000, 40 * MS)
    link.run(3)
    before = link.cut.rate_bytes_per_s
    assert before is not None
    link.cut.begin(rtt_min_ns=40 * MS, now_ns=link.now_ns)
    assert link.cut.rate_bytes_per_s == before


def test_the_limit_follows_a_link_that_gets_faster_and_slower() -> None:
    link = Link(1_250_000, 40 * MS)
    link.run(20)
    link.capacity = 12_500_000
    link.run(15)
    assert sum(link.carried[-20:]) / 20 > 9_000_000
    link.capacity = 1_250_000
    link.queue = 0
    link.run(60)
    assert sum(link.rtts_ns[-100:]) / 100 < 80 * MS


def test_no_cut_for_a_round_trip_alone_goes_below_half_of_what_was_carried_of_late() -> None:
    cut = DelayCut()
    for tick in range(20):
        cut.measured(
            rtt_ns=90 * MS,
            rtt_min_ns=40 * MS,
            queue_ns=None,
            sent_bytes_per_s=10**6,
            carried_bytes_per_s=10**6,
            now_ns=tick * TICK_NS,
        )
    assert cut.rate_bytes_per_s is not None
    assert cut.rate_bytes_per_s >= 450_000


def test_one_cut_for_a_round_trip_must_show_before_the_next() -> None:
    cut = DelayCut()

    def queue_at(now_ns: int, sent: int) -> int | None:
        cut.measured(
            rtt_ns=150 * MS,
            rtt_min_ns=40 * MS,
            queue_ns=None,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=10**6,
            now_ns=now_ns,
        )
        return cut.rate_bytes_per_s

    assert queue_at(NS_PER_S - 1, 10**6) is None, "once alone may be a machine that stood still"
    first = queue_at(NS_PER_S, 10**6)
    assert first is not None
    assert 799_000 < first <= 800_000
    assert queue_at(NS_PER_S + 299 * MS, 800_000) == first, "two round trips have not passed"
    assert queue_at(NS_PER_S + 301 * MS, 10**6) == first, "what the socket held still goes out"
    assert 0 < (queue_at(NS_PER_S + 302 * MS, 800_000) or 0) < first
    assert cut.cuts == 2


def test_a_cut_for_the_own_queue_goes_on_at_95_percent_when_it_is_drained() -> None:
    cut = DelayCut()

    def queue_at(now_ns: int, queue_ns: int) -> int | None:
        cut.measured(
            rtt_ns=40 * MS + queue_ns,
            rtt_min_ns=40 * MS,
            queue_ns=queue_ns,
            sent_bytes_per_s=1_100_000,
            carried_bytes_per_s=10**6,
            now_ns=now_ns,
        )
        return cut.rate_bytes_per_s

    assert queue_at(NS_PER_S, 40 * MS) == 850_000, "0.95 of what was carried, less 40 ms of it in 400 ms"
    assert queue_at(NS_PER_S + 300 * MS, 40 * MS) == 850_000, "the cut can't be seen yet"
    assert queue_at(NS_PER_S + 200 * MS, 0) == 850_000, "nor that it was enough"
    assert queue_at(NS_PER_S + 530 * MS, 7 * MS) == 850_000, "not calm yet"
    assert queue_at(NS_PER_S + 600 * MS, 0) == 950_000
    assert cut.cuts == 1
    assert queue_at(2 * NS_PER_S, 400 * MS) == 475_000, "but never below half of it"
    assert cut.cuts == 2


def test_a_limit_is_never_too_small_to_recover_from_and_a_new_link_has_none() -> None:
    cut = DelayCut()
    for now_ns in (NS_PER_S, 2 * NS_PER_S):
        cut.measured(
            rtt_ns=90 * MS,
            rtt_min_ns=40 * MS,
            queue_ns=None,
            sent_bytes_per_s=0,
            carried_bytes_per_s=0,
            now_ns=now_ns,
        )
    assert cut.rate_bytes_per_s == RATE_BYTES_PER_S_MIN
    cut.reset()
    assert cut.rate_bytes_per_s is None


def test_what_counts_as_a_queue() -> None:
    assert rtt_limit_ns(40 * MS) == 60 * MS
    assert rtt_limit_ns(100 * MS) == 150 * MS
    assert rtt_limit_ns(MS) == 21 * MS


def test_a_way_that_has_become_longer_is_no_queue_that_cuts_can_shorten() -> None:
    cut, now_ns, longer_ns = DelayCut(), 0, 0
    rates = []
    for tick in range(1200):
        longer_ns = 30 * MS if 300 <= tick < 320 or (tick >= 320 and not rates[-1][1]) else longer_ns
        limit = cut.rate_bytes_per_s
        sent = 60_000_000 if limit is None else min(limit, 60_000_000)
        now_ns += TICK_NS
        cut.measured(
            rtt_ns=40 * MS + longer_ns,
            rtt_min_ns=40 * MS,
            queue_ns=longer_ns,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=sent,
            now_ns=now_ns,
        )
        if cut.is_in_vain:
            cut.begin_again()
            longer_ns = 0  # what the caller measures from is new
        rates.append((cut.rate_bytes_per_s, longer_ns == 0))
    least = min(rate for rate, _ in rates if rate is not None)
    assert least > 60_000_000 // 4, "a few cuts, and it is known"
    assert rates[-1][0] is None or rates[-1][0] > 50_000_000, "and it grows back"


# ---- a link in virtual time, with a socket and pings of its own ------------------------------------------------------

VIRTUAL = {
    "10 Mbit/s": (1_250_000, 40, 200, 0.0),
    "200 Mbit/s": (25_000_000, 40, 50, 0.0),
    "1 Gbit/s": (125_000_000, 100, 50, 0.0),
    "with loss": (125_000_000, 100, 50, 0.01),
    "5 Gbit/s": (625_000_000, 40, 50, 0.0),
}


def virtual(name: str) -> VirtualLink:
    capacity, rtt_ms, queue_ms, loss = VIRTUAL[name]
    link = VirtualLink(capacity, rtt_ms * MS, queue_ns_max=queue_ms * MS, loss=loss)
    link.begin()
    return link


@pytest.mark.parametrize("name", VIRTUAL)
def test_the_first_cut_lands_near_what_the_link_carries(name: str) -> None:
    link = virtual(name)
    while not link.cut.cuts:
        link.run(0.05)
        assert link.now_ns < 5 * NS_PER_S
    cut_s = link.now_ns / NS_PER_S
    link.run(8)
    assert link.carried_share(cut_s + 1.0, cut_s + 2.5) > 0.85
    assert link.carried_share(cut_s + 2.5, cut_s + 8) > 0.92
    assert link.queue_quantile_ns(0.98, cut_s + 1.5) < 24 * MS


def test_the_search_keeps_its_limit_on_a_long_way() -> None:
    """What was carried lags behind a rate that doubles: that does not make the limit one that limits nothing."""
    link = virtual("1 Gbit/s")
    link.run(5)
    assert link.cut.cuts
    assert None not in [limit for _, limit in link.seen.limits]
    assert max(limit or 0 for _, limit in link.seen.limits) < 1.7 * link.capacity


@pytest.mark.parametrize("name", ["10 Mbit/s", "1 Gbit/s"])
def test_a_rate_that_was_carried_is_soon_tried_again(name: str) -> None:
    """A router that stands nearly still for a moment looks like a slow link."""
    link = virtual(name)
    link.run(8)
    cuts, capacity = link.cut.cuts, link.capacity
    link.capacity = capacity // 4
    link.run(0.6)
    link.capacity = capacity
    back_s = link.now_ns / NS_PER_S
    link.run(4)
    assert link.cut.cuts > cuts
    assert min(rate for at_s, rate in link.seen.carried if at_s > back_s) < capacity * 6 // 10
    assert link.carried_share(back_s + 1.5, back_s + 4) > 0.8


def test_a_link_that_has_become_slower_is_believed() -> None:
    link = virtual("200 Mbit/s")
    link.run(8)
    link.capacity //= 4
    link.run(3)
    slower_s = link.now_ns / NS_PER_S
    link.run(5)
    assert link.carried_share(slower_s, slower_s + 5) > 0.85
    assert link.queue_quantile_ns(0.95, slower_s) < 30 * MS


def test_both_directions_loaded_stay_within_twice_the_round_trip() -> None:
    """10 Mbit/s and 40 ms: what a heartbeat would take, the queues of both directions together."""
    there, back = virtual("10 Mbit/s"), virtual("10 Mbit/s")
    back.run(0.3)
    rtts_ns = []
    for _ in range(9_000):
        there.other_ns, back.other_ns = back.queue_ns, there.queue_ns
        there.run(0.001)
        back.run(0.001)
        rtts_ns.append(there.rtt_ns + there.queue_ns + back.queue_ns)
    counted = sorted(rtts_ns[1_500:])
    assert counted[len(counted) * 99 // 100] < 80 * MS
    assert there.carried_share(1.5, 9) > 0.9
    assert back.carried_share(1.8, 9) > 0.9


def test_after_idle_time_a_burst_begins_near_what_was_known_and_makes_no_queue() -> None:
    link = virtual("200 Mbit/s")
    link.run(8)
    link.greedy = 10_000
    link.run(20)
    assert link.cut.rate_bytes_per_s is None, "a limit that limits nothing is taken away"
    link.greedy = 10**10
    link.begin()
    began_s = link.now_ns / NS_PER_S
    assert (link.cut.rate_bytes_per_s or 0) > link.capacity // 2
    assert not link.cut.is_searching
    link.run(3)
    assert link.carried_share(began_s + 1.0, began_s + 3) > 0.85
    assert link.queue_quantile_ns(0.98, began_s) < 24 * MS


# ---- single steps ----------------------------------------------------------------------------------------------------


class Steps:
    """A limit of 10^6 bytes/s after a first cut on a link of 40 ms, and what it is told every tenth of a second."""

    def __init__(self) -> None:
        self.cut = DelayCut()
        self.now_ns = NS_PER_S
        self.tell(queue_ms=40, sent=1_100_000, carried=1_000_000)
        for _ in range(8):
            self.tell()
        assert self.cut.cuts == 1

    @property
    def rate(self) -> int:
        assert self.cut.rate_bytes_per_s is not None
        return self.cut.rate_bytes_per_s

    def tell(self, *, queue_ms: int | None = 0, sent: int | None = None, carried: int | None = None) -> None:
        self.now_ns += TICK_NS
        self.cut.measured(
            rtt_ns=(40 + (queue_ms or 0)) * MS,
            rtt_min_ns=40 * MS,
            queue_ns=None if queue_ms is None else queue_ms * MS,
            sent_bytes_per_s=self.rate if sent is None else sent,
            carried_bytes_per_s=self.rate if carried is None else carried,
            now_ns=self.now_ns,
        )


def test_a_short_queue_takes_back_what_grew_unseen_once_and_then_a_percent_a_second() -> None:
    steps = Steps()
    for _ in range(12):
        steps.tell()
    grown = steps.rate
    steps.tell(queue_ms=8)
    back = steps.rate
    assert grown * 96 // 100 < back < grown * 995 // 1000
    steps.tell(queue_ms=8)
    assert back * 9985 // 10_000 < steps.rate < back
    for _ in range(300):
        steps.tell(queue_ms=8)
    assert steps.rate == 900_000, "it may be somebody else's queue"
    assert steps.cut.cuts == 1


def test_our_own_direction_is_waited_for_before_a_round_trip_counts() -> None:
    cut = DelayCut()
    cut.begin(rtt_min_ns=40 * MS, now_ns=0)
    start = cut.rate_bytes_per_s

    def told(now_ns: int, queue_ns: int | None, excess_ms: int) -> int | None:
        cut.measured(
            rtt_ns=(40 + excess_ms) * MS,
            rtt_min_ns=40 * MS,
            queue_ns=queue_ns,
            sent_bytes_per_s=10**6,
            carried_bytes_per_s=10**6,
            now_ns=now_ns,
        )
        return cut.rate_bytes_per_s

    for tick in range(1, 10):
        assert told(tick * TICK_NS, None, 50 if tick < 5 else 0) == start, "neither cut nor grown"
    assert (told(10 * TICK_NS, 0, 50) or 0) > (start or 0), "the queue is the other direction's"
    for tick in range(11, 25):
        told(tick * TICK_NS, None, 50)
    assert cut.cuts == 1, "it is never known"


def test_a_search_asks_for_haste_until_its_queue_is_drained() -> None:
    link = virtual("200 Mbit/s")
    assert link.cut.is_hasty
    while not link.cut.cuts:
        link.run(0.05)
    assert link.cut.is_hasty
    link.run(1.5)
    assert not link.cut.is_hasty


def test_far_less_than_was_carried_is_believed_when_it_is_seen_again() -> None:
    steps = Steps()
    grown = []
    for cuts in (2, 3):
        for _ in range(10):
            steps.tell(sent=400_000, carried=400_000)
        steps.tell(queue_ms=40, sent=500_000, carried=400_000)
        assert steps.cut.cuts == cuts
        for _ in range(7):
            steps.tell()
        before = steps.rate
        for _ in range(4):
            steps.tell()
        grown.append(steps.rate / before)
    assert grown[0] > 1.2, "a machine may have stood still"
    assert grown[1] < 1.05


def test_a_limit_that_is_used_stays_though_little_of_it_is_carried_yet() -> None:
    cut = DelayCut()
    cut.begin(rtt_min_ns=100 * MS, now_ns=0)
    for tick in range(1, 30):
        sent = cut.rate_bytes_per_s
        assert sent is not None
        cut.measured(
            rtt_ns=100 * MS,
            rtt_min_ns=100 * MS,
            queue_ns=0,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=sent // 5,
            now_ns=tick * TICK_NS,
        )


def test_after_a_hasty_cut_far_less_is_sent_than_was_carried() -> None:
    """The queue is longer than it was seen to be."""
    link = virtual("200 Mbit/s")
    while not link.cut.cuts:
        link.run(0.05)
    assert (link.cut.rate_bytes_per_s or 0) <= link.capacity * 62 // 100


def test_a_queue_that_shows_just_after_work_began_again_does_not_take_the_rate_to_nothing() -> None:
    cut = DelayCut()
    tick_ns = TICK_NS // 2

    def tell(now_ns: int, queue_ms: int) -> int:
        sent = cut.rate_bytes_per_s or 0
        cut.measured(
            rtt_ns=(40 + queue_ms) * MS,
            rtt_min_ns=40 * MS,
            queue_ns=queue_ms * MS,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=sent,
            now_ns=now_ns,
        )
        return cut.rate_bytes_per_s or 0

    cut.begin(rtt_min_ns=40 * MS, now_ns=0)
    for tick in range(1, 13):
        searched = tell(tick * tick_ns, 0)
    cut.begin(rtt_min_ns=40 * MS, now_ns=12 * tick_ns)
    assert tell(13 * tick_ns, 40) > searched // 4
    assert cut.cuts == 1
    assert tell(14 * tick_ns, 0) > searched // 2


def test_a_queue_that_is_gone_before_its_cut_can_show_says_nothing_about_the_link() -> None:
    cut = DelayCut()
    cut.begin(rtt_min_ns=100 * MS, now_ns=0)
    for tick in range(1, 40):
        queue_ms = 40 if tick == 38 else 0
        sent = cut.rate_bytes_per_s or 0
        cut.measured(
            rtt_ns=(100 + queue_ms) * MS,
            rtt_min_ns=100 * MS,
            queue_ns=queue_ms * MS,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=sent,
            now_ns=tick * TICK_NS // 2,
        )
    assert cut.cuts == 1
    before = cut.rate_bytes_per_s or 0
    for tick in range(40, 40 + 60):
        sent = cut.rate_bytes_per_s or 0
        cut.measured(
            rtt_ns=100 * MS,
            rtt_min_ns=100 * MS,
            queue_ns=0,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=sent,
            now_ns=tick * TICK_NS // 2,
        )
    assert (cut.rate_bytes_per_s or 0) > 2 * before, "in three seconds: growth did not begin with a percent"


def test_a_limit_of_which_less_than_nine_tenths_is_sent_does_not_grow() -> None:
    for share, grows in ((88, False), (92, True)):
        steps = Steps()
        for _ in range(12):
            steps.tell(sent=steps.rate * share // 100)
        before = steps.rate
        for _ in range(15):
            steps.tell(sent=steps.rate * share // 100)
        assert (steps.rate > before * 101 // 100) is grows


def test_a_link_is_steady_when_it_carries_what_it_did_and_had_no_cut_for_two_seconds() -> None:
    steps = Steps()
    assert not steps.cut.is_steady, "it was cut a second ago"
    for _ in range(20):
        steps.tell(sent=900_000, carried=900_000)
    assert steps.cut.is_steady
    assert steps.cut.seen_bytes_per_s == 900_000
    for _ in range(12):
        steps.tell(sent=700_000, carried=700_000)
    assert not steps.cut.is_steady, "little is carried"
    steps.cut.begin(rtt_min_ns=40 * MS, now_ns=steps.now_ns)
    steps.tell(sent=900_000, carried=900_000)
    assert not steps.cut.is_steady, "nothing is known of the last second"
    assert steps.cut.seen_bytes_per_s == min(steps.rate, 1_000_000), "what it carried at the cut"


# ---- a slow line that several peers share, within a budget -----------------------------------------------------------

HELD = 280_000


class Held:
    """Work in bursts on a link of 8 ms, of which the budget lets HELD bytes/s through."""

    def __init__(self) -> None:
        self.cut = DelayCut()
        self.now_ns = 0
        self.begin()

    def begin(self) -> None:
        self.cut.begin(rtt_min_ns=8 * MS, now_ns=self.now_ns)

    def tell(self, *, queue_ms: int, carried: int, sent: int = HELD, held: int | None = HELD) -> int | None:
        self.now_ns += TICK_NS
        self.cut.measured(
            rtt_ns=(8 + queue_ms) * MS,
            rtt_min_ns=8 * MS,
            queue_ns=queue_ms * MS,
            sent_bytes_per_s=sent,
            carried_bytes_per_s=carried,
            now_ns=self.now_ns,
            held_bytes_per_s=held,
        )
        return self.cut.rate_bytes_per_s


def test_a_queue_of_one_piece_of_what_is_sent_is_none() -> None:
    link = Held()
    link.tell(queue_ms=50, carried=200_000)
    assert link.cut.cuts == 0
    link = Held()
    link.tell(queue_ms=50, carried=200_000, held=None)
    assert link.cut.cuts == 1


def test_a_queue_while_the_budget_holds_us_back_teaches_nothing_of_the_link() -> None:
    """What was carried was what there was to carry, and the queue is made by others as well."""
    link = Held()
    link.tell(queue_ms=0, carried=200_000)
    for carried in (16_000, 90_000, 200_000, 50_000, 16_000, 30_000):
        least = link.tell(queue_ms=90, carried=carried)
    assert 1 <= link.cut.cuts <= 2
    assert (least or 0) >= HELD // 3
    for _ in range(50):
        link.tell(
            queue_ms=0, carried=link.cut.rate_bytes_per_s or HELD, sent=min(link.cut.rate_bytes_per_s or HELD, HELD)
        )
    assert (link.cut.rate_bytes_per_s or HELD) >= HELD, "in five seconds of work nothing is left of it"


def test_a_search_that_the_budget_holds_back_is_in_no_haste() -> None:
    link = Held()
    assert link.cut.is_hasty
    link.tell(queue_ms=0, carried=200_000)
    assert not link.cut.is_hasty


def test_a_trickle_that_a_peer_grants_is_not_what_the_link_carries() -> None:
    link = Held()
    for _ in range(4):
        link.tell(queue_ms=0, carried=HELD)
    for _ in range(4):
        rate = link.tell(queue_ms=200, sent=8_000, carried=8_000, held=8_000)
    assert link.cut.cuts == 1
    assert (rate or HELD) >= HELD // 2


def test_a_second_of_work_that_the_link_holds_back_is_believed() -> None:
    link = Held()
    for _ in range(12):
        link.tell(queue_ms=0, carried=50_000, sent=50_000)
    for _ in range(4):
        rate = link.tell(queue_ms=400, carried=50_000, sent=50_000)
    assert (rate or HELD) < 60_000


def test_after_a_short_burst_what_was_carried_is_not_believed_at_once() -> None:
    steps = Steps()
    steps.cut.begin(rtt_min_ns=40 * MS, now_ns=steps.now_ns)
    steps.tell(sent=300_000, carried=20_000)
    before = steps.rate
    steps.tell(queue_ms=40, sent=300_000, carried=20_000)
    assert steps.cut.cuts == 2
    assert steps.rate == before * 7 // 10
