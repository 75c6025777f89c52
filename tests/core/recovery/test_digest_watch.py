"""Equal versions, equal bytes: what is told, what is compared, one alarm for one difference."""

import pytest

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Note
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.recovery.digest_watch import (
    FRESH_MAX,
    FRESH_NS,
    PENDING_MAX,
    REPORTED_MAX,
    VERSIONS_KEPT,
    DigestWatch,
)
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import FragmentDigest, GenesisBody, SnapshotBody

GOOD = bytes(range(32))
BAD = bytes(32)


def a_watch(fragments: int = 3, *, committed: int = 8, regions: int = 3) -> tuple[DigestWatch, EffectBuffer]:
    """Every fragment is committed up to the same version; every fourth version is to be a snapshot."""
    effects = EffectBuffer("a")
    history = RoundHistory(fragments)
    names = tuple("abcdefg"[:regions])
    history.apply(seal(1, 1, ZERO_HASH, GenesisBody("run", "", "", names, (GOOD,) * fragments)), now_ns=0)
    history.versions = [committed] * fragments
    return DigestWatch(fragments, effects, history=history, snapshot_versions=4), effects


def commit(watch: DigestWatch, body: SnapshotBody) -> None:
    watch._history.snapshots.add(body)


def alarms(effects: EffectBuffer) -> list[tuple[int, int]]:
    return [(note.fragment, note.version) for note in effects.take() if isinstance(note, Note) and note.is_alarm]


def test_equal_digests_are_silent_and_a_difference_is_an_alarm_once() -> None:
    watch, effects = a_watch()
    watch.on_digest(1, 4, GOOD, now_ns=0)
    watch.on_report("b", (FragmentDigest(1, 4, GOOD),))
    assert alarms(effects) == []
    watch.on_report("c", (FragmentDigest(1, 4, BAD),))
    watch.on_report("c", (FragmentDigest(1, 4, BAD),))
    assert alarms(effects) == [(1, 4)]
    assert watch.differences == 1


def test_other_versions_are_not_compared() -> None:
    watch, effects = a_watch()
    watch.on_digest(1, 4, GOOD, now_ns=0)
    watch.on_report("b", (FragmentDigest(1, 3, BAD), FragmentDigest(2, 4, BAD)))
    assert alarms(effects) == []


def test_peer_that_is_ahead_is_compared_when_we_get_there() -> None:
    watch, effects = a_watch()
    watch.on_report("b", (FragmentDigest(1, 5, BAD),))
    watch.on_digest(1, 4, GOOD, now_ns=0)
    assert alarms(effects) == []
    watch.on_digest(1, 5, GOOD, now_ns=0)
    assert alarms(effects) == [(1, 5)]


def test_peer_that_is_behind_is_compared_with_what_we_had() -> None:
    watch, effects = a_watch()
    for version in range(VERSIONS_KEPT + 1):
        watch.on_digest(0, version, GOOD, now_ns=0)
    watch.on_report("b", (FragmentDigest(0, 0, BAD),))
    assert alarms(effects) == [], "too long ago"
    watch.on_report("b", (FragmentDigest(0, 1, BAD),))
    assert alarms(effects) == [(0, 1)]


def test_fragment_that_does_not_exist_is_ignored() -> None:
    watch, effects = a_watch()
    watch.on_report("b", (FragmentDigest(3, 0, BAD), FragmentDigest(-1, 0, BAD)))
    watch.on_digest(2, 0, GOOD, now_ns=0)
    assert alarms(effects) == []


def test_new_digests_ride_along_for_a_while_and_all_in_turn() -> None:
    watch, _ = a_watch()
    for fragment in range(3):
        watch.on_digest(fragment, 1, GOOD, now_ns=0)
    fresh = watch.to_report(now_ns=FRESH_NS)
    assert fresh == tuple(FragmentDigest(fragment, 1, GOOD) for fragment in range(3))
    later = [watch.to_report(now_ns=FRESH_NS + 1) for _ in range(3)]
    assert sorted(item.fragment for reported in later for item in reported) == [0, 1, 2]


