"""How many inner steps really lie between two merges of a fragment, from what was counted."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import Final

WINDOW_CYCLES: Final = 4
"""The window: so many times H of the last steps."""

MARKS_MAX: Final = 4096
"""More often than this in a window nobody reports; the oldest are forgotten."""

LATE: Final = Fraction(110, 100)
"""A cycle is late when it takes over a tenth longer than H: rounds open at step boundaries, which costs some."""


class MergePace:
    """Rounds committed beside inner steps made. fragments: P. sync_every: H."""

    def __init__(self, fragments: int, sync_every: int) -> None:
        self._fragments = fragments
        self._sync_every = sync_every
        self._marks: deque[tuple[int, int]] = deque(maxlen=MARKS_MAX)  # (steps, rounds), both never falling

    def report(self, steps: int, rounds: int) -> None:
        """Take what a learner has done and the ledger holds now. Less than before is another learner: it begins
        anew."""
        if self._marks and (steps < self._marks[-1][0] or rounds < self._marks[-1][1]):
            self._marks.clear()
        self._marks.append((steps, rounds))
        # The first mark stays that is just outside of the window: so the window is never shorter than it should be.
        while len(self._marks) > 2 and steps - self._marks[1][0] >= WINDOW_CYCLES * self._sync_every:
            self._marks.popleft()

    @property
    def steps_per_cycle(self) -> Fraction | None:
        """Steps in which each fragment was merged once, at least; None before one window has been seen."""
        if not self._marks:
            return None
        steps, rounds = (last - first for first, last in zip(self._marks[0], self._marks[-1], strict=True))
        if steps < WINDOW_CYCLES * self._sync_every:
            return None
        return Fraction(steps * self._fragments, max(rounds, 1))

    @property
    def is_late(self) -> bool:
        """Whether fragments are merged less often than every H steps."""
        steps = self.steps_per_cycle
        return steps is not None and steps > LATE * self._sync_every
