"""core/ledger/roster.py: entries change one membership at a time, and say nothing that can't follow."""

import dataclasses

import pytest

from diloco_node.core.bounds import REGIONS
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MemberKind, Membership, MembershipBody
from diloco_node.core.types import EXPELLED, DiskNamedBody, EntryBody, GenesisBody
from tests.kit.ledger_kit import disk_of

GENESIS = GenesisBody("run", "m", "s", tuple("abc"), (bytes(32),), tuple(map(disk_of, "abc")))
ADDED = MembershipBody("d", "contributor", "d.example:4317")


def roster_of(*bodies: EntryBody) -> Roster:
    """The roster after these, from index 1; each of them can be."""
    roster = Roster.of_voters("abc")
    for index, body in enumerate(bodies, start=1):
        assert not isinstance(body, MembershipBody) or roster.change_fault(body) == "", body
        roster = roster.after(seal(index, 1, ZERO_HASH, body))
    return roster


def test_a_region_is_added_gets_a_folder_then_a_vote_and_leaves() -> None:
    named, voter = DiskNamedBody("d", disk_of("d")), MembershipBody("d", "voter")
    roster = roster_of(GENESIS, ADDED)
    assert (roster.names, roster.voters) == (("a", "b", "c", "d"), ("a", "b", "c"))
    assert roster.memberships["d"] == Membership("d", "contributor", b"", 2, "d.example:4317", 0)
    roster = roster_of(GENESIS, ADDED, named, voter)
    assert roster.voters == ("a", "b", "c", "d")
    assert roster.memberships["d"] == Membership("d", "voter", disk_of("d"), 4, "d.example:4317", 1)
    roster = roster_of(GENESIS, ADDED, named, voter, MembershipBody("a", "contributor"), MembershipBody("d", "former"))
    assert (roster.names, roster.voters) == (("a", "b", "c"), ("b", "c"))
    assert roster.disks.keys() == set("abc"), "its folder counts for nothing any more"
    assert roster.memberships["d"].disk == b"", "nor is it remembered"


def test_an_expelled_voter_makes_up_for_no_other() -> None:
    assert roster_of(GENESIS).loss_fault("b") == ""
    fault = roster_of(GENESIS, DiskNamedBody("c", EXPELLED)).loss_fault("b")
    assert fault == "without b 2 of 2 voters must vote, and only 1 can: a"


def test_a_region_that_comes_back_is_a_contributor_without_a_folder_and_its_lives_are_remembered() -> None:
    bodies = (GENESIS, MembershipBody("c", "former"), MembershipBody("c", "contributor"))
    roster = roster_of(*bodies)
    assert (roster.kind_of("c"), roster.disks["c"], roster.replacements("c")) == (MemberKind.CONTRIBUTOR, b"", 0)
    assert roster_of(*bodies, DiskNamedBody("c", b"x" * 16)).replacements("c") == 1, "whose folder may be another one"
    assert roster_of(GENESIS, ADDED, DiskNamedBody("d", disk_of("d"))).replacements("d") == 0, "its first one"


@pytest.mark.parametrize(
    ("bodies", "change", "fault"),
    [
        ((), MembershipBody("a", "king"), "there is no kind of member 'king'"),
        ((), MembershipBody("d", "former"), "d is no member of the run"),
        ((), MembershipBody("a", "voter"), "a is a voter already"),
        ((), MembershipBody("d", "voter"), "d is no member: add it first"),
        ((ADDED,), MembershipBody("d", "voter"), "the disk of d does not hold yet what is committed"),
        ((DiskNamedBody("a", EXPELLED), MembershipBody("a", "contributor")), MembershipBody("a", "voter"), "readmit"),
        (
            (DiskNamedBody("a", b""),),
            MembershipBody("b", "former"),
            "without b 2 of 2 voters must vote, and only 1 can: c",
        ),
        (
            (MembershipBody("a", "former"), MembershipBody("b", "contributor")),
            MembershipBody("c", "former"),
            "c is the only voter: give another one a vote first, or end the run with `diloco-node finish`",
        ),
        ((), MembershipBody("witness", "contributor"), "witness is the name of a witness, and of no region"),
        (
            (MembershipBody("c", "former"),),
            MembershipBody("w", "witness", "s3://sites/run"),
            "witness is the name of a witness, and of no region",
        ),
    ],
)
def test_a_change_that_can_not_be_is_refused_with_its_arithmetic(
    bodies: tuple[EntryBody, ...], change: MembershipBody, fault: str
) -> None:
    assert fault in roster_of(GENESIS, *bodies).change_fault(change)


def test_so_many_regions_and_no_more_are_ever_members() -> None:
    former = [Membership(f"r{number}", "former") for number in range(REGIONS - 3)]
    roster = Roster([*Roster.of_voters("abc").lines, *former])
    assert "which is as many as there can be" in roster.change_fault(ADDED)
    assert roster.change_fault(MembershipBody("r1", "contributor")) == "", "one that comes back is none more"


