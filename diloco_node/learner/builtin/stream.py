"""Rows that are read as they are trained, by `datasets` with streaming: nothing is tokenised ahead or kept on disk.

Every region reads its own shards, which are files, and every rank of it its own of these. Where there are fewer shards
than regions, each reads all rows and keeps every so many-th; so it is with ranks. Rows come in the order of the files,
and windows in the order of the rows: shuffle beforehand.

The position is that of the library, the tokens of the last row that are still to be trained, and a few counters. In
memory are a row, a batch, and the held-out tokens, which are the first of those that the whole stream holds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.data import Corpus, Windows
from diloco_node.learner.builtin.documents import (
    TextPiece,
    TextSource,
    is_held_out,
    library,
    load_hub,
    row_text,
    text_sources,
)
from diloco_node.learner.builtin.encoding import TextEncoding

BUILDERS: Final = {"jsonl": "json", "parquet": "parquet"}
SAVED_SHARDS: Final = 1024
"""A dataset of `save_to_disk` is cut into so many: it is mapped, and can be cut anywhere."""


class TextStream:
    """A stream of rows, as `datasets` reads it.

    Args:
        paths: JSONL or Parquet files, folders of them, or one `hf:NAME` or folder of `save_to_disk`.
        tokenizer, text_field: as `load_corpus`.
        held_out_tokens: how many to hold out at least, where the stream has so many.

    Attributes:
        encoding: how text becomes tokens.

    Raises:
        ConfigError: the paths can't be streamed, or hold too little text.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        tokenizer: str | Path = "",
        text_field: str = "text",
        held_out_tokens: int,
    ) -> None:
        self.encoding = TextEncoding(tokenizer)
        self.text_field = text_field
        self._sources = _of_one_kind(text_sources(paths)) if paths else []
        self._where = ", ".join(str(path) for path in paths)
        if not self._sources:
            raise ConfigError(
                f"there is nothing to stream in {self._where or 'no data paths'}: give files of JSONL or Parquet, "
                "folders of them, or hf:NAME"
            )
        self._held = Corpus(np.empty(0, self.encoding.dtype), self._first_held_out(held_out_tokens), 0, 0)

    def held_out_windows(self, count: int, context: int) -> Windows:
        """As `Corpus.held_out_windows`."""
        return self._held.held_out_windows(count, context)

    def sampler(
        self, *, region: int, regions: int, batch: int, context: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> StreamSampler:
        """The stream of the batches of one region's rank; the seed is of no effect."""
        del seed
        return StreamSampler(self, region=region, regions=regions, batch=batch, context=context, rank=rank, ranks=ranks)

    def opened(self) -> Any:
        """The whole stream, from its beginning, as an `IterableDataset`."""
        kind = self._sources[0].kind
        if kind == "hub":
            return load_hub(self._sources[0].path, streaming=True)
        datasets = library("datasets", "streaming")
        files = [source.path for source in self._sources]
        try:
            if kind == "saved":
                found = datasets.load_from_disk(files[0])
                rows = found["train"] if isinstance(found, dict) else found
                return rows.to_iterable_dataset(num_shards=max(1, min(SAVED_SHARDS, len(rows))))
            return datasets.load_dataset(BUILDERS[kind], data_files=files, split="train", streaming=True)
        except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(f"{self._where} can't be streamed: {error}") from error

    def texts(self, rows: Any, *, after: int = 0) -> Iterator[bytes]:
        """The text of each row, b"" where it has none.

        Args:
            after: how many rows came before, for messages.

        Raises:
            ConfigError: a row has no such field, or can't be read.
        """
        datasets = library("datasets", "streaming")
        try:
            for number, row in enumerate(rows, start=after + 1):
                yield row_text(row, self.text_field, f"row {number} of {self._where}")
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ConfigError(f"{self._where} can't be streamed: {error}") from error

    def _first_held_out(self, wanted: int) -> NDArray[Any]:
        parts: list[NDArray[Any]] = [np.empty(0, self.encoding.dtype)]
        total = 0
        for text in self.texts(self.opened()):
            if text and is_held_out(text):
                parts.append(self.tokens(text))
                total += len(parts[-1])
            if total >= wanted:
                break
        return np.concatenate(parts)

    def tokens(self, text: bytes) -> NDArray[Any]:
        """Of one row."""
        return self.encoding.encode([TextPiece(text, True, False, is_row=True)])[0]


def _of_one_kind(sources: list[TextSource]) -> list[TextSource]:
    kinds = sorted({source.kind for source in sources})
    plain = next((source for source in sources if source.kind == "text"), None)
    if plain is not None:
        raise ConfigError(f"{plain.path} can't be streamed, it is no JSONL or Parquet: leave streaming of [data] out")
    if len(kinds) > 1 or (kinds[:1] in (["hub"], ["saved"]) and len(sources) > 1):
        raise ConfigError(
            f"data of {', '.join(kinds)} can't be streamed together: give files of one kind, or one hf:NAME"
        )
    return sources


class StreamSampler:
    """The endless stream of batches of one rank of a region; after its last row it begins again at its first.

    A window is context tokens to predict and the one before them, which the window before it ends with.

    Args:
        stream: the whole.
        region, regions, rank, ranks: whose part this is. Regions may differ in their number of ranks.
        batch, context: shape of a batch is (batch, context + 1).

    Attributes:
        position: number of the next batch. epoch: how often all rows were read.
    """

    def __init__(
        self, stream: TextStream, *, region: int, regions: int, batch: int, context: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._stream = stream
        self._who = f"region {region} of {regions}, rank {rank} of {ranks}"
        self._parts = ((region, regions), (rank, ranks))
        self._batch, self._context = batch, context
        self._ready: NDArray[np.int64] = np.empty(0, np.int64)
        self.position = self.epoch = self._rows = self._kept = 0
        self._open(None)

    def _open(self, state: Mapping[str, Any] | None) -> None:
        """A fresh dataset each epoch: one that was given a state would begin every epoch there."""
        dataset = self._stream.opened()
        self._every: list[tuple[int, int]] = []
        for index, count in self._parts:
            if not self._every and dataset.num_shards >= count:
                dataset = dataset.shard(count, index, contiguous=False)
            else:
                self._every.append((index, count))
        if state is not None:
            dataset.load_state_dict(dict(state))
        self._dataset = dataset
        self._texts = self._stream.texts(dataset, after=self._rows)

    def next_batch(self) -> Windows:
        """The next batch, shape (batch, context + 1); uint8 for bytes, else int64.

        Raises:
            ConfigError: there is no text for this rank, or it can't be read.
        """
        wanted = self._batch * self._context + 1
        parts = [self._ready]
        total = len(self._ready)
        while total < wanted:
            parts.append(self._next_row())
            total += len(parts[-1])
        tokens = np.concatenate(parts)
        self._ready = tokens[wanted - 1 :]
        self.position += 1
        starts = np.arange(self._batch) * self._context
        windows: NDArray[np.int64] = tokens[starts[:, None] + np.arange(self._context + 1)]
        return windows.astype(np.uint8) if self._stream.encoding.dtype == np.uint8 else windows

    def _next_row(self) -> NDArray[np.int64]:
        """Tokens of the next row of this rank's, of the next epoch if need be."""
        for text in self._texts:
            number = self._rows
            self._rows += 1
            if not self._is_own(number) or not text or is_held_out(text):
                continue
            self._kept += 1
            return self._stream.tokens(text).astype(np.int64)
        if not self._kept:
            raise ConfigError(f"no text for {self._who}: give more rows, or more files, with --data PATH")
        self.epoch += 1
        self._rows = self._kept = 0
        self._open(None)
        return np.empty(0, np.int64)

    def _is_own(self, number: int) -> bool:
        for index, count in self._every:
            if number % count != index:
                return False
            number //= count
        return True

    def state(self) -> dict[str, Any]:
        """The position in the stream, and the tokens that are read and not trained: nested values."""
        return {
            "position": self.position,
            "epoch": self.epoch,
            "rows": self._rows,
            "kept": self._kept,
            "ready": self._ready.copy(),
            "dataset": self._dataset.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's position.

        Raises:
            ConfigError: the state is none of a stream.
        """
        try:
            self.position, self.epoch = int(state["position"]), int(state["epoch"])
            self._rows, self._kept = int(state["rows"]), int(state["kept"])
            self._ready = np.array(state["ready"], np.int64)
            self._open(state["dataset"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the checkpoint's data position is none of a stream ({error!r}): remove the folder "
                "learner/checkpoints to begin the data anew"
            ) from error
