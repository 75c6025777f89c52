"""Models that save the merged weights by themselves, at each level, and state that no checkpoint can keep."""

import copy
import gc
import io
import pickle
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.attach import Diloco
from diloco_node.wire.learner_link import (
    Done,
    Warned,
)
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import Pretrained, Toy


def in_fabric(model: nn.Module) -> Any:
    return pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1).setup(model)


def test_a_model_inside_a_trainers_module_saves_the_merged_weights_by_itself_too(folder: Path) -> None:
    module = nn.ModuleDict({"model": Pretrained(6, 5), "judge": nn.Linear(5, 2)})
    inner: Any = module["model"]
    with FakeDaemon(folder) as daemon, diloco_node.attach(module, torch.optim.SGD(module.parameters())) as diloco:
        diloco.save_merged(module)
        with torch.no_grad():
            inner.weight.zero_()
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        merged = diloco.global_state_dict()
        assert torch.equal(inner.save_pretrained()["weight"], merged["model.weight"])
        assert all(torch.equal(value, merged[name]) for name, value in module.state_dict().items())
    assert torch.equal(inner.save_pretrained()["weight"], inner.weight)


@pytest.mark.no_device("torch.nn.DataParallel asks for properties of real ones")
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager"), in_fabric])
def test_a_wrapped_model_saves_the_merged_weights_from_each_level(folder: Path, wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    wrapped = wrap(model)
    with FakeDaemon(folder) as daemon, diloco_node.attach(wrapped, torch.optim.SGD(model.parameters())) as diloco:
        diloco.save_merged(wrapped)
        with torch.no_grad():
            model[0].weight.zero_()
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        merged = diloco.global_state_dict()
        assert set(merged) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        for module in (wrapped, model):
            for name, value in module.state_dict().items():
                assert torch.equal(value, merged[name.removeprefix("module.").removeprefix("_orig_mod.")])
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight)


def test_a_copy_of_a_model_whose_saves_are_merged_saves_itself(folder: Path) -> None:
    model = nn.Linear(6, 5)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, torch.optim.SGD(model.parameters())) as diloco:
        diloco.save_merged(model)
        average, before = torch.optim.swa_utils.AveragedModel(model), model.weight.detach().clone()
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        assert not torch.equal(model.weight, before)
        assert torch.equal(model.state_dict()["weight"], diloco.global_state_dict()["weight"])
        assert torch.equal(average.state_dict()["module.weight"], average.module.weight)
        assert torch.equal(average.module.state_dict()["weight"], before)


def pickled(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    # Who loads it may not have this package, and lets pass what the model is made of.
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, Pretrained, set]):
        loaded: nn.Module = torch.load(file, weights_only=True)
    return loaded.state_dict()


@pytest.mark.parametrize("is_merging", [False, True])
@pytest.mark.parametrize(
    ("save", "words"),
    [
        (lambda model: model.state_dict(), "state_dict() in mid-run holds this region's own weights"),
        (lambda model: nn.ModuleDict({"a": model}).state_dict(), "state_dict() in mid-run holds this region's own"),
        (lambda model: copy.deepcopy(model).state_dict(), "state_dict() of a copy of the model: unless"),
        (lambda model: copy.deepcopy(copy.deepcopy(model)[0]), ""),
        pytest.param(
            pickled,
            "the model is pickled with this region's own weights",
            marks=pytest.mark.no_device("torch.save of a model: the CPU build has no storages of a device"),
        ),
    ],
    ids=["state_dict", "of a module around it", "of a copy", "copied only", "pickled"],
)
def test_whose_weights_a_script_saves_in_mid_run_is_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture, save: Callable[[nn.Module], Any], words: str, is_merging: bool
) -> None:
    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "own weights" in record.getMessage()]

    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            if is_merging:
                diloco.save_merged(toy.model)
            toy.step(diloco)
            diloco.global_state_dict()
            diloco.own_state_dict()
            save(toy.model)
            save(toy.model)
            early = copy.deepcopy(toy.model)
            assert len(told()) == (bool(words) and not (is_merging and "mid-run" in words))
            assert all(text.startswith(words) for text in told())
            count = len(told())
            daemon.stop_learner(versions=(0, 0))
            while not diloco.should_stop:
                toy.step(diloco)
            save(toy.model)
        save(toy.model)
        assert len(told()) == count, "the model holds the result"
        early.state_dict()
        assert told()[-1].startswith("state_dict() of a copy of the model: unless"), "of the best so far"
    assert not toy.model._state_dict_hooks


