"""The next round to open: most overdue first, paced, with the reason when none is."""

from dataclasses import replace

from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.opening import LEAVE_ROUNDS, Opener, Opening
from diloco_node.core.types import FragmentPosition, LearnerStatus
from tests.kit.rounds_kit import (
    GENESIS,
    MS,
    SECOND,
    Ledger,
    Neighbourhood,
    committed_round,
    context_of,
    contribution,
    eligibility_of,
    position,
    status,
)


class Desk:
    """The opener of region a; H = 7, P = 2, steps of 100 ms: a round every 350 ms."""

    def __init__(self) -> None:
        self.world = Neighbourhood()
        self.history, self.ledger = RoundHistory(2), Ledger()
        self.history.apply(self.ledger.add(GENESIS), now_ns=0)
        self.opener = Opener(context_of(self.history, liveness=self.world.liveness))
        self.eligibility = eligibility_of(self.world.liveness, self.history)
        self.now_ns = SECOND

    def report(self, learner: LearnerStatus, names: str = "abc") -> None:
        for name in names:
            if name == "a":
                self.world.liveness.own_learner(learner, now_ns=self.now_ns)
            else:
                self.world.hear(name, learner, now_ns=self.now_ns)
            self.opener.on_status(name, learner, now_ns=self.now_ns)

    def choose(self, in_flight: tuple[int, ...] = (), resting: tuple[int, ...] = ()) -> Opening | None:
        around = self.eligibility.reachability(now_ns=self.now_ns)
        return self.opener.choose(around, in_flight, resting, self.eligibility, now_ns=self.now_ns)


def at(mark: int) -> FragmentPosition:
    return position(base=1, mark=mark, step=mark)


def test_most_overdue_fragment_goes_first() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(10)))
    opening = desk.choose()
    assert opening is not None
    assert (opening.fragment, opening.reason, opening.learners) == (1, "all 3 due", 3)
    assert opening.due_at_ns == (SECOND,) * 3
    other = desk.choose(in_flight=(1,))
    assert other is not None
    assert other.fragment == 0
    assert desk.choose(resting=(0, 1)) is None


def test_next_round_is_paced_from_the_last_opening() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(10)))
    opening = desk.choose()
    assert opening is not None
    desk.opener.on_open(opening, now_ns=desk.now_ns)
    assert desk.choose(in_flight=(1,)) is None
    assert desk.opener.wake_at_ns == SECOND + 350 * MS
    assert desk.opener.reason == "fragment 0: paced: 350 ms until the next round may open"
    desk.now_ns += 350 * MS
    assert desk.choose(in_flight=(1,)) is not None
    assert desk.opener.reason == ""


def test_rounds_in_flight_are_limited() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(10)))
    assert desk.choose(in_flight=(5, 6)) is None
    assert "2 rounds in flight" in desk.opener.reason


def test_nobody_due_is_said() -> None:
    desk = Desk()
    desk.report(status(13, f0=at(12), f1=at(10)))
    assert desk.choose() is None
    assert desk.opener.reason == "no fragment is due"


def test_learner_that_is_gone_is_no_longer_due() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(19)), "ab")
    desk.report(status(13, f0=at(12), f1=at(10)), "c")
    desk.opener.on_status("b", None, now_ns=desk.now_ns)
    assert desk.choose() is None
    assert "1 of 3 learners due (a), 2 needed" in desk.opener.reason


def test_due_time_is_when_it_was_first_seen() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(19)), "ab")
    desk.now_ns += 30 * MS
    desk.report(status(21, f0=at(12), f1=at(19)))
    opening = desk.choose()
    assert opening is not None
    assert opening.due_at_ns == (SECOND, SECOND, SECOND + 30 * MS)


def test_timing_is_learnt_from_openings_and_commits() -> None:
    desk = Desk()
    desk.report(status(20))
    desk.opener.on_open(Opening(0, "", (100, 300, 900), 3), now_ns=1_000)
    desk.opener.on_commit(5_000)
    timing = desk.opener.timing(desk.eligibility.reachability(now_ns=desk.now_ns))
    assert (timing.quorum_time_ns, timing.sync_time_ns, timing.spread_p99_ns) == (200, 5_000, 600)
    assert timing.step_time_ns == 100 * MS
    desk.opener.on_open(Opening(0, "", (100, 300), 3), now_ns=1_000)
    timing = desk.opener.timing(desk.eligibility.reachability(now_ns=desk.now_ns))
    assert timing.spread_p99_ns == 700, "one was not due at all: the spread is at least until now"


def test_report_from_before_the_last_apply_makes_nobody_due() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(19)))
    desk.history.apply(desk.ledger.add(committed_round(0, 1, [contribution("a"), contribution("b")])), now_ns=0)
    assert desk.choose() is not None, "they are at version 1"
    desk.history.apply(desk.ledger.add(committed_round(0, 2, [])), now_ns=0)
    assert desk.choose() is None, "a round right after the round"
    assert desk.opener.reason == "no fragment is due"
    desk.report(status(21, f0=at(12), f1=at(20)), "a")
    assert desk.choose() is None


def test_learner_without_any_version_is_not_counted() -> None:
    desk = Desk()
    desk.report(status(20, f0=at(12), f1=at(19)), "a")
    desk.report(status(0, f0=position(base=-1), f1=position(base=-1)), "bc")
    opening = desk.choose()
    assert opening is not None
    assert opening.learners == 1


def test_rounds_open_for_a_learner_that_leaves_until_a_merge_includes_its_steps() -> None:
    desk = Desk()
    desk.report(status(13, f0=at(12), f1=at(12)), "ac")
    leaving = replace(status(13, f0=at(13), f1=at(12)), leaving=True)
    desk.report(leaving, "b")
    opening = desk.choose()
    assert opening is not None
    assert (opening.fragment, opening.reason, opening.leavers) == (1, "b leaves", ("b",))
    desk.report(replace(leaving, positions=(at(13), at(13))), "b")
    assert desk.choose() is None
    assert desk.opener.reason == "no fragment is due"


def test_one_that_leaves_for_ever_gets_two_rounds_of_each_fragment_early() -> None:
    desk = Desk()
    desk.report(status(13, f0=at(12), f1=at(12)), "ac")
    desk.report(replace(status(13, f0=at(12), f1=at(12)), leaving=True), "b")
    for life in range(1, 1 + 2 * LEAVE_ROUNDS):
        opening = desk.choose()
        assert opening is not None
        desk.opener.on_open(opening, now_ns=desk.now_ns)
        # Which life it is, is its own word.
        desk.report(replace(status(13, f0=at(12), f1=at(12)), leaving=True, incarnation=1 + life), "b")
    assert desk.choose() is None
