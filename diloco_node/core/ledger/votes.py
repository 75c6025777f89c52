"""Majorities, and the dice that keep two voters from standing for election at the same moment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

_MASK: Final = (1 << 64) - 1


def majority_of(voters: int) -> int:
    """How many of so many voters are a majority: two of two, two of three, three of four, three of five."""
    return voters // 2 + 1


def majority_value(values: Iterable[int]) -> int:
    """The largest number that a majority of the values reach: 7 of (9, 7, 3), 3 of (9, 7, 3, 3).

    Args:
        values: one per voter, at least one.
    """
    ranked = sorted(values, reverse=True)
    return ranked[majority_of(len(ranked)) - 1]


class Dice:
    """Random integers from a seed (SplitMix64): the same seed and name give the same throws on every machine."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._state = int.from_bytes(digest[:8], "little")

    def below(self, limit: int) -> int:
        """A number in [0, limit); the bias of the remainder is below 2^-30 for limits up to 2^34 (17 s in ns)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (mixed ^ (mixed >> 31)) % limit
