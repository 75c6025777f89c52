"""What a learner's contributions say of the rows that it trained."""

from diloco_node.core.data_shards import ShardRows, TrainedRows
from diloco_node.core.row_book import RowBook


def said(book: RowBook, fragment: int, step: int) -> list[tuple[int, int, int]]:
    rows = TrainedRows.unpacked(book.rows(fragment, step, 0))
    return [(item.shard, item.start, item.stop) for item in rows.ranges]


def test_each_contribution_says_what_was_trained_since_the_last_that_was_merged():
    book = RowBook(2, {})
    assert book.rows(0, 0, 0) == (), "no loader counts"
    book.add([ShardRows(7, 0, 4)], 0)
    assert said(book, 0, 1) == [(7, 0, 4)]
    book.add([ShardRows(7, 4, 8), ShardRows(9, 0, 1)], 0)
    assert said(book, 1, 2) == [(7, 0, 8), (9, 0, 1)]
    assert said(book, 0, 2) == [(7, 0, 8), (9, 0, 1)], "not merged yet: once more, and further"
    book.include(0, 1)
    book.add([ShardRows(9, 1, 5)], 2)
    assert said(book, 0, 3) == [(7, 4, 8), (9, 0, 5)]
    assert book.rows(0, 3, 0)[0] == 2, "by which members it drew last"
    book.include(1, 2)
    assert said(book, 1, 3) == [(9, 1, 5)]
    assert book.marks == {7: 8, 9: 5}


def test_what_every_fragment_has_is_forgotten():
    book = RowBook(2, {})
    for step in range(1, 500):
        book.add([ShardRows(step % 3, step, step + 1)], 0)
        book.rows(step % 2, step, 0)
        book.include(step % 2, step)
    assert len(book._segments) <= 2


def test_a_life_begins_behind_what_the_one_before_has_named_and_says_so():
    book = RowBook(1, {3: 12, 5: 4, 8: 2})
    assert book.behind((3, 5, 6), (10, 9, -1)) == (12, 9, -1)
    book.inherit((3, 5, 6), (10, 9, -1))
    assert book.rows(0, 0, 0) == ()
    book.add([ShardRows(3, 12, 13)], 1)
    assert said(book, 0, 1) == [(3, 12, 13), (8, 2, 2)], "of a shard that is another's by now, too"


def test_a_shard_that_was_anothers_meanwhile_is_told_from_where_it_goes_on():
    book = RowBook(1, {})
    book.add([ShardRows(3, 0, 5)], 0)
    book.add([ShardRows(3, 9, 11)], 2)
    assert said(book, 0, 4) == [(3, 9, 11)]


def test_a_loop_that_draws_no_more_goes_by_the_members_of_now_once_its_rows_are_merged():
    book = RowBook(2, {})
    book.add([ShardRows(7, 0, 4)], 0)
    assert book.rows(0, 1, 1)[0] == book.rows(1, 1, 1)[0] == 0
    book.include(0, 1)
    assert book.rows(0, 3, 1)[0] == 0, "one fragment has its rows still to come"
    book.include(1, 1)
    assert book.rows(0, 5, 1) == (1,), "who waits for its word gets it"
    book.add([ShardRows(7, 4, 8)], 1)
    assert book.rows(1, 6, 2)[0] == 1, "it draws again, by the members that it goes by"
