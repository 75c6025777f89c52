"""The virtual shards that this process's learner trains (`core.data_shards`), and how far it is in each.

The daemon deals them out (`ShardsGiven`), by the ledger, and says where each is begun. The rows that were trained go
into the ledger with each contribution. A process has one learner, so there is one table, HERE: data loaders are made
before `attach`, and read it row by row.

A learner that dies may have named rows in a contribution that is merged later. So the positions that were named are in
a file before the contribution is announced, and the next life begins behind them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from diloco_node.core.data_shards import SHARDS, ShardRows
from diloco_node.core.row_book import RowBook
from diloco_node.errors import LearnerError
from diloco_node.storage.durable import replace_file
from diloco_node.wire.learner_link import ShardsGiven, Welcome

I64 = NDArray[np.int64]

log = logging.getLogger("diloco_node.learner")

_UNKNOWN: Final = 2

POSITIONS_FILE: Final = "positions"
"""In the folder `learner` of the region's state: a hash of the run's name, SHARDS little-endian i64, their CRC-32."""

_RUN_BYTES: Final = 16
_CHECKSUM_BYTES: Final = 4


class RegionShards:
    """The shards that this process's learner trains, and its position in each.

    Attributes:
        flags: shape (SHARDS,), uint8, in shared memory: 1 for a shard of this region, 0 for another's. A worker of a
            data loader, forked or spawned, that has this tensor sees each change.
        changes: of the members, by which the shards are this region's now.
    """

    def __init__(self) -> None:
        self.flags = torch.full((SHARDS,), _UNKNOWN, dtype=torch.uint8, device="cpu")
        self.flags.share_memory_()  # type: ignore[no-untyped-call]
        # Readers of this table: how many rows each has, and whether it says how far it is (`gave`).
        self._readers: weakref.WeakKeyDictionary[object, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self.clear()

    def clear(self, components: Iterable[object] = ()) -> None:
        """Be nobody's learner: alone. The loader that counts is the first of these that is one, if any is."""
        self.flags.fill_(_UNKNOWN)
        self.changes = 0
        # Another tuple after each change of them, or of where they are begun.
        self._own = tuple(range(SHARDS))
        # Of the run's name, on rank 0, which has the file.
        self._run = b""
        # None before `begin`, and when alone.
        self._book: RowBook | None = None
        # Rows of each shard, over all passes, that the loop was deal, or that lives before trained.
        self._positions: I64 = np.zeros(SHARDS, np.int64)
        # Those that a former region still has.
        self._awaited: tuple[int, ...] = ()
        # The loader that counts.
        loaders = [reader for reader, (_, is_counting) in self._readers.items() if is_counting]
        tellers = [component for component in components if any(component is loader for loader in loaders)]
        self._teller: weakref.ref[object] | None = weakref.ref(tellers[0]) if tellers else None
        # What the file holds; and whether the daemon has not told the first shards yet.
        self._saved: Mapping[int, int] = {}
        self._is_new = True

    @property
    def own(self) -> tuple[int, ...]:
        """The region's shards that it may train now, ascending; all when alone. The same object until they, or
        where they are begun, change.

        Raises LearnerError: there is a daemon, and `attach` has not asked it yet.
        """
        if self._book is None:
            owns(self.flags, 0)
        return self._own

    @property
    def is_waiting(self) -> bool:
        """Whether a loader was made for the region's shards, and only those that it may not train yet have its rows."""
        least = min((rows for rows, _ in self._readers.values()), default=0)  # rows are in the first shards
        has_rows = bool(self._own) and self._own[0] < least
        return bool(least) and not has_rows and (not self._own or min(self._awaited, default=SHARDS) < least)

    def use(self, reader: object, rows: int = SHARDS, *, is_counting: bool = False) -> None:
        """Note that a loader of so many rows reads this table. `is_counting`: it says how far it is (`gave`)."""
        self._readers[reader] = rows, is_counting

    def begin(self, welcome: Welcome, *, is_first: bool) -> None:
        """Be the learner of a region; its shards come with `follow`. `is_first`: rank 0, which has the file."""
        self._saved = _read(welcome) if is_first else {}
        self._book = RowBook(welcome.fragments, self._saved)
        self._run = _run_hash(welcome.run_id) if is_first else b""
        self._own = ()

    def recall(self, deal: ShardsGiven) -> ShardsGiven:
        """On rank 0, move where shards are begun behind what a life before has named, for all ranks to follow."""
        assert self._book is not None
        if self._is_new:
            self._is_new = False
            self._book.inherit(deal.shards, deal.starts)
        return replace(deal, starts=self._book.behind(deal.shards, deal.starts))

    def follow(self, deal: ShardsGiven) -> None:
        """Take what is this region's share. One that was removed trains what it had to its end.

        A daemon that has just started may not know yet how the members are now: an older share is not taken.
        """
        if not deal.shards or deal.changes < self.changes:
            return
        shards, starts = np.array(deal.shards, np.int64), np.array(deal.starts, np.int64)
        is_further = bool((starts > self._positions[shards]).any())
        self._positions[shards] = np.maximum(self._positions[shards], starts)
        own = tuple(shards[starts >= 0].tolist())
        self._awaited = tuple(shards[starts < 0].tolist())
        if own != self._own:
            log.info("%d of %d shards of the data are this region's, %d before", len(own), SHARDS, len(self._own))
        if own != self._own or is_further:  # it may have been another's meanwhile, which trained on
            self._own = own
        flags = torch.zeros(SHARDS, dtype=torch.uint8, device="cpu")
        flags[list(deal.shards)] = 1
        self.flags.copy_(flags)
        # Last, for a loop may draw in a thread of its own: rows of the shards before are not to carry the new number.
        self.changes = deal.changes

    def keep_all(self) -> None:
        """Let a loop that was stopped before its daemon answered read what it likes."""
        self.flags.fill_(1)

    # ---- what is trained ---------------------------------------------------------------------------------------------

    def counts(self, loader: object) -> bool:
        """Whether this loader's rows are those that count: the one in `stateful`, else the first that is to train."""
        teller = None if self._teller is None else self._teller()
        if teller is None and not torch.is_grad_enabled():
            return False  # an evaluation
        if teller is None:
            self._teller = weakref.ref(loader)
        elif teller is not loader and self._book is not None and torch.is_grad_enabled():
            log.warning(
                "a second loader of the region's shards: after a restart or a move its rows come once more. If it is "
                "the one that trains, give it to attach(stateful={'data': loader})"
            )
        return teller is None or teller is loader

    @property
    def starts(self) -> I64 | None:
        """Where a shard that comes to the loader that counts is gone on; None when alone. Not a copy."""
        return None if self._book is None else self._positions

    def gave(self, positions: I64, changes: int) -> None:
        """Note that the loop was given rows up to these positions, drawn by the members after so many changes."""
        if self._book is None:
            return
        places = np.flatnonzero(positions > self._positions)
        columns = (values.tolist() for values in (places, self._positions[places], positions[places]))
        self._book.add(starmap(ShardRows, zip(*columns, strict=True)), changes)
        self._positions[places] = positions[places]

    def rows(self, fragment: int, step: int) -> tuple[int, ...]:
        """See `RowBook.rows`."""
        return () if self._book is None else self._book.rows(fragment, step, self.changes)

    def include(self, fragment: int, step: int) -> None:
        """See `RowBook.include`."""
        if self._book is not None:
            self._book.include(fragment, step)

    def save(self, state_dir: Path) -> None:
        """Make what was named durable, on rank 0. From the disk's thread. Raises StorageError: the disk refused."""
        marks = {} if self._book is None else self._book.marks
        if marks != self._saved and self._run:
            positions = np.zeros(SHARDS, "<i8")
            positions[list(marks)] = list(marks.values())
            body = self._run + positions.tobytes()
            replace_file(state_dir / "learner" / POSITIONS_FILE, [body, _checksum(body)])
            self._saved = marks


def _run_hash(run_id: str) -> bytes:
    return hashlib.sha256(run_id.encode()).digest()[:_RUN_BYTES]


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")


def _read(welcome: Welcome) -> dict[int, int]:
    """Read the positions that lives before have named."""
    path = Path(welcome.state_dir) / "learner" / POSITIONS_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    is_whole = len(body) == _RUN_BYTES + 8 * SHARDS and checksum == _checksum(body)
    if is_whole and body.startswith(_run_hash(welcome.run_id)):
        return {shard: row for shard, row in enumerate(np.frombuffer(body[_RUN_BYTES:], "<i8").tolist()) if row > 0}
    log.warning("%s is %s: the data go on where they are merged", path, "of another run" if is_whole else "damaged")
    return {}


def owns(flags: torch.Tensor, shard: int) -> bool:
    """Whether a shard is this region's, by the flags of its table.

    Raises LearnerError: there is a daemon, and `attach` has not asked it yet.
    """
    flag = int(flags[shard])
    if flag == _UNKNOWN and "DILOCO_SOCKET" in os.environ:
        raise LearnerError("whose the data are is known after attach(): make the loader before, iterate it afterwards")
    return flag > 0


HERE: Final = RegionShards()
