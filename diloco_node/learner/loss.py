"""The losses that a loop tells: read without waiting for the device, and only finite ones passed on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.device import has_streams, record_event
from diloco_node.learner.layouts.tensors import is_sharded, local_part


class LateLoss:
    """The loss of a step not long ago, read without waiting for the device.

    Args:
        name: for errors.
    """

    def __init__(self, name: str = "loss") -> None:
        self._name = name
        self._newest: float | None = None
        self._unread: float | None = None
        # Page-locked; made at the first loss on a device, and not written before it was read.
        self._host: Tensor | None = None
        # Comes when the loss is in `_host`; None while none is on its way.
        self._event: Any = None

    def offer(self, loss: Tensor | float | None) -> None:
        """A step has this one; of several values the mean. It waits behind a loss still on its way from a device.

        Raises:
            LearnerError: this rank has only a part of it.
        """
        if loss is None:
            return
        if isinstance(loss, Tensor):
            loss = self._value(loss)
        if not isinstance(loss, Tensor) or not has_streams(loss.device):
            self._take(float(loss))
        elif self._event is None:
            if self._host is None:
                self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
            self._host.copy_(loss, non_blocking=True)
            # The copy is in the stream of the loss's device, which need not be the current one.
            self._event = record_event(loss.device)

    def _value(self, loss: Tensor) -> Tensor:
        """The loss as one detached value. A DTensor is not gathered: not all ranks may tell theirs."""
        if is_sharded(loss) and not all(place.is_replicate() for place in loss.placements):  # type: ignore[attr-defined]
            raise LearnerError(
                f"step({self._name}=...) is a DTensor of which each rank has a part, {loss.placements}: "  # type: ignore[attr-defined]
                f"give {self._name}.full_tensor(), called on all ranks"
            )
        plain = local_part(loss)
        return plain.float().mean() if plain.dim() else plain

    def newest(self) -> float | None:
        """The last one that is here; None before there is one, or if it is not finite."""
        if self._event is not None and self._host is not None and self._event.query():
            self._take(float(self._host))
            self._event = None
        return self._newest

    def fresh(self) -> float | None:
        """The last one that is here, finite or not, if it was not asked for before; else None."""
        self.newest()
        value, self._unread = self._unread, None
        return value

    def _take(self, value: float) -> None:
        self._unread, self._newest = value, finite(value)


def finite(value: float | None) -> float | None:
    """The value, or None for one that is infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None
