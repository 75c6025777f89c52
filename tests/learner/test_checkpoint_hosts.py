"""Ranks on two hosts, with a disk each: what one does not see comes from the other. Ranks are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from diloco_node.learner.checkpoint import TrainingProgress
from diloco_node.learner.checkpointing import Checkpointing
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.ranks import Ranks

DIGEST = "ab" * 32

pytestmark = pytest.mark.no_device("its ranks are threads, whose tensors are made on the host")


class Threads:
    """`Ranks` as threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._said: list[list[bytes]] = [[] for _ in range(size)]

    def rank(self, rank: int) -> Ranks:
        def all_bytes(data: bytes) -> list[bytes]:
            self._said[rank].append(data)
            self._barrier.wait()
            return [said[len(self._said[rank]) - 1] for said in self._said]

        class One:
            size = self.size
            is_first = rank == 0

            def all_bytes(self, data: bytes) -> list[bytes]:
                return all_bytes(data)

            def share_bytes(self, data: bytes, *, source: int = 0) -> bytes:
                return all_bytes(data)[source]

        one: Any = One()
        one.rank = rank
        return cast(Ranks, one)


class Position:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Host:
    """One rank that holds all of the model, as with DistributedDataParallel, and its disk."""

    def __init__(self, folder: Path, threads: Threads, rank: int, position: int = 0, seed: int = 0) -> None:
        model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(position))
        if position:
            self.optimizer.step()
        self.position = Position(position)
        self.noise = torch.Generator().manual_seed(seed)
        parts = {"position": self.position, "noise": self.noise}
        self.checkpoints = Checkpointing(self.optimizer, parts, every_s=60)
        tensors = ModelTensors(model)
        shards = ShardMap(tensors.specs, [tensors.boxes] * threads.size)
        resumed = self.checkpoints.resume(folder, DIGEST, threads.rank(rank), tensors=tensors, shards=shards)
        self.step = resumed.global_step

    def moments(self) -> list[float]:
        return [float(state["exp_avg"].sum()) for state in self.optimizer.state.values()]


def hosts(
    folders: list[Path], positions: tuple[int, ...] = (0, 0, 0), seeds: tuple[int, ...] = (0, 0, 0)
) -> list[Host]:
    threads = Threads(len(folders))

    def host(rank: int) -> Host:
        return Host(folders[rank], threads, rank, positions[rank], seeds[rank])

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(host, range(len(folders))))


def save(host: Host, step: int, *, tokens: int = 0) -> None:
    host.checkpoints.save_now(TrainingProgress(DIGEST, 1, 100 + step, step, tokens))


def test_a_rank_gets_what_it_does_not_see_from_one_that_does(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    first = hosts(folders, (5, 6))
    for host in first:
        save(host, 7)
    again = hosts(folders)
    assert [host.step for host in again] == [107, 107]
    assert [host.position.value for host in again] == [5, 6]
    assert again[0].moments() == again[1].moments() == first[0].moments()


def test_more_ranks_on_other_disks_begin_with_the_parts_of_fewer(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    first = hosts(folders[:2], (5, 6))
    for host in first:
        save(host, 7)
    again = hosts(folders)
    assert [host.step for host in again] == [107] * 3
    assert all(host.moments() == first[0].moments() for host in again)


@pytest.mark.parametrize(("seeds", "goes_on"), [((3, 3, 3), (0, 0, 0)), ((3, 4, 5), (0, None, None))])
def test_other_ranks_get_a_generator_that_all_share_and_none_that_is_seeded_for_each(
    tmp_path: Path, seeds: tuple[int, ...], goes_on: tuple[int | None, ...]
) -> None:
    """Else all of them would draw the same noise."""
    folders = [tmp_path / "one", tmp_path / "two", tmp_path / "three"]
    first = hosts(folders[:2], (5, 6), seeds)
    for host in first:
        torch.rand(7, generator=host.noise)
        save(host, 7)
    for number in (2, 3):
        for rank, host in enumerate(hosts(folders[:number], seeds=seeds)):
            source = rank if number == 2 else goes_on[rank]
            begun = torch.Generator().manual_seed(seeds[rank]).get_state()
            expected = begun if source is None else first[source].noise.get_state()
            assert torch.equal(host.noise.get_state(), expected), (number, rank)
            assert host.position.value == (6 if number == 2 and rank else 5)


def test_files_of_one_name_but_of_two_runs_make_no_checkpoint(tmp_path: Path) -> None:
    """The state of the first host was removed to begin anew; the second one's was not."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for host, tokens in zip(hosts(folders, (5, 6)), (300, 200), strict=True):
        save(host, 7, tokens=tokens)
    assert [host.step for host in hosts(folders)] == [0, 0]


def test_a_rank_whose_disk_is_full_costs_the_newer_ones_only(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    first = hosts(folders, (5, 6))
    for host in first:
        save(host, 1)
        host.checkpoints.all_wrote(host.checkpoints.written_step)
    for step in (2, 3, 4):
        save(first[0], step)
    assert [host.step for host in hosts(folders)] == [101, 101]
