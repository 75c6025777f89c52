"""What follows from what the kernel counted of a link: rates, and how its bulk connections are paced."""

import pytest

from diloco_node.transport.kernel.congestion import LONG_RTT_NS
from diloco_node.transport.kernel.wire_meter import LinkCounters, WireMeter
from diloco_node.transport.pacing.link_stats import LinkWatch

MS = 1_000_000
LONG_RTT = LinkCounters(rtt_min_ns=LONG_RTT_NS)


class Meter(WireMeter):
    """Remembers what the kernel was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.paces: list[tuple[int | None, int]] = []

    def pace(self, peer: str, rate_bytes_per_s: int | None, *, connections: int = 1) -> None:
        self.paces.append((rate_bytes_per_s, connections))


def test_a_ceiling_paces_a_link_with_a_long_round_trip_only() -> None:
    meter = Meter()
    watch = LinkWatch("b", meter)
    watch.take(LinkCounters(rtt_min_ns=LONG_RTT_NS - 1), is_busy=False, now_ns=MS)
    watch.pace(10**6)
    assert meter.paces == []
    watch.take(LONG_RTT, is_busy=False, now_ns=2 * MS)
    watch.pace(10**6)
    watch.pace(None)
    watch.pace(None)
    assert meter.paces == [(10**6, 1), (None, 1)], "taken away once"


def test_connections_share_the_pace_and_lose_it_with_the_link() -> None:
    meter = Meter()
    watch = LinkWatch("b", meter)
    watch.take(LONG_RTT, is_busy=False, now_ns=MS)
    watch.pace(10**6)
    assert watch.is_spread
    watch.connections = 3
    watch.pace(10**6)
    assert not watch.is_spread, "one of them could run dry before the others"
    assert meter.paces == [(10**6, 1), (10**6, 3)]
    watch.reset()
    watch.pace(None)
    assert len(meter.paces) == 2, "there is nothing to pace any more"


@pytest.mark.parametrize("is_busy", [False, True])
def test_rates_are_of_the_time_between_two_samples_and_fade(is_busy: bool) -> None:
    watch = LinkWatch("b", Meter())
    first, delivered, received = 10**9, 10**8, 10**7  # what was before the first sample is no part of any rate
    watch.take(LinkCounters(first, 0, received, delivered), is_busy=is_busy, now_ns=100 * MS)
    assert (watch.rate_bytes_per_s, watch.busiest_bytes_per_s) == (0, 0)
    watch.take(LinkCounters(first + 500, 0, received, delivered + 400), is_busy=is_busy, now_ns=600 * MS)
    assert (watch.rate_bytes_per_s, watch.busiest_bytes_per_s) == (1000 if is_busy else 0, 800)
    watch.take(LinkCounters(first + 500, 0, received + 450, delivered + 400), is_busy=is_busy, now_ns=1100 * MS)
    assert (watch.rate_bytes_per_s, watch.busiest_bytes_per_s) == (875 if is_busy else 0, 900), "the busier direction"
    watch.take(LinkCounters(first + 10**6, 0, received, delivered), is_busy=is_busy, now_ns=1105 * MS)
    assert watch.busiest_bytes_per_s == 900, "over so short a time no rate is measured"
