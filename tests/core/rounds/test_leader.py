"""The leader of rounds: opens with everybody, decides once, tries again, books, ends. The other regions by hand."""

from dataclasses import replace

import pytest

from diloco_node.core.data_shards import region_shards
from diloco_node.core.messages import (
    BallotOpened,
    Contributed,
    Declined,
    PayloadDurable,
    Receipt,
    ReductionReported,
    ReusedStripe,
    StripesReceived,
)
from diloco_node.core.rounds.audit_draw import drawer_of, nonce_of
from diloco_node.core.types import (
    Ballot,
    DiscardedBody,
    RateLimits,
    RoundBody,
)
from tests.kit.leader_kit import DUE, Office, ballots, decisions, offered
from tests.kit.rounds_kit import (
    MS,
    REGIONS,
    SECOND,
    contribution,
    pieces,
    position,
    status,
)


def test_round_is_opened_with_everybody_when_all_are_due() -> None:
    office = Office()
    office.report(DUE)
    effects = office.go()
    assert [peer for peer, _ in effects] == ["a", "b", "c"]
    announcement = ballots(effects)[0]
    assert (announcement.ballot, announcement.fragment, announcement.version, announcement.members) == (
        Ballot(3, 1),
        0,
        1,
        REGIONS,
    )
    assert [stripe.reducer for stripe in announcement.stripes] == ["a", "b", "c"]
    assert announcement.reused == ()
    assert office.go() == [], "one round per fragment at a time"


