"""Compares the steps that a loop tells with those that optimizers make of what is merged, and with writes to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco_node.errors import LearnerError
from diloco_node.learner.optimizer_record import OptimizerRecord
from diloco_node.learner.tensor_forms import sample_of

STILL_STEPS: Final = 64
"""Steps without a write to any tensor that are no skipped ones: a gradient scaler skips some twenty at first."""

RATIO_MAX: Final = 1.5

UNTOLD_MAX: Final = 256
"""A critic may train for a hundred steps and more before the first one that is told."""

_WRITES: Final = attrgetter("_version")


class StepCounts:
    """Counts of steps; a loop whose counts are others is told once.

    Attributes:
        told: steps that the loop told. has_stepped: an optimizer has made a step since then. moves: steps of all
            optimizers that wrote to a tensor, also of those that are gone.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.told = self.moves = 0
        self.has_stepped = False
        self._warn = warn
        # By the last multiple of STILL_STEPS that were told.
        self._moves_before = 0
        # Told since then, with steps of an optimizer. One may be around another, and several may train in turns.
        self._real = 0
        self._has_warned = False
        # By optimizer beside the model: `told` and `moves` at its last step, and how many steps both made.
        self._strangers: WeakKeyDictionary[Optimizer, tuple[int, int, int]] = WeakKeyDictionary()
        self._has_named_strangers = False

    def stepped_beside(self, optimizer: Optimizer, values: int) -> None:
        """An optimizer has made a step that trains nothing of the model. values: what it trains."""
        step, moves, count = self._strangers.get(optimizer, (-1, -1, 0))
        if step == self.told or moves == self.moves:
            return
        self._strangers[optimizer] = self.told, self.moves, count + 1
        if count + 1 == STILL_STEPS and not self._has_named_strangers:
            self._has_named_strangers = True
            self._warn(
                f"{type(optimizer).__name__} trains {values} values beside the model in each step: no merge has them, "
                "and each region trains them alone. Give attach() every module that is trained, and all optimizers"
            )

    def stepped(self, untold_steps: int) -> None:
        """An optimizer has made a step. untold_steps: of this one, since the last that was told."""
        self.has_stepped = True
        if untold_steps == UNTOLD_MAX and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"an optimizer made {UNTOLD_MAX} steps, and the loop told of none of them: they count for nothing, "
                'and nothing is merged meanwhile. Call step() after each optimizer.step(), or attach(..., step="auto")'
            )

    def tell(self, records: Iterable[OptimizerRecord]) -> bool:
        """Count a step that the loop tells; whether no optimizer wrote in the last STILL_STEPS of them.

        At first a captured loop makes few, and a scaler skips some. Two networks may train in turns: then the optimizer
        with the fewest steps makes one for each that is told.
        """
        self.told += 1
        self._real += self.has_stepped
        self.has_stepped = False
        if self.told % STILL_STEPS:
            return False
        counts = [count for record in records if (count := record.take_steps())]
        is_still, self._moves_before = self.moves == self._moves_before, self.moves
        real, self._real = self._real, 0
        if counts and not self._has_warned and self.told > STILL_STEPS:
            if 2 * max(real, *counts) <= STILL_STEPS:
                self._tell_count(real, "many")
            elif min(counts) >= RATIO_MAX * STILL_STEPS:
                self._tell_count(min(counts), "few")
        return is_still

    def _tell_count(self, count: int, amount: str) -> None:
        self._has_warned = True
        self._warn(
            f"{STILL_STEPS} steps were told in which the optimizer made {count}: the run counts too {amount}. Call "
            "step() once for each optimizer.step(), with the tokens of all its micro-batches"
        )


class StillWatch:
    """Notices a loop that trains another model, such as a copy: nobody writes to the one that is merged.

    Made when the model holds the run's parameters. weights: what of the tensors no forward pass changes.
    """

    def __init__(self, tensors: Collection[Tensor], weights: Collection[Tensor], warn: Callable[[str], None]) -> None:
        self._tensors, self._weights, self._warn = tensors, weights, warn
        # Steps without a write by the loop, None once there was one; until then how often each tensor was written to
        # by this learner, and its values then.
        self._steps: int | None = 0
        self._may_be_still = True
        self.note_writes()

    def note_writes(self) -> None:
        """This learner has written to the tensors."""
        if self._steps is not None:
            self._counts = [*map(_WRITES, self._tensors)]
            self._standing = [sample_of(tensor) for tensor in self._weights]

    def begin_again(self) -> None:
        """Look again, where optimizers write nothing: as long as that is news."""
        if self._may_be_still and self._steps is None:
            self._steps = 0
            self.note_writes()

    def check(self, told_steps: int) -> None:
        """Look at a boundary. From the first step on a still model is an error; later a loop may train something else
        for a while, and is told.

        told_steps: that the loop told before. Raises LearnerError: none of them has changed the model.
        """
        if self._steps is None:
            return
        self._steps = None if [*map(_WRITES, self._tensors)] != self._counts else self._steps + 1
        if self._steps != STILL_STEPS:
            return
        self._steps, self._may_be_still = None, False  # never again: here no count tells of writes
        samples = zip(self._weights, self._standing, strict=True)
        if all(torch.equal(sample_of(tensor), sample) for tensor, sample in samples):
            text = (
                f"{STILL_STEPS} steps were told, and none of the {len(self._tensors)} tensors that attach() follows "
                "was written to: the loop trains another model, such as a copy. Give attach() that one"
            )
            if told_steps < STILL_STEPS:
                raise LearnerError(text)
            self._warn(text)
