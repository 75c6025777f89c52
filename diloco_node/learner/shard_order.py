"""The order in which a region trains the rows of its virtual shards, and how far it is in each: the position.

One shard is trained after another, so a step moves the positions of few. Each pass over a shard has an order of its
own, drawn from the seed. The shard that was begun is next among those with the fewest passes; the others follow in an
order that is drawn, too. So what comes next is a function of seed, positions and shards alone.

All ranks of a region go through the same rows, and each takes every so many-th: they have the same positions, and may
be more or fewer after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from diloco_node.core.data_shards import SHARDS
from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.permutation import mix, permute

I64 = NDArray[np.int64]

log = logging.getLogger("diloco_node.learner")

_PASS_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, stop) of one pass over a shard, in the order of that pass."""

    shard: int
    number: int
    start: int
    stop: int


class ShardOrder:
    """The order of all rows of the run, and the position in each shard. seed: the same on all ranks.

    Attributes:
        sizes: rows of each shard, shape (SHARDS,), int64.
        positions: rows of each shard that were given, over all passes; shape (SHARDS,), int64. They only grow.
    """

    def __init__(self, rows: int, *, seed: int) -> None:
        self._rows = rows
        self.sizes: I64 = np.maximum(0, rows - np.arange(SHARDS) + SHARDS - 1) // SHARDS
        self.positions: I64 = np.zeros(SHARDS, np.int64)
        # The number of the pass that the region is in: a shard that comes to it is begun there.
        self._pass = 0
        self._seed = mix(np.array([seed], np.int64).astype(np.uint64))
        self._own: tuple[int, ...] = ()
        self._filled: I64 = np.zeros(0, np.int64)
        # Shards that follow in this pass, the next one last; empty: choose.
        self._queue: list[int] = []

    def advance(self, own: tuple[int, ...], count: int, starts: I64 | None = None) -> list[RowRange]:
        """Take the next rows; the positions stand after them.

        own: the region's shards now; the same object while they are the same.
        starts: shape (SHARDS,), int64: where a shard that comes is gone on; None: at the region's pass.

        Raises ConfigError: they have no row.
        """
        if own is not self._own:
            shards = np.array(own, np.int64)
            self._filled = shards[self.sizes[shards] > 0]
            if starts is None:
                behind = self._pass * self.sizes[self._filled]
                self.positions[self._filled] = np.maximum(self.positions[self._filled], behind)
            else:
                new = np.setdiff1d(shards, np.array(self._own, np.int64)) if self._own else np.arange(SHARDS)
                self.positions[new] = starts[new]
                # Another region may have had a shard, and trained it, since the last rows were taken here.
                self.positions[shards] = np.maximum(self.positions[shards], starts[shards])
            self._own, self._queue = own, []
        if not len(self._filled):
            raise ConfigError(
                f"no data for this region: {self.sizes.sum()} rows or windows of text in {SHARDS} shards, none in "
                f"the {len(own)} that it may train now. Give more data, or make the loader before attach(), which "
                "waits for the shards that another region gives up"
            )
        ranges = []
        while count > 0:
            self._queue = self._queue or self._choose()
            shard = self._queue[-1]
            size, position = int(self.sizes[shard]), int(self.positions[shard])
            number, start = divmod(position, size)
            stop = min(size, start + count)
            ranges.append(RowRange(shard, number, start, stop))
            self.positions[shard] += stop - start
            count -= stop - start
            if stop == size:
                self._queue.pop()
        return ranges

    def _choose(self) -> list[int]:
        """Choose the shards of the next pass, or of what is left of this one."""
        numbers, starts = np.divmod(self.positions[self._filled], self.sizes[self._filled])
        self._pass = int(numbers.min())
        is_behind = numbers == self._pass
        shards = self._filled[is_behind]
        places = np.lexsort((mix(self._keys(shards, np.array(self._pass))), starts[is_behind] == 0))
        return [int(shard) for shard in shards[places[::-1]]]

    def rows_of(self, ranges: Sequence[RowRange]) -> tuple[I64, I64]:
        """The rows of ranges, one after another: their numbers, and the number of each one's pass."""
        lengths = [item.stop - item.start for item in ranges]
        shards, passes, starts = (
            np.repeat(np.array(values, np.int64), lengths)
            for values in zip(*((item.shard, item.number, item.start) for item in ranges), strict=True)
        )
        before = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        offsets, keys = starts + np.arange(len(shards)) - before, self._keys(shards, passes)
        sizes = self.sizes[shards]
        for size in set(sizes.tolist()):  # two, at most
            is_so = sizes == size
            offsets[is_so] = permute(offsets[is_so], size, keys[is_so])
        return SHARDS * offsets + shards, passes

    def _keys(self, shards: I64, passes: I64) -> NDArray[np.uint64]:
        return mix(self._seed ^ mix(((shards << _PASS_BITS) + passes).astype(np.uint64)))

    def state(self) -> dict[str, Any]:
        """The positions, for a checkpoint."""
        return {"positions": torch.from_numpy(self.positions.copy()), "pass": self._pass, "rows": self._rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises ConfigError: the state has no valid positions."""
        positions, number = state.get("positions"), state.get("pass")
        if (
            not isinstance(positions, torch.Tensor)
            or positions.shape != (SHARDS,)
            or positions.dtype != torch.int64
            or bool((positions < 0).any())
            or not isinstance(number, int)
            or number < 0
        ):
            text = f"data state {str(state)[:150]} has no positions"
            raise ConfigError(f"{text}: remove the folder learner/checkpoints, which is of another version")
        if state.get("rows", self._rows) != self._rows:
            log.warning(
                "the data have %d rows, and had %s when the checkpoint was written: in the passes that were begun, "
                "some rows come twice or not at all. Give the rows of before, the same in all regions",
                self._rows,
                state["rows"],
            )
        self.positions, self._pass = positions.cpu().numpy().copy(), number
        self._own, self._queue = (), []
