"""A log whose first entries are summed up: indexes go on, the base stands for what is gone, followers get it."""

from dataclasses import replace

import pytest

from diloco_node.core.events import MessageArrived, PersistLedger, Send
from diloco_node.core.ledger import replication
from diloco_node.core.ledger.entries import encode_entry
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.replication import BASE_AGAIN_MESSAGES, Follower
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.messages import AppendEntries, AppendEntriesReply, BaseSent
from diloco_node.core.types import NO_BASE, Entry, LedgerBase, Recovered
from tests.kit.ledger_kit import (
    HEARTBEAT_NS,
    TIMEOUT_NS,
    AnyMeaning,
    a_round,
    ack,
    alarms,
    append_entries,
    chain,
    disk_of,
    sends,
    write_all,
)

ENTRIES = chain(*[1] * 20, bodies=lambda index, term: a_round(index))


def base_at(index: int, summary: bytes = b"s" * 9000) -> LedgerBase:
    return LedgerBase(index, ENTRIES[index - 1].term, ENTRIES[index - 1].hash, summary)


def sent(base: LedgerBase, *, term: int = 1, sequence: int = 1) -> BaseSent:
    return BaseSent(term, sequence, base.index, base.term, base.hash, base.summary)


def a_core(entries: tuple[Entry, ...] = (), base: LedgerBase = NO_BASE, term: int = 1, **more: object) -> LedgerCore:
    settings = {
        "region": "a",
        "voters": ("a", "b", "c"),
        "heartbeat_ns": HEARTBEAT_NS,
        "election_timeout_ns": TIMEOUT_NS,
        "recovery": Recovered(term, "", entries, (), frozenset(), base=base, disk=disk_of("a")),
        "seed": 1,
        "now_ns": 0,
        "has_payload": lambda _: True,
        "meaning": AnyMeaning(),
        "named_by": lambda _: Roster.of_voters("abc", {name: disk_of(name) for name in "abc"}),
    }
    return LedgerCore(**(settings | more))  # type: ignore[arg-type]


def test_indexes_and_hashes_go_on_behind_a_base() -> None:
    log = ReplicaLog(ENTRIES[10:], base=base_at(10))
    assert (log.last_index, log.last_term, log.durable_index, log.known_index) == (20, 1, 20, 20)
    assert log.entry(11) == ENTRIES[10]
    assert log.slice(1, 12) == ENTRIES[10:12]
    assert log.entries == ENTRIES[10:]
    assert log.hash_at(10) == ENTRIES[9].hash
    assert log.has(10, ENTRIES[9].hash)
    assert log.has(0, bytes(32))
    assert not log.has(9, ENTRIES[8].hash), "of that nothing is known any more"
    assert not log.contradicts(9, b"whatever")
    assert log.contradicts(12, b"whatever")
    assert log.first_conflict(ENTRIES) == 0
    assert log.search_hint(15) == 10
    assert log.search_hint(3) == 10
    log.truncate(15)
    assert log.last_index == 14


def test_a_log_is_compacted_and_the_disk_follows() -> None:
    log = ReplicaLog(ENTRIES)
    log.compact(base_at(12))
    assert log.is_dirty
    assert log.entries == ENTRIES[12:]
    change = log.take_change(1, 1, "")
    assert (change.truncate_from, change.entries, change.base) == (0, (), base_at(12))
    assert not log.is_dirty
    log.on_written(1)
    assert log.durable_index == 20


def test_nothing_behind_a_new_base_is_acknowledged_before_its_states_are_here() -> None:
    has_base = [False]
    log = ReplicaLog(ENTRIES[:3], has_base=lambda: has_base[0])
    log.install(base_at(10), committed_index=3)
    assert (log.last_index, log.entries, log.durable_index) == (10, (), 3)
    change = log.take_change(1, 1, "")
    assert (change.truncate_from, change.entries, change.base) == (1, (), base_at(10))
    log.on_written(1)
    log.find_lost(lambda _: True)
    assert log.durable_index == 3
    has_base[0] = True
    log.find_lost(lambda _: True)
    assert log.durable_index == 10


