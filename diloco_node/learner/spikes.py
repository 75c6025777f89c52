"""Notices a loss or gradient norm that is not finite, or far outside of its recent range. Pure.

Far outside: `FAR` times as far above the median of the last `KEPT` values as their ninth decile is. A single such value
is a hard batch: it is only logged. `IN_A_ROW` of them, one after the other, are a learner that diverges.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Final

KEPT: Final = 128
SEEN_MIN: Final = 32
"""Before so many values nobody knows what is usual."""

FAR: Final = 10.0
SPREAD_MIN: Final = 0.05
"""Least range, as a share of the median: values that hardly differ have a range all the same."""

IN_A_ROW: Final = 3
"""A scaler of mixed precision skips a step of which the gradient overflowed: one value means nothing."""


class SpikeWatch:
    """Watch one kind of value, step after step.

    Args:
        name: of the values, for people.
        is_rolling_back: spikes end the learner, not only values that are not finite.
        may_begin_so: before the first finite value the others say nothing: a gradient scaler looks for its factor.

    Attributes:
        in_a_row: how many spikes there were one after the other, up to now.
        not_finite: how many values that are NaN or infinite, one after the other, up to now.
    """

    def __init__(self, name: str, *, is_rolling_back: bool = False, may_begin_so: bool = False) -> None:
        self.in_a_row = self.not_finite = 0
        self._may_begin_so = may_begin_so
        self._name, self._is_rolling_back = name, is_rolling_back
        self._last: deque[float] = deque()
        # The same values, the least first.
        self._ascending: list[float] = []

    @property
    def wrong_in_a_row(self) -> int:
        """How many values were wrong, one after the other, up to now."""
        return max(self.in_a_row, self.not_finite)

    @property
    def towards_end(self) -> int:
        """How many of them count towards the learner's end: spikes only where it then takes the merged state."""
        return max(self.in_a_row if self._is_rolling_back else 0, self.not_finite)

    def seen(self, value: float) -> str:
        """A new value. Returns what is wrong with it, in words; empty if nothing is."""
        if not math.isfinite(value):
            if self._may_begin_so and not self._last:
                return ""
            self.not_finite += 1
            return f"the {self._name} is {value}"
        self.not_finite = 0
        limit = self._limit()
        self._take(value)
        if value <= limit:
            self.in_a_row = 0
            return ""
        self.in_a_row += 1
        return f"the {self._name} is {value:.4g}, far above its range of late (up to {limit:.4g} is usual)"

    def _take(self, value: float) -> None:
        if len(self._last) == KEPT:
            del self._ascending[bisect_left(self._ascending, self._last.popleft())]
        self._last.append(value)
        insort(self._ascending, value)

    def _limit(self) -> float:
        ascending = self._ascending
        if len(ascending) < SEEN_MIN:
            return math.inf
        median = ascending[len(ascending) // 2]
        spread = max(ascending[len(ascending) * 9 // 10] - median, SPREAD_MIN * abs(median))
        return median + FAR * spread
