"""Positions in the data, by committed contributions: whose a shard is, where it is begun, and what is refused."""

from dataclasses import replace

import pytest

from diloco_node.core.data_shards import ROWS_MAX, SHARDS, ShardRows, TrainedRows, region_shards
from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.shard_account import ADVANCE_MAX, WAITING
from diloco_node.core.ledger.summary import RunSummary, decode_summary, encode_summary
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import (
    EXPELLED,
    Ballot,
    Contribution,
    DiskNamedBody,
    EntryBody,
    GenesisBody,
    LeaderBody,
    Member,
    RoundBody,
)

NAMES = ("a", "b", "c")
GENESIS = GenesisBody("run", "", "", NAMES, (bytes(32),) * 2, tuple(bytes([number]) * 16 for number in (1, 2, 3)))
OWN = {name: region_shards("run", name, NAMES) for name in NAMES}
WITH_D = (*NAMES, "d")
TO_D = next(shard for shard in region_shards("run", "d", WITH_D) if shard in OWN["a"])
"""A shard of a that d gets when it joins."""


class Book:
    """A ledger of two fragments, and contributions that follow each other."""

    def __init__(self) -> None:
        self.history = RoundHistory(2, NAMES)
        self.steps: dict[tuple[str, int, int], int] = {}
        self.add(GENESIS)

    @property
    def account(self) -> Account:
        return self.history.account

    def add(self, body: EntryBody) -> None:
        self.history.apply(seal(self.account.index + 1, 1, bytes(32), body), now_ns=0)

    def join(self, name: str) -> None:
        self.add(MembershipBody(name, "contributor"))

    def leave(self, name: str) -> None:
        self.add(MembershipBody(name, "former"))

    def contribution(
        self, name: str, *rows: tuple[int, int, int], fragment: int = 0, life: int = 1, changes: int = 0
    ) -> Contribution:
        step = self.steps.get((name, life, fragment), 0)
        packed = TrainedRows(changes, tuple(ShardRows(*item) for item in rows)).packed()
        version = self.history.versions[fragment]
        return Contribution(name, life, fragment, version, step + 1, step, step + 4, 40, (1.0,), packed)

    def fault(self, name: str, *rows: tuple[int, int, int], **how: int) -> str:
        return self.account.fault(self.contribution(name, *rows, **how))

    def merge(self, name: str, *rows: tuple[int, int, int], **how: int) -> None:
        contribution = self.contribution(name, *rows, **how)
        assert self.account.fault(contribution) == ""
        self.commit(contribution)

    def commit(self, contribution: Contribution) -> None:
        self.steps[contribution.learner, contribution.incarnation, contribution.fragment] = contribution.step_to
        version = self.history.versions[contribution.fragment] + 1
        members = (Member(contribution, 1.0),)
        self.add(RoundBody(contribution.fragment, version, Ballot(1, version), members, 1.0, (1.0,), (), bytes(32)))

    def start(self, name: str, shard: int, life: int = 1) -> int:
        return self.account.shards.starts(name, life, (shard,))[0]


def test_a_life_begins_where_the_rows_of_the_one_before_are_merged():
    book = Book()
    shard, other = OWN["a"][:2]
    assert (book.start("a", shard), book.account.shards.is_counted) == (0, False)
    book.merge("a", (shard, 0, 10))
    book.merge("a", (shard, 0, 7), fragment=1)
    assert book.account.shards.position(shard) == 10, "the furthest of the fragments: what is not merged is discarded"
    assert book.start("a", shard) == 0, "to the life that trained it, whatever a daemon that restarts tells it"
    assert book.start("a", shard, life=2) == 10
    assert book.start("a", other, life=2) == 0
    book.merge("a", (shard, 12, 12), life=2)  # what the first life had named on its way here
    book.merge("a", (shard, 7, 12), fragment=1)  # and what comes of it late
    assert (book.start("a", shard, life=2), book.start("a", shard, life=3)) == (12, 12)


def test_a_position_that_goes_back_is_refused():
    book = Book()
    shard = OWN["a"][0]
    book.merge("a", (shard, 0, 10))
    assert book.fault("a", (shard, 8, 20), life=2) == (
        f"a goes back to row 8 of shard {shard}, which is trained up to 10"
    )
    assert book.fault("a", (shard, 0, 8), life=2) == (
        f"a goes back to row 0 of shard {shard}, which is trained up to 10"
    )
    book.merge("a", (shard, 10, 20), life=2)
    assert book.fault("a", (shard, 8, 20), life=2).startswith("a goes back to row 8")
    assert book.fault("a", (shard, 10, 25), life=2) == ""