def test_heartbeat_carries_few_digests() -> None:
    watch, _ = a_watch(40)
    for fragment in range(40):
        watch.on_digest(fragment, 1, GOOD, now_ns=0)
    assert len(watch.to_report(now_ns=1)) <= FRESH_MAX + 1


def test_newest_digest_is_known() -> None:
    watch, _ = a_watch()
    assert watch.newest(0) == (-1, b"")
    watch.on_digest(0, 7, GOOD, now_ns=0)
    assert watch.newest(0) == (7, GOOD)


def test_a_snapshot_is_agreed_on_when_a_majority_tells_all_32_bytes_alike() -> None:
    watch, _ = a_watch()
    watch.on_digest(0, 4, GOOD, now_ns=0)
    assert watch.majority_snapshots(frozenset()) == ()
    watch.on_report("b", (FragmentDigest(0, 4, GOOD[:16] + bytes(16)), FragmentDigest(0, 3, GOOD)))
    assert watch.majority_snapshots(frozenset()) == ()
    watch.on_report("c", (FragmentDigest(0, 4, GOOD),))
    assert watch.majority_snapshots(frozenset()) == (SnapshotBody(0, 4, GOOD),)
    commit(watch, SnapshotBody(0, 4, GOOD))
    assert watch.majority_snapshots(frozenset()) == ()


