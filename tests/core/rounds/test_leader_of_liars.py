"""The leader of rounds among regions that err, lie or fail: whom it leaves out, and what it merges all the same."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from diloco_node.core.merge.freivalds import are_rows_due
from diloco_node.core.messages import (
    AuditDrawn,
    BallotOpened,
    Contributed,
    ContributionProjected,
    LeftOut,
    MergedReceived,
    PayloadDurable,
    ReductionReported,
)
from diloco_node.core.projections import ContributionsProjected, ProjectContributions, Projection
from diloco_node.core.rounds.agenda import REASON_CHARACTERS_MAX
from diloco_node.core.rounds.audit_draw import drawer_of, nonce_of
from diloco_node.core.rounds.ballot import PROBE_HEARTBEATS
from diloco_node.core.rounds.open_round import payload_digest
from diloco_node.core.rounds.suspicion import PAUSE_BALLOTS
from diloco_node.core.types import (
    Contribution,
    MergeRule,
    RoundBody,
    Stripe,
)
from tests.kit.leader_kit import DUE, Office, ballots, decisions, offered
from tests.kit.rounds_kit import (
    MANIFEST,
    MS,
    REGIONS,
    SECOND,
    SETTINGS,
    contribution,
    pieces,
    status,
)


@pytest.mark.parametrize(
    "wrong",
    [
        contribution("c", steps=(0, 4)),
        contribution("b", 1, steps=(0, 4)),
        contribution("b", steps=(1, 4)),
        contribution("b", steps=(0, 4), base=1),
        replace(contribution("b", steps=(0, 4)), squared_norms=(1.0,) * 9),
        contribution("b", steps=(0, 4), norm=float("nan")),
        contribution("b", steps=(0, 4), norm=1e300),
    ],
)
def test_wrong_contribution_is_not_merged(wrong: Contribution) -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "ac")
    office.answer("b", Contributed(announcement.ballot, wrong))
    assert [offer.learner for offer in decisions(office.go())[0].contributions] == ["a", "c"]


def test_lie_in_a_header_raises_an_alarm_and_the_round_goes_on_without_it() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    width = pieces(0)
    for index, stripe in enumerate(announcement.stripes):
        rows = tuple(((2.0 if name == "b" else 4.0 / 3),) * width for name in REGIONS)
        office.answer(stripe.reducer, ReductionReported(announcement.ballot, index, (1.0,) * width, rows, b"d" * 32))
    trial = ballots(office.go())[0]
    assert trial.members == REGIONS, "nobody is put out by the word of others"
    assert [stripe.reducer for stripe in trial.stripes] == ["a"] * len(announcement.stripes)
    for index in range(len(trial.stripes)):
        rows = tuple(((2.0 if name == "b" else 4.0 / 3),) * width for name in REGIONS)
        office.answer("a", ReductionReported(trial.ballot, index, (1.0,) * width, rows, b"d" * 32))
    effects = office.go()
    assert ballots(effects)[0].members == ("a", "c")
    alarms = [note for note in office.notes if note.is_alarm]
    assert len(alarms) == 1
    assert "b as member: its stripes do not add up" in alarms[0].text


def norms_of(announcement: BallotOpened, index: int, *, lie: Iterable[str] = ()) -> ReductionReported:
    """Return a reducer's report of three equal contributions; about some of them it lies."""
    rows = tuple(((9.0 if name in lie else 4.0 / 3),) * pieces(0) for name in REGIONS)
    return ReductionReported(announcement.ballot, index, (1.0,) * pieces(0), rows, bytes([index]) * 32)


def test_a_reducer_that_lies_about_norms_loses_its_stripes_and_nobody_else_anything() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    for index, stripe in enumerate(announcement.stripes):
        office.answer(stripe.reducer, norms_of(announcement, index, lie="ab" if stripe.reducer == "c" else ""))
    trial = ballots(office.go())[0]
    assert (trial.members, {stripe.reducer for stripe in trial.stripes}) == (REGIONS, {"a"})
    for index in range(len(trial.stripes)):
        office.answer("a", norms_of(trial, index))
    office.go()
    for name in "ab":
        office.answer(name, PayloadDurable(trial.ballot, office.leader.rounds[0].digest))
    office.go()
    (body,) = office.leader.proposals
    assert isinstance(body, RoundBody)
    assert [member.contribution.learner for member in body.members] == ["a", "b", "c"]
    assert [(line.region, line.part) for line in office.leader.left_out] == [("c", "reducer")]
    assert next(note.text for note in office.notes if note.is_alarm).startswith("c as reducer: the norms")


