"""Equal versions, equal bytes: what is told, what is compared, one alarm for one difference."""

from __future__ import annotations

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Note
from diloco_node.core.recovery.digest_watch import FRESH_MAX, FRESH_NS, VERSIONS_KEPT, DigestWatch
from diloco_node.core.types import FragmentDigest

GOOD = bytes(range(32))
BAD = bytes(32)


def a_watch(fragments: int = 3) -> tuple[DigestWatch, EffectBuffer]:
    effects = EffectBuffer("a")
    return DigestWatch(fragments, effects), effects


def alarms(effects: EffectBuffer) -> list[tuple[int, int]]:
    return [(note.fragment, note.version) for note in effects.take() if isinstance(note, Note) and note.is_alarm]


def test_equal_digests_are_silent_and_a_difference_is_an_alarm_once() -> None:
    watch, effects = a_watch()
    watch.computed(1, 4, GOOD, now_ns=0)
    watch.reported("b", (FragmentDigest(1, 4, GOOD[:16]),))
    assert alarms(effects) == []
    watch.reported("c", (FragmentDigest(1, 4, BAD[:16]),))
    watch.reported("c", (FragmentDigest(1, 4, BAD[:16]),))
    assert alarms(effects) == [(1, 4)]
    assert watch.differences == 1


def test_other_versions_are_not_compared() -> None:
    watch, effects = a_watch()
    watch.computed(1, 4, GOOD, now_ns=0)
    watch.reported("b", (FragmentDigest(1, 3, BAD[:16]), FragmentDigest(2, 4, BAD[:16])))
    assert alarms(effects) == []


def test_peer_that_is_ahead_is_compared_when_we_get_there() -> None:
    watch, effects = a_watch()
    watch.reported("b", (FragmentDigest(1, 5, BAD[:16]),))
    watch.computed(1, 4, GOOD, now_ns=0)
    assert alarms(effects) == []
    watch.computed(1, 5, GOOD, now_ns=0)
    assert alarms(effects) == [(1, 5)]


def test_peer_that_is_behind_is_compared_with_what_we_had() -> None:
    watch, effects = a_watch()
    for version in range(VERSIONS_KEPT + 1):
        watch.computed(0, version, GOOD, now_ns=0)
    watch.reported("b", (FragmentDigest(0, 0, BAD[:16]),))
    assert alarms(effects) == [], "too long ago"
    watch.reported("b", (FragmentDigest(0, 1, BAD[:16]),))
    assert alarms(effects) == [(0, 1)]


def test_fragment_that_does_not_exist_is_ignored() -> None:
    watch, effects = a_watch()
    watch.reported("b", (FragmentDigest(3, 0, BAD[:16]), FragmentDigest(-1, 0, BAD[:16])))
    watch.computed(2, 0, GOOD, now_ns=0)
    assert alarms(effects) == []


def test_new_digests_ride_along_for_a_while_and_all_in_turn() -> None:
    watch, _ = a_watch()
    for fragment in range(3):
        watch.computed(fragment, 1, GOOD, now_ns=0)
    fresh = watch.to_report(now_ns=FRESH_NS)
    assert fresh == tuple(FragmentDigest(fragment, 1, GOOD[:16]) for fragment in range(3))
    later = [watch.to_report(now_ns=FRESH_NS + 1) for _ in range(3)]
    assert sorted(one.fragment for reported in later for one in reported) == [0, 1, 2]


def test_heartbeat_carries_few_digests() -> None:
    watch, _ = a_watch(40)
    for fragment in range(40):
        watch.computed(fragment, 1, GOOD, now_ns=0)
    assert len(watch.to_report(now_ns=1)) <= FRESH_MAX + 1


def test_newest_digest_is_known() -> None:
    watch, _ = a_watch()
    assert watch.newest(0) == (-1, b"")
    watch.computed(0, 7, GOOD, now_ns=0)
    assert watch.newest(0) == (7, GOOD[:16])
