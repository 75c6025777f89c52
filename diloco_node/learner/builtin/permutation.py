"""A permutation of 0..n-1 that is computed place by place: no list of n numbers is held or shuffled.

A Feistel network shuffles the numbers below a power of four. Those that fall on n or above go through it again until
they fall below (cycle walking), which takes four passes at most on average.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

ROUNDS: Final = 6
"""Four make a good permutation with ideal round functions; ours are only good hashes."""

_GOLDEN: Final = np.uint64(0x9E37_79B9_7F4A_7C15)


def mixed(values: U64) -> U64:
    """Each value hashed to 64 bits that look drawn; a bijection.

    Args:
        values: any shape but (): numpy warns when a scalar wraps around.

    Source: the output function of SplitMix64 (Steele, Lea, Flood 2014).
    """
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


def shuffled(places: NDArray[np.int64], size: int, keys: U64) -> NDArray[np.int64]:
    """What stands at these places of a permutation of 0..size-1.

    Args:
        places: shape (k,), each 0..size-1.
        size: at least 1.
        keys: shape (k,), or (1,) for all: each key is a permutation of its own.

    Returns:
        Shape (k,), int64. For one key, different places give different values.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    left_keys = [mixed(keys ^ np.uint64(turn)) for turn in range(ROUNDS)]
    values = _feistel(places.astype(np.uint64), left_keys, half, mask)
    while (beyond := values >= size).any():
        values = np.where(beyond, _feistel(values, left_keys, half, mask), values)
    return values.astype(np.int64)


def _feistel(values: U64, keys: list[U64], half: np.uint64, mask: np.uint64) -> U64:
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & mask)
    return left << half | right