def test_entries_of_another_log_do_not_count_for_those_that_take_their_place() -> None:
    """The disk held an older leader's entries up to 13; the base goes to 12, and another entry 13 follows."""
    other = chain(*[1] * 9, *[2] * 4, bodies=lambda index, term: a_round(index))
    log = ReplicaLog(other)
    log.install(base_at(12), committed_index=9)
    assert log.durable_index == 9
    log.stage(ENTRIES[12:14])
    log.promote(lambda _: True)
    log.find_lost(lambda _: True)
    assert (log.last_index, log.durable_index) == (14, 9)
    log.take_change(1, 1, "")
    log.on_written(1)
    assert log.durable_index == 14


def test_what_follows_the_leaders_base_stays() -> None:
    log = ReplicaLog(ENTRIES[:15])
    log.install(base_at(10), committed_index=3)
    assert log.entries == ENTRIES[10:15]
    log.find_lost(lambda _: True)
    assert log.take_change(1, 1, "").base == base_at(10)
    log.on_written(1)
    assert log.durable_index == 15


def test_a_follower_whose_entries_are_gone_gets_the_base_and_then_entries() -> None:
    log = ReplicaLog(ENTRIES[10:], base=base_at(10))
    follower = Follower(next_index=21, answered_ns=0)
    follower.answered(ack(1, 0, False, 3), now_ns=0)
    assert follower.next_index == 4
    message = follower.next_message(log, term=1, sequence=1, commit_index=20)
    assert message == sent(base_at(10))
    beat = follower.next_message(log, term=1, sequence=2, commit_index=20)
    assert isinstance(beat, AppendEntries)
    assert (beat.previous_index, beat.entries) == (10, ())
    follower.answered(ack(1, 1, True, 0), now_ns=0)
    batch = follower.next_message(log, term=1, sequence=3, commit_index=20)
    assert isinstance(batch, AppendEntries)
    assert (batch.previous_index, batch.entries) == (10, ENTRIES[10:])


@pytest.mark.parametrize(("bytes_max", "count"), [(1, 1), (2, 2), (3, 3), (1000, 20)])
def test_a_batch_is_as_long_as_a_message_may_be_and_has_at_least_one_entry(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int, count: int
) -> None:
    monkeypatch.setattr(replication, "BATCH_BYTES_MAX", bytes_max * max(len(encode_entry(entry)) for entry in ENTRIES))
    message = Follower(next_index=1, answered_ns=0).next_message(
        ReplicaLog(ENTRIES), term=1, sequence=1, commit_index=20
    )
    assert isinstance(message, AppendEntries)
    assert message.entries == ENTRIES[:count]


def test_a_base_that_is_refused_is_not_sent_with_each_heartbeat() -> None:
    log = ReplicaLog(ENTRIES[10:], base=base_at(10))
    follower = Follower(next_index=4, answered_ns=0)
    kinds = []
    for sequence in range(1, 3 * BASE_AGAIN_MESSAGES):
        kinds.append(type(follower.next_message(log, term=1, sequence=sequence, commit_index=20)))
        follower.answered(ack(1, sequence, False, 3), now_ns=0)
    assert kinds.count(BaseSent) == 3


def test_what_is_committed_is_sent_without_waiting_for_payloads() -> None:
    entries = chain(*[1] * 400)
    log = ReplicaLog(entries)
    follower = Follower(next_index=1, answered_ns=0)
    for sequence in range(1, 8):
        follower.next_message(log, term=1, sequence=sequence, commit_index=390)
        follower.answered(ack(1, sequence, True, 0), now_ns=0)
    assert follower.next_index == 391


