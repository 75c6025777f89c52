"""Notices that a loop loads or empties, after `attach`, what the learner's checkpoint has brought back.

A script that does so does it at each start: moments and position of a schedule are then never those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from diloco_node.learner.several_optimizers import kind_of

MARKS: Final = ("base_lrs", "min_lrs", "_milestones")
"""Lists of a schedule of torch's that stay the same objects, but for a load."""


class StateWatch:
    """The watch over what a loop empties or loads of a kept state. Each kind of change is told once."""

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        schedules: Iterable[LRScheduler],
        warn: Callable[[str], None],
    ) -> None:
        self._warn = warn
        # The dictionaries of moments, which a load replaces, and how much is in them; empty once that was told.
        self._moments = {member: (member.state, _fill(member)) for member in optimizers if "state" in vars(member)}
        # Schedules and their lists; empty once a load was told.
        self._marks = [(schedule, _marks(schedule)) for schedule in schedules]

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has made a step."""
        if optimizer in self._moments:
            self._moments[optimizer] = self._moments[optimizer][0], _fill(optimizer)

    def check(self) -> None:
        """Look at all; at a boundary, and before a step of an optimizer, which fills what is empty."""
        for optimizer, (state, fill) in self._moments.items():
            if optimizer.state is not state:
                rates = [group.get("lr") for group in optimizer.param_groups]  # None: Adafactor finds its own
                texts = {str(rate) if rate is None else f"{float(rate):g}": None for rate in rates}
                text = (
                    f"another state than after attach(), as load_state_dict() gives it: its moments, and settings such "
                    f"as lr (now {', '.join(texts)}), are those that were loaded and not this "
                    "learner's, at each start. Load before attach()"
                )
            elif _fill(optimizer) < fill:
                text = (
                    "fewer moments than after its last step, or attach(), as state.clear() leaves it: they begin anew, "
                    "and do so after each start if the script always does that. Empty them before attach()"
                )
            else:
                continue
            self._moments = {}
            self._warn(f"{kind_of(optimizer)} has {text}")
            break
        for schedule, marks in self._marks:
            if any(mark is not now for mark, now in zip(marks, _marks(schedule), strict=True)):
                self._marks = []
                self._warn(
                    f"{type(schedule).__name__} has another state than after attach(), as load_state_dict() gives it: "
                    "its position is that which was loaded and not this learner's, at each start. Load before attach()"
                )
                break


def _fill(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """How many parameters have moments, and how many the first of them has."""
    fills = [values for values in optimizer.state.values() if isinstance(values, dict)]
    return len(fills), len(fills[0]) if fills else 0


def _marks(schedule: LRScheduler) -> list[Any]:
    return [vars(schedule).get(name) for name in MARKS]