def test_stripes_follow_the_budgets_that_regions_report() -> None:
    office = Office()
    rate = 1_000_000
    office.world.liveness.own_budget(RateLimits(rate, rate))
    office.report(DUE)
    office.world.hear("b", DUE, now_ns=office.now_ns, budget=RateLimits(rate, rate))
    office.world.hear("c", DUE, now_ns=office.now_ns, budget=RateLimits(rate // 100, None))
    announcement = ballots(office.go())[0]
    assert announcement.members == REGIONS
    assert [stripe.reducer for stripe in announcement.stripes] == ["a", "b"], "c has enough to do with its contribution"


def test_learner_that_is_not_due_is_a_member_too() -> None:
    office = Office()
    office.report(DUE, "ab")
    office.report(status(2), "c")
    assert office.go() == [], "the grace window is open"
    assert "grace" in office.leader.reason
    wake_at_ns = office.leader.wake_at_ns
    assert wake_at_ns is not None
    assert office.go(wake_at_ns - office.now_ns - 1) == []
    assert ballots(office.go(1))[0].members == REGIONS


def test_nothing_is_opened_without_quorum_and_it_says_why() -> None:
    office = Office()
    office.report(status(3), "bc")
    office.report(DUE, "a")
    assert office.go() == []
    assert office.leader.reason == "fragment 0: waits for quorum: 1 of 3 learners due (a), 2 needed"


def test_silence_of_a_region_is_asked_again_until_it_holds_the_payload() -> None:
    office = Office()
    announcement = office.open()
    office.answer("b", PayloadDurable(announcement.ballot, b"x"))
    office.leader.tick()
    assert [(peer, type(message)) for peer, message in office.go()] == [("a", BallotOpened), ("c", BallotOpened)]


def test_decision_is_made_when_all_have_contributed_or_declined() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "ca")
    assert office.go() == []
    office.answer("b", Declined(announcement.ballot, "no steps"))
    effects = office.go()
    assert [peer for peer, _ in effects] == ["a", "b", "c"], "every reducer is told"
    decision = decisions(effects)[0]
    assert [contribution.learner for contribution in decision.contributions] == ["a", "c"]
    assert len(decision.coefficients) == 2
    assert len(decision.coefficients[0]) == pieces(0)


def test_round_goes_into_the_ledger_when_a_majority_with_the_leader_holds_it() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    digest = office.merge(announcement)
    office.answer("b", PayloadDurable(announcement.ballot, digest))
    office.answer("c", PayloadDurable(announcement.ballot, digest))
    office.go()
    assert not office.leader.proposals, "the leader itself must hold it"
    office.answer("a", PayloadDurable(announcement.ballot, digest))
    office.go()
    (body,) = office.leader.proposals
    assert isinstance(body, RoundBody)
    assert (body.fragment, body.version, body.ballot, body.payload_digest) == (0, 1, announcement.ballot, digest)
    assert [member.contribution.learner for member in body.members] == ["a", "b", "c"]
    assert body.share == 1.0
    assert body.stripes == announcement.stripes
    office.go()
    assert len(office.leader.proposals) == 1, "once"


def test_a_drawer_gets_half_of_the_ballots_time_to_tell_its_nonce_of_this_very_payload() -> None:
    office = Office()
    office.is_drawn = False
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    digest = office.merge(announcement)
    for name in REGIONS:
        office.answer(name, PayloadDurable(announcement.ballot, digest))
    round_ = office.leader.rounds[0]
    drawer, drawn = office.draw(round_)
    office.answer(drawer, replace(drawn, digest=b"x" * 32))
    for _ in range(4):
        assert round_.nonces == ()
        assert not office.leader.proposals
        office.report(DUE)
        office.go(round_.deadline.duration_ns // 8)
        assert round_.nonces or round_.wait_reason() == f"waits for the nonce of {drawer}, to audit the payload"
    # By the leader's nonce alone this payload may be audited: then rows are waited for.
    assert round_.nonces == (nonce_of(b"a", round_.ballot),)


def test_a_drawer_that_reduces_nothing_and_is_lost_is_not_waited_for() -> None:
    office = Office()
    office.is_drawn = False
    announcement = office.open()
    office.contribute(announcement)
    office.hold(announcement)
    office.go()
    office.merge(announcement)
    round_ = office.leader.rounds[0]
    drawer = drawer_of(round_.announcement, "a")
    office.world.liveness.link_changed(drawer, is_up=False)
    office.leader._audit.draw(round_, now_ns=office.now_ns)
    assert round_.nonces == (nonce_of(b"a", round_.ballot),)


def test_half_of_an_even_number_is_no_majority() -> None:
    four = (*REGIONS, "d")
    office = Office(regions=four)
    office.report(DUE, four)
    announcement = ballots(office.go())[0]
    office.contribute(announcement, four)
    office.go()
    digest = office.merge(announcement, four, norm=4.0 / len(announcement.stripes))
    for name in "ab":
        office.answer(name, PayloadDurable(announcement.ballot, digest))
    office.go()
    assert not office.leader.proposals
    office.answer("c", PayloadDurable(announcement.ballot, digest))
    office.go()
    assert len(office.leader.proposals) == 1


def test_payload_with_another_digest_counts_for_nothing() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    digest = office.merge(announcement)
    office.answer("a", PayloadDurable(announcement.ballot, digest))
    office.answer("b", PayloadDurable(announcement.ballot, b"other" * 6))
    office.go()
    assert not office.leader.proposals


def test_payload_of_an_abandoned_ballot_counts_for_nothing() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.hold(announcement)
    office.go()
    digest = office.merge(announcement)
    office.answer("a", PayloadDurable(announcement.ballot, digest))
    for _ in range(4):
        office.report(DUE)
        effects = office.go(SECOND)
    again = office.leader.rounds[0]
    assert again.ballot > announcement.ballot, effects
    office.answer("b", PayloadDurable(announcement.ballot, digest))
    office.answer("c", PayloadDurable(announcement.ballot, digest))
    office.go()
    assert not office.leader.proposals


def commit_with(office: Office, names: str, version: int, start: dict[str, int], step: int) -> RoundBody:
    """Carry a round of fragment 0 with these members to its commit."""
    office.now_ns += SECOND
    office.report(status(step, f0=position(base=version - 1, mark=step - 9), f1=position(mark=step)))
    announcement = next(announcement for announcement in ballots(office.go()) if announcement.fragment == 0)
    for name in REGIONS:
        if name in names:
            office.answer(
                name, Contributed(announcement.ballot, contribution(name, base=version - 1, steps=(start[name], step)))
            )
        else:
            office.answer(name, Declined(announcement.ballot, "away"))
    office.go()
    digest = office.merge(announcement, names)
    for name in REGIONS:
        office.answer(name, PayloadDurable(announcement.ballot, digest))
    office.go()
    body = office.leader.proposals.popleft()
    assert isinstance(body, RoundBody)
    office.commit(body)
    for fragment in list(office.leader.rounds):
        del office.leader.rounds[fragment]
    return body


def test_share_and_weights_know_who_missed_versions() -> None:
    office = Office()
    first = commit_with(office, "abc", 1, dict.fromkeys(REGIONS, 0), 10)
    assert first.share == 1.0
    second = commit_with(office, "ab", 2, dict.fromkeys(REGIONS, 10), 20)
    assert second.share == 1.0, "both were in the round before"
    third = commit_with(office, "abc", 3, {"a": 20, "b": 20, "c": 10}, 30)
    weights = {member.contribution.learner: member.weight for member in third.members}
    assert weights["a"] == weights["b"] < weights["c"]
    assert third.share < 1.0, "c brings more than one cycle"


def test_a_learner_that_gave_its_steps_up_weighs_like_the_others() -> None:
    office = Office()
    commit_with(office, "abc", 1, dict.fromkeys(REGIONS, 0), 10)
    commit_with(office, "ab", 2, dict.fromkeys(REGIONS, 10), 20)
    office.commit(DiscardedBody("c", 1, 0, 10, 20, 640, "left behind"))
    third = commit_with(office, "abc", 3, dict.fromkeys(REGIONS, 20), 30)
    assert len({member.weight for member in third.members}) == 1
    assert third.share == 1.0, "it carried nothing over the version that it missed"


def test_what_is_missed_after_steps_were_given_up_counts_again() -> None:
    usual, office = Office(), Office()
    commit_with(usual, "abc", 1, dict.fromkeys(REGIONS, 0), 10)
    commit_with(usual, "ab", 2, dict.fromkeys(REGIONS, 10), 20)
    expected = commit_with(usual, "abc", 3, {"a": 20, "b": 20, "c": 10}, 30)
    commit_with(office, "abc", 1, dict.fromkeys(REGIONS, 0), 10)
    commit_with(office, "ab", 2, dict.fromkeys(REGIONS, 10), 20)
    office.commit(DiscardedBody("c", 1, 0, 10, 20, 640, "left behind"))
    commit_with(office, "ab", 3, dict.fromkeys(REGIONS, 20), 30)
    result = commit_with(office, "abc", 4, {"a": 30, "b": 30, "c": 20}, 40)
    assert [member.weight for member in result.members] == [member.weight for member in expected.members]
    assert result.share == expected.share < 1.0, "it has missed one version since"
    office.commit(DiscardedBody("c", 1, 0, 40, 50, 640, "left behind"))
    fifth = commit_with(office, "ab", 5, dict.fromkeys(REGIONS, 40), 50)
    assert fifth.share == 1.0
    other_incarnation = replace(contribution("c", steps=(50, 60), base=5), incarnation=2)
    assert office.history.account.carried_since(other_incarnation) is None, (
        "what an earlier incarnation gave up is nothing to it"
    )


def test_region_that_is_no_member_can_not_contribute() -> None:
    office = Office()
    office.report(DUE, "ab")
    office.world.hear("c", None, now_ns=office.now_ns)
    announcement = ballots(office.go())[0]
    assert announcement.members == ("a", "b")
    office.answer("c", Contributed(announcement.ballot, offered("c")))
    assert office.leader.rounds[0].contributions == {}


def test_first_contribution_of_an_incarnation_stays_and_a_newer_one_replaces_it() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "b")
    office.answer("b", Contributed(announcement.ballot, contribution("b", steps=(0, 3), snapshot=2)))
    assert office.leader.rounds[0].contributions["b"] == offered("b")
    newer = contribution("b", steps=(0, 1), incarnation=2)
    office.answer("b", Contributed(announcement.ballot, newer))
    assert office.leader.rounds[0].contributions["b"] == newer
    office.answer("b", Contributed(announcement.ballot, offered("b")))
    assert office.leader.rounds[0].contributions["b"] == newer


def test_member_that_is_lost_before_it_contributed_is_not_waited_for() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "ac")
    office.world.liveness.link_changed("b", is_up=False)
    effects = office.go()
    again = ballots(effects)[0]
    assert again.ballot == Ballot(3, 2), "it was a reducer as well"
    assert again.members == ("a", "c")
    assert [stripe.reducer for stripe in again.stripes] == ["a", "c"]
    assert [contribution.learner for contribution in decisions(effects)[0].contributions] == ["a", "c"], (
        "decided at once"
    )


