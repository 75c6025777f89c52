"""Weights that are loaded in mid-run, in whatever way the loop steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.model_watch import ModelWatch
from diloco_node.wire.learner_link import Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import session_of
from tests.kit.waiting import until
from tests.kit.watched_model import (
    arrive,
    draw_anew,
    load,
    load_by_data,
    load_by_hand,
    load_one_layer,
    make,
    net,
    train,
)


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
        assert not fragments.incoming
        assert diloco.versions == (0, 0)
        train(model, optimizer, diloco)
        assert looks == [False, True]
        assert fragments.incoming or diloco.versions == (1, 0)


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
