"""A loop under a daemon that writes checkpoints when asked to, and a small model for it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import diloco_node
from tests.kit.fake_daemon import FakeDaemon


class Loop(logging.Handler):
    """A loop under a daemon that writes checkpoints when asked to."""

    def __init__(self, folder: Path, model: nn.Module, **options: Any) -> None:
        super().__init__(logging.WARNING)
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self.daemon = FakeDaemon(folder)
        self._warnings: list[str] = []
        self._options = options

    def __enter__(self) -> Loop:
        self.daemon.__enter__()
        self._log = logging.getLogger("diloco_node.learner")
        self._log.addHandler(self)
        self.diloco = diloco_node.attach(self.model, self.optimizer, **self._options)
        return self

    def __exit__(self, *_: object) -> None:
        self.diloco.close()
        self._log.removeHandler(self)
        self.daemon.__exit__()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 6)).backward()
        self.optimizer.step()
        self.diloco.step(tokens=4)

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append(record.getMessage())

    def checkpoint(self) -> list[str]:
        """Write one; return all that the learner has warned of."""
        on_device = next(self.model.parameters()).is_cuda
        for _ in range(3 if on_device else 1):  # each second look compares, and its numbers come with the next one
            self.diloco.checkpoint()
            if on_device:
                torch.cuda.synchronize()
        return list(self._warnings)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 2), Mean())


class Mean(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.square().mean()


class Averages:
    """As torch_ema has them."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [parameter.detach().clone() for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, kept in zip(self.shadow, state["shadow"], strict=True):
            value.copy_(kept)
