"""A region's part in a round: contribute once, reduce in order, store, answer again, close. Region b of three."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import (
    CloseBallot,
    ContributionStripeArrived,
    Effect,
    MergedStripeArrived,
    Note,
    PayloadStored,
    ReduceStripe,
    ReductionDone,
    Send,
    SendContribution,
    SendMerged,
    SnapshotRefused,
    StorePayload,
    TakeSnapshot,
)
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.messages import (
    AuditDrawn,
    BallotOpened,
    Contributed,
    Declined,
    MergeDecided,
    MergedReceived,
    PayloadDurable,
    ReductionReported,
    ReusedStripe,
    StripesReceived,
)
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.followed import EARLY_MAX
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.open_round import payload_digest
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.types import Ballot, Contribution, EntryBody, Recovered, RoundBody, RunSettings, Stripe
from tests.kit.rounds_kit import (
    GENESIS,
    MANIFEST,
    REGIONS,
    SETTINGS,
    Ledger,
    committed_round,
    context_of,
    contribution,
    pieces,
    position,
    status,
)

MODEL = build_manifest([TensorSpec("one", (1200,)), TensorSpec("two", (700,)), TensorSpec("three", (500,))], 2)
"""Fragments of one and two pieces, as those of MANIFEST, and of five blocks each."""

STRIPES = (Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 5))
FIRST, SECOND_BALLOT = Ballot(3, 1), Ballot(3, 2)
OPENED = BallotOpened(FIRST, 0, 1, REGIONS, STRIPES)
AGAIN = replace(OPENED, ballot=SECOND_BALLOT)
OWN = contribution("b", steps=(0, 10), snapshot=4)
TAKE = TakeSnapshot(0, 1, 0)


LACKS_ALL = Send("a", MergedReceived(FIRST, (b"",) * len(STRIPES)))
"""The answer that a region adds when it is asked again: no merged stripe is here."""


class Place:
    """Region b, with genesis committed and a learner at step 10; region a leads."""

    def __init__(self, settings: RunSettings = SETTINGS) -> None:
        self.effects = EffectBuffer("b")
        self.history = RoundHistory(2)
        self.ledger = Ledger()
        self.versions = Versions(
            region="b",
            fragments=2,
            manifest_digest=MANIFEST.digest,
            recovery=Recovered(0, "", (), (-1, -1), frozenset()),
            history=self.history,
            effects=self.effects,
        )
        context = context_of(self.history, region="b", manifest=MODEL, settings=settings, effects=self.effects)
        self.participant = RoundParticipant(context, self.versions)
        self.commit(GENESIS)
        for fragment in range(2):
            self.versions.version_applied(fragment, 0)
        self.participant.learner_changed(status(10))

    def commit(self, body: EntryBody) -> None:
        entry = self.ledger.add(body)
        self.history.apply(entry, now_ns=0)
        self.versions.on_commit(entry)
        if isinstance(body, RoundBody):
            self.participant.on_commit(body)

    def apply(self, body: RoundBody) -> list[Effect]:
        self.commit(body)
        self.versions.version_applied(body.fragment, body.version)
        self.participant.on_apply(body.fragment, body.version)
        return self.go()

    def go(self) -> list[Effect]:
        self.participant.pump()
        return self.effects.take()

    def open(self, announcement: BallotOpened = OPENED) -> list[Effect]:
        self.participant.ballot_opened("a", announcement)
        return self.go()

    def take(self, taken: Contribution = OWN) -> list[Effect]:
        self.participant.snapshot_taken(taken)
        return self.go()

    def stripes(
        self, names: Iterable[str], ballot: Ballot = FIRST, *, index: int = 1, cut: tuple[Stripe, ...] = STRIPES
    ) -> list[Effect]:
        stripe = cut[min(index, len(cut) - 1)]
        blocks = (stripe.block_start, stripe.block_stop)
        for name in names:
            self.participant.stripe_arrived(ContributionStripeArrived(ballot, index, contribution(name), blocks))
        return self.go()

    def decide(self, names: str = "abc", ballot: Ballot = FIRST) -> list[Effect]:
        chosen = tuple(contribution(name) for name in names)
        rows = tuple((float(place),) * pieces(0) for place in range(len(names)))
        self.participant.merge_decided(MergeDecided(ballot, 0, 1, chosen, rows))
        return self.go()

    def reduced(self, ballot: Ballot = FIRST) -> list[Effect]:
        self.participant.stripe_reduced(ReductionDone(ballot, 1, (1.0,), ((1.0,), (2.0,), (3.0,)), b"m" * 32))
        return self.go()

    def merged(self, indexes: Iterable[int], ballot: Ballot = FIRST, version: int = 1) -> list[Effect]:
        for index in indexes:
            cut = STRIPES[index] if index < len(STRIPES) else STRIPES[0]
            digest = bytes([index]) * 32
            self.participant.merged_arrived(MergedStripeArrived(ballot, index, 0, version, digest, cut, (1.0,)))
        return self.go()


PAYLOAD = payload_digest([bytes([index]) * 32 for index in range(3)])


def told(effects: list[Effect]) -> list[object]:
    """Messages to the leader."""
    assert all(effect.peer == "a" for effect in effects if isinstance(effect, Send))
    return [effect.message for effect in effects if isinstance(effect, Send)]


# ---- contribute ------------------------------------------------------------------------------------------------------


def test_member_takes_a_snapshot_once_and_sends_it() -> None:
    place = Place()
    assert place.open() == [TAKE]
    assert place.open() == [LACKS_ALL], "it is being taken"
    assert place.take() == [Send("a", Contributed(FIRST, OWN)), SendContribution(FIRST, 1, OWN, STRIPES)]


def test_a_new_learners_contribution_goes_to_all_whatever_they_have_of_the_old_one() -> None:
    place = Place()
    place.open()
    place.take()
    place.participant.learner_changed(status(4, incarnation=2))
    place.go()
    reused = tuple(ReusedStripe("b", stripe) for stripe in range(3))
    assert not any(isinstance(effect, SendContribution) for effect in place.open(replace(AGAIN, reused=reused)))
    taken = contribution("b", incarnation=2, steps=(0, 4))
    effects = place.take(taken)
    assert effects == [Send("a", Contributed(SECOND_BALLOT, taken)), SendContribution(SECOND_BALLOT, 1, taken, STRIPES)]


def test_next_ballot_gets_the_same_contribution_without_what_has_arrived() -> None:
    place = Place()
    place.open()
    place.take()
    moved = (Stripe("a", 0, 3), Stripe("c", 3, 5))
    reused = (ReusedStripe("a", 0), ReusedStripe("b", 1))
    effects = place.open(replace(AGAIN, stripes=moved, reused=reused))
    assert effects == [
        CloseBallot(FIRST, 0, 1, committed=False),
        Send("a", Contributed(SECOND_BALLOT, OWN)),
        SendContribution(SECOND_BALLOT, 1, OWN, moved, skip=(1,)),
    ]


def test_snapshot_that_comes_after_the_ballot_is_used_in_the_next_one() -> None:
    place = Place()
    place.open()
    assert place.open(AGAIN) == [CloseBallot(FIRST, 0, 1, committed=False)], "one snapshot per round"
    assert told(place.take()) == [Contributed(SECOND_BALLOT, OWN)]


def test_lower_ballot_is_refused() -> None:
    place = Place()
    place.open(AGAIN)
    assert place.open(OPENED) == []
    assert told(place.take()) == [Contributed(SECOND_BALLOT, OWN)]


def test_region_that_is_no_member_takes_no_snapshot() -> None:
    assert Place().open(replace(OPENED, members=("a", "c"))) == []


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        (None, "no learner is attached"),
        (status(10, finished=True), "the learner has stopped"),
        (status(10, f0=position(step=10)), "no steps since the last inclusion"),
    ],
)
def test_member_that_can_not_contribute_says_so(learner: object, reason: str) -> None:
    place = Place()
    place.participant.learner_changed(learner)  # type: ignore[arg-type]
    assert told(place.open()) == [Declined(FIRST, reason)]
    assert told(place.open()) == [Declined(FIRST, reason), LACKS_ALL.message], "again when asked again"


def test_member_waits_until_its_learner_has_applied_the_version_before() -> None:
    place = Place()
    place.apply(committed_round(0, 1, [contribution("b", steps=(0, 10))]))
    announcement = replace(OPENED, version=2)
    assert place.open(announcement) == [], "the learner is at version 0 still: the same steps would count twice"
    place.participant.learner_changed(status(12, f0=position(base=1, step=10)))
    assert place.go() == [TakeSnapshot(0, 2, 1)]


def test_member_waits_until_its_region_knows_the_version_before() -> None:
    place = Place()
    place.participant.learner_changed(status(12, f0=position(base=1, step=10)))
    announcement = replace(OPENED, version=2)
    assert place.open(announcement) == []
    assert place.apply(committed_round(0, 1, [contribution("b", steps=(0, 10))])) == [TakeSnapshot(0, 2, 1)]


def test_contribution_to_the_round_before_is_never_offered_again() -> None:
    place = Place()
    place.open()
    place.take()
    place.commit(committed_round(0, 1, [contribution("a")]))
    assert place.open(replace(AGAIN, version=2)) == [], "committed, but not applied here yet"


def test_member_waits_for_steps_that_are_to_be_booked_first() -> None:
    place = Place()
    place.participant.learner_changed(status(12, f0=position(step=3)))
    assert place.open() == [], "steps (0, 3] are in no entry"


def test_refused_snapshot_is_asked_for_again_only_if_the_base_has_moved() -> None:
    place = Place()
    place.open()
    place.participant.snapshot_refused(SnapshotRefused(0, 1, "values are not finite"))
    assert told(place.go()) == [Declined(FIRST, "values are not finite")]
    place = Place()
    place.open()
    place.participant.learner_changed(status(11, f0=position(base=-1)))
    place.participant.snapshot_refused(SnapshotRefused(0, 1, "at another base"))
    assert place.go() == []
    place.participant.learner_changed(status(11))
    assert place.go() == [TAKE]


def test_new_incarnation_of_the_learner_contributes_anew() -> None:
    place = Place()
    place.open()
    place.take()
    place.participant.learner_changed(None)
    place.participant.learner_changed(status(3, incarnation=2))
    effects = place.open(AGAIN)
    assert effects == [CloseBallot(FIRST, 0, 1, committed=False), TAKE]
    assert place.take(OWN) == [], "a late answer of the old incarnation"


def test_late_snapshot_of_the_round_before_is_not_used() -> None:
    place = Place()
    place.open()
    place.apply(committed_round(0, 1, [contribution("a")], ballot=FIRST))
    place.participant.learner_changed(status(12, f0=position(base=1)))
    announcement = replace(OPENED, ballot=SECOND_BALLOT, version=2)
    assert place.open(announcement) == [TakeSnapshot(0, 2, 1)]
    assert place.take(OWN) == [], "its base is version 0"
    newer = contribution("b", base=1, steps=(0, 12), snapshot=5)
    assert told(place.take(newer)) == [Contributed(SECOND_BALLOT, newer)]


def test_same_incarnation_that_attaches_again_keeps_its_contribution() -> None:
    place = Place()
    place.open()
    place.take()
    place.participant.learner_changed(None)
    place.participant.learner_changed(status(11))
    assert told(place.open(AGAIN)) == [Contributed(SECOND_BALLOT, OWN)]


def test_snapshot_asked_of_a_learner_that_went_is_asked_again() -> None:
    place = Place()
    place.open()
    place.participant.learner_changed(None)
    place.go()
    place = Place()
    place.open()
    place.participant.learner_changed(None)
    place.participant.learner_changed(status(11))
    assert place.go() == [TAKE]


# ---- reduce ----------------------------------------------------------------------------------------------------------


def test_reducer_says_what_it_holds_and_reduces_when_all_is_there() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    assert told(place.stripes("c")) == [StripesReceived(FIRST, "c", 1, 1)]
    assert place.decide("ac") == []
    (received, order) = place.stripes("a")
    assert received == Send("a", StripesReceived(FIRST, "a", 1, 1))
    assert isinstance(order, ReduceStripe)
    assert [contribution.learner for contribution in order.contributions] == ["a", "c"], "by name, not as they came"
    assert order.coefficients == ((0.0,) * pieces(0), (1.0,) * pieces(0))
    assert (order.stripe, order.block_start, order.block_stop, order.residual_of) == (1, 2, 4, None)
    assert place.decide("ac") == [], "once"


def test_a_reducer_tells_the_newest_contribution_of_a_learner() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("ac")
    newer = contribution("c", incarnation=2, steps=(0, 3))
    place.participant.stripe_arrived(ContributionStripeArrived(FIRST, 1, newer, (2, 4)))
    assert told(place.go()) == [StripesReceived(FIRST, "c", 2, 1)]
    assert told(place.open(replace(OPENED, members=("a", "c"))))[:2] == [
        StripesReceived(FIRST, "a", 1, 1),
        StripesReceived(FIRST, "c", 2, 1),
    ]


def test_a_reducer_of_several_stripes_holds_a_contribution_when_it_has_them_all() -> None:
    place = Place()
    cut = (Stripe("a", 0, 1), Stripe("b", 1, 2), Stripe("b", 2, 3), Stripe("c", 3, 5))
    place.open(replace(OPENED, members=("a", "c"), stripes=cut))
    assert place.decide("ac") == []
    assert place.stripes("a", index=1, cut=cut) == []
    (order,) = place.stripes("c", index=1, cut=cut)
    assert isinstance(order, ReduceStripe)
    assert (order.stripe, order.block_start, order.block_stop) == (1, 1, 2), "it need not wait for the other stripe"
    effects = place.stripes("ca", index=2, cut=cut)
    assert effects[:2] == [Send("a", StripesReceived(FIRST, "c", 1, 1)), Send("a", StripesReceived(FIRST, "a", 1, 1))]
    assert isinstance(effects[2], ReduceStripe)
    assert told(place.open(replace(OPENED, members=("a", "c"), stripes=cut))) == [
        StripesReceived(FIRST, "a", 1, 1),
        StripesReceived(FIRST, "c", 1, 1),
        MergedReceived(FIRST, (b"",) * 4),
    ]
    effects = place.open(
        replace(AGAIN, members=("a", "c"), stripes=(Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("b", 4, 5)))
    )
    assert told(effects) == [], "one of the two has moved"


def test_sum_is_by_name_whatever_the_leader_says() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("ca")
    (order,) = place.decide("ca")
    assert isinstance(order, ReduceStripe)
    assert [contribution.learner for contribution in order.contributions] == ["a", "c"]
    assert order.coefficients == ((1.0,) * pieces(0), (0.0,) * pieces(0))
    place.participant.stripe_reduced(ReductionDone(FIRST, 1, (1.0,), ((1.0,), (2.0,)), b"m" * 32))
    (report, _) = place.go()
    assert isinstance(report, Send)
    assert isinstance(report.message, ReductionReported)
    assert report.message.contribution_norms == ((2.0,), (1.0,)), "told in the leader's order"


def test_stripes_of_others_are_none_of_its_business() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    assert place.stripes("ac", index=0) == []
    assert place.stripes("ac", index=7) == []
    assert place.decide("ac") == []


def test_stripe_that_overtakes_its_ballot_is_remembered() -> None:
    place = Place()
    assert place.stripes("ac") == []
    assert told(place.open(replace(OPENED, members=("a", "c")))) == [
        StripesReceived(FIRST, "a", 1, 1),
        StripesReceived(FIRST, "c", 1, 1),
    ]
    assert any(isinstance(effect, ReduceStripe) for effect in place.decide("ac"))


def test_stripe_stays_for_the_next_ballot_over_the_same_blocks() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("ac")
    effects = place.open(replace(AGAIN, members=("a", "c")))
    assert told(effects) == [StripesReceived(SECOND_BALLOT, "a", 1, 1), StripesReceived(SECOND_BALLOT, "c", 1, 1)]
    assert any(isinstance(effect, ReduceStripe) for effect in place.decide("ac", SECOND_BALLOT))
    moved = (Stripe("a", 0, 3), Stripe("b", 3, 5))
    effects = place.open(replace(AGAIN, ballot=Ballot(3, 3), members=("a", "c"), stripes=moved))
    assert told(effects) == [], "other blocks are other bytes"


def test_another_snapshot_is_another_contribution() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("a")
    place.participant.stripe_arrived(ContributionStripeArrived(FIRST, 1, contribution("c", snapshot=2), (2, 4)))
    place.go()
    assert place.decide("ac") == []
    assert any(isinstance(effect, ReduceStripe) for effect in place.stripes("c"))


def test_merged_stripe_goes_to_everybody_and_its_norms_to_the_leader() -> None:
    place = Place()
    place.open(replace(OPENED, members=REGIONS))
    place.stripes(REGIONS)
    place.decide()
    report = ReductionReported(FIRST, 1, (1.0,), ((1.0,), (2.0,), (3.0,)), b"m" * 32)
    assert place.reduced() == [Send("a", report), SendMerged(FIRST, 1, 0, 1, b"m" * 32, 2, 4, ("a", "c"))]
    assert told(place.decide()) == [report], "asked again, said again; sent once"


def test_reduction_of_an_abandoned_ballot_is_reported_to_nobody() -> None:
    place = Place()
    place.open()
    place.stripes(REGIONS)
    place.decide()
    place.open(AGAIN)
    assert place.reduced(FIRST) == []


def test_decision_of_another_ballot_is_ignored() -> None:
    place = Place()
    place.open(replace(AGAIN, members=("a", "c")))
    place.stripes("ac", SECOND_BALLOT)
    assert place.decide("ac", FIRST) == []


# ---- hold ------------------------------------------------------------------------------------------------------------


def test_whole_payload_is_stored_and_then_vouched_for() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    assert place.merged([2, 0]) == []
    assert place.merged([1]) == [StorePayload(FIRST, 0, 1, PAYLOAD, STRIPES)]
    again = told(place.open(replace(OPENED, members=("a", "c"))))
    assert [type(message) for message in again] == [MergedReceived], "not on disk yet: only what is here is said"
    place.versions.payload_stored(0, 1, PAYLOAD)
    place.participant.payload_stored(PayloadStored(0, 1, PAYLOAD))
    assert told(place.go()) == [PayloadDurable(FIRST, PAYLOAD)]
    assert PayloadDurable(FIRST, PAYLOAD) in told(place.open(replace(OPENED, members=("a", "c"))))


def test_payload_that_could_not_be_stored_is_to_be_fetched() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.merged([0, 1, 2])
    body = committed_round(0, 1, [], ballot=FIRST, digest=PAYLOAD)
    assert place.participant.is_storing(body)
    place.participant.payload_not_stored(1, FIRST)
    place.participant.payload_not_stored(0, SECOND_BALLOT)
    assert place.participant.is_storing(body), "that was another round's"
    place.participant.payload_not_stored(0, FIRST)
    assert not place.participant.is_storing(body)


def test_merged_stripe_of_a_number_that_the_ballot_does_not_have_is_ignored() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    assert place.merged([0, 99, 2]) == []
    assert place.merged([1]) == [StorePayload(FIRST, 0, 1, PAYLOAD, STRIPES)]
    early = Place()
    assert early.merged([0, 99, 2]) == []
    assert early.open(replace(OPENED, members=("a", "c"))) == []
    assert early.merged([1]) == [StorePayload(FIRST, 0, 1, PAYLOAD, STRIPES)]


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("blocks", [(2, 3), (0, 4), (3, 4), (0, 2)])
def test_other_blocks_than_the_ballots_are_no_stripe_of_a_contribution(
    blocks: tuple[int, int], *, is_early: bool
) -> None:
    """A sender that says the right number and sends other blocks would hold up the reduction for ever."""
    place, announcement = Place(), replace(OPENED, members=("a", "c"))
    wrong = ContributionStripeArrived(FIRST, 1, contribution("c"), blocks)
    if not is_early:
        place.open(announcement)
    place.participant.stripe_arrived(wrong)
    effects = place.open(announcement) if is_early else place.go()
    assert told(effects) == []
    place.stripes("a")
    assert place.decide("ac") == []
    assert any(isinstance(effect, ReduceStripe) for effect in place.stripes("c"))


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("cut", [Stripe("a", 2, 4), Stripe("c", 2, 4), Stripe("b", 2, 3), Stripe("b", 0, 4)])
def test_a_merged_stripe_of_another_sender_or_of_other_blocks_is_ignored(cut: Stripe, *, is_early: bool) -> None:
    place, announcement = Place(), replace(OPENED, members=("a", "c"))
    wrong = MergedStripeArrived(FIRST, 1, 0, 1, b"x" * 32, cut, (1.0,))
    if is_early:
        place.participant.merged_arrived(wrong)
        place.open(announcement)
        assert place.merged([0, 2]) == []
    else:
        place.open(announcement)
        place.merged([0, 2])
        place.participant.merged_arrived(wrong)
        assert place.go() == []
    assert place.merged([1]) == [StorePayload(FIRST, 0, 1, PAYLOAD, STRIPES)]


def test_merged_stripes_that_overtake_their_ballot_are_remembered() -> None:
    place = Place()
    assert place.merged([0, 1, 2]) == []
    assert place.open(replace(OPENED, members=("a", "c"))) == [StorePayload(FIRST, 0, 1, PAYLOAD, STRIPES)]


def test_a_leader_that_names_a_version_far_ahead_holds_up_nobody_after_it() -> None:
    place, ahead = Place(), replace(OPENED, version=2**40)
    assert place.open(ahead) == []
    assert place.open(replace(OPENED, ballot=FIRST)) == [], "no later ballot"
    later = replace(OPENED, ballot=Ballot(FIRST.term + 1, 1))
    closed, snapshot = place.open(later)
    assert closed == CloseBallot(FIRST, 0, 2**40, committed=False)
    assert snapshot == TakeSnapshot(0, 1, 0)
    assert place.open(ahead) == []
    assert place.participant.rounds[0].version == 1


def test_equal_payload_of_a_later_ballot_is_not_stored_twice() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.merged([0, 1, 2])
    place.versions.payload_stored(0, 1, PAYLOAD)
    place.open(replace(AGAIN, members=("a", "c")))
    durable, *draws = place.merged([0, 1, 2], SECOND_BALLOT)
    assert durable == Send("a", PayloadDurable(SECOND_BALLOT, PAYLOAD))
    assert {type(draw.message) for draw in draws if isinstance(draw, Send)} == {AuditDrawn}, (
        "it is this ballot's drawer"
    )


def test_merged_stripes_of_a_lower_ballot_do_not_mix_with_the_current_one() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.merged([0, 1])
    place.open(replace(AGAIN, members=("a", "c")))
    assert place.merged([2]) == []
    assert place.merged([2], SECOND_BALLOT) == []


def test_early_stripes_are_limited_and_the_oldest_go() -> None:
    place = Place()
    for number in range(EARLY_MAX + 1):
        place.stripes("a", Ballot(3, number))
    assert told(place.open(replace(OPENED, ballot=Ballot(3, 0), members=("a",)))) == []
    assert told(place.open(replace(OPENED, ballot=Ballot(3, 5), members=("a",)))) == [
        StripesReceived(Ballot(3, 5), "a", 1, 1)
    ]


# ---- commit ----------------------------------------------------------------------------------------------------------


def test_applied_round_closes_the_ballot_that_committed_and_the_others() -> None:
    place = Place()
    place.open()
    effects = place.apply(committed_round(0, 1, [], ballot=FIRST))
    assert effects == [CloseBallot(FIRST, 0, 1, committed=True)]
    place = Place()
    place.open(AGAIN)
    effects = place.apply(committed_round(0, 1, [], ballot=FIRST))
    assert effects == [CloseBallot(SECOND_BALLOT, 0, 1, committed=False), CloseBallot(FIRST, 0, 1, committed=True)]


def test_committed_round_is_not_closed_before_it_is_applied() -> None:
    place = Place()
    place.open()
    place.commit(committed_round(0, 1, [], ballot=FIRST))
    assert place.go() == []
    assert place.participant.open_versions() == {}


def test_open_rounds_are_known_to_a_new_leader() -> None:
    place = Place()
    assert place.participant.open_versions() == {}
    place.open()
    assert place.participant.open_versions() == {0: 1}


def test_reason_of_an_open_round_follows_what_happens() -> None:
    place = Place()
    reasons = []

    def look() -> None:
        ((fragment, version, _, reason),) = place.participant.open_rounds()
        assert (fragment, version) == (0, 1)
        reasons.append(reason)

    assert place.participant.open_rounds() == []
    place.participant.learner_changed(status(12, f0=position(step=3)))
    place.open()
    look()
    place.participant.learner_changed(status(12))
    place.go()
    look()
    place.take(replace(OWN, step_to=12))
    look()
    place.stripes(REGIONS)
    place.decide()
    look()
    place.merged([0, 1, 2])
    look()
    place.versions.payload_stored(0, 1, PAYLOAD)
    look()
    assert reasons == [
        "waits for the learner",
        "waits for the learner's snapshot",
        "waits for the decision of a",
        "waits for merged stripes of a, b, c",
        "writes the payload",
        "waits for the commit",
    ]


def test_ballot_of_a_round_that_is_over_is_ignored() -> None:
    place = Place()
    place.apply(committed_round(0, 1, [], ballot=FIRST))
    assert place.open(AGAIN) == []
    assert place.participant.open_versions() == {}


def test_bytes_that_come_after_the_round_are_freed() -> None:
    place = Place()
    place.apply(committed_round(0, 1, [], ballot=FIRST))
    assert place.stripes("a", SECOND_BALLOT) == [CloseBallot(SECOND_BALLOT, 0, 1, committed=False)]
    assert place.merged([0], SECOND_BALLOT) == [CloseBallot(SECOND_BALLOT, 0, 1, committed=False)]


@pytest.mark.parametrize(
    ("stripes", "reason"),
    [
        ((Stripe("a", 0, 2), Stripe("b", 2, 4), Stripe("c", 4, 6)), "stripes of 6 blocks for a fragment of 5"),
        (STRIPES[:2], "stripes of 4 blocks"),
        ((), "stripes of 0 blocks"),
        ((Stripe("a", 0, 2), Stripe("b", 3, 5)), "from block 3 where 2 is next"),
        ((Stripe("a", 0, 3), Stripe("b", 2, 5)), "from block 2 where 3 is next"),
        ((*STRIPES[:2], Stripe("x", 4, 5)), "x is no region"),
    ],
)
def test_a_ballot_whose_stripes_are_none_of_the_fragment_is_not_followed(
    stripes: tuple[Stripe, ...], reason: str
) -> None:
    """A contribution can't be cut by them: a leader that lies would end every daemon that tried."""
    place = Place()
    place.participant.ballot_opened("a", replace(OPENED, stripes=stripes))
    [note] = place.go()
    assert isinstance(note, Note)
    assert note.is_alarm
    assert note.text.startswith("ballot of a: ")
    assert reason in note.text
    place.participant.ballot_opened("a", OPENED)
    assert place.go() == [TAKE]


