"""The virtual shards of a run's data, and their owners: a change of the members moves as few as it can. Pure.

Row n of the data is in shard n modulo SHARDS, so files of any size are dealt evenly, and a stream needs no length. Each
member that trains has a score for each shard, and the highest owns it (rendezvous hashing). A member that joins takes
shards from all others evenly, about one of M; one that leaves gives its own to all others, and no other shard moves.

The owners follow from the run's name and the members alone: every process of every region computes the same ones.

Source: Thaler, Ravishankar, "Using name-based mappings to increase hit rates" (1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

SHARDS: Final = 1024
"""So many that 32 members differ little in their parts, so few that all their positions are some kilobytes."""

_SCORE_BYTES: Final = 8


def shard_owners(run_id: str, regions: Iterable[str]) -> tuple[str, ...]:
    """The owner of each shard.

    Args:
        regions: the members that train, in any order; at least one.
    """
    names = sorted(set(regions))
    scores = [_scores(run_id, name) for name in names]
    ends = range(_SCORE_BYTES, (SHARDS + 1) * _SCORE_BYTES, _SCORE_BYTES)
    return tuple(max(zip((row[end - _SCORE_BYTES : end] for row in scores), names, strict=True))[1] for end in ends)


def region_shards(run_id: str, region: str, regions: Iterable[str]) -> tuple[int, ...]:
    """The shards of one of the members, ascending; none of a region that is no member."""
    return tuple(shard for shard, owner in enumerate(shard_owners(run_id, regions)) if owner == region)


def _scores(run_id: str, region: str) -> bytes:
    """A member's scores, shard after shard."""
    name = run_id.encode()
    text = b"diloco-node shard\0%d\0%b%b" % (len(name), name, region.encode())
    return hashlib.shake_256(text).digest(SHARDS * _SCORE_BYTES)
