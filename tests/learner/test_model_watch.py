"""What a script does to its model after `attach`: named before it is merged."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.model_watch import COPY_LOOKS, STILL_STEPS, ModelWatch
from diloco_node.wire.learner_link import Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import session_of
from tests.kit.waiting import until


def make(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: diloco_node.Diloco, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        arrive(model)
        diloco.step(tokens=4)


def arrive(model: nn.Module) -> None:
    """What was ordered on a device is made: verdicts that would come a step later come with the next step."""
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.synchronize()


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def load(model: nn.Module) -> None:
    model.load_state_dict(net(7).state_dict())


def load_assigning(model: nn.Module) -> None:
    model.load_state_dict(net(7).state_dict(), assign=True)


def load_by_hand(model: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), net(7).parameters(), strict=True):
        parameter.data.copy_(other.data)


def load_by_data(model: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), net(7).parameters(), strict=True):
        parameter.data = other.data


def load_one_layer(model: nn.Module) -> None:
    model[1].load_state_dict(net(7)[1].state_dict())  # type: ignore[index]


def draw_anew(model: nn.Module) -> None:
    for layer in model:  # type: ignore[attr-defined]
        layer.reset_parameters()


@pytest.mark.parametrize("change", [load, load_by_hand, load_by_data, load_one_layer, draw_anew])
def test_weights_that_change_between_attach_and_the_first_step_are_refused(
    folder: Path, change: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        change(model)
        with pytest.raises(LearnerError, match=r"not as attach\(\) wrote them, such as '.*call attach\(\) last"):
            train(model, optimizer, diloco)


def test_loading_with_assign_is_refused_at_the_first_step(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        load_assigning(model)
        with pytest.raises(LearnerError, match=r"'0.weight' is another tensor.*assign=True"):
            train(model, optimizer, diloco)


def replace_layer(model: nn.Module) -> None:
    model[1] = nn.Linear(8, 8)  # type: ignore[index]


def replace_parameter(model: nn.Module) -> None:
    model[1].weight = nn.Parameter(torch.zeros(8, 8))  # type: ignore[index]


def resize_layer(model: nn.Module) -> None:
    model[2] = nn.Linear(8, 3)  # type: ignore[index]


def drop_layer(model: nn.Module) -> None:
    model[1] = nn.Identity()  # type: ignore[index]


def delete_layer(model: nn.Module) -> None:
    del model[2]  # type: ignore[attr-defined]


def swap_below_the_hooks(model: nn.Module) -> None:
    model._modules["1"] = nn.Linear(8, 8)


def weight_norm(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[1])  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        load_assigning, replace_layer, replace_parameter, resize_layer, drop_layer, delete_layer, swap_below_the_hooks,
        weight_norm,
    ],
)  # fmt: skip
def test_a_tensor_that_is_replaced_in_mid_run_is_named_at_the_next_step(
    folder: Path, change: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        change(model)
        with pytest.raises(LearnerError, match=r"parameter '[012]\.weight' is (another tensor|not in the model)"):
            train(model, optimizer, diloco)


def test_a_layer_that_is_added_in_mid_run_is_named(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        model.append(nn.Identity())
        train(model, optimizer, diloco)
        model.append(nn.Linear(2, 2))
        with pytest.raises(LearnerError, match=r"has 2 parameters that it had not at attach\(\), such as '4\.weight'"):
            train(model, optimizer, diloco)


def test_a_type_that_changes_in_mid_run_is_named(folder: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        model.to(torch.bfloat16)
        with pytest.raises(LearnerError, match=r"'0\.weight' is torch\.bfloat16 of shape \(8, 6\) now, at attach"):
            diloco.step(tokens=4)


@pytest.mark.parametrize("has_own_optimizer", [True, False])
def test_a_loop_that_trains_a_copy_of_the_model_is_ended(folder: Path, has_own_optimizer: bool) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        other = copy.deepcopy(model)
        own = make(other) if has_own_optimizer else optimizer
        train(other, own, diloco, STILL_STEPS // 2)
        daemon.commit(0, daemon.theta[0] + 1, -1)
        diloco.settle(0.2)
        with pytest.raises(
            LearnerError, match=r"none of the 6 tensors .* was written to: the loop trains another model"
        ):
            train(other, own, diloco, STILL_STEPS)


def test_a_rate_of_zero_is_no_other_model(folder: Path) -> None:
    model = net()
    optimizer = make(model, lr=0.0)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, STILL_STEPS + 1)


def test_a_layer_that_is_unfrozen_in_mid_run_is_named(folder: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        with pytest.raises(LearnerError, match=r"trains 2 parameters.*such as '0\.weight'.*alone"):
            train(model, optimizer, diloco)


@pytest.mark.parametrize("is_alone", [False, True])
def test_an_optimizer_may_hold_frozen_parameters_until_they_are_unfrozen(folder: Path, is_alone: bool) -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer, second = torch.optim.AdamW(model[is_alone:].parameters()), torch.optim.SGD(model[0].parameters(), lr=0.1)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        second.step()
        model[0].requires_grad_(True)
        with pytest.raises(LearnerError, match=r"trains 2 parameters.*such as '0\.weight'.*alone"):
            train(model, second if is_alone else optimizer, diloco)


def test_parameters_may_be_frozen_in_some_epochs(folder: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        for epoch in range(4):
            model[0].requires_grad_(epoch % 2 == 0)
            train(model, optimizer, diloco, 2)
        assert diloco.steps == 8


@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_a_tied_weight_that_is_parted_in_mid_run_is_named(folder: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        model[int(name[0])].weight = nn.Parameter(model[0].weight.detach().clone())
        with pytest.raises(LearnerError, match=f"{name!r}.* another tensor"):
            train(model, optimizer, diloco)


def test_a_lazy_layer_is_named(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.LazyLinear(2))
    with FakeDaemon(folder):
        with pytest.raises(LearnerError, match=r"'1\.weight' is lazy.*run a batch"):
            diloco_node.attach(model, make(model[0]))
        model(torch.randn(4, 6))
        diloco_node.attach(model, make(model)).close()


def _triple_without_a_count(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(3)


def _triple_by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 3


def _triple_as_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach() * 3
    nn.utils.vector_to_parameters(vector, model.parameters())


@pytest.mark.parametrize("change", [_triple_without_a_count, _triple_by_data, _triple_as_vector])
def test_weights_that_are_put_in_place_by_data_in_mid_run_are_refused(
    folder: Path, change: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # as model.to() does
        train(model, optimizer, diloco)
        change(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            train(model, optimizer, diloco)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_what_a_loop_writes_by_data_is_told_once_and_hidden_steps_are_not(folder: Path) -> None:
    model = net()
    optimizer = make(model, lr=0.1)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(2):
            train(model, optimizer, diloco)
            for _ in range(20):  # as a captured graph makes them: no hook tells of a step, and nothing is counted
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
                diloco.step(tokens=4)
        train(model, optimizer, diloco, 2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        for _ in range(2):
            model[1].weight.data.mul_(0.99)  # type: ignore[operator, union-attr]
            train(model, optimizer, diloco)
        text = daemon.wait_for(Warned).text
        assert text.startswith("'1.weight' was written to by something else than its optimizer")
        assert len([message for message in daemon.said if isinstance(message, Warned)]) == 1


def _shift_bias(model: nn.Module) -> None:
    model[0].bias.data.add_(0.1)  # type: ignore[index, operator, union-attr]


def _load_small_layer(model: nn.Module) -> None:
    for parameter, other in zip(model[0].parameters(), net(7)[0].parameters(), strict=True):  # type: ignore[index]
        parameter.data.copy_(other.data)


def _put_small_layer(model: nn.Module) -> None:
    for parameter, other in zip(model[0].parameters(), net(7)[0].parameters(), strict=True):  # type: ignore[index]
        parameter.data = other.data.t().contiguous().t()


def _zero_through_numpy(model: nn.Module) -> None:
    model[0].bias.detach().numpy()[:] = 0.0  # type: ignore[index, union-attr]


@pytest.mark.parametrize("moment", ["before the step", "before the boundary"])
@pytest.mark.parametrize(
    "change",
    [
        _shift_bias,
        _load_small_layer,
        _put_small_layer,
        pytest.param(_zero_through_numpy, marks=pytest.mark.no_device("NumPy sees the host's memory alone")),
    ],
)
def test_a_write_by_data_to_small_tensors_alone_is_told_by_name(
    folder: Path, change: Callable[[nn.Module], None], moment: str
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 3)
        if moment == "before the boundary":
            optimizer.step()
        change(model)
        if moment == "before the boundary":
            diloco.step(tokens=4)
        train(model, optimizer, diloco, 2)
        text = daemon.wait_for(Warned).text
        assert text.startswith(("'0.bias' was written to by something else", "'0.weight' was written to by something"))


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def _clamp_counted(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(min=0.0)


def _prune(model: nn.Module) -> None:
    weight = model[1].weight  # type: ignore[index]
    weight.data.mul_(weight.data.abs() > weight.data.abs().median())  # type: ignore[operator, union-attr]


def _limit_norms(model: nn.Module) -> None:
    weight = model[1].weight  # type: ignore[index]
    weight.data = torch.renorm(weight.data, 2, 0, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("constraint", [_clamp, _clamp_counted, _prune, _limit_norms])
def test_a_constraint_far_from_the_first_weights_is_told_and_no_load(
    folder: Path, constraint: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        for _ in range(3):
            constraint(model)
            train(model, optimizer, diloco)
        daemon.wait_for(Warned)
        assert len([message for message in daemon.said if isinstance(message, Warned)]) == 1
        load_by_hand(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            train(model, optimizer, diloco, 2)


def test_a_clamp_before_the_first_step_is_told_and_no_load(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        _clamp(model)
        train(model, optimizer, diloco, 2)
        assert "'0.weight' was written to by something else" in daemon.wait_for(Warned).text
        assert diloco.steps == 2


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
        assert "2 parameters (20 bytes) that the optimizer holds are not in the model" in daemon.wait_for(Warned).text
        train(model, optimizer, diloco)
    with FakeDaemon(folder) as daemon, diloco_node.attach([model, criterion], optimizer) as diloco:
        assert sum(vector.size for vector in daemon.theta) == 146 + 5
        assert set(diloco.global_state_dict()) == {*model.state_dict(), *criterion.state_dict()}
        train(model, optimizer, diloco)
    with pytest.raises(LearnerError, match=r"2 names stand in more than one, such as '0\.bias'"):
        diloco_node.attach([model, nn.Sequential(nn.Linear(2, 1))], optimizer)


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
    ],
)
def test_an_optimizer_with_a_second_copy_of_the_weights_is_refused_by_name(
    folder: Path, optimizer: Callable[[Iterator[Tensor]], torch.optim.Optimizer], key: str
) -> None:
    model = net()
    with pytest.raises(
        LearnerError, match=rf"\((AdamWScheduleFree|Lookahead)\) trains a copy of '.*', its state '{key}'"
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


def test_averages_that_are_swapped_in_and_out_are_no_load(folder: Path) -> None:
    model = net()
    optimizer = make(model, lr=0.1)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        for _ in range(3):
            train(model, optimizer, diloco)
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 0 for name, value in own.items()})
            model.load_state_dict(own)
        assert diloco.steps == 3


def test_idle_parameters_with_masters_in_the_optimizer_are_merged() -> None:
    model = net().to(torch.bfloat16)
    masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    tensors = ModelTensors(model, masters=masters, optimizer_tensors=list(masters.values()))
    assert len(tensors.specs) == 6
    assert not tensors.idle


def test_a_merged_buffer_may_change_in_the_first_forward_pass(folder: Path) -> None:
    class Counting(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 2))
            self.register_buffer("load", torch.zeros(4))

        def forward(self, values: Tensor) -> Tensor:
            self.load.add_(1.0)
            result: Tensor = self[0](values)
            return result

    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters())
    with FakeDaemon(folder), diloco_node.attach(model, optimizer, buffers=["load"]) as diloco:
        train(model, optimizer, diloco, 3)
        assert diloco.steps == 3


@pytest.mark.parametrize("change", [load, load_by_hand, load_by_data, load_one_layer, draw_anew])
def test_weights_that_are_loaded_between_the_optimizers_step_and_the_boundary_are_refused(
    folder: Path, change: Callable[[nn.Module], None]
) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        optimizer.step()
        change(model)
        daemon.commit(0, daemon.theta[0] + 1, -1)  # it would hide what was loaded
        until(lambda: session_of(diloco).link.waiting_commands)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            step_twice(model, diloco)


def test_what_is_asked_for_after_a_look_waits_for_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a version would hide what a script loaded just before, and a snapshot would hold it."""
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        looks, link, fragments = [], session_of(diloco).link, session_of(diloco).fragments
        check = ModelWatch.check

        def check_and_ask(watch: ModelWatch, has_orders: bool) -> None:
            check(watch, has_orders)
            looks.append(has_orders)
            if len(looks) == 1:
                daemon.commit(0, daemon.theta[0] + 1, -1)
                until(lambda: link.waiting_commands)

        monkeypatch.setattr(ModelWatch, "check", check_and_ask)
        train(model, optimizer, diloco)
        assert not fragments.arriving
        assert diloco.versions == (0, 0)
        train(model, optimizer, diloco)
        assert looks == [False, True]
        assert fragments.arriving or diloco.versions == (1, 0)


