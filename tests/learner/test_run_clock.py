"""Where a learner believes the run to be: told now and then, carried on at its own share, never back."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.merge.schedule import SLOWER_MAX
from diloco_node.learner.run_clock import STEPS_MIN, RunClock, StepTimer


def clock_at(pace: float, *, every: int, steps: int) -> RunClock:
    """A learner that makes a step while the run makes `pace`, and is told every so many of its own."""
    clock = RunClock()
    for step in range(steps + 1):
        if step:
            clock.stepped()
        if step % every == 0:
            clock.told(int(step * pace), step * pace / 10_000)
    return clock


def test_nobody_told_it_anything() -> None:
    clock = RunClock()
    for _ in range(5):
        clock.stepped()
    assert (clock.global_step, clock.part) == (5, None)


@pytest.mark.parametrize("pace", [0.25, 0.5, 1.0, 4.0, 10.0])
def test_it_goes_on_at_its_own_share_while_nobody_tells_it(pace: float) -> None:
    clock = clock_at(pace, every=4, steps=400)
    for _ in range(200):
        clock.stepped()
    assert clock.global_step == pytest.approx(600 * pace, rel=0.03)
    assert clock.part == pytest.approx(600 * pace / 10_000, rel=0.03)


def test_a_figure_that_is_behind_makes_it_wait() -> None:
    clock = clock_at(1.0, every=4, steps=400)
    clock.told(200, 0.02)
    assert (clock.global_step, clock.part) == (400, pytest.approx(0.04))
    for _ in range(100):
        clock.stepped()
    assert clock.global_step == 400
    for _ in range(700):
        clock.stepped()
    assert 500 < clock.global_step < 800


def test_it_joins_where_the_run_is_and_keeps_what_its_checkpoint_says() -> None:
    clock = RunClock()
    clock.resume(1000)
    clock.resume(700)
    assert clock.global_step == 1000
    clock.told(900, 0.5)
    clock.stepped()
    assert (clock.global_step, clock.part) == (1000, 0.5)
    clock.told(1001, 0.5)
    assert clock.global_step == 1001


def test_a_jump_is_not_taken_for_a_pace() -> None:
    """The daemon knew little at first: the share is bounded, so that one wrong figure is not carried on for ever."""
    clock = clock_at(1.0, every=1, steps=STEPS_MIN)
    clock.told(1_000_000, 0.9)
    clock.stepped()
    assert clock.global_step <= 1_000_000 + SLOWER_MAX


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2**48), st.floats(0, 1)))))
def test_it_never_goes_back_and_never_beyond_the_end(told: list[tuple[int, float] | None]) -> None:
    clock, seen = RunClock(), []
    for one in told:
        if one is None:
            clock.stepped()
        else:
            clock.told(*one)
        seen.append((clock.global_step, clock.part or 0.0))
    assert all(before[0] <= after[0] <= 2**48 and before[1] <= after[1] <= 1.0 for before, after in pairwise(seen))


def average_of(*took: int) -> float:
    """What a timer makes of the seconds of steps."""
    timer, now_s = StepTimer(), 0
    timer.stepped(now_s)
    for step_s in took:
        now_s += step_s
        timer.stepped(now_s * 10**9)
    return timer.average_ns / 1e9


@pytest.mark.parametrize(
    ("took", "average_s"),
    [
        ((60, 2, 2, 2), 2.0),  # the first one compiles
        ((2, 2, 2, 2000), 2.0 + 3 * 2.0 / 8),  # an evaluation
        ((300, 300, 300), 300.0),  # a rollout in each
        ((9, 2, 4), 2.0 + 2.0 / 8),
        ((), 0.0),
    ],
)
def test_a_step_with_an_evaluation_counts_as_four(took: tuple[int, ...], average_s: float) -> None:
    assert average_of(*took) == pytest.approx(average_s)