# ---- error feedback --------------------------------------------------------------------------------------------------

ROWS = ((1.0,) * pieces(0), (2.0,) * pieces(0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "the ballot is for version 1"),
        ({"contributions": (), "coefficients": ()}, "the ballot is for version 1"),
        ({"contributions": (contribution("a"), contribution("a"))}, "the ballot is for version 1"),
        ({"contributions": (contribution("a"), contribution("x"))}, "x's contribution to fragment 0 has no part in it"),
        ({"contributions": (contribution("a", 1), contribution("b"))}, "contribution to fragment 1 has no part in it"),
        ({"coefficients": ROWS[:1]}, "for 2 contributions"),
        ({"coefficients": (ROWS[0], ROWS[1][1:])}, "for 2 contributions"),
    ],
)
def test_a_decision_that_is_none_about_the_ballot_is_not_carried_out(change: dict[str, Any], reason: str) -> None:
    place = Place()
    place.open()
    place.stripes("ab")
    decision = MergeDecided(FIRST, 0, 1, (contribution("a"), contribution("b")), ROWS)
    place.participant.merge_decided(replace(decision, **change))
    [note] = place.go()
    assert isinstance(note, Note)
    assert note.is_alarm
    assert reason in note.text
    place.participant.merge_decided(decision)
    assert [type(effect) for effect in place.go()] == [ReduceStripe]


