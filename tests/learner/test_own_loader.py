"""A loop's own data loader, as docs/training-loop.md shows it: each row once an epoch, and on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import diloco_node
from tests.kit.data_kit import datasets_library, rows_of, write_jsonl
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import Toy, region_folder

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
ROWS = rows_of(48)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from region_folder(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(datasets_library().config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return [str(write_jsonl(tmp_path / f"rows/{at}.jsonl", ROWS[at * 8 : (at + 1) * 8])) for at in range(6)]


def loader_of(files: list[str], part: int, parts: int) -> tuple[Any, Any]:
    """The data and the loader of one of so many ranks."""
    distributed = pytest.importorskip("datasets.distributed", reason="needs the extra `data`")
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra `data`")
    data = datasets_library().load_dataset("json", data_files=files, split="train", streaming=True)
    data = distributed.split_dataset_by_node(data, rank=part, world_size=parts)
    return data, loaders.StatefulDataLoader(data, batch_size=2)


def texts(batches: Any) -> list[str]:
    return [text for batch in batches for text in batch["text"]]


@pytest.mark.parametrize(("regions", "ranks"), [(1, 1), (2, 3), (3, 1), (2, 2), (5, 1)])
def test_every_row_is_read_once_by_one_rank_of_one_region(rows: list[str], regions: int, ranks: int):
    found: list[str] = []
    for region in range(regions):
        for rank in range(ranks):
            data, loader = loader_of(rows, region * ranks + rank, regions * ranks)
            # Whole files where they can be dealt evenly; else everybody reads all files and keeps every so many-th row.
            assert data.num_shards == (6 // (regions * ranks) if 6 % (regions * ranks) == 0 else 6)
            found += texts(loader)
    assert sorted(found) == sorted(ROWS)


def test_a_restarted_learner_reads_what_the_first_life_did_not_and_then_a_whole_epoch(folder: Path, rows: list[str]):
    own = [row for at in (1, 4) for row in ROWS[at * 8 : (at + 1) * 8]]
    _, loader = loader_of(rows, 1, 3)
    toy, read = Toy(), []
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, stateful={"data": loader}) as diloco:
        for batch, _ in zip(loader, range(5), strict=False):
            read += batch["text"]
            toy.step(diloco)
            if len(read) == 10:
                diloco.checkpoint()
                break
    data, loader = loader_of(rows, 1, 3)
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, stateful={"data": loader}):
        rest = texts(loader)
        # Without set_epoch, the library would begin each epoch where the checkpoint stood.
        data.set_epoch(1)
        again = texts(loader)
    assert read + rest == own
    assert again == own
