"""Loaders whose rows follow the members: each row to one region, rank and worker, and on from a checkpoint."""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import diloco_node
from diloco_node.core.data_shards import SHARDS, TrainedRows, region_shards, shard_owners
from diloco_node.errors import ConfigError, LearnerError
from diloco_node.integrations.loader import EndlessLoader
from diloco_node.integrations.shards import ShardLoader, ShardSampler, ShardStream
from diloco_node.learner.region_shards import HERE
from diloco_node.wire.learner_link import ShardsGiven, SnapshotReady
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import Toy, session_of
from tests.kit.shards_given import begin, follow, shards_given

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),  # of torchdata 0.11
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
NAMES = ("eu-west", "us-east", "us-west")


@pytest.fixture(autouse=True)
def _nobody() -> Iterator[None]:
    HERE.clear()
    yield
    HERE.clear()


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def take(loader: Any, batches: int) -> list[int]:
    return [int(row) for batch in itertools.islice(loader, batches) for row in batch]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rows", [2500, 300])
def test_every_row_is_of_one_rank_of_one_region(rows: int, ranks: int):
    count = 0
    seen: set[int] = set()
    for region in NAMES:
        begin("run", region, NAMES)
        for rank in range(ranks):
            sampler = ShardSampler(rows, seed=5, rank=rank, ranks=ranks)
            own = int(sampler.order.sizes[list(HERE.own)].sum())
            part = list(itertools.islice(itertools.chain.from_iterable(itertools.repeat(sampler)), own // ranks))
            count += len(part)
            seen |= set(part)
            assert {row % SHARDS for row in part} <= set(HERE.own)
    assert count == len(seen)
    assert rows - count < len(NAMES) * ranks, "what is left over of a pass comes first in the next one"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_goes_on_behind_the_last_batch_that_the_loop_was_given(workers: int):
    """Whatever its workers had fetched: after a restart, after a `break`, over passes."""
    begin("run", "us-east", NAMES)
    options = {"batch_size": 4, "seed": 1, "num_workers": workers}
    whole = ShardLoader(Numbers(300), **options)
    passes = [take(whole, 10**6) for _ in range(2)]
    assert len(passes[0]) == len(whole) * 4
    line, count = [*passes[0], *passes[1]], len(passes[0]) // 4
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for batches in (3, 5, count - 2, 3):  # the third life ends in the second pass
        loader = ShardLoader(Numbers(300), **options)
        if state is not None:
            loader.load_state_dict(state)
        while batches:
            part = take(loader, min(batches, 2))
            seen += part
            batches -= len(part) // 4
        state = loader.state_dict()
    assert seen == line[: len(seen)]
    assert len(seen) == 4 * (3 + 5 + count - 2 + 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_keeps_the_samplers_position(workers: int):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra `hf`")
    begin("run", "us-east", NAMES)

    def make() -> Any:
        sampler = ShardSampler(400, seed=2)
        return loaders.StatefulDataLoader(Numbers(400), sampler=sampler, batch_size=4, num_workers=workers)

    whole, first, second = make(), make(), make()
    line = take(whole, 40)
    iterator = iter(first)
    seen = [int(row) for _ in range(7) for row in next(iterator)]
    second.load_state_dict(first.state_dict())
    assert seen + take(second, 5) == line[: 4 * 12]


def test_a_loop_takes_other_rows_when_a_member_comes_and_none_that_others_have(folder: Path):
    toy, seen = Toy(), [0] * SHARDS
    loader = ShardLoader(Numbers(SHARDS), batch_size=8, seed=1)
    with (
        FakeDaemon(folder) as daemon,
        diloco_node.attach(toy.model, toy.optimizer, stateful={"data": loader}) as diloco,
    ):
        before = diloco.shards
        assert before == region_shards("run-1", "us-east", NAMES)
        for batch in itertools.islice(loader, 10):
            for row in batch:
                assert int(row) in before
                seen[int(row)] += 1
            toy.step(diloco)
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)  # the order comes when it comes
        contribution = daemon.wait_for(SnapshotReady).contribution
        trained = TrainedRows.unpacked(contribution.rows)
        assert {item.shard for item in trained.ranges} == {shard for shard, count in enumerate(seen) if count}
        daemon.send(shards_given("run-1", "us-east", (*NAMES, "sa-east"), changes=1))
        while diloco.shards is before:
            toy.step(diloco)
        assert diloco.shards == region_shards("run-1", "us-east", (*NAMES, "sa-east"))
        assert set(diloco.shards) < set(before)
        for batch in itertools.islice(loader, (len(diloco.shards) - 80) // 8):
            for row in batch:
                assert int(row) in diloco.shards
                seen[int(row)] += 1
    assert max(seen) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_go_on_where_they_were_merged_in_the_region_that_gets_the_shard(workers: int):
    """Five rows a shard. What a region trained after its last contribution that was merged is trained again."""
    names = ("eu-west", "us-east")
    options = {"batch_size": 8, "seed": 1, "num_workers": workers}
    begin("run", "us-east", names)
    loader = ShardLoader(Numbers(5 * SHARDS), **options)
    iterator = iter(loader)
    seen = [int(row) for _ in range(12) for row in next(iterator)]
    merged = TrainedRows.unpacked(HERE.rows(0, 12))
    next(iterator)
    begun = {item.shard: item.stop for item in merged.ranges}
    assert (merged.changes, sum(begun.values())) == (0, 96)
    assert {row % SHARDS for row in seen} == set(begun)
    follow("run", "us-east", (*names, "sa-east"))
    assert TrainedRows.unpacked(HERE.rows(0, 13)).changes == 0, "the next batches may be drawn already"
    batches = [next(iterator) for _ in range(5)]
    assert len(batches) == 5
    assert TrainedRows.unpacked(HERE.rows(0, 18)).changes == 1

    begin("run", "sa-east", (*names, "sa-east"), changes=1, starts=begun)
    moved = set(HERE.own) & set(begun)
    assert moved, "the test's shards are to move"
    other = ShardLoader(Numbers(5 * SHARDS), **options)
    rest = take(other, -(-5 * len(HERE.own) // 8))
    for shard in moved:
        first, second = ([row for row in rows if row % SHARDS == shard] for rows in (seen, rest))
        assert len(first) == begun[shard]
        assert sorted({*first, *second}) == [shard + SHARDS * number for number in range(5)]
        assert not set(first) & set(second[: 5 - len(first)])


def test_a_restart_goes_on_behind_what_was_named_whatever_the_checkpoint_says(tmp_path: Path):
    (tmp_path / "learner").mkdir()
    begin("run", "us-east", NAMES, folder=tmp_path)
    loader = ShardLoader(Numbers(5 * SHARDS), batch_size=8, seed=1)
    seen = take(loader, 3)
    named = HERE.rows(0, 3)
    HERE.save(tmp_path)
    take(loader, 2)
    state = loader.state_dict()
    begin("run", "us-east", NAMES, folder=tmp_path)
    after = ShardLoader(Numbers(5 * SHARDS), batch_size=8, seed=1)
    after.load_state_dict(state)
    assert HERE.rows(0, 0) == ()
    whole = [*seen, *take(after, 20)]
    assert len(set(whole)) == len(whole) == 8 * 23
    rows = TrainedRows.unpacked(HERE.rows(0, 20))
    stops = {item.shard: item.stop for item in TrainedRows.unpacked(named).ranges}
    for item in rows.ranges:
        assert item.start == stops.get(item.shard, 0), "also where nothing was trained since: the ledger is to know"
    assert stops.keys() <= {item.shard for item in rows.ranges}

    path = tmp_path / "learner" / "positions"
    begin("another run", "us-east", NAMES, folder=tmp_path)
    assert HERE.starts is not None
    assert not HERE.starts.any()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    begin("run", "us-east", NAMES, folder=tmp_path)
    assert not HERE.starts.any()


def test_of_two_loaders_that_train_the_first_counts(caplog: pytest.LogCaptureFixture):
    begin("run", "us-east", NAMES)
    first, second = ShardLoader(Numbers(999), batch_size=2), ShardLoader(Numbers(77), batch_size=2)
    take(first, 1)
    rows = HERE.rows(0, 1)
    take(second, 1)
    assert HERE.rows(0, 1) == rows
    assert "a second loader of the region's shards" in caplog.text
    assert "give it to attach(stateful={'data': loader})" in caplog.text


def evaluated_by_no_grad(loader: Any) -> None:
    with torch.no_grad():
        take(loader, 2)


def evaluated_in_inference_mode(loader: Any) -> None:
    with torch.inference_mode():
        take(loader, 2)


@torch.no_grad()
def evaluated_by_a_function(loader: Any) -> None:
    for _ in loader:
        break


@pytest.mark.parametrize("evaluate", [evaluated_by_no_grad, evaluated_in_inference_mode, evaluated_by_a_function])
def test_a_loader_that_evaluates_first_is_not_counted(evaluate: Any, caplog: pytest.LogCaptureFixture) -> None:
    begin("run", "us-east", NAMES)
    held_out, loader = ShardLoader(Numbers(77), batch_size=2), ShardLoader(Numbers(999), batch_size=2)
    evaluate(held_out)
    assert HERE.rows(0, 1) == ()
    rows = take(loader, 3)
    evaluate(held_out)
    named = TrainedRows.unpacked(HERE.rows(0, 2))
    assert sum(item.stop - item.start for item in named.ranges) == len(rows)
    assert {item.shard for item in named.ranges} == {row % SHARDS for row in rows}
    assert "second loader" not in caplog.text


def test_the_loader_that_attach_was_given_counts_whichever_is_iterated_first(folder: Path) -> None:
    toy, seen = Toy(), []
    other, held_out, loader = (ShardLoader(Numbers(count), batch_size=2) for count in (2222, 77, 999))
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, stateful={"z": other, "data": loader}):
        take(held_out, 2)
        seen = take(other, 2)
        take(loader, 1)
        named = TrainedRows.unpacked(HERE.rows(0, 1))
        assert {item.shard for item in named.ranges} == {row % SHARDS for row in seen}, "the first of several"


def test_batches_in_another_order_and_of_no_row_are_refused():
    with pytest.raises(LearnerError, match=r"in_order=False.*Leave it out"):
        ShardLoader(Numbers(9), num_workers=2, in_order=False)
    assert len(ShardLoader(Numbers(9), num_workers=2, in_order=True)) == 9
    for size in (0, -1, None, 2.0):
        with pytest.raises(LearnerError, match=rf"ShardLoader\(Numbers, batch_size={size}\).*one row a batch or more"):
            ShardLoader(Numbers(9), batch_size=size)  # type: ignore[arg-type]
    with pytest.raises(LearnerError, match=r"ShardLoader\(Waiting.*else a ShardStream"):
        ShardLoader(Waiting(0))


@pytest.mark.parametrize("rows", [5 * SHARDS, 40])
def test_a_loop_whose_shards_all_wait_for_another_region_waits_and_says_so(folder: Path, rows: int):
    """Of few rows most shards are empty: it waits for those that are not."""
    toy, names = Toy(), ("eu-west", "us-east", "us-west")
    own = region_shards("run-1", "us-east", names)
    loader = ShardLoader(Numbers(rows), batch_size=2, seed=1)
    with (
        FakeDaemon(folder) as daemon,
        diloco_node.attach(toy.model, toy.optimizer, stateful={"data": loader}) as diloco,
    ):
        batches = iter(loader)
        next(batches)
        toy.step(diloco)
        waiting = [shard for shard in own if shard < rows]
        daemon.send(ShardsGiven(1, own, tuple(-1 if shard in waiting else 0 for shard in own)))
        answers: list[str] = []

        def give_up() -> None:
            deadline_s = time.monotonic() + 60
            session = session_of(diloco)
            while session.place.activity != "waiting for shards of the data that their owners give up":
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.01)
            answers.append(session.place.activity)
            daemon.send(shards_given("run-1", "us-east", names, changes=1))

        thread = threading.Thread(target=give_up)
        thread.start()
        while not answers:
            toy.step(diloco)
        thread.join()
        assert answers == ["waiting for shards of the data that their owners give up"]
        assert diloco.shards == own
        assert {int(row) % SHARDS for row in next(batches)} <= set(own)
        assert session_of(diloco).place.activity == ""


def test_rows_before_attach_are_refused_where_there_is_a_daemon(folder: Path):
    for loader in (ShardLoader(Numbers(9)), DataLoader(ShardStream(Numbers(9)))):
        with pytest.raises(LearnerError, match=r"known after attach\(\)"):
            next(iter(loader))


def test_a_region_without_a_row_and_a_rank_that_is_none_are_refused():
    begin("run", shard_owners("run", NAMES)[0], NAMES)
    assert list(ShardSampler(1)) == [0]
    begin("run", next(name for name in NAMES if name != shard_owners("run", NAMES)[0]), NAMES)
    with pytest.raises(ConfigError, match=r"no data for this region: 1 rows.*Give more data"):
        list(ShardSampler(1))
    with pytest.raises(LearnerError, match="rank 2 of 2"):
        ShardSampler(10, rank=2, ranks=2)


def test_a_loader_that_a_library_deals_once_more_is_refused():
    loader = ShardLoader(Numbers(20), batch_size=2)
    next(iter(loader))
    with pytest.raises(LearnerError, match=r"without Accelerate\.prepare"):
        next(iter(DataLoader(Numbers(20), batch_sampler=loader.batch_sampler)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_dealt_to_regions_ranks_and_workers(workers: int):
    seen = []
    for region in NAMES:
        begin("run", region, NAMES)
        for rank in range(2):
            stream = ShardStream(range(2500), rank=rank, ranks=2)
            part = [int(row) for row in DataLoader(stream, batch_size=None, num_workers=workers)]
            assert {row % SHARDS for row in part} <= set(HERE.own)
            seen += part
            assert len(part) > 300
    assert sorted(seen) == list(range(2500))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_in_every_worker(workers: int):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="needs the extra `hf`")
    begin("run", "us-east", NAMES)

    def make() -> EndlessLoader:
        def one_pass(_: int) -> Any:
            return loaders.StatefulDataLoader(ShardStream(range(1500)), batch_size=4, num_workers=workers)

        return EndlessLoader(one_pass)

    own = [row for row in range(1500) if row % SHARDS in HERE.own]
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for batches in (3, 9, len(own)):
        loader = make()
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        while loader.epoch == 0 and batches:
            batches -= 1
            rows = [int(row) for row in next(iterator)]
            seen += rows if loader.epoch == 0 else []
        state = loader.state_dict()
    assert sorted(seen) == own


class Waiting(Dataset[Any]):
    """A stream that goes on when the test says so, and says in which process it is."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __iter__(self) -> Iterator[tuple[int, bool]]:
        for number in range(2 * SHARDS):
            if number == SHARDS:
                assert os.read(self.pipe, 1)
            yield number, get_worker_info() is not None


def test_a_worker_that_reads_on_keeps_the_rows_of_the_new_owners():
    read, write = os.pipe()
    begin("run", "us-east", NAMES)
    before = HERE.own
    loader = DataLoader(ShardStream(Waiting(read)), batch_size=None, num_workers=1, prefetch_factor=3 * SHARDS)
    iterator = iter(loader)
    first = [next(iterator) for _ in before]
    follow("run", "us-east", ("us-east", "us-west"))
    os.write(write, b"1")
    second = list(iterator)
    assert [row for row, _ in first] == list(before)
    assert [row - SHARDS for row, _ in second] == list(HERE.own)
    assert len(HERE.own) > len(before)
    assert all(is_worker for _, is_worker in (*first, *second))


def test_a_region_that_was_removed_keeps_its_rows():
    begin("run", "us-east", NAMES)
    own = HERE.own
    follow("run", "us-east", ("eu-west", "us-west"))
    assert HERE.own is own
    follow("run", "us-east", NAMES)
    assert HERE.own is own


def test_alone_all_shards_are_ones_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    toy = Toy()
    with pytest.warns(UserWarning, match="training alone"), diloco_node.attach(toy.model) as diloco:
        assert diloco.shards == tuple(range(SHARDS))
    assert sorted(ShardSampler(100)) == list(range(100))
    assert torch.equal(HERE.flags, torch.full((SHARDS,), 2, dtype=torch.uint8))


def test_a_loader_made_before_the_process_group_takes_its_rank_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, stream = ShardLoader(Numbers(4096), batch_size=4), ShardStream(range(4096))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rows in (loader, stream):
        with pytest.raises(LearnerError, match="call init_process_group before the first row"):
            next(iter(rows))
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        other = ShardLoader(Numbers(4096), batch_size=4, rank=0, ranks=2)
        assert not set(take(loader, 50)) & set(take(other, 50))
        assert len(loader) == len(other) == 512
        assert not set(itertools.islice(stream, 50)) & set(
            itertools.islice(ShardStream(range(4096), rank=0, ranks=2), 50)
        )
    finally:
        torch.distributed.destroy_process_group()


class SplitBetweenWorkers(IterableDataset[int]):
    """As `datasets` does it: each worker of a loader gets some of the rows."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id, 400, worker.num_workers) if worker is not None else range(400))


def test_a_stream_that_splits_itself_between_workers_loses_no_row_in_silence() -> None:
    for workers in (0, 1):
        loader = DataLoader(ShardStream(SplitBetweenWorkers()), batch_size=None, num_workers=workers)
        assert sorted(map(int, loader)) == list(range(400))
    loader = DataLoader(ShardStream(SplitBetweenWorkers()), batch_size=None, num_workers=2)
    with pytest.raises(LearnerError, match=r"most would be trained by nobody\. Give num_workers=1"):
        list(loader)
