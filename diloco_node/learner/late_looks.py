"""Looks at the model whose numbers are on their way from a device, and snapshots that must not be sent before them.

The training thread orders a look and goes on: the number comes a step or two later. A snapshot that is taken meanwhile
may hold what the look refuses. So the encoder waits for all looks that were ordered before the snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.device import LateNumbers


class LateLook(NamedTuple):
    """A look on its way. limit: a greater number is refused. judge: raises LearnerError for it."""

    number: LateNumbers
    limit: float
    judge: Callable[[float], None]

    def refusal(self) -> str:
        """Wait for the number; why it is refused, or empty."""
        (number,) = self.number.wait()
        try:
            if number > self.limit:
                self.judge(number)
        except LearnerError as error:
            return str(error)
        return ""


class LateLooks:
    """The looks that nobody has judged, in their order."""

    def __init__(self) -> None:
        self._coming: deque[LateLook] = deque()

    @property
    def coming(self) -> tuple[LateLook, ...]:
        """Those whose numbers were not judged."""
        return tuple(self._coming)

    def note(self, number: Tensor, limit: float, judge: Callable[[float], None]) -> None:
        """Order the copy of a number, a scalar."""
        self._coming.append(LateLook(LateNumbers(number.reshape(1)), limit, judge))

    def hear(self) -> None:
        """Judge all numbers that have come, without a wait."""
        while self._coming and (numbers := self._coming[0].number.read()) is not None:
            self._coming.popleft().judge(numbers[0])
