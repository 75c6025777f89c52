"""AdamW of the built-in trainer."""

from __future__ import annotations

import functools
import inspect
from typing import Final

import torch
from torch import nn

BETAS: Final = (0.9, 0.99)
"""A learner sees a small batch, so its squared gradients are noisy and want to be averaged for longer than the usual
0.95 does (docs/notebook/results-quality.md)."""

WEIGHT_DECAY: Final = 0.1


def build_adamw(model: nn.Module, *, lr: float) -> torch.optim.Optimizer:
    """Build AdamW over all trainable parameters, with weight decay on matrices only."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() > 1]
    vectors = [parameter for parameter in trainable if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return _eager_adamw()([group for group in groups if group["params"]], lr=lr, betas=BETAS, fused=True)


@functools.cache
def _eager_adamw() -> type[torch.optim.AdamW]:
    """Torch's AdamW without its hooks for torch.compile, which import torch._dynamo: a second of processor time at each
    start of a region."""
    kind = torch.optim.AdamW
    methods = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in methods}
    return type(kind.__name__, (kind,), {**plain, "step": torch.no_grad()(inspect.unwrap(kind.step))})