def test_member_lost_before_its_stripes_arrived_starts_another_ballot() -> None:
    office = Office()
    office.world.hear("b", DUE, now_ns=office.now_ns, hears=("a",))
    office.report(DUE, "a")
    office.world.hear("c", DUE, now_ns=office.now_ns, hears=("a",))
    for name in "bc":
        office.leader.on_status(name, now_ns=office.now_ns)
    announcement = ballots(office.go())[0]
    assert [stripe.reducer for stripe in announcement.stripes] == ["a"], "b and c do not reach each other"
    office.contribute(announcement)
    office.go()
    office.answer("a", StripesReceived(announcement.ballot, (Receipt("b", 1, 1),)))
    office.world.liveness.link_changed("b", is_up=False)
    assert office.go() == [], "everything of b has arrived"
    office.world.liveness.link_changed("c", is_up=False)
    again = ballots(office.go())[0]
    assert again.members == ("a", "b")
    assert again.reused == (ReusedStripe("b", 0),)


def test_the_report_of_a_sum_says_that_its_contributions_have_arrived() -> None:
    """A reducer of a large ballot that is quick tells nothing else."""
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    width, rows = pieces(0), tuple((1.0,) * pieces(0) for _ in REGIONS)
    first = announcement.stripes[0].reducer
    office.answer(first, ReductionReported(announcement.ballot, 0, (1.0,) * width, rows, bytes(32)))
    round_ = office.leader.rounds[0]
    assert all(round_.is_received(name, [0]) for name in REGIONS)
    assert not any(round_.is_received(name) for name in REGIONS)


