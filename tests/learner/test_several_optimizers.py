"""What `attach` takes: models, rules by their words, and optimizers, but none whose state it can't keep."""

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.optimizer_parts import OptimizerParts
from diloco_node.learner.several_optimizers import SeveralOptimizers, as_one, kind_of


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """By its name that of torch.distributed, which wants a process group."""


def model_and_optimizers() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, [torch.optim.AdamW(model[0].parameters(), lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.2)]


def test_one_stays_itself_and_several_become_one() -> None:
    _, (first, second) = model_and_optimizers()
    assert as_one(None) is None
    assert as_one([]) is None
    assert as_one(first) is as_one([first]) is first
    both = as_one((first, second))
    assert isinstance(both, SeveralOptimizers)
    assert [group["lr"] for group in both.param_groups] == [0.1, 0.2]
    wrapper = torch.optim.Optimizer(first.param_groups, {})
    wrapper.optimizer = second  # type: ignore[attr-defined]
    assert (kind_of(both), kind_of(wrapper)) == ("AdamW, SGD", "SGD")


def test_a_loop_that_steps_each_by_itself_has_both_states_kept() -> None:
    model, parts = model_and_optimizers()
    both = as_one(parts)
    assert both is not None
    model(torch.ones(2, 3)).sum().backward()
    for one in parts:
        one.step()
    kept = both.state_dict()
    _, fresh = model_and_optimizers()
    again = as_one(fresh)
    assert again is not None
    again.load_state_dict(kept)
    moments = [state["exp_avg"] for state in fresh[0].state_dict()["state"].values()]
    assert [moment.tolist() for moment in moments] == [
        state["exp_avg"].tolist() for state in parts[0].state_dict()["state"].values()
    ]
    assert len(moments) == 2


def test_two_optimizers_of_one_parameter_each_go_on_with_their_own_moments() -> None:
    def build() -> tuple[ModelTensors, list[torch.optim.Optimizer], OptimizerParts]:
        model = nn.Linear(3, 2)
        members: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(model.parameters(), betas=(b, 0.9)) for b in (0.9, 0.1)
        ]
        both, tensors = as_one(members), ModelTensors(model)
        assert both is not None
        return tensors, members, OptimizerParts(both, tensors)

    tensors, members, parts = build()
    for number, optimizer in enumerate((*members, members[1])):
        for parameter in tensors.names:
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
    _, fresh, again = build()
    again.restore([parts.keep()])
    for before, after in zip(members, fresh, strict=True):
        pairs = zip(before.state.values(), after.state.values(), strict=True)
        assert all(torch.equal(old["exp_avg"], new["exp_avg"]) for old, new in pairs)
        assert [float(values["step"]) for values in after.state.values()] == [
            float(values["step"]) for values in before.state.values()
        ]
    first, second = (next(iter(optimizer.state.values()))["exp_avg"] for optimizer in fresh)
    assert not torch.equal(first, second)


def test_groups_and_rates_that_a_script_holds_stay_the_optimizers_after_a_restart() -> None:
    def build() -> tuple[list[torch.optim.Optimizer], OptimizerParts]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        rate = torch.tensor(0.1, device="cpu")
        members: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(model[0].parameters(), lr=rate, foreach=False),
            torch.optim.SGD(model[1].parameters(), lr=0.2),
        ]
        both = as_one(members)
        assert both is not None
        return members, OptimizerParts(both, ModelTensors(model))

    _, parts = build()
    fresh, again = build()
    groups, rate = [optimizer.param_groups for optimizer in fresh], fresh[0].param_groups[0]["lr"]
    again.restore([parts.keep()])
    rate.fill_(0.5)
    groups[1][0]["lr"] = 0.7
    assert float(fresh[0].param_groups[0]["lr"]) == 0.5
    assert fresh[1].param_groups[0]["lr"] == 0.7
    assert [group["lr"] for group in again._optimizer.param_groups] == [rate, 0.7]


def test_a_group_that_was_taken_out_in_mid_run_ends_the_checkpoints_in_words() -> None:
    model, parts = model_and_optimizers()
    single = torch.optim.AdamW([{"params": [*layer.parameters()]} for layer in model])
    for optimizer, groups in ((single, single.param_groups), (as_one(parts), parts[1].param_groups)):
        assert optimizer is not None
        keeper = OptimizerParts(optimizer)
        assert keeper.keep().rest["kind"]
        groups.pop()
        with pytest.raises(LearnerError, match=r"hold other parameters, or in another order, than at attach\(\)"):
            keeper.keep()


def test_zero_is_refused_with_what_to_do_also_inside_a_wrapper() -> None:
    model, _ = model_and_optimizers()
    zero = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    wrapper = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper.optimizer = zero  # type: ignore[attr-defined]
    for one in (zero, wrapper, [torch.optim.SGD(model.parameters(), lr=0.1), zero]):
        with pytest.raises(LearnerError, match=r"ZeroRedundancyOptimizer.*fully_shard \(FSDP2\).*moments begin anew"):
            diloco_node.attach(model, one)


@pytest.mark.parametrize("name", ["MADGRAD", "DAdaptAdaGrad"])
def test_one_that_steps_from_its_first_parameters_is_refused(name: str) -> None:
    model, _ = model_and_optimizers()
    optimizer = type(name, (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    with pytest.raises(LearnerError, match=r"takes each step from the parameters that it began with.*AdamW or Prodigy"):
        diloco_node.attach(model, optimizer)


def test_one_that_lets_ranks_come_apart_is_refused_with_what_to_do() -> None:
    model, (inner, _) = model_and_optimizers()
    optimizer = type("PostLocalSGDOptimizer", (torch.optim.SGD,), {"optim": inner})(model.parameters(), lr=0.1)
    with pytest.raises(LearnerError, match=r"lets the ranks of this region come apart.*make each rank a region"):
        diloco_node.attach(model, optimizer)


def test_what_is_no_optimizer_and_several_with_auto_are_refused() -> None:
    model, parts = model_and_optimizers()
    with pytest.raises(LearnerError, match="was given a dict as its optimizer"):
        diloco_node.attach(model, {"one": parts[0]})  # type: ignore[arg-type]
    with pytest.raises(LearnerError, match="counts the steps of one optimizer: with several, call"):
        diloco_node.attach(model, parts, step="auto")
    with pytest.warns(UserWarning, match="training alone"):
        diloco_node.attach(model, [parts[0]], step="auto").close()


def test_what_is_no_model_is_named() -> None:
    model, parts = model_and_optimizers()
    for given, kind in ((model.parameters(), "Parameter"), ({"generator": model}, "str"), ([model, parts[0]], "AdamW")):
        with pytest.raises(LearnerError, match=rf"was given a {kind} as its model: give an nn\.Module, or a list"):
            diloco_node.attach(given, parts)  # type: ignore[arg-type]


def test_a_rule_may_be_a_word_and_another_word_is_refused() -> None:
    model, _ = model_and_optimizers()
    tensors = ModelTensors(model, merge={"0.weight": "avg", "0.bias": "rda"})  # type: ignore[dict-item]
    rules = {spec.name: spec.merge.value for spec in tensors.specs}
    assert rules == {"0.weight": "avg", "0.bias": "rda", "1.weight": "rda", "1.bias": "rda"}
    with pytest.raises(LearnerError, match=r"""merge: 'mean' is no rule: give "avg", or "rda" for the run's own"""):
        ModelTensors(model, merge={"0.weight": "mean"})  # type: ignore[dict-item]
