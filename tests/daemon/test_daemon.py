"""The daemon around its node: one node however attaches and recovery meet, and what it leaves when it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import numpy as np
import pytest

from diloco_node.core.events import StateStored
from diloco_node.core.genesis import Genesis
from diloco_node.core.types import Recovered
from diloco_node.daemon import node as node_module
from diloco_node.daemon.daemon import Daemon
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.daemon.spec import NodeSpec
from diloco_node.errors import SupersededError
from diloco_node.storage.store import RegionStore
from diloco_node.wire.learner_link import (
    InitialState,
    Refuse,
    Welcome,
)
from tests.kit.daemon_kit import Learner, end
from tests.kit.node_kit import MANIFEST
from tests.kit.waiting import eventually


async def test_a_learner_that_attaches_during_recovery_waits_for_the_one_node(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that was restarted: its learner redials at once, while the states are still being read."""
    save_manifest(spec.state_dir, MANIFEST)
    gate, loads = threading.Event(), []
    real = RegionStore.load

    def slow_load(store: RegionStore, fragments: int) -> Recovered:
        loads.append(fragments)
        gate.wait(120)
        return real(store, fragments)

    monkeypatch.setattr(RegionStore, "load", slow_load)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await eventually(lambda: daemon.waiting_attach is not None)
    gate.set()
    assert isinstance(await learner.hear(), Welcome)
    assert len(nodes) == len(loads) == 1
    await learner.close()
    assert await end(daemon, running) == 0


async def test_the_first_learner_tells_the_model_and_a_second_process_gets_the_same_node(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    first = await Learner.attach(spec)
    welcome = await first.hear()
    assert isinstance(welcome, Welcome)
    assert (welcome.incarnation, welcome.wants_initial_state) == (1, True)
    await first.close()
    second = await Learner.attach(spec)
    welcome = await second.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.incarnation == 2
    assert len(nodes) == 1
    await second.close()
    assert await end(daemon, running) == 0


async def test_an_older_life_that_finds_a_new_daemon_first_or_last_does_not_displace_the_newest(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    lives = []
    for _ in range(2):
        learner = await Learner.attach(spec)
        welcome = await learner.hear()
        assert isinstance(welcome, Welcome)
        lives.append(welcome.incarnation)
        await learner.close()
    assert await end(daemon, running) == 0

    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    for life, other_life in (lives, reversed(lives)):
        learner = await Learner.attach(spec, life)
        answer = await learner.hear()
        late = await Learner.attach(spec, other_life)
        refusal = await late.hear()
        if life < other_life:
            answer, refusal = refusal, answer
        assert isinstance(refusal, Refuse)
        assert refusal.is_final
        assert isinstance(answer, Welcome)
        assert answer.incarnation == max(lives)
        await learner.close()
        await late.close()
    assert await end(daemon, running) == 0


async def test_a_process_with_another_model_does_not_displace_the_learner(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    other_life = await Learner.attach(spec, tensors=MANIFEST.tensors[:1])
    answer = await other_life.hear()
    assert isinstance(answer, Refuse)
    assert "not the run's model" in answer.reason
    assert daemon.learner_server.is_attached
    await other_life.close()
    await learner.close()
    assert await end(daemon, running) == 0


async def test_theta_0_without_a_genesis_is_asked_for_again_after_a_restart(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the disk, but no ledger says that it counts: without it this region could never propose a genesis."""
    monkeypatch.setattr(Genesis, "propose", lambda _: None)  # the daemon ends before it does
    for _ in range(2):
        daemon = Daemon(spec)
        running = asyncio.create_task(daemon.run())
        learner = await Learner.attach(spec)
        welcome = await learner.hear()
        assert isinstance(welcome, Welcome)
        assert welcome.wants_initial_state
        learner.say(InitialState())
        await eventually(lambda: nodes[-1].core.versions.initial_digests is not None)
        await learner.close()
        assert await end(daemon, running) == 0
    store = RegionStore(spec.state_dir)
    assert store.state_versions(0) == (0,)
    store.close()


async def test_a_learner_lays_theta_0_down_again_where_it_is_of_two_regions(
    spec: NodeSpec, nodes: list[node_module.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Genesis, "propose", lambda _: None)
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    learner.say(InitialState())
    await eventually(lambda: nodes[-1].core.versions.initial_digests is not None)
    node, own = nodes[-1], nodes[-1].core.versions.initial_digests
    ones = np.ones(MANIFEST.fragments[0].size, np.float32)
    node.effects.disk.initial.store_fetched(0, ones, ones, b"d" * 32)
    node._post(StateStored(0, 0, b"d" * 32))  # of a genesis that was lost with its leader
    while not isinstance(answer := await learner.hear(), Refuse):
        pass
    assert not answer.is_final
    assert "mixed of two regions" in answer.reason
    await learner.close()
    learner = await Learner.attach(spec)
    welcome = await learner.hear()
    assert isinstance(welcome, Welcome)
    assert welcome.wants_initial_state
    learner.say(InitialState())
    await eventually(lambda: node.core.versions.initial_digests is not None)
    assert own is not None
    assert node.core.versions.initial_digests == own
    assert node.runtime.store.state_digest(0, 0) == own[0], "on the disk, too"
    await learner.close()
    assert await end(daemon, running) == 0


async def test_a_newer_process_with_our_certificate_ends_this_one(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    daemon = Daemon(spec)
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await learner.hear()
    on_superseded = nodes[0].transport.on_superseded
    assert on_superseded is not None
    on_superseded(SupersededError("a newer process of a runs"))
    with pytest.raises(SupersededError) as caught:
        async with asyncio.timeout(120):
            await running
    assert caught.value.exit_code == 7
    await learner.close()


async def test_a_new_learner_gets_no_incarnation_from_a_folder_that_was_emptied(
    spec: NodeSpec, nodes: list[node_module.Node]
) -> None:
    """The others know which incarnations there were: the welcome waits until the ledger names the folder."""
    save_manifest(spec.state_dir, MANIFEST)
    daemon = Daemon(dataclasses.replace(spec, regions=("a", "b", "c"), peers={"b": None, "c": None}))
    running = asyncio.create_task(daemon.run())
    learner = await Learner.attach(spec)
    await eventually(lambda: bool(nodes) and nodes[0].reception.waiting_attach is not None)
    assert not list(spec.state_dir.glob("learner/trained-*"))
    assert "needs every region: waits for b, c" in daemon.status()["reason"]
    await learner.close()
    await eventually(lambda: nodes[0].reception.waiting_attach is None)
    assert await end(daemon, running) == 0
