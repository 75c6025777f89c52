"""Data of the built-in trainer: the bytes to train on, the bytes to hold out, and the part of each region and rank.

The corpus is cut into many small shards, and a permutation drawn from the seed deals them by index to regions, and
those of a region to its ranks. So everybody draws from a part of their own, and no two see the same text. Held-out
text is never trained on, by anybody, and is the same for all.

Sampling is stateless and without replacement: batch number `position` is a function of (seed, region, rank, position).
Each epoch of a region's rank is a permutation of its windows, so none is trained twice before all others were. The
whole data position is one integer, and a restarted learner goes on where its checkpoint stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.permutation import U64, mix, permute
from diloco_node.learner.builtin.text_files import HELD_OUT_PERCENT, standard_library, text_files

Windows = NDArray[np.uint8]

SHARD_BYTES: Final = 16_384
"""Small, so that every region gets hundreds of shards also from a few megabytes of text."""

SHARD_WINDOWS_MIN: Final = 16
"""A shard of long windows is longer: less than one window is left over of each, which is to be a small part."""

MEMORY_BYTES_MAX: Final = 1 << 30
"""All text is held in memory, twice while it is read."""

HELD_OUT_BYTES_MIN: Final = 1024


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes of text, in memory.

    Attributes:
        train: shape (n,), uint8: the text to train on.
        held_out: shape (m,), uint8: the text that nobody trains on.
        files: how many files it came from. skipped: how many were left out (binary, unreadable, beyond the limit).
    """

    train: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    files: int
    skipped: int

    def held_out_windows(self, count: int, context: int) -> Windows:
        """Evenly spaced windows of held-out text, the same for everybody: shape (count, context + 1).

        Raises:
            ConfigError: there is less than one window of it.
        """
        last = len(self.held_out) - (context + 1)
        if last < 0:
            raise ConfigError(
                f"{len(self.held_out)} held-out bytes are less than a window of model.context {context} and one: "
                "give more text with --data PATH, or a shorter context"
            )
        starts = np.linspace(0, last, count).astype(np.int64)
        return windows_at(self.held_out, starts, context)


def load_corpus(paths: Sequence[str | Path] = (), *, bytes_max: int = 0) -> Corpus:
    """Read files and folders of text; without paths, Python's standard library.

    Files of a folder are taken in order of their relative path; hidden ones, binary ones, symbolic links and folders
    of installed packages are left out. About 5 % of the files, chosen by a hash of their relative path, are held out.
    Where that would leave either side without a shard's worth, the last 5 % of everything is.

    Args:
        paths: files and folders.
        bytes_max: stop reading after so many bytes of text; 0: at the end.

    Raises:
        ConfigError: a path does not exist, or there is too little or too much text.
    """
    contents: tuple[list[bytes], list[bytes]] = ([], [])
    total = skip_count = 0
    for file in text_files(paths):
        content = file.read() if not bytes_max or total < bytes_max else None
        if content is None:
            skip_count += 1
            continue
        content = content[: bytes_max - total] if bytes_max else content
        total += len(content)
        if total > MEMORY_BYTES_MAX:
            raise ConfigError(
                f"more than {MEMORY_BYTES_MAX >> 20} MiB of text, which the built-in trainer holds in memory: give "
                "less with --data PATH, or train a model of Hugging Face with [model] hf"
            )
        contents[file.is_held_out].append(content)
    whole = np.frombuffer(b"".join((*contents[False], *contents[True])), np.uint8)
    boundary = sum(map(len, contents[False]))
    if min(boundary, len(whole) - boundary) < SHARD_BYTES:
        boundary = len(whole) - len(whole) * HELD_OUT_PERCENT // 100
    if len(whole) - boundary < HELD_OUT_BYTES_MIN:
        places = ", ".join(map(str, paths)) or str(standard_library())
        raise ConfigError(f"only {len(whole)} bytes of text in {places}: give at least 32 KiB of text with --data PATH")
    return Corpus(whole[:boundary], whole[boundary:], len(contents[False]) + len(contents[True]), skip_count)


