"""A region's versions: what is on disk, what is applied and fetched."""

from dataclasses import replace

from diloco_node.core.events import AdoptState, ApplyVersion, Note, PruneFiles, SetStatesAside
from diloco_node.core.recovery.fetches import INITIAL_PATIENCE_NS
from diloco_node.core.recovery.versions import MISSING_ROUNDS, PAYLOADS_RATHER_MAX
from diloco_node.core.types import Recovered, RoundBody, SnapshotBody
from tests.kit.rounds_kit import (
    DIGESTS,
    GENESIS,
    Ledger,
    committed_round,
)
from tests.kit.versions_kit import Disk


def test_genesis_is_adopted_when_committed_and_not_before() -> None:
    disk = Disk()
    disk.versions.initial_state_stored(DIGESTS)
    assert disk.pump() == []
    disk.commit(GENESIS)
    assert disk.pump() == [AdoptState(0, 0), AdoptState(1, 0)]
    assert disk.pump() == [], "one effect per fragment at a time"


def test_genesis_payload_is_there_only_with_equal_digests() -> None:
    disk = Disk()
    assert not disk.versions.has_payload(GENESIS)
    disk.versions.initial_state_stored((DIGESTS[0], b"other" * 6))
    assert not disk.versions.has_payload(GENESIS)
    assert disk.requests(GENESIS) == [(1, 0, True)]
    disk.versions.state_stored(1, 0, DIGESTS[1])
    assert disk.versions.has_payload(GENESIS)
    assert disk.versions.initial_digests == DIGESTS


def test_theta_0_of_two_regions_is_none() -> None:
    """A fetch of what a genesis named ends half-way: its leader is gone, and so is the genesis."""
    disk, own = Disk(), (b"own-0" * 6, b"own-1" * 6)
    disk.versions.initial_state_stored(own)
    assert disk.versions.initial_digests == own
    assert disk.requests(GENESIS) == [(0, 0, True), (1, 0, True)]
    disk.versions.state_stored(0, 0, DIGESTS[0])
    assert disk.versions.initial_digests is None
    assert disk.versions.initial.is_mixed
    disk.versions.initial_state_stored(own)
    assert disk.versions.initial_digests is None, "what was fetched lies on the disk, whatever was written before"
    disk.versions.forget_initial()
    assert (disk.versions.states, disk.versions.initial.is_mixed) == ([-1, -1], False)
    disk.versions.initial_state_stored(own)
    assert disk.versions.initial_digests == own


def test_theta_0_of_another_genesis_is_not_completed_by_the_next() -> None:
    disk, other = Disk(), replace(GENESIS, fragment_digests=(b"other" * 6, b"more." * 6))
    disk.requests(GENESIS)
    disk.versions.state_stored(0, 0, DIGESTS[0])
    disk.requests(other)
    disk.versions.state_stored(1, 0, other.fragment_digests[1])
    assert disk.versions.initial_digests is None
    disk.versions.state_stored(0, 0, other.fragment_digests[0])
    assert disk.versions.initial_digests == other.fragment_digests


def test_later_state_stands_for_genesis() -> None:
    disk = Disk()
    disk.versions.initial_state_stored(DIGESTS)
    disk.versions.state_stored(0, 3, b"x" * 32)
    assert disk.versions.held == (3, -1), "also what waits for the rest, but no Theta_0 of its own"
    disk.versions.state_stored(1, 1, b"y" * 32)
    assert disk.versions.has_payload(GENESIS)


def test_rounds_are_applied_in_order_one_at_a_time_per_fragment() -> None:
    disk = Disk()
    disk.begin()
    bodies = [committed_round(0, 1, ()), committed_round(0, 2, ()), committed_round(1, 1, ())]
    for body in bodies:
        disk.store(body)
        disk.commit(body)
    assert disk.pump() == [ApplyVersion(bodies[0]), ApplyVersion(bodies[2])]
    assert disk.versions.applied_index() == 1
    disk.versions.version_applied(1, 1)
    assert disk.pump() == []
    disk.versions.version_applied(0, 1)
    assert disk.versions.applied_index() == 2
    assert disk.pump() == [ApplyVersion(bodies[1])]
    disk.versions.version_applied(0, 2)
    assert disk.versions.applied_index() == 4


def test_round_without_payload_is_not_applied() -> None:
    disk = Disk()
    disk.begin()
    body = committed_round(0, 1, ())
    disk.commit(body)
    assert disk.pump() == []
    disk.versions.payload_stored(0, 1, b"other" * 6)
    assert disk.pump() == [], "another ballot's payload is another payload"
    disk.store(body)
    assert disk.pump() == [ApplyVersion(body)]