def due_audit(office: Office) -> BallotOpened:
    """A merged ballot that everybody holds, its audit drawn so that rows are due; c tells none."""
    office.is_drawn = False
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    digest = office.merge(announcement)
    round_ = office.leader.rounds[0]
    own = nonce_of(b"a", announcement.ballot)
    nonce = next(value for value in map(bytes, itertools.product(range(8), repeat=3)) if are_rows_due((own, value)))
    office.answer(drawer_of(announcement, "a"), AuditDrawn(announcement.ballot, digest, (nonce,)))
    for name in REGIONS:
        office.answer(name, PayloadDurable(announcement.ballot, digest))
    office.go()
    windows = len(round_.windows)
    office.own_projection = Projection((0.0,) * windows, (1.0,) * windows)
    for name in "ab":
        office.answer(name, ContributionProjected(announcement.ballot, (0.0,) * windows))
    assert ballots(office.go()) == []
    assert not office.leader.proposals, "the row of c may be on its way"
    assert round_.wait_reason() == "waits for projections of c, to audit the payload"
    return announcement


def test_a_leader_that_lacks_a_row_that_is_due_reduces_alone() -> None:
    office = Office()
    announcement = due_audit(office)
    office.now_ns += 3 * office.leader.rounds[0].deadline.duration_ns // 4
    office.report(DUE)
    again = ballots(office.go())[0]
    assert (again.members, {stripe.reducer for stripe in again.stripes}) == (announcement.members, {"a"})
    assert any("c: it has not told its projections" in note.text for note in office.notes)
    assert office.leader.left_out == (), "it may be late"


