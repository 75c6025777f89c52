"""Notices a loop that trains another model, such as a copy: nobody writes to the one that is merged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.step_counts import STILL_STEPS
from diloco_node.learner.tensor_forms import sample_of

_WRITES: Final = attrgetter("_version")


class StillWatch:
    """A watch for steps without a write by the loop. Made when the model holds the run's parameters, of what is merged,
    and the weights in it, which no forward pass changes."""

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
