"""Stripes written to disk while others are still being merged: the file is the payload, or it is thrown away."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.digest import payload_digest, stripe_digest
from diloco_node.core.types import Ballot, Codec
from diloco_node.daemon.effects.drafts import DRAFTS_MAX, Drafts
from diloco_node.daemon.effects.open_stripes import MergedPart
from diloco_node.errors import StorageError
from diloco_node.storage.payload_files import PayloadDraft
from diloco_node.storage.store import RegionStore
from tests.kit.node_kit import HeldExecutor, InlineExecutor, Tasks, settle

BLOCKS = FragmentBlocks((5000, 300), Codec.INT8)
BALLOT = Ballot(1, 7)


def part(start: int, stop: int, seed: int = 0) -> MergedPart:
    size = BLOCKS.span_bytes(start, stop)
    body = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return MergedPart(body, stripe_digest(body), start, stop, "r")


FIRST, SECOND = part(0, 9), part(9, BLOCKS.block_count)
DIGEST = payload_digest([FIRST.digest, SECOND.digest])


class Bench:
    def __init__(self, folder: Path, pool: Any) -> None:
        self.store = RegionStore(folder)
        self.store.load(1)
        self.tasks = Tasks()
        self.drafts = Drafts(self.store, pool, self.tasks.spawn)
        self.payloads = folder / "payloads"

    def add(self, stripe: MergedPart, ballot: Ballot = BALLOT) -> None:
        self.drafts.add(ballot, 0, 1, stripe.block_start, stripe.encoded, blocks=BLOCKS)

    async def finish(self) -> bool:
        task = await self.drafts.finish(BALLOT, 0, 1, DIGEST, [FIRST, SECOND])
        await self.tasks.finish()
        assert self.tasks.errors == []
        return task


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    stripe = Bench(tmp_path / "region", InlineExecutor())
    yield stripe
    stripe.store.close()


@pytest.mark.parametrize("order", [(FIRST, SECOND), (SECOND, FIRST)])
async def test_a_payload_that_was_written_stripe_by_stripe_is_read_back(
    bench: Bench, order: tuple[MergedPart, ...]
) -> None:
    for stripe in order:
        bench.add(stripe)
    assert await bench.finish()
    content = bench.store.read_payload(0, 1, DIGEST)
    assert content.tobytes() == FIRST.encoded.tobytes() + SECOND.encoded.tobytes()
    assert bench.drafts.open_count == 0


async def test_a_draft_without_a_stripe_or_with_another_one_is_none(bench: Bench) -> None:
    assert not await bench.finish()
    bench.add(FIRST)
    assert not await bench.finish()
    bench.add(FIRST)
    bench.add(part(9, BLOCKS.block_count, seed=9))
    assert not await bench.finish()
    bench.add(FIRST)
    bench.add(SECOND)
    bench.add(part(5, 12))
    assert not await bench.finish(), "written over"
    assert not list(bench.payloads.glob("f000*"))


async def test_bytes_that_were_written_before_others_of_their_place_arrived_name_nothing(bench: Bench) -> None:
    draft_stripe = part(0, 9, seed=3)
    bench.add(draft_stripe)
    bench.add(FIRST)
    bench.add(SECOND)
    assert not await bench.finish(), "the disk may have either"
    bench.add(part(0, 9))
    bench.add(SECOND)
    assert not await bench.finish(), "equal bytes in another place of memory are not what was checked"
    assert not list(bench.payloads.glob("f000*"))


async def test_a_draft_takes_no_more_bytes_than_the_payload_has(tmp_path: Path) -> None:
    pool = HeldExecutor()
    bench = Bench(tmp_path / "region", pool)
    for start in range(BLOCKS.block_count):
        bench.add(part(start, BLOCKS.block_count))
    await settle()
    assert len(bench.tasks.running) <= 1
    task = bench.tasks.spawn(_discarded(bench), "close")
    while not task.done():
        await pool.let_go(len(pool.calls))
        await settle()
    assert bench.tasks.errors == []
    bench.store.close()


async def _discarded(bench: Bench) -> None:
    assert not await bench.drafts.finish(BALLOT, 0, 1, DIGEST, [FIRST, SECOND])


async def test_what_the_disk_refused_is_not_finished(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("full")

    for owner, name in ((PayloadDraft, "write"), (PayloadDraft, "finish"), (RegionStore, "draft_payload")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            bench.add(FIRST)
            bench.add(SECOND)
            assert not await bench.finish(), name
    assert not list(bench.payloads.glob("f000*"))


async def test_finishing_waits_for_the_writes(tmp_path: Path) -> None:
    pool = HeldExecutor()
    bench = Bench(tmp_path / "region", pool)
    bench.add(FIRST)
    bench.add(SECOND)
    task = bench.tasks.spawn(_set(bench), "finish")
    await settle()
    await pool.let_go()  # the file is opened once
    assert len(pool.calls) == 2
    await pool.let_go()
    assert not task.done()
    await pool.let_go()
    await pool.let_go()
    await settle()
    assert task.done()
    assert len(list(bench.payloads.glob("f000*"))) == 1
    bench.store.close()


async def _set(bench: Bench) -> None:
    assert await bench.drafts.finish(BALLOT, 0, 1, DIGEST, [FIRST, SECOND])


async def test_drafts_are_bounded_and_closed_with_their_ballot(bench: Bench) -> None:
    ballots = [Ballot(1, number) for number in range(DRAFTS_MAX + 2)]
    for ballot in ballots:
        bench.add(FIRST, ballot)
    await settle()
    assert bench.drafts.open_count == DRAFTS_MAX
    bench.drafts.close(ballots[1], 0, 1, is_committed=False)
    bench.drafts.close(ballots[1], 1, 9, is_committed=False)
    await bench.tasks.finish()
    assert bench.drafts.open_count == DRAFTS_MAX - 1
    bench.drafts.close(ballots[-1], 0, 2, is_committed=False)
    await bench.tasks.finish()
    assert bench.drafts.open_count == 0, "those of versions before go too"
    assert len(list(bench.payloads.glob("spare-*"))) == DRAFTS_MAX, "their files are kept"


async def test_a_ballot_that_committed_ends_the_drafts_of_all_others_of_its_version(bench: Bench) -> None:
    bench.add(FIRST, Ballot(1, 1))
    bench.add(FIRST, Ballot(1, 2))
    await settle()
    bench.drafts.close(Ballot(1, 3), 0, 1, is_committed=False)
    await bench.tasks.finish()
    assert bench.drafts.open_count == 2
    bench.drafts.close(Ballot(1, 3), 0, 1, is_committed=True)
    await bench.tasks.finish()
    assert bench.drafts.open_count == 0


async def test_a_write_that_broke_for_whatever_reason_is_not_on_the_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(draft: PayloadDraft, offset: int, data: memoryview) -> None:
        raise MemoryError

    bench.add(FIRST)
    await settle()
    monkeypatch.setattr(PayloadDraft, "write", broken)
    bench.add(SECOND)
    await settle()
    assert not await bench.drafts.finish(BALLOT, 0, 1, DIGEST, [FIRST, SECOND])
