"""Loops that wrap their model after `attach`, and that step once for several micro-batches."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.step_counts import STILL_STEPS, UNTOLD_MAX
from diloco_node.wire.learner_link import Done, OfferApplied, Warned
from tests.kit.fake_daemon import FakeDaemon


@pytest.fixture
def _group() -> Iterator[None]:
    """Of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def backward(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def end_step(diloco: diloco_node.Diloco, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    diloco.step(tokens=4)


def warnings_of(daemon: FakeDaemon) -> list[str]:
    return [message.text for message in list(daemon.said) if isinstance(message, Warned)]


def fully_sharded(model: nn.Module) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def block_sharded(model: nn.Module) -> Any:
    fully_sharded(model[1])  # type: ignore[index]
    return model


def flat(model: nn.Module, *, use_orig_params: bool = False) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


@pytest.mark.no_device("its rank is of the CPU")
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_new_optimizer", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (fully_sharded, r"was sharded after attach\(\)"),
        (block_sharded, r"was sharded after attach\(\)"),
        (flat, r"is not in the model any more as at attach\(\)"),
    ],
    ids=["FSDP2", "FSDP2 of a block", "FSDP1"],
)
def test_a_model_that_is_sharded_after_attach_is_named_at_the_next_step(
    folder: Path, wrap: Callable[[nn.Module], Any], words: str, is_training: bool, has_new_optimizer: bool
) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        if is_training:
            backward(model, torch.randn(4, 6))
            optimizer.step()
            diloco.step(tokens=4)
        wrapped = wrap(model)
        backward(wrapped, torch.randn(4, 6))
        with pytest.raises(LearnerError, match=rf"parameter '[01]\.weight' {words}"):
            end_step(diloco, torch.optim.AdamW(wrapped.parameters(), lr=0.01) if has_new_optimizer else optimizer)


