"""Text as bytes for the built-in trainer: what is read, what is held out, and which part belongs to which region.

The corpus is cut into many small shards whose edges depend on the text alone. A permutation drawn from the seed deals
them to regions by index, so every region draws from its own part and no two regions see the same bytes. Held-out text
is never trained on, by anybody, and is the same for all regions.

Sampling is stateless: batch number `position` of a region is a function of (seed, region, position), so the whole data
position is one integer, and a restarted learner goes on where its checkpoint stood.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError

Bytes = NDArray[np.uint8]

SHARD_BYTES: Final = 16_384
"""Small, so that every region gets hundreds of shards also from a few megabytes of text."""

CORPUS_BYTES_MAX: Final = 64 * 1024 * 1024
"""Text beyond this is left out: the corpus lives in memory."""

FILES_MAX: Final = 200_000
HELD_OUT_PERCENT: Final = 5
_SNIFF_BYTES: Final = 8192
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text in memory.

    Attributes:
        train: shape (n,), uint8; what may be trained on.
        held_out: shape (m,), uint8; what may not.
        files: how many files it came from. skipped: how many were left out (binary, unreadable, beyond the limit).
    """

    train: Bytes
    held_out: Bytes
    files: int
    skipped: int

    def held_out_windows(self, count: int, context: int) -> Bytes:
        """Evenly spaced windows of held-out text, the same for everybody: shape (count, context + 1), uint8."""
        last = len(self.held_out) - (context + 1)
        starts = np.linspace(0, last, count).astype(np.int64)
        return _windows(self.held_out, starts, context)


def load_corpus(paths: Sequence[str | Path] = (), *, bytes_max: int = CORPUS_BYTES_MAX) -> Corpus:
    """Read files and folders of text; without paths, the Python sources of the standard library.

    Files of a folder are taken in order of their relative path; hidden ones, binary ones (a NUL in the first 8 KiB),
    symbolic links and folders of installed packages are left out. About 5 % of the files, chosen by a hash of their
    relative path, are held out; where that would leave either side without a shard's worth, the last 5 % of the text
    is.

    Args:
        paths: files or folders.
        bytes_max: stop reading after so many bytes.

    Raises:
        ConfigError: a path does not exist or can't be read, or there is too little text.
    """
    named = _named_files(paths)
    train: list[bytes] = []
    held: list[bytes] = []
    total = files = skipped = 0
    for name, path in named:
        text = _text_of(path) if total < bytes_max else None
        if not text:
            skipped += 1
            continue
        text = text[: bytes_max - total]
        total += len(text)
        files += 1
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
        is_held_out = int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT
        (held if is_held_out else train).append(text)
    split = _joined(train), _joined(held)
    if min(len(split[0]), len(split[1])) < SHARD_BYTES:
        whole = _joined(train + held)
        at = len(whole) - len(whole) * HELD_OUT_PERCENT // 100
        split = whole[:at], whole[at:]
    if len(split[1]) < 1024:
        where = ", ".join(str(path) for path in paths) or str(_standard_library())
        raise ConfigError(f"only {total} bytes of text in {where}: give at least 32 KiB of text with --data PATH")
    return Corpus(train=split[0], held_out=split[1], files=files, skipped=skipped)


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _named_files(paths: Sequence[str | Path]) -> Iterator[tuple[str, Path]]:
    """(stable name, path) of every candidate, folder after folder, sorted inside each."""
    if not paths:
        root = _standard_library()
        # Not the standard library's own tests: they are half of it, often missing, and repeat themselves.
        names = (name for name in _below(root) if name.endswith(".py") and not name.startswith("test/"))
        return ((name, root / name) for name in names)
    return (pair for given in paths for pair in _named_below(Path(given)))


def _named_below(given: Path) -> Iterator[tuple[str, Path]]:
    if given.is_file():
        yield given.name, given
    elif given.is_dir():
        for name in _below(given):
            yield name, given / name
    else:
        raise ConfigError(f"data path {given} does not exist: give files or folders of text with --data PATH, or none")


def _below(root: Path) -> list[str]:
    """Relative paths of the files below, sorted. A restarted learner waits for it: folders left out are not entered."""
    found: list[str] = []
    folders = [""]
    while folders:
        prefix = folders.pop()
        with contextlib.suppress(OSError), os.scandir(root / prefix) as entries:
            for entry in entries:
                if entry.name in _SKIPPED_FOLDERS or entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    found.append(prefix + entry.name)
        if len(found) > FILES_MAX:
            raise ConfigError(f"more than {FILES_MAX} files below {root}: give a smaller folder with --data PATH")
    return sorted(found)


def _text_of(path: Path) -> bytes | None:
    """The file's bytes, or None if it is binary or can't be read; a file the user named himself is only one of many."""
    try:
        text = path.read_bytes()
    except OSError:
        return None
    return None if b"\0" in text[:_SNIFF_BYTES] else text


def _joined(texts: Sequence[bytes]) -> Bytes:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)


def _windows(text: Bytes, starts: NDArray[np.int64], context: int) -> Bytes:
    """Shape (len(starts), context + 1): the windows of text that begin there."""
    windows: Bytes = text[starts[:, None] + np.arange(context + 1)]
    return windows


class RegionSampler:
    """One region's endless stream of batches.

    After every `next_batch` the position has grown by one; `state` and `restore` carry it over a restart.

    Args:
        corpus: the text.
        region, regions: whose part of the shards this is: 0 <= region < regions.
        batch, context: shape of a batch is (batch, context + 1), uint8.
        seed: the run's; the same in all regions, or their parts would overlap.

    Raises:
        ConfigError: the text has fewer shards than regions, or a window is longer than a shard.
    """

    def __init__(self, corpus: Corpus, *, region: int, regions: int, batch: int, context: int, seed: int) -> None:
        if context + 1 > SHARD_BYTES:
            raise ConfigError(
                f"model.context is {context}: at most {SHARD_BYTES - 1} with shards of {SHARD_BYTES} bytes"
            )
        shards = len(corpus.train) // SHARD_BYTES
        order = np.random.default_rng([seed, 0]).permutation(shards)
        self._starts = np.sort(order[region::regions]).astype(np.int64) * SHARD_BYTES
        if not 0 <= region < regions or not len(self._starts):
            raise ConfigError(
                f"no text for region {region} of {regions}: {len(corpus.train)} bytes make {shards} shards "
                f"of {SHARD_BYTES}; give more text with --data PATH"
            )
        self._text = corpus.train
        self._batch, self._context = batch, context
        self._key = (seed, 1, region)
        self.position = 0

    def batch_at(self, position: int) -> Bytes:
        """The batch of this position, shape (batch, context + 1), uint8; the position stays as it is."""
        random = np.random.default_rng([*self._key, position])
        shard = random.integers(len(self._starts), size=self._batch)
        offset = random.integers(SHARD_BYTES - self._context, size=self._batch)
        return _windows(self._text, self._starts[shard] + offset, self._context)

    def next_batch(self) -> Bytes:
        """The batch of the current position; then the position is one further."""
        batch = self.batch_at(self.position)
        self.position += 1
        return batch

    def state(self) -> dict[str, int]:
        """The data position, for a checkpoint."""
        return {"position": self.position}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint's position.

        Raises:
            ConfigError: the state has no valid position.
        """
        position = state.get("position", -1)
        if position < 0:
            raise ConfigError(f"data state {state!r} has no position: the checkpoint is of another version")
        self.position = position
