"""The benchmark of starved regions: what it makes of the statuses of one moment, and when a minute is good."""

import pytest
import starved


def status(**more: object) -> dict[str, object]:
    return {"rounds_committed": 7, "term": 3, "learner": {"step": 1}, "machine": {"late_seconds": 0.1}, **more}


def test_a_moment_has_the_highest_round_and_term_and_counts_who_trains_and_who_is_starved() -> None:
    late = status(rounds_committed=9, term=2, learner=None, machine={"late_seconds": 0.9})
    look = starved.summed([status(), late, status(rounds_committed=None, term=None)], 5.0)
    assert (look.at_s, look.rounds, look.term) == (5.0, 9, 3)
    assert (look.regions, look.training, look.starved) == (3, 2, 1)
    assert starved.summed([], 0.0).rounds == 0


@pytest.mark.parametrize(("rounds", "terms", "is_good"), [(1, 3, True), (0, 0, False), (40, 4, False)])
def test_a_minute_is_good_with_a_round_and_at_most_three_terms(rounds: int, terms: int, is_good: bool) -> None:
    first, last = starved.Look(0.0, 5, 2, 16, 16, 0, 30.0), starved.Look(60.0, 5 + rounds, 2 + terms, 16, 16, 4, 40.0)
    (minute,) = starved.minutes_of([first, last])
    assert (minute.seconds, minute.rounds, minute.terms, minute.starved) == (60.0, rounds, terms, 4)
    assert minute.is_good is is_good
