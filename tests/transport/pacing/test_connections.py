"""transport/pacing/link_stats.py: how many connections a link is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.transport.kernel.congestion import LONG_RTT_NS
from diloco_node.transport.pacing.link_stats import BULK_CONNECTIONS_MAX, LOSSY_PPM, target_connections

MS = 1_000_000
MIB = 2**20
GBIT = 125_000_000


def connections(
    rtt_min_ns: int, ceiling: int | None = None, *, delivered: int = 0, buffer: int = 4 * MIB, lost_ppm: int = 0
) -> int:
    return target_connections(
        rtt_min_ns=rtt_min_ns,
        ceiling_bytes_per_s=ceiling,
        delivered_bytes_per_s=delivered,
        buffer_bytes=buffer,
        lost_ppm=lost_ppm,
    )


@pytest.mark.parametrize(
    ("rtt_ms", "gbits", "buffer_mib", "count"),
    [
        (40, 0.1, 4, 1),
        (40, 0.4, 4, 1),
        (40, 0.5, 4, 2),
        (40, 1, 4, 3),
        (40, 5, 4, 4),
        (40, 5, 32, 2),
        (40, 5, 128, 1),
        (100, 1, 16, 2),
        (100, 5, 128, 1),
        (6, 2, 4, 1),
    ],
)
def test_as_many_as_the_bytes_on_their_way_need(rtt_ms: int, gbits: float, buffer_mib: int, count: int) -> None:
    assert connections(rtt_ms * MS, int(gbits * GBIT), buffer=buffer_mib * MIB) == count


def test_exactly_what_the_buffers_hold_is_one_connection_and_a_byte_more_two() -> None:
    assert connections(1_000 * MS, 2 * MIB) == 1
    assert connections(1_000 * MS, 2 * MIB + 1) == 2


def test_without_a_ceiling_the_number_follows_what_is_carried() -> None:
    assert connections(40 * MS) == 1
    assert [connections(40 * MS, delivered=int(gbits * GBIT)) for gbits in (0.2, 0.4, 0.5, 2)] == [1, 2, 3, 4]
    assert connections(40 * MS, GBIT // 10, delivered=5 * GBIT) == 1, "a ceiling says it better"


def test_a_lossy_link_with_a_long_round_trip_gets_all_of_them_whatever_it_delivers() -> None:
    assert connections(100 * MS, lost_ppm=LOSSY_PPM) == BULK_CONNECTIONS_MAX
    assert connections(100 * MS, lost_ppm=LOSSY_PPM - 1) == 1
    assert connections(LONG_RTT_NS, lost_ppm=LOSSY_PPM) == BULK_CONNECTIONS_MAX
    assert connections(LONG_RTT_NS - 1, lost_ppm=10 * LOSSY_PPM) == 1, "near"


RATES = st.integers(0, 10**12)
BUFFERS = st.integers(1, 2**30)


@given(st.integers(0, LONG_RTT_NS - 1), st.none() | RATES, RATES, BUFFERS, st.integers(0, 10**6))
def test_a_near_link_or_one_that_is_not_known_has_one(
    rtt_ns: int, ceiling: int | None, delivered: int, buffer: int, ppm: int
) -> None:
    assert connections(rtt_ns, ceiling, delivered=delivered, buffer=buffer, lost_ppm=ppm) == 1


@given(st.integers(LONG_RTT_NS, 10**10), st.none() | RATES, RATES, BUFFERS, st.integers(0, 10**6))
def test_between_one_and_the_most_and_never_less_for_a_longer_way_or_smaller_buffers(
    rtt_ns: int, ceiling: int | None, delivered: int, buffer: int, ppm: int
) -> None:
    one = connections(rtt_ns, ceiling, delivered=delivered, buffer=buffer, lost_ppm=ppm)
    assert 1 <= one <= BULK_CONNECTIONS_MAX
    assert one <= connections(rtt_ns + MS, ceiling, delivered=delivered, buffer=buffer, lost_ppm=ppm)
    assert one <= connections(rtt_ns, ceiling, delivered=delivered, buffer=max(1, buffer // 2), lost_ppm=ppm)
