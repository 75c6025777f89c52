"""The virtual shards that this process's learner trains (`core.merge.data_shards`), as the run's members are now.

A process has one learner, so there is one table, HERE: data loaders are made before `attach`, and read it row by row.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Final

import torch

from diloco_node.core.merge.data_shards import SHARDS, region_shards
from diloco_node.errors import LearnerError

log = logging.getLogger("diloco_node.learner")

_UNKNOWN: Final = 2


class RegionShards:
    """See the module.

    Attributes:
        flags: shape (SHARDS,), uint8, in shared memory: 1 for a shard of this region, 0 for another's. A worker of a
            data loader, forked or spawned, that has this tensor sees each change.
    """

    def __init__(self) -> None:
        self.flags = torch.full((SHARDS,), _UNKNOWN, dtype=torch.uint8, device="cpu")
        self.flags.share_memory_()  # type: ignore[no-untyped-call]
        # Another tuple after each change.
        self._own = tuple(range(SHARDS))
        # Of the run; empty before `begin`, and when alone.
        self._run_id = self._region = ""

    @property
    def own(self) -> tuple[int, ...]:
        """The region's shards, ascending, the same object until they change; all of them when alone.

        Raises:
            LearnerError: there is a daemon, and `attach` has not asked it yet.
        """
        if not self._region:
            owns(self.flags, 0)
        return self._own

    def begin(self, run_id: str, region: str, regions: Iterable[str]) -> None:
        """Be the learner of this region, one of the members that train."""
        self._run_id, self._region = run_id, region
        self._own = ()
        self.follow(regions)

    def follow(self, regions: Iterable[str]) -> None:
        """Take what is this region's share among these members. One that was removed trains what it had to its end."""
        own = region_shards(self._run_id, self._region, regions)
        if not own or own == self._own:
            return
        log.info("%d of %d shards of the data are this region's, %d before", len(own), SHARDS, len(self._own))
        self._own = own
        flags = torch.zeros(SHARDS, dtype=torch.uint8, device="cpu")
        flags[list(own)] = 1
        self.flags.copy_(flags)

    def clear(self) -> None:
        """Be nobody's learner: alone."""
        self._run_id = self._region = ""
        self._own = tuple(range(SHARDS))
        self.flags.fill_(_UNKNOWN)

    def keep_all(self) -> None:
        """Let a loop that was stopped before its daemon answered read what it likes."""
        self.flags.fill_(1)


def owns(flags: torch.Tensor, shard: int) -> bool:
    """Whether a shard is this region's, by the flags of its table.

    Raises:
        LearnerError: there is a daemon, and `attach` has not asked it yet.
    """
    flag = int(flags[shard])
    if flag == _UNKNOWN and "DILOCO_SOCKET" in os.environ:
        raise LearnerError("whose the data are is known after attach(): make the loader before, iterate it afterwards")
    return flag > 0


HERE: Final = RegionShards()
