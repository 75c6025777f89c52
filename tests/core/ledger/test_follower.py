"""The ledger core as follower: what it stages, writes, acknowledges (Raft 5.3), and payloads that are missing."""

from dataclasses import replace

import pytest

from diloco_node.core.events import LedgerPersisted, LinkChanged, PersistLedger
from diloco_node.core.ledger.entries import ZERO_HASH, encode_entry
from diloco_node.core.ledger.log import STAGED_BYTES_MAX, STAGED_ENTRIES_MAX
from diloco_node.core.ledger.replication import BATCH_ENTRIES_MAX
from diloco_node.core.messages import AppendEntries
from diloco_node.core.types import Contribution, EntryBody, LeaderBody, Member, RoundBody
from tests.kit.ledger_kit import (
    HEARTBEAT_NS,
    TIMEOUT_NS,
    a_candidate,
    a_core,
    a_leader,
    a_round,
    ack,
    alarms,
    append_entries,
    arrive,
    chain,
    sends,
    vote,
    vote_request,
    write_all,
    writes,
)

# ---- the follower (Raft 5.3; design part 6) --------------------------------------------------------------------------


def test_a_follower_writes_first_and_acknowledges_then() -> None:
    core = a_core(term=1)
    log = chain(1, 1)
    effects = arrive(core, "b", append_entries(log, 1, 2, term=1, sequence=8))
    assert sends(effects) == [("b", ack(1, 8, True, 0))]
    assert writes(effects) == [PersistLedger(1, 1, "", 0, log)]
    assert sends(core.handle(LedgerPersisted(1), now_ns=0)) == [("b", ack(1, 8, True, 2))]


def test_an_entry_whose_payload_is_missing_is_neither_written_nor_acknowledged() -> None:
    log = chain(1, 1, 1, bodies=lambda index, term: a_round(index))
    on_disk = {a_round(1).payload_digest}
    core = a_core(term=1, has_payload=lambda body: isinstance(body, RoundBody) and body.payload_digest in on_disk)
    effects = arrive(core, "b", append_entries(log, 1, 3, term=1, commit=1))
    assert [entry.index for write in writes(effects) for entry in write.entries] == [1]
    write_all(core, effects)
    assert core.missing_payloads() == (a_round(2), a_round(3))
    assert (core.last_index, core.commit_index, core.cluster_commit_index) == (1, 1, 1)
    # The third is there before the second: it still has to wait for it.
    on_disk.add(a_round(3).payload_digest)
    assert core.payload_arrived(now_ns=0) == []
    assert core.missing_payloads() == (a_round(2),)
    on_disk.add(a_round(2).payload_digest)
    effects = core.payload_arrived(now_ns=0)
    assert [entry.index for write in writes(effects) for entry in write.entries] == [2, 3]
    assert sends(write_all(core, effects)) == [("b", ack(1, 1, True, 3))]
    assert [entry.index for entry in core.take_committed()] == [1]
    assert core.payload_arrived(now_ns=0) == []


def test_a_committed_entry_is_written_without_its_payload_and_not_acknowledged() -> None:
    log = chain(1, 1, 1, bodies=lambda index, term: a_round(index))
    on_disk = {a_round(1).payload_digest, a_round(3).payload_digest}
    core = a_core(term=1, has_payload=lambda body: isinstance(body, RoundBody) and body.payload_digest in on_disk)
    effects = arrive(core, "b", append_entries(log, 1, 3, term=1, commit=3))
    assert [entry.index for write in writes(effects) for entry in write.entries] == [1, 2, 3]
    assert sends(write_all(core, effects)) == [("b", ack(1, 1, True, 1))]
    assert (core.last_index, core.commit_index, core.cluster_commit_index) == (3, 1, 3)
    assert core.missing_payloads() == (a_round(2),)
    on_disk.add(a_round(2).payload_digest)
    assert sends(core.payload_arrived(now_ns=0)) == [("b", ack(1, 1, True, 3))]
    assert [entry.index for entry in core.take_committed()] == [1, 2, 3]


def test_heartbeats_are_answered_at_once_while_a_payload_is_missing() -> None:
    log = chain(1, bodies=lambda index, term: a_round(index))
    core = a_core(term=1, has_payload=lambda body: False)
    arrive(core, "b", append_entries(log, 1, 1, term=1))
    for sequence in range(2, 6):
        effects = arrive(core, "b", append_entries(log, 2, 1, term=1, sequence=sequence))
        assert sends(effects) == [("b", ack(1, sequence, True, 0))]


def test_what_is_staged_is_limited_in_entries() -> None:
    log = chain(*[1] * 300, bodies=lambda index, term: a_round(index))
    core = a_core(term=1, has_payload=lambda body: False)
    for first in range(1, 300, 60):
        arrive(core, "b", append_entries(log, first, first + 59, term=1))
    assert len(core.missing_payloads()) == STAGED_ENTRIES_MAX
    assert core.last_index == 0