def descend(model: nn.Module, lr: float = 0.01) -> None:
    """Make a step without an optimizer of torch's."""
    model.zero_grad()
    model(torch.randn(4, 6)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=lr)


def test_a_loop_without_an_optimizer_may_train_but_not_load(folder: Path) -> None:
    model = net()
    with FakeDaemon(folder) as daemon, diloco_node.attach(model) as diloco:
        for _ in range(3):
            descend(model)
            diloco.step(tokens=4)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
    model = net()
    with FakeDaemon(folder), diloco_node.attach(model) as diloco:
        load(model)
        descend(model)
        with pytest.raises(LearnerError, match=r"6 of 6 tensors are not as attach\(\) wrote them"):
            step_twice(model, diloco)


def step_twice(model: nn.Module, diloco: diloco_node.Diloco) -> None:
    """A verdict on a device comes with the second one."""
    for _ in range(2):
        diloco.step(tokens=4)
        arrive(model)


def test_each_step_of_attach_auto_is_the_optimizers_own(folder: Path) -> None:
    model = net()
    optimizer = make(model, lr=0.3)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer, step="auto") as diloco:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        assert diloco.steps == 4
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_replays_of_a_captured_step_are_no_foreign_writes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture raises the counts of writes without a write, and replays write without raising them."""
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        values = [parameter.clone() for parameter in model.parameters()]
        with monkeypatch.context() as capture:
            capture.setattr("diloco_node.learner.model_watch.is_capturing", lambda: True)
            optimizer.step()
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(1.3 * value)
        diloco.step(tokens=4)
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.data.copy_(1.8 * value)
        diloco.step(tokens=4)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        load(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            diloco.step(tokens=4)


def test_a_version_that_is_not_counted_as_a_write_is_no_foreign_one(folder: Path) -> None:
    """As with sharded tensors, of which this learner writes the local part."""
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, steps=2)
        watch = diloco._watch
        assert watch is not None
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        watch.note_writes(1)
        train(model, optimizer, diloco, steps=2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_a_small_write_after_many_replays_is_no_load(folder: Path) -> None:
    """Each replay moves the weights and counts nothing: only the write itself is measured."""
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        for _ in range(30):
            for parameter in model.parameters():
                parameter.data.mul_(1.05)
            diloco.step(tokens=4)
        with torch.no_grad():
            model[1].weight.mul_(0.999)  # type: ignore[operator, arg-type]
        diloco.step(tokens=4)
        load(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            diloco.step(tokens=4)


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_load_is_seen_whichever_optimizer_steps_first(folder: Path, is_counted: bool) -> None:
    model = net()
    both = torch.optim.SGD(model[:2].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.01)

    def steps(count: int) -> None:
        for _ in range(count):
            for optimizer in both:
                optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            for optimizer in both:
                optimizer.step()
            diloco.step(tokens=4, loss=float(loss.detach()))  # waits, as loops do now and then

    with FakeDaemon(folder), diloco_node.attach(model, both) as diloco:
        steps(2)
        (load if is_counted else load_by_hand)(model)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            steps(3)  # a device tells it a step later


def test_versions_before_the_first_step_are_no_load(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        assert diloco._watch is not None
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        diloco._watch.note_writes(1)
        train(model, optimizer, diloco, steps=2)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
