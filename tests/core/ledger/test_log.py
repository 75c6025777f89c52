"""The log in memory: old entries as bytes are the same entries."""

import random

import pytest

from diloco_node.core.ledger import log as log_module
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.types import Ballot, Entry, RoundBody

SEED = 2027


def chain(count: int, *, term: int = 1, after: tuple[Entry, ...] = ()) -> tuple[Entry, ...]:
    entries = list(after)
    for index in range(len(after) + 1, len(after) + count + 1):
        body = RoundBody(0, index, Ballot(term, index), (), 1.0, (0.1,), (), bytes([index % 256]) * 32)
        entries.append(seal(index, term, entries[-1].hash if entries else ZERO_HASH, body))
    return tuple(entries)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(log_module, "UNPACKED_ENTRIES", 3)
    return 3


def packed(log: ReplicaLog) -> int:
    return sum(isinstance(effect, log_module._Packed) for effect in log._entries)


def test_old_entries_are_kept_as_bytes_and_read_as_they_were(few: int) -> None:
    entries = chain(10)
    log = ReplicaLog(entries)
    assert packed(log) == 10 - few
    assert log.entries == entries
    assert [log.entry(index) for index in range(1, 11)] == list(entries)
    assert [log.hash_at(index) for index in range(11)] == [ZERO_HASH, *(entry.hash for entry in entries)]
    assert log.slice(2, 9) == entries[1:9]
    assert not log.is_dirty


def test_entries_that_are_not_on_disk_are_not_packed(few: int) -> None:
    log = ReplicaLog(())
    for entry in chain(10):
        log.append(entry)
    change = log.take_change(1, 1, "")
    assert change.entries == chain(10)
    assert packed(log) == 0
    log.on_written(1)
    assert packed(log) == 10 - few


def test_an_answer_counts_for_its_write_and_those_before_in_whatever_order_answers_come() -> None:
    entries = chain(6)
    log = ReplicaLog(())
    for token, first in enumerate((0, 2, 4), start=1):
        for entry in entries[first : first + 2]:
            log.append(entry)
        log.take_change(token, 1, "")
    durable = []
    for token in (1, 2, 1, 3, 2):
        log.on_written(token)
        durable.append(log.durable_index)
    assert durable == [2, 4, 4, 6, 6]


def test_only_entries_whose_payload_is_lost_are_looked_at_again(few: int) -> None:
    entries = chain(20)
    looked: list[int] = []

    def may_persist(entry: Entry) -> bool:
        looked.append(entry.index)
        return entry.index not in lost

    lost = {7, 15}
    log = ReplicaLog(entries, may_persist)
    assert (log.durable_index, looked) == (6, list(range(1, 21)))
    assert log.waiting == (entries[6], entries[14])
    assert packed(log) == 20 - few, "waiting for one payload is no reason to keep all that follows as objects"
    for now_lost, durable in (({15}, 14), ({15}, 14), (set(), 20)):
        before = len(log.waiting)
        lost = now_lost
        looked.clear()
        log.find_lost(may_persist)
        assert (len(looked), log.durable_index) == (before, durable)
    assert log.waiting == ()
    assert log.entries == entries


def test_a_lost_payload_of_a_forgotten_entry_is_not_waited_for() -> None:
    log = ReplicaLog(chain(20), lambda entry: entry.index not in (7, 15))
    log.truncate(15)
    assert [entry.index for entry in log.waiting] == [7]
    log.truncate(7)
    assert (log.waiting, log.durable_index) == ((), 6)


def test_any_story_of_a_log_is_the_same_with_and_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(SEED)
    steps = [(rng.choice(("append", "append", "append", "truncate", "write")), rng.random()) for _ in range(400)]

    def replay(unpacked: int) -> list[object]:
        monkeypatch.setattr(log_module, "UNPACKED_ENTRIES", unpacked)
        log, records, token, done = ReplicaLog(chain(5)), list[object](), 0, 0
        for number, (kind, chance) in enumerate(steps):
            if kind == "append":
                log.append(chain(1, term=number + 1, after=log.entries)[-1])
            elif kind == "truncate" and log.last_index:
                log.truncate(1 + max(0, log.last_index - 1 - int(4 * chance)))
            elif log.is_dirty and chance < 0.5:
                token += 1
                records.append(log.take_change(token, 1, ""))
            elif done < token:
                done += 1
                log.on_written(done)
            records += [log.durable_index, log.last_term, log.entries[-3:], log.hash_at(log.last_index // 2)]
        return [*records, log.entries]

    assert replay(2) == replay(10_000), f"seed {SEED}"
