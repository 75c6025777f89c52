"""Rows streamed by `datasets`: every row once an epoch over all regions and ranks, and going on where one was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.documents import is_held_out
from diloco_node.learner.builtin.stream import StreamSampler, TextStream
from diloco_node.learner.nested import flatten, unflatten
from tests.kit.data_kit import datasets_library, rows_of, write_jsonl, write_parquet, write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
ROWS = 240
TRAINED = [n for n, row in enumerate(rows_of(ROWS)) if not is_held_out(row.encode())]


@pytest.fixture(autouse=True)
def _library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets_library().config, "HF_DATASETS_CACHE", tmp_path / "cache")


def files_of(root: Path, count: int, kind: str = "jsonl") -> Path:
    rows = rows_of(ROWS)
    for at in range(count):
        part = rows[at * ROWS // count : (at + 1) * ROWS // count]
        (write_jsonl if kind == "jsonl" else write_parquet)(root / f"rows/{at:02d}.{kind}", part)
    return root / "rows"


def stream_of(root: Path, path: Path | str) -> TextStream:
    return TextStream([path], tokenizer=write_tokenizer(root / "tokenizer"), held_out_tokens=60)


def sampler_of(stream: TextStream, region: int = 0, regions: int = 1, rank: int = 0, ranks: int = 1) -> StreamSampler:
    return StreamSampler(stream, region=region, regions=regions, rank=rank, ranks=ranks, batch=2, context=13)


def numbers(windows: np.ndarray) -> list[int]:
    """The numbers of the rows whose last word is predicted there."""
    predicted = windows[:, 1:].ravel()
    return (predicted[predicted >= 52] - 52).tolist()


def first_epoch(sampler: StreamSampler) -> list[int]:
    """What one rank trains before a row comes again; the batch in which the epoch ends may begin the next."""
    found: list[int] = []
    while len(found) == len(set(found)) and sampler.epoch < 2:
        found += numbers(sampler.next_batch())
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("files", "kind", "ranks"),
    [
        (1, "jsonl", (1,)),
        (1, "jsonl", (2, 1)),
        (6, "parquet", (1, 1, 1)),
        (5, "jsonl", (2, 2)),
        (4, "parquet", (3, 1)),
    ],
    ids=str,
)
def test_every_row_is_trained_once_in_an_epoch_over_all_regions_and_ranks(
    tmp_path: Path, files: int, kind: str, ranks: tuple[int, ...]
):
    stream = stream_of(tmp_path, files_of(tmp_path, files, kind))
    found: list[int] = []
    for region, count in enumerate(ranks):
        for rank in range(count):
            found += first_epoch(sampler_of(stream, region, len(ranks), rank, count))
    assert sorted(found) == TRAINED


@pytest.mark.parametrize(("files", "kind", "batches"), [(3, "jsonl", 5), (3, "parquet", 31), (1, "jsonl", 70)])
def test_a_restored_sampler_goes_on_where_the_other_stood(tmp_path: Path, files: int, kind: str, batches: int):
    stream = stream_of(tmp_path, files_of(tmp_path, files, kind))
    first = sampler_of(stream, 0, 2)
    for _ in range(batches):
        first.next_batch()
    tensors: dict[str, torch.Tensor] = {}
    kept = flatten("data", first.state(), tensors)
    second = sampler_of(stream, 0, 2)
    second.restore(unflatten(kept, tensors))
    assert (second.position, second.epoch) == (first.position, first.epoch)
    for _ in range(75):  # over the end of the epoch, which begins at its beginning again
        np.testing.assert_array_equal(second.next_batch(), first.next_batch())
    assert second.epoch > 0


def test_windows_share_one_token_and_nothing_is_left_out(tmp_path: Path):
    sampler = sampler_of(stream_of(tmp_path, files_of(tmp_path, 2)))
    windows = np.concatenate([sampler.next_batch() for _ in range(10)])
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    assert windows.shape == (20, 14)
    assert windows.dtype == np.int64
    assert numbers(windows) == TRAINED[:20]


def test_held_out_rows_are_the_same_for_all_and_never_trained(tmp_path: Path):
    stream = stream_of(tmp_path, files_of(tmp_path, 3))
    held = numbers(stream.held_out_windows(9, 13))
    assert held
    assert not set(held) & set(TRAINED)
    with pytest.raises(ConfigError, match="held-out"):
        stream.held_out_windows(1, 5000)


def test_bytes_of_a_saved_dataset_and_of_one_that_the_library_loads(tmp_path: Path):
    made = datasets_library().Dataset.from_dict({"text": rows_of(ROWS)})
    made.save_to_disk(str(tmp_path / "saved"))
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows_of(ROWS))
    for path in (tmp_path / "saved", f"hf:{tmp_path / 'hub'}"):
        stream = TextStream([path], held_out_tokens=100)
        windows = stream.sampler(region=0, regions=1, batch=1, context=300, seed=9).next_batch()
        assert windows.dtype == np.uint8
        expected = "\n".join(rows_of(ROWS)[n] for n in TRAINED).encode()
        assert bytes(windows[0]) == expected[:301]


@pytest.mark.parametrize("state", [{}, {"position": 3, "batch": 2}])
def test_a_state_of_something_else_is_refused(tmp_path: Path, state: dict[str, Any]):
    with pytest.raises(ConfigError, match="none of a stream"):
        sampler_of(stream_of(tmp_path, files_of(tmp_path, 1))).restore(state)


def test_what_can_not_be_streamed_says_why(tmp_path: Path):
    text, rows = tmp_path / "a.txt", write_jsonl(tmp_path / "a.jsonl", rows_of(3))
    text.write_text("text")
    table = write_parquet(tmp_path / "a.parquet", rows_of(3))
    for paths, message in (
        ([], "nothing to stream"),
        ([text], r"a\.txt can't be streamed, it is no JSONL or Parquet"),
        ([rows, table], r"jsonl, parquet can't be streamed together"),
        (["hf:a", "hf:b"], r"hub can't be streamed together"),
        ([f"hf:{tmp_path / 'nowhere'}"], r"can't be loaded"),
    ):
        with pytest.raises(ConfigError, match=message):
            TextStream(paths, held_out_tokens=5)
    with pytest.raises(
        ConfigError, match=r"row 1 of .*a\.jsonl has no field 'body': it has id, text; name .*text_field"
    ):
        TextStream([rows], text_field="body", held_out_tokens=5)
    rows.write_text('{"text": "a"}\nno json\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl can't be streamed"):
        TextStream([rows], held_out_tokens=5)


def test_a_rank_without_rows_is_refused(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [rows_of(ROWS)[TRAINED[0]]])
    stream = TextStream([path], held_out_tokens=0)
    with pytest.raises(ConfigError, match=r"no text for region 1 of 2, rank 0 of 1.*--data"):
        sampler_of(stream, 1, 2).next_batch()
