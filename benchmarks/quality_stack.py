"""Many learners of the built-in model in one process: one inner step of all of them is one set of batched products.

All parameters of all replicas lie in one float32 array of shape (R, N); gradients and Adam's moments likewise. The
tensors that the model sees are views of it, so that a merge reads and writes plain slices, and the optimizer is one
pass over memory. `AdamW` here is torch's, written out (a test compares the two).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from region_sampler import RegionSampler
from torch.nn import functional

from diloco_node.learner.builtin.data import Corpus
from diloco_node.learner.builtin.model import initial_parameters, rotary_tables, token_logits
from diloco_node.learner.builtin.shape import VOCABULARY, ModelSettings, parameter_shapes
from diloco_node.numeric import F32


@dataclass(frozen=True, slots=True)
class Inner:
    """The inner optimizer, the same in every arm: AdamW, linear warm-up, cosine down to `floor` of the peak.

    The floor is 0, as the built-in trainer has it in a run whose end is known; beta2 is the built-in trainer's.
    """

    lr: float
    steps: int
    warmup: int = 100
    floor: float = 0.0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0

    def lr_at(self, step: float) -> float:
        """Learning rate of inner step `step`, counted from 1."""
        warm = min(1.0, step / self.warmup)
        done = min(1.0, step / self.steps)
        return self.lr * warm * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


@njit(nogil=True, cache=True, fastmath=True)
def _adamw(theta, grad, m, v, decay, lr, beta1, beta2, step, clip):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """One AdamW step per replica (row) with its gradient clipped to norm `clip`."""
    correct1 = 1.0 - beta1**step
    correct2 = 1.0 - beta2**step
    for r in range(theta.shape[0]):
        total = 0.0
        for i in range(theta.shape[1]):
            total += grad[r, i] * grad[r, i]
        scale = np.float32(min(1.0, clip / (math.sqrt(total) + 1e-6)))
        b1, b2 = np.float32(beta1), np.float32(beta2)
        size, root = np.float32(lr / correct1), np.float32(1.0 / math.sqrt(correct2))
        rate, one, eps = np.float32(lr), np.float32(1.0), np.float32(1e-8)
        for i in range(theta.shape[1]):
            g = grad[r, i] * scale
            m[r, i] = b1 * m[r, i] + (one - b1) * g
            v[r, i] = b2 * v[r, i] + (one - b2) * g * g
            kept = theta[r, i] * (one - rate * decay[i])
            theta[r, i] = kept - size * m[r, i] / (np.sqrt(v[r, i]) * root + eps)


@cache
def _compiled_logits() -> Callable[..., torch.Tensor]:
    """`token_logits`, compiled once per shape and process."""
    return torch.compile(token_logits, dynamic=False, fullgraph=True)


class Stack:
    """R replicas of the model with their optimizers.

    After `step`, `theta` (shape (R, N), float32, writable) holds the new parameters; whoever merges may write into it.

    Args:
        settings: the model's shape.
        inner: the inner optimizer.
        replicas: R.
        seed: of the parameters that all replicas start with.
        compiled: `step` goes through torch.compile, which takes some 20 s once and a C++ compiler, and saves a fifth
            of the time. The same arithmetic with other roundings.
        rows: shape (R, N), float32: where `theta` is to lie; None: in memory of its own.
    """

    def __init__(
        self,
        settings: ModelSettings,
        inner: Inner,
        *,
        replicas: int,
        seed: int,
        compiled: bool = False,
        rows: F32 | None = None,
    ) -> None:
        self.settings, self.inner = settings, inner
        self._logits = _compiled_logits() if compiled else token_logits
        self.shapes = parameter_shapes(settings)
        first = np.concatenate([t.numpy().ravel() for t in initial_parameters(settings, seed=seed).values()])
        self.theta: F32 = np.empty((replicas, len(first)), np.float32) if rows is None else rows
        self.theta[:] = first
        self.gradient: F32 = np.zeros_like(self.theta)
        self._m, self._v = np.zeros_like(self.theta), np.zeros_like(self.theta)
        parts = [np.full(math.prod(s), inner.weight_decay * (len(s) > 1)) for s in self.shapes.values()]
        self._decay = np.concatenate(parts).astype(np.float32)
        self._rotary = rotary_tables(settings)
        self._leaves = self._views(self.theta)
        self._gradients = list(self._views(self.gradient).values())
        for leaf in self._leaves.values():
            leaf.requires_grad_(True)
        self.steps_done = 0

    def _views(self, flat: F32) -> dict[str, torch.Tensor]:
        """Name -> tensor of shape (R, *shape) that shares the memory of the (R, N) array."""
        views, at, rows = {}, 0, torch.from_numpy(flat)
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            views[name] = rows[:, at : at + size].view(len(rows), *shape)
            at += size
        return views

    def step(
        self, windows: NDArray[np.uint8], *, at: float | None = None, resting: NDArray[np.bool_] | None = None
    ) -> None:
        """One inner step of every replica on windows of shape (R, B, T + 1).

        Args:
            at: where the learning-rate schedule stands, in steps from 1; None: at the steps of this stack.
            resting: shape (R,): replicas that make none: their parameters and moments stay; None: all make it.
        """
        arrays = (self.theta, self._m, self._v)
        kept = [array[resting].copy() for array in arrays] if resting is not None and resting.any() else []
        tokens = torch.from_numpy(windows.astype(np.int64))
        logits = self._logits(self.settings, self._leaves, tokens[:, :, :-1], self._rotary)
        # The gradient of each replica's mean cross-entropy, written out: torch's own takes four times as long here.
        gradient = torch.softmax(logits.detach(), dim=-1).view(-1, VOCABULARY)
        gradient[torch.arange(len(gradient)), tokens[:, :, 1:].reshape(-1)] -= 1.0
        gradient /= tokens[0, :, 1:].numel()
        found = torch.autograd.grad(logits, list(self._leaves.values()), gradient.view_as(logits))
        for place, one in zip(self._gradients, found, strict=True):
            place.copy_(one)
        self.steps_done += 1
        i = self.inner
        rate = i.lr_at(self.steps_done if at is None else at)
        _adamw(
            self.theta, self.gradient, self._m, self._v, self._decay, rate, i.beta1, i.beta2, self.steps_done, i.clip
        )
        for array, old in zip(arrays, kept, strict=False):
            array[resting] = old

    def loss(self, flat: F32, windows: NDArray[np.uint8]) -> float:
        """Mean loss in nats per byte of one set of parameters, shape (N,), over windows of shape (n, T + 1)."""
        parameters = {name: view[0] for name, view in self._views(flat[None]).items()}
        tokens = torch.from_numpy(windows.astype(np.int64))
        total = 0.0
        with torch.no_grad():
            for part in tokens.split(256):
                logits = token_logits(self.settings, parameters, part[:, :-1], self._rotary)
                total += float(
                    functional.cross_entropy(logits.reshape(-1, VOCABULARY), part[:, 1:].reshape(-1), reduction="sum")
                )
        return total / tokens[:, 1:].numel()


class Batches:
    """The data of one run: learner m draws from its own shards; data-parallel sees the very same batches together."""

    def __init__(self, corpus: Corpus, *, learners: int, batch: int, context: int, seed: int) -> None:
        self._samplers = [
            RegionSampler(corpus, region=m, regions=learners, batch=batch, context=context, seed=seed)
            for m in range(learners)
        ]

    def separate(self, position: int) -> NDArray[np.uint8]:
        """Shape (M, B, T + 1): each learner its own batch."""
        return np.stack([sampler.batch_at(position) for sampler in self._samplers])

    def together(self, position: int) -> NDArray[np.uint8]:
        """Shape (1, M * B, T + 1): one batch of everybody's."""
        return np.concatenate([sampler.batch_at(position) for sampler in self._samplers])[None]