def test_a_region_far_behind_looks_at_the_first_missing_rounds_of_each_fragment_only() -> None:
    """It asks after each event: a look at all of them would take the processor as long as it lags behind."""
    log = chain(*[1] * 600, bodies=lambda index, term: replace(a_round(index), fragment=index % 2))
    questions: list[EntryBody] = []

    def has_payload(body: EntryBody) -> bool:
        questions.append(body)
        return False

    core = a_core(term=1, has_payload=has_payload)
    for first in range(1, 600, 60):
        arrive(core, "b", append_entries(log, first, first + 59, term=1, commit=600))
    assert len(core.missing_payloads()) == 600
    questions.clear()
    assert core.missing_payloads(rounds_max=3) == tuple(entry.body for entry in log[:6])
    assert len(questions) == 6


def test_what_is_staged_is_limited_in_bytes() -> None:
    norms = (0.5,) * 65_536
    members = tuple(Member(Contribution(name, 1, 0, 0, 1, 0, 1, 7, norms), 1.0) for name in "abcd")
    body = replace(a_round(1), members=members)
    log = chain(*[1] * 12, bodies=lambda index, term: replace(body, version=index))
    core = a_core(term=1, has_payload=lambda body: False)
    for index in range(1, 13):
        arrive(core, "b", append_entries(log, index, index, term=1))
    assert len(core.missing_payloads()) == STAGED_BYTES_MAX // len(encode_entry(log[0]))


def test_a_follower_refuses_what_does_not_fit_and_says_where_to_look() -> None:
    core = a_core(entries=chain(1, 1, 2, 2), term=3)
    log = chain(1, 1, 3, 3, 3, 3)
    effects = arrive(core, "b", append_entries(log, 6, 6, term=3))
    assert sends(effects) == [("b", ack(3, 1, False, 4))]  # its log is shorter
    effects = arrive(core, "b", append_entries(log, 5, 5, term=3, sequence=2))
    assert sends(effects) == [("b", ack(3, 2, False, 2))]  # before the term that differs
    assert core.entries == chain(1, 1, 2, 2)
    effects = arrive(core, "b", append_entries(log, 3, 6, term=3, sequence=3))
    assert writes(effects) == [PersistLedger(1, 3, "", 3, log[2:])]
    assert core.entries == log


def test_logs_that_differ_from_the_first_entry_on_are_replaced_as_a_whole() -> None:
    core = a_core(entries=chain(1, 1), term=3)
    log = chain(2, 3)
    effects = arrive(core, "b", append_entries(log, 3, 2, term=3))
    assert sends(effects) == [("b", ack(3, 1, False, 0))]
    effects = arrive(core, "b", append_entries(log, 1, 2, term=3))
    assert writes(effects) == [PersistLedger(1, 3, "", 1, log)]


def test_only_entries_that_differ_are_forgotten() -> None:
    log = chain(1, 1, 1)
    core = a_core(entries=log)
    assert writes(arrive(core, "b", append_entries(log, 1, 2, term=1))) == []
    assert core.last_index == 3


def test_old_entries_are_acknowledged_only_as_far_as_they_are_known_to_match() -> None:
    core = a_core(entries=chain(1, 1, 2, 2), term=3)
    log = chain(1, 1, 3)
    effects = arrive(core, "b", append_entries(log, 2, 2, term=3))
    assert sends(effects) == [("b", ack(3, 1, True, 2))]


def test_a_conflicting_entry_is_forgotten_even_while_the_new_one_lacks_its_payload() -> None:
    core = a_core(entries=chain(1, 2), term=3, has_payload=lambda body: not isinstance(body, RoundBody))
    log = chain(1, 3, bodies=lambda index, term: a_round(index) if term == 3 else LeaderBody("leader-of-1"))
    effects = arrive(core, "b", append_entries(log, 2, 2, term=3))
    assert writes(effects) == [PersistLedger(1, 3, "", 2, ())]
    assert core.last_index == 1
    assert core.missing_payloads() == (a_round(2),)


def test_a_write_under_way_of_a_forgotten_entry_acknowledges_nothing() -> None:
    core = a_core(term=1)
    old = chain(1, 1, 1)
    first = arrive(core, "b", append_entries(old, 1, 3, term=1))
    new = chain(1, 2)
    second = arrive(core, "c", append_entries(new, 2, 2, term=2), now_ns=TIMEOUT_NS)
    assert writes(second) == [PersistLedger(2, 2, "", 2, new[1:])]
    core.handle(LedgerPersisted(writes(first)[0].token), now_ns=0)
    assert core.durable_indexes == {"a": 1}
    effects = core.handle(LedgerPersisted(2), now_ns=0)
    assert sends(effects)[-1] == ("c", ack(2, 1, True, 2))