def test_a_position_that_nobody_could_reach_is_refused():
    """It would be in the ledger for good, and whoever comes next could never go behind it."""
    book = Book()
    shard = OWN["a"][0]
    book.merge("a", (shard, 0, 10))
    assert "rows ahead of the run in shard" in book.fault("a", (shard, 10, 11 + ADVANCE_MAX))
    assert "rows ahead of the run in shard" in book.fault("a", (shard, ROWS_MAX, ROWS_MAX))
    assert "a row beyond" in book.fault("a", (shard, ROWS_MAX, 2 * ROWS_MAX))
    assert book.fault("a", (shard, 10, 10 + ADVANCE_MAX)) == ""


def test_rows_of_a_shard_that_is_anothers_are_refused():
    book = Book()
    shard = OWN["b"][0]
    book.merge("a", (shard, 50, 50))  # without rows: nothing of it counts
    assert book.account.shards.position(shard) == 0
    assert book.fault("a", (shard, 0, 1)) == f"a trains shard {shard} of the data, which is b's"


@pytest.mark.parametrize(
    "numbers", [(0, 5), (0, 5, 1), (0, SHARDS, 0, 1), (0, 7, 0, 1, 5, 0, 1), (0, 5, 0, 1, 5, 1, 1)]
)
def test_numbers_that_are_no_rows_are_refused(numbers: tuple[int, ...]):
    book = Book()
    contribution = replace(book.contribution("a"), rows=numbers)
    assert book.account.fault(contribution).startswith("rows of a: ")


def test_a_change_of_the_members_that_was_not_made_is_refused():
    book = Book()
    assert book.fault("a", changes=1) == "a goes by change 1 of the members, which has not been made"
    book.join("d")
    assert book.fault("a", changes=1) == ""


def test_a_shard_that_moves_waits_for_its_owners_word_and_goes_on_behind_it():
    book = Book()
    book.merge("a", (TO_D, 0, 10))
    book.join("d")
    assert book.start("d", TO_D) == WAITING
    book.merge("a", (TO_D, 0, 14), fragment=1)  # a has not heard yet
    assert book.start("d", TO_D) == WAITING
    assert book.fault("d", (TO_D, 14, 15), changes=1) == ""  # nothing keeps a liar from it: the learner waits
    book.merge("a", (TO_D, 10, 17), changes=1)
    assert book.start("d", TO_D) == 17
    book.merge("d", (TO_D, 17, 30), changes=1)
    # The other fragment's contribution of a names the rows again that it trained before it heard.
    book.merge("a", (TO_D, 14, 17), fragment=1, changes=1)
    assert book.account.shards.position(TO_D) == 30
    assert book.fault("a", (TO_D, 17, 31), changes=1) == f"a trains shard {TO_D} of the data, which is d's"


def test_a_former_owner_that_counts_no_rows_or_leaves_holds_nothing_up():
    book = Book()
    book.join("d")
    silent = next(shard for shard in region_shards("run", "d", WITH_D) if shard in OWN["b"])
    gone = next(shard for shard in region_shards("run", "d", WITH_D) if shard in OWN["c"])
    assert [book.start("d", shard) for shard in (TO_D, silent, gone)] == [WAITING] * 3
    book.commit(replace(book.contribution("b"), rows=()))
    book.leave("c")
    assert [book.start("d", shard) for shard in (TO_D, silent, gone)] == [WAITING, 0, 0]


def test_the_shards_of_a_region_that_leaves_go_on_where_they_were_merged():
    book = Book()
    shard = OWN["c"][0]
    book.merge("c", (shard, 0, 9))
    book.leave("c")
    heir = next(name for name in ("a", "b") if shard in region_shards("run", name, ("a", "b")))
    assert book.start(heir, shard) == 9
    assert all(book.start("a", own) >= 0 for own in region_shards("run", "a", ("a", "b")))


def test_a_summary_says_the_same_and_is_compact():
    book = Book()
    for number, shard in enumerate(OWN["a"]):
        book.merge("a", (shard, 0, 1000 + number), changes=0, fragment=number % 2)
    book.join("d")
    summary = book.history.sum_up()
    data = encode_summary(summary)
    assert len(data) < 9 * len(OWN["a"]) + 4 * SHARDS // 4 + 2000
    twin = Account()
    twin.restore(decode_summary(data, fragments=2), book.account.index)
    for name in WITH_D:
        own = region_shards("run", name, WITH_D)
        for life in (1, 2):
            assert twin.shards.starts(name, life, own) == book.account.shards.starts(name, life, own)
    assert twin.shards.lines() == book.account.shards.lines()


