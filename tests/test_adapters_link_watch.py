"""What follows from what the kernel counted of a link: how its bulk connections are held, by how many they share."""

from __future__ import annotations

from diloco_node.core.delay import LONG_RTT_NS
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.transport.kernel.wire_meter import LinkCounters, WireMeter
from diloco_node.transport.pacing.link_stats import LOSS_BYTES_MIN, PACE_PPM, LinkWatch

MS = 1_000_000


class Meter(WireMeter):
    """Remembers what the kernel was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.paces: list[tuple[int | None, int]] = []
        self.starts: list[tuple[int | None, int]] = []
        self.told: TcpCounters | None = None

    def pace(self, peer: str, rate_bytes_per_s: int | None, *, connections: int = 1) -> None:
        self.paces.append((rate_bytes_per_s, connections))

    def start_over(self, peer: str) -> None:
        self.starts.append(self.paces[-1])

    def tcp(self, peer: str) -> TcpCounters | None:
        return self.told


def cut_watch(meter: Meter, *, held_bytes_per_s: int | None = None) -> LinkWatch:
    """A far link whose rate has been cut once."""
    watch = LinkWatch("b", meter)
    sent = 0
    for step in range(1, 40):
        sent += 10**6
        queue_ns = 0 if step < 20 or watch.delay.cuts else 80 * MS
        watch.one_way.echoed(sent_ns=step * 100 * MS, arrived_ns=step * 100 * MS + queue_ns, now_ns=step * 100 * MS)
        counters = LinkCounters(sent, 0, 0, sent, LONG_RTT_NS + queue_ns, LONG_RTT_NS)
        at_ns = step * 100 * MS
        watch.taken(counters, is_busy=True, held_bytes_per_s=held_bytes_per_s, at_ns=at_ns, now_ns=at_ns)
    assert watch.delay.cuts
    return watch


def test_connections_share_the_pace_and_lose_it_with_the_link() -> None:
    meter = Meter()
    watch = cut_watch(meter)
    rate = watch.delay.rate_bytes_per_s
    assert rate is not None
    watch.hold(None)
    watch.has_connections(3)
    watch.hold(None)
    assert meter.paces == [(rate * PACE_PPM // 1_000_000, 1), (rate * PACE_PPM // 1_000_000, 3)]
    watch.lost()
    watch.hold(None)
    assert len(meter.paces) == 2, "there is nothing to hold any more"


def test_a_ceiling_holds_a_far_link_and_no_near_one() -> None:
    meter = Meter()
    watch = LinkWatch("b", meter)
    watch.rtt_min_ns = LONG_RTT_NS - 1
    watch.hold(10**6)
    assert meter.paces == []
    watch.rtt_min_ns = LONG_RTT_NS
    watch.hold(10**6)
    watch.hold(None)
    watch.hold(None)
    assert meter.paces == [(10**6, 1), (None, 1)], "taken away once"


def test_what_is_sent_again_is_added_to_the_pace_once_enough_was_sent() -> None:
    meter = Meter()
    watch = cut_watch(meter)
    rate = watch.delay.rate_bytes_per_s
    assert rate is not None
    for sent, ppm in ((LOSS_BYTES_MIN - 1, 0), (LOSS_BYTES_MIN, 250_000)):
        meter.told = TcpCounters(sent, LOSS_BYTES_MIN // 4, LONG_RTT_NS)
        watch.hold(None)
        assert meter.paces[-1] == (rate * (PACE_PPM + ppm) // 1_000_000, 1)


def test_what_is_learnt_at_a_cut_knows_what_held_us_back() -> None:
    """A megabyte was carried in each tenth of a second, as the budget has it: the link may carry more."""
    free, held = cut_watch(Meter()), cut_watch(Meter(), held_bytes_per_s=10**7)
    assert (held.delay.rate_bytes_per_s or 0) != (free.delay.rate_bytes_per_s or 0)
    assert (held.delay.rate_bytes_per_s or 10**7) >= 7 * 10**6


def work_on(watch: LinkWatch, seconds: int, *, ceiling: int | None = None, share: float = 1.0) -> list[int]:
    """Send what the link carries, or a share of it, after `cut_watch`; what was seen at each start-over."""
    rates = []
    sent = watch._sent_bytes
    at_ns = watch.sampled_ns
    for _ in range(seconds * 10):
        at_ns += 100 * MS
        sent += int(min(watch.delay.rate_bytes_per_s or 10**7, 10**7) * share) // 10
        watch.one_way.echoed(sent_ns=at_ns, arrived_ns=at_ns, now_ns=at_ns)
        counters = LinkCounters(sent, 0, 0, sent, LONG_RTT_NS, LONG_RTT_NS)
        watch.taken(counters, is_busy=True, held_bytes_per_s=None, at_ns=at_ns, now_ns=at_ns)
        meter = watch._meter
        assert isinstance(meter, Meter)
        before = len(meter.starts)
        watch.hold(ceiling)
        if len(meter.starts) > before:
            rates.append(watch.delay.seen_bytes_per_s or 0)
    return rates


def test_bbr_starts_over_every_eight_seconds_of_a_full_link_and_no_faster_than_was_carried() -> None:
    meter = Meter()
    watch = cut_watch(meter)
    carried = work_on(watch, 30)
    assert 3 <= len(carried) <= 4
    assert meter.starts == [(rate * PACE_PPM // 1_000_000, 1) for rate in carried]


def test_bbr_stays_where_a_ceiling_holds_the_link_or_little_is_carried() -> None:
    for ceiling, share in ((10**6, 1.0), (None, 0.3)):
        meter = Meter()
        watch = cut_watch(meter)
        assert work_on(watch, 30, ceiling=ceiling, share=share) == []
        assert meter.paces, "it is paced"
