"""The rate is of now: steady while a counter grows, gone soon after it stands still."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.health.rate import SAMPLES_MAX, SlidingRate

S = 1_000_000_000


def grown(rate: SlidingRate, *, steps: int, step_ns: int, growth: float, start_ns: int = 0, value: float = 0.0) -> int:
    for at in range(steps):
        rate.add(value + at * growth, now_ns=start_ns + at * step_ns)
    return start_ns + (steps - 1) * step_ns


def test_a_steady_counter_has_its_rate() -> None:
    rate = SlidingRate(30.0)
    end_ns = grown(rate, steps=1000, step_ns=S // 10, growth=50.0)
    assert rate.per_second(now_ns=end_ns) == pytest.approx(500.0)
    assert rate.per_second(now_ns=end_ns + S // 10) == pytest.approx(500.0), "the next step is not late yet"


def test_a_counter_that_stands_still_loses_its_rate() -> None:
    rate = SlidingRate(30.0)
    end_ns = grown(rate, steps=1000, step_ns=S // 10, growth=50.0)
    rates = [rate.per_second(now_ns=end_ns + after * S) for after in (1, 10, 29, 31)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == 0.0


def test_a_change_of_speed_is_seen_within_the_window() -> None:
    rate = SlidingRate(30.0)
    end_ns = grown(rate, steps=100, step_ns=S, growth=100.0)
    end_ns = grown(rate, steps=32, step_ns=S, growth=10.0, start_ns=end_ns + S, value=9910.0)
    assert rate.per_second(now_ns=end_ns) == pytest.approx(10.0)


def test_steps_longer_than_the_window_have_a_rate() -> None:
    rate = SlidingRate(30.0)
    end_ns = grown(rate, steps=5, step_ns=60 * S, growth=6000.0)
    assert rate.per_second(now_ns=end_ns + 50 * S) == pytest.approx(100.0)


def test_before_two_samples_and_after_a_reset_nothing_is_known() -> None:
    rate = SlidingRate(30.0)
    assert rate.per_second(now_ns=5) is None
    rate.add(7.0, now_ns=0)
    assert rate.per_second(now_ns=5) is None
    rate.add(8.0, now_ns=S)
    rate.reset()
    assert rate.per_second(now_ns=2 * S) is None


@given(st.lists(st.tuples(st.integers(0, 10 * S), st.integers(0, 10**6)), max_size=700))
def test_the_rate_is_never_negative_and_the_memory_bounded(grows: list[tuple[int, int]]) -> None:
    rate, now_ns, value = SlidingRate(30.0), 0, 0
    for passed_ns, more in grows:
        now_ns, value = now_ns + passed_ns, value + more
        rate.add(value, now_ns=now_ns)
        rate_per_s = rate.per_second(now_ns=now_ns + passed_ns)
        assert rate_per_s is None or rate_per_s >= 0.0
    assert len(rate._samples) <= SAMPLES_MAX
