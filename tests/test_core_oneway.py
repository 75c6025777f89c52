"""core/oneway.py: the queue in our own direction, whatever the two clocks say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.oneway import (
    BASE_SLOT_NS,
    BASE_SLOTS,
    HASTY_NS_MIN,
    RECENT_MIN,
    RECENT_NS,
    OneWayQueue,
    hasty_ns,
)
from diloco_node.transport.pacing.budget import NS_PER_S

MS = 1_000_000
STEP_NS = 50 * MS

delays = st.lists(st.integers(0, 300 * MS), min_size=RECENT_MIN, max_size=60)
offsets = st.integers(-(2**60), 2**60)


def run(ways_ns: list[int], *, offset_ns: int = 0, back_ns: int = 20 * MS, drift_ppm: int = 0) -> list[int | None]:
    """The queue after each echo of pings that took so long."""
    queue = OneWayQueue()
    found = []
    for index, way_ns in enumerate(ways_ns):
        sent_ns = NS_PER_S + index * STEP_NS
        arrived_ns = sent_ns + way_ns
        now_ns = arrived_ns + back_ns
        queue.echoed(
            sent_ns=sent_ns, arrived_ns=arrived_ns + offset_ns + arrived_ns * drift_ppm // 10**6, now_ns=now_ns
        )
        found.append(queue.queue_ns(now_ns=now_ns))
    return found


@settings(deadline=None)
@given(ways=delays, offset=offsets, back=st.integers(0, 10 * MS))
def test_neither_the_offset_of_the_clocks_nor_the_way_back_matters(ways: list[int], offset: int, back: int) -> None:
    ways = [20 * MS + way // 10 for way in ways]  # echoes come in the order of their pings
    assert run(ways, offset_ns=offset, back_ns=back) == run(ways)


@settings(deadline=None)
@given(delays)
def test_it_is_never_negative_and_never_more_than_the_last_way_over_the_least(ways: list[int]) -> None:
    for index, found in enumerate(run(ways)):
        assert found is None or 0 <= found <= ways[index] - min(ways[: index + 1])


@settings(deadline=None)
@given(st.integers(0, 200 * MS), st.integers(0, 250 * MS))
def test_a_standing_queue_is_seen_in_full_and_a_single_late_ping_is_none(standing: int, late: int) -> None:
    calm = [20 * MS] * 20
    assert run(calm + [20 * MS + standing] * 12)[-1] == standing
    assert run([*calm, 20 * MS + late, *calm])[20:] == [0] * 21


def test_nothing_is_said_from_few_or_old_echoes() -> None:
    assert run([20 * MS] * (RECENT_MIN - 1)) == [None] * (RECENT_MIN - 1)
    queue = OneWayQueue()
    for index in range(RECENT_MIN):
        queue.echoed(sent_ns=index, arrived_ns=index, now_ns=index)
    assert queue.queue_ns(now_ns=2 * RECENT_NS) == 0
    assert queue.queue_ns(now_ns=2 * RECENT_NS + RECENT_MIN) is None


@pytest.mark.parametrize("drift_ppm", [-50, 50])
def test_clocks_that_drift_apart_are_a_queue_of_5_ms_at_most(drift_ppm: int) -> None:
    found = run([20 * MS] * (300 * 20), drift_ppm=drift_ppm)
    assert max(one for one in found if one is not None) <= abs(drift_ppm) * BASE_SLOTS * BASE_SLOT_NS // 10**6


def test_the_least_way_is_forgotten_when_the_route_gets_longer() -> None:
    slots_ns = BASE_SLOTS * BASE_SLOT_NS
    found = run([10 * MS] * 100 + [50 * MS] * (slots_ns // STEP_NS))
    assert found[110] == 40 * MS
    assert found[-1] == 0


def test_the_least_way_of_long_ago_does_not_count_when_little_was_said_since() -> None:
    queue = OneWayQueue()
    queue.echoed(sent_ns=0, arrived_ns=0, now_ns=0)
    later_ns = BASE_SLOTS * BASE_SLOT_NS
    for index in range(RECENT_MIN):
        queue.echoed(sent_ns=index, arrived_ns=index + 7 * MS, now_ns=later_ns - 1)
    assert queue.queue_ns(now_ns=later_ns - 1) == 7 * MS
    assert queue.queue_ns(now_ns=later_ns) == 0


def test_a_new_link_begins_anew() -> None:
    queue = OneWayQueue()
    for index in range(10):
        queue.echoed(sent_ns=index, arrived_ns=-(10**12) + index, now_ns=index)
    queue.reset()
    assert queue.queue_ns(now_ns=10) is None
    for index in range(10, 20):
        queue.echoed(sent_ns=index, arrived_ns=index, now_ns=index)
    assert queue.queue_ns(now_ns=20) == 0


def test_haste_looks_back_for_a_round_trip_and_a_bit_but_no_longer_than_usual() -> None:
    assert hasty_ns(10 * MS) == HASTY_NS_MIN
    assert hasty_ns(100 * MS) == 125 * MS
    assert hasty_ns(NS_PER_S) == RECENT_NS
    queue = OneWayQueue()
    for index in range(25):
        at_ns = index * 10 * MS
        queue.echoed(sent_ns=at_ns, arrived_ns=at_ns + (50 * MS if index >= 15 else 0), now_ns=at_ns)
    assert queue.queue_ns(now_ns=240 * MS, recent_ns=HASTY_NS_MIN) == 50 * MS
    assert queue.queue_ns(now_ns=240 * MS) == 0
