"""Faults planted in the ledger core: the checks of the other tests must find them."""

from collections.abc import Callable

import pytest

from diloco_node.core.events import Effect, LedgerPersisted, PersistLedger, TimerFired
from diloco_node.core.ledger.election import ballot_paper
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.types import Entry
from tests.kit.ledger_kit import (
    TIMEOUT_NS,
    a_core,
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
from tests.kit.ledger_network import Disk, Network, shake


class ForgottenVote(LedgerCore):
    def _vote_to_persist(self) -> str:
        return ""


class CommitByCounting(LedgerCore):
    def _may_commit(self, index: int) -> bool:
        return True


class AcknowledgedWithoutPayload(LedgerCore):
    def _may_persist(self, entry: Entry) -> bool:
        return True


class VoteForAnyLog(LedgerCore):
    def _is_up_to_date(self, last_index: int, last_term: int) -> bool:
        return True


class NoFsync(Network):
    """A disk that answers at once and writes later; what was not written yet is lost in a crash."""

    def perform(self, name: str, effects: list[Effect]) -> None:
        writes_first = [effect for effect in effects if isinstance(effect, PersistLedger)]
        super().perform(name, [effect for effect in effects if not isinstance(effect, PersistLedger)])
        incarnation = self.incarnations[name]
        for effect in writes_first:
            self.later(self.fsync_ns, lambda effect=effect: self.on_disk(name, incarnation, effect))  # type: ignore[misc]
            if name in self.cores and self.incarnations[name] == incarnation:
                self.perform(name, self.cores[name].handle(LedgerPersisted(effect.token), now_ns=self.now_ns))

    def on_disk(self, name: str, incarnation: int, effect: PersistLedger) -> None:
        if self.incarnations[name] == incarnation:
            self.disks[name].write(effect)

    def check(self, name: str) -> None:
        core = self.cores[name]
        if core.is_leader:
            assert self.leaders.setdefault(core.term, name) == name, "two leaders in a term"
        for entry in core.take_committed():
            self.committed[name].append(entry)
            if entry.index > len(self.truth):
                self.truth.append(entry)
            assert self.truth[entry.index - 1].hash == entry.hash, "entries differ"


def is_found(build: Callable[[int], Network], seeds: int) -> bool:
    for seed in range(seeds):
        try:
            shake(build(seed))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("cls", [AcknowledgedWithoutPayload, VoteForAnyLog])
def test_a_planted_fault_in_the_core_is_found(cls: type[LedgerCore]) -> None:
    assert is_found(lambda seed: Network(5, seed=seed, cls=cls), 30)


@pytest.mark.parametrize(("cls", "leaders"), [(LedgerCore, 1), (ForgottenVote, 2)])
def test_a_vote_that_is_forgotten_in_a_crash_makes_two_leaders(cls: type[LedgerCore], leaders: int) -> None:
    candidates = {}
    for name in ("a", "b"):
        core = a_core(name)
        core.handle(TimerFired(), now_ns=core.wake_at_ns)
        write_all(core, arrive(core, "c", vote(1, True, True)))
        candidates[name] = core
    disk = Disk()
    for name, core in candidates.items():
        voter = a_core("c", cls=cls, term=disk.term, voted_for=disk.voted_for)
        effects = arrive(voter, name, vote_request(1, False, 0, 0))
        for write in writes(effects):
            disk.write(write)
        for _, answer in sends(effects) + sends(write_all(voter, effects)):
            arrive(core, "c", answer)
    assert sum(core.is_leader for core in candidates.values()) == leaders


@pytest.mark.parametrize(("cls", "committed"), [(LedgerCore, 0), (CommitByCounting, 2)])
def test_figure_8_an_old_entry_on_a_majority_is_not_committed_for_it_may_be_overwritten(
    cls: type[LedgerCore], committed: int
) -> None:
    # S1 to S5 of the paper are a to e. (a) a led term 2 and reached only b; (b) e led term 3 and reached nobody;
    # (c) a leads term 4 and brings its entry of term 2 to c: on a majority, and yet not committed.
    voters = tuple("abcde")
    a = a_core("a", voters, entries=chain(1, 2), term=3, cls=cls)
    a.handle(TimerFired(), now_ns=a.wake_at_ns)
    for pre_vote in (True, False):
        for peer in ("b", "c"):
            write_all(a, arrive(a, peer, vote(4, pre_vote, True)))
    assert a.is_leader
    for sequence, peer in ((1, "b"), (2, "c")):
        arrive(a, peer, ack(4, sequence, True, 2))
    assert a.cluster_commit_index == committed
    # (d) a dies; e stands in term 5, and c, which has the entry on disk, votes for it and forgets the entry.
    voter = a_core("c", voters, entries=chain(1, 2), term=4)
    effects = arrive(voter, "e", vote_request(5, False, 2, 3))
    assert sends(write_all(voter, effects)) == [("e", vote(5, False, True))]
    effects = arrive(voter, "e", append_entries(chain(1, 3, 5), 2, 3, term=5))
    assert writes(effects) == [PersistLedger(2, 5, ballot_paper("e", disk_of("e")), 2, chain(1, 3, 5)[1:])]


def test_a_disk_that_answers_before_it_has_written_is_found() -> None:
    assert is_found(lambda seed: NoFsync(3, seed=seed, fsync_ns=8 * TIMEOUT_NS), 20)
