"""Data of the built-in trainer: the bytes to train on, the bytes to hold out, and the part of each region and rank.

The corpus is cut into windows, which are the rows of the run's virtual shards. A region draws from those that it owns,
so in one pass no two see the same window. Held-out text is never trained on, by anybody, and is the same for all.

Each pass over a shard is a permutation of its windows, so none is trained twice before all others were. The position in
each shard (`learner.shard_order`) is in the ledger: a restarted learner, and a shard's next owner, go on there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.permutation import mix
from diloco_node.learner.builtin.text_files import HELD_OUT_PERCENT, standard_library, text_files
from diloco_node.learner.region_shards import HERE
from diloco_node.learner.shard_order import ShardOrder

Windows = NDArray[np.uint8]

SIDE_BYTES_MIN: Final = 16_384
"""Bytes to train on, and bytes to hold out, at least, where files decide which is which."""

MEMORY_BYTES_MAX: Final = 1 << 30
"""All text is held in memory, twice while it is read."""

HELD_OUT_BYTES_MIN: Final = 1024


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes of text, in memory: shape (n,), uint8, to train on, and those that nobody trains on. files: read."""

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    files: int = 0

    def held_out_windows(self, count: int, context: int) -> Windows:
        """Evenly spaced held-out windows, the same for all: shape (count, context + 1). Raises ConfigError: too little
        text."""
        last = len(self.held_out) - (context + 1)
        if last < 0:
            raise ConfigError(
                f"{len(self.held_out)} held-out bytes are less than a window of model.context {context} and one: "
                "give more text with --data PATH, or a shorter context"
            )
        starts = np.linspace(0, last, count).astype(np.int64)
        return windows_at(self.held_out, starts, context)


def load_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Read files and folders of text; without paths, Python's standard library.

    Files of a folder are taken in order of their relative path; hidden ones, binary ones, symbolic links and folders of
    installed packages are left out. About 5 % of the files, chosen by a hash of their relative path, are held out.
    Where that would leave either side without so much (SIDE_BYTES_MIN), the last 5 % of everything is.

    Raises ConfigError: a path does not exist, or there is too little or too much text. DiskRefused: see `text_files`.
    """
    contents: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for file in text_files(paths):
        content = file.read()
        if content is None:
            continue
        total += len(content)
        if total > MEMORY_BYTES_MAX:
            raise ConfigError(
                f"more than {MEMORY_BYTES_MAX >> 20} MiB of text, which the built-in trainer holds in memory: give "
                "less with --data PATH, or train a model of Hugging Face with [model] hf"
            )
        contents[file.is_held_out].append(content)
    whole = np.frombuffer(b"".join((*contents[False], *contents[True])), np.uint8)
    boundary = sum(map(len, contents[False]))
    if min(boundary, len(whole) - boundary) < SIDE_BYTES_MIN:
        boundary = len(whole) - len(whole) * HELD_OUT_PERCENT // 100
    if len(whole) - boundary < HELD_OUT_BYTES_MIN:
        places = ", ".join(map(str, paths)) or str(standard_library())
        raise ConfigError(f"only {len(whole)} bytes of text in {places}: give at least 32 KiB of text with --data PATH")
    return Corpus(whole[:boundary], whole[boundary:], files=len(contents[False]) + len(contents[True]))


def windows_at(text: NDArray[np.uint8], starts: NDArray[np.int64], context: int) -> Windows:
    """Shape (len(starts), context + 1): the windows of text that begin there."""
    windows: Windows = text[starts[:, None] + np.arange(context + 1)]
    return windows


class ShardWindows:
    """The endless stream of batches of one rank of a region: windows of the text that its shards have now.

    A window is context bytes to predict and the one before them. Windows lie side by side; where the first begins
    differs between passes.

    own: the region's shards now (`Diloco.shards`). seed: the same in all regions, or they would draw from other texts.
    order: where the region is.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        own: Callable[[], tuple[int, ...]],
        batch: int,
        context: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._text, self._own, self._batch, self._context = corpus.train, own, batch, context
        self._rank, self._ranks = rank, ranks
        # One less than there are: the first may begin anywhere in the first context bytes.
        self.order = ShardOrder((len(corpus.train) - 1) // context - 1, seed=seed)
        self._seed = mix(np.array([seed], np.int64).astype(np.uint64))
        self._is_counted = HERE.counts(self)

    def next_batch(self) -> Windows:
        """The next batch, shape (batch, context + 1); then the positions are behind all ranks'. Raises ConfigError: no
        window."""
        changes = HERE.changes
        ranges = self.order.advance(self._own(), self._batch * self._ranks, HERE.starts if self._is_counted else None)
        if self._is_counted:
            HERE.gave(self.order.positions, changes)
        rows, passes = (values[self._rank :: self._ranks] for values in self.order.rows_of(ranges))
        shifts = mix(self._seed ^ passes.astype(np.uint64)) % np.uint64(self._context)
        return windows_at(self._text, rows * self._context + shifts.astype(np.int64), self._context)
