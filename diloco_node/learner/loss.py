"""The losses that a loop tells: those of steps without waiting for the device. Only finite ones are passed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.device import LateNumbers, has_streams
from diloco_node.learner.layouts.tensors import is_sharded, local_part


class LateLoss:
    """The loss of a step not long ago, read without waiting for the device. name: for errors."""

    def __init__(self, name: str = "loss") -> None:
        self._name = name
        self._newest: float | None = None
        self._unread: float | None = None
        # On its way from a device, to page-locked memory that is asked for once.
        self._coming: LateNumbers | None = None
        self._room: Tensor | None = None

    def offer(self, loss: Tensor | float | None) -> None:
        """A step has this one; of several values the mean. It waits behind a loss still on its way from a device.

        Raises LearnerError: it is no number, or this rank has only a part of it.
        """
        if loss is None:
            return
        self.newest()  # what has come makes room: else a device's every second loss would be left out
        if isinstance(loss, Tensor):
            loss = _scalar(loss, f"step({self._name}=...)")
        if not isinstance(loss, Tensor) or not has_streams(loss.device):
            self._take(_number(loss, "step", self._name))
        elif self._coming is None:
            if self._room is None:
                self._room = torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=True)
            self._coming = LateNumbers(loss.reshape(1), self._room)

    def newest(self) -> float | None:
        """The last one that is here; None before there is one, or if it is not finite."""
        if self._coming is not None and (numbers := self._coming.read()) is not None:
            self._take(numbers[0])
            self._coming = None
        return self._newest

    def fresh(self) -> float | None:
        """The last one that is here, finite or not, if it was not asked for before; else None."""
        self.newest()
        value, self._unread = self._unread, None
        return value

    def _take(self, value: float) -> None:
        self._unread, self._newest = value, finite(value)


HeldOutLoss = Tensor | float | None
"""A loss as an evaluation gives it; of several values the mean counts."""


NOT_EVALUATED: Final[Mapping[str, Any]] = {"val_loss": None, "val_loss_global": None, "val_step": None}
"""Held-out losses of own and of global parameters, at a step of the run, as fields of messages, before there are any.
Later None is: not measured, or not finite."""


def held_out_losses(
    step: int, val_loss: HeldOutLoss, val_loss_global: HeldOutLoss, *, warn: Callable[[str], None]
) -> dict[str, Any]:
    """Read the losses of an evaluation at this step, as `NOT_EVALUATED` has them; waits for their devices. Those that
    are not finite are left out, and told. Raises LearnerError: one is no number, or this rank has only a part of it.
    """
    values = {
        name: _number(loss, "evaluated", name)
        for name, loss in (("val_loss", val_loss), ("val_loss_global", val_loss_global))
        if loss is not None
    }
    for name, value in values.items():
        if finite(value) is None:
            warn(f"evaluated({name}={value}) at step {step}: not finite, so the last one that was is still shown")
    return {**NOT_EVALUATED, **{name: finite(value) for name, value in values.items()}, "val_step": step}


def _number(loss: Tensor | float, call: str, name: str) -> float:
    scalar = _scalar(loss, f"{call}({name}=...)") if isinstance(loss, Tensor) else loss
    try:
        return float(scalar)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise LearnerError(f"{call}({name}={loss!r:.80}) is no number: give a float or a tensor") from error


def _scalar(loss: Tensor, call: str) -> Tensor:
    """The loss as one detached value, not gathered. Raises LearnerError: this rank has only a part of a DTensor."""
    if is_sharded(loss) and not all(place.is_replicate() for place in loss.placements):  # type: ignore[attr-defined]
        argument = call.removesuffix(")").partition("(")[2].partition("=")[0]
        raise LearnerError(
            f"{call} is a DTensor of which each rank has a part, {loss.placements}: "  # type: ignore[attr-defined]
            f"give {argument}.full_tensor(), called on all ranks"
        )
    plain = local_part(loss)
    return plain.float().mean() if plain.dim() and not plain.is_complex() else plain


def finite(value: float | None) -> float | None:
    """The value, or None for one that is infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None