def test_fetched_state_is_adopted_once_its_version_is_committed() -> None:
    disk = Disk()
    disk.begin()
    disk.versions.state_stored(0, 2, b"x" * 32)
    disk.commit(committed_round(0, 1, ()))
    assert disk.pump() == []
    disk.commit(committed_round(0, 2, ()))
    assert disk.pump() == [AdoptState(0, 2)]
    disk.versions.version_applied(0, 2)
    last = committed_round(0, 3, ())
    disk.store(last)
    disk.commit(last)
    assert disk.pump() == [ApplyVersion(last)]


def test_recovered_state_is_adopted_at_once_and_older_rounds_are_skipped() -> None:
    ledger = Ledger()
    entries = tuple(ledger.add(body) for body in (GENESIS, committed_round(0, 1, ()), committed_round(0, 2, ())))
    last = committed_round(0, 2, ())
    disk = Disk(Recovered(1, "", entries, (1, 0), frozenset({(0, 2, last.payload_digest)})))
    assert disk.effects.take() == [AdoptState(0, 1)], "version 0 waits for its genesis"
    disk.versions.version_applied(0, 1)
    disk.commit(GENESIS)
    disk.commit(committed_round(0, 1, ()))
    disk.commit(last)
    assert disk.pump() == [ApplyVersion(last), AdoptState(1, 0)]


def test_theta_zero_on_disk_counts_only_with_its_genesis() -> None:
    disk = Disk(Recovered(1, "", (), (0, 0), frozenset()))
    assert disk.versions.initial_digests is None
    assert not disk.versions.has_payload(GENESIS)
    ledger = Ledger()
    disk = Disk(Recovered(1, "", (ledger.add(GENESIS),), (0, 0), frozenset()))
    assert disk.versions.has_payload(GENESIS)


def test_overwritten_theta_zero_is_fetched_and_never_adopted() -> None:
    disk = Disk()
    disk.versions.initial_state_stored(DIGESTS)
    disk.commit(GENESIS)
    disk.versions.initial_state_stored((DIGESTS[0], b"other" * 6))
    assert disk.pump() == [AdoptState(0, 0)]
    assert disk.requests() == [(1, 0, True)]


def test_payload_is_held_by_digest_by_state_or_by_having_been_applied() -> None:
    disk = Disk()
    disk.begin()
    body = committed_round(0, 1, ())
    assert not disk.versions.has_payload(body)
    disk.store(body)
    assert disk.versions.has_payload(body)
    assert not disk.versions.has_payload(committed_round(0, 1, (), digest=b"other" * 6))
    disk.commit(body)
    disk.pump()
    disk.versions.version_applied(0, 1)
    late = committed_round(0, 2, ())
    disk.store(late)
    disk.commit(late)
    disk.pump()
    disk.versions.version_applied(0, 2)
    assert disk.versions.has_payload(body), "it must not turn false for an entry of the log"


def test_many_missing_payloads_are_fetched_as_the_state_of_a_snapshot() -> None:
    disk = Disk()
    disk.begin()
    disk.versions.learn(GENESIS)
    few = [committed_round(0, version, ()) for version in range(1, PAYLOADS_RATHER_MAX + 1)]
    many = [*few, committed_round(0, PAYLOADS_RATHER_MAX + 1, ())]
    assert disk.requests(*few) == [(0, 1, False)]
    disk.fetches.forget(0)
    assert disk.requests(*many) == [(0, 1, False)], "there is no snapshot after them"
    disk.versions.learn(SnapshotBody(0, 8, b"8" * 32))
    disk.fetches.forget(0)
    assert disk.requests(*few) == [(0, 1, False)], "payloads are less"
    disk.fetches.forget(0)
    assert disk.requests(*many) == [(0, 8, True)]
    assert disk.fetches.pending[0].digest == b"8" * 32


def test_rounds_that_are_looked_at_are_enough_to_choose_the_state() -> None:
    """One of them may be on its way as merged stripes."""
    disk = Disk()
    disk.begin()
    disk.versions.learn(GENESIS)
    disk.versions.learn(SnapshotBody(0, 64, b"8" * 32))
    bodies = [committed_round(0, version, ()) for version in range(2, MISSING_ROUNDS + 1)]
    assert disk.requests(*bodies) == [(0, 64, True)]


def test_where_theta_zero_is_gone_the_newest_snapshot_takes_its_place() -> None:
    disk = Disk()
    disk.versions.learn(GENESIS)
    assert disk.requests(GENESIS) == [(0, 0, True), (1, 0, True)]
    disk.fetches.forget(1)
    disk.versions.learn(SnapshotBody(1, 8, b"8" * 32))
    assert disk.requests(GENESIS) == [(0, 0, True), (1, 8, True)]
    disk.versions.state_stored(1, 8, b"8" * 32)
    disk.fetches.on_end(1, version=8, is_state=True)
    assert disk.requests(GENESIS) == [(0, 0, True)]


