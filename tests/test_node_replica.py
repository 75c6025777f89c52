"""The replica: the same bits whatever the stripes, readers and the step kept apart, checkpoints that can be read."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from node_kit import MANIFEST, SETTINGS, HeldExecutor, encoded, make_replica, settle, theta_of

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.types import Ballot, RoundBody, Stripe
from diloco_node.daemon import parameters as replica_module
from diloco_node.daemon.parameters import Replica, fragment_offsets
from diloco_node.daemon.stripes import cut_payload
from diloco_node.errors import StorageError
from diloco_node.storage.store import RegionStore

SIZE = MANIFEST.fragments[0].size


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[tuple[Replica, RegionStore]]:
    replica, store = await make_replica(tmp_path)
    yield replica, store
    store.close()


def a_round(replica: Replica, version: int = 1, reducers: int = 1) -> tuple[RoundBody, list[np.ndarray]]:
    blocks = replica.blocks[0]
    edges = [blocks.block_count * index // reducers for index in range(reducers + 1)]
    stripes = tuple(Stripe(f"r{index}", edges[index], edges[index + 1]) for index in range(reducers))
    factors = tuple(float(np.float32(0.3 + piece)) for piece in range(len(MANIFEST.fragments[0].pieces)))
    body = RoundBody(0, version, Ballot(1, version), (), 1.0, factors, stripes, b"d" * 32)
    return body, cut_payload(encoded(blocks, theta_of(0, 9)), blocks, stripes)


async def theta(replica: Replica, fragment: int = 0) -> np.ndarray:
    out = np.empty(MANIFEST.fragments[fragment].size, np.float32)
    await replica.copy_theta(fragment, out)
    return out


async def test_the_step_gives_the_same_bits_however_the_payload_was_cut(tmp_path: Path) -> None:
    outcomes = set()
    for reducers in (1, 2, 3, 7):
        replica, store = await make_replica(tmp_path / str(reducers))
        for version in (1, 2):
            body, parts = a_round(replica, version, reducers)
            inbox = np.zeros(SIZE, np.float32)
            await replica.apply(body, parts, inbox)
        assert inbox.tobytes() == (await theta(replica)).tobytes()
        outcomes.add((await replica.digest(0))[1])
        store.close()
    assert len(outcomes) == 1


async def test_the_step_moves_against_the_outer_gradient_with_nesterov_momentum(held) -> None:
    replica, _ = held
    body, parts = a_round(replica)
    before = await theta(replica)
    await replica.apply(body, parts, None)
    assert replica.versions == [1, 0]
    decoded = theta_of(0, 9)
    factors = np.repeat(np.array(body.factors), [piece.size for piece in MANIFEST.fragments[0].pieces])
    moved = before - await theta(replica)
    scale = 1 + SETTINGS.outer_momentum
    expected = SETTINGS.outer_lr * scale * factors * decoded
    np.testing.assert_allclose(moved, expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


async def test_a_version_out_of_order_is_a_bug_and_changes_nothing(held) -> None:
    replica, _ = held
    before = (await replica.digest(0))[1]
    with pytest.raises(AssertionError):
        await replica.apply(*a_round(replica, version=2), None)
    assert await replica.digest(0) == (0, before)


async def test_readers_see_a_version_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "OUTER_THREADS", 2)
    pool = HeldExecutor()
    replica, store = await make_replica(tmp_path, pool)
    body, parts = a_round(replica, reducers=2)
    applying = asyncio.create_task(replica.apply(body, parts, None))
    await settle()
    out = np.zeros(SIZE, np.float32)
    reading = asyncio.create_task(replica.copy_theta(0, out))
    await settle()
    assert len(pool.calls) == 2, "the two stripes; the reader waits for both"
    await pool.let_go()
    assert replica.versions[0] == 0
    assert len(pool.calls) == 1
    await pool.let_go()
    await applying
    assert len(pool.calls) == 1
    await pool.let_go()
    assert await reading == 1
    store.close()


async def test_another_fragment_does_not_wait(tmp_path: Path) -> None:
    pool = HeldExecutor()
    replica, store = await make_replica(tmp_path, pool)
    first = asyncio.create_task(replica.digest(0))
    await settle()
    second = asyncio.create_task(replica.digest(1))
    await settle()
    assert len(pool.calls) == 2
    await pool.let_go(2)
    assert (await first)[0] == (await second)[0] == 0
    store.close()


async def test_state_bytes_are_what_the_digest_says(held) -> None:
    replica, _ = held
    await replica.apply(*a_round(replica), None)
    version, digest, body = await replica.state_bytes(0)
    parameters, momentum = np.split(body.view(np.float32), 2)
    assert version == 1
    assert digest == fragment_digest(parameters, momentum)
    assert parameters.tobytes() == (await theta(replica)).tobytes()
    before = body.tobytes()
    await replica.apply(*a_round(replica, 2), None)
    assert body.tobytes() == before, "a copy: it is sent while versions follow"


async def test_a_checkpoint_is_adopted_again_bit_by_bit(held) -> None:
    replica, store = held
    await replica.apply(*a_round(replica), None)
    before = await replica.digest(0)
    assert await replica.checkpoint(0) == 1
    await replica.apply(*a_round(replica, 2), None)
    await replica.adopt(0, 1)
    assert await replica.digest(0) == before
    assert store.state_digest(0, 1) == before[1]
    await replica.apply(*a_round(replica, 2), None)  # what was adopted can be stepped


async def test_an_adopted_state_is_not_copied_on_the_loop(held, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, store = held
    arrays = store.read_state(0, 0)
    monkeypatch.setattr(store, "read_state", lambda *_: arrays)
    await replica.adopt(0, 0)
    assert replica._theta[0] is arrays[0]
    assert replica._momentum[0] is arrays[1]


async def test_a_state_that_is_not_there_leaves_what_is_in_memory(held) -> None:
    replica, _ = held
    before = await replica.digest(0)
    with pytest.raises(StorageError):
        await replica.adopt(0, 4)
    assert await replica.digest(0) == before


async def test_the_whole_model_comes_by_tensor_in_its_shape(held) -> None:
    replica, _ = held
    tensors = replica.full_tensors()
    assert {name: values.shape for name, values in tensors.items()} == {
        spec.name: spec.shape for spec in MANIFEST.tensors
    }
    for fragment in MANIFEST.fragments:
        for piece in fragment.pieces:
            part = tensors[piece.name].ravel()[piece.value_start : piece.value_stop]
            assert part.tobytes() == theta_of(fragment.index)[piece.offset : piece.offset + piece.size].tobytes()


def test_fragments_follow_each_other_in_the_inbox() -> None:
    offsets = fragment_offsets(MANIFEST)
    assert offsets[0] == 0
    assert [stop - start for start, stop in itertools.pairwise(offsets)] == [one.size for one in MANIFEST.fragments]
    assert offsets[-1] == MANIFEST.size
