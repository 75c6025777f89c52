"""planning/merge_pace.py: steps between two merges of a fragment, as counted."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.planning.merge_pace import MARKS_MAX, WINDOW_CYCLES, MergePace

P, H = 4, 16


def run(marks: list[tuple[int, int]]) -> MergePace:
    pace = MergePace(P, H)
    for steps, rounds in marks:
        pace.report(steps, rounds)
    return pace


def test_nothing_is_said_before_a_window_was_seen() -> None:
    window = WINDOW_CYCLES * H
    assert run([]).steps_per_cycle is None
    assert run([(0, 0), (window - 1, 0)]).steps_per_cycle is None
    assert run([(0, 0), (window, 16)]).steps_per_cycle == H
    assert run([(5, 7), (window + 5, 7)]).steps_per_cycle == P * window, "no round at all: so many at least"


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7))
def test_a_steady_pace_is_found_however_often_it_is_looked_at(every: int, stride: int) -> None:
    """One round every so many steps: a cycle takes P times that, but for one round at the window's edge."""
    pace = run([(step, step // every) for step in range(0, 40 * H, stride)])
    found = pace.steps_per_cycle
    assert found is not None
    rounds = Fraction(WINDOW_CYCLES * H, every)
    assert P * WINDOW_CYCLES * H / (rounds + 1) <= found <= P * (WINDOW_CYCLES * H + stride) / max(rounds - 1, 1)


def test_late_is_over_a_tenth_longer_than_it_should_be() -> None:
    window = WINDOW_CYCLES * H
    assert not run([(0, 0), (window, 16)]).is_late
    assert not run([(0, 0), (window * 11 // 8, 20)]).is_late, "exactly a tenth longer"
    assert run([(0, 0), (window * 11 // 8 + 1, 20)]).is_late
    assert not run([(0, 0)]).is_late


def test_what_was_long_ago_is_forgotten() -> None:
    slow = [(step, 0) for step in range(1000)]
    fast = [(1000 + step, step // (H // P)) for step in range(0, 20 * H)]
    assert run(slow).is_late
    assert not run(slow + fast).is_late


def test_another_learner_begins_anew() -> None:
    pace = run([(step, 0) for step in range(0, 1000, 10)])
    pace.report(0, 3)
    assert pace.steps_per_cycle is None
    assert not pace.is_late


def test_memory_is_bounded() -> None:
    pace = run([(0, 0)] * (MARKS_MAX + 10))
    assert len(pace._marks) == MARKS_MAX
