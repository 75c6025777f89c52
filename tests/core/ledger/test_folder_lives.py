"""core/ledger/folder_lives.py: a folder that has forgotten what it told is another folder, until it is named anew."""

import pytest

from diloco_node.core.events import TimerFired
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.election import Role
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.folder_lives import FolderLives, next_life, starts_of
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.messages import RequestVoteReply
from diloco_node.core.types import DiskNamedBody, FolderLife
from tests.kit.ledger_kit import a_core, a_leader, ack, arrive, disk_of, sends, vote, vote_request, write_all

NAMES = ("a", "b", "c")
LIVES = [next_life(start << 32, 7) for start in range(9)]


def told(life: int, *, end: int = 0, committed: int = 0, name: str = "b") -> FolderLife:
    return FolderLife(disk_of(name), life, end, committed)


def a_view(names: tuple[str, ...] = NAMES) -> DiskView:
    return DiskView(names, Roster.of_voters(names, {name: disk_of(name) for name in names}))


def test_each_start_is_a_greater_life_whatever_the_chance() -> None:
    assert [starts_of(life) for life in LIVES] == list(range(1, 10))
    assert next_life(next_life(0, (1 << 32) - 1), 0) == 2 << 32


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (told(LIVES[3] ^ 1, end=40), "it comes with start 4, and was already at start 4"),
        (told(LIVES[2], end=40), "it comes with start 3, and was already at start 4"),
        (told(LIVES[4], end=29), "its ledger ends at entry 29, and it had committed up to entry 30"),
        (told(LIVES[4], end=30), ""),
        (told(LIVES[8], end=99), ""),
        (told(LIVES[3], end=20), ""),
    ],
)
def test_an_older_copy_is_told_once_and_counts_no_more(folder: FolderLife, words: str) -> None:
    lives = FolderLives(a_view())
    assert lives.hear("b", told(LIVES[3], end=20, committed=20)) == ""
    assert lives.hear("b", told(LIVES[3], end=20, committed=30)) == ""
    assert lives.hear("b", folder) == words
    assert lives.hear("b", folder) == ""
    assert lives.is_older("b") is bool(words)
    assert not lives.is_older("c")


def test_what_was_acknowledged_before_the_link_was_lost_counts_before_it_is_told() -> None:
    lives = FolderLives(a_view())
    lives.hear("b", told(LIVES[0]))
    lives.hold("b", 12)
    lives.hold("c", 12)
    lives.link_changed("b")
    assert "ends at entry 11" in lives.hear("b", told(LIVES[1], end=11))
    lives.hold("b", 99)


def test_what_was_acknowledged_counts_once_the_same_life_is_told_again() -> None:
    lives = FolderLives(a_view())
    lives.hear("b", told(LIVES[0]))
    lives.hold("b", 12)
    lives.hear("b", told(LIVES[0]))
    assert "ends at entry 11" in lives.hear("b", told(LIVES[1], end=11))


def test_a_new_life_may_acknowledge_more_than_it_began_with_before_it_tells_that_it_began() -> None:
    lives = FolderLives(a_view())
    lives.hear("b", told(LIVES[0]))
    lives.hold("b", 28)
    lives.link_changed("b")
    lives.hold("b", 30)
    lives.link_changed("b")
    assert lives.hear("b", told(LIVES[1], end=28)) == "", "two links came and went before it was told"
    assert not lives.is_older("b")


def test_the_old_life_is_not_excused_by_a_new_one_that_is_told_late() -> None:
    lives = FolderLives(a_view())
    lives.hear("b", told(LIVES[0]))
    lives.hold("b", 28)
    lives.link_changed("b")
    lives.hold("b", 30)
    assert "ends at entry 27, and it had committed up to entry 28" in lives.hear("b", told(LIVES[1], end=27))


def test_a_folder_that_is_named_anew_counts_again() -> None:
    view = a_view()
    lives = FolderLives(view)
    lives.hear("b", told(LIVES[5], committed=30))
    assert lives.hear("b", told(LIVES[2]))
    removed = seal(1, 1, ZERO_HASH, DiskNamedBody("b", b""))
    named = seal(2, 1, removed.hash, DiskNamedBody("b", disk_of("b")))
    view.follow([removed])
    assert not lives.is_older("b")
    assert lives.hear("b", told(LIVES[2])) == ""
    view.follow([named])
    assert (view.roster.memberships["b"].folders, view.roster.memberships["c"].folders) == (2, 1)
    assert not lives.is_older("b")
    assert lives.hear("b", told(LIVES[2], committed=2)) == ""
    assert lives.hear("b", told(LIVES[3], end=1)) != "", "it is watched as before"


def test_of_two_regions_an_older_copy_is_told_and_counts() -> None:
    lives = FolderLives(a_view(("a", "b")))
    lives.hear("b", told(LIVES[5], committed=30))
    assert lives.hear("b", told(LIVES[2]))
    assert not lives.is_older("b")


def test_neither_votes_nor_acknowledgements_of_an_older_copy_count() -> None:
    core, effects, now_ns = a_leader()
    write_all(core, effects, now_ns)
    core.folders.hear("b", told(LIVES[5], committed=30))
    assert core.folders.hear("b", told(LIVES[2]))
    arrive(core, "b", ack(core.term, 2, True, core.last_index), now_ns)
    assert core.commit_index == 0
    arrive(core, "c", ack(core.term, 2, True, core.last_index), now_ns)
    assert core.commit_index == core.last_index

    voter = a_core()
    now_ns = voter.wake_at_ns
    voter.folders.hear("b", told(LIVES[5], committed=30))
    voter.folders.hear("b", told(LIVES[2]))
    voter.handle(TimerFired(), now_ns=now_ns)
    arrive(voter, "b", vote(1, True, True), now_ns)
    assert voter.role is Role.ASKING
    arrive(voter, "c", vote(1, True, True), now_ns)
    assert voter.role is Role.CANDIDATE
    for candidate, is_granted in (("c", True), ("b", False)):
        voter = a_voter()
        effects = arrive(voter, candidate, vote_request(1, False, 9, 1), now_ns)
        answers = [message for _, message in sends(write_all(voter, effects))]
        assert [answer.granted for answer in answers if isinstance(answer, RequestVoteReply)] == [is_granted]


def a_voter() -> LedgerCore:
    voter = a_core()
    voter.folders.hear("b", told(LIVES[5], committed=30))
    voter.folders.hear("b", told(LIVES[2]))
    return voter
