"""measure/samples.py: percentiles, jitter and rates that a person can recompute."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.measure.samples import (
    NS_PER_S,
    goodput,
    jitter_ns,
    percentile,
    seconds_per_gb,
    summarise_rtts,
    window_length_ns,
)

S = NS_PER_S


def test_percentiles_by_nearest_rank() -> None:
    values = [50, 15, 40, 20, 35]  # the example of the usual definition
    assert [percentile(values, p) for p in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 1) == percentile([7], 100) == 7


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50), st.integers(1, 100))
def test_a_percentile_bounds_its_part_of_the_values(values: list[int], per_cent: int) -> None:
    found = percentile(values, per_cent)
    assert found in values
    assert 100 * sum(value <= found for value in values) >= per_cent * len(values)
    assert 100 * sum(value < found for value in values) < per_cent * len(values)


def test_jitter_as_in_rfc_3550() -> None:
    # A.8: jitter += d - ((jitter + 8) >> 4), told as jitter >> 4. d: 1600, 0, 1600.
    #   0 + 1600 - 0 = 1600;  1600 + 0 - 100 = 1500;  1500 + 1600 - 94 = 3006;  3006 >> 4 = 187
    assert jitter_ns([10_000, 11_600, 11_600, 10_000]) == 187
    # The estimate is rounded, not cut: 100; 100 + 80 - (108 >> 4) = 174; 174 + 60 - (182 >> 4) = 223; 223 >> 4 = 13
    assert jitter_ns([100, 0, 80, 20]) == 13
    assert jitter_ns([5_000]) == jitter_ns([]) == 0
    assert jitter_ns([40_000_000] * 100) == 0


@given(st.lists(st.integers(0, 10**9), min_size=2, max_size=200))
def test_jitter_follows_the_formula_in_real_numbers(rtts: list[int]) -> None:
    estimate = 0.0
    for before, now in pairwise(rtts):
        estimate += (abs(now - before) - estimate) / 16
    assert jitter_ns(rtts) == pytest.approx(estimate, abs=2)


def test_jitter_of_a_steady_swing_is_the_swing() -> None:
    assert jitter_ns([10_000_000, 14_000_000] * 200) == pytest.approx(4_000_000, rel=1e-3)


def test_round_trips_in_one_line() -> None:
    found = summarise_rtts([40, 41, 39, 400], lost_count=2)
    assert (found.answered, found.unanswered) == (4, 2)
    assert (found.min_ns, found.p50_ns, found.p99_ns, found.max_ns) == (39, 40, 400, 400)


def test_goodput_counts_only_after_the_warm_up() -> None:
    # 1 MB/s for a second, then 10 MB/s for two: only the latter is in the span.
    marks = [(ms * 1_000_000, ms * 1_000 if ms <= 1000 else 1_000_000 + (ms - 1000) * 10_000) for ms in range(3001)]
    found = goodput(marks, start_ns=S, span_ns=2 * S)
    assert found.mean == found.median == found.p10 == found.p90 == 10_000_000
    assert goodput(marks, start_ns=0, span_ns=S).mean == 1_000_000


def test_the_grain_of_chunks_does_not_show() -> None:
    # A chunk of 1 MiB every 0.8 s, out of step with the span: 1,310,720 bytes/s, whatever edges are chosen.
    marks = [(int(0.8 * S * n) + 123, n * 2**20) for n in range(20)]
    for start_ns in (S, S + 777_777_777):
        found = goodput(marks, start_ns=start_ns, span_ns=5 * S)
        assert found.mean == pytest.approx(1_310_720, rel=1e-6)
        assert found.p10 == pytest.approx(found.p90, rel=1e-6)


def test_nothing_arrives_before_the_first_mark_and_no_more_after_the_last() -> None:
    late = [(4 * S, 0), (6 * S, 2_000_000)]
    found = goodput(late, start_ns=0, span_ns=10 * S)
    assert found.mean == 200_000
    assert (found.p10, found.median, found.p90) == (0, 0, 1_000_000)
    assert goodput([], start_ns=0, span_ns=S).mean == 0


def test_spread_is_that_of_the_windows() -> None:
    marks, total = [(0, 0)], 0
    for window in range(20):
        total += 100_000 * (1 + window)
        marks.append(((window + 1) * S // 4, total))
    found = goodput(marks, start_ns=0, span_ns=5 * S)
    assert window_length_ns(5 * S) == S // 4
    assert (found.p10, found.median, found.p90) == (4 * 200_000, 4 * 1_000_000, 4 * 1_800_000)
    assert found.mean == total // 5
    two = [(0, 0), (S // 20, 100), (S // 10, 400)]
    assert goodput(two, start_ns=0, span_ns=S // 10).p90 == 6_000  # the last window counts, too


def test_windows_are_no_shorter_than_50_ms() -> None:
    assert window_length_ns(S // 5) == 50_000_000
    assert window_length_ns(20_000_000) == 20_000_000
    assert window_length_ns(100 * S) == 5 * S


def test_cpu_seconds_per_gb() -> None:
    # A third of a processor at 1 GB/s.
    assert seconds_per_gb(S, 3 * S, 10**9) == pytest.approx(1 / 3)
    assert seconds_per_gb(S, S, 0) == 0.0
