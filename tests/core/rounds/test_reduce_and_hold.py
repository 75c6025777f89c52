"""A region reduces in order, stores, and vouches for what it stored. Region b of three."""

from dataclasses import replace
from typing import Any

import pytest

from diloco_node.core.events import (
    CloseBallot,
    ContributionStripeArrived,
    MergedStripeArrived,
    Note,
    PayloadStored,
    ReduceStripe,
    ReductionDone,
    Send,
    SendMerged,
    StorePayload,
    TakeSnapshot,
)
from diloco_node.core.messages import (
    AuditDrawn,
    MergeDecided,
    MergedReceived,
    MergedStripe,
    PayloadDurable,
    Receipt,
    ReductionReported,
    StripesReceived,
)
from diloco_node.core.rounds import participant
from diloco_node.core.rounds.followed import EARLY_MAX
from diloco_node.core.types import Ballot, Stripe
from tests.kit.participant_kit import (
    AGAIN,
    FIRST,
    OPENED,
    PAYLOAD,
    SECOND_BALLOT,
    STRIPES,
    Place,
    told,
)
from tests.kit.rounds_kit import (
    REGIONS,
    committed_round,
    contribution,
    pieces,
)


def received(*names: str, ballot: Ballot = FIRST) -> StripesReceived:
    """Their first contributions are whole."""
    return StripesReceived(ballot, tuple(Receipt(name, 1, 1) for name in names))


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ballots are large ones."""
    monkeypatch.setattr(participant, "PROMPT_MEMBERS_MAX", 1)


# ---- reduce ----------------------------------------------------------------------------------------------------------


def test_in_a_small_ballot_a_reducer_says_at_once_what_it_holds() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    assert told(place.stripes("c")) == [received("c")]
    assert told(place.stripes("a")) == [received("a", "c")]
    assert place.tick() == []


@pytest.mark.usefixtures("_large")
def test_reducer_says_what_it_holds_and_reduces_when_all_is_there() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    assert place.stripes("c") == [], "one message for each contribution would be too many for the leader"
    assert told(place.tick()) == [received("c")]
    assert place.decide("ac") == []
    (order,) = place.stripes("a")
    assert isinstance(order, ReduceStripe)
    assert [contribution.learner for contribution in order.contributions] == ["a", "c"], "by name, not as they came"
    assert order.coefficients == ((0.0,) * pieces(0), (1.0,) * pieces(0))
    assert (order.stripe, order.block_start, order.block_stop) == (1, 2, 4)
    assert place.decide("ac") == [], "once"
    assert told(place.tick()) == [received("a", "c")]
    assert place.tick() == [], "once"
    place.participant.stripe_reduced(ReductionDone(FIRST, 1, (1.0,), ((1.0,), (2.0,)), b"m" * 32))
    place.go()
    place.stripes("b")
    assert place.tick() == [], "the report of the sum says it"


@pytest.mark.usefixtures("_large")
def test_a_quick_reducer_of_a_large_ballot_tells_its_sum_alone() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("ac")
    place.decide("ac")
    place.participant.stripe_reduced(ReductionDone(FIRST, 1, (1.0,), ((1.0,), (2.0,)), b"m" * 32))
    place.go()
    assert place.tick() == []


@pytest.mark.usefixtures("_large")
def test_a_reducer_tells_the_newest_contribution_of_a_learner() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("ac")
    newer = contribution("c", incarnation=2, steps=(0, 3))
    place.participant.stripe_arrived(ContributionStripeArrived(FIRST, 1, newer, (2, 4)))
    assert told(place.tick()) == [StripesReceived(FIRST, (Receipt("a", 1, 1), Receipt("c", 2, 1)))]
    assert told(place.open(replace(OPENED, members=("a", "c"))))[:1] == [
        StripesReceived(FIRST, (Receipt("a", 1, 1), Receipt("c", 2, 1)))
    ]


@pytest.mark.usefixtures("_large")
def test_a_reducer_of_several_stripes_holds_a_contribution_when_it_has_them_all() -> None:
    place = Place()
    cut = (Stripe("a", 0, 1), Stripe("b", 1, 2), Stripe("b", 2, 3), Stripe("c", 3, 5))
    place.open(replace(OPENED, members=("a", "c"), stripes=cut))
    assert place.decide("ac") == []
    assert place.stripes("a", index=1, cut=cut) == []
    (order,) = place.stripes("c", index=1, cut=cut)
    assert isinstance(order, ReduceStripe)
    assert (order.stripe, order.block_start, order.block_stop) == (1, 1, 2), "it need not wait for the other stripe"
    assert place.tick() == []
    (order,) = place.stripes("ca", index=2, cut=cut)
    assert isinstance(order, ReduceStripe)
    assert told(place.tick()) == [received("a", "c")]
    assert told(place.open(replace(OPENED, members=("a", "c"), stripes=cut))) == [
        received("a", "c"),
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
        received("a", "c"),
    ]
    assert any(isinstance(effect, ReduceStripe) for effect in place.decide("ac"))


def test_stripe_stays_for_the_next_ballot_over_the_same_blocks() -> None:
    place = Place()
    place.open(replace(OPENED, members=("a", "c")))
    place.stripes("ac")
    effects = place.open(replace(AGAIN, members=("a", "c")))
    assert told(effects) == [received("a", "c", ballot=SECOND_BALLOT)]
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
    assert place.reduced() == [Send("a", report), SendMerged(MergedStripe(FIRST, 1, 0, 1, b"m" * 32, 2, 4), ("a", "c"))]
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
        received("a", ballot=Ballot(3, 5))
    ]


# ---- decisions that are none -----------------------------------------------------------------------------------------

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
