"""The open round and what follows a failed ballot."""

from __future__ import annotations

from dataclasses import replace

from diloco_node.core.messages import BallotOpened, HeldStripe, MergeDecided, StripeMerged
from diloco_node.core.rounds.ballot import Deadline
from diloco_node.core.rounds.next_ballot import plan_next, reducers_to_shun
from diloco_node.core.rounds.open_round import OpenRound, payload_digest
from diloco_node.core.types import Ballot, Stripe
from tests.rounds_kit import SECOND, contribution, pieces

STRIPES = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 5))
ALL = ("a", "b", "c")
OFFERED = {name: contribution(name) for name in ALL}


def a_round(**held: set[int]) -> OpenRound:
    one = OpenRound(
        opened_at_ns=0,
        is_last=False,
        announcement=BallotOpened(Ballot(1, 1), 0, 1, ALL, STRIPES),
        ballot_at_ns=0,
        deadline=Deadline(SECOND, ""),
    )
    one.contributions = dict(OFFERED)
    one.held = dict(held)
    return one


def decided(one: OpenRound, *names: str) -> None:
    chosen = tuple(OFFERED[name] for name in names)
    one.decision = MergeDecided(one.ballot, 0, 1, chosen, tuple((1.0,) * pieces(0) for _ in names))


def report(stripe: int, norm: float, *parts: float) -> StripeMerged:
    width = pieces(0)
    return StripeMerged(
        Ballot(1, 1), stripe, (norm,) * width, tuple((part,) * width for part in parts), bytes([stripe]) * 32
    )


def test_after_the_deadline_those_go_on_that_all_reducers_hold() -> None:
    one = a_round(a={0, 1, 2}, b={0, 1}, c={0, 1, 2})
    plan = plan_next(one, STRIPES, usable=OFFERED, able=ALL, reachable=ALL, is_late=True)
    assert plan.members == ("a", "c")
    assert plan.contributions == {"a": OFFERED["a"], "c": OFFERED["c"]}
    assert plan.held == tuple(HeldStripe(name, stripe) for name in ("a", "c") for stripe in range(3))


def test_after_the_deadline_a_whole_contribution_of_a_lost_member_stays_if_nothing_moves() -> None:
    one = a_round(a={0, 1, 2}, b={0, 1, 2})
    plan = plan_next(one, STRIPES, usable=OFFERED, able=("a",), reachable=("a",), is_late=True)
    assert plan.members == ("a", "b")
    moved = (Stripe("a", 0, 2), Stripe("c", 2, 5))
    plan = plan_next(one, moved, usable=OFFERED, able=("a",), reachable=("a",), is_late=True)
    assert plan.members == ("a",)


def test_if_nobody_is_held_everybody_able_is_asked_again() -> None:
    one = a_round(a={0}, b={1})
    plan = plan_next(one, STRIPES, usable=OFFERED, able=("a", "c"), reachable=ALL, is_late=True)
    assert plan.members == ("a", "c")
    assert plan.held == (HeldStripe("a", 0),)
    assert plan.contributions == {"a": OFFERED["a"], "c": OFFERED["c"]}


def test_after_a_loss_all_that_are_left_stay() -> None:
    one = a_round(a={0, 1, 2})
    one.declined["c"] = "no steps"
    stripes = (Stripe("a", 0, 3), Stripe("c", 3, 5))
    usable = {"a": OFFERED["a"]}
    plan = plan_next(one, stripes, usable=usable, able=("a", "c"), reachable=("a", "c"), is_late=False)
    assert plan.members == ("a",), "c has declined, b is gone"
    assert plan.held == (), "every stripe moved"


def test_held_stripes_are_named_by_their_new_place() -> None:
    one = a_round(a={0, 2})
    stripes = (Stripe("b", 0, 4), STRIPES[2])
    plan = plan_next(one, stripes, usable=OFFERED, able=ALL, reachable=ALL, is_late=False)
    assert plan.held == (HeldStripe("a", 1),)


def test_contribution_that_may_not_be_merged_is_not_said_to_be_held() -> None:
    one = a_round(a={0, 1, 2}, b={0, 1, 2})
    usable = {"b": OFFERED["b"], "c": OFFERED["c"]}
    plan = plan_next(one, STRIPES, usable=usable, able=ALL, reachable=ALL, is_late=True)
    assert plan.members == ("b",)
    assert plan.held == tuple(HeldStripe("b", stripe) for stripe in range(3))


