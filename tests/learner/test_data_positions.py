"""Which parts of `stateful` may know where a data loader is, so that its position is not named as lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from tests.kit.loop_kit import Averages, Loop, plain

DATA: Final = torch.utils.data.Subset(torch.utils.data.TensorDataset(torch.arange(40)), range(40))


class KnowingLoader(torch.utils.data.DataLoader[int]):
    """A loader that keeps its position, as torchdata's and this program's do."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is gone on with here."""


def test_a_loader_that_keeps_its_position_is_not_named(folder: Path) -> None:
    loader = KnowingLoader(list(range(40)))
    with Loop(folder, plain(), stateful={"data": loader}) as loop:
        batches = iter(loader)
        for _ in range(4):
            loop.step()
            next(batches)
            assert loop.checkpoint() == []


class Position:
    """A position of the script's own, which it counts itself."""

    def __init__(self, model: Any) -> None:
        self.model, self.batch = model, 0

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batch = state["batch"]


class Updates(Position):
    """A schedule of no class of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.batch = optimizer, 0

    def step(self) -> None:
        """As a schedule has it."""


class Order(Position):
    """A position in an order of the script's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.order = torch.randperm(40)


@pytest.mark.parametrize(
    ("part", "is_known"),
    [
        (lambda loop: Averages(loop.model), False),
        (lambda loop: Updates(loop.optimizer), False),
        (lambda loop: KnowingLoader([3, 4, 5]), False),
        (lambda loop: Position(loop.model), True),
        (lambda loop: Position(nn.Sequential(loop.model, nn.Identity())), True),
        (lambda loop: Order(loop.model), True),
        (lambda _: Position(DATA.dataset), True),
    ],
)
def test_only_what_may_know_where_a_loader_is_has_it_unnamed(
    folder: Path, part: Callable[[Loop], Any], is_known: bool
) -> None:
    loop = Loop(folder, plain(), stateful=(stateful := {}))
    stateful["part"] = part(loop)
    with loop:
        batches = iter(torch.utils.data.DataLoader(DATA))
        for _ in range(4):
            loop.step()
            next(batches)
            warnings = loop.checkpoint()
        assert ["the position of a DataLoader" in warning for warning in warnings] == [True] * (not is_known)
