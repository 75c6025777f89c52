"""Notices an optimizer that undoes what was applied.

An optimizer that keeps its own float32 masters writes them over the parameters at each step. A version that was applied
to the parameters alone is then gone one step later, and the run would merge the same work for ever without any learner
getting it. So the first versions that move the parameters are looked at again one step later.

A learner that stands at its optimum goes back, too, but its gradient leads it there; and a few values go where they
like. So what counts is only a version that moved many values, whose step went back without a gradient that led there,
and several of them. A single version that stays is enough to say that all is well.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.shard_map import LocalFragment
from diloco_node.learner.layouts.tensors import ModelTensors

CLOSER: Final = 0.5
"""Reverted means: the parameters are less than half as far from where they were before as from the version."""

VALUES_MIN: Final = 16
"""A version that moved fewer values proves nothing: an ordinary step may take two or three of them back by chance."""

VERSIONS_REVERTED: Final = 3
"""So many in a row, with none that stayed."""

LEADS_BACK: Final = 0.5
"""The gradient explains the way back if the cosine between it and the version's move is larger than this."""

LOOKS_MAX: Final = 64
"""After so many versions nothing more is to be found out: each look waits for the device."""


class RevertCheck:
    """Use around applies: `before`, `after`, and `verify` at the next boundary, until one check was conclusive."""

    def __init__(self, tensors: ModelTensors) -> None:
        self._tensors = tensors
        self._before: dict[int, Tensor] = {}
        self._pending: list[tuple[LocalFragment, Tensor, Tensor]] = []
        self._looks = 0
        self._reverted = 0
        self._is_done = False

    def before(self, local: LocalFragment) -> None:
        """Sample this rank's part of a fragment, just before a version is applied to it."""
        if not self._is_done:
            self._before[local.index] = self._tensors.sample(local)

    def after(self, local: LocalFragment) -> None:
        """It has been."""
        before = self._before.pop(local.index, None)
        if before is None:
            return
        after = self._tensors.sample(local)
        if not torch.equal(before, after):
            self._pending.append((local, before, after))

    def verify(self) -> None:
        """At the next boundary, before anything is applied: are the applied values still there?

        Raises:
            LearnerError: they were reverted, `VERSIONS_REVERTED` times.
        """
        pending, self._pending = self._pending, []
        for local, before, after in pending:
            now = self._tensors.sample(local)
            if torch.equal(now, after):
                self._pending.append((local, before, after))  # no optimizer step in between: ask again
                continue
            self._look(local, before, after, now)
        if self._is_done:
            self._pending.clear()

    def _look(self, local: LocalFragment, before: Tensor, after: Tensor, now: Tensor) -> None:
        self._looks += 1
        mask = before != after
        if int(mask.sum()) >= VALUES_MIN:
            if torch.dist(now[mask], before[mask]) >= CLOSER * torch.dist(now[mask], after[mask]):
                self._is_done = True
            elif not self._leads_back(local, (after - before)[mask], mask):
                self._reverted += 1
        if self._reverted >= VERSIONS_REVERTED:
            name = local.slabs[0].piece.name
            raise LearnerError(
                f"the optimizer reverted {name!r} one step after a version was applied, {self._reverted} times: it "
                "keeps masters of its own. Pass them, attach(..., masters={name: float32 tensor}), so that versions "
                "reach them too"
            )
        self._is_done = self._is_done or self._looks >= LOOKS_MAX

    def _leads_back(self, local: LocalFragment, move: Tensor, mask: Tensor) -> bool:
        """Whether the gradient of the step, if it is still there, points from the version to where it was before."""
        gradient = self._tensors.sample_gradients(local)[mask]
        return bool(torch.dot(gradient, move) > LEADS_BACK * gradient.norm() * move.norm())
