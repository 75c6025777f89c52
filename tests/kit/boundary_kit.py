"""One learner process after another in one region, each of which goes on where the one before was killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import diloco_node
from diloco_node.learner import last_boundary
from diloco_node.learner.checkpoint import Stateful
from diloco_node.shared_memory import boundary_file
from tests.kit.learner_kit import Toy, region_folder, vector

TOKENS = 7
ALWAYS = 1e9


def saving_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A region's folder. Boundaries are saved from the second step on, whatever they take."""
    monkeypatch.setenv("DILOCO_STATE", str(tmp_path))
    monkeypatch.setattr(last_boundary, "COST_PART", ALWAYS)
    yield from region_folder(tmp_path, monkeypatch)
    boundary_file(tmp_path).unlink(missing_ok=True)


class Life:
    """One learner process of the region, in this one. `killed` puts back what lay in memory at some moment of it."""

    def __init__(self, folder: Path, stateful: dict[str, Stateful] | None = None, *, keeps_model: bool = False) -> None:
        self.path = boundary_file(folder)
        self.toy = Toy(seed=random.Random(5).getrandbits(20))
        self.left = b""
        parts = (stateful or {}) | ({"model": self.toy.model} if keeps_model else {})
        self.diloco = diloco_node.attach(self.toy.model, self.toy.optimizer, stateful=parts)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.toy.step(self.diloco, tokens=TOKENS)

    def vectors(self) -> list[list[float]]:
        return [vector(self.diloco, index).tolist() for index in range(2)]

    def look(self) -> None:
        """What lies in memory now is what a SIGKILL leaves."""
        self.left = self.path.read_bytes()

    def killed(self) -> None:
        """The end. It says nothing to its daemon."""
        if not self.left:
            self.look()
        self.diloco._close(None)
        self.path.write_bytes(self.left)
        self.path.chmod(0o600)
