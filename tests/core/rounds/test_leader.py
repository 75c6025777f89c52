"""The leader of rounds: opens with everybody, decides once, tries again, books, ends. The other regions by hand."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest

from diloco_node.core.data_shards import region_shards
from diloco_node.core.events import Note, Send
from diloco_node.core.merge.freivalds import draw_windows
from diloco_node.core.messages import (
    AuditDrawn,
    BallotOpened,
    Contributed,
    Declined,
    LeftOut,
    MergeDecided,
    MergedReceived,
    Message,
    PayloadDurable,
    ReductionReported,
    ReusedStripe,
    StripesReceived,
)
from diloco_node.core.projections import NO_PROJECTION, Projection
from diloco_node.core.rounds.agenda import GIVE_UP_BALLOTS, REASON_CHARACTERS_MAX
from diloco_node.core.rounds.audit_draw import drawer_of, nonce_of
from diloco_node.core.rounds.ballot import PROBE_HEARTBEATS
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.rounds.open_round import OpenRound, payload_digest
from diloco_node.core.rounds.progress import RunProgress
from diloco_node.core.rounds.suspicion import PAUSE_BALLOTS
from diloco_node.core.types import (
    Ballot,
    Contribution,
    DiscardedBody,
    EntryBody,
    FinishedBody,
    LearnerStatus,
    MergeRule,
    RateLimits,
    RoundBody,
    RunSettings,
)
from tests.kit.rounds_kit import (
    GENESIS,
    MANIFEST,
    MS,
    REGIONS,
    SECOND,
    SETTINGS,
    Ledger,
    Neighbourhood,
    context_of,
    contribution,
    pieces,
    position,
    status,
)

DUE = status(4)
"""Fragment 0 of two is due after 4 of 7 steps, fragment 1 is not."""


class Office:
    """Region a leads; b and c answer as the test says."""

    def __init__(self, settings: RunSettings = SETTINGS, regions: tuple[str, ...] = REGIONS) -> None:
        self.world = Neighbourhood("a", regions)
        self.history = RoundHistory(2)
        self.ledger = Ledger()
        self.now_ns = SECOND
        liveness, effects = self.world.liveness, self.world.effects
        context = context_of(self.history, liveness=liveness, regions=regions, settings=settings, effects=effects)
        # What the merged stripes of a ballot decode to here; a test may say so.
        self.merged: dict[int, tuple[bytes, tuple[float, ...]]] = {}
        self.own_projection = NO_PROJECTION
        # Whether the drawer of a merged ballot answers at once.
        self.is_drawn = True
        self.leader = RoundLeader(context, RunProgress(context), self)
        self.notes: list[Note] = []
        self.commit(replace(GENESIS, regions=regions))
        self.leader.begin(3, {}, now_ns=self.now_ns)

    def merged_stripes(self, _fragment: int, _number: Ballot) -> dict[int, tuple[bytes, tuple[float, ...]]]:
        return self.merged

    def projection(self, _fragment: int, _number: Ballot) -> Projection:
        return self.own_projection

    def commit(self, body: EntryBody) -> None:
        entry = self.ledger.add(body)
        self.history.apply(entry, now_ns=self.now_ns)
        self.leader.on_commit(entry, now_ns=self.now_ns)

    def report(self, learner: LearnerStatus, names: Iterable[str] = REGIONS) -> None:
        """These regions' learners say this, now."""
        for name in names:
            if name == "a":
                self.world.liveness.own_learner(learner, now_ns=self.now_ns)
            else:
                self.world.hear(name, learner, now_ns=self.now_ns)
            self.leader.on_status(name, now_ns=self.now_ns)

    def go(self, ns: int = 0) -> list[tuple[str, Message]]:
        """Let time pass and the leader act; what it says, to itself too."""
        self.now_ns += ns
        for round_ in self.leader.rounds.values():
            if round_.is_merged and self.is_drawn:
                self.answer(*self.draw(round_))
        self.leader.advance(now_ns=self.now_ns)
        sent: list[tuple[str, Message]] = []
        for effect in self.world.effects.take():
            if isinstance(effect, Send):
                sent.append((effect.peer, effect.message))
            elif isinstance(effect, Note):
                self.notes.append(effect)
        while self.world.effects.local:
            sent.append(("a", self.world.effects.local.popleft()))
        return sorted(sent, key=lambda item: (item[0], type(item[1]).__name__))

    @staticmethod
    def draw(round_: OpenRound) -> tuple[str, AuditDrawn]:
        """The drawer's nonce, by which nothing is audited."""
        own = nonce_of(b"a", round_.ballot)
        nonces = (bytes([value]) * 32 for value in range(256))
        nonce = next(value for value in nonces if not draw_windows((own, value), round_.stripes, (1 << 20,)))
        return drawer_of(round_.announcement, "a"), AuditDrawn(round_.ballot, round_.digest, (nonce,))

    def answer(self, peer: str, message: Message) -> None:
        self.leader.on_answer(peer, message, now_ns=self.now_ns)  # type: ignore[arg-type]

    def open(self) -> BallotOpened:
        self.report(DUE)
        return ballots(self.go())[0]

    def contribute(self, announcement: BallotOpened, names: Iterable[str] = REGIONS) -> None:
        for name in names:
            self.answer(name, Contributed(announcement.ballot, offered(name)))

    def hold(self, announcement: BallotOpened, names: Iterable[str] = REGIONS) -> None:
        for stripe in announcement.stripes:
            for name in names:
                self.answer(stripe.reducer, StripesReceived(announcement.ballot, name, 1, 1))

    def merge(self, announcement: BallotOpened, names: Iterable[str] = REGIONS, norm: float = 4.0 / 3) -> bytes:
        """All reducers report; returns the payload's digest."""
        width = pieces(0)
        for index, stripe in enumerate(announcement.stripes):
            rows = tuple((norm,) * width for _ in names)
            self.answer(
                stripe.reducer, ReductionReported(announcement.ballot, index, (1.0,) * width, rows, bytes([index]) * 32)
            )
        return payload_digest([bytes([index]) * 32 for index in range(len(announcement.stripes))])

    def kinds(self) -> list[str]:
        return [note.kind for note in self.notes]


