"""What is far outside of its recent range is found, and what a training run does anyway is not."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.learner.loss_watch import FAR, IN_A_ROW, KEPT, SEEN_MIN, SpikeWatch


def used_to(values: list[float]) -> SpikeWatch:
    watch = SpikeWatch("loss")
    assert [watch.seen(value) for value in values] == [""] * len(values)
    return watch


def noisy(count: int, mean: float = 3.0, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [mean + rng.uniform(-0.2, 0.2) for _ in range(count)]


def test_a_value_far_above_its_range_is_a_spike_and_one_within_ends_the_row() -> None:
    watch = used_to(noisy(KEPT))
    assert watch.seen(9.0).startswith("the loss is 9, far above its range of late (up to 4.")
    assert watch.seen(11.0)
    assert watch.in_a_row == 2
    assert watch.seen(3.1) == ""
    assert watch.in_a_row == 0


def test_the_limit_by_hand() -> None:
    """From 0 to 99: median 50, ninth decile 90, so up to 50 + 10 x 40 is usual."""
    watch = used_to([float(value) for value in range(100)])
    assert watch.seen(50 + FAR * 40) == ""
    watch = used_to([float(value) for value in range(100)])
    assert "up to 450" in watch.seen(50 + FAR * 40 + 0.1)


def test_a_loss_that_falls_as_in_the_first_steps_is_no_spike() -> None:
    used_to([5.5 * 0.97**step + 1.0 for step in range(400)])


def test_before_enough_is_known_nothing_is_a_spike() -> None:
    used_to([3.0] * (SEEN_MIN - 1) + [1e9])


def test_values_that_never_differ_have_a_range_all_the_same() -> None:
    assert used_to([2.0] * KEPT).seen(2.9) == ""
    assert used_to([2.0] * KEPT).seen(3.1) != ""


def test_a_new_level_is_the_usual_one_after_a_while() -> None:
    watch = used_to(noisy(KEPT))
    found = [bool(watch.seen(value)) for value in noisy(KEPT, mean=30.0)]
    assert found[:IN_A_ROW] == [True] * IN_A_ROW
    assert not found[-1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_leaves_the_range_alone(value: float) -> None:
    watch = used_to(noisy(KEPT))
    for count in range(1, 4):
        assert watch.seen(value) == f"the loss is {value}"
        assert watch.not_finite == count
    assert watch.seen(3.0) == ""
    assert (watch.not_finite, watch.in_a_row) == (0, 0)


@given(st.lists(st.floats(2.0, 4.0), min_size=SEEN_MIN, max_size=300))
def test_values_within_a_factor_of_two_around_a_wide_range_are_never_touched(values: list[float]) -> None:
    """The smallest spread that counts is a twentieth of the median: ten of them are half of it."""
    watch = SpikeWatch("loss")
    for value in [2.9, 3.1] * KEPT:
        watch.seen(value)
    assert not any(watch.seen(value) for value in values if value <= 2.9 * 1.5)
