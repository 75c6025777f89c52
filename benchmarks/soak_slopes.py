"""Does a figure grow? A straight line through samples, with a standard error that knows that samples are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Final

ERRORS_MAX: Final = 3.0
"""Slopes within so many standard errors of 0 count as 0: of some hundred series without a slope about one is beyond."""

SAMPLES_MIN: Final = 12
"""With fewer samples no error can be told."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a line through samples over time.

    Attributes:
        per_hour, error_per_hour: the slope and its standard error, in units of the samples.
        mean: of the samples. samples: how many.
    """

    per_hour: float
    error_per_hour: float
    mean: float
    samples: int

    @property
    def verdict(self) -> str:
        """ "flat": compatible with 0; "grows" or "shrinks": not; "short": too few samples to say."""
        if self.samples < SAMPLES_MIN:
            return "short"
        if abs(self.per_hour) <= ERRORS_MAX * self.error_per_hour:
            return "flat"
        return "grows" if self.per_hour > 0 else "shrinks"


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares; the error is that of independent samples, widened as far as neighbours are alike.

    With rho, the correlation of each residual with the next one, n samples say as much as n (1 - rho) / (1 + rho)
    independent ones (an autoregressive process of first order).

    Args:
        times_s: ascending, seconds. values: one for each.
    """
    count = len(values)
    mean = sum(values) / count if count else 0.0
    middle_s = sum(times_s) / count if count else 0.0
    spread = sum((at - middle_s) ** 2 for at in times_s)
    if count < SAMPLES_MIN or spread == 0.0:
        return Slope(0.0, 0.0, mean, min(count, SAMPLES_MIN - 1))
    pairs = list(zip(times_s, values, strict=True))
    per_s = sum((at - middle_s) * (value - mean) for at, value in pairs) / spread
    residuals = [value - mean - per_s * (at - middle_s) for at, value in pairs]
    squares = sum(residual**2 for residual in residuals)
    error_per_s = sqrt(squares / (count - 2) / spread)
    alike = sum(one * other for one, other in pairwise(residuals))
    # A trend of two parameters was taken out, which leaves neighbours less alike than they are.
    rho = min(max(alike / squares + 4 / count, 0.0), 1 - 4 / count) if squares > 0 else 0.0
    widened = sqrt((1 + rho) / (1 - rho))
    return Slope(3600 * per_s, 3600 * error_per_s * widened, mean, count)
