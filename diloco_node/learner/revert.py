"""Notices an optimizer that undoes what was applied.

An optimizer that keeps its own float32 masters writes them over the parameters at each step. A version that was applied
to the parameters alone is then gone one step later, and the run would merge the same work for ever without any learner
getting it. So the first version that moves the parameters is looked at again one step later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco_node.core.fragments import Fragment
from diloco_node.errors import LearnerError
from diloco_node.learner.tensors import ModelTensors

CLOSER = 0.5
"""Reverted means: the parameters are less than half as far from where they were before as from the version."""


class RevertCheck:
    """Use around applies: `before`, `after`, and `verify` at the next boundary, until one check was conclusive."""

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._before: dict[int, Tensor] = {}
        self._pending: list[tuple[Fragment, Tensor, Tensor]] = []
        self._is_done = False

    def before(self, fragment: Fragment) -> None:
        """The fragment is about to be applied."""
        if not self._is_done:
            self._before[fragment.index] = self._tensors.sample(fragment)

    def after(self, fragment: Fragment) -> None:
        """It has been."""
        before = self._before.pop(fragment.index, None)
        if before is None:
            return
        after = self._tensors.sample(fragment)
        if not torch.equal(before, after):
            self._pending.append((fragment, before, after))

    def verify(self) -> None:
        """At the next boundary, before anything is applied: are the applied values still there?

        Raises:
            LearnerError: they were reverted.
        """
        pending, self._pending = self._pending, []
        for fragment, before, after in pending:
            now = self._tensors.sample(fragment)
            if torch.equal(now, after):
                self._pending.append((fragment, before, after))  # no optimizer step in between: ask again
                continue
            self._is_done = True
            if torch.dist(now, before) < CLOSER * torch.dist(now, after):
                name = fragment.pieces[0].name
                raise LearnerError(
                    f"the optimizer reverted {name!r} one step after a version was applied: it keeps masters of its "
                    "own. Pass them, attach(..., masters={name: float32 tensor}), so that versions reach them too"
                )
        if self._is_done:
            self._pending.clear()
