"""Data that follow the members of the run: each row is trained by the region that owns its virtual shard now::

    loader = ShardLoader(rows, batch_size=8, num_workers=4, seed=1)    # a DataLoader; rows have a length
    with diloco_node.attach(model, optimizer, stateful={"data": loader}) as diloco:
        while not diloco.should_stop:
            for batch in loader:                                       # about one pass over the region's rows

`ShardSampler` is for other loaders, such as torchdata's `StatefulDataLoader`, and `ShardStream` for rows without a
length. All regions must have the same rows in the same order. Each of them deals the region's rows to its ranks, which
have batches of one size, so no library may deal them once more (Lightning: `use_distributed_sampler=False`).

A `ShardLoader` tells the run how far it is in each shard. After a restart, and in a region that gets a shard, it goes
on where the rows were merged. Positions of the others are in the learner's checkpoint alone. A shard that comes from
another region is begun at this region's pass there, and what that one trained of it in the pass is trained again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Final

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from diloco_node.core.data_shards import SHARDS
from diloco_node.errors import LearnerError
from diloco_node.learner.process_signals import place
from diloco_node.learner.region_shards import HERE, owns
from diloco_node.learner.shard_order import RowRange, ShardOrder
from diloco_node.learner.token_check import TokenCount

_AT_ONCE: Final = 1024
"""Rows whose numbers are computed together."""


class _RankOfRegion:
    """This process among the ranks of its region: as given, else as torch.distributed says at the first row: a loader
    may be made before there is a process group."""

    def __init__(self, rank: int | None, ranks: int | None) -> None:
        self._place: tuple[int, int] | None = None
        if rank is not None or ranks is not None:
            count, number = ranks if ranks is not None else self._now()[1], rank or 0
            if not 0 <= number < count:
                raise LearnerError(f"rank {number} of {count} ranks: give 0 <= rank < ranks")
            self._place = (number, count)

    @property
    def count(self) -> int:
        """How many there are, as far as is known."""
        return self._now()[1]

    def settle(self) -> tuple[int, int]:
        """Rank and ranks, from the first row on. Raises LearnerError: there are several, and no process group yet."""
        if self._place is None:
            if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not _has_group():
                raise LearnerError(
                    "rows are dealt to the ranks of torch.distributed: call init_process_group before the first row, "
                    "or give rank= and ranks="
                )
            self._place = self._now()
        return self._place

    def _now(self) -> tuple[int, int]:
        if self._place is not None:
            return self._place
        return (dist.get_rank(), dist.get_world_size()) if _has_group() else (0, 1)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


class ShardSampler(Sampler[int]):
    """Numbers of the rows of this region's shards, of one rank. The next iteration goes on behind the last one.

    An iteration is as long as a pass over an even part of the rows, known before `attach`. Its iterator has the
    position (`state_dict`), which `StatefulDataLoader` keeps.

    Args:
        rows: how many there are in the run, or what has that length.
        seed: of the order; the same on all ranks. rank, ranks: of the region; by torch.distributed if None.

    Attributes:
        order: where the region is. is_counted: the run counts its rows.
    """

    def __init__(self, rows: int | Sized, *, seed: int = 0, rank: int | None = None, ranks: int | None = None) -> None:
        self._count = rows if isinstance(rows, int) else len(rows)
        self._ranks = _RankOfRegion(rank, ranks)
        self.order = ShardOrder(self._count, seed=seed)
        self.is_counted = False
        HERE.use(self, self._count)
        # The numbers that were computed last, and of which rows.
        self._range = RowRange(-1, 0, 0, 0)
        self._numbers = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Rows of an iteration."""
        return max(1, self._count // place()[1] // self._ranks.count)

    def __iter__(self) -> ShardIterator:
        return ShardIterator(self)

    def next_row(self) -> int:
        """The next row of this rank; the other ranks take those around it. Raises ConfigError: the region has none."""
        offset, ranks = self._ranks.settle()
        for rows in self.order.advance(HERE.own, ranks, HERE.starts if self.is_counted else None):
            if offset < rows.stop - rows.start:
                number = self._number(rows, rows.start + offset)
                offset = ranks  # all further ones are others'
            else:
                offset -= rows.stop - rows.start
        return number

    def _number(self, rows: RowRange, place: int) -> int:
        whole, shard, size = self._range, rows.shard, int(self.order.sizes[rows.shard])
        start = place // _AT_ONCE * _AT_ONCE
        if (whole.shard, whole.number, whole.start) != (shard, rows.number, start):
            self._range = RowRange(shard, rows.number, start, min(size, start + _AT_ONCE))
            self._numbers, _ = self.order.rows_of([self._range])
        return int(self._numbers[place - start])


class ShardIterator(Iterator[int]):
    """One iteration of a `ShardSampler`, with a position."""

    def __init__(self, sampler: ShardSampler) -> None:
        self._sampler = sampler
        self._rows = len(sampler)

    def __next__(self) -> int:
        if not self._rows:
            raise StopIteration
        self._rows -= 1
        return self._sampler.next_row()

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {**self._sampler.order.state(), "left": self._rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._sampler.order.restore(state)
        self._rows = state["left"]


class ShardLoader(DataLoader[Any]):
    """A DataLoader over this region's shards, with the position behind the last batch that the loop was given.

    Rows that its workers have fetched further are not counted: after a restart, or a `break`, they come once more.

    Args:
        rows: a dataset with a length, the same in all regions.
        batch_size: of each rank. seed, rank, ranks: see `ShardSampler`. options: further ones of DataLoader.

    Attributes:
        token_count: of the batches that it gave, for `attach` to compare.
    """

    def __init__(
        self,
        rows: Dataset[Any],
        *,
        batch_size: int = 1,
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(rows, Sized) or not isinstance(batch_size, int) or batch_size < 1:
            text = f"ShardLoader({type(rows).__name__}, batch_size={batch_size!r})"
            raise LearnerError(f"{text}: give rows with a length, else a ShardStream, and one row a batch or more")
        if not options.get("in_order", True):
            raise LearnerError(
                "ShardLoader(in_order=False): rows are counted in their order, and would come in another. Leave it out"
            )
        self._sampler = ShardSampler(rows, seed=seed, rank=rank, ranks=ranks)
        self._batches = _Batches(self._sampler, batch_size)
        self._state = self._batches.state()
        self.token_count = TokenCount()
        super().__init__(rows, batch_sampler=self._batches, **options)
        HERE.use(self, len(rows), is_counting=True)

    def __iter__(self) -> Any:
        """An iteration as long as the sampler's, or what is left of it."""
        self._sampler.is_counted = HERE.counts(self)
        self._batches.begin(self._state)
        for batch in super().__iter__():
            self._state, changes = self._batches.states.popleft()
            if self._sampler.is_counted:
                HERE.gave(self._state["positions"].numpy(), changes)
            self.token_count.add(batch)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Positions behind the last batch, and batches left of the iteration."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the first batch. Raises ConfigError: the state has no positions."""
        self._batches.begin(state)
        self._state = self._batches.state()


class _Batches(Sampler[list[int]]):
    """Batches of a sampler. states: behind each that the loader has asked for and the loop was not given yet, and the
    number of changes of the members by which it was drawn."""

    def __init__(self, sampler: ShardSampler, size: int) -> None:
        self._sampler, self._size = sampler, size
        self.states: deque[tuple[dict[str, Any], int]] = deque()
        # Batches left of the iteration; 0: the next is a new one. None: the loader did not begin it.
        self._count: int | None = 0

    def state(self) -> dict[str, Any]:
        return {**self._sampler.order.state(), "left": self._count}

    def begin(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self._sampler.order.restore(state)
        self._count = int(state["left"])
        self.states.clear()

    def __len__(self) -> int:
        return max(1, len(self._sampler) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        if self._count is None:
            raise LearnerError("a ShardLoader deals its rows to the ranks by itself: use it without Accelerate.prepare")
        batches, self._count = self._count or len(self), None
        for left_count in reversed(range(batches)):
            changes = HERE.changes
            batch = [self._sampler.next_row() for _ in range(self._size)]
            self.states.append(({**self._sampler.order.state(), "left": left_count}, changes))
            yield batch


class ShardStream(IterableDataset[Any]):
    """The rows of this region's shards of one pass over a stream: each rank, and each worker of its loader, a part.

    Every region reads the whole stream and keeps its own rows; from the row that is next when the members change it
    keeps by the new owners. One number, the next row of the stream, is the position in every shard. A further pass
    wants another object: `EndlessLoader(lambda epoch: StatefulDataLoader(ShardStream(rows(epoch)), batch_size=8))`.

    rows: the stream, the same in all regions. rank, ranks: see `ShardSampler`.
    """

    def __init__(self, rows: Iterable[Any], *, rank: int | None = None, ranks: int | None = None) -> None:
        self._rows = rows
        self._ranks = _RankOfRegion(rank, ranks)
        self._flags = HERE.flags
        HERE.use(self)
        self._next = 0

    def __getstate__(self) -> dict[str, Any]:
        """Take it to a worker, where no process group is."""
        self._ranks.settle()
        return self.__dict__

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        if workers > 1 and isinstance(self._rows, IterableDataset):
            raise LearnerError(
                f"a ShardStream over a {type(self._rows).__name__} takes one worker at most: it deals its rows to the "
                "workers of a DataLoader by itself, so most would be trained by nobody. Give num_workers=1"
            )
        rank, ranks = self._ranks.settle()
        slots, slot = ranks * workers, rank * workers + number
        first = self._next
        for index, row in enumerate(self._rows):
            turn, shard = divmod(index, SHARDS)
            if index < first:
                continue
            self._next = index + 1
            if owns(self._flags, shard) and (turn + shard) % slots == slot:
                yield row

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Before the first row."""
        self._next = state["next"]
