"""The outer step, written down as a reference: SGD with Nesterov momentum on float32 vectors.

`codec/kernels.py` has the fast one; both do the same operations in the same order, each rounded to float32, so their
results have equal bits. Tests and benchmarks compare against this one.
"""

from __future__ import annotations

import numpy as np

from diloco_node.core.types import RunSettings
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


def outer_rates(settings: RunSettings, *, is_last: bool) -> tuple[float, float]:
    """Outer learning rate and momentum of a round: the run's, but 1 and 0 in the last round of a fragment.

    There the model ends at the plain mean of its learners. Stretched directions and momentum pay for themselves in the
    rounds that follow; in a last one they are only noise: the final held-out loss was 0.3 to 0.6 % higher with them,
    and higher than the learners' own. The momentum stays as it is, for a run that is extended.
    """
    return (1.0, 0.0) if is_last else (settings.outer_lr, settings.outer_momentum)
