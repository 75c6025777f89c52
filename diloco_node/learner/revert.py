"""Notices an optimizer that undoes what was applied.

An optimizer that keeps its own float32 masters writes them over the parameters at each step. A version that was applied
to the parameters alone is then gone one step later, and the run would merge the same work for ever without any learner
getting it. So the first versions that move the parameters are looked at again one step later.

A learner that stands at its optimum goes back, too, but its gradient leads it there; and a few values go where they
like. So what counts is only a version that moved many values, whose step went back without a gradient that led there,
and several of them. A single version that stays is enough to say that not all of each is taken back; whether a part
of each is, `learner.pull_back` finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.device import LateNumbers, has_streams
from diloco_node.learner.layouts.page_locked import page_locked
from diloco_node.learner.layouts.shard_map import LocalFragment
from diloco_node.learner.layouts.slab_values import host_values
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.pull_back import LEADS_BACK, PullBackCheck

CLOSER: Final = 0.5
"""Reverted means: the parameters are less than half as far from where they were before as from the version."""

VALUES_MIN: Final = 16
"""A version that moved fewer values proves nothing: an ordinary step may take two or three of them back by chance."""

VERSIONS_REVERTED: Final = 3
"""So many in a row, with none that stayed."""

LOOKS_MAX: Final = 64
"""After so many versions nothing more is to be found out."""

_NUMBERS: Final = 7


@dataclass(slots=True)
class _Trial:
    """A version that was applied, samples of the parameters before and after, and the look at it that is on its way."""

    local: LocalFragment
    before: Tensor
    after: Tensor
    look: LateNumbers | None = None


class RevertCheck:
    """Use `around` applies, and `verify` at the next boundary, until one check was conclusive."""

    def __init__(self, tensors: ModelTensors, fragments: int) -> None:
        self._tensors = tensors
        self._pull_back = PullBackCheck(tensors, fragments)
        # Once True the fault of `_pull_back` was told.
        self._has_warned = False
        # By fragment the version applied last, if it moved anything.
        self._pending: dict[int, _Trial] = {}
        # Per fragment where its look arrives.
        self._places = (page_locked if any(map(has_streams, tensors.devices)) else host_values)(fragments, _NUMBERS)
        self._looks = 0
        self._reverted = 0
        self._is_done = False

    @contextmanager
    def around(self, local: LocalFragment) -> Iterator[None]:
        """Within it a version is applied to this rank's part of a fragment, which is sampled before and after."""
        if self._is_done and not self._pull_back.wants(local.index):
            self._pull_back.pass_over(local.index)
            yield
            return
        before = self._tensors.sample(local)
        yield
        after = self._tensors.sample(local)
        self._pull_back.begin(local, before, after)
        if not self._is_done:
            self._pending[local.index] = _Trial(local, before, after)

    def end(self) -> None:
        """Look at nothing more."""
        self._is_done = True
        self._pending.clear()
        self._pull_back.end()

    def take_warning(self) -> str:
        """Return what people should know of an optimizer that takes back a part of each version; once, else empty."""
        if not self._pull_back.fault or self._has_warned:
            return ""
        self._has_warned = True
        return (
            f"{self._pull_back.fault}: the optimizer, or a wrapper, holds other weights than the model's parameters "
            "(averages, Lookahead, schedule-free). Merges are partly undone in this region. Use an optimizer without, "
            "or give its weights to attach(..., masters={name: float32 tensor})"
        )

    def verify(self) -> None:
        """Look whether applied values are still there. Raises LearnerError: not, `VERSIONS_REVERTED` times."""
        self._pull_back.look()
        for index, trial in list(self._pending.items()):
            if trial.look is None:
                trial.look = LateNumbers(self._compare(trial), self._places[index])
            numbers = trial.look.read()
            if numbers is None:
                continue
            trial.look = None
            changes, moves = numbers[:2]
            if moves and not changes:
                continue  # no optimizer step in between: ask again
            del self._pending[index]
            if moves:
                self._judge(trial.local, numbers)
        if self._is_done:
            self._pending.clear()

    def _compare(self, trial: _Trial) -> Tensor:
        """Numbers for `verify`, without a look at them: shape (`_NUMBERS`,), float32.

        How many values an optimizer step has changed since, and how many the version moved; of the latter the distance
        now from before and from the version, the dot product of gradient and move, and the norms of both.
        """
        before, after, now = trial.before, trial.after, self._tensors.sample(trial.local)
        is_same = before == after
        gradient = self._tensors.sample_gradients(trial.local)
        move, back, ahead, gradient = (
            values.masked_fill(is_same, 0.0)
            for values in (
                after - before,
                now - before,
                now - after,
                torch.zeros_like(now) if gradient is None else gradient,
            )
        )
        sums = [(now != after).sum(), (~is_same).sum(), back.norm(), ahead.norm()]
        sums += [(gradient * move).sum(), gradient.norm(), move.norm()]
        return torch.stack([value.float() for value in sums])

    def _judge(self, local: LocalFragment, numbers: Sequence[float]) -> None:
        _, moves, back, ahead, dot, gradient, move = numbers
        self._looks += 1
        if moves >= VALUES_MIN:
            if back >= CLOSER * ahead:
                self._is_done = True
            elif not dot > LEADS_BACK * gradient * move:
                self._reverted += 1
        if self._reverted >= VERSIONS_REVERTED:
            name = local.slabs[0].piece.name
            raise LearnerError(
                f"the optimizer reverted {name!r} one step after a version was applied, {self._reverted} times. Where "
                "it keeps masters of its own, pass them, attach(..., masters={name: float32 tensor}), so that versions "
                "reach them too. Where each of its steps is a whole search, use one with small steps, such as AdamW"
            )
        self._is_done = self._is_done or self._looks >= LOOKS_MAX
