"""Where the run is on the schedule that all learners share: told by the daemon, carried on step by step in between.

Learners differ in speed. A schedule that followed each one's own steps would be over for a fast learner long before the
run is, and never come to its end for a slow one.
"""

from __future__ import annotations

from typing import Final

from diloco_node.core.bounds import STEP_MAX
from diloco_node.core.merge.schedule import SLOWER_MAX, MovingAverage

STEPS_MIN: Final = 8
"""Own steps from which on the learner's share is known; until then it counts as one of median speed."""


class StepTimer:
    """Moving average of the time from one inner step to the next, in nanoseconds; 0 until two steps were made.

    A pause counts as four steps at most. It is not left out: a loop may have one in each step.
    """

    def __init__(self) -> None:
        self._average = MovingAverage()
        self._last_ns: int | None = None

    @property
    def average_ns(self) -> int:
        """Now."""
        return self._average.average_ns

    def stepped(self, now_ns: int) -> None:
        """An inner step ended."""
        if self._last_ns is not None:
            self._average = self._average.after(now_ns - self._last_ns)
        self._last_ns = now_ns


class _Advance:
    """A figure of the run that never goes back, nor beyond `value_max`. value: now, as far as this learner knows."""

    def __init__(self, value: float, share: float, *, share_max: float, value_max: float) -> None:
        self.value = value
        self._share = share
        self._share_max, self.value_max = share_max, value_max
        self._steps = 0
        self._first: tuple[int, float] | None = None
        self._last = (0, value)

    def resume(self, value: float) -> None:
        """The run was there already."""
        self.value = max(self.value, min(value, self.value_max))
        self._last = (self._steps, self.value)

    def stepped(self) -> None:
        """The learner made a step: the run went on by so much as it did per step of this learner so far."""
        self._steps += 1
        steps, value = self._last
        self.value = max(self.value, min(self.value_max, value + self._share * (self._steps - steps)))

    def told(self, value: float) -> None:
        """The run is there."""
        if self._first is None:
            self._first = (self._steps, value)
        steps = self._steps - self._first[0]
        if steps >= STEPS_MIN:
            self._share = min(max(0.0, value - self._first[1]) / steps, self._share_max)
        self._last = (self._steps, value)
        self.value = max(self.value, min(value, self.value_max))


class RunClock:
    """Kept by rank 0; the other ranks are told."""

    def __init__(self) -> None:
        self._steps = _Advance(0.0, 1.0, share_max=float(SLOWER_MAX), value_max=float(STEP_MAX))
        self._part: _Advance | None = None

    @property
    def global_step(self) -> int:
        """Steps of the median learner."""
        return int(self._steps.value)

    @property
    def part(self) -> float | None:
        """Share of the way to the run's end, 0 to 1; None: nothing says where the run ends."""
        return None if self._part is None else self._part.value

    def limit(self, steps_max: int) -> None:
        """The run ends at this step; 0: at none."""
        self._steps.value_max = float(steps_max or STEP_MAX)

    def resume(self, global_step: int) -> None:
        """The run was there when this learner joined it, or wrote its checkpoint."""
        self._steps.resume(float(global_step))

    def stepped(self) -> None:
        """This learner made a step."""
        self._steps.stepped()
        if self._part is not None:
            self._part.stepped()

    def told(self, global_step: int, run_part: float | None) -> None:
        """The daemon says where the run is. A figure that is behind the own one makes that wait, not go back."""
        self._steps.told(float(global_step))
        if run_part is not None:
            if self._part is None:
                self._part = _Advance(run_part, 0.0, share_max=1.0, value_max=1.0)
            self._part.told(run_part)
