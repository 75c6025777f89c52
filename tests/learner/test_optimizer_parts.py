import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.optimizer_parts import Kept, OptimizerParts, _as_kept
from diloco_node.wire.learner_link import Warned
from tests.kit.fake_daemon import FakeDaemon


def quantized_optimizer() -> Any:
    """AdamW of torchao after a step, as far as its state tells: the step itself would compile for a minute."""
    optim = pytest.importorskip("torchao.optim")
    torch.manual_seed(3)
    model = nn.Linear(256, 32, bias=False)
    optimizer = optim.AdamW8bit(model.parameters(), lr=0.1)
    moments = {"exp_avg": (True, -1.0), "exp_avg_sq": (False, 0.0)}
    state = {name: optimizer._new_buffer(model.weight, is_signed) for name, (is_signed, _) in moments.items()}
    for name, (_, low) in moments.items():
        state[name].copy_(torch.empty(32, 256).uniform_(low, 1.0))
    optimizer.state[model.weight] = state | {"step": torch.tensor(5.0)}
    return optimizer


@pytest.mark.no_device("torch without CUDA makes no memory of that type by itself, as a state's copy does")
def test_moments_of_eight_bits_come_back_in_eight_bits() -> None:
    optimizer, fresh = quantized_optimizer(), quantized_optimizer()
    kept = OptimizerParts(optimizer).keep()
    again = Kept.from_document(
        json.loads(json.dumps(kept.document())),
        {name: torch.empty(tensor.shape).copy_(tensor) for name, tensor in kept.tensors.items()},
    )
    fresh.state.clear()
    OptimizerParts(fresh).restore([again])
    (state,), (expected,) = fresh.state.values(), optimizer.state.values()
    for name in ("exp_avg", "exp_avg_sq"):
        assert type(state[name]) is type(expected[name])
        # Rounded once more, as each step of such an optimizer does.
        assert torch.allclose(state[name].dequantize(), expected[name].dequantize(), rtol=0.05, atol=0.01)


def test_moments_of_eight_bits_are_refused_by_an_optimizer_that_would_take_them_as_floats() -> None:
    optimizer = quantized_optimizer()
    kept = OptimizerParts(optimizer).keep()
    plain = torch.optim.SGD([torch.zeros(32, 256, requires_grad=True)], lr=0.1)
    kept.rest["kind"] = "SGD"
    with pytest.raises(ValueError, match="a OptimState8bit was kept, which this optimizer does not make"):
        OptimizerParts(plain).restore([kept])


class Wide(torch.optim.Optimizer):
    """Has moments and counts of types of its own, lists of them as SOAP has, and a type among its settings."""

    def __init__(self, parameters: Any, lr: float = 0.01, moment_type: torch.dtype = torch.float32) -> None:
        super().__init__(parameters, {"lr": lr, "moment_type": moment_type})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter, dtype=group["moment_type"])
                    state["count"] = torch.zeros(2, dtype=torch.int64)
                    state["signs"] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state["sides"] = [[], torch.zeros(3), (torch.zeros(2), 0.5)]
                    state["sums"] = ("ab,b->a", {1: "a"})
                state["mean"].lerp_(parameter.grad.to(group["moment_type"]), 0.001)
                state["count"] += 16_777_217
                state["signs"].copy_(parameter.grad > 0)
                for side in (state["sides"][1], state["sides"][2][0]):
                    side += 1.0 / 3.0
                parameter.add_(state["mean"].to(parameter.dtype), alpha=-group["lr"])


def wide(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Sequential, Wide]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).to(dtype)
    return model, Wide(model.parameters())


def pull(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape).to(parameter.dtype)
    optimizer.step()


