"""The end of the run, as the leader of rounds brings it about."""

from dataclasses import replace
from functools import partial

import pytest

from diloco_node.core.messages import (
    Contributed,
    Declined,
    PayloadDurable,
    ReductionReported,
)
from diloco_node.core.rounds.agenda import GIVE_UP_BALLOTS, READY_STEPS
from diloco_node.core.types import (
    NO_STEPS,
    FinishedBody,
)
from tests.kit.leader_kit import DUE, Office, ballots
from tests.kit.rounds_kit import (
    MS,
    REGIONS,
    SECOND,
    SETTINGS,
    contribution,
    pieces,
    position,
    status,
)


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


def test_a_new_leader_at_the_end_opens_again_as_last_rounds_what_was_open() -> None:
    for settings, reason in ((replace(SETTINGS, steps_max=20), None), (SETTINGS, "enough")):
        office = Office(settings)
        office.report(status(20))
        office.leader.end()
        office.leader.begin(4, {0: 1}, now_ns=office.now_ns, end_reason=reason)
        office.report(status(21))
        office.go()
        assert {fragment: round_.is_last for fragment, round_ in office.leader.rounds.items()} == {0: True, 1: True}


def test_an_order_before_an_extension_commits_is_not_for_it() -> None:
    office = Office(replace(SETTINGS, steps_max=400))
    office.commit(FinishedBody((0, 0), "200 of 200 steps", steps_max=200))
    office.report(status(200))
    office.go()
    extension = office.leader.proposals.popleft()
    office.leader.request_finish("enough")
    office.commit(extension)
    office.report(status(202))
    office.go()
    assert not office.leader.is_ending
    assert not office.leader.rounds[0].is_last


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
        office.report(status(4 + (office.now_ns - begun_ns) // SECOND))
        for again in ballots(office.go(SETTINGS.heartbeat_ns)):
            if again.fragment == 0:
                office.contribute(again)
                office.hold(again)  # and no reducer ever merges it
    assert list(office.leader.proposals) == [FinishedBody((0, 0), "enough")]
    assert office.leader.rounds == {}
    assert office.now_ns - begun_ns >= allowed_ns
    given_up = [note.fragment for note in office.notes if "the run ends without this round" in note.text]
    assert given_up == [0, 1], "nobody contributes to the other one"
    office.go(SETTINGS.heartbeat_ns)
    assert len(office.leader.proposals) == 1, "once"


def test_the_last_round_of_slow_learners_has_the_time_that_it_takes() -> None:
    slow = replace(status(12), step_time_ns=20 * SECOND)
    office = Office()
    office.report(slow)
    office.leader.request_finish("enough")
    office.go()
    assert {fragment: round_.is_last for fragment, round_ in office.leader.rounds.items()} == {0: True, 1: True}
    begun_ns = office.now_ns
    shortest_ns = READY_STEPS * slow.step_time_ns + GIVE_UP_BALLOTS * SETTINGS.ballot_deadline_min_ns
    while office.now_ns - begun_ns < shortest_ns + 10 * SECOND:
        office.report(slow)
        office.go(SETTINGS.heartbeat_ns)
    assert [note.text for note in office.notes if "without this round" in note.text] == []
    finish(office)
    assert office.history.versions == [1, 1]
    office.report(slow)
    office.go()
    assert list(office.leader.proposals) == [FinishedBody((1, 1), "enough")]


def test_a_learner_that_pauses_is_waited_for_before_it_is_sure_that_it_pauses_and_one_that_steps_is_not() -> None:
    slow = partial(replace, step_time_ns=SECOND)
    for is_stepping in (False, True):
        office = Office(replace(SETTINGS, steps_max=20))
        office.report(slow(status(20)))
        office.go()
        begun_ns, members = office.now_ns, set()
        for _ in range(100):
            step = 20 + (office.now_ns - begun_ns) // SECOND
            office.report(slow(status(step)), ("a", "c"))
            office.report(slow(status(step if is_stepping else 20)), ("b",))
            for announcement in ballots(office.go(SETTINGS.heartbeat_ns)):
                members.add(announcement.members)
                office.contribute(announcement, ("a", "c"))
        assert (("a", "c") in members) is is_stepping
        assert office.leader.rounds.keys() == (set(range(2)) if is_stepping else set())
        office.report(slow(status(step + 1)))
        office.go(SETTINGS.heartbeat_ns)
        assert is_stepping or [round_.members for round_ in office.leader.rounds.values()] == [REGIONS, REGIONS]


def test_who_has_not_stepped_since_a_ballot_began_pauses_only_if_its_deadline_has_passed() -> None:
    office = Office(replace(SETTINGS, steps_max=20))
    office.report(replace(status(20), step_time_ns=SECOND))
    office.go()
    round_ = office.leader.rounds[0]
    agenda = office.leader._agenda
    names = set(round_.missing_members())
    assert names
    assert agenda.pausing_members(round_, now_ns=round_.ballot_at_ns + 1) == ()
    assert names & {*agenda.pausing_members(round_, now_ns=round_.deadline_ns)}


@pytest.mark.parametrize(("reason", "is_told"), [(NO_STEPS, False), ("its disk is full", True)])
def test_who_had_nothing_to_give_to_the_last_round_is_not_named_for_steps_since(reason: str, is_told: bool) -> None:
    office = Office()
    office.report(status(4))
    office.leader.request_finish("enough")
    office.go()
    round_ = office.leader.rounds[0]
    givers = ("a", "b")
    office.answer("c", Declined(round_.ballot, reason))
    for name in givers:
        office.answer(name, Contributed(round_.ballot, contribution(name, 0, base=round_.version - 1, steps=(0, 3))))
    office.go()
    office.report(status(5))
    for index, stripe in enumerate(round_.stripes):
        rows = tuple((4.0 / len(round_.stripes),) * pieces(0) for _ in givers)
        office.answer(stripe.reducer, ReductionReported(round_.ballot, index, (1.0,) * pieces(0), rows, b"d" * 32))
    for name in REGIONS:
        office.answer(name, PayloadDurable(round_.ballot, round_.digest))
    office.go()
    office.commit(office.leader.proposals.popleft())
    office.go()
    alarms = [note.text for note in office.notes if "the run ends without the last steps of" in note.text]
    assert (
        alarms
        == [
            "the run ends without the last steps of c: their contributions to the last round did not come, "
            "or were refused"
        ]
        * is_told
    )
