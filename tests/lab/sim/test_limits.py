"""Limits that a seed lowers: some of them, the same each time, and none once the seed is over."""

import pytest

from diloco_node.core.ledger import replication
from diloco_node.lab.sim.limits import LOW, lowered_limits


def values() -> dict[str, int]:
    return {name: getattr(modules[0], name) for name, _, modules in LOW}


def test_a_seed_lowers_some_limits_and_puts_them_back() -> None:
    usual, lowered = values(), set[str]()
    for seed in range(30):
        with lowered_limits(seed) as names:
            low = {name for name, value in values().items() if value < usual[name]}
            assert low == set(names)
            lowered |= low
        with lowered_limits(seed) as again:
            assert again == names
    assert values() == usual
    assert lowered == set(usual), "seeds 0 to 29"


def test_limits_are_put_back_when_a_seed_fails() -> None:
    usual = values()
    with pytest.raises(ZeroDivisionError), lowered_limits(0):
        raise ZeroDivisionError
    assert values() == usual


def test_modules_that_share_a_limit_get_the_same() -> None:
    for seed in range(10):
        with lowered_limits(seed):
            assert all(len({getattr(module, name) for module in modules}) == 1 for name, _, modules in LOW)


def test_a_follower_has_room_for_one_batch() -> None:
    for seed in range(100):
        with lowered_limits(seed) as names:
            assert replication.BATCH_ENTRIES_MAX <= replication.STAGED_ENTRIES_MAX, (seed, names)