class Holder(nn.Module):
    """A module whose names are not those of the model that is attached."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class Forked(nn.Module):
    """A layer at the top, and one of the same name further down."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Linear(3, 3)
        self.down = nn.Module()
        self.down.conv = nn.Linear(3, 3)


def test_a_parameter_is_known_by_itself_and_not_by_its_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, teacher = Forked(), Forked()
    holder = Holder(model)
    model.save_pretrained = lambda: model.state_dict()
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, torch.optim.SGD(model.parameters())) as diloco:
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        with torch.no_grad():
            model.conv.weight.zero_()
            model.down.conv.weight.zero_()
        merged = diloco.global_state_dict()
        diloco.save_merged(model.down)
        assert torch.equal(model.down.state_dict()["conv.weight"], merged["down.conv.weight"])
        assert not model.state_dict()["conv.weight"].any()
        assert "state_dict() of a part of the model holds" in caplog.text
        diloco.save_merged(model)
        diloco.save_merged(holder)
        for name, value in merged.items():
            assert torch.equal(holder.state_dict()[f"net.{name}"], value)
            assert torch.equal(nn.ModuleDict({"a": model}).state_dict()[f"a.{name}"], value)
            assert torch.equal(model.save_pretrained()[name], value)
        assert torch.equal(model.down.state_dict()["conv.weight"], merged["down.conv.weight"]), "as it was asked for"
        assert "changes nothing" not in caplog.text
        diloco.save_merged(teacher)
        assert "save_merged() of a module that has none of the run's parameters changes nothing" in caplog.text
        assert torch.equal(teacher.state_dict()["conv.weight"], teacher.conv.weight)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Linear(5, 5))

    def merged_in(self, daemon: FakeDaemon, diloco: Diloco) -> dict[str, torch.Tensor]:
        """Have this region's weights and the merged ones differ in all values; return those."""
        for fragment, theta in enumerate(daemon.theta):
            daemon.commit(fragment, theta + 1, -1)
        diloco.settle(0.2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(7.0)
        return diloco.global_state_dict()


def rename(_module: object, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


def transpose(_module: object, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


def transpose_below(_module: object, state: dict[str, Any], prefix: str, _metadata: object) -> None:
    transpose(_module, state, f"{prefix}1.", _metadata)


def test_tensors_that_hooks_of_a_script_rename_are_merged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net[1].register_state_dict_post_hook(rename)
    with FakeDaemon(folder) as daemon, diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        merged = net.merged_in(daemon, diloco)
        diloco.save_merged(net)
        state = net.state_dict()
        assert set(state) == {"0.weight", "0.bias", "1.kernel", "1.bias"}
        assert all(torch.equal(value, merged[name.replace("kernel", "weight")]) for name, value in state.items())
        assert "own weights" not in caplog.text


def test_what_a_hook_makes_of_the_whole_state_is_of_the_merged_one_and_of_a_layer_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    net.register_state_dict_post_hook(transpose_below)
    with FakeDaemon(folder) as daemon, diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        merged = net.merged_in(daemon, diloco)
        diloco.save_merged(net)
        assert torch.equal(net.state_dict()["1.weight"], merged["1.weight"].t())
        assert "own weights" not in caplog.text
        net[1].register_state_dict_post_hook(transpose)
        assert torch.equal(net.state_dict()["0.weight"], merged["0.weight"])
        assert "state_dict() has '1.weight', which a hook of the script makes of this region's own" in caplog.text


@pytest.mark.no_device("its rank is of the CPU")
def test_a_part_that_is_wrapped_after_save_merged_is_merged(folder: Path) -> None:
    net = Net()
    with FakeDaemon(folder) as daemon, diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        merged = net.merged_in(daemon, diloco)
        diloco.save_merged(net)
        net[1] = nn.DataParallel(net[1])
        state = net.state_dict()
        assert set(state) == {"0.weight", "0.bias", "1.module.weight", "1.module.bias"}
        assert all(torch.equal(value, merged[name.replace("module.", "")]) for name, value in state.items())


def test_modules_around_the_model_that_come_and_go_are_merged_each(folder: Path) -> None:
    """A new one may lie where one before it was."""
    net = Net()
    with FakeDaemon(folder) as daemon, diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        merged = net.merged_in(daemon, diloco)
        addresses = set()
        for _ in range(20):
            holder = Holder(net)
            addresses.add(id(holder))
            diloco.save_merged(holder)
            assert torch.equal(holder.state_dict()["net.0.weight"], merged["0.weight"])
            del holder
        assert len(addresses) < 20


def test_parameters_that_are_asked_for_themselves_are_the_models(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with FakeDaemon(folder), diloco_node.attach(net, torch.optim.SGD(net.parameters())) as diloco:
        diloco.save_merged(net)
        state = net.state_dict(keep_vars=True)
        assert all(state[name] is parameter for name, parameter in net.named_parameters())
        assert "state_dict(keep_vars=True) holds this region's own parameters" in caplog.text


@pytest.mark.no_device("torch.save of a model: the CPU build has no storages of a device")
@pytest.mark.parametrize("step", ["call", "auto"])
def test_a_pickled_model_holds_nothing_of_a_learner(folder: Path, step: Any) -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    with FakeDaemon(folder):
        with diloco_node.attach(net, torch.optim.SGD(net.parameters()), step=step) as diloco:
            diloco.save_merged(net)
            for model in (net, copy.deepcopy(net), copy.deepcopy(copy.deepcopy(net))):
                assert set(pickled(model)) == set(net.state_dict())
                loaded = pickle.loads(pickle.dumps(model))
                kinds = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_state_dict_hooks")
                assert [len(vars(loaded)[kind]) for kind in kinds] == [0, 0, 0, 0], "a reader's hooks begin at 0"
        assert set(pickled(net)) == set(net.state_dict())


def test_hooks_that_a_script_has_set_before_may_be_taken_away(folder: Path) -> None:
    net, calls = Net(), []
    handles = [
        net.register_forward_hook(lambda *_: calls.append("forward")),
        net.register_forward_pre_hook(lambda *_: calls.append("before")),
        net.register_state_dict_post_hook(lambda *_: calls.append("state")),
    ]
    with FakeDaemon(folder), diloco_node.attach(net, torch.optim.SGD(net.parameters()), step="auto"):
        net(torch.ones(1, 6))
        net.state_dict()
        assert calls == ["before", "forward", "state"]
        for handle in handles:
            handle.remove()
        net(torch.ones(1, 6))
        net.state_dict()
    net.state_dict()
    assert calls == ["before", "forward", "state"]


def test_a_frozen_part_is_nobodys_own_and_any_other_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    with FakeDaemon(folder), diloco_node.attach(model, torch.optim.SGD(model[1].parameters())) as diloco:
        model[0].state_dict()
        assert "own weights" not in caplog.text
        model[1].state_dict()
        assert caplog.text.count("state_dict() in mid-run holds this region's own weights") == 1
        diloco.save_merged(model)
        model.state_dict()
        model[0].state_dict()
        assert "of a part of the model" not in caplog.text
        model[1].state_dict()
        assert "state_dict() of a part of the model holds this region's own weights" in caplog.text


def test_a_merged_state_that_is_loaded_again_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As averages do that are put in for an evaluation, and out again."""
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.model.load_state_dict(toy.model.state_dict())
        diloco.save_merged(toy.model)
        toy.model.load_state_dict(diloco.own_state_dict())
        assert "undoes this region's last steps" not in caplog.text
        toy.model.load_state_dict(toy.model.state_dict())
        assert "undoes this region's last steps" not in caplog.text, "it may be the last that the loop does"
        toy.step(diloco)
        assert caplog.text.count("load_state_dict() in mid-run: since save_merged() a state_dict() has the merged") == 1
        assert daemon.theta


def test_ranks_that_save_beside_rank_0_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        diloco.save_merged(toy.model)
        diloco._saves._ranks = cast(Any, SimpleNamespace(is_first=False))
        assert torch.equal(toy.model.state_dict()["0.weight"], dict(toy.model.named_parameters())["0.weight"])
        assert "state_dict() of this rank holds this region's own weights, that of rank 0 the merged" in caplog.text


@pytest.mark.no_device("torch.save of a model: the CPU build has no storages of a device")
def test_a_copy_that_is_pickled_is_told_as_a_copy(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer):
        pickled(copy.deepcopy(toy.model))
    assert "state_dict() of a copy of the model: unless" in caplog.text
    assert "the model is pickled" not in caplog.text


class Reader:
    """A part of `stateful` that reads the model when it is kept, as an average that begins late."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_a_checkpoint_that_reads_the_model_is_no_save(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy()
    reader = Reader(toy.model)
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, stateful={"average": reader}) as diloco:
        toy.step(diloco)
        reader.model = copy.deepcopy(toy.model)
        diloco.checkpoint()
        assert "own weights" not in caplog.text
        reader.state_dict()
        assert "state_dict() of a copy" in caplog.text


def test_a_copy_does_not_keep_the_model_alive(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder):
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            average = copy.deepcopy(toy.model)
        model = weakref.ref(toy.model)
        del toy, diloco
        gc.collect()
        assert model() is None
        assert average.state_dict()


def test_a_model_that_is_halved_to_be_saved_is_named_at_the_next_step_of_its_optimizer(folder: Path) -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 6, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()

    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        step()
        diloco.step(tokens=2)
        model.half().state_dict()
        with pytest.raises(LearnerError, match=r"'weight' is torch.float16 of shape"):
            step()
        model.float()


class NoJson:
    def state_dict(self) -> dict[str, float]:
        return {"position": float("nan")}

    def load_state_dict(self, state: dict[str, float]) -> None:
        raise AssertionError(state)


class Broken(NoJson):
    def state_dict(self) -> dict[str, float]:
        raise ZeroDivisionError("no position")


def test_state_that_no_checkpoint_can_keep_does_not_spoil_the_end(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer, stateful={"data": NoJson()}) as diloco:
            toy.step(diloco)
        assert daemon.wait_for(Done).step == 1


def test_exception_in_the_last_checkpoint_is_told_and_ends_no_learner(folder: Path) -> None:
    toy = Toy()
    before = signal.getsignal(signal.SIGTERM)
    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer, stateful={"data": Broken()})
        toy.step(diloco)
        diloco.close()
        text = daemon.wait_for(Warned).text
        assert "state_dict() of stateful 'data' fails with ZeroDivisionError: no position" in text
        assert daemon.wait_for(Done).step == 1
        assert signal.getsignal(signal.SIGTERM) == before
        diloco.close()


def test_a_step_after_the_end_is_refused_in_words(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder):
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight.cpu())
        with pytest.raises(LearnerError, match="after close"):
            toy.step(diloco)


def test_learner_without_a_checkpoint_folder_writes_none(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=0) as diloco:
        toy.step(diloco)
    assert [path.name for path in (folder / "learner").iterdir()] == ["trained-1"]