def offered(name: str) -> Contribution:
    return contribution(name, steps=(0, 4))


def ballots(sent: list[tuple[str, Message]]) -> list[BallotOpened]:
    return [message for _, message in sent if isinstance(message, BallotOpened)]


def decisions(sent: list[tuple[str, Message]]) -> list[MergeDecided]:
    return [message for _, message in sent if isinstance(message, MergeDecided)]


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
    office.leader._audit.draw(round_, lambda name: name != drawer, now_ns=office.now_ns)
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
    office.answer("a", StripesReceived(announcement.ballot, "b", 1, 1))
    office.world.liveness.link_changed("b", is_up=False)
    assert office.go() == [], "everything of b has arrived"
    office.world.liveness.link_changed("c", is_up=False)
    again = ballots(office.go())[0]
    assert again.members == ("a", "b")
    assert again.reused == (ReusedStripe("b", 0),)


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
    announcement = ballots(office.go(SECOND // 2))[0]
    assert announcement.members == ("a", "c"), "the others do not wait for it"
    office.leader.rounds.clear()
    office.now_ns += PAUSE_BALLOTS * SETTINGS.ballot_deadline_min_ns
    report()
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


def test_nobody_left_abandons_the_round_and_it_is_opened_again_later() -> None:
    office = Office()
    announcement = office.open()
    for name in REGIONS:
        office.answer(name, Declined(announcement.ballot, "no steps"))
    office.go()
    assert "abandoned" in office.kinds()
    office.report(DUE)
    assert office.go() == [], "not in the same breath"
    office.report(DUE)
    assert ballots(office.go(SECOND // 2))[0].ballot == Ballot(3, 2)


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
    assert office.leader._answers.may_contribute(offered("b"), 1)


def test_discard_waits_while_an_open_round_may_include_the_steps() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement, "b")
    office.leader.take_discards([replace(DISCARD, fragment=1, step_to=10_000)], now_ns=office.now_ns)
    assert not office.leader.proposals, "its learner has not made so many, by its last report"
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


def finish(office: Office) -> None:
    """Carry the open rounds to their commit."""
    for fragment in sorted(office.leader.rounds):
        round_ = office.leader.rounds[fragment]
        office.now_ns += 10 * MS
        for name in round_.members:
            start = office.history.covered_step(name, 1, fragment)
            taken = contribution(name, fragment, base=round_.version - 1, steps=(start, start + 3))
            office.answer(name, Contributed(round_.ballot, taken))
        office.go()
        width = pieces(fragment)
        for index, stripe in enumerate(round_.stripes):
            rows = tuple((4.0 / len(round_.stripes),) * width for _ in round_.members)
            office.answer(stripe.reducer, ReductionReported(round_.ballot, index, (1.0,) * width, rows, b"d" * 32))
        for name in REGIONS:
            office.answer(name, PayloadDurable(round_.ballot, round_.digest))
        office.go()
        office.commit(office.leader.proposals.popleft())


def test_run_ends_with_one_last_round_per_fragment() -> None:
    office = Office(replace(SETTINGS, steps_max=20))
    office.report(status(19))
    office.go()
    assert not office.leader.is_ending
    finish(office)
    office.report(status(20, f0=position(base=1, step=18)))
    office.go()
    assert office.leader.is_ending
    rounds = {}
    for _ in range(6):
        rounds |= {round_.fragment: round_.is_last for round_ in office.leader.rounds.values()}
        finish(office)
        office.report(status(21, f0=position(base=1, step=20)))
        office.go()
    assert rounds == {0: True, 1: True}
    (body,) = office.leader.proposals
    assert isinstance(body, FinishedBody)
    assert body.versions == tuple(office.history.versions)
    assert "20 steps" in body.reason
    office.commit(body)
    office.report(status(30))
    assert office.go() == []
    assert office.leader.reason == "the run is finished"


def test_operator_ends_the_run_and_a_fragment_without_steps_is_skipped() -> None:
    office = Office()
    office.report(status(0))
    office.go()
    office.leader.request_finish("enough")
    office.go()
    assert office.leader.is_ending
    assert not office.leader.proposals, "late members get a moment"
    for _ in range(4):
        office.now_ns += SECOND
        office.report(status(0))
        office.go()
    assert "skipped" in office.kinds()
    assert list(office.leader.proposals) == [FinishedBody((0, 0), "enough")]


def test_members_that_decline_at_once_are_not_asked_again_in_the_same_breath() -> None:
    office = Office()
    office.report(status(2))
    office.leader.request_finish("enough")
    announcements = ballots(office.go())
    assert {announcement.fragment for announcement in announcements} == {0, 1}, "last rounds know no pacing"
    for announcement in {announcement.ballot: announcement for announcement in announcements}.values():
        for name in REGIONS:
            office.answer(name, Declined(announcement.ballot, "no"))
    assert ballots(office.go()) == []
    office.report(status(2))
    assert ballots(office.go(SETTINGS.heartbeat_ns - 1)) == []
    office.report(status(2))
    assert ballots(office.go(1))


def test_round_that_is_open_at_the_end_is_finished_first() -> None:
    office = Office()
    office.open()
    office.leader.request_finish("enough")
    office.report(DUE)
    office.go()
    assert not office.leader.rounds[0].is_last
    assert office.leader.rounds[1].is_last, "the other fragment does not wait for it"


def test_the_run_ends_without_a_round_that_nobody_brings_to_an_end() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.hold(announcement)
    office.leader.request_finish("enough")
    begun_ns, allowed_ns = office.now_ns, GIVE_UP_BALLOTS * SETTINGS.ballot_deadline_min_ns
    while not office.leader.proposals:
        assert office.now_ns - begun_ns < 2 * allowed_ns
        office.report(DUE)
        for again in ballots(office.go(SETTINGS.heartbeat_ns)):
            if again.fragment == 0:
                office.contribute(again)
                office.hold(again)  # and no reducer ever merges it
    assert list(office.leader.proposals) == [FinishedBody((0, 0), "enough")]
    assert office.leader.rounds == {}
    assert office.now_ns - begun_ns >= allowed_ns
    given_up = [note.fragment for note in office.notes if "the run ends without this round" in note.text]
    assert given_up == [0]
    office.go(SETTINGS.heartbeat_ns)
    assert len(office.leader.proposals) == 1, "once"


def test_committed_round_of_another_leader_ends_the_own_one() -> None:
    office = Office()
    announcement = office.open()
    office.contribute(announcement)
    office.go(10 * MS)
    office.commit(RoundBody(0, 1, Ballot(2, 9), (), 1.0, (1.0,) * pieces(0), announcement.stripes, b"p" * 32))
    assert 0 not in office.leader.rounds
