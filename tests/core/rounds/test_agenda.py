"""When a run ends, and how long its last rounds may take."""

from __future__ import annotations

from dataclasses import replace

from diloco_node.core.rounds.agenda import GIVE_UP_BALLOTS, READY_STEPS, begin_ending, end_reason
from tests.kit.rounds_kit import SECOND, SETTINGS

BY_STEPS = replace(SETTINGS, steps_max=100)
BY_TOKENS = replace(SETTINGS, tokens_max=5_000)


def test_fastest_learner_decides_by_steps() -> None:
    assert end_reason(BY_STEPS, steps=[99, 7], tokens=10**9, requested="") == ""
    assert end_reason(BY_STEPS, steps=[7, 100], tokens=0, requested="") == "the fastest learner made 100 of 100 steps"
    assert end_reason(BY_STEPS, steps=[], tokens=0, requested="") == ""


def test_merged_tokens_decide_by_tokens() -> None:
    assert end_reason(BY_TOKENS, steps=[10**9], tokens=4_999, requested="") == ""
    assert end_reason(BY_TOKENS, steps=[], tokens=5_000, requested="") == "5000 of 5000 tokens are merged"


def test_run_without_limits_goes_on_until_somebody_asks() -> None:
    assert end_reason(SETTINGS, steps=[10**9], tokens=10**12, requested="") == ""
    assert end_reason(SETTINGS, steps=[], tokens=0, requested="enough") == "enough"


def test_last_rounds_wait_a_few_steps_for_everybody_and_are_given_up_in_the_end() -> None:
    ending = begin_ending(BY_STEPS, "x", fragments=3, step_time_ns=SECOND, now_ns=7)
    assert ending.pending == {0, 1, 2}
    assert ending.ready_by_ns == 7 + READY_STEPS * SECOND
    fast = begin_ending(BY_STEPS, "x", fragments=3, step_time_ns=1, now_ns=7)
    assert fast.ready_by_ns == 7 + SETTINGS.ballot_deadline_min_ns
    assert ending.allow(1, now_ns=10, ballot_ns=SECOND) == 10 + GIVE_UP_BALLOTS * SECOND
    assert ending.allow(1, now_ns=99, ballot_ns=SECOND) == 10 + GIVE_UP_BALLOTS * SECOND, "from its first turn on"
