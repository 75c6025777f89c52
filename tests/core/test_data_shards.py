"""Virtual shards: who owns which, and how many move when members come and go."""

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.data_shards import SHARDS, region_shards, shard_owners

NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=64, unique=True)


@settings(max_examples=40, deadline=None)
@given(names=NAMES, run_id=st.text(max_size=20))
def test_every_shard_has_one_owner_whatever_the_order_of_the_members(names: list[str], run_id: str):
    owners = shard_owners(run_id, names)
    assert shard_owners(run_id, [*reversed(names), *names]) == owners
    assert sorted(shard for name in names for shard in region_shards(run_id, name, names)) == list(range(SHARDS))
    assert set(owners) <= set(names)


@settings(max_examples=40, deadline=None)
@given(names=NAMES, count=st.integers(1, 32), run_id=st.text(max_size=20))
def test_a_join_takes_for_the_joiners_only_and_a_leave_gives_back_the_same(names: list[str], count: int, run_id: str):
    joiners = [f"joiner {number}" for number in range(count) if f"joiner {number}" not in names]
    before, after = shard_owners(run_id, names), shard_owners(run_id, names + joiners)
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} <= set(joiners)
    assert shard_owners(run_id, [*joiners, *names][len(joiners) :]) == before
    # Binomial: five standard deviations.
    share = len(joiners) / (len(names) + len(joiners))
    assert abs(len(moved) - SHARDS * share) <= 5 * math.sqrt(SHARDS * share * (1 - share)) + 1


@pytest.mark.parametrize("members", [2, 3, 8, 32, 64])
def test_the_parts_of_the_members_differ_little(members: int):
    names = [f"region-{number}" for number in range(members)]
    sizes = [len(region_shards("run", name, names)) for name in names]
    mean = SHARDS / members
    assert sum(sizes) == SHARDS
    assert max(abs(size - mean) for size in sizes) <= 5 * math.sqrt(mean)


def test_who_joins_takes_evenly_from_all():
    names = [f"region-{number}" for number in range(8)]
    before, after = shard_owners("run", names), shard_owners("run", [*names, "new"])
    givers = [old for old, new in zip(before, after, strict=True) if old != new]
    assert {givers.count(name) for name in names} <= set(range(3, 30))


def test_another_process_another_run_and_a_stranger():
    owners = shard_owners("run", ["a", "b", "c"])
    code = "from diloco_node.core.data_shards import *; print(shard_owners('run', {'c', 'a', 'b'}))"
    for seed in ("1", "2"):
        line = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        assert line.strip() == str(owners)
    assert "".join(owners[:16]) == "cccbaaaaaabccccc"
    assert shard_owners("run 2", ["a", "b", "c"]) != owners
    # A name's end is not the other's beginning.
    assert shard_owners("r", ["una", "b"]) != tuple(
        {"a": "una", "b": "b"}[name] for name in shard_owners("run", ["a", "b"])
    )
    assert region_shards("run", "z", ["a", "b"]) == ()
