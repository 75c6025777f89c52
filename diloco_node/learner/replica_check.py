"""Whether ranks that hold the same part of a tensor hold the same values of it.

A merge takes one of such copies, and counts the tokens of all ranks. Where nobody adds up the gradients of the ranks
(the model is called without its DistributedDataParallel), the work of all others would be in no merge. Where they are
added up, copies may come apart by roundings: optimizers that round at random do so on each rank by its own seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.capture import is_capturing
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.slab_values import host_values
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.tensor_forms import SAMPLE_VALUES, sample_of

APART: Final = 0.1
"""Distance between copies, in lengths of what training has changed. With DistributedDataParallel it is 0. Copies that
each rank computes by itself, as with tensor parallelism, differ by roundings."""

ROUNDINGS: Final = 2.0
"""Distance that random roundings may bring after one step, in units of the last place; it grows with the square root
of the steps. One of them errs by half a unit, and the copies that are compared are the two furthest of all."""

TENSORS_MAX: Final = 8
EVERY_STEPS: Final = 1024

_NOT_ADDED_UP: Final = (
    "nothing adds up the gradients of the ranks, so that only one rank's work would be merged. Call the "
    "DistributedDataParallel module, not the model in it; leave no_sync() before a step's last backward pass; give "
    "Accelerate's prepare() the model, too. Ranks that average their models now and then (PostLocalSGD) are a region "
    "each"
)
_OTHER_STEPS: Final = (
    "their gradients are equal, so the ranks make other steps of them, and only one rank's work would be merged. Give "
    "the optimizer the same settings on all ranks, and noise of its own the same seed"
)


class ReplicaCheck:
    """Compares some values of tensors that several ranks hold, after steps 1, 2, 4, ... and each `EVERY_STEPS`."""

    def __init__(self, tensors: ModelTensors, shards: ShardMap) -> None:
        self._tensors = tensors
        copies = shards.copies()
        self._copies = copies[:: -(-len(copies) // TENSORS_MAX) or 1]
        # What the rows of this rank held before its first step, when all copies are equal.
        self._first: list[Tensor] = []
        # The last step that was told; by place of a copy its gradient in the next one, if that is looked at.
        self._step = 0
        self._gradients: dict[int, Tensor] = {}
        self.close: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Take what the model holds for what training begins from, unless that is known."""
        if self._copies and not self._first:
            self._first = self._rows()
            self.close = optimizer_hooks.register_optimizer_step_pre_hook(self._note_gradients).remove

    def _note_gradients(self, *_: Any) -> None:
        """Sample what an optimizer is about to step with."""
        if torch.compiler.is_compiling() or is_capturing() or not _is_looked_at(self._step + 1):
            return
        for place, parameter in enumerate(self._parameters()):
            gradient = None if parameter is None else parameter.grad
            if gradient is not None and gradient.layout == torch.strided:
                self._gradients[place] = sample_of(gradient)

    def check(self, step: int, greatest: Callable[[Tensor], Tensor]) -> None:
        """Compare after this step, if it is time to. All ranks call it. greatest: of each value, over all ranks.

        Raises LearnerError: copies have come apart.
        """
        self._step = step
        if not self._first or not _is_looked_at(step):
            return
        # What a rank does not hold is less than all numbers; the greatest of -x is the least of x.
        table = torch.full((6, len(self._copies), 2 * SAMPLE_VALUES), -math.inf, dtype=torch.float32, device="cpu")
        gradients, self._gradients = self._gradients, {}
        rows = zip(self._parameters(), self._rows(), self._first, strict=True)
        for place, (parameter, values, first) in enumerate(rows):
            if parameter is None or not values.numel():
                continue
            table[:4, place], table[4:, place] = 0.0, math.inf  # of gradients that nobody knows
            units = values.abs() * torch.finfo(parameter.dtype).eps
            table[:4, place, : values.numel()] = torch.stack([values, -values, (values - first).abs(), units])
            if (gradient := gradients.get(place)) is not None and gradient.shape == values.shape:
                table[4:, place] = 0.0
                table[4:, place, : values.numel()] = torch.stack([gradient, -gradient])
        most, least, changes, units, pull, counter_pull = greatest(table)
        # Of buffers all are endless, and nothing is larger.
        distances, lengths = (most + least).norm(dim=1).tolist(), changes.norm(dim=1).tolist()
        is_parameter = most.isfinite().all(dim=1)
        length = float(torch.maximum(pull, counter_pull)[is_parameter].norm())
        are_added_up = 0.0 < length < math.inf and float((pull + counter_pull)[is_parameter].norm()) <= APART * length
        limits = (ROUNDINGS * step**0.5 * are_added_up * units.norm(dim=1)).nan_to_num(0.0).tolist()
        for (name, _), distance, length, limit in zip(self._copies, distances, lengths, limits, strict=True):
            if distance > max(APART * length, limit):
                raise LearnerError(
                    f"the ranks' copies of {name!r} have come apart by step {step}, by {distance:.2g} where training "
                    f"has moved them by {length:.2g}: {_OTHER_STEPS if are_added_up else _NOT_ADDED_UP}"
                )

    def _parameters(self) -> list[Tensor | None]:
        """The parameter of each copy; None where this rank does not hold it, and of buffers, which may differ."""
        parameters = self._tensors.followed
        return [
            parameter
            if isinstance(parameter := parameters.get(name), nn.Parameter) and box in self._tensors.boxes[name]
            else None
            for name, box in self._copies
        ]

    def _rows(self) -> list[Tensor]:
        """Some values of each copy; none where `_parameters` has none."""
        return [host_values(0) if parameter is None else sample_of(parameter) for parameter in self._parameters()]


def _is_looked_at(step: int) -> bool:
    return not step & (step - 1) or not step % EVERY_STEPS