def test_a_follower_commits_what_the_leader_committed_as_far_as_it_matches_and_is_on_disk() -> None:
    core = a_core(entries=chain(1, 1, 2), term=3)
    log = chain(1, 1, 3)
    arrive(core, "b", append_entries(log, 2, 2, term=3, commit=3))
    assert core.commit_index == 2
    effects = arrive(core, "b", append_entries(log, 3, 3, term=3, commit=3))
    assert core.commit_index == 2
    write_all(core, effects)
    assert core.commit_index == 3


def test_what_is_committed_is_never_forgotten_whoever_asks() -> None:
    core = a_core(entries=chain(1, 1))
    arrive(core, "b", append_entries(chain(1, 1), 2, 2, term=1, commit=2))
    others = (append_entries(chain(2), 1, 1, term=2), append_entries(chain(1, 3), 2, 2, term=3))
    for term, peer, other in zip((2, 3), "cb", others, strict=True):
        effects = arrive(core, peer, other, now_ns=TIMEOUT_NS)
        assert "committed here" in alarms(effects)[0]
        assert (core.term, core.entries) == (term, chain(1, 1))


def test_messages_of_an_older_term_are_refused_with_the_newer() -> None:
    core = a_core(term=5)
    effects = arrive(core, "b", append_entries(chain(1), 1, 1, term=4, sequence=9))
    assert sends(effects) == [("b", ack(5, 9, False, 0))]
    assert core.leader == ""


def test_an_old_message_that_comes_late_changes_nothing() -> None:
    log = chain(1, 1, 1)
    core = a_core(term=1)
    write_all(core, arrive(core, "b", append_entries(log, 1, 3, term=1, sequence=5, commit=3)))
    effects = arrive(core, "b", append_entries(log, 1, 1, term=1, sequence=2))
    assert sends(effects) == [("b", ack(1, 2, True, 3))]
    assert (core.last_index, core.commit_index) == (3, 3)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (
            AppendEntries(1, 1, 0, ZERO_HASH, (replace(chain(1)[0], body=LeaderBody("x")),), 0),
            "does not match its hash",
        ),
        (AppendEntries(1, 1, 0, ZERO_HASH, chain(1, 1)[1:], 0), "missing"),
        (AppendEntries(1, 1, 0, ZERO_HASH, (chain(1)[0], chain(1, 2)[1]), 0), "of term 2"),
        (AppendEntries(1, 1, -1, ZERO_HASH, (), 0), "entries after -1"),
        (AppendEntries(1, 1, 0, ZERO_HASH, (), -1), "-1 committed"),
        (AppendEntries(1, 1, 0, ZERO_HASH, chain(*[1] * (BATCH_ENTRIES_MAX + 1)), 0), "entries after 0"),
    ],
)
def test_a_message_no_leader_sends_is_an_alarm_and_not_answered(message: AppendEntries, fault: str) -> None:
    core = a_core(term=1)
    effects = arrive(core, "b", message)
    assert fault in alarms(effects)[0]
    assert sends(effects) == writes(effects) == []
    assert core.leader == ""


def test_hearing_the_leader_puts_off_the_election() -> None:
    core = a_core(term=1)
    arrive(core, "b", append_entries(chain(1), 1, 0, term=1), now_ns=500)
    assert core.wake_at_ns >= 500 + TIMEOUT_NS
    assert core.leader == "b"


def test_when_the_link_to_the_leader_breaks_the_election_comes_earlier() -> None:
    core = a_core(term=1)
    arrive(core, "b", append_entries(chain(1), 1, 0, term=1), now_ns=0)
    core.handle(LinkChanged("c", False), now_ns=10)
    assert sends(arrive(core, "c", vote_request(2, True, 0, 0), 10)) == [("c", vote(1, True, False))]
    core.handle(LinkChanged("b", False), now_ns=10)
    assert 10 + HEARTBEAT_NS <= core.wake_at_ns < 10 + HEARTBEAT_NS + TIMEOUT_NS
    assert sends(arrive(core, "c", vote_request(2, True, 0, 0), 10)) == [("c", vote(2, True, True))]


def test_when_a_link_comes_up_and_nobody_leads_the_election_comes_earlier() -> None:
    hastened = [a_core(seed=seed) for seed in range(50)]
    for core in hastened:
        core.handle(LinkChanged("b", True), now_ns=10)
    wakes = [core.wake_at_ns for core in hastened]
    for core in hastened:
        core.handle(LinkChanged("c", True), now_ns=11)
    assert [core.wake_at_ns for core in hastened] == wakes
    assert all(10 + HEARTBEAT_NS <= wake < 10 + HEARTBEAT_NS + TIMEOUT_NS for wake in wakes)
    assert len(set(wakes)) > 40


