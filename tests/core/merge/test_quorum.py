from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.merge.quorum import (
    LearnerDue,
    OpenDecision,
    RoundTiming,
    decide_open,
    grace_ns,
    p99,
    quorum_size,
)
from diloco_node.core.types import RunSettings

MS = 1_000_000
SETTINGS = RunSettings()
# slack = 2 * 500 - (50 + 700) = 250 ms; grace = 0.8 * 250 = 200 ms
TIMING = RoundTiming(
    step_time_ns=500 * MS, quorum_time_ns=50 * MS, sync_time_ns=700 * MS, spread_p99_ns=20 * MS, rtt_ns=40 * MS
)


def learners(**due_ms: int | None) -> list[LearnerDue]:
    return [LearnerDue(name, None if ms is None else ms * MS) for name, ms in due_ms.items()]


@pytest.mark.parametrize(
    ("live", "quorum_min", "needed"),
    [(1, 0, 1), (2, 0, 2), (3, 0, 2), (4, 0, 3), (5, 0, 3), (4, 1, 1), (4, 4, 4), (3, 4, 3), (0, 0, 1), (0, 2, 1)],
)
def test_quorum_is_a_majority_of_the_live_or_what_was_set(live: int, quorum_min: int, needed: int) -> None:
    assert quorum_size(live, quorum_min) == needed


def test_grace_by_hand() -> None:
    assert grace_ns(TIMING, overlap_steps=2, gamma=0.8) == 200 * MS
    assert grace_ns(TIMING, overlap_steps=2, gamma=0.799) == 199_750_000


def test_grace_is_at_least_the_spread_of_reports() -> None:
    slow = replace(TIMING, sync_time_ns=5000 * MS)  # slack is negative
    assert grace_ns(slow, overlap_steps=2, gamma=0.8) == 20 * MS
    assert grace_ns(replace(slow, spread_p99_ns=0), overlap_steps=2, gamma=0.8) == 0


def test_grace_is_at_most_one_step_or_two_round_trips() -> None:
    fast = replace(TIMING, quorum_time_ns=0, sync_time_ns=0)  # 0.8 * 1000 ms
    assert grace_ns(fast, overlap_steps=2, gamma=0.8) == 500 * MS
    assert grace_ns(replace(fast, rtt_ns=300 * MS), overlap_steps=2, gamma=0.8) == 600 * MS
    assert grace_ns(replace(fast, spread_p99_ns=9000 * MS), overlap_steps=2, gamma=0.8) == 500 * MS
    assert grace_ns(RoundTiming(), overlap_steps=2, gamma=0.8) == 0


times = st.integers(0, 10**11)


@given(times, times, times, times, times, st.integers(0, 8), st.floats(0.0, 1.0))
def test_grace_is_within_its_limits(
    step: int, quorum: int, sync: int, p99: int, rtt: int, tau: int, gamma: float
) -> None:
    grace = grace_ns(RoundTiming(step, quorum, sync, p99, rtt), overlap_steps=tau, gamma=gamma)
    upper = max(step, 2 * rtt)
    assert 0 <= grace <= upper
    assert grace >= min(p99, upper)


def test_nothing_but_rounds_in_flight_holds_up_one_that_leaves() -> None:
    names = [LearnerDue("a", None), LearnerDue("b", 100 * MS, is_leaving=True), LearnerDue("c", None)]
    decision = decide_open(101 * MS, names, TIMING, SETTINGS, not_before_ns=9_000 * MS)
    assert decision == OpenDecision(True, None, "b leaves")
    full = decide_open(101 * MS, names, TIMING, SETTINGS, rounds_in_flight=SETTINGS.rounds_in_flight_max)
    assert not full.open
    gone = [replace(learner, due_at_ns=None) for learner in names]
    assert decide_open(101 * MS, gone, TIMING, SETTINGS).reason.startswith("waits for quorum: 0 of 3")


