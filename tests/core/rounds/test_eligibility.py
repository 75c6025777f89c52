"""With whom a round is held: reach, stalled learners, reports older than the last commit."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.membership.liveness import SILENT_HEARTBEATS, Liveness
from diloco_node.core.merge.schedule import SLOWER_MAX
from diloco_node.core.rounds.eligibility import (
    BEHIND_NS,
    BEHIND_NS_MAX,
    LEAVING_NS,
    STALLED_NS_MIN,
    STALLED_STEPS,
    Eligibility,
    Reachability,
)
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.suspicion import BallotRole, SuspicionBook
from tests.kit.rounds_kit import (
    GENESIS,
    MS,
    SECOND,
    Ledger,
    Neighbourhood,
    committed_round,
    contribution,
    eligibility_of,
    history_of,
    position,
    status,
)

NAMES = ("c", "a", "d", "b")


def reach(
    world: Neighbourhood, names: tuple[str, ...] = ("a", "b", "c"), *, now_ns: int, exclude: Collection[str] = ()
) -> Reachability:
    return eligibility_of(world.liveness, history_of(GENESIS), names).reachability(now_ns=now_ns, exclude=exclude)


def test_everybody_who_reaches_everybody_is_reducer_and_learner() -> None:
    world = Neighbourhood(regions=("a", "b", "c"))
    world.all_hear(status(), now_ns=1)
    result = reach(world, ("c", "b", "a"), now_ns=1)
    assert result.reachable == result.reducers == result.learners == ("a", "b", "c")


def test_two_that_do_not_reach_each_other_stay_members_but_reduce_nothing() -> None:
    world = Neighbourhood(regions=("a", "b", "c", "d"))
    world.liveness.own_learner(status(), now_ns=1)
    world.hear("b", status(), now_ns=1, hears=("a", "d"))
    world.hear("c", status(), now_ns=1, hears=("a", "b", "d"))
    world.hear("d", status(), now_ns=1, hears=("a", "b", "c"))
    result = reach(world, NAMES, now_ns=1)
    assert result.reducers == ("a", "d")
    assert result.learners == ("a", "b", "c", "d")


def test_region_that_does_not_hear_the_leader_is_away() -> None:
    world = Neighbourhood()
    world.liveness.own_learner(status(), now_ns=1)
    world.hear("b", status(), now_ns=1, hears=("c",))
    world.hear("c", None, now_ns=1)
    result = reach(world, now_ns=1)
    assert result.reachable == ("a", "c")
    assert result.learners == ("a",)


def test_excluded_reducers_are_left_out_unless_nobody_else_is_there() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=1)
    assert reach(world, (*NAMES[:2], "b"), now_ns=1, exclude={"b"}).reducers == ("a", "c")
    assert reach(world, ("a", "b"), now_ns=1, exclude={"a", "b"}).reducers == ("a", "b")


def test_learner_that_makes_no_steps_is_not_waited_for() -> None:
    world = Neighbourhood()
    world.all_hear(status(step=10), now_ns=1)
    now_ns = 1 + STALLED_NS_MIN
    world.liveness.own_learner(status(step=11), now_ns=now_ns)
    world.hear("b", status(step=10), now_ns=now_ns)
    assert reach(world, ("a", "b"), now_ns=now_ns).learners == ("a", "b")
    world.hear("b", status(step=10), now_ns=now_ns + 1)
    assert reach(world, ("a", "b"), now_ns=now_ns + 1).learners == ("a",)


def test_a_learner_that_leaves_is_asked_though_it_stands_still() -> None:
    world = Neighbourhood()
    leaving = replace(status(step=10), leaving=True)
    for now_ns in (1, LEAVING_NS, LEAVING_NS + 2):
        world.hear("b", leaving, now_ns=now_ns)
        learners = reach(world, ("a", "b"), now_ns=now_ns).learners
        assert ("b" in learners) == (now_ns <= LEAVING_NS), "not for ever"


def test_a_region_that_leaves_reduces_nothing_more_while_others_can() -> None:
    world = Neighbourhood()
    eligibility = eligibility_of(world.liveness, HISTORY)
    world.hear("b", status(), now_ns=1, leaving=True)
    world.hear("c", status(), now_ns=1)
    assert eligibility.reachability(now_ns=1).reducers == ("a", "c")
    world.hear("b", status(), now_ns=2)
    assert eligibility.reachability(now_ns=2).reducers == ("a", "b", "c")


def test_stopped_learner_is_away() -> None:
    world = Neighbourhood()
    world.all_hear(status(finished=True), now_ns=1)
    assert reach(world, ("a",), now_ns=1).learners == ()


HISTORY = history_of(GENESIS, committed_round(0, 1, [contribution("b", steps=(0, 10))]))


def fault(*, step: int = 11, base: int = 1, incarnation_min: int = 1, is_recent: bool = False) -> str:
    """Why the learner of b can't join, or "". is_recent: its report may be older than the last apply."""
    world, now_ns = Neighbourhood(), BEHIND_NS + (not is_recent)
    eligibility = eligibility_of(world.liveness, HISTORY)
    eligibility.observe_incarnation("b", incarnation_min)
    world.hear("b", status(step, f0=position(base=base, step=10)), now_ns=now_ns)
    reachability = eligibility.reachability(now_ns=now_ns)
    return dict(eligibility.members(0, reachability, now_ns=now_ns)[1]).get("b", "")