def test_a_link_that_comes_up_hastens_nothing_for_who_hears_a_leader_or_stands() -> None:
    for seed in range(20):
        core = a_core(term=1, seed=seed)
        arrive(core, "b", append_entries(chain(1), 1, 0, term=1), now_ns=0)
        due_ns = core.wake_at_ns
        core.handle(LinkChanged("c", True), now_ns=10)
        assert core.wake_at_ns == due_ns
        voter = a_core(seed=seed)
        arrive(voter, "b", vote_request(1, False, 0, 0), 10)
        due_ns = voter.wake_at_ns
        voter.handle(LinkChanged("c", True), now_ns=11)
        assert voter.wake_at_ns == due_ns
        standing, _ = a_candidate(seed=seed)
        due_ns = standing.wake_at_ns
        standing.handle(LinkChanged("c", True), now_ns=due_ns - TIMEOUT_NS)
        assert standing.wake_at_ns == due_ns


def test_a_follower_whose_link_comes_back_hears_the_leader_at_once() -> None:
    core, _, now_ns = a_leader()
    core.handle(LinkChanged("b", False), now_ns=now_ns)
    effects = core.handle(LinkChanged("b", True), now_ns=now_ns)
    assert [peer for peer, _ in sends(effects)] == ["b"]


# ---- a disk that lost a payload --------------------------------------------------------------------------------------


def test_an_entry_whose_payload_the_disk_has_lost_counts_in_votes_and_is_not_acknowledged() -> None:
    log = chain(1, 1, 1, 1, bodies=lambda index, term: a_round(index))
    on_disk = {log[0].body, log[1].body, log[3].body}
    core = a_core(entries=log, has_payload=lambda body: body in on_disk)
    assert core.missing_payloads() == (log[2].body,)
    answers = sends(write_all(core, arrive(core, "b", vote_request(2, False, 3, 1))))
    assert answers == [("b", vote(2, False, False))], "a shorter log gets no vote"
    effects = arrive(core, "c", append_entries(log, 5, 4, term=2, sequence=7, commit=4))
    assert sends(effects) == [("c", ack(2, 7, True, 2))]
    assert core.take_committed() == list(log[:2])
    assert core.cluster_commit_index == 4
    on_disk.add(log[2].body)
    assert sends(core.payload_arrived(now_ns=0)) == [("c", ack(2, 7, True, 4))]
    assert core.take_committed() == list(log[2:])
    assert core.missing_payloads() == ()


def test_a_leader_whose_disk_has_lost_a_payload_counts_itself_when_it_is_back() -> None:
    log = chain(1, 1, bodies=lambda index, term: a_round(index))
    on_disk = {log[0].body}
    core, effects, now_ns = a_leader(
        entries=log, has_payload=lambda body: not isinstance(body, RoundBody) or body in on_disk
    )
    write_all(core, effects, now_ns)
    assert core.durable_indexes["a"] == 1
    arrive(core, "b", ack(core.term, 1, True, 3), now_ns)
    assert core.commit_index == 0
    on_disk.add(log[1].body)
    assert sends(core.payload_arrived(now_ns=now_ns)), "the followers hear of the commit"
    assert core.commit_index == 3


def test_a_lost_payload_of_an_entry_that_is_replaced_is_not_missed() -> None:
    log = chain(1, 1, 1, bodies=lambda index, term: a_round(index))
    other = chain(1, 2, 2, bodies=lambda index, term: a_round(index + 10 * (term > 1)))
    core = a_core(entries=log, has_payload=lambda body: body != log[1].body)
    effects = write_all(core, arrive(core, "b", append_entries(other, 2, 3, term=2)))
    assert core.missing_payloads() == ()
    assert sends(effects)[-1] == ("b", ack(2, 1, True, 3))


def test_a_folder_has_caught_up_when_all_that_it_held_is_committed_or_taken_back() -> None:
    log, other = chain(1, 1, 1, 1), chain(1, 2)
    core = a_core(term=1, entries=log[:3])
    assert not core.has_caught_up
    for commit, is_caught_up in ((2, False), (4, True)):
        write_all(core, arrive(core, "b", append_entries(log, 4, 4, term=1, commit=commit)))
        assert not core.has_caught_up, "known to be committed, and not taken yet"
        core.take_committed()
        assert core.has_caught_up is is_caught_up
    core = a_core(term=1, entries=log[:3])
    write_all(core, arrive(core, "b", append_entries(other, 2, 2, term=2, commit=2)))
    core.take_committed()
    assert (core.last_index, core.has_caught_up) == (2, True)