def windows_at(text: NDArray[np.uint8], starts: NDArray[np.int64], context: int) -> Windows:
    """Shape (len(starts), context + 1): the windows of text that begin there."""
    windows: Windows = text[starts[:, None] + np.arange(context + 1)]
    return windows


def _key_of(*numbers: int) -> U64:
    """Shape (1,): a key drawn from these numbers."""
    return np.random.SeedSequence(numbers).generate_state(1, np.uint64).astype(np.uint64)


class RegionSampler:
    """The endless stream of batches of one rank of a region.

    A window is context bytes to predict and the one before them. The windows of a shard lie side by side; where the
    first begins differs between epochs. After every `next_batch` the position has grown by one; `state` and `restore`
    carry it over a restart.

    Args:
        corpus: the text.
        region, regions: whose part of the shards this is: 0 <= region < regions.
        batch, context: shape of a batch is (batch, context + 1).
        seed: the run's; the same in all regions, or their parts would overlap.
        rank, ranks: which part of the region's: 0 <= rank < ranks. Regions may differ in their number of ranks.

    Attributes:
        position: number of the next batch. samples: windows in an epoch.

    Raises:
        ConfigError: the text has fewer shards than regions and ranks want.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        region: int,
        regions: int,
        batch: int,
        context: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._shard_bytes = max(SHARD_BYTES, SHARD_WINDOWS_MIN * context)
        self._shards = len(corpus.train) // self._shard_bytes
        # Of the region's shards, every so many-th: shard number first + step * k in the order in which they are dealt.
        self._first, self._step = region + regions * rank, regions * ranks
        shard_count = len(range(self._first, self._shards, self._step))
        if not (0 <= region < regions and 0 <= rank < ranks) or not shard_count:
            place = f"region {region} of {regions}" + (f", rank {rank} of {ranks}" if ranks > 1 else "")
            raise ConfigError(
                f"no text for {place}: {len(corpus.train)} bytes make {self._shards} shards of "
                f"{self._shard_bytes}, and each needs one; give more text with --data PATH"
            )
        self._text = corpus.train
        self._batch, self._context = batch, context
        self._windows = (self._shard_bytes - 1) // context
        self._slack = self._shard_bytes - 1 - self._windows * context
        self.samples = shard_count * self._windows
        self._key, self._deal_key = _key_of(seed, 1, region, rank), _key_of(seed, 0)
        self.position = 0

    def batch_at(self, position: int) -> Windows:
        """The batch of this position, shape (batch, context + 1); the position stays as it is."""
        numbers = position * self._batch + np.arange(self._batch, dtype=np.int64)
        epoch_keys = mix(self._key ^ mix((numbers // self.samples).astype(np.uint64)))
        sample = permute(numbers % self.samples, self.samples, epoch_keys)
        dealt = self._first + self._step * (sample // self._windows)
        shard = permute(dealt, self._shards, self._deal_key)
        shift = (mix(~epoch_keys) % np.uint64(self._slack + 1)).astype(np.int64)
        start = shard * self._shard_bytes + shift + sample % self._windows * self._context
        return windows_at(self._text, start, self._context)

    def next_batch(self) -> Windows:
        """The batch of the current position; then the position is one further."""
        batch = self.batch_at(self.position)
        self.position += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The data position, for a checkpoint."""
        return {"position": self.position, "batch": self._batch}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's position. With another batch size, after the last window that was trained.

        Raises:
            ConfigError: the state has no valid position.
        """
        position, batch = state.get("position", -1), state.get("batch", self._batch)
        if not isinstance(position, int) or not isinstance(batch, int) or position < 0 or batch < 1:
            raise ConfigError(f"data state {state!r} has no position: the checkpoint is of another version")
        self.position = -(-position * batch // self._batch)
