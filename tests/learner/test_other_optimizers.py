"""Optimizers that attach was not given, or that keep a second copy of the weights."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.model_watch import COPY_LOOKS
from diloco_node.wire.learner_link import Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import load, make, net, train


def _load_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _load_older(optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.AdamW(net(7)[:2].parameters(), lr=0.5)
    optimizer.load_state_dict(other.state_dict())


def _begin_anew(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = collections.defaultdict(dict)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", [_load_state, _load_older, _begin_anew])
def test_moments_that_are_loaded_after_attach_are_told_once(
    folder: Path, change: Callable[[torch.optim.Optimizer], None], steps: int
) -> None:
    model = net()
    optimizer, other = torch.optim.AdamW(model[:2].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.01)
    change(optimizer)  # before attach() it is the script's
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, [other, optimizer]) as diloco:
        train(model, optimizer, diloco, steps)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        change(optimizer)
        train(model, optimizer, diloco)
        change(optimizer)
        train(model, optimizer, diloco)
        daemon.wait_for(Warned)
        told = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert len(told) == 1
        assert "AdamW has another state than after attach(), as load_state_dict() gives it" in told[0]
        assert f"lr (now {optimizer.param_groups[0]['lr']:g})" in told[0]


class NewLBFGS(torch.optim.LBFGS):
    """One of somebody else's."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NewLBFGS])
def test_an_optimizer_that_searches_between_its_own_steps_is_refused_by_its_true_cause(
    folder: Path, kind: type[torch.optim.LBFGS]
) -> None:
    model = net()
    with pytest.raises(LearnerError, match=r"LBFGS can't train in a run.*curvature.*AdamW"):
        diloco_node.attach(model, [kind(model.parameters())])
    optimizer = kind(model.parameters(), max_iter=4)
    with FakeDaemon(folder), diloco_node.attach(model) as diloco:
        with pytest.raises(LearnerError, match=r"LBFGS can't train in a run.*curvature"):
            optimizer.step(lambda: model(torch.randn(4, 6)).square().mean())
        assert not diloco.steps


def test_parameters_of_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8))
    model[1].weight.data = model[0].weight.data  # type: ignore[union-attr]
    with pytest.raises(LearnerError, match=r"'1\.weight' and '0\.weight' are two parameters with the same memory"):
        diloco_node.attach(model, make(model))
    model[1].weight = model[0].weight  # type: ignore[union-attr]
    assert len(ModelTensors(model).specs) == 2


def test_parameters_that_share_some_rows_are_refused_and_columns_of_one_matrix_are_not(folder: Path) -> None:
    model = net()
    whole = torch.randn(9, 8)
    model[1].weight = nn.Parameter(whole[1:])
    model[2].weight = nn.Parameter(whole[:2])
    with pytest.raises(LearnerError, match=r"'1\.weight' and '2\.weight' are two parameters with the same memory"):
        diloco_node.attach(model, make(model))
    columns = torch.randn(8, 14)
    model[0].weight = nn.Parameter(columns[:, :6])
    model[1].weight = nn.Parameter(columns[:, 6:])
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        assert diloco.steps == 2


def test_a_second_optimizer_that_attach_was_not_given_is_named(folder: Path) -> None:
    model = net()
    first, second = torch.optim.AdamW(model[:2].parameters()), torch.optim.AdamW(model[2].parameters())
    with FakeDaemon(folder), diloco_node.attach(model, first) as diloco:
        train(model, first, diloco)
        with pytest.raises(LearnerError, match=r"trains 2 parameters.*such as '2\.weight'"):
            second.step()
    model = net()
    both = torch.optim.AdamW(model[:2].parameters()), torch.optim.AdamW(model[2].parameters())
    with FakeDaemon(folder), diloco_node.attach(model, both) as diloco:
        for optimizer in both * 3:
            train(model, optimizer, diloco)
        assert diloco.steps == 6


def test_what_no_optimizer_holds_is_told_and_not_merged(folder: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model[2].parameters())
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        text = daemon.wait_for(Warned).text
        assert "4 parameters (512 bytes) of the model, such as '0.weight', are in no optimizer" in text
        assert sum(vector.size for vector in daemon.theta) == 18
        train(model, optimizer, diloco, 2)


def test_weights_outside_of_the_model_are_told_and_merged_when_their_module_is_given(folder: Path) -> None:
    model, criterion = net(), nn.Bilinear(2, 2, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()])
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        text = daemon.wait_for(Warned).text
        assert "2 parameters (20 bytes) that the optimizer holds are not in the model" in text
        assert "each start begins them anew" in text
        train(model, optimizer, diloco)
    with FakeDaemon(folder) as daemon, diloco_node.attach([model, criterion], optimizer) as diloco:
        assert sum(vector.size for vector in daemon.theta) == 146 + 5
        assert set(diloco.global_state_dict()) == {*model.state_dict(), *criterion.state_dict()}
        train(model, optimizer, diloco)
    with pytest.raises(LearnerError, match=r"2 names stand in more than one, such as '0\.bias'"):
        diloco_node.attach([model, nn.Sequential(nn.Linear(2, 1))], optimizer)


