"""The outer step and carry-over on whole vectors: what simulated regions do, and a reference for the real ones.

`codec/kernels.py` and `learner/layouts/tensors.py` have the fast ones; they do the same operations in the same order,
each rounded to float32, so their results have equal bits.
"""

from __future__ import annotations

import numpy as np

from diloco_node.core.merge.carry import Anchor, CarryPlan
from diloco_node.numeric import F32


def outer_step(theta: F32, momentum: F32, delta: F32, *, lr: float, mu: float) -> tuple[F32, F32]:
    """Make an outer step: `m <- mu * m + d; theta <- theta - lr * (d + mu * m)`.

    theta, momentum, delta: shape (n,), float32; not changed. The momentum is zero before the first step; delta is the
    merged outer gradient, factors applied. lr, mu: rounded to float32; mu = 0 is plain SGD.

    Returns: new theta and momentum, shape (n,), float32.

    Source: Nesterov momentum as in torch.optim.SGD(nesterov=True); the first step moves (1 + mu) * lr * delta.
    """
    for name, values in (("theta", theta), ("momentum", momentum), ("delta", delta)):
        if values.dtype != np.float32 or values.shape != theta.shape:
            raise ValueError(f"{name} must be float32 of shape {theta.shape}, got {values.dtype} {values.shape}")
    mu32, lr32 = np.float32(mu), np.float32(lr)
    # One rounding per line: a fused multiply-add would give other bits.
    decay = mu32 * momentum
    momentum_new = decay + delta
    lookahead = mu32 * momentum_new
    direction = delta + lookahead
    move = lr32 * direction
    return theta - move, momentum_new


def carry_over(plan: CarryPlan, *, new: F32, theta: F32, anchor: F32 | None) -> F32:
    """The learner's parameters after the apply, by a plan of `core.merge.carry`.

    new: the new version. theta: its parameters now. anchor: the snapshot or base that the plan names, None for
    `Anchor.NONE`. All have shape (n,), float32, and are not changed.

    Returns: shape (n,), float32. Exactly `new` for a learner that did not move since its anchor. Each operation is
    rounded to float32 by itself; with `carry_factor` 1 there is no multiplication.
    """
    if (anchor is None) != (plan.anchor is Anchor.NONE):
        raise ValueError(f"the plan's anchor is {plan.anchor}, but {'no' if anchor is None else 'an'} array was given")
    if anchor is None:
        return new.copy()
    gap = theta - anchor
    return new + (gap if plan.carry_factor == 1.0 else np.float32(plan.carry_factor) * gap)