def test_passed_deadline_goes_on_with_what_has_arrived() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.hold(announcement, "ac")
    office.go()
    deadline_ns = office.leader.rounds[0].deadline_ns
    assert office.leader.wake_at_ns == deadline_ns
    office.now_ns = deadline_ns - 1
    office.report(DUE)
    assert office.go() == []
    office.report(DUE)
    effects = office.go(1)
    again = ballots(effects)[0]
    assert (again.ballot, again.members) == (Ballot(3, 2), ("a", "c"))
    assert {stripe.reducer for stripe in again.stripes} == {"a", "c"}, "what b merges would not arrive either"
    office.contribute(again, "ac")
    effects += office.go()
    assert [contribution.learner for contribution in decisions(effects)[0].contributions] == ["a", "c"]
    assert "deadline passed while it waits for merged stripes of a, b, c" in office.notes[-1].text


def test_nobody_left_abandons_the_round_and_it_is_opened_again_later() -> None:
    office = Office()
    announcement = office.open()
    for name in REGIONS:
        office.answer(name, Declined(announcement.ballot, "no steps"))
    office.go()
    assert "abandoned" in office.kinds()
    office.report(DUE)
    assert office.go() == [], "not in the same breath"
    office.leader.tick()
    assert ballots(office.go(SECOND // 2))[0].ballot == Ballot(3, 2)


def test_a_report_by_which_nobody_becomes_due_is_looked_at_with_the_next_heartbeat() -> None:
    """Of sixteen regions come eighty reports a second. With a look at every pair of regions for each the leader of many
    on a busy machine did nothing else."""
    office = Office()
    office.report(status(1))
    office.report(DUE, "ab")
    assert office.go() == []
    assert "grace" in office.leader.reason
    office.world.liveness.link_changed("c", is_up=False)
    office.report(DUE, "ab")
    assert office.go() == []
    office.leader.tick()
    assert ballots(office.go())[0].members == ("a", "b")


def test_ballot_numbers_are_never_used_twice() -> None:
    office = Office()
    records = [office.open().ballot]
    for _ in range(5):
        office.report(DUE)
        records += [announcement.ballot for announcement in ballots(office.go(SECOND))]
    assert len(set(records)) >= 2
    assert sorted(set(records)) == [Ballot(3, number) for number in range(1, len(set(records)) + 1)]


def test_new_leader_opens_again_what_was_open() -> None:
    office = Office()
    office.report(status(1, f0=position()))
    office.leader.end()
    assert office.go() == []
    office.leader.begin(4, {0: 1, 1: 7}, now_ns=office.now_ns)
    announcements = ballots(office.go())
    assert {(announcement.ballot, announcement.fragment, announcement.version) for announcement in announcements} == {
        (Ballot(4, 1), 0, 1)
    }


def test_answers_to_an_older_ballot_or_after_the_end_are_ignored() -> None:
    office = Office()
    announcement = office.open()
    office.answer("b", Contributed(Ballot(2, 1), offered("b")))
    assert office.leader.rounds[0].contributions == {}
    office.leader.end()
    office.answer("b", Contributed(announcement.ballot, offered("b")))
    assert office.leader.rounds == {}
    assert office.leader.wake_at_ns is None


DISCARD = DiscardedBody("b", 1, 0, 0, 4, 256, "died")


def test_discard_is_booked_and_then_the_dead_incarnation_is_refused() -> None:
    office = Office()
    office.report(status(0, incarnation=2), "b")
    office.leader.take_discards([DISCARD, DISCARD], now_ns=office.now_ns)
    assert list(office.leader.proposals) == [DISCARD]
    assert office.leader._answers.merge_fault(offered("b"), 1)


def test_discard_waits_while_an_open_round_may_include_the_steps() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "b")
    office.leader.take_discards([replace(DISCARD, fragment=1, step_to=10_000)], now_ns=office.now_ns)
    assert not office.leader.proposals, "its learner has not made so many, by its last report"
    office.leader.take_discards([replace(DISCARD, fragment=at) for at in (-1, 2)], now_ns=office.now_ns)
    assert not office.leader.proposals, "there are no such fragments"
    office.report(status(0, incarnation=2), "b")
    office.leader.take_discards([DISCARD, replace(DISCARD, fragment=1)], now_ns=office.now_ns)
    assert list(office.leader.proposals) == [replace(DISCARD, fragment=1)]


@pytest.mark.parametrize("is_at_once", [True, False])
def test_rows_that_conflict_with_a_merge_under_way_cost_their_learner_and_not_the_round(is_at_once: bool) -> None:
    """The entry of whichever is second would be refused, with the work of all others."""
    office, shard = Office(), region_shards("run", "a", REGIONS)[0]
    rows = {0: (0, shard, 5, 5), 1: (0, shard, 0, 12)}
    office.report(status(8))
    while sorted(office.leader.rounds) != [0, 1]:
        office.go(50 * MS)
    for fragment in (0, 1):
        round_ = office.leader.rounds[fragment]
        for name in REGIONS:
            offer = replace(contribution(name, fragment, steps=(0, 4)), rows=rows[fragment] if name == "a" else ())
            office.answer(name, Contributed(round_.ballot, offer))
        if not is_at_once:
            office.go()
    office.go()
    learners = {
        fragment: [offer.learner for offer in round_.decision.contributions]
        for fragment, round_ in office.leader.rounds.items()
        if round_.decision is not None
    }
    assert learners == {0: ["a", "b", "c"], 1: ["b", "c"]}
    (note,) = [note for note in office.notes if note.kind == "declined"]
    assert "a: beside what a has in the merge of fragment 0: a goes back to row 0" in note.text


def test_committed_round_of_another_leader_ends_the_own_one() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go(10 * MS)
    office.commit(RoundBody(0, 1, Ballot(2, 9), (), 1.0, (1.0,) * pieces(0), announcement.stripes, b"p" * 32))
    assert 0 not in office.leader.rounds