def test_a_parameter_without_values_is_no_stranger(folder: Path) -> None:
    model = net()
    model.empty = nn.Parameter(torch.zeros(0, 4))
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        model.load_state_dict(net(7).state_dict(), strict=False)
        with pytest.raises(LearnerError, match="weights were loaded"):
            train(model, optimizer, diloco, 1)


@pytest.mark.no_device("that one in software has no sparse tensors")
def test_sparse_gradients_are_looked_at_after_a_version(folder: Path) -> None:
    model = nn.Embedding(16, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for step in range(6):
            if step == 3:
                for fragment, theta in enumerate(daemon.theta):
                    daemon.commit(fragment, theta + 1, -1)
                diloco.settle(0.2)
            optimizer.zero_grad()
            model(torch.arange(4)).square().mean().backward()
            optimizer.step()
            diloco.step(tokens=4)
        assert diloco.versions == (1, 1)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_another_optimizer_of_the_same_tensors_is_no_stranger_to_them(folder: Path) -> None:
    model = net()
    first, second = make(model, lr=0.1), make(model, lr=0.1)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, first) as diloco:
        for optimizer in (first, second, first, second):
            train(model, optimizer, diloco, 2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_an_optimizer_of_something_else_is_no_concern(folder: Path) -> None:
    model, other = net(), net(1)
    optimizer, outside = make(model), make(other)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(3):
            other(torch.randn(4, 6)).sum().backward()
            outside.step()
            load(other)
            train(model, optimizer, diloco)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_old_weights_that_are_loaded_in_mid_run_are_refused_and_small_writes_are_told_once(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        load(model)
        with pytest.raises(LearnerError, match=r"weights were loaded"):
            train(model, optimizer, diloco)
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(4):
            train(model, optimizer, diloco)
            with torch.no_grad():
                model[1].weight.clamp_(-0.3, 0.3)
        daemon.wait_for(Warned)
        told = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert len(told) == 1
        assert told[0].startswith("'1.weight' was written to by something else than its optimizer")


def schedule_free(parameters: Any) -> torch.optim.Optimizer:
    optimizer: Any = pytest.importorskip("schedulefree").AdamWScheduleFree(parameters, lr=0.01)
    optimizer.train()
    return optimizer  # type: ignore[no-any-return]


class Lookahead(torch.optim.SGD):
    """Goes back half of the way to slow weights at each fifth step."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.count += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                slow = self.state[parameter].setdefault("slow_buffer", parameter.clone())
                if self.count % 5 == 0:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


class Anchored(torch.optim.SGD):
    """Keeps the first parameters, to measure a distance, as Prodigy does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("p0", parameter.detach().clone())
        super().step()


class Following(torch.optim.SGD):
    """Goes half of the way back to an average of its weights in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", parameter.clone())
            average.sub_(parameter.grad, alpha=0.01)
            parameter.lerp_(average, 0.5)


class ByData(torch.optim.SGD):
    """Writes in a way that counts nothing, as many optimizers of one file do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.5)


class SharpnessAware(torch.optim.SGD):
    """Climbs first, and takes its step from where it was: its `old_p` is a copy for the time of a step alone."""

    def __init__(self, parameters: Any, *, is_pointing: bool) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.is_pointing = is_pointing

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.01)
            if self.is_pointing:
                parameter.data = self.state[parameter]["old_p"]
            else:
                parameter.copy_(self.state[parameter]["old_p"])
        super().step()


def train_some(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, max(COPY_LOOKS) + 2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        (schedule_free, "z"),
        (lambda parameters: Lookahead(parameters, lr=0.01), "slow_buffer"),
        (lambda parameters: Following(parameters, lr=0.02), "average"),
    ],
)
def test_an_optimizer_with_a_second_copy_of_the_weights_is_refused_by_name(
    folder: Path, optimizer: Callable[[Iterator[Tensor]], torch.optim.Optimizer], key: str
) -> None:
    model = net()
    with pytest.raises(
        LearnerError, match=rf"\((AdamWScheduleFree|Lookahead|Following)\) trains a copy of '.*', its state '{key}'"
    ):
        train_some(model, optimizer(model.parameters()), folder)


def test_what_makes_any_optimizer_schedule_free_is_refused_and_so_is_what_it_wraps(folder: Path) -> None:
    model = net()
    optimizer = pytest.importorskip("schedulefree").ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer.train()
    with pytest.raises(LearnerError, match="was given a ScheduleFreeWrapper as its optimizer"):
        diloco_node.attach(model, optimizer)
    copied = pytest.raises(LearnerError, match=r"\(SGD\) trains a copy of '.*', its state 'z'")
    with FakeDaemon(folder), diloco_node.attach(model, optimizer.base) as diloco, copied:
        train(model, optimizer, diloco, max(COPY_LOOKS))


@pytest.mark.parametrize(
    "build",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
        lambda parameters: torch.optim.ASGD(parameters, lr=0.01, t0=3.0),
        lambda parameters: Anchored(parameters, lr=0.01),
        ByData,
        lambda parameters: SharpnessAware(parameters, is_pointing=False),
        lambda parameters: SharpnessAware(parameters, is_pointing=True),
    ],
)
def test_moments_and_first_parameters_are_no_copy(
    folder: Path, build: Callable[[Iterator[Tensor]], torch.optim.Optimizer]
) -> None:
    model = net()
    train_some(model, build(model.parameters()), folder)
