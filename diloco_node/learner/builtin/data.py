"""The data of the built-in trainer: what is read, what is held out, and which part belongs to which region and rank.

The corpus is cut into many small shards, and a permutation drawn from the seed deals them by index to regions, and
those of a region to its ranks. So everybody draws from a part of their own, and no two see the same tokens. Held-out
text is never trained on, by anybody, and is the same for all.

Sampling is stateless and without replacement: batch number `position` is a function of (seed, region, rank, position).
Each epoch of a region's rank is a permutation of its windows, so none is trained twice before all others were. The
whole data position is one integer, and a restarted learner goes on where its checkpoint stood.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.documents import HELD_OUT_PERCENT, TextSource, standard_library, text_sources
from diloco_node.learner.builtin.encoding import TextEncoding, Tokens
from diloco_node.learner.builtin.permutation import U64, mixed, shuffled
from diloco_node.learner.builtin.token_store import tokens_in_memory, tokens_on_disk

Windows = NDArray[np.uint8] | NDArray[np.int64]
"""Bytes stay bytes; other tokens are as torch wants them."""

SHARD_BYTES: Final = 16_384
"""Tokens of a shard. Small, so that every region gets hundreds of shards also from a few megabytes of text."""

SHARD_WINDOWS_MIN: Final = 16
"""A shard of long windows is longer: less than one window is left over of each, which is to be a small part."""

MEMORY_BYTES_MAX: Final = 64 * 1024 * 1024
"""More text than this, and whatever is tokenised, lies in a mapped file."""

HELD_OUT_TOKENS_MIN: Final = 1024


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens, in memory or in a mapped file.

    Attributes:
        train: shape (n,), uint8 for bytes, else uint16 or uint32; what may be trained on.
        held_out: shape (m,), of the same type; what may not.
        files: how many files it came from. skipped: how many were left out (binary, unreadable, beyond the limit).
        encoding: how text became these tokens.
    """

    train: Tokens
    held_out: Tokens
    files: int
    skipped: int
    encoding: TextEncoding = TextEncoding()  # noqa: RUF009 (it never changes)

    def held_out_windows(self, count: int, context: int) -> Windows:
        """Evenly spaced windows of held-out text, the same for everybody: shape (count, context + 1).

        Raises:
            ConfigError: there is less than one window of it.
        """
        last = len(self.held_out) - (context + 1)
        if last < 0:
            raise ConfigError(
                f"{len(self.held_out)} held-out tokens are less than a window of model.context {context} and one: "
                "give more text with --data PATH, or a shorter context"
            )
        starts = np.linspace(0, last, count).astype(np.int64)
        return windows_at(self.held_out, starts, context)

    def sampler(
        self, *, region: int, regions: int, batch: int, context: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> RegionSampler:
        """The stream of the batches of one region's rank; see `RegionSampler`."""
        return RegionSampler(
            self, region=region, regions=regions, batch=batch, context=context, seed=seed, rank=rank, ranks=ranks
        )


def load_corpus(
    paths: Sequence[str | Path] = (),
    *,
    tokenizer: str | Path = "",
    text_field: str = "text",
    cache: str | Path = "",
    bytes_max: int = 0,
) -> Corpus:
    """Read files and folders of text, JSONL or Parquet, and datasets; without paths, Python's standard library.

    Files of a folder are taken in order of their relative path; hidden ones, binary ones (a NUL in the first 8 KiB),
    symbolic links and folders of installed packages are left out. About 5 % of the text files, chosen by a hash of
    their relative path, and about 5 % of the rows, by a hash of their text, are held out. Where that would leave
    either side without a shard's worth, the last 5 % of everything is.

    Args:
        paths: files, folders, folders of `save_to_disk`, or `hf:NAME` for `datasets.load_dataset`.
        tokenizer: a `tokenizer.json`, or a folder that has one; "": bytes.
        text_field: of a row, what holds its text.
        cache: where files of tokens are kept; "": `token_cache()`. Unused for up to 64 MiB of plain text as bytes.
        bytes_max: stop reading after so many bytes of text, in memory; 0: at the end.

    Raises:
        ConfigError: a path does not exist or can't be read, a row has no text, or there is too little text.
    """
    encoding = TextEncoding(tokenizer)
    sources = text_sources(paths)
    if bytes_max or (not tokenizer and _fit_memory(sources)):
        stored = tokens_in_memory(sources, encoding, text_field, bytes_max=bytes_max)
    else:
        stored = tokens_on_disk(sources, encoding, text_field, cache=Path(cache or token_cache()))
    whole, at = stored.tokens, stored.train
    if min(at, len(whole) - at) < SHARD_BYTES:
        at = len(whole) - len(whole) * HELD_OUT_PERCENT // 100
    if len(whole) - at < HELD_OUT_TOKENS_MIN:
        where = ", ".join(str(path) for path in paths) or str(standard_library())
        much = (
            f"{len(whole)} tokens in {where}: give at least 32,768"
            if tokenizer
            else (f"{len(whole)} bytes of text in {where}: give at least 32 KiB of text")
        )
        raise ConfigError(f"only {much} with --data PATH")
    return Corpus(whole[:at], whole[at:], stored.files, stored.skipped, encoding)


def token_cache() -> Path:
    """`$XDG_CACHE_HOME/diloco-node/tokens`, else `~/.cache/diloco-node/tokens`. Its folders may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diloco-node" / "tokens"


def _fit_memory(sources: Sequence[TextSource]) -> bool:
    """Whether it is plain text, and little enough to be held in memory."""
    total = 0
    for source in sources:
        if source.kind != "text":
            return False
        try:
            total += Path(source.path).stat().st_size
        except OSError:
            continue  # left out when it is read
    return total <= MEMORY_BYTES_MAX


def windows_at(tokens: Tokens, starts: NDArray[np.int64], context: int) -> Windows:
    """Shape (len(starts), context + 1): the windows of tokens that begin there."""
    windows: NDArray[Any] = tokens[starts[:, None] + np.arange(context + 1)]
    return windows if windows.dtype == np.uint8 else windows.astype(np.int64)


def _key_of(*parts: int) -> U64:
    """Shape (1,): what is drawn from these numbers."""
    return np.random.SeedSequence(parts).generate_state(1, np.uint64).astype(np.uint64)


class RegionSampler:
    """The endless stream of batches of one rank of a region.

    A window is context tokens to predict and the one before them. The windows of a shard lie side by side; where the
    first begins differs between epochs. After every `next_batch` the position has grown by one; `state` and `restore`
    carry it over a restart.

    Args:
        corpus: the tokens.
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
        self._shard_tokens = max(SHARD_BYTES, SHARD_WINDOWS_MIN * context)
        self._shards = len(corpus.train) // self._shard_tokens
        # Of the region's shards, every so many-th: shard number first + step * k in the order in which they are dealt.
        self._first, self._step = region + regions * rank, regions * ranks
        own = len(range(self._first, self._shards, self._step))
        if not (0 <= region < regions and 0 <= rank < ranks) or not own:
            who = f"region {region} of {regions}" + (f", rank {rank} of {ranks}" if ranks > 1 else "")
            raise ConfigError(
                f"no text for {who}: {len(corpus.train)} {'bytes' if corpus.train.dtype == np.uint8 else 'tokens'} "
                f"make {self._shards} shards of {self._shard_tokens}, and each needs one; give more text with "
                "--data PATH"
            )
        self._tokens = corpus.train
        self._batch, self._context = batch, context
        self._windows = (self._shard_tokens - 1) // context
        self._slack = self._shard_tokens - 1 - self._windows * context
        self.samples = own * self._windows
        self._key, self._deal_key = _key_of(seed, 1, region, rank), _key_of(seed, 0)
        self.position = 0

    def batch_at(self, position: int) -> Windows:
        """The batch of this position, shape (batch, context + 1); the position stays as it is."""
        drawn = position * self._batch + np.arange(self._batch, dtype=np.int64)
        epoch_keys = mixed(self._key ^ mixed((drawn // self.samples).astype(np.uint64)))
        sample = shuffled(drawn % self.samples, self.samples, epoch_keys)
        dealt = self._first + self._step * (sample // self._windows)
        shard = shuffled(dealt, self._shards, self._deal_key)
        shift = (mixed(~epoch_keys) % np.uint64(self._slack + 1)).astype(np.int64)
        start = shard * self._shard_tokens + shift + sample % self._windows * self._context
        return windows_at(self._tokens, start, self._context)

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
