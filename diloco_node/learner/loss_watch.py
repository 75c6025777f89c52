"""The watch over a loop's loss and gradient norm that ends a learner before its diverged work is merged.

Far outside of their range: `FAR` times as far above the median of the last `KEPT` values as their ninth decile is. One
such value is a hard batch: it is only logged. `IN_A_ROW` of them, one after the other, are a learner that diverges.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Final

from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.loss import LateLoss

KEPT: Final = 128
SEEN_MIN: Final = 32
"""Before so many values nobody knows what is usual."""

FAR: Final = 10.0
SPREAD_MIN: Final = 0.05
"""Least range, as a share of the median: values that hardly differ have a range all the same."""

IN_A_ROW: Final = 3
"""One value means nothing."""

NORMS_IN_A_ROW: Final = 32
"""Norms that are not finite: a scaler of mixed precision that begins too high skips some twenty such steps."""


class SpikeWatch:
    """Watch one kind of value, step after step.

    is_rolling_back: spikes end the learner, not only values that are not finite. not_finite_max: so many of those, one
    after the other, end it. in_a_row, not_finite: spikes, and values that are not finite, one after the other.
    """

    def __init__(self, name: str, *, is_rolling_back: bool = False, not_finite_max: int = IN_A_ROW) -> None:
        self.in_a_row = self.not_finite = 0
        self._name, self._is_rolling_back, self._not_finite_max = name, is_rolling_back, not_finite_max
        self._last: deque[float] = deque()
        # The same values, the least first.
        self._ascending: list[float] = []

    @property
    def is_end(self) -> bool:
        """Whether the learner has to end: for spikes only where it then takes the merged state."""
        return self.not_finite >= self._not_finite_max or (self._is_rolling_back and self.in_a_row >= IN_A_ROW)

    def seen(self, value: float) -> str:
        """A new value. Returns what is wrong with it, in words; empty if nothing is."""
        if not math.isfinite(value):
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


class LossWatch:
    """The newest loss and gradient norm, each with its usual range. is_rolling_back: values beyond end the learner."""

    def __init__(self, *, is_rolling_back: bool) -> None:
        self.loss = LateLoss()
        self._has_losses = False
        self._grad_norm = LateLoss("grad_norm")
        values = ((self.loss, "loss", IN_A_ROW), (self._grad_norm, "gradient norm", NORMS_IN_A_ROW))
        self._watches = [
            (late, SpikeWatch(name, is_rolling_back=is_rolling_back, not_finite_max=limit))
            for late, name, limit in values
        ]

    def offer(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> None:
        """Take in what the step told."""
        self._has_losses |= loss is not None
        self.loss.offer(loss)
        self._grad_norm.offer(grad_norm)

    def note_logged(self, mean: float) -> None:
        """Take the mean loss that a trainer logs, where none of its steps told one."""
        if not self._has_losses:
            self.loss.offer(mean)

    def check(self, step: int, warn: Callable[[str], None]) -> None:
        """Say what is wrong with loss or gradient norm. Raises LearnerError: it was so too many times in a row."""
        for late, watch in self._watches:
            value = late.fresh()
            fault = "" if value is None else watch.seen(value)
            if not fault:
                continue
            count = max(watch.in_a_row, watch.not_finite)
            if count in (1, IN_A_ROW):
                warn(f"step {step}: {fault}")
            if watch.is_end:
                raise LearnerError(
                    f"step {step}: {fault}, {count} times in a row. The next start takes the merged "
                    "parameters; if it comes back, lower the learning rate or look at the data"
                )
