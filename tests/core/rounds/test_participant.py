"""A region's part in a round: contribute once, answer again, close. Region b of three."""

from dataclasses import replace

import pytest

from diloco_node.core.events import (
    CloseBallot,
    Note,
    Send,
    SendContribution,
    SnapshotRefused,
    TakeSnapshot,
)
from diloco_node.core.messages import (
    Contributed,
    Declined,
    ReusedStripe,
)
from diloco_node.core.types import Stripe
from tests.kit.participant_kit import (
    AGAIN,
    FIRST,
    LACKS_ALL,
    OPENED,
    OWN,
    PAYLOAD,
    SECOND_BALLOT,
    STRIPES,
    TAKE,
    Place,
    told,
)
from tests.kit.rounds_kit import (
    REGIONS,
    committed_round,
    contribution,
    position,
    status,
)

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
