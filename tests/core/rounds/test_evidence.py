"""Who failed a ballot: found from what the regions report, never from the word of one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.messages import BallotOpened, MergeDecided, ReductionReported, StripesReceived
from diloco_node.core.rounds.evidence import (
    blame_norms,
    differing_norms,
    dispute_reducers,
    find_culprits,
    judge_absences,
)
from diloco_node.core.rounds.open_round import Deadline, OpenRound, QuestionedBallot
from diloco_node.core.rounds.suspicion import BallotPart
from diloco_node.core.types import Ballot, Stripe
from tests.kit.rounds_kit import contribution

NAMES = "abcd"
CUT = tuple(Stripe(name, at, at + 1) for at, name in enumerate(NAMES))
MEMBER, REDUCER = BallotPart.MEMBER, BallotPart.REDUCER


def ballot(stripes: tuple[Stripe, ...] = CUT, members: Iterable[str] = NAMES) -> OpenRound:
    """A ballot in which everybody has contributed, and it is decided."""
    opened = BallotOpened(Ballot(1, 1), 0, 1, tuple(members), stripes)
    one = OpenRound(opened_at_ns=0, is_last=False, announcement=opened, ballot_at_ns=0, deadline=Deadline(10, ""))
    one.contributions = {name: contribution(name) for name in members}
    one.decision = MergeDecided(opened.ballot, 0, 1, tuple(one.contributions.values()), ())
    return one


def deliver(one: OpenRound, *, but: Iterable[tuple[str, str]] = ()) -> None:
    """Every contribution reaches every reducer, but for these pairs of member and reducer."""
    for member in one.members:
        for reducer in one.reducers:
            if (member, reducer) not in but:
                one.on_receipt(reducer, StripesReceived(one.ballot, member, 1, 1))


def merge(one: OpenRound, names: Iterable[str] = NAMES) -> None:
    """These reducers report."""
    assert one.decision is not None
    rows = ((1.0, 2.0),) * len(one.decision.contributions)
    for index, stripe in enumerate(one.stripes):
        if stripe.reducer in names:
            one.reports[index] = ReductionReported(one.ballot, index, (1.0, 1.0), rows, bytes([index]) * 32)


def told(one: OpenRound, **lacks: str) -> None:
    """Every region says which merged stripes it has: all but those of the reducers that are named for it."""
    for name in NAMES:
        one.merged_digests[name] = tuple(
            b"" if stripe.reducer in lacks.get(name, "") else bytes([index]) * 32
            for index, stripe in enumerate(one.stripes)
        )


def blamed(one: OpenRound) -> set[tuple[str, BallotPart]]:
    return {(blame.region, blame.part) for blame in judge_absences(one).blames}


def test_who_does_not_contribute_is_named() -> None:
    one = ballot()
    deliver(one, but=[("c", name) for name in "abd"])
    one.decision = None
    del one.contributions["c"]
    assert blamed(one) == {("c", MEMBER)}


def test_a_reducer_that_receives_nothing_is_named_before_everybody_has_contributed() -> None:
    one = ballot()
    deliver(one, but=[(name, "d") for name in "abc"] + [("c", name) for name in "abd"])
    one.decision = None
    del one.contributions["c"]
    assert blamed(one) == {("c", MEMBER), ("d", REDUCER)}


def test_whose_stripes_reach_nobody_is_named() -> None:
    one = ballot()
    deliver(one, but=[("c", name) for name in "abd"])
    assert blamed(one) == {("c", MEMBER), ("c", REDUCER)}, "its merged stripe would reach nobody either"


def test_who_receives_from_nobody_is_named_as_reducer() -> None:
    one = ballot()
    deliver(one, but=[(name, "c") for name in "abd"])
    merge(one, "abd")
    assert blamed(one) == {("c", REDUCER)}


@pytest.mark.parametrize("reducers", ["ac", "abc", "bc"])
def test_a_reducer_that_receives_nothing_makes_no_member_look_bad(reducers: str) -> None:
    """With few reducers, to be missing at one of them is to be missing at all others."""
    one = ballot(tuple(Stripe(name, at, at + 1) for at, name in enumerate(reducers)))
    deliver(one, but=[(name, "c") for name in "abd"])
    merge(one, set(reducers) - {"c"})
    assert blamed(one) == {("c", REDUCER)}


def test_one_bad_link_costs_the_reducer_its_stripe() -> None:
    one = ballot()
    deliver(one, but=[("b", "c")])
    merge(one, "abd")
    assert blamed(one) == {("c", REDUCER)}


def test_who_has_all_and_merges_nothing_is_named() -> None:
    one = ballot()
    deliver(one)
    merge(one, "abd")
    assert blamed(one) == {("c", REDUCER)}


def test_whose_merged_stripe_reaches_nobody_is_named() -> None:
    one = ballot()
    deliver(one)
    merge(one)
    told(one, a="c", b="c", d="c")
    assert blamed(one) == {("c", REDUCER)}


def test_who_gets_no_merged_stripes_blames_nobody_else() -> None:
    one = ballot()
    deliver(one)
    merge(one)
    told(one, a="bcd")
    found = judge_absences(one)
    assert (found.blames, found.cut_off) == ((), {"a"})


def test_payload_that_everybody_has_and_nobody_stores_is_no_reducers_fault() -> None:
    one = ballot()
    merge(one)
    told(one)
    assert judge_absences(one).blames == ()


def test_a_reducer_that_tells_another_digest_than_it_sends_is_proved_wrong() -> None:
    one = ballot()
    merge(one)
    told(one)
    one.reports[2] = replace(one.reports[2], digest=b"x" * 32)
    (blame,) = dispute_reducers(one, 4)
    assert (blame.region, blame.part, blame.is_proved) == ("c", REDUCER, True)
    assert blame in judge_absences(one).blames


@pytest.mark.parametrize("liar", NAMES)
def test_no_single_region_proves_another_wrong(liar: str) -> None:
    one = ballot()
    merge(one)
    told(one)
    one.merged_digests[liar] = (b"x" * 32,) * 4
    assert dispute_reducers(one, 4) == ()
    assert dispute_reducers(one, 2) == (), "of two nobody knows"
    found = judge_absences(one)
    assert (found.blames, found.cut_off) == ((), {liar})


@given(st.sets(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(lambda pair: pair[0] != pair[1])))
def test_culprits_explain_every_pair_or_leave_it(pairs: set[tuple[str, str]]) -> None:
    found = find_culprits(pairs, NAMES, NAMES)
    explained = {pair for pair in pairs if pair[0] in found.givers or pair[1] in found.takers}
    assert explained | found.rest == pairs
    assert explained.isdisjoint(found.rest)
    for name, seen_by in [*found.givers.items(), *found.takers.items()]:
        assert 2 * len(seen_by) > len(NAMES) - 1, f"more than half of the others say so of {name}"


@given(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES)), st.booleans())
def test_one_faulty_region_never_makes_another_one_look_faulty_on_its_own_side(
    faulty: str, others: set[str], gives: bool
) -> None:
    pairs = {(faulty, name) if gives else (name, faulty) for name in others - {faulty}}
    found = find_culprits(pairs, NAMES, NAMES)
    assert set(found.givers) | set(found.takers) <= {faulty}


def question(one: OpenRound, reports: dict[str, dict[str, float]]) -> set[tuple[str, str]]:
    """Ask for the norms of a ballot again. `reports`: reducer to member to what it said; else the truth."""
    assert one.decision is not None
    named = one.decision.contributions
    told_by = tuple(
        replace(
            one.reports[index],
            contribution_norms=tuple((1.0, reports.get(stripe.reducer, {}).get(made.learner, 2.0)) for made in named),
        )
        for index, stripe in enumerate(one.stripes)
    )
    before = QuestionedBallot(one.stripes, told_by, named)
    trial = ballot(tuple(replace(stripe, reducer="a") for stripe in one.stripes))
    merge(trial)
    return differing_norms(before, trial)


def merged_ballot() -> OpenRound:
    one = ballot()
    merge(one)
    return one


def test_a_reducer_that_lies_about_the_others_is_to_blame() -> None:
    pairs = question(merged_ballot(), {"c": {"a": 9.0, "b": 9.0, "d": 9.0}})
    assert pairs == {("a", "c"), ("b", "c"), ("d", "c")}
    (blame,) = blame_norms(pairs, {})
    assert (blame.region, blame.part, blame.is_proved) == ("c", REDUCER, True)


def test_rounding_is_no_lie() -> None:
    assert question(merged_ballot(), {"c": {"b": 2.0005}}) == set()


def test_a_member_that_sends_other_bytes_to_several_reducers_is_to_blame() -> None:
    pairs = question(merged_ballot(), {"c": {"b": 9.0}, "d": {"b": 9.0}})
    (blame,) = blame_norms(pairs, {})
    assert (blame.region, blame.part) == ("b", MEMBER)


def test_of_a_single_pair_the_reducer_pays_first_and_the_member_at_the_next_reducer() -> None:
    pairs = question(merged_ballot(), {"c": {"b": 9.0}})
    assert [(one.region, one.part) for one in blame_norms(pairs, {})] == [("c", REDUCER)]
    assert [(one.region, one.part) for one in blame_norms(pairs, {"b": {"c"}})] == [("c", REDUCER)], "the same again"
    assert [(one.region, one.part) for one in blame_norms(pairs, {"b": {"d"}})] == [("b", MEMBER)]
