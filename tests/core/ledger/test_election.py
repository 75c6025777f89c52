"""Elections of the ledger core: pre-vote, votes, what is sent when (Raft 5.2, 5.4.1; dissertation 9.6)."""

import pytest

from diloco_node.core.cadence import CEILING
from diloco_node.core.events import LedgerPersisted, LinkChanged, PersistLedger, TimerFired
from diloco_node.core.ledger.election import LASTING_TIMEOUTS, Role, ballot_paper
from diloco_node.core.ledger.write_gate import PENDING_MESSAGES_MAX, WriteGate
from diloco_node.core.messages import RequestVote, RequestVoteReply
from diloco_node.core.types import LeaderBody
from tests.kit.ledger_kit import (
    TIMEOUT_NS,
    a_candidate,
    a_core,
    a_leader,
    a_round,
    ack,
    append_entries,
    arrive,
    chain,
    disk_of,
    sends,
    vote,
    vote_request,
    write_all,
    writes,
)


def test_a_follower_that_hears_nobody_asks_after_one_to_two_timeouts() -> None:
    wakes = {a_core(seed=seed).wake_at_ns for seed in range(300)}
    assert min(wakes) >= TIMEOUT_NS
    assert max(wakes) <= 2 * TIMEOUT_NS
    assert len(wakes) > 200
    assert min(wakes) < 1.05 * TIMEOUT_NS
    assert max(wakes) > 1.95 * TIMEOUT_NS


def test_voters_with_one_seed_still_draw_different_timeouts() -> None:
    assert len({a_core(name, tuple("abcde")).wake_at_ns for name in "abcde"}) == 5


def test_before_its_time_a_timer_does_nothing() -> None:
    core = a_core()
    wake_ns = core.wake_at_ns
    assert core.handle(TimerFired(), now_ns=wake_ns - 1) == []
    assert core.handle(TimerFired(), now_ns=wake_ns) != []


def test_a_pre_vote_is_asked_for_the_next_term_and_changes_nothing() -> None:
    core = a_core(entries=chain(1, 3))
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert sends(effects) == [(peer, vote_request(4, True, 2, 3)) for peer in ("b", "c")]
    assert writes(effects) == []
    assert core.term == 3
    assert core.role is Role.ASKING


def test_answering_a_pre_vote_changes_nothing() -> None:
    core = a_core(entries=chain(1))
    effects = arrive(core, "b", vote_request(7, True, 1, 1))
    assert sends(effects) == [("b", vote(7, True, True))]
    assert core.term == 1


def test_a_pre_vote_is_granted_to_two_candidates_at_once() -> None:
    core = a_core()
    assert sends(arrive(core, "b", vote_request(1, True, 0, 0))) == [("b", vote(1, True, True))]
    assert sends(arrive(core, "c", vote_request(1, True, 0, 0))) == [("c", vote(1, True, True))]


@pytest.mark.parametrize(("term", "granted"), [(2, False), (3, False), (4, True)])
def test_a_pre_vote_needs_a_term_above_the_voters_own(term: int, granted: bool) -> None:
    core = a_core(entries=chain(3))
    effects = arrive(core, "b", vote_request(term, True, 1, 3))
    assert sends(effects) == [("b", vote(term if granted else 3, True, granted))]


def test_who_hears_a_leader_refuses_pre_votes_for_one_election_timeout() -> None:
    core = a_core()
    log = chain(1)
    write_all(core, arrive(core, "b", append_entries(log, 1, 1, term=1), now_ns=100), now_ns=100)
    for now_ns, granted in ((100 + TIMEOUT_NS - 1, False), (100 + TIMEOUT_NS, True)):
        effects = arrive(core, "c", vote_request(2, True, 1, 1), now_ns)
        assert sends(effects) == [("c", vote(2 if granted else 1, True, granted))]