def test_member_needs_a_base_that_is_not_older_than_its_last_inclusion() -> None:
    assert fault() == ""
    assert "has not applied version 1" in fault(base=0)
    assert fault(base=-1) == "has no version yet"
    assert fault(base=0, is_recent=True) == "", "the report may be older than the apply"
    assert fault(base=-1, is_recent=True) == "has no version yet"


def test_member_needs_a_step_since_its_last_inclusion() -> None:
    assert "no steps" in fault(step=10)
    assert fault(step=10, is_recent=True) == ""


def test_member_of_an_incarnation_that_is_over_is_refused() -> None:
    assert fault(incarnation_min=2) == "its incarnation is over"
    assert fault(incarnation_min=2, is_recent=True) == "its incarnation is over"


def test_a_learner_that_says_its_steps_take_for_ever_is_not_waited_for_for_ever() -> None:
    world = Neighbourhood(regions=("a", "b", "c"))
    world.all_hear(status(), now_ns=0)
    slow = replace(status(), step_time_ns=2**62)
    world.hear("b", slow, now_ns=0)
    limit_ns = STALLED_STEPS * SLOWER_MAX * 100 * MS
    for now_ns, is_there in ((limit_ns, True), (limit_ns + 1, False)):
        world.liveness.own_learner(status(now_ns), now_ns=now_ns)
        world.hear("b", slow, now_ns=now_ns)
        world.hear("c", status(now_ns), now_ns=now_ns)
        result = reach(world, now_ns=now_ns)
        assert ("b" in result.learners) == is_there
    assert result.learners == ("a", "c")


def test_region_that_fetches_is_left_out_some_time_after_the_commit() -> None:
    world = Neighbourhood()
    history = history_of(GENESIS, committed_round(0, 1, [contribution("a")]), now_ns=SECOND)
    eligibility = eligibility_of(world.liveness, history)
    report = status(20, f0=position(base=1, step=10))

    def ineligible(now_ns: int) -> tuple[tuple[str, str], ...]:
        world.liveness.own_learner(report, now_ns=now_ns)
        world.hear("b", report, now_ns=now_ns, applied_index=1)
        world.hear("c", report, now_ns=now_ns, applied_index=2)
        reachability = eligibility.reachability(now_ns=now_ns)
        return eligibility.members(0, reachability, now_ns=now_ns)[1]

    assert ineligible(SECOND + BEHIND_NS) == ()
    assert ineligible(SECOND + BEHIND_NS + 1) == (("b", "its region is 1 ledger entries behind"),)


def rounds_applied_late(lag_ns: int, rounds: int) -> tuple[Eligibility, Neighbourhood, RoundHistory, int]:
    """Region b applied so many versions of fragment 0, and told so `lag_ns` after each commit; c did at once."""
    world, history, ledger = Neighbourhood(), RoundHistory(2), Ledger()
    eligibility = eligibility_of(world.liveness, history)
    now_ns = 60 * SECOND
    history.apply(ledger.add(GENESIS), now_ns=now_ns)
    for version in range(1, rounds + 1):
        world.hear("b", status(), now_ns=now_ns, applied_index=version)
        eligibility.on_report("b", now_ns=now_ns)
        now_ns += 60 * SECOND
        body = committed_round(0, version, [contribution("a", steps=(10 * version - 10, 10 * version))])
        history.apply(ledger.add(body), now_ns=now_ns)
        world.hear("b", status(), now_ns=now_ns + lag_ns, applied_index=version + 1)
        eligibility.on_report("b", now_ns=now_ns + lag_ns)
    return eligibility, world, history, now_ns + lag_ns


