"""What every arm of benchmarks/peers.py trains: the same parameters, the same paced steps, the same log.

Only torch and the standard library: it runs in the peers' own environments. A step sleeps, which leaves the cores to
the rounds; whatever the loop spends outside of its steps is standstill.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SIDE = 2048
"""Of each square matrix."""

TICK_STEPS = 10
OUTER = {"lr": 0.4, "momentum": 0.8, "nesterov": True}


@dataclass(frozen=True, slots=True)
class Spec:
    """What the driver hands over.

    Attributes:
        addresses: of the regions, in order. port: the first of a hundred free ones, on all of them.
        matrices: of SIDE x SIDE parameters. steps: between two rounds. step_s: how long each sleeps.
        folder: where each rank writes `RANK.jsonl`.
    """

    addresses: tuple[str, ...]
    port: int
    matrices: int
    steps: int
    step_s: float
    folder: str

    @classmethod
    def read(cls, path: str) -> Spec:
        """Read the driver's file."""
        fields = json.loads(Path(path).read_text())
        return cls(**{**fields, "addresses": tuple(fields["addresses"])})


class Training:
    """Model and loop of one region.

    Attributes:
        model: whose parameters `move` changes. count: steps so far. still_s: time outside of them so far.
    """

    def __init__(self, spec: Spec, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.spec, self.rank = spec, rank
        self.model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(spec.matrices)))
        torch.manual_seed(1 + rank)  # equal gradients would have a mean of few values, which zstd makes small
        self._noise = 1e-3 * torch.randn(SIDE, SIDE)
        self.count = 0
        self.still_s = 0.0
        self._log = Path(spec.folder) / f"{rank}.jsonl"
        self._log.write_text("")

    def step(self) -> None:
        """One step: the time of an accelerator, and no work of ours."""
        time.sleep(self.spec.step_s)
        self.count += 1
        if self.count % TICK_STEPS == 0:
            self.log("tick")

    def move(self) -> None:
        """Change the parameters, as the steps between two rounds would."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(self._noise)

    def stand(self, call: Callable[[], Any]) -> Any:
        """Call what holds the loop up; what it returns."""
        started_s = time.perf_counter()
        try:
            return call()
        finally:
            self.still_s += time.perf_counter() - started_s

    def rounds(self, merge: Callable[[], bool]) -> None:
        """Until ended from outside: steps, then `merge`, which waits for the others and says whether it worked."""
        number = 0
        while True:
            for _ in range(self.spec.steps):
                self.step()
            self.move()
            self.log("begin", number=number)
            if self.stand(merge):
                self.log("round", number=number)
                number += 1
            else:
                self.log("refused", number=number)

    def log(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        record = {"kind": kind, "at": time.monotonic(), "steps": self.count, "still": self.still_s, **fields}
        with self._log.open("a") as log:
            log.write(json.dumps(record) + "\n")


class Outer:
    """DiLoCo's outer step on all parameters in one vector, for arms that only average."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._base = parameters_to_vector(model.parameters()).detach().clone().requires_grad_()
        self._optimizer = torch.optim.SGD([self._base], **OUTER)

    def delta(self) -> torch.Tensor:
        """What this region changed since the last step, shape (n,), float32: the outer gradient."""
        return self._base.detach() - parameters_to_vector(self._model.parameters()).detach()

    def step(self, mean: torch.Tensor) -> None:
        """Go by the mean of all regions, and load the result into the model."""
        self._base.grad = mean
        self._optimizer.step()
        vector_to_parameters(self._base.detach().clone(), self._model.parameters())


def main(arm: Callable[[Training], None]) -> None:
    """Command line of an arm: the specification's file, and this region's number."""
    arm(Training(Spec.read(sys.argv[1]), int(sys.argv[2])))
    os._exit(0)  # a peer's threads need not end by themselves
