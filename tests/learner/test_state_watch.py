"""Moments and schedules that a loop loads or empties after `attach`: told once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import diloco_node
from diloco_node.wire.learner_link import Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import make, net, train


def _clear(optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
    optimizer.state.clear()


def _forget_one(optimizer: torch.optim.Optimizer, model: Any) -> None:
    del optimizer.state[model[1].weight]


def _clear_inside(optimizer: torch.optim.Optimizer, _: nn.Module) -> None:
    for values in optimizer.state.values():
        values.clear()


@pytest.mark.parametrize("change", [_clear, _forget_one, _clear_inside])
def test_moments_that_are_emptied_after_attach_are_told_once(
    folder: Path, change: Callable[[torch.optim.Optimizer, nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        change(optimizer, model) if change is _clear else None  # none is there yet
        train(model, optimizer, diloco, 3)
        for _ in range(2):
            change(optimizer, model)
            train(model, optimizer, diloco, 2)
        daemon.wait_for(Warned)
        (text,) = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert text.startswith("AdamW has fewer moments than after its last step, or attach(), as state.clear() leaves")


class Rateless(torch.optim.SGD):
    """Finds its rate by itself, as Adafactor does: the group has None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.01
        super().step()
        self.param_groups[0]["lr"] = None


def test_an_optimizer_without_a_rate_that_is_loaded_after_attach_is_told(folder: Path) -> None:
    model = net()
    optimizer = Rateless(model.parameters())
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, diloco)
        assert "settings such as lr (now None), are those that were loaded" in daemon.wait_for(Warned).text


SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 5),
    lr_scheduler.ReduceLROnPlateau,
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.StepLR(optimizer, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
]


@pytest.mark.parametrize("build", SCHEDULES)
def test_a_schedule_that_is_loaded_after_attach_is_told_once_and_one_that_steps_is_not(
    folder: Path, build: Callable[[torch.optim.Optimizer], Any]
) -> None:
    model = net()
    optimizer = make(model)
    schedule = build(optimizer)
    old = copy.deepcopy(schedule.state_dict())
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer, stateful={"rate": schedule}) as diloco:
        for _ in range(4):
            train(model, optimizer, diloco)
            schedule.step(*[1.0] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        for _ in range(2):
            schedule.load_state_dict(copy.deepcopy(old))
            train(model, optimizer, diloco)
        daemon.wait_for(Warned)
        (text,) = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert "LR has another state than after attach()" in text or "ReduceLROnPlateau has another" in text
        assert "its position is that which was loaded" in text
