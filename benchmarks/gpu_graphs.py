"""The checks `graphs`, `compiled` and `capture` of benchmarks/gpu.py: steps that are captured or compiled."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gpu_daemon import ScriptedDaemon, region
from gpu_lines import Line, verdict
from gpu_model import DEVICE, FULL, GPT, HAS_DRIVER, Size
from torch import Tensor

import diloco_node
from diloco_node.wire.learner_link import SnapshotReady

TINY: Final = Size(2, 64, 2, 16, 4, 128, 4, 0, 0, 0, 0)


class Stepper:
    """A small model whose step is eager, captured as a whole, or compiled to graphs."""

    def __init__(self, kind: str, size: Size = TINY) -> None:
        torch.manual_seed(1)
        self.kind = kind
        self.model = GPT(size).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=HAS_DRIVER)
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1)).to(DEVICE)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if kind == "reduce-overhead":
            self.forward = torch.compile(self.model, mode="reduce-overhead")
        self.graph: Any = None
        self.loss: Tensor | None = None

    def eager(self) -> Tensor:
        """Forward, backward, AdamW."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Three steps, on a side stream as torch says where they are to be captured."""
        if self.kind == "reduce-overhead":
            for _ in range(3):
                self.eager()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self) -> None:
        """Record a whole step, which makes none; the next ones are its replays."""
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.model(self.tokens)
            self.loss.backward()
            self.optimizer.step()

    def step(self) -> Tensor:
        """One step of any kind; its loss."""
        if self.graph is None:
            return self.eager().clone()
        self.graph.replay()
        assert self.loss is not None
        return self.loss.detach().clone()


def losses(kind: str, *, has_versions: bool) -> list[float]:
    """The losses of a run, with a version of each fragment in turn between its steps."""
    draw = np.random.default_rng(11)
    stepper = Stepper(kind)
    stepper.warm_up()
    if kind == "graph":
        stepper.capture()
    result: list[Tensor] = []
    with (
        tempfile.TemporaryDirectory(prefix="gpu-") as name,
        region(Path(name)),
        ScriptedDaemon(Path(name), fragments=4) as daemon,
        diloco_node.attach(stepper.model, stepper.optimizer, checkpoint_every_s=0) as diloco,
    ):
        for number in range(20):
            for _ in range(2):
                result.append(stepper.step())
                diloco.step(tokens=8, loss=result[-1])
            index = number % 4
            noise = draw.standard_normal(len(daemon.theta[index])).astype(np.float32) * 0.05
            if has_versions:
                daemon.until_applied(diloco, index, daemon.theta[index] + noise)
    return [float(loss) for loss in result]


def graphs(_: Size) -> Iterator[Line]:
    """A whole step as a graph, with versions between its replays: the losses of an eager run."""
    expected, without = losses("eager", has_versions=True), losses("eager", has_versions=False)
    effect = max(abs(a / b - 1) for a, b in zip(expected, without, strict=True))
    yield compared("graphs", losses("graph", has_versions=True), expected, effect)


def compiled(_: Size) -> Iterator[Line]:
    """The same with `torch.compile(mode="reduce-overhead")`."""
    yield compared("compiled", losses("reduce-overhead", has_versions=True), losses("eager", has_versions=True), 1.0)


def capture(size: Size) -> Iterator[Line]:
    """A graph that is captured while snapshots of all fragments are on their way."""
    stepper = Stepper("graph", replace(size, context=16, batch=4) if size is FULL else TINY)
    stepper.warm_up()
    with (
        tempfile.TemporaryDirectory(prefix="gpu-") as name,
        region(Path(name)),
        ScriptedDaemon(Path(name), fragments=4) as daemon,
        diloco_node.attach(stepper.model, stepper.optimizer, checkpoint_every_s=0) as diloco,
    ):
        for index in range(4):
            daemon.want(index)
        time.sleep(0.1)
        stepper.eager()
        diloco.step(tokens=8)
        stepper.capture()
        encoded = daemon.heard(SnapshotReady)
        result = []
        for _ in range(8):
            result.append(stepper.step())
            diloco.step(tokens=8, loss=result[-1])
        daemon.until_heard(diloco, SnapshotReady, 4)  # two at a time are on their way
        is_right = bool(torch.stack(result).isfinite().all())
    yield Line("capture", verdict(is_right), f"{len(result)} replays; {4 - encoded} of 4 snapshots came after it")


def compared(name: str, result: list[float], expected: list[float], effect: float) -> Line:
    """Whether losses are equal, and would not be without the versions."""
    apart = max(abs(a / b - 1) for a, b in zip(result, expected, strict=True))
    return Line(
        name,
        verdict(apart <= 1e-3 < effect),
        f"20 versions between {len(result)} steps: losses {'equal' if not apart else f'apart by {apart:.1e}'}; "
        f"without versions by {effect:.1e}",
        {"apart": apart, "effect": effect},
    )
