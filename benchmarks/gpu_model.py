"""What the checks of benchmarks/gpu.py train: GPT-2 in plain torch, and how its steps are timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

DEVICE: Final = torch.device("cuda", 0)
HAS_DRIVER: Final = bool(torch.version.cuda or torch.version.hip)
"""False on a device in software: it has no clock, no profiler and no autocast."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the checks are.

    Attributes:
        layers, dim, heads, context, batch, vocabulary: of the model and its batches.
        fragments: P, and H: each step has an order.
        steps: that are measured, or counted. turns: alone and attached.
        tensors: of the model whose bits are compared. rounds: of each fragment there.
    """

    layers: int
    dim: int
    heads: int
    context: int
    batch: int
    vocabulary: int
    fragments: int
    steps: int
    turns: int
    tensors: int
    rounds: int


FULL: Final = Size(12, 768, 12, 512, 8, 50257, 24, 200, 6, 300, 3)
SMALL: Final = Size(2, 32, 2, 8, 2, 64, 4, 20, 1, 24, 1)
LARGE: Final = Size(16, 2048, 32, 512, 8, 50257, 24, 100, 3, 300, 3)
SIZES: Final = {"gpt2": FULL, "small": SMALL, "1b": LARGE}
"""0.9 billion parameters are `1b`: its `loop` takes 25 GB of the device, and 40 GB of the host."""


class Block(nn.Module):
    """Attention and feed-forward, pre-norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.attention, self.projection = nn.Linear(size.dim, 3 * size.dim), nn.Linear(size.dim, size.dim)
        self.up, self.down = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, context, dim)."""
        batch, context, dim = x.shape
        heads = self.attention(self.ln_1(x)).view(batch, context, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        if HAS_DRIVER:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = ((query @ key.transpose(-1, -2)) * (dim // self.heads) ** -0.5).softmax(-1) @ value
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, context, dim))
        return x + self.down(functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with a tied head: 148 tensors and 124 M parameters at `FULL`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(size.vocabulary, size.dim), nn.Embedding(size.context, size.dim)
        self.h = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.dim)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next token; shape of `tokens`: (batch, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.t()
        return functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


class Trainer:
    """GPT-2 on the device with fused AdamW, and a step as people write it: autocast, clipping, no waits."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        self.size = size
        self.model = GPT(size).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True, capturable=HAS_DRIVER)
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1)).to(DEVICE)
        self.tokens_a_step = size.batch * size.context
        self._graph: Any = None
        self._results: tuple[Tensor, Tensor] | None = None

    @property
    def parameters(self) -> int:
        """How many values train."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> tuple[Tensor, Tensor]:
        """Return loss and gradient norm, on the device."""
        with torch.autocast("cuda", torch.bfloat16, enabled=HAS_DRIVER, cache_enabled=False):
            loss = self.model(self.tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    def capture(self) -> None:
        """Record a step as a graph: `replay` is as fast as the device, whatever its host is like."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = self.step()

    def replay(self) -> tuple[Tensor, Tensor]:
        """Make a captured step; its results are overwritten by the next one."""
        assert self._results is not None
        self._graph.replay()
        return self._results


class Moment:
    """A point in the device's main stream; on a device without a clock one in the host's time."""

    def __init__(self) -> None:
        self._host_s = time.perf_counter()
        self._event: Any = None
        if HAS_DRIVER:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def until(self, later: Moment) -> float:
        """Milliseconds from this one to a later one; both have passed."""
        if self._event is None:
            return (later._host_s - self._host_s) * 1e3
        return float(self._event.elapsed_time(later._event))


def max_device_bytes() -> int:
    """Most bytes in tensors on the device since `reset_device_bytes`."""
    return int(torch.cuda.max_memory_allocated())
