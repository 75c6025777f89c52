"""The rows of the data that one life of a learner trains, until the contributions that name them are merged. Pure.

A contribution names the rows of its steps. Those of a fragment's contributions follow each other without a gap, so each
one names everything since the last that was merged. Rows that are named may be merged after their learner has died. So
the shell makes `marks` durable before a contribution is announced, and the next life begins behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diloco_node.core.data_shards import ShardRows, TrainedRows

_Ranges = dict[int, tuple[int, int]]
"""Per shard, the rows [start, stop) that were trained last without a gap."""


class RowBook:
    """Rows that contributions name, until they are merged.

    Attributes:
        marks: per shard the row up to which any life has named it. Another object after each change.
    """

    def __init__(self, fragments: int, marks: Mapping[int, int]) -> None:
        self.marks = dict(marks)
        self._fragments = fragments
        self._inherited = self.marks
        # The change of the members by which the loop's last rows were drawn; None: it has none yet.
        self._changes: int | None = None
        # What was trained, by the step of the snapshot that named it first; and since the newest snapshot.
        self._segments: list[tuple[int, _Ranges]] = []
        self._new: _Ranges = {}
        # By fragment the step of the last snapshot that was merged.
        self._included: dict[int, int] = {}

    def behind(self, shards: tuple[int, ...], starts: tuple[int, ...]) -> tuple[int, ...]:
        """Where this life begins each shard: behind what was named; -1 stays."""
        pairs = zip(shards, starts, strict=True)
        return tuple(max(start, self._inherited.get(shard, 0)) if start >= 0 else start for shard, start in pairs)

    def inherit(self, shards: tuple[int, ...], starts: tuple[int, ...]) -> None:
        """Have the first contributions say what lives before have named, where the ledger may not know it.

        Another region that is given the shard begins behind it then, also if it is merged later, or never.
        """
        starts_of = dict(zip(shards, starts, strict=True))
        _extend(
            self._new, {shard: (row, row) for shard, row in self._inherited.items() if starts_of.get(shard, 0) < row}
        )

    def add(self, ranges: Iterable[ShardRows], changes: int) -> None:
        """Take rows that the next step trains, drawn by the members after so many changes."""
        _extend(self._new, {item.shard: (item.start, item.stop) for item in ranges})
        self._changes = changes

    def rows(self, fragment: int, step: int, changes: int) -> tuple[int, ...]:
        """The rows of a snapshot of the fragment at this step, the last one, as `TrainedRows.packed`.

        Empty: the loop counts none.

        Args:
            changes: of the members, that the learner has heard of. A loop that drew no row since all others are merged
                has stopped drawing, and trains nothing by fewer: regions that wait for its word get it.
        """
        if self._changes is None:
            return ()
        if self._new:
            self._segments.append((step, self._new))
            self._new = {}
        elif not self._segments:
            self._changes = changes
        ranges: _Ranges = {}
        for at, segment in self._segments:
            if at > self._included.get(fragment, 0):
                _extend(ranges, segment)
        stops = {shard: max(stop, self.marks.get(shard, 0)) for shard, (_, stop) in ranges.items()}
        self.marks = self.marks | stops
        return TrainedRows(self._changes, tuple(ShardRows(shard, *ranges[shard]) for shard in sorted(ranges))).packed()

    def include(self, fragment: int, step: int) -> None:
        """Note that a version includes the fragment's snapshot of this step."""
        self._included[fragment] = step
        if len(self._included) == self._fragments:
            least = min(self._included.values())
            self._segments = [(at, segment) for at, segment in self._segments if at > least]


def _extend(ranges: _Ranges, later: _Ranges) -> None:
    """Add later rows: behind those before, or, where another region had the shard meanwhile, in their place."""
    for shard, (start, stop) in later.items():
        first, last = ranges.get(shard, (start, start))
        ranges[shard] = (first if last == start else start, stop)
