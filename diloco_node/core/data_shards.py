"""The virtual shards of a run's data, and their owners: a change of the members moves as few as it can. Pure.

Row n of the data is in shard n modulo SHARDS, so files of any size are dealt evenly, and a stream needs no length. Each
member that trains has a score for each shard, and the highest owns it (rendezvous hashing). A member that joins takes
shards from all others evenly, about one of M; one that leaves gives its own to all others, and no other shard moves.

The owners follow from the run's name and the members alone: every process of every region computes the same ones.

How far a region is in its shards travels with its contributions (`TrainedRows`), and is committed with the rounds
(`core.ledger.shard_account`).

Source: Thaler, Ravishankar, "Using name-based mappings to increase hit rates" (1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np

SHARDS: Final = 1024
"""So many that 32 members differ little in their parts, so few that all their positions are some kilobytes."""

ROWS_MAX: Final = 1 << 48
"""Rows of one shard over all passes: at a million a second nine years."""


def shard_owners(run_id: str, regions: Iterable[str]) -> tuple[str, ...]:
    """The owner of each shard. regions: the members that train, in any order; at least one."""
    return _owners(run_id, tuple(sorted(set(regions))))


@lru_cache(maxsize=64)
def _owners(run_id: str, names: tuple[str, ...]) -> tuple[str, ...]:
    import numpy as np  # here: the supervisor and the commands import SHARDS

    scores = np.array([_scores(run_id, name) for name in reversed(names)])  # of equal scores the last name's wins
    return tuple([names[-1 - place] for place in scores.argmax(axis=0).tolist()])


@lru_cache(maxsize=64)
def _shards_by_owner(run_id: str, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    owners = _owners(run_id, names)
    return {name: tuple(shard for shard, owner in enumerate(owners) if owner == name) for name in names}


def region_shards(run_id: str, region: str, regions: Iterable[str]) -> tuple[int, ...]:
    """The shards of one of the members, ascending; none of a region that is no member."""
    return _shards_by_owner(run_id, tuple(sorted(set(regions)))).get(region, ())


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows [start, stop) of a shard, counted over all passes."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TrainedRows:
    """The rows that a contribution's steps trained.

    Attributes:
        changes: the learner went by the members after so many changes (`Roster.changes`) in the last step, and trains
            none of the shards that they took from it any more.
        ranges: by shard, one of each. Without a row: the region is that far in the shard, by an earlier life.
    """

    changes: int
    ranges: tuple[ShardRows, ...]

    def packed(self) -> tuple[int, ...]:
        """As `Contribution.rows` has it: the changes, then shard, start and length of each range."""
        numbers = (number for item in self.ranges for number in (item.shard, item.start, item.stop - item.start))
        return (self.changes, *numbers)

    @classmethod
    def unpacked(cls, numbers: Sequence[int]) -> TrainedRows:
        """Read what `packed` made. Raises ValueError: nothing that it makes."""
        ranges = tuple(
            ShardRows(shard, start, start + length)
            for shard, start, length in zip(numbers[1::3], numbers[2::3], numbers[3::3], strict=True)
        )
        shards = [item.shard for item in ranges]
        if not numbers or shards != sorted(set(shards)) or any(shard >= SHARDS for shard in shards):
            raise ValueError(f"shards {shards[:9]} are not ascending numbers below {SHARDS}")
        if any(item.stop > ROWS_MAX for item in ranges):
            raise ValueError(f"a row beyond {ROWS_MAX}")
        return cls(numbers[0], ranges)


@lru_cache(maxsize=64)
def _scores(run_id: str, region: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A member's scores, shard after shard."""
    name = run_id.encode()
    text = b"diloco-node shard\0%d\0%b%b" % (len(name), name, region.encode())
    import numpy as np

    return np.frombuffer(hashlib.shake_256(text).digest(8 * SHARDS), ">u8").astype(np.uint64)
