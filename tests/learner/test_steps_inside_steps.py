"""Optimizers that step another one, and steps that raise: each counts as often as it trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.step_counts import STILL_STEPS
from diloco_node.wire.learner_link import Done, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import arrive, load, net, train


class Around(torch.optim.Optimizer):
    """One of a script's own: its decay, and a step of another optimizer, under whatever name it holds that."""

    def __init__(self, inner: torch.optim.Optimizer, name: str) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups
        setattr(self, name, inner)
        self._name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.999)
        return getattr(self, self._name).step(closure)


class Derived(Around):
    """And one derived from that."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.001)


MAKERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda model: Around(adamw(model), "optimizer"),
    lambda model: Around(adamw(model), "base_optimizer"),
    lambda model: Derived(Around(adamw(model), "inner"), "optimizer"),
]


def told(folder: Path, optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]], per_update: int) -> list[str]:
    """What a loop hears that tells a step for each of `per_update` micro-batches."""
    model = net()
    members = optimizers(model)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, members, checkpoint_every_s=0) as diloco:
            for number in range(3 * STILL_STEPS):
                model(torch.randn(4, 6)).square().mean().backward()
                if number % per_update == per_update - 1:
                    for member in members:
                        member.step()
                        member.zero_grad()
                diloco.step(tokens=4)
        daemon.wait_for(Done)
        return [message.text for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize("make", MAKERS)
def test_a_step_that_makes_anothers_is_one_and_what_both_write_is_a_step(
    folder: Path, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    assert told(folder, lambda model: [make(model)], 1) == []


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("per_update", [2, 3])
def test_micro_batches_that_are_told_are_named_whatever_wraps_the_optimizer(
    folder: Path, make: Callable[[nn.Module], torch.optim.Optimizer], per_update: int
) -> None:
    (text,) = told(folder, lambda model: [make(model)], per_update)
    assert re.match(rf"{STILL_STEPS} steps were told in which the optimizer made (32|22|21): .* too many", text)


def test_micro_batches_of_two_optimizers_that_step_together_are_named(folder: Path) -> None:
    (text,) = told(folder, lambda model: [adamw(model[0]), adamw(model[1:])], 2)  # type: ignore[index]
    assert re.match(rf"{STILL_STEPS} steps were told in which the optimizer made 32: .* too many", text)


def test_networks_that_train_in_turns_are_no_news(folder: Path) -> None:
    model = net()
    members = adamw(model[0]), adamw(model[1:])
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, members, checkpoint_every_s=0) as diloco:
            for number in range(3 * STILL_STEPS):
                train(model, members[number % 2], diloco)
        daemon.wait_for(Done)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


class Failing(torch.optim.AdamW):
    """Which has no memory for some of its steps, before or after it has written."""

    fails_before = fails_after = False

    def step(self, closure: Any = None) -> Any:
        if self.fails_before:
            raise MemoryError("for the moments")
        loss = super().step(closure)
        if self.fails_after:
            raise torch.OutOfMemoryError("for the rest")
        return loss


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_step_that_raises_is_made_again_and_a_load_after_it_is_refused(folder: Path, kind: str, steps: int) -> None:
    model = net()
    optimizer = Failing(model.parameters(), lr=0.001)

    def fail() -> None:
        setattr(optimizer, f"fails_{kind}", True)
        with pytest.raises((MemoryError, torch.OutOfMemoryError)):
            train(model, optimizer, diloco)
        setattr(optimizer, f"fails_{kind}", False)

    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, steps)
        fail()
        train(model, optimizer, diloco, 3)
        arrive(model)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        assert diloco.steps == steps + 3
        fail()
        load(model)
        with pytest.raises(LearnerError, match="were changed between two steps"):
            train(model, optimizer, diloco, 2)


class Tearing(torch.optim.Optimizer):
    """Goes down by the sign of the gradient, and may have no memory for the last layer."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if self.fails and number == 4:
                    raise torch.OutOfMemoryError("for the rest")
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("lr", [0.1, 1.0])
def test_a_step_that_raises_at_a_high_rate_is_made_again(folder: Path, lr: float, steps: int) -> None:
    """It has moved the weights as far as a load does, but no further than other steps."""
    model = net()
    optimizer = Tearing(model.parameters(), {"lr": lr})
    weight = model.get_parameter("1.weight")

    def fail() -> None:
        before = weight.detach().clone()
        optimizer.fails = True
        with pytest.raises(torch.OutOfMemoryError):
            train(model, optimizer, diloco)
        optimizer.fails = False
        assert torch.dist(before, weight) > 0.1 * before.norm()

    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, steps)
        for count in (1, 3):
            for _ in range(count):
                fail()
            train(model, optimizer, diloco)
        arrive(model)
        assert diloco.steps == steps + 2
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        fail()
        with torch.no_grad():
            weight.add_(20 * lr * torch.randn(8, 8).sign() + weight.norm())
        with pytest.raises(LearnerError, match="were changed between two steps"):
            train(model, optimizer, diloco)
