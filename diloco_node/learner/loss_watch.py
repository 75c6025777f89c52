"""The watch over a loop's loss and gradient norm that ends a learner before its diverged work is merged."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.loss import LateLoss
from diloco_node.learner.spikes import IN_A_ROW, NORMS_IN_A_ROW, SpikeWatch

log = logging.getLogger("diloco_node.learner")


class LossWatch:
    """The newest loss and gradient norm, each with the range that it usually has.

    is_rolling_back: values far outside of their range end the learner, too, not only those that are not finite.
    """

    def __init__(self, *, is_rolling_back: bool) -> None:
        self.loss = LateLoss()
        self._grad_norm = LateLoss("grad_norm")
        values = ((self.loss, "loss", IN_A_ROW), (self._grad_norm, "gradient norm", NORMS_IN_A_ROW))
        self._watches = [
            (late, SpikeWatch(name, is_rolling_back=is_rolling_back, not_finite_max=limit))
            for late, name, limit in values
        ]

    def offer(self, loss: Tensor | float | None, grad_norm: Tensor | float | None) -> None:
        """Take in what the step told."""
        self.loss.offer(loss)
        self._grad_norm.offer(grad_norm)

    def check(self, step: int, warn: Callable[[str], None]) -> None:
        """Say what is wrong with loss or gradient norm. Raises LearnerError: it was so too many times in a row."""
        for late, watch in self._watches:
            value = late.fresh()
            fault = "" if value is None else watch.seen(value)
            if not fault:
                continue
            count = max(watch.in_a_row, watch.not_finite)
            if count in (1, IN_A_ROW):
                log.warning("step %d: %s", step, fault)
                warn(f"step {step}: {fault}")
            if watch.is_end:
                raise LearnerError(
                    f"step {step}: {fault}, {count} times in a row. The next start takes the merged "
                    "parameters; if it comes back, lower the learning rate or look at the data"
                )
