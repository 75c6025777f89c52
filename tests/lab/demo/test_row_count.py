"""The rows of a run's data, counted from its ledger: what is missing and what is twice."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.data_shards import ShardRows, TrainedRows
from diloco_node.core.types import Entry
from diloco_node.lab.demo.demo_options import CONTEXT
from diloco_node.lab.demo.demo_report import _data
from diloco_node.lab.demo.demo_run import _data_text
from diloco_node.lab.demo.row_count import count_rows
from tests.kit.rounds_kit import committed_round, contribution

SIZES = (300, 100)
ROUND = tuple[int, str, tuple[tuple[int, int, int], ...]]
"""Fragment, region, and (shard, start, stop) of each range."""


def entries(rounds: Sequence[ROUND]) -> list[Entry]:
    made: list[Entry] = []
    for fragment, region, ranges in rounds:
        rows = TrainedRows(0, tuple(ShardRows(*item) for item in ranges)).packed() if ranges else ()
        body = committed_round(fragment, len(made) + 1, [replace(contribution(region), rows=rows)])
        made.append(SimpleNamespace(body=body))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("rounds", "count"),
    [
        ([], (0, 0.0, 0)),
        ([(0, "a", ()), (1, "b", ())], (0, 0.0, 0)),
        ([(0, "a", ((7, 0, 4), (9, 0, 2))), (1, "a", ((7, 0, 4), (9, 0, 2)))], (6, 6.0, 0)),
        # A fragment lacks rows that the other has: a quarter of the model.
        ([(0, "a", ((7, 0, 4),)), (1, "a", ((7, 2, 4),))], (4, 3.5, 0)),
        # Another region goes on behind it; a word without rows moves the position alone.
        ([(0, "a", ((7, 0, 4),)), (0, "b", ((7, 4, 6),)), (1, "b", ((7, 8, 8),))], (8, 4.5, 0)),
        # Twice, once of it within a range, late and in another order.
        ([(0, "a", ((7, 2, 9),)), (0, "b", ((7, 4, 6),)), (0, "c", ((7, 0, 3),)), (1, "a", ((7, 0, 9),))], (9, 9.0, 3)),
    ],
)
def test_rows_are_counted_in_each_fragment(rounds: list[ROUND], count: tuple[int, float, int]) -> None:
    counted = count_rows(entries(rounds), SIZES)
    assert (counted.rows, counted.merged, counted.twice) == count


@pytest.mark.parametrize(
    ("discarded_rows", "has_lost", "start", "fault"),
    [
        (2, False, 2, ""),
        (1, False, 2, "2 rows are in no merge, and only 64 tokens are discarded or carried"),
        (1, True, 2, ""),
        (9, False, 0, "2 rows are merged twice"),
        (9, True, 0, ""),
    ],
)
def test_more_missing_rows_than_discarded_steps_and_rows_that_come_twice_are_faults(
    *, discarded_rows: int, has_lost: bool, start: int, fault: str
) -> None:
    """`start` 2: rows 0 and 1 are missing; 0: they are there, and twice in the second round."""
    rounds: list[ROUND] = [(0, "a", ((7, start, 6),)), (1, "a", ((7, start, 6),))]
    rounds += [(0, "b", ((7, 0, 2),))] if start == 0 else []
    account: Any = SimpleNamespace(discarded=discarded_rows * CONTEXT - 1, carried=1)
    document = _data(entries(rounds), SIZES, account, has_lost=has_lost)
    assert document["faults"] == ([fault] if fault else [])


def test_a_script_that_counts_no_rows_is_not_praised_for_having_merged_none_twice() -> None:
    """Its faults are told all the same."""
    none = {"rows": 0, "merged": 0, "unmerged": 0, "twice": 0, "faults": []}
    assert _data_text(none) == "not counted: the script has no ShardLoader"
    assert _data_text({**none, "faults": ["2 rows are merged twice"]}).endswith("FAULTS: 2 rows are merged twice")
    assert _data_text({**none, "rows": 9, "unmerged": 1}) == "9 rows, 1 of them in no merge, 0 merged twice"
