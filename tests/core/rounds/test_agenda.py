"""When a run ends, and how long its last rounds may take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from diloco_node.core.rounds.agenda import GIVE_UP_BALLOTS, LAST_WAIT_NS_MAX, READY_STEPS, begin_ending, end_reason
from diloco_node.core.types import RunSettings
from tests.kit.rounds_kit import SECOND, SETTINGS

BY_STEPS = replace(SETTINGS, steps_max=100)
BY_TOKENS = replace(SETTINGS, tokens_max=5_000)


def reason(
    settings: RunSettings, steps: Sequence[int] = (), tokens: int = 0, covered: Sequence[int] = (), requested: str = ""
) -> str:
    return end_reason(settings, steps=steps, tokens=tokens, booked_tokens=covered, reason_ordered=requested)


def test_median_learner_decides_by_steps() -> None:
    assert reason(BY_STEPS, [99, 99, 100], 10**9) == ""
    assert reason(BY_STEPS, [7, 100, 101]) == "the median learner made 100 of 100 steps"
    assert reason(BY_STEPS) == ""


@pytest.mark.parametrize("others", [(7,), (7, 8), (7, 8, 9)])
def test_no_single_learner_ends_the_run_by_its_steps(others: tuple[int, ...]) -> None:
    assert reason(BY_STEPS, [*others, 2**40]) == ""


def test_merged_tokens_decide_by_tokens() -> None:
    assert reason(BY_TOKENS, [10**9], 4_999, [4_999]) == ""
    assert reason(BY_TOKENS, [], 5_000, [5_000]) == "5000 of 5000 tokens are merged"


@pytest.mark.parametrize("others", [(40,), (30, 30), (20, 30, 30)])
def test_no_single_learner_ends_the_run_by_its_tokens(others: tuple[int, ...]) -> None:
    assert reason(BY_TOKENS, [], 2**50, [*others, 2**50]) == ""


@pytest.mark.parametrize("ratio", [1, 8, 16, 125])
def test_regions_of_different_size_end_the_run_in_time(ratio: int) -> None:
    """A learner trains many times as much as each of the three others: as much as that may be, nobody waits."""
    own = 5_000 / (ratio + 3)
    booked = [int(own) + 1] * 3 + [int(ratio * own) + 1]
    assert reason(BY_TOKENS, [], sum(booked), booked) != ""


def test_run_without_limits_goes_on_until_somebody_asks() -> None:
    assert reason(SETTINGS, [10**9], 10**12, [10**12]) == ""
    assert reason(SETTINGS, requested="enough") == "enough"


def test_last_rounds_wait_a_few_steps_for_everybody_and_are_given_up_in_the_end() -> None:
    ending = begin_ending(BY_STEPS, "x", fragments=3, step_time_ns=SECOND, now_ns=7)
    assert ending.pending == {0, 1, 2}
    assert ending.ready_by_ns == 7 + READY_STEPS * SECOND
    fast = begin_ending(BY_STEPS, "x", fragments=3, step_time_ns=1, now_ns=7)
    assert fast.ready_by_ns == 7 + SETTINGS.ballot_deadline_min_ns
    early_ns, late_ns = ending.ready_by_ns, 9 * SECOND
    assert ending.allow(1, now_ns=10, ballot_ns=SECOND) == early_ns + GIVE_UP_BALLOTS * SECOND, (
        "late members come first"
    )
    assert ending.allow(2, now_ns=late_ns, ballot_ns=SECOND) == late_ns + GIVE_UP_BALLOTS * SECOND
    assert ending.allow(2, now_ns=99 * SECOND, ballot_ns=SECOND) == late_ns + GIVE_UP_BALLOTS * SECOND, (
        "from its turn on"
    )
    assert ending.allow(2, now_ns=99, ballot_ns=60 * SECOND) == late_ns + GIVE_UP_BALLOTS * 60 * SECOND, "slow links"
    assert ending.allow(2, now_ns=99, ballot_ns=SECOND) == late_ns + GIVE_UP_BALLOTS * 60 * SECOND, "between two rounds"


def test_no_word_of_a_region_puts_the_end_off_for_ever() -> None:
    ending = begin_ending(BY_STEPS, "x", fragments=1, step_time_ns=10**18, now_ns=0)
    assert ending.ready_by_ns == LAST_WAIT_NS_MAX
    assert ending.allow(0, now_ns=0, ballot_ns=10**18) == (1 + GIVE_UP_BALLOTS) * LAST_WAIT_NS_MAX