WRONG = b"wrong" * 6 + b"!!"


def diverged() -> tuple[Disk, list[RoundBody]]:
    """Fragment 0 is at version 3, its snapshot of version 2 is another one; round 4 is on its way."""
    disk = Disk()
    disk.begin()
    disk.versions.learn(GENESIS)
    bodies = [committed_round(0, version, ()) for version in range(1, 5)]
    for body in bodies[:3]:
        disk.store(body)
        disk.commit(body)
        disk.pump()
        disk.versions.version_applied(0, body.version)
    disk.versions.learn(SnapshotBody(0, 2, DIGESTS[0]))
    disk.commit(SnapshotBody(0, 2, DIGESTS[0]))
    disk.pump()
    disk.versions.heal(SnapshotBody(0, 2, DIGESTS[0]), version_reached=3)
    return disk, bodies


def test_a_state_that_is_not_the_ledgers_is_set_aside_fetched_and_gone_on_from() -> None:
    disk, bodies = diverged()
    assert disk.versions.healing == (0,)
    assert disk.versions.has_payload(bodies[2]), "what was acknowledged can't be taken back"
    disk.store(bodies[3])
    assert not disk.versions.has_payload(bodies[3])
    assert not disk.versions.has_stored(0, 4, bodies[3].payload_digest)
    assert [effect for effect in disk.pump() if not isinstance(effect, Note)] == [SetStatesAside(0, 2)]
    assert disk.requests() == [], "not before the wrong files are out of the way"
    disk.versions.states_renamed(0)
    assert disk.requests() == [(0, 2, True)]
    disk.versions.state_stored(0, 2, DIGESTS[0])
    assert disk.versions.healing == ()
    assert disk.versions.has_payload(bodies[3])
    assert disk.pump() == [AdoptState(0, 2)]
    disk.versions.version_applied(0, 2)
    assert disk.pump() == [ApplyVersion(bodies[2])]
    disk.versions.version_applied(0, 3)
    disk.commit(bodies[3])
    assert disk.pump() == [ApplyVersion(bodies[3])]


def test_a_state_fetched_before_the_wrong_files_are_out_of_the_way_is_fetched_again() -> None:
    disk, _ = diverged()
    disk.pump()
    disk.versions.state_stored(0, 2, DIGESTS[0])
    assert disk.versions.healing == (0,)
    disk.versions.states_renamed(0)
    assert disk.requests() == [(0, 2, True)]


def test_a_wrong_checkpoint_that_is_written_later_is_found() -> None:
    disk, _ = diverged()
    disk.pump()
    disk.versions.states_renamed(0)
    disk.versions.state_stored(0, 2, DIGESTS[0])
    assert disk.versions.checkpoint_written(0, 2, WRONG) == SnapshotBody(0, 2, DIGESTS[0])
    assert disk.versions.checkpoint_written(0, 2, DIGESTS[0]) is None


def test_nothing_is_removed_while_a_fragment_heals() -> None:
    disk, _ = diverged()
    disk.pump()
    disk.commit(SnapshotBody(0, 3, DIGESTS[1]))
    assert disk.pump() == [], "the way back needs the payloads behind version 2"
    disk.versions.states_renamed(0)
    disk.versions.state_stored(0, 2, DIGESTS[0])
    disk.pump()
    disk.commit(SnapshotBody(0, 3, DIGESTS[1]))
    assert disk.pump() == [PruneFiles(0, 2)]


def test_a_payload_that_the_way_back_needs_and_that_is_gone_is_fetched() -> None:
    disk, _ = diverged()
    disk.pump()
    disk.versions._payloads.clear()
    disk.versions.states_renamed(0)
    disk.versions.state_stored(0, 2, DIGESTS[0])
    disk.pump()
    disk.versions.version_applied(0, 2)
    assert disk.pump() == []
    assert disk.versions.is_lacking
    assert disk.requests() == [(0, 3, False)]


def test_a_state_on_disk_that_is_not_the_ledgers_is_not_taken_at_start() -> None:
    ledger = Ledger()
    bodies = (GENESIS, committed_round(0, 1, ()), SnapshotBody(0, 1, DIGESTS[1]))
    entries = tuple(ledger.add(body) for body in bodies)
    good = Disk(Recovered(1, "", entries, (1, 0), frozenset(), (DIGESTS[1], DIGESTS[1])))
    assert good.effects.take() == [AdoptState(0, 1)]
    bad = Disk(Recovered(1, "", entries, (1, 0), frozenset(), (WRONG, WRONG)))
    assert bad.versions.states == [-1, -1], "neither version 1 nor Theta_0 is what the ledger names"
    assert not bad.versions.has_payload(bodies[1])
    assert not bad.versions.has_payload(GENESIS)
    assert [effect for effect in bad.pump() if not isinstance(effect, Note)] == [SetStatesAside(0, 1)]