def test_reducer_that_lacks_what_others_hold_is_shunned() -> None:
    assert reducers_to_shun(a_round(a={0, 1}, b={0, 1}, c={0, 1})) == {"c"}
    assert reducers_to_shun(a_round(a={0, 1, 2}, b={0, 1, 2}, c=set())) == set(), "then it is the member"
    assert reducers_to_shun(a_round()) == set()


def test_reducer_that_did_not_merge_is_shunned() -> None:
    one = a_round(a={0, 1, 2}, b={0, 1, 2}, c={0, 1, 2})
    decided(one, *ALL)
    one.merged = {0: report(0, 1.0, 1.0, 1.0, 1.0)}
    assert reducers_to_shun(one) == {"b", "c"}


def test_next_ballot_forgets_answers_but_not_who_is_barred() -> None:
    one = a_round(a={0})
    decided(one, "a")
    one.weights, one.declined, one.merged = (1.0,), {"b": "x"}, {0: report(0, 1.0, 1.0)}
    one.holders, one.barred, one.shunned = {"a": b"1"}, {"c": "lied"}, {"b"}
    opened = BallotOpened(Ballot(1, 2), 0, 1, ("a",), STRIPES)
    one.begin_ballot(opened, deadline=Deadline(3, ""), contributions={"a": OFFERED["a"]}, now_ns=7)
    assert (one.ballot, one.attempt, one.deadline_ns, one.opened_at_ns) == (Ballot(1, 2), 1, 10, 0)
    assert (one.declined, one.held, one.merged, one.holders, one.decision, one.weights) == ({}, {}, {}, {}, None, ())
    assert (one.barred, one.shunned) == ({"c": "lied"}, {"b"})
    assert one.missing_members() == ()


def test_norms_are_summed_over_all_stripes_in_their_order() -> None:
    one = a_round()
    decided(one, "a", "b")
    one.merged = {2: report(2, 4.0, 1.0, 1.0), 0: report(0, 1.0, 1.0, 1.0), 1: report(1, 2.0, 2.0, 2.0)}
    assert one.is_merged
    assert one.merged_squared_norms() == (7.0,) * pieces(0)
    assert one.liars() == ()
    assert one.digest == payload_digest([bytes([index]) * 32 for index in range(3)])


def test_norms_that_do_not_add_up_name_the_liar() -> None:
    for error, liars in ((0.0039, ()), (0.0041, ("b",)), (-0.0041, ("b",))):
        one = a_round()
        decided(one, "a", "b")
        one.merged = {stripe: report(stripe, 1.0, 4.0 / 3, (4.0 + error) / 3) for stripe in range(3)}
        assert one.liars() == liars, error


def test_zero_outer_gradient_is_no_lie() -> None:
    one = a_round()
    one.contributions = {"a": replace(OFFERED["a"], squared_norms=(0.0,) * pieces(0))}
    one.decision = MergeDecided(one.ballot, 0, 1, (one.contributions["a"],), ((0.0,) * pieces(0),))
    one.merged = {stripe: report(stripe, 0.0, 0.0) for stripe in range(3)}
    assert one.liars() == ()


def test_report_with_impossible_numbers_is_refused() -> None:
    one = a_round()
    decided(one, "a", "b")
    good = report(1, 1.0, 2.0, 3.0)
    assert one.report_fault("b", good, pieces(0)) == ""
    assert "not reduced by a" in one.report_fault("a", good, pieces(0))
    assert one.report_fault("b", replace(good, stripe=3), pieces(0))
    assert "shape" in one.report_fault("b", replace(good, contribution_norms=good.contribution_norms[:1]), pieces(0))
    assert "shape" in one.report_fault("b", good, pieces(0) + 1)
    assert "finite" in one.report_fault("b", report(1, float("nan"), 1.0, 1.0), pieces(0))
    assert "negative" in one.report_fault("b", report(1, 1.0, -1.0, 1.0), pieces(0))


def test_waiting_reason_names_what_is_missing() -> None:
    one = a_round()
    del one.contributions["b"]
    assert one.waiting() == "waits for contributions of b"
    one.declined["b"] = "no steps"
    decided(one, "a", "c")
    one.held = {"a": {0, 1, 2}}
    assert one.waiting() == "waits for merged stripes of a, b, c, stripes of c are on their way"
    one.merged = {stripe: report(stripe, 1.0, 1.0, 1.0) for stripe in range(3)}
    assert one.waiting() == "waits for a majority to have the payload on disk, nobody has"
    one.is_proposed = True
    assert one.waiting() == "waits for its ledger entry to commit"