def test_a_run_that_counts_no_rows_pays_nothing_for_them():
    book = Book()
    without = replace(book.contribution("a"), rows=())
    seconds = seal(9, 1, bytes(32), LeaderBody("a"))
    assert seconds.index == 9
    book.join("d")
    summary: RunSummary = book.history.sum_up()
    assert summary.shards == ()
    assert book.start("d", TO_D) == 0, "nobody waits any more, here as after the summary"
    book.commit(without)
    assert book.history.sum_up().shards == ()


def test_what_is_taken_is_taken_back():
    account = Account()
    bodies: list[EntryBody] = [GENESIS, MembershipBody("d", "contributor")]
    shard = OWN["a"][0]
    contribution = Contribution("a", 1, 0, 0, 1, 0, 4, 40, (1.0,), (1, shard, 0, 5))
    bodies.append(RoundBody(0, 1, Ballot(1, 1), (Member(contribution, 1.0),), 1.0, (1.0,), (), bytes(32)))
    states = []
    for index, body in enumerate(bodies, start=1):
        states.append((account.shards.lines(), account.shards.starts("d", 1, (TO_D,))))
        account.take(seal(index, 1, bytes(32), body))
    assert account.shards.position(shard) == 5
    for index in (2, 1, 0):
        account.back_to(index)
        assert (account.shards.lines(), account.shards.starts("d", 1, (TO_D,))) == states[index]


def test_rows_that_conflict_with_those_of_a_merge_under_way_are_told_whichever_is_first():
    book = Book()
    shard, other = OWN["a"][:2]
    decided = book.contribution("a", (shard, 5, 10))
    shards = book.account.shards
    for rows in ((shard, 0, 12), (shard, 7, 12)):
        beside = book.contribution("a", rows, fragment=1)
        assert book.account.fault(beside) == ""
        text = shards.conflict(beside, decided)
        assert text.startswith("beside what a has in the merge of fragment 0: a goes back to row")
    assert shards.conflict(book.contribution("a", (shard, 5, 12), (other, 0, 3), fragment=1), decided) == ""
    assert shards.conflict(book.contribution("b", (OWN["b"][0], 0, 3), fragment=1), decided) == ""
    assert shards.position(shard) == 0, "nothing is booked by asking"


def test_a_word_that_gives_shards_up_waits_for_a_merge_under_way_with_their_rows():
    book = Book()
    book.join("d")
    decided = book.contribution("a", (TO_D, 0, 9))
    silent = replace(book.contribution("a", fragment=1, life=2), rows=())
    assert book.account.fault(decided) == book.account.fault(silent) == ""
    assert f"a trains shard {TO_D} of the data, which is d's" in book.account.shards.conflict(silent, decided)


def test_rows_from_before_a_shard_went_away_and_came_back_may_be_merged_late():
    book = Book()
    book.merge("a", (TO_D, 0, 10))
    book.join("d")
    late = book.contribution("a", (TO_D, 0, 10), fragment=1)
    book.merge("a", changes=1)
    book.merge("d", (TO_D, 10, 20), changes=1)
    book.leave("d")
    book.merge("a", (TO_D, 20, 25), changes=2)
    assert book.account.fault(late) == ""
    assert "goes back to row 0" in book.fault("a", (TO_D, 0, 24), fragment=1)


@pytest.mark.parametrize("is_expelled_first", [True, False])
def test_no_shard_waits_for_a_region_that_is_expelled(is_expelled_first: bool):
    book = Book()
    bodies: list[EntryBody] = [DiskNamedBody("a", EXPELLED), MembershipBody("d", "contributor")]
    for body in bodies if is_expelled_first else reversed(bodies):
        book.add(body)
    assert book.start("d", TO_D) == 0
    assert set(book.account.shards.waiting()) == {"b", "c"}
    twin = Account()
    twin.restore(decode_summary(encode_summary(book.history.sum_up()), fragments=2), book.account.index)
    twin.take(seal(twin.index + 1, 1, bytes(32), MembershipBody("e", "contributor")))
    assert "a" not in twin.shards.waiting(), "nor after a summary"
