"""The rows of a run's data, counted from the raw entries of its ledger: none lost, none twice. Pure.

It shares no code with `core.ledger.shard_account`, which the daemons keep. A row before its shard's position was
trained once. Where no merge of a fragment has it, its step was discarded there. So the tokens of such rows are at most
those that are booked as discarded, or carried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_node.core.data_shards import TrainedRows
from diloco_node.core.types import Entry, RoundBody


@dataclass(frozen=True, slots=True)
class RowCount:
    """The rows before the positions of all shards at the end.

    Attributes:
        rows: before them. merged: of these in merges, a mean over the fragments by their sizes. twice: merged more than
            once in a fragment, summed up over the fragments.
    """

    rows: int
    merged: float
    twice: int

    @property
    def unmerged(self) -> float:
        """Rows before the positions that are in no merge, a mean over the fragments by their sizes."""
        return self.rows - self.merged


def count_rows(entries: Iterable[Entry], fragment_sizes: Sequence[int]) -> RowCount:
    """Count the rows that a run's contributions name.

    entries: all committed ones, from entry 1 on. fragment_sizes: values of each fragment, by index.
    """
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    positions: dict[int, int] = {}
    rounds = (entry.body for entry in entries if isinstance(entry.body, RoundBody))
    for body in rounds:
        for rows in (member.contribution.rows for member in body.members):
            for item in TrainedRows.unpacked(rows).ranges if rows else ():
                ranges.setdefault((body.fragment, item.shard), []).append((item.start, item.stop))
                positions[item.shard] = max(positions.get(item.shard, 0), item.stop)
    twice, counts = 0, [0] * len(fragment_sizes)
    for (fragment, _), pairs in ranges.items():
        end = 0
        for start, stop in sorted(pairs):
            twice += max(0, min(end, stop) - start)
            counts[fragment] += max(0, stop - max(start, end))
            end = max(end, stop)
    total = sum(fragment_sizes)
    mean = sum(size * count for size, count in zip(fragment_sizes, counts, strict=True)) / total
    return RowCount(sum(positions.values()), mean, twice)
