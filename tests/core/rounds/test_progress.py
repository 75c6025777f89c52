"""Where the run is: by its median learner and by merged tokens, whoever is away for a moment."""

from dataclasses import replace

import pytest

from diloco_node.core.rounds.progress import ABSENT_NS, RunPosition, RunProgress
from diloco_node.core.types import RunSettings
from tests.kit.rounds_kit import (
    GENESIS,
    SETTINGS,
    Neighbourhood,
    committed_round,
    context_of,
    contribution,
    history_of,
    status,
)

BY_STEPS = replace(SETTINGS, steps_max=200)
BY_TOKENS = replace(SETTINGS, tokens_max=64_000)


def progress_of(near: Neighbourhood, *bodies: object, settings: RunSettings = SETTINGS) -> RunProgress:
    history = history_of(GENESIS, *bodies)  # type: ignore[arg-type]
    return RunProgress(context_of(history, liveness=near.liveness, settings=settings))


def near_with(**steps: int) -> Neighbourhood:
    near = Neighbourhood()
    for name, step in steps.items():
        if name == "a":
            near.liveness.own_learner(status(step), now_ns=0)
        else:
            near.hear(name, status(step), now_ns=0)
    return near


def test_the_median_learner_says_where_the_run_is() -> None:
    assert progress_of(near_with(a=400, b=100, c=50)).position(now_ns=0) == RunPosition(100, None)
    by_steps = progress_of(near_with(a=400, b=100, c=50), settings=BY_STEPS)
    assert by_steps.position(now_ns=0) == RunPosition(100, 0.5)


@pytest.mark.parametrize("lie", [2**40, 0])
def test_one_learner_does_not_move_the_run_beyond_the_others(lie: int) -> None:
    result = progress_of(near_with(a=lie, b=100, c=110), settings=BY_STEPS).position(now_ns=0)
    assert 100 <= result.steps <= 110


def test_steps_of_earlier_incarnations_count() -> None:
    near = near_with(b=100, c=300)
    near.liveness.own_learner(status(5, incarnation=2), now_ns=0)
    rounds = [committed_round(0, 1, [contribution("a", steps=(0, 150), incarnation=1)])]
    assert progress_of(near, *rounds).position(now_ns=0).steps == 155


def test_a_learner_that_is_away_counts_with_what_the_ledger_has_of_it() -> None:
    """The median of 50, 60 and 240 steps is 60; without the slow one for a moment it would be 240, or 60 of two."""
    rounds = [committed_round(0, 1, [contribution("a", steps=(0, 50)), contribution("b", steps=(0, 58))])]
    near = near_with(a=50, b=60, c=240)
    progress = progress_of(near, *rounds, settings=BY_STEPS)
    assert progress.position(now_ns=0).steps == 60
    near.hear("b", None, now_ns=1)
    assert progress.learner_steps(now_ns=1) == [50, 58, 240]
    near.liveness.own_learner(None, now_ns=2)
    assert progress.learner_steps(now_ns=2) == [50, 58, 240]
    assert progress.position(now_ns=2) == RunPosition(60, 0.29), "what is shown never goes back"


def test_a_learner_that_was_never_there_does_not_count() -> None:
    near = near_with(a=70)
    progress = progress_of(near)
    assert progress.position(now_ns=0).steps == 70
    near.hear("b", status(0), now_ns=1)
    near.hear("c", status(80), now_ns=1)
    assert progress.learner_steps(now_ns=1) == [70, 0, 80]


def test_a_learner_that_is_gone_for_good_holds_up_the_run_no_longer() -> None:
    near = near_with(a=50, b=60, c=240)
    progress = progress_of(near)
    assert progress.learner_steps(now_ns=0) == [50, 60, 240]
    near.hear("b", status(70), now_ns=ABSENT_NS - 1)
    near.hear("c", status(300), now_ns=ABSENT_NS - 1)
    assert progress.learner_steps(now_ns=ABSENT_NS - 1) == [50, 70, 300]
    assert progress.learner_steps(now_ns=ABSENT_NS) == [70, 300]
    near.liveness.own_learner(status(51), now_ns=ABSENT_NS + 1)
    assert progress.learner_steps(now_ns=ABSENT_NS + 1) == [51, 70, 300]


def test_a_minority_that_goes_on_alone_does_not_move_the_run() -> None:
    """Cut off from the others, or the first to go on after a stall of all."""
    near = near_with(a=50, b=60, c=190)
    progress = progress_of(near, settings=BY_STEPS)
    assert progress.position(now_ns=0) == RunPosition(60, 0.3)
    near.hear("c", status(400), now_ns=10 * ABSENT_NS)
    assert progress.position(now_ns=10 * ABSENT_NS) == RunPosition(60, 0.3)
    near.hear("b", status(61), now_ns=10 * ABSENT_NS + 1)
    assert progress.position(now_ns=10 * ABSENT_NS + 1) == RunPosition(61, 0.305)


def test_merged_tokens_say_how_far_it_is_where_tokens_end_it() -> None:
    both = replace(BY_TOKENS, steps_max=1000)
    rounds = [committed_round(at, 1, [contribution("a", fragment=at, steps=(0, 500))]) for at in range(2)]
    near = near_with(a=10, b=100, c=100)
    assert progress_of(near, *rounds, settings=BY_TOKENS).position(now_ns=0) == RunPosition(100, 0.5)
    assert progress_of(near, *rounds, settings=both).position(now_ns=0).part == 0.5, "the nearer limit counts"
    over = [committed_round(at, 1, [contribution("a", fragment=at, steps=(0, 5000))]) for at in range(2)]
    assert progress_of(near, *over, settings=BY_TOKENS).position(now_ns=0).part == 1.0


def test_what_is_shown_goes_neither_back_nor_beyond_the_end() -> None:
    near = near_with(a=141)
    progress = progress_of(near, settings=BY_STEPS)
    assert progress.position(now_ns=0) == RunPosition(141, 0.705)
    near.hear("b", status(38), now_ns=1)
    near.hear("c", status(30), now_ns=1)
    assert progress.position(now_ns=1) == RunPosition(141, 0.19), "learners that join later do not take it back"
    near.all_hear(status(241), now_ns=2)
    assert progress.position(now_ns=2) == RunPosition(200, 1.0)


def test_a_majority_of_the_regions_with_a_learner_now_or_before_is_a_quorum() -> None:
    assert not progress_of(Neighbourhood()).has_quorum
    assert not progress_of(near_with(a=5)).has_quorum
    assert progress_of(near_with(a=5, c=0)).has_quorum
    gone = [committed_round(0, 1, [contribution("b", steps=(0, 50))])]
    assert progress_of(near_with(a=5), *gone).has_quorum


def test_before_anybody_trains_the_run_is_at_its_start() -> None:
    assert progress_of(Neighbourhood(), settings=BY_STEPS).position(now_ns=0) == RunPosition(0, 0.0)