FEEDBACK = replace(SETTINGS, error_feedback=True)


def second_round(place: Place, stripes: tuple[Stripe, ...] = STRIPES) -> Ballot | None:
    """Reduce version 2 and return whose residual is added."""
    announcement = BallotOpened(Ballot(3, 7), 0, 2, ("a",), stripes)
    place.participant.ballot_opened("a", announcement)
    offer = contribution("a", base=1, steps=(10, 20))
    index = next(place for place, stripe in enumerate(stripes) if stripe.reducer == "b")
    blocks = (stripes[index].block_start, stripes[index].block_stop)
    place.participant.stripe_arrived(ContributionStripeArrived(Ballot(3, 7), index, offer, blocks))
    place.participant.merge_decided(MergeDecided(Ballot(3, 7), 0, 2, (offer,), ((1.0,) * pieces(0),)))
    (order,) = [effect for effect in place.go() if isinstance(effect, ReduceStripe)]
    return order.residual_of


def first_round(settings: RunSettings, *, committed: Ballot = FIRST, reduces: bool = True) -> Place:
    place = Place(settings)
    place.open(replace(OPENED, members=("a",)))
    place.stripes("a")
    if reduces:
        place.decide("a")
        place.participant.stripe_reduced(ReductionDone(FIRST, 1, (1.0,), ((1.0,),), b"m" * 32))
    place.apply(committed_round(0, 1, [contribution("a")], ballot=committed))
    return place


