"""A permutation of 0..n-1 that is computed place by place: no list of n numbers is held or shuffled.

A Feistel network shuffles the numbers below the next power of two. Numbers from n on go through it again until they
fall below (cycle walking): less than twice on average. It runs before every inner step, so its round
function is a short one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

ROUNDS: Final = 6
"""Four make a good permutation with ideal round functions; ours are only good hashes."""

_GOLDEN: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_FIRST: Final = np.uint64(0xBF58_476D_1CE4_E5B9)
_SECOND: Final = np.uint64(0x94D0_49BB_1331_11EB)


def mix(values: U64) -> U64:
    """Each value hashed to 64 bits that look drawn; a bijection: the output of SplitMix64 (Steele, Lea, Flood 2014).
    Not for scalars, of which numpy warns that they wrap around."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def permute(places: NDArray[np.int64], size: int, keys: U64) -> NDArray[np.int64]:
    """Values at these places, shape (k,), of a permutation of 0..size-1; int64, shape (k,).

    keys: shape (k,), or (1,) for all: each key is a permutation of its own.
    """
    bits = max(2, (size - 1).bit_length())
    low = np.uint64(bits // 2)
    masks = (np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1))
    round_keys = [mix(keys)]
    while len(round_keys) < ROUNDS:
        round_keys.append(round_keys[-1] + _GOLDEN)
    values = _feistel(places.astype(np.uint64), round_keys, low, masks)
    while (beyond := values >= size).any():
        values = np.where(beyond, _feistel(values, round_keys, low, masks), values)
    return values.astype(np.int64)


def _feistel(values: U64, keys: list[U64], low: np.uint64, masks: tuple[np.uint64, np.uint64]) -> U64:
    """The halves may differ by a bit in size, so they take turns instead of changing places."""
    halves = [values & masks[0], values >> low]
    for turn, key in enumerate(keys):
        noise = (halves[1 - turn % 2] ^ key) * _FIRST
        noise = (noise ^ noise >> np.uint64(32)) * _SECOND >> np.uint64(32)
        halves[turn % 2] = halves[turn % 2] ^ noise & masks[turn % 2]
    return halves[1] << low | halves[0]