def test_a_region_that_always_applies_late_is_not_taken_for_one_that_fetches() -> None:
    late = 3 * SECOND
    eligibility, world, history, now_ns = rounds_applied_late(late, 5)
    assert eligibility.behind_ns("b") == 2 * late
    assert eligibility.behind_ns("c") == BEHIND_NS
    history.committed_at_ns[0] = now_ns
    history.version_entries[0] += 1
    for step, (after_ns, is_left_out) in enumerate(((late + SECOND, False), (2 * late, False), (2 * late + 1, True))):
        world.hear("b", status(99 + step, f0=position(base=5)), now_ns=now_ns + after_ns, applied_index=6)
        world.hear("c", status(99 + step, f0=position(base=5)), now_ns=now_ns + after_ns, applied_index=7)
        result = eligibility.reachability(now_ns=now_ns + after_ns)
        ineligible = dict(eligibility.members(0, result, now_ns=now_ns + after_ns)[1])
        assert ("b" in ineligible) == is_left_out, after_ns


def test_how_long_a_region_may_take_is_bounded_and_no_less_than_the_usual() -> None:
    assert rounds_applied_late(600 * SECOND, 8)[0].behind_ns("b") == BEHIND_NS_MAX
    assert rounds_applied_late(1, 8)[0].behind_ns("b") == BEHIND_NS
    assert rounds_applied_late(SECOND, 0)[0].behind_ns("b") == BEHIND_NS, "nothing is known yet"


def test_where_heartbeats_are_rare_nobody_is_behind_before_the_next_one() -> None:
    rare = Liveness(region="a", regions=("a", "b"), heartbeat_ns=2 * SECOND, effects=EffectBuffer("a"))
    eligibility = eligibility_of(rare, history_of(GENESIS), ("a", "b"))
    assert eligibility.behind_ns("b") == rare.silent_ns == SILENT_HEARTBEATS * 2 * SECOND


def test_rejected_learner_is_excluded_with_its_reason() -> None:
    world = Neighbourhood()
    world.all_hear(status(), now_ns=MS)
    eligibility = eligibility_of(world.liveness, history_of(GENESIS))
    members, ineligible = eligibility.members(
        0, eligibility.reachability(now_ns=MS), now_ns=MS, rejections={"b": "lied"}
    )
    assert members == ("a", "c")
    assert ineligible == (("b", "lied"),)


def test_newest_incarnation_is_remembered_whatever_comes_later() -> None:
    world = Neighbourhood()
    eligibility = eligibility_of(world.liveness, history_of(GENESIS), ("a", "b"))
    eligibility.observe_incarnation("b", 3)
    eligibility.observe_incarnation("b", 2)
    assert eligibility.incarnation_min("b") == 3
    assert eligibility.incarnation_min("a") == 0


def test_a_region_that_lacks_older_commits_does_not_reduce_until_it_has_them() -> None:
    """Also where each fragment was committed again just now."""
    world, ledger, history = Neighbourhood(), Ledger(), RoundHistory(2)
    asked = eligibility_of(world.liveness, history)
    now_ns = SECOND
    for version in range(6):
        body = GENESIS if version == 0 else committed_round(0, version, [contribution("a", base=version - 1)])
        history.apply(ledger.add(body), now_ns=now_ns)
        asked.on_commit(version + 1, now_ns=now_ns)
        now_ns += BEHIND_NS // 4
    for applied, is_behind in ((0, True), (1, True), (2, False), (6, False)):
        world.liveness.own_learner(status(), now_ns=now_ns)
        for name in ("b", "c"):
            world.hear(name, status(), now_ns=now_ns, applied_index=applied if name == "b" else 1_000)
        assert asked.is_behind("b", now_ns=now_ns) is is_behind
        assert ("b" in asked.reachability(now_ns=now_ns).reducers) is not is_behind
    assert not asked.is_behind("a", now_ns=now_ns)


def test_whom_no_ballot_has_is_waited_for_in_no_pause_unless_nobody_else_has_steps() -> None:
    world = Neighbourhood()
    book = SuspicionBook(ballot_ns=2 * SECOND)
    book.begin((), world.regions, predecessor="b", now_ns=0)
    history = history_of(GENESIS)
    eligibility = eligibility_of(world.liveness, history, book=book)
    assert "b" in book.suspensions(BallotRole.MEMBER, now_ns=SECOND)
    world.all_hear(status(20), now_ns=0)
    world.all_hear(status(20), now_ns=4 * SECOND)  # and no step since
    pausing = partial(eligibility.pausing, 0, now_ns=4 * SECOND, max_ns=60 * SECOND)
    assert pausing() == ("a", "c")
    finished = replace(status(20), finished=True)
    world.liveness.own_learner(finished, now_ns=4 * SECOND)
    world.hear("c", finished, now_ns=4 * SECOND)
    assert pausing() == ("b",)
