"""States of a model that is saved within other modules: merged wherever it is, or told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.learner.attach import Diloco
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import Pretrained


def commit_all(daemon: FakeDaemon, diloco: Diloco) -> dict[str, torch.Tensor]:
    """Have a version of each fragment applied, and return the merged parameters."""
    for fragment, theta in enumerate(daemon.theta):
        daemon.commit(fragment, theta + 1, -1)
    diloco.settle(0.2)
    return diloco.global_state_dict()


def check_merged(module: nn.Module, merged: dict[str, torch.Tensor]) -> None:
    """Each tensor of a state is one of the merged ones, by its last two names."""
    by_end = {".".join(name.split(".")[-2:]): value for name, value in merged.items()}
    state = module.state_dict()
    assert state
    assert all(torch.equal(value, by_end[".".join(name.split(".")[-2:])]) for name, value in state.items())


@pytest.mark.no_device("torch.nn.DataParallel asks for properties of real ones")
def test_states_of_modules_in_modules_are_merged_and_nothing_false_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    wrapped = nn.DataParallel(net)
    with FakeDaemon(folder) as daemon, diloco_node.attach(wrapped, torch.optim.SGD(net.parameters())) as diloco:
        merged = commit_all(daemon, diloco)
        with torch.no_grad():
            net[0].weight.zero_()
        around, twice = nn.ModuleDict({"net": net}), nn.ModuleDict({"a": net, "b": net})
        diloco.save_merged(wrapped)
        for module in (wrapped, net, nn.ModuleDict({"stranger": net})):
            check_merged(module, merged)
        for module in (around, twice):
            diloco.save_merged(module)
            check_merged(module, merged)
        check_merged(net, merged)
    assert "own weights" not in caplog.text


def test_a_model_within_a_module_whose_states_are_merged_is_merged_by_itself_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    around = nn.ModuleDict({"net": net})
    with FakeDaemon(folder) as daemon, diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        merged = commit_all(daemon, diloco)
        with torch.no_grad():
            net[0].weight.zero_()
        diloco.save_merged(around)
        check_merged(around, merged)
        check_merged(net, merged)
    assert "own weights" not in caplog.text


def test_a_part_that_saves_by_itself_is_merged_in_other_modules_too_and_told_of_before(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = nn.ModuleDict({"model": nn.ModuleDict({"layer": Pretrained(6, 5)})})
    inner: Any = whole["model"]["layer"]  # type: ignore[index]
    with FakeDaemon(folder) as daemon, diloco_node.attach(whole, torch.optim.SGD(whole.parameters())) as diloco:
        merged = commit_all(daemon, diloco)
        nn.ModuleDict({"stranger": inner}).state_dict()
        assert caplog.text.count("own weights") == 1
        caplog.clear()
        diloco.save_merged(whole)
        with torch.no_grad():
            inner.weight.zero_()
        state = nn.ModuleDict({"stranger": inner}).state_dict()
        assert torch.equal(state["stranger.weight"], merged["model.layer.weight"])
        assert torch.equal(whole.state_dict()["model.layer.weight"], merged["model.layer.weight"])
        assert "own weights" not in caplog.text
        nn.ModuleDict({"stranger": whole["model"]}).state_dict()  # a plain part, within a module of the script's
        assert "state_dict() of a part of the model holds this region's own weights" in caplog.text


def test_what_a_hook_adds_to_a_merged_state_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))

    def add(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}rows"] = state[f"{prefix}weight"][:2]

    with FakeDaemon(folder) as daemon, diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        commit_all(daemon, diloco)
        diloco.save_merged(net)
        net.state_dict()
        assert "own weights" not in caplog.text
        net[0].register_state_dict_post_hook(add)
        net.state_dict()
    assert "state_dict() has '0.rows', which a hook of the script may make of this region's own weights" in caplog.text


def test_save_merged_many_times_adds_no_hooks(folder: Path) -> None:
    net = nn.Linear(6, 5)
    with FakeDaemon(folder), diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        diloco.save_merged(net)
        counts = [len(net._load_state_dict_post_hooks), len(net._state_dict_hooks)]
        for _ in range(5):
            diloco.save_merged(net)
        assert [len(net._load_state_dict_post_hooks), len(net._state_dict_hooks)] == counts == [1, 1]


def test_a_hook_between_a_model_and_the_part_within_may_drop_what_that_has_merged(folder: Path) -> None:
    whole = nn.Sequential(nn.Sequential(Pretrained(6, 5)))

    def drop(_module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
        del state[f"{prefix}0.bias"]

    with FakeDaemon(folder) as daemon, diloco_node.attach(whole, torch.optim.SGD(whole.parameters())) as diloco:
        merged = commit_all(daemon, diloco)
        whole[0].register_state_dict_post_hook(drop)
        diloco.save_merged(whole)
        state = whole.state_dict()
        assert torch.equal(state["0.0.weight"], merged["0.0.weight"])
        assert "0.0.bias" not in state
