import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.merge.schedule import (
    MovingAverage,
    due_fragments,
    due_step,
    earliest_open_ns,
    median_step_time_ns,
    most_overdue_first,
    next_news_step,
    overdue_steps,
)
from diloco_node.core.types import FragmentPosition, LearnerStatus


def at(version: int, mark: int) -> FragmentPosition:
    return FragmentPosition(version, mark, 0, 0)


def test_first_rounds_are_staggered_over_the_cycle() -> None:
    fresh = at(0, 0)
    assert [due_step(p, fresh, sync_every=24, fragments=24) for p in range(24)] == list(range(1, 25))
    # H = 10, P = 4: 2.5, 5, 7.5, 10, rounded up.
    assert [due_step(p, fresh, sync_every=10, fragments=4) for p in range(4)] == [3, 5, 8, 10]
    # More fragments than steps: several in one step, none at step 0.
    assert [due_step(p, fresh, sync_every=2, fragments=5) for p in range(5)] == [1, 1, 2, 2, 2]


def test_fragments_are_due_from_their_step_on() -> None:
    def due(step: int) -> frozenset[int]:
        return due_fragments(LearnerStatus(1, step, 0, 0, (at(0, 0), at(3, 1), at(-1, 0)), False), sync_every=7)

    # ceil(7 / 3) = 3, 1 + 7 - 1 = 7, and one that has no version yet.
    assert [due(step) for step in (2, 3, 6, 7)] == [frozenset(), {0}, {0}, {0, 1}]


def test_later_rounds_open_one_step_before_h() -> None:
    assert due_step(3, at(5, 100), sync_every=24, fragments=24) == 123
    assert due_step(3, at(5, 100), sync_every=24, fragments=24, lead=0) == 124
    # A snapshot needs a step, even if H is 1.
    assert due_step(3, at(5, 100), sync_every=1, fragments=24) == 101
    # Version 0 with a mark: a learner that came back before the first round of the fragment.
    assert due_step(3, at(0, 7), sync_every=24, fragments=24) == 30
    # A mark at step 0 with a version: a learner that joined late.
    assert due_step(3, at(5, 0), sync_every=24, fragments=24) == 23


def test_a_learner_without_genesis_is_never_due() -> None:
    assert due_step(0, at(-1, 0), sync_every=24, fragments=24) is None
    assert overdue_steps(0, at(-1, 0), 10_000, sync_every=24, fragments=24) == -1


def test_due_begins_exactly_at_the_due_step() -> None:
    assert [overdue_steps(0, at(1, 10), step, sync_every=8, fragments=2) for step in (16, 17, 18)] == [-1, 0, 1]


def test_snapshots_of_a_lone_learner_are_h_steps_apart() -> None:
    """Ballot at the due step, snapshot one step later, apply two steps after: a cycle of exactly H."""
    position, snapshots, apply_at = at(0, 0), [], -1
    for step in range(1, 60):
        if step == apply_at:
            position = at(position.base_version + 1, snapshots[-1])
        if apply_at < step and overdue_steps(1, position, step, sync_every=16, fragments=4) >= 0:
            snapshots.append(step + 1)
            apply_at = step + 3
    assert snapshots == [9, 25, 41, 57]


def test_the_most_overdue_fragment_goes_first_and_ties_go_by_index() -> None:
    assert most_overdue_first([(3, 2), (1, 5), (2, 5), (0, 0)]) == [1, 2, 3, 0]
    assert most_overdue_first([(2, 0), (5, -1)]) == [2]
    assert most_overdue_first([(2, -1)]) == []
    assert most_overdue_first([]) == []


def test_pacing_is_h_step_times_over_p_rounded_up() -> None:
    assert earliest_open_ns(None, sync_every=24, fragments=24, step_time_ns=499) == 0
    assert earliest_open_ns(1000, sync_every=24, fragments=24, step_time_ns=499) == 1499
    assert earliest_open_ns(1000, sync_every=10, fragments=4, step_time_ns=499) == 1000 + 1248  # 1247.5
    assert earliest_open_ns(1000, sync_every=10, fragments=4, step_time_ns=0) == 1000


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 10**10), st.lists(st.integers(0, 10**11), max_size=30))
def test_any_window_of_one_cycle_holds_at_most_p_openings(h: int, p: int, step_ns: int, waits: list[int]) -> None:
    openings: list[int] = []
    now = 0
    for wait in [0] * (p + 3) + waits:  # the longest burst that pacing allows, then gaps
        now = max(
            now + wait,
            earliest_open_ns(openings[-1] if openings else None, sync_every=h, fragments=p, step_time_ns=step_ns),
        )
        openings.append(now)
    for index in range(len(openings) - p):
        assert openings[index + p] - openings[index] >= h * step_ns


