"""A permutation that is computed place by place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.learner.builtin.permutation import mix, permute


def key(number: int) -> np.ndarray:
    return np.array([number], np.uint64)


@given(size=st.integers(1, 700), seed=st.integers(0, 2**64 - 1))
def test_every_value_stands_at_one_place(size: int, seed: int):
    values = permute(np.arange(size), size, key(seed))
    assert sorted(values.tolist()) == list(range(size))


@given(size=st.integers(2**20, 2**62), seed=st.integers(0, 2**64 - 1))
def test_values_of_a_large_permutation_are_in_range_and_differ(size: int, seed: int):
    values = permute(np.arange(1000), size, key(seed))
    assert ((values >= 0) & (values < size)).all()
    assert len(set(values.tolist())) == 1000


def test_a_place_has_the_same_value_whatever_it_is_asked_with():
    whole = permute(np.arange(1000), 1000, key(5))
    np.testing.assert_array_equal(whole[[3, 999, 0]], permute(np.array([3, 999, 0]), 1000, key(5)))
    pair = permute(np.array([3, 3]), 1000, np.array([5, 6], np.uint64))
    np.testing.assert_array_equal(pair, [whole[3], permute(np.array([3]), 1000, key(6))[0]])


@pytest.mark.parametrize("size", [2, 100, 4096, 5000])
def test_places_and_keys_are_mixed(size: int):
    """Over 200 keys the value at a place is as often in each half as a coin would have it, and neighbours part."""
    values = np.stack([permute(np.arange(min(size, 50)), size, key(seed)) for seed in range(200)])
    upper = (values >= size // 2).mean(axis=0)
    assert ((upper > 0.33) & (upper < 0.67)).all()
    if size > 50:
        steps = np.diff(values, axis=1)
        assert (np.abs(steps) == 1).mean() < 0.1


def test_mixed_is_what_splitmix64_gives():
    """The first three numbers of SplitMix64 from state 1234567, as its reference implementation prints them."""
    golden = 0x9E37_79B9_7F4A_7C15
    states = np.array([(1234567 + golden * turn) % 2**64 for turn in range(3)], np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