def test_a_leader_refuses_pre_votes() -> None:
    core, _, now_ns = a_leader()
    effects = arrive(core, "c", vote_request(core.term + 1, True, 99, 99), now_ns)
    assert sends(effects) == [("c", vote(core.term, True, False))]
    assert core.is_leader


def test_who_is_refused_with_a_newer_term_adopts_it() -> None:
    core = a_core()
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    effects = arrive(core, "b", vote(8, True, False), core.wake_at_ns)
    assert core.term == 8
    assert core.role is Role.FOLLOWER
    assert writes(effects)[0].term == 8


def test_a_majority_of_pre_votes_starts_the_election_and_a_minority_does_not() -> None:
    core = a_core("a", tuple("abcde"))
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", vote(1, True, True))
    arrive(core, "b", vote(1, True, True))
    assert core.role is Role.ASKING
    arrive(core, "c", vote(1, True, True))
    assert core.role is Role.CANDIDATE
    assert core.term == 1


def test_pre_votes_are_no_votes_and_the_other_way_round() -> None:
    core, _ = a_candidate()
    arrive(core, "c", vote(1, True, True))
    assert core.role is Role.CANDIDATE
    core = a_core()
    core.handle(TimerFired(), now_ns=core.wake_at_ns)
    arrive(core, "b", vote(1, False, True))
    assert core.role is Role.ASKING


def test_a_candidate_asks_only_when_term_and_own_vote_are_on_disk() -> None:
    core, effects = a_candidate()
    assert writes(effects) == [PersistLedger(1, 1, ballot_paper("a", disk_of("a")), 0, ())]
    assert sends(effects) == []
    effects = core.handle(LedgerPersisted(1), now_ns=0)
    assert sends(effects) == [(peer, vote_request(1, False, 0, 0)) for peer in ("b", "c")]


def test_a_vote_that_changed_is_not_on_disk_before_its_write_has_begun() -> None:
    gate = WriteGate()
    assert gate.is_hard_durable
    gate.change_hard_state()
    assert not gate.is_hard_durable


def test_a_vote_is_sent_only_when_it_is_on_disk() -> None:
    core = a_core()
    effects = arrive(core, "b", vote_request(4, False, 0, 0))
    assert writes(effects) == [PersistLedger(1, 4, ballot_paper("b", disk_of("b")), 0, ())]
    assert sends(effects) == []
    assert sends(core.handle(LedgerPersisted(1), now_ns=0)) == [("b", vote(4, False, True))]


def test_a_newer_term_is_sent_only_when_it_is_on_disk() -> None:
    core = a_core(entries=chain(1))
    effects = arrive(core, "b", append_entries(chain(1), 2, 1, term=5))
    assert writes(effects) == [PersistLedger(1, 5, "", 0, ())]
    assert sends(effects) == []
    # Also what is asked meanwhile waits.
    assert sends(arrive(core, "c", vote_request(6, True, 1, 1))) == []
    assert sends(core.handle(LedgerPersisted(1), now_ns=0)) == [("b", ack(5, 1, True, 1)), ("c", vote(5, True, False))]


def test_messages_that_wait_for_the_disk_are_limited() -> None:
    core = a_core()
    arrive(core, "b", vote_request(4, False, 0, 0))
    for _ in range(PENDING_MESSAGES_MAX + 100):
        arrive(core, "c", vote_request(9, True, 0, 0))
    assert len(sends(core.handle(LedgerPersisted(1), now_ns=0))) == PENDING_MESSAGES_MAX


def test_one_vote_per_term_first_come_first_served() -> None:
    core = a_core()
    write_all(core, arrive(core, "b", vote_request(1, False, 0, 0)))
    assert sends(arrive(core, "c", vote_request(1, False, 0, 0))) == [("c", vote(1, False, False))]
    assert sends(arrive(core, "b", vote_request(1, False, 0, 0))) == [("b", vote(1, False, True))]
    assert sends(write_all(core, arrive(core, "c", vote_request(2, False, 0, 0)))) == [("c", vote(2, False, True))]