@pytest.mark.no_device("its rank is of the CPU")
@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        nn.DataParallel,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: flat(model, use_orig_params=True),  # of one rank these are the whole tensors
    ],
    ids=["DDP", "DP", "compile", "FSDP1 of one rank"],
)
def test_a_wrapper_that_keeps_the_parameters_may_come_after_attach(
    folder: Path, wrap: Callable[[nn.Module], Any], is_training: bool
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
        loop = model if is_training else wrap(model)
        for step in range(4):
            if step == 2 and is_training:
                loop = wrap(model)
            optimizer.zero_grad()
            backward(loop, torch.randn(4, 6))
            optimizer.step()
            diloco.step(tokens=4)
        daemon.commit(0, daemon.theta[0] + 1, -1)
        while not any(isinstance(message, OfferApplied) and message.version == 1 for message in list(daemon.said)):
            diloco.settle(0.01)
        assert set(diloco.global_state_dict()) == set(model.state_dict())
        assert warnings_of(daemon) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (nn.utils.spectral_norm, "weight_orig"),
        (lambda layer: nn.utils.prune.random_unstructured(layer, "weight", 0.5), "weight_orig"),
    ],
)
def test_a_layer_that_computes_its_weight_since_attach_is_named(
    folder: Path, change: Callable[[nn.Module], object], name: str
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        change(model[1])
        backward(model, torch.randn(4, 6))
        with pytest.raises(LearnerError, match=rf"parameter '1\.weight' is called '1\.{name}' since attach\(\)"):
            end_step(diloco, optimizer)


@pytest.mark.no_device("its rank is of the CPU")
@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("step", ["call", "auto"])
@pytest.mark.parametrize("is_wrapped_first", [False, True])
def test_micro_batches_without_synchronisation_are_one_step(folder: Path, step: Any, is_wrapped_first: bool) -> None:
    batches = [torch.randn(4, 6) for _ in range(12)]
    plain, expected = net(), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for number, batch in enumerate(batches):
        backward(plain, batch)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    expected = [parameter.detach().clone() for parameter in plain.parameters()]

    model = net()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    attached = replica if is_wrapped_first else model
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(attached, optimizer, step=step, checkpoint_every_s=0) as diloco:
            for number, batch in enumerate(batches):
                is_last = number % 4 == 3
                with contextlib.nullcontext() if is_last else replica.no_sync():
                    backward(replica, batch)
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == "call":
                        diloco.step(tokens=16)
            assert diloco.steps == 3
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
        done = daemon.wait_for(Done)
        assert (done.step, done.tokens) == (3, 48)
        assert warnings_of(daemon) == []


def accumulate(folder: Path, per_update: int, told_per_update: int, updates: int) -> list[str]:
    """What a loop hears that makes `per_update` micro-batches for each step of its optimizer."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer, checkpoint_every_s=0) as diloco:
            for _ in range(updates):
                for micro_batch in range(per_update):
                    backward(model, torch.randn(4, 6))
                    if micro_batch == per_update - 1:
                        optimizer.step()
                        optimizer.zero_grad()
                    if micro_batch >= per_update - told_per_update:
                        diloco.step(tokens=4)
        daemon.wait_for(Done)
        return warnings_of(daemon)


@pytest.mark.parametrize("per_update", [2, 3, 8])
def test_a_step_that_is_told_for_each_micro_batch_is_named_once(folder: Path, per_update: int) -> None:
    (text,) = accumulate(folder, per_update, per_update, 3 * STILL_STEPS // per_update)
    assert re.match(
        rf"{STILL_STEPS} steps were told in which the optimizer made ({STILL_STEPS // per_update}|22): ", text
    )
    assert "Call step() once for each optimizer.step()" in text


def test_a_step_that_is_told_for_each_update_is_no_news(folder: Path) -> None:
    assert accumulate(folder, 3, 1, 2 * STILL_STEPS + 2) == []


def several_a_batch(folder: Path, steps: dict[str, int], kind: type[torch.optim.Optimizer]) -> list[str]:
    """What a loop hears that makes so many steps with a batch on each part of a model, and tells one."""
    model = nn.ModuleDict({name: net() for name in steps})
    optimizers = {name: kind(model[name].parameters(), lr=0.001) for name in steps}  # type: ignore[call-arg]
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, list(optimizers.values()), checkpoint_every_s=0) as diloco:
            for _ in range(2 * STILL_STEPS + 1):
                for name, count in steps.items():
                    for _ in range(count):
                        optimizers[name].zero_grad()
                        backward(model[name], torch.randn(4, 6))
                        optimizers[name].step()
                diloco.step(tokens=4)
        daemon.wait_for(Done)
        return warnings_of(daemon)


class Derived(torch.optim.SGD):
    """Whose step is that of its base, of which hooks tell as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("count", [2, 5])
def test_steps_of_which_one_a_batch_is_told_are_named_once(folder: Path, count: int) -> None:
    (text,) = several_a_batch(folder, {"policy": count}, torch.optim.SGD)
    assert re.match(
        rf"{STILL_STEPS} steps were told in which the optimizer made {count * STILL_STEPS}: .* too few", text
    )


@pytest.mark.parametrize("steps", [{"model": 1}, {"generator": 1, "critic": 1}, {"generator": 1, "critic": 5}])
def test_one_step_of_the_slowest_network_a_batch_is_no_news(folder: Path, steps: dict[str, int]) -> None:
    assert several_a_batch(folder, steps, Derived) == []


def test_an_optimizer_that_is_made_anew_in_mid_run_has_made_its_steps(folder: Path) -> None:
    model = net()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model) as diloco:
            for number in range(4 * STILL_STEPS):
                if number % 100 == 0:
                    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                diloco.step(tokens=4)
        daemon.wait_for(Done)
        assert not [message.text for message in daemon.said if isinstance(message, Warned) and "steps" in message.text]


def test_steps_of_which_none_is_told_are_named_once(folder: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer, checkpoint_every_s=0):
            for _ in range(UNTOLD_MAX - 1):
                backward(model, torch.randn(4, 6))
                optimizer.step()
            assert warnings_of(daemon) == []
            for _ in range(UNTOLD_MAX + 1):
                optimizer.step()
        daemon.wait_for(Done)
        (text,) = warnings_of(daemon)
        assert re.match(
            rf"an optimizer made {UNTOLD_MAX} steps, and the loop told of none of them.*Call step\(\)", text
        )


def test_one_optimizer_for_each_tensor_makes_no_untold_steps(folder: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(UNTOLD_MAX // 2 + 8)))
    optimizers = [torch.optim.SGD([tensor], lr=1e-4) for tensor in model.parameters()]
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizers, checkpoint_every_s=0) as diloco:
            for _ in range(3):
                model(torch.randn(4, 2)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                diloco.step(tokens=4)
        daemon.wait_for(Done)
        assert not [message.text for message in daemon.said if isinstance(message, Warned) and "steps" in message.text]