def test_files_go_when_a_newer_snapshot_is_in_the_ledger_and_not_before() -> None:
    disk = Disk()
    disk.begin()
    for version in range(1, 6):
        disk.commit(committed_round(0, version, ()))
        disk.versions.version_applied(0, version)
    assert disk.pump() == []
    disk.commit(SnapshotBody(0, 2, DIGESTS[0]))
    assert disk.pump() == [PruneFiles(0, 0)], "Theta_0 may still be on its way to somebody"
    disk.commit(SnapshotBody(0, 4, DIGESTS[0]))
    assert disk.pump() == [PruneFiles(0, 2)]
    assert sorted(disk.versions._rounds[0]) == [3, 4, 5]


def test_payloads_that_snapshots_overtake_are_kept_until_they_are_applied() -> None:
    disk = Disk()
    disk.begin()
    bodies = [committed_round(0, version, ()) for version in range(1, 6)]
    for body in bodies:
        disk.store(body)
        disk.commit(body)
    for version in (2, 4):
        disk.commit(SnapshotBody(0, version, DIGESTS[0]))
    applied = []
    while orders := [effect for effect in disk.pump() if isinstance(effect, ApplyVersion)]:
        applied += [order.body for order in orders]
        assert disk.requests() == []
        disk.versions.version_applied(0, orders[0].body.version)
    assert applied == bodies


def test_the_file_that_is_being_applied_stays_though_a_fetched_state_and_snapshots_overtake_it() -> None:
    disk = Disk()
    disk.begin()
    bodies = [committed_round(0, version, ()) for version in range(1, 6)]
    disk.store(bodies[0])
    for body in bodies:
        disk.commit(body)
    assert disk.pump() == [ApplyVersion(bodies[0])]
    for version in (3, 5):
        disk.commit(SnapshotBody(0, version, DIGESTS[0]))
    disk.versions.state_stored(0, 5, DIGESTS[0])
    assert disk.pump() == [PruneFiles(0, 1)]
    disk.versions.version_applied(0, 1)
    assert disk.pump() == [AdoptState(0, 5)]


def test_nothing_is_fetched_that_is_there() -> None:
    disk = Disk()
    disk.begin()
    body = committed_round(0, 1, ())
    assert disk.requests(body) == [(0, 1, False)]
    disk.store(body)
    assert disk.requests(body) == []


def test_a_payload_that_a_later_state_overtakes_is_not_fetched() -> None:
    ahead, behind = Disk(), Disk()
    for disk in (ahead, behind):
        disk.begin()
        disk.commit(committed_round(0, 1, ()))
    ahead.versions.state_stored(0, 2, b"x" * 32)
    assert ahead.requests() == [], "it waits for its version to be committed"
    assert behind.requests() == [(0, 1, False)]


def test_theta_zero_is_waited_for_while_the_own_learner_has_laid_down_none() -> None:
    disk = Disk()
    disk.requests(GENESIS)
    disk.fetches.pump(leader="b", alive=("b",), now_ns=7)
    assert disk.fetches.in_flight() == ()
    assert disk.fetches.wake_at_ns == 7 + INITIAL_PATIENCE_NS
    disk.versions.initial_state_stored((DIGESTS[0], b"other" * 6))
    assert disk.requests(GENESIS) == [(1, 0, True)], "the first fragment came by itself"
    disk.fetches.pump(leader="b", alive=("b",), now_ns=7 + INITIAL_PATIENCE_NS)
    assert disk.fetches.in_flight() == ((1, 0, "b"),)


def test_another_theta_zero_of_the_own_learner_is_replaced_at_once() -> None:
    disk = Disk()
    disk.versions.initial_state_stored((DIGESTS[0], b"other" * 6))
    disk.requests(GENESIS)
    disk.fetches.pump(leader="b", alive=("b",), now_ns=7)
    assert disk.fetches.in_flight() == ((1, 0, "b"),)


def test_another_theta_zero_is_not_what_a_base_stands_for() -> None:
    """A joiner whose own learner has laid down other parameters gets a base from before the first round."""
    disk = Disk()
    disk.versions.initial_state_stored((DIGESTS[0], b"other" * 6))
    disk.history.apply(disk.ledger.add(GENESIS), now_ns=0)
    disk.versions.begin_at(1)
    assert not disk.versions.has_base()
    assert disk.requests() == [(1, 0, True)]
    disk.versions.state_stored(1, 0, DIGESTS[1])
    assert disk.versions.has_base()
    assert not disk.versions.is_lacking
