"""Whether ranks that hold the same part of a tensor hold the same values of it.

A merge takes one of such copies, and counts the tokens of all ranks. Where nobody adds up the gradients of the ranks
(the model is called without its DistributedDataParallel), the work of all others would be in no merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.slab_values import host_values
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.tensor_forms import SAMPLE_VALUES, sample_of

APART: Final = 0.1
"""Distance between copies, in lengths of what training has changed. With DistributedDataParallel it is 0. Copies that
each rank computes by itself, as with tensor parallelism, differ by roundings."""

TENSORS_MAX: Final = 8
EVERY_STEPS: Final = 1024


class ReplicaCheck:
    """Compares some values of tensors that several ranks hold, after steps 1, 2, 4, ... and each `EVERY_STEPS`."""

    def __init__(self, tensors: ModelTensors, shards: ShardMap) -> None:
        self._tensors = tensors
        copies = shards.copies()
        self._copies = copies[:: -(-len(copies) // TENSORS_MAX) or 1]
        # What the rows of this rank held before its first step, when all copies are equal.
        self._first: list[Tensor] = []

    def begin(self) -> None:
        """Take what the model holds for what training begins from, unless that is known."""
        self._first = self._first or self._rows()

    def check(self, step: int, greatest: Callable[[Tensor], Tensor]) -> None:
        """Compare, if it is time to. All ranks call it. Raises LearnerError: copies have come apart."""
        if not self._first or (step & (step - 1) and step % EVERY_STEPS):
            return
        # What a rank does not hold is less than all numbers; the greatest of -x is the least of x.
        table = torch.full((3, len(self._copies), 2 * SAMPLE_VALUES), -math.inf, dtype=torch.float32, device="cpu")
        for place, (values, first) in enumerate(zip(self._rows(), self._first, strict=True)):
            if values.numel():
                table[:, place] = 0.0
                table[:, place, : values.numel()] = torch.stack([values, -values, (values - first).abs()])
        most, least, changes = greatest(table)
        # Of buffers all are endless, and nothing is larger.
        distances, lengths = (most + least).norm(dim=1).tolist(), changes.norm(dim=1).tolist()
        for (name, _), distance, length in zip(self._copies, distances, lengths, strict=True):
            if distance > APART * length:
                raise LearnerError(
                    f"the ranks' copies of {name!r} have come apart by step {step}, by {distance:.2g} where training "
                    f"has moved them by {length:.2g}: nothing adds up the gradients of the ranks, so that only one "
                    "rank's work would be merged. Call the DistributedDataParallel module, not the model in it; leave "
                    "no_sync() before a step's last backward pass; give Accelerate's prepare() the model, too"
                )

    def _rows(self) -> list[Tensor]:
        """Some values of each copy; none where this rank does not hold it, and of buffers, which may differ."""
        parameters = self._tensors.followed
        return [
            sample_of(parameters[name])
            if isinstance(parameters.get(name), nn.Parameter) and box in self._tensors.boxes[name]
            else host_values(0)
            for name, box in self._copies
        ]