def test_residual_of_the_version_before_is_added_over_the_same_blocks() -> None:
    assert second_round(first_round(FEEDBACK)) == FIRST


def test_residual_is_added_only_if_asked_for() -> None:
    assert second_round(first_round(SETTINGS)) is None


def test_residual_of_an_abandoned_ballot_is_never_added() -> None:
    assert second_round(first_round(FEEDBACK, committed=SECOND_BALLOT)) is None


def test_residual_needs_the_reduction_to_have_happened_here() -> None:
    assert second_round(first_round(FEEDBACK, reduces=False)) is None


def test_residual_is_dropped_when_the_blocks_move() -> None:
    assert second_round(first_round(FEEDBACK), (Stripe("a", 0, 1), Stripe("b", 1, 4), Stripe("c", 4, 5))) is None


def test_residual_is_dropped_when_a_version_lies_between() -> None:
    place = first_round(FEEDBACK)
    place.apply(committed_round(0, 2, [], ballot=Ballot(3, 5)))
    announcement = BallotOpened(Ballot(3, 7), 0, 3, ("a",), STRIPES)
    place.participant.ballot_opened("a", announcement)
    offer = contribution("a", base=2, steps=(10, 20))
    place.participant.stripe_arrived(ContributionStripeArrived(Ballot(3, 7), 1, offer, (2, 4)))
    place.participant.merge_decided(MergeDecided(Ballot(3, 7), 0, 3, (offer,), ((1.0,) * pieces(0),)))
    (order,) = [effect for effect in place.go() if isinstance(effect, ReduceStripe)]
    assert order.residual_of is None
