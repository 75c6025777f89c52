"""Setups that a seed draws: what they demand of regions can be done."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco_node.lab.sim.fake_learner import FakeLearner, Offer, update_pool
from diloco_node.lab.sim.member_changes import MemberChanges
from diloco_node.lab.sim.setup import MERGED_SHARE_MAX, draw_setup
from diloco_node.lab.sim.simulation import HOSTS, Simulation
from diloco_node.lab.sim.world import MS, SECOND, World


def test_a_region_that_follows_one_that_merges_alone_has_room_to_catch_up() -> None:
    """It got 19.3 kB/s of versions over a link of 20 kB/s, so what it lacked never came."""
    sim = Simulation(1, regions=3, joiners=1)
    cycle_s = sim.setup.settings.sync_every * sim.setup.step_ns_min / SECOND
    merged_rate = sum(4 * layout.values for layout in sim.setup.layouts) / cycle_s
    links = sim.network.links.values()
    changes = MemberChanges(sim.world, sim.hosts, sim.honest, sim.checkers)
    sim.start()
    sim.run_until(lambda: sim.world.now_ns > 8 * SECOND)
    changes.is_over = True
    for link in links:
        link.rate_bytes_per_s = 1
    assert changes._go_alone()
    assert all(merged_rate <= MERGED_SHARE_MAX * (link.rate_bytes_per_s + 1) for link in links)


@pytest.mark.parametrize("effects", HOSTS)
def test_a_region_that_begins_with_an_empty_folder_writes_into_that_folder(effects: str) -> None:
    """Seed 47003 with the daemon's effects: it went on in the folder before, which no checker looked at any more."""
    sim = Simulation(1, regions=3, joiners=1, host_type=HOSTS[effects])
    host = sim.hosts[sim.setup.founders[0]]
    folder = host.disk
    MemberChanges(sim.world, sim.hosts, sim.honest, sim.checkers)._empty(host)
    assert host.disk.id != folder.id
    sim.start()
    sim.run_until(lambda: host.disk.payloads != {} or sim.world.now_ns > 8 * SECOND)
    assert not sim.checkers.violations
    assert host.disk.entries
    assert host.disk.payloads
    assert not folder.entries
    assert not folder.payloads


def test_a_late_learner_has_caught_up_once_it_is_offered_the_newest_version() -> None:
    """It takes a version up to three cycles later, so one waits for it nearly always."""
    world = World(1)
    setup = replace(draw_setup(random.Random(1), 3), apply_lag_max=1000)
    quiet: Any = SimpleNamespace(tell_daemon=lambda _: None, persist_counters=lambda *_: None)
    pool = update_pool(world, setup.layouts)
    learner = FakeLearner(world, setup, quiet, region="a", incarnation=1, pool=pool, row_marks={})
    sim = Simulation(1, regions=3)
    sim.honest = {"a": SimpleNamespace(plane=SimpleNamespace(versions=[3] * len(setup.layouts)), learner=learner)}  # type: ignore[dict-item]
    sim.checkers.oracle._versions = [3] * len(setup.layouts)
    newest = (3,) * len(setup.layouts)

    def offer(fragment: int, version: int) -> None:
        learner.offer(Offer(fragment, version, -1, np.zeros(setup.layouts[fragment].values, np.float32)))

    for fragment in range(len(setup.layouts)):
        assert not sim.has_caught_up(newest)
        offer(fragment, 2)
    assert not sim.has_caught_up(newest)
    for fragment in range(len(setup.layouts)):
        offer(fragment, 3)
    world.step()
    assert world.now_ns < 200 * MS
    assert learner.parts[0].position.base_version == -1
    assert learner.versions == newest
    assert sim.has_caught_up(newest)
    learner.forget_daemon()
    assert not sim.has_caught_up(newest), "what the daemon offered died with it"