def test_a_vote_in_a_term_that_is_known_already_is_written_too() -> None:
    core = a_core(term=1)
    effects = arrive(core, "b", vote_request(1, False, 0, 0))
    assert (writes(effects), sends(effects)) == ([PersistLedger(1, 1, ballot_paper("b", disk_of("b")), 0, ())], [])


def test_a_candidate_of_an_older_term_gets_no_vote() -> None:
    core = a_core(term=5)
    effects = arrive(core, "b", vote_request(4, False, 9, 4))
    assert sends(effects) == [("b", vote(5, False, False))]


def test_a_vote_that_comes_before_the_own_one_is_on_disk_has_to_wait_for_it() -> None:
    core, effects = a_candidate()
    arrive(core, "b", vote(1, False, True))
    assert not core.is_leader
    write_all(core, effects)
    assert core.is_leader


def test_the_vote_survives_a_restart() -> None:
    core = a_core(term=1, voted_for=ballot_paper("b", disk_of("b")))
    assert sends(arrive(core, "c", vote_request(1, False, 0, 0))) == [("c", vote(1, False, False))]
    assert sends(arrive(core, "b", vote_request(1, False, 0, 0))) == [("b", vote(1, False, True))]


@pytest.mark.parametrize(
    ("last_index", "last_term", "granted"),
    [(3, 2, True), (2, 2, False), (4, 2, True), (99, 1, False), (1, 3, True), (3, 1, False)],
)
@pytest.mark.parametrize("pre_vote", [True, False])
def test_a_vote_goes_only_to_a_log_at_least_as_complete(
    last_index: int, last_term: int, granted: bool, pre_vote: bool
) -> None:
    core = a_core(entries=chain(1, 1, 2))
    effects = arrive(core, "b", vote_request(9, pre_vote, last_index, last_term))
    answers = sends(effects) + sends(write_all(core, effects))
    assert [message.granted for _, message in answers if isinstance(message, RequestVoteReply)] == [granted]


def test_staged_entries_are_in_no_vote() -> None:
    log = chain(1, 1, bodies=lambda index, term: a_round(index))
    core = a_core(has_payload=lambda body: body == log[0].body)
    write_all(core, arrive(core, "b", append_entries(log, 1, 2, term=1)))
    now_ns = core.wake_at_ns
    effects = core.handle(TimerFired(), now_ns=now_ns)
    assert sends(effects)[0] == ("b", vote_request(2, True, 1, 1))
    # Nor do they make this voter refuse a candidate that does not have them.
    assert sends(arrive(core, "c", vote_request(2, True, 1, 1), now_ns)) == [("c", vote(2, True, True))]


def test_granting_a_vote_puts_off_the_own_election_and_refusing_does_not() -> None:
    core = a_core(entries=chain(1))
    wake_ns = core.wake_at_ns
    arrive(core, "b", vote_request(2, False, 0, 0), now_ns=wake_ns - 1)
    assert core.wake_at_ns == wake_ns
    arrive(core, "b", vote_request(3, False, 1, 1), now_ns=wake_ns - 1)
    assert core.wake_at_ns >= wake_ns - 1 + TIMEOUT_NS


def test_a_candidate_that_gets_no_majority_asks_again_with_a_pre_vote() -> None:
    core, effects = a_candidate()
    write_all(core, effects)
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert sends(effects) == [(peer, vote_request(2, True, 0, 0)) for peer in ("b", "c")]
    assert core.term == 1


def test_votes_of_another_term_do_not_count() -> None:
    core, effects = a_candidate()
    write_all(core, effects)
    arrive(core, "b", vote(0, False, True))
    arrive(core, "b", vote(2, False, True))
    assert core.role is Role.CANDIDATE
    arrive(core, "b", vote(1, False, True))
    assert core.is_leader


