"""The parameters: the same bits whatever the stripes, readers and the step kept apart, checkpoints that can be read."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diloco_node.core.types import Ballot, RoundBody, Stripe
from diloco_node.daemon import parameters as parameters_module
from diloco_node.daemon.effects.open_stripes import cut_payload
from diloco_node.daemon.parameters import Parameters
from diloco_node.errors import StorageError
from diloco_node.storage.store import RegionStore
from tests.kit.node_kit import MANIFEST, SETTINGS, HeldExecutor, encoded, make_parameters, settle, theta_of

SIZE = MANIFEST.fragments[0].size


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Parameters, RegionStore]]:
    parameters, store = await make_parameters(tmp_path)
    yield parameters, store
    store.close()


def a_round(parameters: Parameters, version: int = 1, reducers: int = 1) -> tuple[RoundBody, list[np.ndarray]]:
    blocks = parameters.blocks[0]
    edges = [blocks.block_count * index // reducers for index in range(reducers + 1)]
    stripes = tuple(Stripe(f"r{index}", edges[index], edges[index + 1]) for index in range(reducers))
    factors = tuple(float(np.float32(0.3 + piece)) for piece in range(len(MANIFEST.fragments[0].pieces)))
    body = RoundBody(0, version, Ballot(1, version), (), 1.0, factors, stripes, b"d" * 32)
    return body, cut_payload(encoded(blocks, theta_of(0, 9)), blocks, stripes)


async def theta(parameters: Parameters, fragment: int = 0) -> np.ndarray:
    return parameters.theta[fragment].copy()


async def test_the_step_gives_the_same_bits_however_the_payload_was_cut(tmp_path: Path) -> None:
    outcomes = set()
    for reducers in (1, 2, 3, 7):
        parameters, store = await make_parameters(tmp_path / str(reducers))
        for version in (1, 2):
            body, bodies = a_round(parameters, version, reducers)
            place, before = np.zeros(SIZE, np.float32), parameters.theta[0]
            content = before.tobytes()
            await parameters.apply(body, bodies, place)
            assert before.tobytes() == content, "a learner may read it"
        assert parameters.theta[0] is place
        outcomes.add((await parameters.digest(0))[1])
        store.close()
    assert len(outcomes) == 1


async def test_the_step_moves_against_the_outer_gradient_with_nesterov_momentum(pair) -> None:
    parameters, _ = pair
    body, bodies = a_round(parameters)
    before = await theta(parameters)
    await parameters.apply(body, bodies, None)
    assert parameters.versions == [1, 0]
    gradient = theta_of(0, 9)
    factors = np.repeat(np.array(body.factors), [piece.size for piece in MANIFEST.fragments[0].pieces])
    difference = before - await theta(parameters)
    scale = 1 + SETTINGS.outer_momentum
    step = SETTINGS.outer_lr * scale * factors * gradient
    np.testing.assert_allclose(difference, step, rtol=0.02, atol=0.02 * np.abs(step).max())


async def test_a_last_round_leaves_the_momentum_for_a_run_that_goes_on(pair) -> None:
    parameters, _ = pair
    await parameters.apply(*a_round(parameters), None)
    momentum, before = parameters.momentum[0].copy(), await theta(parameters)
    assert momentum.any()
    body, bodies = a_round(parameters, version=2)
    await parameters.apply(replace(body, is_last=True, outer_lr=1.0, outer_momentum=0.0), bodies, None)
    assert parameters.momentum[0].tobytes() == momentum.tobytes()
    factors = np.repeat(np.array(body.factors), [piece.size for piece in MANIFEST.fragments[0].pieces])
    step = factors * theta_of(0, 9)
    np.testing.assert_allclose(before - await theta(parameters), step, rtol=0.02, atol=0.02 * np.abs(step).max())


async def test_a_version_out_of_order_is_a_bug_and_changes_nothing(pair) -> None:
    parameters, _ = pair
    before = (await parameters.digest(0))[1]
    with pytest.raises(AssertionError):
        await parameters.apply(*a_round(parameters, version=2), None)
    assert await parameters.digest(0) == (0, before)


async def test_readers_see_a_version_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters_module, "OUTER_THREADS", 2)
    pool = HeldExecutor()
    parameters, store = await make_parameters(tmp_path, pool)
    body, bodies = a_round(parameters, reducers=2)
    applying = asyncio.create_task(parameters.apply(body, bodies, None))
    await settle()
    out = np.zeros(SIZE, np.float32)
    reading = asyncio.create_task(parameters.move_theta(0, out))
    await settle()
    assert len(pool.calls) == 2, "the two stripes; the reader waits for both"
    await pool.let_go()
    assert parameters.versions[0] == 0
    assert len(pool.calls) == 1
    await pool.let_go()
    await applying
    assert len(pool.calls) == 1
    await pool.let_go()
    assert await reading == 1
    assert parameters.theta[0] is out
    store.close()


async def test_another_fragment_does_not_wait(tmp_path: Path) -> None:
    pool = HeldExecutor()
    parameters, store = await make_parameters(tmp_path, pool)
    first = asyncio.create_task(parameters.digest(0))
    await settle()
    second = asyncio.create_task(parameters.digest(1))
    await settle()
    assert len(pool.calls) == 2
    await pool.let_go(2)
    assert (await first)[0] == (await second)[0] == 0
    store.close()


async def test_a_checkpoint_is_adopted_again_bit_by_bit(pair) -> None:
    parameters, store = pair
    await parameters.apply(*a_round(parameters), None)
    before = await parameters.digest(0)
    assert await parameters.checkpoint(0) == before
    await parameters.apply(*a_round(parameters, 2), None)
    await parameters.adopt(0, 1)
    assert await parameters.digest(0) == before
    assert store.state_digest(0, 1) == before[1]
    await parameters.apply(*a_round(parameters, 2), None)  # what was adopted can be stepped


async def test_states_that_are_set_aside_are_not_found_by_the_next_start(pair) -> None:
    parameters, store = pair
    for version in (1, 2):
        await parameters.apply(*a_round(parameters, version), None)
        await parameters.checkpoint(0)
    await parameters.set_states_aside(0, 1)
    assert store.state_versions(0) == (0,)
    assert store.set_aside == ["f000-v00000001.bin", "f000-v00000002.bin"]


async def test_parameters_outside_of_the_version_area_go_back_to_the_kernel_with_their_array(pair) -> None:
    """Neither the heap has them, nor a block of the store or of other fragments that would outlive them."""
    parameters, _ = pair
    momentum = parameters.momentum[0]
    sizes = [4 * fragment.size for fragment in MANIFEST.fragments]
    assert [_mapped_bytes(theta) for theta in parameters.theta] == sizes
    await parameters.apply(*a_round(parameters), None)
    assert [_mapped_bytes(theta) for theta in parameters.theta] == sizes
    await parameters.adopt(0, 0)
    assert parameters.momentum[0] is momentum


def _mapped_bytes(values: np.ndarray) -> int:
    """Size of the mapping that an array alone holds; 0: it is on the heap."""
    base = values.base
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return len(base) if isinstance(base, mmap.mmap) else 0


async def test_states_are_adopted_after_each_other(pair, monkeypatch) -> None:
    """A start adopts all fragments: each takes 12 bytes a parameter while it is read."""
    parameters, store = pair
    reading, most = 0, 0
    read = store.read_state

    def count(fragment: int, version: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        state = read(fragment, version)
        os.sched_yield()
        reading -= 1
        return state

    monkeypatch.setattr(store, "read_state", count)
    with ThreadPoolExecutor(4) as threads:
        parameters._files = threads
        await asyncio.gather(*(parameters.adopt(fragment, 0) for fragment in (0, 1) * 8))
    assert most == 1


async def test_a_state_that_is_not_there_leaves_what_is_in_memory(pair) -> None:
    parameters, _ = pair
    before = await parameters.digest(0)
    with pytest.raises(StorageError):
        await parameters.adopt(0, 4)
    assert await parameters.digest(0) == before


async def test_the_whole_model_comes_by_tensor_in_its_shape(pair) -> None:
    parameters, _ = pair
    tensors = parameters.full_tensors()
    assert {name: values.shape for name, values in tensors.items()} == {
        spec.name: spec.shape for spec in MANIFEST.tensors
    }
    for fragment in MANIFEST.fragments:
        for piece in fragment.pieces:
            values = tensors[piece.name].ravel()[piece.value_start : piece.value_stop]
            assert values.tobytes() == theta_of(fragment.index)[piece.offset : piece.offset + piece.size].tobytes()
