"""`attach(..., step="auto")`: the optimizer's own steps are the step boundaries, by its post-step hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diloco_node.errors import LearnerError
from diloco_node.learner.forward_watch import ForwardWatch
from diloco_node.learner.layouts.capture import check_not_capturing
from diloco_node.learner.several_optimizers import SeveralOptimizers, inner_of


class AutoStep:
    """Step boundaries at the optimizer's own steps. Steps that a gradient scaler skips are none.

    optimizer: the one below wrappers. is_stepping: it has just made a step, and that is being told.

    Raises LearnerError: there is no optimizer, or there are several.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            raise LearnerError('attach(step="auto") counts the steps of an optimizer: give it one')
        if isinstance(optimizer, SeveralOptimizers):
            raise LearnerError(
                'attach(step="auto") counts the steps of one optimizer: with several, call step() yourself'
            )
        self.is_stepping = False
        # Accelerate's wrapper is an Optimizer by class only: it has no hooks.
        (self.optimizer,) = inner_of(optimizer)
        self._watch = ForwardWatch(model)
        self._handle: RemovableHandle | None = None
        self._tell: Callable[[int, Tensor | None], None] | None = None

    def begin(self, tell: Callable[[int, Tensor | None], None], refuse: Callable[[LearnerError], None]) -> None:
        """Call `tell` after each step, with its tokens and the model's loss; `refuse` if a step can't be told."""
        self._watch.take()
        self._tell, self._refuse = tell, refuse
        # A compiled step would have the hook in its graph, and the whole of a boundary. An optimizer has loaded dynamo.
        stepped = torch.compiler.disable(self._stepped)  # type: ignore[no-untyped-call]
        self._handle = self.optimizer.register_step_post_hook(stepped)

    def _stepped(self, *_: Any) -> None:
        assert self._tell is not None
        check_not_capturing('attach(step="auto") would miss its replays. Leave it out, and call step() after each')
        tokens, loss = self._watch.take()
        # A gradient scaler calls fused optimizers even if it found infinities, and leaves it to them to do nothing.
        # Looking waits for the device, as the scaler itself does with an optimizer that is not fused.
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        if not tokens and all(group.get("lr") == 0 for group in self.optimizer.param_groups):
            return  # get_optimizer_state_dict() of torch.distributed.checkpoint makes the states by such a step
        if not tokens:
            error = LearnerError(
                "the optimizer made a step, but the model that was attached was not called in training mode: call "
                "model.train(), attach the module that the loop calls, or call step() yourself"
            )
            self._refuse(error)
            raise error
        self.is_stepping = True
        try:
            self._tell(tokens, loss)
        finally:
            self.is_stepping = False

    def close(self) -> None:
        """Take the hooks away."""
        self._watch.close()
        if self._handle is not None:
            self._handle.remove()
