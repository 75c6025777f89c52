"""The losses that a loop tells: read without waiting for the device, and only finite ones passed on."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class LateLoss:
    """The loss of a step not long ago, read without waiting for the device."""

    def __init__(self) -> None:
        self._newest: float | None = None
        self._unread: float | None = None
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def offer(self, loss: Tensor | float | None) -> None:
        """A step has this one; of several values the mean. It waits behind a loss still on its way from a GPU."""
        if loss is None:
            return
        if isinstance(loss, Tensor) and loss.dim():
            loss = loss.detach().float().mean()
        if not isinstance(loss, Tensor) or loss.device.type == "cpu":
            self._take(float(loss.detach() if isinstance(loss, Tensor) else loss))
        elif loss.device.type == "cuda" and self._event is None:
            self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
            self._host.copy_(loss.detach(), non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def newest(self) -> float | None:
        """The last one that is here; None before there is one, or if it is not finite."""
        if self._event is not None and self._host is not None and self._event.query():  # type: ignore[no-untyped-call]
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
