"""A loop's own data loader with a fixed split: each row once an epoch, and on from a checkpoint."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.integrations.loader import EndlessLoader
from tests.kit.data_kit import datasets_library, rows_of, write_jsonl
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import Toy

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # of torchdata 0.11
]
ROWS = rows_of(48)


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(datasets_library().config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return [str(write_jsonl(tmp_path / f"rows/{at}.jsonl", ROWS[at * 8 : (at + 1) * 8])) for at in range(6)]


def loader_of(files: list[str], part: int, parts: int) -> tuple[Any, Any]:
    """The data and the loader of one of so many ranks."""
    distributed = pytest.importorskip("datasets.distributed", reason="needs the extra `hf`")
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra `hf`")
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


def test_a_restarted_learner_reads_what_the_first_life_did_not_and_then_whole_epochs(folder: Path, rows: list[str]):
    own = [row for at in (1, 4) for row in ROWS[at * 8 : (at + 1) * 8]]
    read: list[str] = []
    for batches in (5, 8, 9):  # the second life ends in the second epoch
        loader, toy = EndlessLoader(lambda epoch: loader_of(rows, 1, 3)[1]), Toy()
        with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, stateful={"data": loader}) as diloco:
            for _, batch in zip(range(batches), loader, strict=False):
                read += batch["text"]
                toy.step(diloco)
    assert read == (own * 3)[:44]
    assert loader.epoch == 2


def test_the_trap_is_still_there(rows: list[str]):
    """If this fails, the library has mended it, and EndlessLoader may go."""
    data, _ = loader_of(rows, 1, 3)
    position = iter(data)
    for _ in range(10):
        next(position)
    restored, _ = loader_of(rows, 1, 3)
    restored.load_state_dict(data.state_dict())
    assert [len(list(restored)) for _ in range(2)] == [6, 6]


class Numbers:
    """A loader of some numbers."""

    def __init__(self, count: int, epoch: int) -> None:
        self.count, self.epoch, self.at = count, epoch, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.at < self.count:
            self.at += 1
            yield self.epoch, self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("before", range(8))
def test_each_epoch_has_a_loader_of_its_own_and_a_restart_goes_on(before: int):
    first, second = (EndlessLoader(lambda epoch: Numbers(3, epoch)) for _ in range(2))
    read = [batch for _, batch in zip(range(before), first, strict=False)]
    second.load_state_dict(first.state_dict())
    read += [batch for _, batch in zip(range(8), second, strict=False)]
    assert read == [(n // 3, n % 3 + 1) for n in range(before + 8)]


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_a_position_of_other_workers_is_told(folder: Path, caplog: pytest.LogCaptureFixture, before: int, after: int):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra `hf`")

    def life(workers: int, *, is_endless: bool) -> list[int]:
        def make(_: int = 0) -> Any:
            return loaders.StatefulDataLoader(list(range(6)), batch_size=None, num_workers=workers)

        loader, toy = EndlessLoader(make) if is_endless else make(), Toy()
        with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, stateful={"data": loader}) as diloco:
            batches = []
            for _, batch in zip(range(3), loader, strict=False):
                batches.append(int(batch))
                toy.step(diloco)
        return batches

    assert life(before, is_endless=True) == life(after, is_endless=True) == [0, 1, 2]
    assert f"kept with num_workers={before}, here it is another number: epoch 0 is begun anew" in caplog.text
    shutil.rmtree(folder / "learner")
    life(before, is_endless=False)
    with pytest.raises(LearnerError, match=f"'data' was kept with num_workers={before}: give it so many"):
        life(after, is_endless=False)
    assert life(before, is_endless=False) == [3, 4, 5]


def test_a_loader_without_batches_is_refused():
    with pytest.raises(LearnerError, match="no batch in a whole epoch"):
        next(iter(EndlessLoader(lambda epoch: Numbers(0, epoch))))