def test_a_follower_installs_a_base_once_and_acknowledges_when_it_has_the_states() -> None:
    has_base = [False]
    core = a_core(ENTRIES[:3], has_base=lambda: has_base[0])
    effects = core.handle(MessageArrived("b", sent(base_at(10))), now_ns=0)
    writes = [effect for effect in effects if isinstance(effect, PersistLedger)]
    assert writes == [PersistLedger(1, 1, "", 1, (), base_at(10))]
    assert core.take_base() == base_at(10)
    assert core.take_base() is None
    assert (core.last_index, core.cluster_commit_index) == (10, 10)
    write_all(core, effects)
    effects = core.handle(MessageArrived("b", append_entries(ENTRIES, 11, 14, term=1, sequence=2, commit=12)), now_ns=0)
    answers = [message for _, message in sends([*effects, *write_all(core, effects)])]
    assert {effect.durable_index for effect in answers if isinstance(effect, AppendEntriesReply)} == {0}
    has_base[0] = True
    (answer,) = [effect for effect in core.payload_arrived(now_ns=0) if isinstance(effect, Send)]
    assert sends([answer]) == [("b", ack(1, 2, True, 14))]
    assert [entry.index for entry in core.take_committed()] == [11, 12]
    effects = core.handle(MessageArrived("b", sent(base_at(10), sequence=3)), now_ns=0)
    assert [type(effect) for effect in effects] == [Send], "it has more than that"


def test_nothing_that_replaces_a_longer_log_is_acknowledged_before_it_is_written() -> None:
    """The states of the base are here already; its entry and the next one are not on disk, an older leader's are."""
    core = a_core(chain(*[1] * 9, *[2] * 6, bodies=lambda index, term: a_round(index)), term=3)
    effects = core.handle(MessageArrived("b", sent(base_at(12), term=3)), now_ns=0)
    effects += core.handle(MessageArrived("b", append_entries(ENTRIES, 13, 14, term=3, sequence=2)), now_ns=0)
    answers = [message for _, message in sends(effects) if isinstance(message, AppendEntriesReply)]
    assert [item.durable_index for item in answers] == [0, 0]
    write_all(core, effects)
    (answer,) = [effect for effect in core.payload_arrived(now_ns=0) if isinstance(effect, Send)]
    assert sends([answer]) == [("b", ack(3, 2, True, 14))]


def test_a_base_is_taken_from_the_leader_of_the_term_only_and_only_if_it_is_of_this_run() -> None:
    core = a_core(ENTRIES[:3], base_fault=lambda base: "" if base.summary == b"good" else "it is no summary")
    good = base_at(10, b"good")
    assert alarms(core.handle(MessageArrived("b", sent(base_at(10, b"bad"))), now_ns=0))
    assert alarms(core.handle(MessageArrived("b", sent(replace(good, term=2))), now_ns=0)), "of a term to come"
    core.handle(MessageArrived("b", append_entries(ENTRIES, 1, 1, term=1)), now_ns=0)
    assert alarms(core.handle(MessageArrived("c", sent(good)), now_ns=0)), "another leads"
    assert alarms(core.handle(MessageArrived("x", sent(good)), now_ns=0)), "no voter"
    (old,) = core.handle(MessageArrived("b", sent(good, term=0)), now_ns=0)
    assert sends([old]) == [("b", ack(1, 1, False, 0))]
    assert core.base == NO_BASE
    core.disks.follow(())
    core.disks.begin(Roster.of_voters("abc"), 0)
    core.handle(MessageArrived("b", sent(good)), now_ns=0)
    assert core.base == good
    assert core.disks.disk_of("c") == disk_of("c"), "the folders that count are those of the base"


def test_a_restart_behind_a_base_goes_on_from_it() -> None:
    core = a_core(ENTRIES[10:], base_at(10))
    assert (core.commit_index, core.last_index) == (10, 20)
    core.handle(MessageArrived("b", append_entries(ENTRIES, 21, 20, term=1, commit=20)), now_ns=0)
    assert [entry.index for entry in core.take_committed(3)] == [11, 12, 13]
    assert core.has_committed
    assert [entry.index for entry in core.take_committed()] == list(range(14, 21))
    assert not core.has_committed
    effects = core.compact(base_at(15))
    assert effects == [PersistLedger(1, 1, "", 0, (), base_at(15))]
