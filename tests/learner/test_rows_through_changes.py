"""Rows counted one by one while regions join, leave and are killed: which are trained, and which more than once.

Each region's order of rows is the real one, with the shards that the members give it and a checkpoint now and then. A
region that is killed makes the steps since its checkpoint again.
"""

import random
from collections import Counter

import pytest

from diloco_node.core.data_shards import SHARDS, region_shards
from diloco_node.learner.shard_order import ShardOrder

ROWS = 3 * SHARDS + 100
Row = tuple[int, int]
"""A row's number, and of which pass over its shard."""


class Region:
    """A region's data, its checkpoint, and what it trained."""

    def __init__(self) -> None:
        self.order = ShardOrder(ROWS, seed=1)
        self.own: tuple[int, ...] = ()
        self.checkpoint = self.order.state()
        # Since the checkpoint.
        self.steps: list[Row] = []

    def step(self) -> list[Row]:
        stretches = self.order.advance(self.own, 16)
        rows = [*zip(*(values.tolist() for values in self.order.rows_of(stretches)), strict=True)]
        self.steps += rows
        return rows

    def save(self) -> None:
        self.checkpoint, self.steps = self.order.state(), []

    def kill(self) -> list[Row]:
        """Returns the rows of the steps that it makes again."""
        self.order = ShardOrder(ROWS, seed=1)
        self.order.restore(self.checkpoint)
        lost, self.steps = self.steps, []
        return lost


class World:
    """A run whose members change."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.regions = {name: Region() for name in ("a", "b", "c")}
        self.trained: Counter[Row] = Counter()
        self.repeated: Counter[Row] = Counter()
        self.moved: set[int] = set()
        self.number = 0
        self.deal()

    def deal(self) -> None:
        for name, region in self.regions.items():
            own = region_shards("run", name, self.regions)
            if region.own:
                self.moved |= set(region.own) ^ set(own)
            if own != region.own:
                region.own = own

    def join(self) -> None:
        self.number += 1
        self.regions[f"joiner {self.number}"] = Region()
        self.deal()

    def leave(self) -> None:
        name = self.random.choice(sorted(self.regions))
        self.moved |= set(self.regions.pop(name).own)
        self.deal()

    def run(self, steps: int, *, kills: bool) -> None:
        for _ in range(steps):
            region = self.regions[self.random.choice(sorted(self.regions))]
            self.trained.update(region.step())
            draw = self.random.random()
            if draw < 0.1:
                region.save()
            elif draw < 0.13 and kills:
                self.repeated.update(region.kill())

    def own(self) -> list[int]:
        return sorted(shard for region in self.regions.values() for shard in region.own)

    def passes(self) -> dict[int, range]:
        """Per shard, the passes that its owner has finished."""
        return {
            shard: range(int(region.order.positions[shard] // region.order.sizes[shard]))
            for region in self.regions.values()
            for shard in region.own
        }


@pytest.mark.parametrize("seed", range(3))
def test_kills_repeat_the_steps_since_the_checkpoint_and_lose_no_row(seed: int):
    world = World(seed)
    world.run(900, kills=True)
    assert sum(world.repeated.values()) > 100
    excess = world.trained - Counter(dict.fromkeys(world.trained, 1))
    assert excess <= world.repeated
    for shard, numbers in world.passes().items():
        for number in numbers:
            for row in range(shard, ROWS, SHARDS):
                assert world.trained[row, number] == 1 + world.repeated[row, number]
    assert min(len(numbers) for numbers in world.passes().values()) >= 2


@pytest.mark.parametrize("seed", range(3))
def test_joins_and_leaves_repeat_rows_of_the_shards_that_moved_only(seed: int):
    world = World(seed)
    for change in (world.join, world.join, world.leave, world.join, world.leave, world.leave):
        world.run(120, kills=True)
        change()
        assert world.own() == list(range(SHARDS)), "each shard has one owner"
    world.run(300, kills=True)
    assert 0 < len(world.moved) < SHARDS
    for (row, number), count in world.trained.items():
        if row % SHARDS not in world.moved:
            assert count <= 1 + world.repeated[row, number]
    for shard, numbers in world.passes().items():
        if shard not in world.moved:
            for number in numbers:
                assert all(world.trained[row, number] for row in range(shard, ROWS, SHARDS))


def test_a_region_that_comes_back_repeats_nothing_it_trained_before():
    """Its shards were another's meanwhile; its positions in them, of its checkpoint, are still there."""
    world = World(0)
    world.run(100, kills=False)
    region = world.regions["b"]
    before = set(world.trained)
    places = region.order.positions.copy()
    del world.regions["b"]
    world.deal()
    world.run(100, kills=False)
    world.regions["b"] = region
    world.deal()
    assert (region.order.positions >= places).all()
    assert not before & {row for _ in range(20) for row in region.step()}