def test_the_median_ignores_learners_that_know_nothing() -> None:
    assert median_step_time_ns([]) == 0
    assert median_step_time_ns([0, 0]) == 0
    assert median_step_time_ns([900, 0, 100]) == 500
    assert median_step_time_ns([900, 100, 300]) == 300
    assert median_step_time_ns([4, 1, 2, 99]) == 3


@pytest.mark.parametrize("reported_ns", [2**62, 1_700])
def test_of_two_learners_one_huge_step_time_does_not_stop_the_pacing(reported_ns: int) -> None:
    assert median_step_time_ns([100, reported_ns]) == 100
    assert median_step_time_ns([100, 110, reported_ns, 2**62]) <= 16 * 110
    assert median_step_time_ns([100, 1_600]) == 850, "sixteen times slower is a slow learner"


def test_the_average_by_hand() -> None:
    average = MovingAverage()
    assert average.average_ns == 0
    average = average.after(5_000)  # a first step that compiles
    assert average.average_ns == 5_000
    average = average.after(800)  # replaces it
    assert average.average_ns == 800
    average = average.after(1600)  # 800 + 800/8
    assert average.average_ns == 900
    average = average.after(100)  # 900 - 800/8
    assert average.average_ns == 800
    average = average.after(1_000_000)  # a stall counts 4 x 800: 800 + 2400/8
    assert average.average_ns == 1100


@given(st.integers(0, 10**12), st.integers(1, 10**12))
def test_the_average_reaches_a_constant_step_time(before: int, now: int) -> None:
    average = MovingAverage().after(before).after(before)
    for _ in range(400):
        average = average.after(now)
    assert abs(average.average_ns - now) <= 1


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=60))
def test_the_average_stays_within_its_samples(samples: list[int]) -> None:
    average = MovingAverage()
    for sample in samples:
        average = average.after(sample)
        assert 0 <= average.average_ns <= max(samples)


def test_negative_durations_are_a_bug() -> None:
    with pytest.raises(ValueError, match="negative"):
        MovingAverage().after(-1)


def test_no_step_that_matters_lies_between_two_reports() -> None:
    positions = (FragmentPosition(3, 40, 41, 0), FragmentPosition(2, 38, 40, 0))
    # Fragment 0 is due at 40 + 8 - 1 = 47, fragment 1 at 45; the first steps after the inclusions are 42 and 41.
    reported, news = 40, []
    while (step := next_news_step(positions, reported, sync_every=8)) is not None:
        news.append(step)
        reported = step
    assert news == [41, 42, 45, 47]


def test_before_genesis_only_the_first_step_is_news() -> None:
    assert next_news_step((at(-1, 0), at(-1, 0)), 0, sync_every=8) == 1
    assert next_news_step((at(-1, 0),), 1, sync_every=8) is None


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=5),
    st.integers(0, 99),
    st.integers(1, 30),
)
def test_news_is_the_first_step_at_which_what_the_leader_sees_changes(
    places: list[tuple[int, int, int]], reported: int, sync_every: int
) -> None:
    positions = tuple(FragmentPosition(version, mark, included, 0) for version, mark, included in places)

    def seen(step: int) -> list[tuple[bool, bool]]:
        return [
            (
                step > position.included_step,
                position.base_version >= 0
                and overdue_steps(index, position, step, sync_every=sync_every, fragments=len(positions)) >= 0,
            )
            for index, position in enumerate(positions)
        ]

    changes = [step for step in range(reported + 1, reported + 200) if seen(step) != seen(step - 1)]
    assert next_news_step(positions, reported, sync_every=sync_every) == (changes[0] if changes else None)