def test_a_round_waits_for_its_quorum() -> None:
    decision = decide_open(9_000 * MS, learners(eu=None, us_east=100, us_west=None), TIMING, SETTINGS)
    assert decision == OpenDecision(False, None, "waits for quorum: 1 of 3 learners due (us_east), 2 needed")
    decision = decide_open(9_000 * MS, learners(d=None, c=7, b=9, a=8, e=None, f=None), TIMING, SETTINGS)
    assert decision.reason == "waits for quorum: 3 of 6 learners due (a, b, c), 4 needed"
    decision = decide_open(9_000 * MS, learners(eu=None, us_west=None), TIMING, SETTINGS)
    assert decision == OpenDecision(False, None, "waits for quorum: 0 of 2 learners due, 2 needed")
    assert decide_open(0, [], TIMING, SETTINGS) == OpenDecision(False, None, "no live learner")


def test_all_due_opens_at_once() -> None:
    assert decide_open(100 * MS, learners(b=100, a=90), TIMING, SETTINGS) == OpenDecision(True, None, "all 2 due")


def test_the_grace_window_starts_with_the_quorum_and_closes_on_the_nanosecond() -> None:
    records = learners(a=100, b=None, c=300, d=250)  # the third of four came at 300 ms: closes at 500 ms
    assert decide_open(380 * MS, records, TIMING, SETTINGS) == OpenDecision(False, 500 * MS, "grace: 120 ms left for b")
    assert decide_open(500 * MS - 1, records, TIMING, SETTINGS) == OpenDecision(
        False, 500 * MS, "grace: 1 ms left for b"
    )
    assert decide_open(500 * MS, records, TIMING, SETTINGS) == OpenDecision(
        True, None, "3 of 4 due, grace of 200 ms is over, not due: b"
    )


def test_a_learner_due_after_the_quorum_does_not_extend_the_window() -> None:
    settings = replace(SETTINGS, quorum_min=1)
    early = decide_open(110 * MS, learners(a=100, b=None, c=None), TIMING, settings)
    later = decide_open(290 * MS, learners(a=100, b=280, c=None), TIMING, settings)
    assert early.wake_at_ns == later.wake_at_ns == 300 * MS


def test_pacing_and_rounds_in_flight_hold_a_round_back() -> None:
    both = learners(a=100, b=100)
    assert decide_open(100 * MS, both, TIMING, SETTINGS, not_before_ns=100 * MS).open
    assert decide_open(100 * MS, both, TIMING, SETTINGS, not_before_ns=100 * MS + 1) == OpenDecision(
        False, 100 * MS + 1, "paced: 1 ms until the next round may open"
    )
    assert decide_open(100 * MS, both, TIMING, SETTINGS, rounds_in_flight=1).open
    assert decide_open(100 * MS, both, TIMING, SETTINGS, rounds_in_flight=2) == OpenDecision(
        False, None, "2 rounds in flight, at most 2 allowed"
    )


def test_long_lists_of_late_learners_are_cut() -> None:
    records = [LearnerDue(name, None) for name in "fedcba"] + [LearnerDue(f"x{i}", 0) for i in range(7)]
    assert decide_open(0, records, TIMING, SETTINGS).reason == "grace: 200 ms left for a, b, c, d and 2 more"


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 2000)), max_size=7),
    st.integers(0, 3000),
    st.integers(0, 4),
    st.integers(0, 3000),
)
def test_asking_again_at_the_wake_up_time_gets_on(due: list[int | None], now: int, quorum: int, pace: int) -> None:
    """It waits for time at most twice (pacing, then grace), and there is a reason for every answer."""
    records = [LearnerDue(f"r{i}", None if ms is None else ms * MS) for i, ms in enumerate(due)]
    settings = replace(SETTINGS, quorum_min=quorum)
    now_ns = max([now, *[ms for ms in due if ms is not None]]) * MS
    for _ in range(3):
        decision = decide_open(now_ns, records, TIMING, settings, not_before_ns=pace * MS)
        assert decision.reason
        assert decision == decide_open(now_ns, records[::-1], TIMING, settings, not_before_ns=pace * MS)
        if decision.open or decision.wake_at_ns is None:
            break
        assert decision.wake_at_ns > now_ns
        now_ns = decision.wake_at_ns
    enough = sum(ms is not None for ms in due) >= quorum_size(len(due), quorum)
    assert decision.open is enough


def test_the_p99_is_the_sample_that_99_of_100_do_not_exceed() -> None:
    assert p99(()) == 0
    assert p99((7,)) == 7
    assert p99(range(100, 0, -1)) == 99  # 99 of 100 samples are at most 99
    assert p99(range(128)) == 126  # ceil(0.99 * 128) = 127th of 0..127