def test_a_candidate_follows_the_leader_of_its_term() -> None:
    core, effects = a_candidate()
    write_all(core, effects)
    arrive(core, "c", append_entries(chain(1), 1, 1, term=1))
    assert (core.role, core.leader, core.term) == (Role.FOLLOWER, "c", 1)


def test_a_single_voter_leads_by_itself_and_never_steps_down() -> None:
    core = a_core("a", ("a",))
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert not core.is_leader  # its own vote is not on disk yet
    write_all(core, effects)
    assert core.is_settled
    assert [entry.body for entry in core.take_committed()] == [LeaderBody("a")]
    for _ in range(20):
        core.handle(TimerFired(), now_ns=core.wake_at_ns + 5)
    assert core.is_leader


def test_terms_that_come_to_nothing_double_the_timeout_and_commits_halve_it() -> None:
    core = a_core()
    timeouts_ns = []
    for term in range(1, 12):
        arrive(core, "b", append_entries((), 1, 0, term=term), now_ns=term)
        arrive(core, "b", append_entries((), 1, 0, term=term), now_ns=term)
        timeouts_ns.append(core.wake_at_ns - term)
    for timeout_ns, factor in zip(timeouts_ns, (1, 1, 2, 4, 8, *[CEILING] * 6), strict=True):
        assert factor * TIMEOUT_NS <= timeout_ns <= 2 * factor * TIMEOUT_NS
    entries = chain(*[11] * 9)
    for last in range(1, 10):
        arrive(core, "b", append_entries(entries, last, last, term=11, sequence=last, commit=last - 1), now_ns=20)
        write_all(core, core.payload_arrived(now_ns=20), 20)
    arrive(core, "b", append_entries(entries, 10, 9, term=11, sequence=10, commit=9), now_ns=20)
    assert core.wake_at_ns <= 20 + 2 * TIMEOUT_NS


def test_a_term_that_lasted_did_not_come_to_nothing() -> None:
    core = a_core()
    now_ns = 0
    for term in range(1, 9):
        now_ns += (LASTING_TIMEOUTS + 1) * TIMEOUT_NS
        arrive(core, "b", append_entries((), 1, 0, term=term), now_ns=now_ns)
    core.handle(LinkChanged("b", False), now_ns=now_ns)
    arrive(core, "b", append_entries((), 1, 0, term=8), now_ns=now_ns)
    assert core.wake_at_ns <= now_ns + 2 * TIMEOUT_NS


def test_a_voter_that_stood_still_takes_no_silence_for_the_leaders_end() -> None:
    core = a_core(term=1)
    arrive(core, "b", append_entries(chain(1), 1, 0, term=1), now_ns=500)
    now_ns = 500 + 5 * TIMEOUT_NS
    core.excuse(5 * TIMEOUT_NS, now_ns=now_ns)
    assert core.handle(TimerFired(), now_ns=now_ns) == []
    assert sends(arrive(core, "c", vote_request(2, True, 0, 0), now_ns)) == [("c", vote(1, True, False))]
    core.excuse(5 * TIMEOUT_NS, now_ns=now_ns)
    effects = core.handle(TimerFired(), now_ns=core.wake_at_ns)
    assert {message.pre_vote for _, message in sends(effects) if isinstance(message, RequestVote)} == {True}


def test_a_leader_that_stood_still_waits_for_the_answers_that_it_has_not_read() -> None:
    core, _, now_ns = a_leader()
    late_ns = now_ns + 5 * TIMEOUT_NS
    core.excuse(5 * TIMEOUT_NS, now_ns=late_ns)
    core.handle(TimerFired(), now_ns=late_ns)
    assert core.is_leader
    while core.is_leader:
        core.handle(TimerFired(), now_ns=core.wake_at_ns)
        now_ns = max(now_ns, core.wake_at_ns)
    assert now_ns <= late_ns + 40 * TIMEOUT_NS