def test_a_place_is_for_good() -> None:
    aa, back = MembershipBody("aa", "contributor"), MembershipBody("b", "contributor")
    roster = roster_of(GENESIS, ADDED, MembershipBody("b", "former"), aa, back)
    assert roster.places("aa") == (*tuple("abcd"), "aa"), "founders, then each one that came, and those that left"
    assert roster.places("e") == (*roster.places("aa"), "e"), "one that is not listed here yet"
    again = Roster(roster.lines, roster.changes, roster.signature)
    assert (again.places("a"), again.names) == (roster.places("a"), ("a", "aa", "b", "c", "d"))
    assert again.statement("run") == roster.statement("run")


def test_a_majority_is_of_voters() -> None:
    roster = roster_of(GENESIS, ADDED)
    assert [roster.is_majority(names) for names in ("a", "ad", "ab", "abd")] == [False, False, True, True]


def test_the_view_goes_back_when_its_entries_are_overwritten() -> None:
    view = DiskView("abc")
    log = [seal(index, 1, ZERO_HASH, body) for index, body in enumerate((GENESIS, ADDED), start=1)]
    view.follow(log)
    assert (view.roster.names, view.last_change_index) == (("a", "b", "c", "d"), 2)
    view.on_truncation(2)
    assert (view.roster.names, view.last_change_index) == (("a", "b", "c"), 1)


def test_a_region_that_comes_back_without_an_address_has_none() -> None:
    """It may be elsewhere by now: the others would dial the place where it was, and not the one in run.toml."""
    roster = Roster.of_voters(("a", "b", "c")).changed(MembershipBody("d", "contributor", "old:1"), 3)
    moved = roster.changed(MembershipBody("d", "former"), 4).changed(MembershipBody("d", "contributor"), 5)
    assert moved.addresses({"d": "new:2"})["d"] == "new:2"
    assert moved.addresses({})["d"] is None
    back = moved.changed(MembershipBody("d", "former"), 6)
    assert back.changed(MembershipBody("d", "contributor", "new:3"), 7).addresses({})["d"] == "new:3"
    assert roster.changed(MembershipBody("d", "voter"), 4).addresses({})["d"] == "old:1", "a change of its kind"


REMOVED = {name: MembershipBody(name, "former") for name in "abc"}


@pytest.mark.parametrize(
    ("ours", "theirs", "is_split"),
    [
        ((), (), False),
        ((ADDED,), (), False),
        ((REMOVED["b"],), (REMOVED["b"], MembershipBody("b", "contributor")), False),
        # While `b` was away, by a change that it never saw.
        ((ADDED, REMOVED["a"]), (ADDED, REMOVED["a"], MembershipBody("a", "contributor"), REMOVED["b"]), False),
        ((REMOVED["c"], MembershipBody("witness", "witness", "s3://x/y")),) * 2 + (False,),
        # Two that went on alone, also once one of them has grown, and one beside a majority that went on.
        ((REMOVED["b"], REMOVED["c"]), (REMOVED["a"], REMOVED["c"]), True),
        ((REMOVED["b"], REMOVED["c"], ADDED), (REMOVED["c"], REMOVED["a"]), True),
        ((REMOVED["b"], REMOVED["c"]), (ADDED, DiskNamedBody("d", disk_of("d")), MembershipBody("d", "voter")), True),
    ],
)
def test_lists_that_no_history_has_both_of_are_told_from_older_and_newer_ones(
    ours: tuple[EntryBody, ...], theirs: tuple[EntryBody, ...], is_split: bool
) -> None:
    disks = tuple(DiskNamedBody(name, disk_of(name)) for name in "abc")
    first, second = (unchecked(GENESIS, *disks, *bodies) for bodies in (ours, theirs))
    assert (first.is_split_from(second), second.is_split_from(first)) == (is_split, is_split)


def test_a_witness_that_was_removed_makes_no_other_history() -> None:
    witness = MembershipBody("witness", "witness", "s3://x/y")
    beside = unchecked(GENESIS, REMOVED["c"], witness)
    assert not beside.is_split_from(beside.changed(MembershipBody("witness", "former"), 9))


def test_lines_that_nobody_signed_make_no_other_history() -> None:
    """A peer may show the signed list with another index of an entry."""
    roster = unchecked(GENESIS, REMOVED["c"])
    lines = [dataclasses.replace(line, since=line.since + 1) for line in roster.lines]
    assert not roster.is_split_from(Roster(lines, roster.changes, roster.signature))


def unchecked(*bodies: EntryBody) -> Roster:
    """The roster after these, whatever the operator who gave them may do."""
    roster = Roster.of_voters("abc")
    for index, body in enumerate(bodies, start=1):
        roster = roster.after(seal(index, 1, ZERO_HASH, body))
    return roster