def test_a_leader_that_has_all_contributions_projects_them_itself_where_a_row_is_missing() -> None:
    office = Office()
    due_audit(office)
    round_ = office.leader.rounds[0]
    round_.announcement = replace(
        round_.announcement, stripes=tuple(replace(stripe, reducer="a") for stripe in round_.stripes)
    )
    emitted: list[object] = []
    office.world.effects.emit = emitted.append  # type: ignore[method-assign]
    assert ballots(office.go(3 * round_.deadline.duration_ns // 4)) == []
    (order,) = emitted
    assert isinstance(order, ProjectContributions)
    announcement, stop = round_.announcement, round_.stripes[-1].block_stop
    round_.announcement = replace(announcement, stripes=(Stripe("a", 0, stop),))
    assert office.leader._audit._to_project(round_) == [], "a window may lie in two stripes of another ballot"
    round_.announcement = announcement
    assert office.leader._audit._to_project(round_) == [order.windows]
    rows = ((0.25,) * len(order.windows), (-0.25,) * len(order.windows), (0.0,) * len(order.windows))
    office.leader.on_projections(ContributionsProjected(0, 1, order.windows, rows))
    office.go()
    (body,) = office.leader.proposals
    assert isinstance(body, RoundBody)
    assert body.projections == rows


def test_a_leader_that_has_the_contributions_no_more_does_not_wait_for_the_deadline() -> None:
    office = Office()
    due_audit(office)
    round_ = office.leader.rounds[0]
    round_.announcement = replace(
        round_.announcement, stripes=tuple(replace(stripe, reducer="a") for stripe in round_.stripes)
    )
    assert ballots(office.go(3 * round_.deadline.duration_ns // 4)) == []
    office.leader.on_projections(ContributionsProjected(0, 1, round_.windows, ()))
    again = ballots(office.go())[0]
    assert {stripe.reducer for stripe in again.stripes} == {"a"}


def test_a_reducer_that_tells_a_wrong_digest_costs_one_question() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    office.merge(announcement)
    sent_around = [bytes([index]) * 32 for index in range(len(announcement.stripes))]
    at = next(index for index, stripe in enumerate(announcement.stripes) if stripe.reducer == "c")
    sent_around[at] = b"y" * 32
    for name in REGIONS:
        office.answer(name, PayloadDurable(announcement.ballot, payload_digest(sent_around)))
    office.leader.tick()
    assert {peer for peer, message in office.go() if message == announcement} == set(REGIONS), (
        "all are asked what they have"
    )
    office.answer("a", MergedReceived(announcement.ballot, tuple(sent_around)))
    assert ballots(office.go()) == [], "one region's word"
    office.answer("b", MergedReceived(announcement.ballot, (b"too", b"short")))
    assert ballots(office.go()) == []
    office.answer("b", MergedReceived(announcement.ballot, tuple(sent_around)))
    again = ballots(office.go())[0]
    assert again.members == REGIONS
    assert {stripe.reducer for stripe in again.stripes} == {"a", "b"}
    assert [(line.region, line.part) for line in again.left_out] == [("c", "reducer")]


def test_a_member_that_renames_its_contribution_is_left_out_at_once() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    office.answer("b", Contributed(announcement.ballot, replace(offered("b"), snapshot=2)))
    again = ballots(office.go())[0]
    assert again.members == ("a", "c")
    assert [(line.region, line.part) for line in again.left_out] == [("b", "member")]


def test_a_region_that_fails_is_tried_with_a_short_deadline_then_left_out_and_tried_again() -> None:
    office = Office()
    office.leader._clock.observe(0, SETTINGS.heartbeat_ns)  # as a ballot that committed before
    short_ns = PROBE_HEARTBEATS * SETTINGS.heartbeat_ns
    steps = itertools.count(4)

    def report() -> None:
        office.report(status(next(steps)))

    def fail() -> int:
        """A round in which b does not contribute in time, and then without it; returns how long it was waited for."""
        report()
        announcement = ballots(office.go())[0]
        assert announcement.members == REGIONS
        waited_ns = office.leader.rounds[0].deadline_ns - office.now_ns
        office.contribute(announcement, set(announcement.members) - {"b"})
        office.hold(announcement, "ac")
        while office.now_ns < office.leader.rounds[0].deadline_ns:
            office.now_ns += 200 * MS
            report()
        again = next(later for later in ballots(office.go()) if later.ballot != announcement.ballot)
        assert again.members == ("a", "c")
        return waited_ns

    assert fail() == SETTINGS.ballot_deadline_min_ns
    assert office.leader.left_out == ()
    office.leader.end()
    office.leader.begin(3, {}, now_ns=office.now_ns, left_out=(LeftOut("b", "member", "late"),))
    assert fail() == short_ns, "the word of the leader before is a first strike"
    assert [(line.region, line.part) for line in office.leader.left_out] == [("b", "member")]
    office.leader.rounds.clear()
    report()
    office.leader.tick()
    announcement = ballots(office.go(SECOND // 2))[0]
    assert announcement.members == ("a", "c"), "the others do not wait for it"
    office.leader.rounds.clear()
    office.now_ns += PAUSE_BALLOTS * SETTINGS.ballot_deadline_min_ns
    report()
    office.leader.tick()
    announcement = ballots(office.go())[0]
    assert announcement.members == REGIONS
    round_ = office.leader.rounds[0]
    assert round_.deadline_ns - office.now_ns == short_ns
    assert "to try who is in doubt" in round_.deadline.derivation


@pytest.mark.parametrize("tokens", [2**50, 2**62])
def test_tokens_that_nobody_else_can_have_trained_are_not_merged(tokens: int) -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "ac")
    office.answer("b", Contributed(announcement.ballot, replace(offered("b"), tokens=tokens)))
    (decision, *_) = decisions(office.go())
    assert [contribution.learner for contribution in decision.contributions] == ["a", "c"]
    assert "tokens in 4 steps" in office.notes[-1].text


def test_an_operators_reason_is_bounded() -> None:
    office = Office()
    office.report(status(1))
    office.leader.request_finish("x" * 100_000)
    office.go()
    assert office.leader.is_ending
    assert all(len(note.text) < 2 * REASON_CHARACTERS_MAX for note in office.notes)


def test_a_contribution_far_longer_than_the_others_counts_in_part_and_is_an_alarm_once() -> None:
    office = Office()
    announcement = office.open()
    width = pieces(0)
    for name in REGIONS:
        norms = ((900.0 if name == "b" else 4.0),) * width
        office.answer(name, Contributed(announcement.ballot, replace(offered(name), squared_norms=norms)))
    decision = decisions(office.go())[0]
    # Norms 2, 30 and 2 in each piece; of the second 4 count. RDA's radius is 8/3, a mean adds 1/3 of each.
    by_rule = {MergeRule.RDA: [8 / 9 / 2, 8 / 9 / 30, 8 / 9 / 2], MergeRule.AVG: [1 / 3, 2 / 45, 1 / 3]}
    for piece, rule in enumerate(MANIFEST.fragments[0].rules):
        assert [row[piece] for row in decision.coefficients] == pytest.approx(by_rule[rule])
    office.hold(announcement)
    office.now_ns = office.leader.wake_at_ns or 0
    office.report(status(5))
    again = ballots(office.go())
    assert again[0].ballot > announcement.ballot, "the reducers did not answer"
    notes = [note for note in office.notes if note.kind == "norms"]
    assert [note.is_alarm for note in notes] == [True, False]
    lengths = 30 * width**0.5, 2 * width**0.5
    text = "contribution of b: length {:.3g} is 15 times the usual {:.3g}, 0.133 of it counts"
    assert notes[0].text == text.format(*lengths)


def test_norms_that_no_stripe_has_are_an_alarm_and_the_leader_leads_on() -> None:
    """Each of them is finite, their sum is not."""
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go()
    width = pieces(0)
    for index, stripe in enumerate(announcement.stripes):
        rows = ((4.0 / 3,) * width,) * len(REGIONS)
        office.answer(
            stripe.reducer, ReductionReported(announcement.ballot, index, (1e308,) * width, rows, bytes([index]) * 32)
        )
    digest = payload_digest([bytes([index]) * 32 for index in range(len(announcement.stripes))])
    for name in REGIONS:
        office.answer(name, PayloadDurable(announcement.ballot, digest))
    office.go()
    assert not office.leader.proposals
    assert "beyond all bounds" in next(note.text for note in office.notes if note.is_alarm)
    assert ballots(office.go(60 * SECOND)), "its deadline passes"
