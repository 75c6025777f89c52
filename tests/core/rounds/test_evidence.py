"""Culprits of a failed ballot: found from what the regions report, never from the word of one of them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.messages import BallotOpened, MergeDecided, Receipt, ReductionReported
from diloco_node.core.rounds.evidence import (
    blame_norms,
    blame_sums,
    differing_norms,
    dispute_reducers,
    find_culprits,
    judge_absences,
)
from diloco_node.core.rounds.open_round import Deadline, OpenRound, QuestionedBallot
from diloco_node.core.rounds.suspicion import BallotRole
from diloco_node.core.types import Ballot, RunSettings, Stripe
from tests.kit.rounds_kit import contribution

NAMES = "abcd"
CUT = tuple(Stripe(name, at, at + 1) for at, name in enumerate(NAMES))
MEMBER, REDUCER = BallotRole.MEMBER, BallotRole.REDUCER


def ballot(stripes: tuple[Stripe, ...] = CUT, members: Iterable[str] = NAMES) -> OpenRound:
    """A ballot in which everybody has contributed, and it is decided."""
    announcement = BallotOpened(Ballot(1, 1), 0, 1, tuple(members), stripes)
    round_ = OpenRound(
        opened_at_ns=0, is_last=False, announcement=announcement, ballot_at_ns=0, deadline=Deadline(10, "")
    )
    round_.contributions = {name: contribution(name) for name in members}
    round_.decision = MergeDecided(announcement.ballot, 0, 1, tuple(round_.contributions.values()), ())
    return round_


def deliver(round_: OpenRound, *, but: Iterable[tuple[str, str]] = ()) -> None:
    """Every contribution reaches every reducer, but for these pairs of member and reducer."""
    for member in round_.members:
        for reducer in round_.reducers:
            if (member, reducer) not in but:
                round_.on_receipts(reducer, [Receipt(member, 1, 1)])


def merge(round_: OpenRound, names: Iterable[str] = NAMES) -> None:
    """These reducers report."""
    assert round_.decision is not None
    rows = ((1.0, 2.0),) * len(round_.decision.contributions)
    for index, stripe in enumerate(round_.stripes):
        if stripe.reducer in names:
            round_.reports[index] = ReductionReported(round_.ballot, index, (1.0, 1.0), rows, bytes([index]) * 32)


def told(round_: OpenRound, **lacks: str) -> None:
    """Every region says which merged stripes it has: all but those of the reducers that are named for it."""
    for name in NAMES:
        round_.merged_digests[name] = tuple(
            b"" if stripe.reducer in lacks.get(name, "") else bytes([index]) * 32
            for index, stripe in enumerate(round_.stripes)
        )


def blamed(round_: OpenRound) -> set[tuple[str, BallotRole]]:
    return {(blame.region, blame.role) for blame in judge_absences(round_, 4).blames}


def test_who_does_not_contribute_is_named() -> None:
    round_ = ballot()
    deliver(round_, but=[("c", name) for name in "abd"])
    round_.decision = None
    del round_.contributions["c"]
    assert blamed(round_) == {("c", MEMBER)}


def test_a_reducer_that_receives_nothing_is_named_before_everybody_has_contributed() -> None:
    round_ = ballot()
    deliver(round_, but=[(name, "d") for name in "abc"] + [("c", name) for name in "abd"])
    round_.decision = None
    del round_.contributions["c"]
    assert blamed(round_) == {("c", MEMBER), ("d", REDUCER)}


def test_whose_stripes_reach_nobody_is_named() -> None:
    round_ = ballot()
    deliver(round_, but=[("c", name) for name in "abd"])
    assert blamed(round_) == {("c", MEMBER), ("c", REDUCER)}, "its merged stripe would reach nobody either"


def test_who_receives_from_nobody_is_named_as_reducer() -> None:
    round_ = ballot()
    deliver(round_, but=[(name, "c") for name in "abd"])
    merge(round_, "abd")
    assert blamed(round_) == {("c", REDUCER)}


@pytest.mark.parametrize("reducers", ["ac", "abc", "bc"])
def test_a_reducer_that_receives_nothing_makes_no_member_look_bad(reducers: str) -> None:
    """With few reducers, to be missing at one of them is to be missing at all others."""
    round_ = ballot(tuple(Stripe(name, at, at + 1) for at, name in enumerate(reducers)))
    deliver(round_, but=[(name, "c") for name in "abd"])
    merge(round_, set(reducers) - {"c"})
    assert blamed(round_) == {("c", REDUCER)}


def test_one_bad_link_costs_the_reducer_its_stripe() -> None:
    round_ = ballot()
    deliver(round_, but=[("b", "c")])
    merge(round_, "abd")
    assert blamed(round_) == {("c", REDUCER)}


def test_who_has_all_and_merges_nothing_is_named() -> None:
    round_ = ballot()
    deliver(round_)
    merge(round_, "abd")
    assert blamed(round_) == {("c", REDUCER)}


def test_whose_merged_stripe_reaches_nobody_is_named() -> None:
    round_ = ballot()
    deliver(round_)
    merge(round_)
    told(round_, a="c", b="c", d="c")
    assert blamed(round_) == {("c", REDUCER)}


def test_who_gets_no_merged_stripes_blames_nobody_else() -> None:
    round_ = ballot()
    deliver(round_)
    merge(round_)
    told(round_, a="bcd")
    result = judge_absences(round_, 4)
    assert (result.blames, result.cut_off) == ((), {"a"})


def test_payload_that_everybody_has_and_nobody_stores_is_no_reducers_fault() -> None:
    round_ = ballot()
    merge(round_)
    told(round_)
    assert judge_absences(round_, 4).blames == ()


def test_a_reducer_that_tells_another_digest_than_it_sends_is_proved_wrong() -> None:
    round_ = ballot()
    merge(round_)
    told(round_)
    round_.reports[2] = replace(round_.reports[2], digest=b"x" * 32)
    (blame,) = dispute_reducers(round_, 4)
    assert (blame.region, blame.role, blame.is_proved) == ("c", REDUCER, True)
    assert blame in judge_absences(round_, 4).blames


@pytest.mark.parametrize("liar", NAMES)
def test_no_single_region_proves_another_wrong(liar: str) -> None:
    round_ = ballot()
    merge(round_)
    told(round_)
    round_.merged_digests[liar] = (b"x" * 32,) * 4
    assert dispute_reducers(round_, 4) == ()
    assert dispute_reducers(round_, 2) == (), "of two nobody knows"
    result = judge_absences(round_, 4)
    assert (result.blames, result.cut_off) == ((), {liar})


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_half_of_the_witnesses_prove_nothing(names: str) -> None:
    cut = tuple(Stripe(name, at, at + 1) for at, name in enumerate(names))
    round_ = ballot(cut, names)
    merge(round_, names)
    told(round_)
    half = len(names) // 2
    for name in names[1:]:
        round_.merged_digests[name] = tuple(bytes([index]) * 32 for index in range(len(names)))
    for name in names[1 : 1 + half]:
        round_.merged_digests[name] = (b"x" * 32, *round_.merged_digests[name][1:])
    assert dispute_reducers(round_, len(names)) == ()
    one_more = names[1 + half]
    round_.merged_digests[one_more] = (b"x" * 32, *round_.merged_digests[one_more][1:])
    assert [blame.region for blame in dispute_reducers(round_, len(names))] == ["a"]


def test_the_only_region_that_says_anything_proves_nothing() -> None:
    round_ = ballot()
    merge(round_)
    round_.merged_digests["d"] = (b"x" * 32, *(bytes([index]) * 32 for index in range(1, 4)))
    (blame,) = judge_absences(round_, 4).blames
    assert (blame.region, blame.is_proved) == ("a", False)


@pytest.mark.parametrize("names", ["abc", "abcde"])
@pytest.mark.parametrize("gives", [True, False])
def test_a_region_in_half_of_its_pairs_explains_none(names: str, gives: bool) -> None:
    half = names[1 : 1 + len(names) // 2]
    pairs = {("a", name) if gives else (name, "a") for name in half}
    result = find_culprits(pairs, names, names)
    assert (result.senders, result.receivers, result.unexplained) == ({}, {}, pairs)


def pairs_of(names: str) -> st.SearchStrategy[tuple[str, set[tuple[str, str]]]]:
    region = st.sampled_from(names)
    return st.tuples(st.just(names), st.sets(st.tuples(region, region).filter(lambda pair: pair[0] != pair[1])))


@given(st.sampled_from(["abc", NAMES, "abcde"]).flatmap(pairs_of))
def test_culprits_explain_every_pair_or_leave_it(case: tuple[str, set[tuple[str, str]]]) -> None:
    names, pairs = case
    result = find_culprits(pairs, names, names)
    explained = {pair for pair in pairs if pair[0] in result.senders or pair[1] in result.receivers}
    assert explained | result.unexplained == pairs
    assert explained.isdisjoint(result.unexplained)
    for name, seen_by in [*result.senders.items(), *result.receivers.items()]:
        assert 2 * len(seen_by) > len(names) - 1, f"more than half of the others say so of {name}"


@given(st.sampled_from(NAMES), st.sets(st.sampled_from(NAMES)), st.booleans())
def test_one_faulty_region_never_makes_another_one_look_faulty_on_its_own_side(
    faulty: str, others: set[str], gives: bool
) -> None:
    pairs = {(faulty, name) if gives else (name, faulty) for name in others - {faulty}}
    result = find_culprits(pairs, NAMES, NAMES)
    assert set(result.senders) | set(result.receivers) <= {faulty}


def question(round_: OpenRound, reports: dict[str, dict[str, float]]) -> set[tuple[str, str]]:
    """Ask for the norms of a ballot again. `reports`: reducer to member to what it said; else the truth."""
    assert round_.decision is not None
    named = round_.decision.contributions
    told_by = tuple(
        replace(
            round_.reports[index],
            contribution_norms=tuple((1.0, reports.get(stripe.reducer, {}).get(made.learner, 2.0)) for made in named),
        )
        for index, stripe in enumerate(round_.stripes)
    )
    before = QuestionedBallot(round_.stripes, told_by, named)
    trial = ballot(tuple(replace(stripe, reducer="a") for stripe in round_.stripes))
    merge(trial)
    return differing_norms(before, trial)


def merged_ballot() -> OpenRound:
    round_ = ballot()
    merge(round_)
    return round_


def test_a_reducer_that_lies_about_the_others_is_to_blame() -> None:
    pairs = question(merged_ballot(), {"c": {"a": 9.0, "b": 9.0, "d": 9.0}})
    assert pairs == {("a", "c"), ("b", "c"), ("d", "c")}
    (blame,) = blame_norms(pairs, {})
    assert (blame.region, blame.role, blame.is_proved) == ("c", REDUCER, True)


def test_rounding_is_no_lie() -> None:
    assert question(merged_ballot(), {"c": {"b": 2.0005}}) == set()


def test_a_member_that_sends_other_bytes_to_several_reducers_is_to_blame() -> None:
    pairs = question(merged_ballot(), {"c": {"b": 9.0}, "d": {"b": 9.0}})
    (blame,) = blame_norms(pairs, {})
    assert (blame.region, blame.role) == ("b", MEMBER)


def test_of_a_single_pair_the_reducer_pays_first_and_the_member_at_the_next_reducer() -> None:
    pairs = question(merged_ballot(), {"c": {"b": 9.0}})
    assert [(line.region, line.role) for line in blame_norms(pairs, {})] == [("c", REDUCER)]
    assert [(line.region, line.role) for line in blame_norms(pairs, {"b": {"c"}})] == [("c", REDUCER)], "the same again"
    assert [(line.region, line.role) for line in blame_norms(pairs, {"b": {"d"}})] == [("b", MEMBER)]


@pytest.mark.parametrize(
    ("square", "named", "says"),
    [
        (1.0, 1.0, ""),
        (1.1, 1.1, ""),
        (1.2, 1.2, "squared norm 1.2 in piece 0, its members can't exceed 1.13"),
        (1e6, 1e6, "its members can't exceed 1.13"),
        (1e6, 1.0, "squared norm 1e+06 in piece 0, it reports 1"),
        (1.0, 0.5, "it reports 0.5"),
        (0.0, 0.0, ""),
    ],
)
def test_a_sum_that_is_longer_than_its_members_or_not_as_reported_is_to_blame(
    square: float, named: float, says: str
) -> None:
    """Four members of norm 1 in each stripe, each with a quarter."""
    round_ = ballot()
    assert round_.decision is not None
    round_.decision = replace(round_.decision, coefficients=((0.25, 0.25),) * 4)
    merge(round_)
    round_.reports[2] = replace(round_.reports[2], squared_norms=(named, 1.0))
    merged = {index: (report.digest, report.squared_norms) for index, report in round_.reports.items()}
    merged[2] = (merged[2][0], (square, 1.0))
    blames = blame_sums(round_, merged, RunSettings())
    if says:
        ((name, part, reason, is_proved),) = [
            (blame.region, blame.role, blame.reason, blame.is_proved) for blame in blames
        ]
        assert (name, part, is_proved) == ("c", REDUCER, True)
        assert says in reason
    else:
        assert blames == ()
    assert blame_sums(round_, merged, RunSettings()) == (), "each stripe is looked at once"


def test_another_stripe_than_the_reducer_told_says_nothing_about_its_sum() -> None:
    round_ = ballot()
    assert round_.decision is not None
    round_.decision = replace(round_.decision, coefficients=((0.25, 0.25),) * 4)
    merge(round_)
    assert blame_sums(round_, {2: (b"x" * 32, (1e6, 1e6))}, RunSettings()) == ()
    assert not round_.checked, "the right one is looked at when it comes"