@pytest.mark.parametrize("regions", [2, 4, 6])
def test_exactly_half_of_the_regions_agree_to_no_snapshot(regions: int) -> None:
    watch, _ = a_watch(regions=regions)
    watch.on_digest(0, 4, GOOD, now_ns=0)
    *peers, last = "bcdefg"[: regions // 2]
    for peer in (*peers, "no-voter"):
        watch.on_report(peer, (FragmentDigest(0, 4, GOOD),))
    assert watch.majority_snapshots(frozenset()) == ()
    watch.on_report(last, (FragmentDigest(0, 4, GOOD),))
    assert watch.majority_snapshots(frozenset()) == (SnapshotBody(0, 4, GOOD),)


def test_versions_between_snapshots_are_never_proposed() -> None:
    watch, _ = a_watch()
    watch.on_digest(0, 5, GOOD, now_ns=0)
    watch.on_report("b", (FragmentDigest(0, 5, GOOD),))
    assert watch.majority_snapshots(frozenset()) == ()


def test_a_snapshot_of_what_is_not_committed_here_waits() -> None:
    watch, _ = a_watch(committed=3)
    watch.on_digest(0, 4, GOOD, now_ns=0)
    watch.on_report("b", (FragmentDigest(0, 4, GOOD),))
    assert watch.majority_snapshots(frozenset()) == ()


def test_a_region_alone_agrees_with_itself() -> None:
    watch, _ = a_watch(regions=1)
    watch.on_digest(0, 4, GOOD, now_ns=0)
    assert watch.majority_snapshots(frozenset()) == (SnapshotBody(0, 4, GOOD),)


def test_snapshot_versions_are_told_until_the_ledger_has_them() -> None:
    watch, _ = a_watch(1)
    watch.on_digest(0, 4, GOOD, now_ns=0)
    watch.on_digest(0, 5, BAD, now_ns=0)
    late = 100 * FRESH_NS
    assert watch.to_report(now_ns=late) == (FragmentDigest(0, 4, GOOD), FragmentDigest(0, 5, BAD))
    commit(watch, SnapshotBody(0, 4, GOOD))
    assert watch.to_report(now_ns=late) == (FragmentDigest(0, 5, BAD),)


def test_a_heartbeat_stays_short_while_no_snapshot_is_committed() -> None:
    watch, _ = a_watch(40, committed=100)
    for version in range(4, 101, 4):
        for fragment in range(40):
            watch.on_digest(fragment, version, GOOD, now_ns=0)
    told = [watch.to_report(now_ns=10 * FRESH_NS) for _ in range(40)]
    assert max(map(len, told)) <= (FRESH_MAX + 1) * (PENDING_MAX + 1)
    assert {item.fragment for reported in told for item in reported} == set(range(40)), "each has its turn"


def test_what_a_peer_tells_is_bounded() -> None:
    watch, _ = a_watch(committed=50)
    for version in range(-5, 200):
        watch.on_report("b", (FragmentDigest(0, version, GOOD), FragmentDigest(version, 3, GOOD)))
    assert sum(map(len, watch.reported)) == 3
    assert list(watch.reported[0]["b"]) == [49, 50, 51], f"the newest {REPORTED_MAX} that may be committed"
    watch.on_report("c", (FragmentDigest(1, 3, GOOD[:31]), FragmentDigest(1, 2**62, GOOD)))
    assert "c" not in watch.reported[1]


def test_an_own_digest_that_the_ledger_does_not_have_is_found_whichever_comes_first() -> None:
    watch, _ = a_watch()
    watch.on_digest(0, 4, BAD, now_ns=0)
    commit(watch, SnapshotBody(0, 4, GOOD))
    commit(watch, SnapshotBody(1, 4, GOOD))
    assert watch.divergences() == (SnapshotBody(0, 4, GOOD),)
    watch.on_digest(1, 4, BAD, now_ns=0)
    watch.on_digest(2, 0, BAD, now_ns=0)
    assert watch.divergences() == (SnapshotBody(0, 4, GOOD), SnapshotBody(1, 4, GOOD), SnapshotBody(2, 0, GOOD))
    watch.forget(0)
    assert SnapshotBody(0, 4, GOOD) not in watch.divergences()
    assert watch.newest(0) == (-1, b"")
    assert watch.differences == 1


def test_a_region_that_most_contradict_knows_it() -> None:
    watch, _ = a_watch(regions=5)
    watch.on_digest(1, 4, BAD, now_ns=0)
    for peer in ("b", "c"):
        watch.on_report(peer, (FragmentDigest(1, 4, GOOD),))
    assert watch.minority_fragment() == -1
    watch.on_report("d", (FragmentDigest(1, 4, GOOD),))
    assert watch.minority_fragment() == 1


NAMED = SnapshotBody(1, 4, BAD)


@pytest.mark.parametrize(
    ("own", "told", "is_doubted", "is_refuted", "is_refuted_by_a_contributor"),
    [
        (BAD, "", False, False, False),
        (None, "", True, False, False),
        (GOOD, "", True, False, False),
        (GOOD, "b", True, True, False),
        (GOOD, "bc", True, True, True),
        (None, "bc", True, False, False),
    ],
)
def test_a_state_is_refuted_where_a_majority_told_another(
    own: bytes | None, told: str, is_doubted: bool, is_refuted: bool, is_refuted_by_a_contributor: bool
) -> None:
    watch, _ = a_watch()
    if own is not None:
        watch.on_digest(1, 4, own, now_ns=0)
    for peer in told:
        watch.on_report(peer, (FragmentDigest(1, 4, GOOD),))
    assert bool(watch.doubt(NAMED)) is is_doubted
    assert watch.is_refuted(NAMED, is_voter=True) is is_refuted
    assert watch.is_refuted(NAMED, is_voter=False) is is_refuted_by_a_contributor


def test_a_state_that_a_majority_told_is_not_doubted_whatever_is_here() -> None:
    watch, _ = a_watch()
    watch.on_digest(1, 4, GOOD, now_ns=0)
    for peer in "bc":
        watch.on_report(peer, (FragmentDigest(1, 4, BAD),))
    assert watch.doubt(NAMED) == ""
    assert not watch.is_refuted(NAMED, is_voter=True)


@pytest.mark.parametrize(
    ("committed", "reached", "is_due"), [(8, -1, True), (8, 3, True), (8, 4, False), (8, 5, False), (3, 2, False)]
)
def test_the_state_of_a_committed_version_that_is_not_reached_is_due(
    committed: int, reached: int, is_due: bool
) -> None:
    watch, _ = a_watch(committed=committed)
    if reached >= 0:
        watch.on_digest(1, reached, GOOD, now_ns=0)
    assert watch.is_due(NAMED) is is_due
