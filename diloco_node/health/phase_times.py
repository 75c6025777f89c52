"""A histogram of how long the phases of rounds take, as Prometheus wants it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

BOUNDS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds; the last bucket has none."""


class PhaseTimes:
    """Counts seconds by phase and bucket."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def add(self, phases: Mapping[str, float]) -> None:
        """Count a committed round: seconds by phase, as far as known."""
        for phase, seconds in phases.items():
            counts = self._counts.setdefault(phase, [0] * (len(BOUNDS_S) + 1))
            counts[bisect_left(BOUNDS_S, seconds)] += 1
            self._sums_s[phase] = self._sums_s.get(phase, 0.0) + seconds

    def document(self) -> dict[str, Any]:
        """Describe each phase: `buckets`, cumulative, as [upper bound or "+Inf", count], and `sum_seconds`."""
        bounds = (*map(str, BOUNDS_S), "+Inf")
        return {
            phase: {"buckets": [*zip(bounds, accumulate(counts), strict=True)], "sum_seconds": self._sums_s[phase]}
            for phase, counts in self._counts.items()
        }
