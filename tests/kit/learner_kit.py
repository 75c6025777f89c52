"""What tests of `attach` share: a region's folder, and a model that a person can recompute."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diloco_node.learner.attach import Diloco
from diloco_node.learner.checkpoint import ALONE, Checkpoint, newest_first, read_usable
from diloco_node.learner.daemon_session import LearnerSession
from diloco_node.shared_memory import MemoryStore
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon


def region_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A region's folder with its memory store; the environment points to it."""
    monkeypatch.setenv("DILOCO_SOCKET", str(tmp_path / "learner.sock"))
    monkeypatch.setenv("DILOCO_SUPERVISOR", str(tmp_path / "memory.sock"))
    monkeypatch.setenv("DILOCO_STOP_S", "0.1")  # a fake daemon merges nothing by itself: nobody is to wait for it
    with MemoryStore(tmp_path / "memory.sock"):
        yield tmp_path


class Toy:
    """A model whose every step moves every parameter by the same known amount."""

    def __init__(self, seed: int = 0, *, lr: float = 0.25) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, diloco: Diloco, *, tokens: int = 7, loss: float | torch.Tensor | None = None) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        diloco.step(tokens=tokens, loss=loss)

    def steps_until(self, diloco: Diloco, daemon: FakeDaemon, kind: type, count: int) -> None:
        """Train until the daemon has heard `count` messages of a kind."""
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(isinstance(message, kind) for message in list(daemon.said)) < count:
            assert time.monotonic() < deadline_s
            self.step(diloco)
            time.sleep(0.001)

    def flat(self) -> list[float]:
        return [float(x) for p in self.model.parameters() for x in p.detach().reshape(-1)]


def read_newest(folder: Path, manifest_digest: str) -> Checkpoint | None:
    """The newest whole checkpoint of one rank for this model, or None."""
    for name in newest_first(folder):
        if name.place == ALONE and (checkpoint := read_usable(folder / name.text, manifest_digest)) is not None:
            return checkpoint
    return None


def session_of(diloco: Diloco) -> LearnerSession:
    """Return what rank 0 has of its daemon, which users of `attach` don't see."""
    assert diloco._session is not None
    return diloco._session


def vector(diloco: Diloco, fragment: int) -> np.ndarray:
    return session_of(diloco).fragments.vector(fragment).numpy()


class Pretrained(nn.Linear):
    """As a model of Hugging Face is known."""

    def save_pretrained(self) -> dict[str, torch.Tensor]:
        return self.state_dict()