def leaves(optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [sorted(optimizer.state[key].items()) for key in optimizer.param_groups[0]["params"]]
    return torch.utils._pytree.tree_leaves(states)


@pytest.mark.no_device("its counts are of the host")
def test_a_state_comes_back_in_its_own_types_and_with_its_lists(folder: Path) -> None:
    model, optimizer = wide()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer) as diloco:
            for _ in range(3):
                pull(model, optimizer)
                diloco.step(tokens=4)
            diloco.checkpoint()
            expected = copy.deepcopy(leaves(optimizer))
        assert not [message for message in daemon.said if isinstance(message, Warned)]
        again, fresh = wide()
        with diloco_node.attach(again, fresh) as diloco:
            assert fresh.param_groups[0]["moment_type"] is torch.float32
            assert fresh.state[again[0].weight]["sums"] == ("ab,b->a", {1: "a"})  # type: ignore[index]
            pairs = list(zip(expected, leaves(fresh), strict=True))
            assert {type(old) for old, _ in pairs} == {torch.Tensor, float, str}
            for old, new in pairs:
                if isinstance(old, torch.Tensor):
                    assert (new.dtype, new.tolist()) == (old.dtype, old.tolist())
                else:
                    assert new == old
            pull(again, fresh)
            diloco.step(tokens=4)


@pytest.mark.no_device("its counts are of the host")
def test_moments_are_of_the_type_that_the_script_has_given_its_model_since() -> None:
    model, optimizer = wide(torch.float32)
    pull(model, optimizer)
    other, fresh = wide()
    OptimizerParts(fresh, ModelTensors(other)).restore([OptimizerParts(optimizer, ModelTensors(model)).keep()])
    assert {state["mean"].dtype for state in fresh.state.values()} == {torch.bfloat16}


@pytest.mark.no_device("its counts are of the host")
def test_a_type_that_nobody_knows_is_left_to_the_optimizer() -> None:
    """As in a file that was written before types were kept."""
    model, optimizer = wide()
    pull(model, optimizer)
    kept = OptimizerParts(optimizer, ModelTensors(model)).keep()
    del kept.rest["types"]
    other, fresh = wide()
    OptimizerParts(fresh, ModelTensors(other)).restore([kept])
    assert {state["mean"].dtype for state in fresh.state.values()} == {torch.bfloat16}


@pytest.mark.no_device("its counts are of the host")
@pytest.mark.parametrize("is_text", [False, True])
def test_moments_have_not_the_type_that_the_script_asks_no_more_for(*, is_text: bool) -> None:
    model, optimizer = wide()
    pull(model, optimizer)
    other, fresh = wide()
    for group in fresh.param_groups:
        group["moment_type"] = torch.bfloat16
    if is_text:
        for group in [*optimizer.param_groups, *fresh.param_groups]:
            group["moment_type"] = str(group["moment_type"]).removeprefix("torch.")
    kept = OptimizerParts(optimizer, ModelTensors(model)).keep()
    again = Kept.from_document(json.loads(json.dumps(kept.document())), kept.tensors)
    OptimizerParts(fresh, ModelTensors(other)).restore([again])
    assert {state["mean"].dtype for state in fresh.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("has_rate", [True, False])
def test_a_rate_of_numpy_goes_on_at_its_place_in_the_schedule(*, has_rate: bool) -> None:
    """Without it the script's initial rate would be taken for the one that the schedule had come to."""
    optimizers = [wide()[1] for _ in range(2)]
    for optimizer in optimizers:
        optimizer.param_groups[0] |= {"lr": np.float32(0.01), "initial_lr": np.float32(0.01)}
    parts = OptimizerParts(optimizers[0])
    optimizers[0].param_groups[0]["lr"] = np.float32(0.0025) if has_rate else float("inf")
    if not has_rate:
        with pytest.raises(LearnerError, match="can't be kept in a checkpoint"):
            parts.keep()
        return
    kept = parts.keep()
    OptimizerParts(optimizers[1]).restore([Kept.from_document(json.loads(json.dumps(kept.document())), kept.tensors)])
    assert optimizers[1].param_groups[0]["lr"] == pytest.approx(0.0025)


def test_a_named_tuple_of_states_stays_one() -> None:
    class Pair(NamedTuple):
        first: torch.Tensor
        name: str

    wide_value, value = torch.ones(2, dtype=torch.float64), torch.ones(2)
    pair = _as_kept((wide_value, "a"), Pair(value, "b"), is_same=True)
    assert isinstance(pair, Pair)
    assert (pair.first.dtype, pair.name) == (torch.float64, "a")
