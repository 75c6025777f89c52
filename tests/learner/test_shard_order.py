"""The order of a region's rows, and the position in each shard."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.data_shards import SHARDS
from diloco_node.errors import ConfigError
from diloco_node.learner.region_shards import HERE
from diloco_node.learner.shard_order import RowRange, ShardOrder
from tests.kit.shards_given import begin, follow, shards_given


def rows_in(order: ShardOrder, stretches: list[RowRange]) -> list[int]:
    numbers, passes = order.rows_of(stretches)
    assert passes.tolist() == [part.number for part in stretches for _ in range(part.start, part.stop)]
    return numbers.tolist()


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3000),
    count=st.integers(40, 700),
    step=st.integers(1, 5),
    seed=st.integers(-(2**31), 2**62),
)
def test_each_pass_has_each_row_once_however_many_are_taken_at_a_time(rows: int, count: int, step: int, seed: int):
    own = tuple(range(0, SHARDS, step))
    order, twin = ShardOrder(rows, seed=seed), ShardOrder(rows, seed=seed)
    total = int(order.sizes[list(own)].sum())
    taken: list[int] = []
    while len(taken) < 2 * total:
        taken += rows_in(order, order.advance(own, count))
    everything = {row for row in range(rows) if row % SHARDS in own}
    assert set(taken[:total]) == set(taken[total : 2 * total]) == everything
    if total > 20:
        assert taken[:total] != taken[total : 2 * total], "each pass has an order of its own"
    assert rows_in(twin, twin.advance(own, len(taken))) == taken


def test_few_positions_move_in_a_step():
    order = ShardOrder(SHARDS * 1000, seed=1)
    order.advance(tuple(range(300)), 24 * 8)
    assert np.count_nonzero(order.positions) == 1


def test_a_restored_order_goes_on_and_other_seeds_are_others():
    own = tuple(range(50, 90))
    first, second = ShardOrder(9000, seed=1), ShardOrder(9000, seed=1)
    first.advance(own, 777)
    second.restore(first.state())
    assert second.advance(own, 500) == first.advance(own, 500)
    other = ShardOrder(9000, seed=2)
    assert rows_in(other, other.advance(own, 100)) != rows_in(first, first.advance(own, 100))


def test_rows_that_are_others_than_those_of_the_checkpoint_are_told(caplog: pytest.LogCaptureFixture):
    state = ShardOrder(9000, seed=1).state()
    for rows, before in ((9000, state), (8000, state), (8000, {k: v for k, v in state.items() if k != "rows"})):
        ShardOrder(rows, seed=1).restore(before)
    assert [record.message[:50] for record in caplog.records] == ["the data have 8000 rows, and had 9000 when the che"]


def test_a_shard_that_comes_is_begun_at_the_regions_pass_and_one_that_goes_is_left():
    before, after = tuple(range(10)), tuple(range(5, 15))
    order = ShardOrder(SHARDS * 7, seed=3)
    order.advance(before, 3 * int(order.sizes[list(before)].sum()) + 4)
    places = order.positions.copy()
    stretches = order.advance(after, int(order.sizes[list(after)].sum()) - 4 * (max(places[:5]) == 21))
    assert {stretch.shard for stretch in stretches} == set(after)
    assert {stretch.number for stretch in stretches if stretch.shard >= 10} == {3}
    assert (order.positions[:5] == places[:5]).all()
    order.advance(before, 1)
    assert (order.positions >= places).all(), "no position goes back"


@pytest.mark.parametrize(
    "change",
    [
        {"positions": None},
        {"positions": torch.zeros(3, dtype=torch.int64)},
        {"positions": torch.zeros(SHARDS)},
        {"positions": torch.full((SHARDS,), -1)},
        {"pass": -1},
        {"pass": "1"},
    ],
)
def test_a_state_without_positions_is_refused(change: dict[str, object]):
    order = ShardOrder(10, seed=0)
    with pytest.raises(ConfigError, match="positions"):
        order.restore(order.state() | change)


def test_a_shard_that_was_anothers_between_two_steps_goes_on_behind_it():
    order, own = ShardOrder(SHARDS * 100, seed=1), tuple(range(10))
    begun = np.zeros(SHARDS, np.int64)
    order.advance(own, 5, begun)
    (shard,) = np.flatnonzero(order.positions)
    begun[shard] = 60  # it went to another region, which trained it, and came back
    (rows,) = order.advance((*own,), 5, begun)
    assert (rows.shard, rows.start) == (shard, 60)
    begun[shard] = 62  # given to the loop; what was drawn beyond is on its way
    (rows,) = order.advance((*own,), 5, begun)
    assert (rows.shard, rows.start) == (shard, 65)


def test_a_learner_hears_of_a_shard_that_went_on_elsewhere_and_of_no_older_members():
    begin("run", "a", ("a", "b"), changes=3)
    own = HERE.own
    follow("run", "a", ("a", "b"), changes=3)
    assert HERE.own is own, "the same shards, where they were"
    HERE.follow(shards_given("run", "a", ("a", "b"), changes=5, starts={own[0]: 7}))
    assert HERE.own == own
    assert HERE.own is not own, "one was another's meanwhile"
    assert HERE.starts is not None
    assert HERE.starts[own[0]] == 7
    follow("run", "a", ("a", "b", "c"), changes=4)
    assert (HERE.own, HERE.changes) == (own, 5), "of a daemon that has just started"
    HERE.clear()
