"""What a script does to its model after `attach`: named before it is merged."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.step_counts import STILL_STEPS
from diloco_node.wire.learner_link import Done, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import draw_anew, load, load_by_data, load_by_hand, load_one_layer, make, net, train


def load_assigning(model: nn.Module) -> None:
    model.load_state_dict(net(7).state_dict(), assign=True)


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


@pytest.mark.parametrize("kind", ["given", "module", "tensor", "probe", "frozen"])
def test_what_another_optimizer_trains_beside_the_model_in_each_step_is_told_once(folder: Path, kind: str) -> None:
    """A discriminator or a temperature that `attach` was not given; no probe of an evaluation, nor a frozen layer."""
    model, critic = net(), nn.Linear(3, 3)
    model[0].requires_grad_(False)
    trainees = {"tensor": [torch.ones(1, requires_grad=True)], "frozen": [*model[0].parameters()]}
    beside = torch.optim.SGD(trainees.get(kind, [*critic.parameters()]), lr=0.1)
    optimizer = make(model)
    given = [optimizer, beside] if kind == "given" else optimizer
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, given, checkpoint_every_s=0) as diloco:
            for number in range(STILL_STEPS + 2):
                for _ in range(2):
                    if kind != "probe" or number == 0:
                        beside.step()
                train(model, optimizer, diloco)
        daemon.wait_for(Done)
        texts = [message.text for message in daemon.said if isinstance(message, Warned)]
        if kind in ("module", "tensor"):
            (text,) = texts
            assert text.startswith(f"SGD trains {12 if kind == 'module' else 1} values beside the model in each step")
        else:
            assert len(texts) == (kind == "given"), "attach() has told of them"


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


@pytest.mark.parametrize("has_own", [True, False])
def test_as_many_other_parameters_in_an_optimizers_groups_are_named(folder: Path, has_own: bool) -> None:
    model, critic = net(), nn.Linear(3, 3)
    model[2].requires_grad_(False)
    optimizer = make(model)
    other = torch.optim.SGD(model[1].parameters() if has_own else critic.parameters(), lr=0.1)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        other.step()
        model[2].requires_grad_(True)
        other.param_groups[0]["params"][:] = model[2].parameters()
        with pytest.raises(LearnerError, match=r"trains 2 parameters of the model that attach\(\) does not follow"):
            other.step()


@pytest.mark.parametrize("has_own_optimizer", [True, False])
def test_a_loop_that_goes_over_to_a_copy_in_mid_run_is_told(folder: Path, has_own_optimizer: bool) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, STILL_STEPS)
        twin = copy.deepcopy(model)
        optimizer.zero_grad()
        optimizer = make(twin) if has_own_optimizer else optimizer
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        for _ in range(2 * STILL_STEPS):
            twin(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            diloco.step(tokens=4)
        assert "the loop trains another model, such as a copy" in daemon.wait_for(Warned).text


def test_parameters_that_are_tied_by_data_in_mid_run_are_refused(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco, 2)
        model[1].bias.data = model[0].bias.data
        with pytest.raises(LearnerError, match="two parameters with the same memory"):
            train(model, optimizer, diloco, 2)


@pytest.mark.no_device("memory of the host")
def test_memory_that_a_parameter_had_is_free_at_the_next_step_and_after_the_end(folder: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    alive: list[bool] = []

    def place() -> None:
        rows = np.array(model[1].weight.detach().numpy())
        weakref.finalize(rows, alive.pop)
        alive.append(True)
        model[1].weight.data = torch.from_numpy(rows)

    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        place()
        train(model, optimizer, diloco, 2)
        model[1].weight.data = model[1].weight.data.clone()
        train(model, optimizer, diloco)
        assert not alive
        place()
        train(model, optimizer, diloco)
    model[1].weight.data = model[1].weight.data.clone()
    gc.collect()
    assert not alive


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


class Factorised(nn.Embedding):
    """Makes its weight of two factors."""

    def __init__(self) -> None:
        super().__init__(8, 6, max_norm=1.0)
        del self.weight
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 6))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.left[index] @ self.right


def test_an_embedding_without_a_weight_of_its_own_is_a_layer_like_others(folder: Path) -> None:
    model = Factorised()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        for _ in range(2):
            model(torch.arange(4)).square().mean().backward()
            optimizer.step()
            diloco.step(tokens=4)
        assert sum(vector.size for vector in daemon.theta) == 28
