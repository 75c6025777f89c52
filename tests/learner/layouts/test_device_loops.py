"""Loops that train on devices with a daemon: their thread never waits, and what they do wrong is told."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts import device as device_module
from diloco_node.learner.model_watch import LOOKS_WAITED
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    Warned,
)
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.fakecuda import fake_device
from tests.kit.learner_kit import Toy, region_folder, session_of
from tests.kit.waiting import until

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not fake_device.is_installed(), reason="needs a device in software: make test-device"),
]
folder = pytest.fixture(region_folder)

BOUNDARIES = 1000
DAEMONS = 3


def test_a_thousand_boundaries_without_a_wait_while_daemons_die(folder: Path) -> None:
    toy = Toy()
    theta = versions = None
    applied = snapshots = boundary = 0
    diloco = None
    for life in range(DAEMONS):
        with FakeDaemon(folder, theta=theta, versions=versions) as daemon:
            if diloco is None:
                diloco = diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=0.0)
                fake_device.reset()
            daemon.wait_attached()
            answers = [0] * daemon.fragments
            while boundary < BOUNDARIES * (life + 1) // DAEMONS:
                with fake_device.no_waits():
                    toy.step(diloco, loss=torch.ones((), device="cuda"))
                boundary += 1
                time.sleep(0.001)
                _go_on(daemon, answers)
            applied += sum(isinstance(message, OfferApplied) for message in daemon.said)
            snapshots += sum(isinstance(message, SnapshotReady) for message in daemon.said)
            theta, versions = daemon.theta, daemon.versions
    assert diloco is not None
    assert fake_device.own_waits() == []
    assert min(applied, snapshots) > BOUNDARIES // 20, "it was asked for something all the time"
    diloco.close()


def _go_on(daemon: FakeDaemon, answers: list[int]) -> None:
    """Ask for a snapshot of each fragment; of what has come make the next version."""
    for index in range(daemon.fragments):
        ready = [m for m in daemon.said if isinstance(m, SnapshotReady) and m.contribution.fragment == index]
        if len(ready) > answers[index]:
            answers[index] = len(ready)
            contribution = ready[-1].contribution
            if contribution.base_version == daemon.versions[index]:
                daemon.commit(index, daemon.theta[index] - 0.125, contribution.snapshot)
        daemon.want(index)


@pytest.mark.parametrize("is_before_the_optimizer", [True, False])
def test_a_load_by_data_is_in_no_snapshot_though_the_look_at_it_comes_late(
    folder: Path, is_before_the_optimizer: bool
) -> None:
    toy = Toy()
    texts: list[str] = []

    def train(diloco: diloco_node.Diloco, daemon: FakeDaemon) -> None:
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        daemon.want(1)
        until(lambda: session_of(diloco).link.waiting_commands)
        for parameter in toy.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps = [toy.optimizer.step, lambda: [parameter.data.mul_(2.0) for parameter in toy.model.parameters()]]
        for step in reversed(steps) if is_before_the_optimizer else steps:
            step()
        with fake_device.no_waits():
            diloco.step(tokens=7)
        texts.append(daemon.wait_for(SnapshotDenied).reason)
        toy.step(diloco)

    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        daemon.want(0)
        with pytest.raises(LearnerError, match="changed between two steps by something else"), diloco:
            train(diloco, daemon)
        assert "changed between two steps by something else" in texts[0]
        assert sum(isinstance(message, SnapshotReady) for message in daemon.said) == 1


def test_a_write_by_data_is_told_on_each_device(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2).to("cuda:1"), nn.Linear(2, 2).to("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, foreach=False)
    for name, place in (("1.weight", 1), ("2.weight", 2)):
        with FakeDaemon(folder) as daemon, diloco_node.attach(model, optimizer) as diloco:
            for step in range(6):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                diloco.step(tokens=7)
                torch.cuda.synchronize(0)
                torch.cuda.synchronize(1)
                if step == 2:
                    model[place].weight.data.add_(0.5)  # type: ignore[operator, union-attr]
            assert [name for message in daemon.said if isinstance(message, Warned) and f"{name!r} was" in message.text]


def test_a_module_to_evaluate_may_lie_on_several_devices(folder: Path) -> None:
    toy = Toy()
    outside = deepcopy(toy.model)
    outside[-1].to("cuda:1")
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        daemon.commit(0, daemon.theta[0] + 1, -1)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        outside.load_state_dict(diloco.global_state_dict())
        diloco.checkpoint()
        toy.step(diloco)
        assert not [message for message in daemon.said if isinstance(message, Warned) and "outside" in message.text]


def test_versions_on_their_way_are_no_copies_that_a_search_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read them while another stream writes them."""
    toy = Toy()
    is_sending, go, record_event = threading.Event(), threading.Event(), device_module.record_event

    def record_late(device: torch.device) -> Any:
        event = record_event(device)
        if threading.current_thread().name == "diloco-encoder" and not go.is_set():
            is_sending.set()
            assert go.wait(60.0)
        return event

    with FakeDaemon(folder, fragments=1) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        fragments = session_of(diloco).fragments
        for applied in range(2, 4):  # so both rooms have held all of the largest
            daemon.commit(0, daemon.theta[0] + 0.01, NO_SNAPSHOT)
            toy.steps_until(diloco, daemon, OfferApplied, applied)
        toy.step(diloco)
        diloco.checkpoint()
        daemon.commit(0, daemon.theta[0] + 0.01, NO_SNAPSHOT)
        until(lambda: session_of(diloco).link.waiting_commands)
        monkeypatch.setattr(device_module, "record_event", record_late)
        toy.step(diloco)
        assert is_sending.wait(60.0)
        diloco.checkpoint()
        go.set()
        fragments._worker.drain()
        assert not fake_device.hazards()


def test_an_optimizer_that_undoes_versions_is_found_without_a_wait(folder: Path) -> None:
    toy = Toy()
    masters = [parameter.detach().clone() for parameter in toy.model.parameters()]
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        answers = [0] * daemon.fragments
        fake_device.reset()

        def undo() -> None:
            with torch.no_grad():
                for parameter, master in zip(toy.model.parameters(), masters, strict=True):
                    parameter.copy_(master.sub_(0.01))

        def train() -> None:
            for _ in range(BOUNDARIES):
                undo()
                with fake_device.no_waits():
                    diloco.step(tokens=7)
                time.sleep(0.001)
                _go_on(daemon, answers)

        with pytest.raises(LearnerError, match="reverted"):
            train()
        assert fake_device.own_waits() == []


def test_a_loop_that_writes_to_its_weights_at_each_step_is_soon_not_waited_for(folder: Path) -> None:
    toy = Toy()

    def scale(factor: float) -> None:
        with torch.no_grad():
            for parameter in toy.model.parameters():
                parameter.mul_(factor)

    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        for step in range(4 * LOOKS_WAITED):
            with fake_device.no_waits() if step > LOOKS_WAITED else nullcontext():
                scale(0.999)
                toy.step(diloco)
        scale(2.0)
        with pytest.raises(LearnerError, match="changed between two steps by something else"):
            _steps_that_arrive(toy, diloco)


def _steps_that_arrive(toy: Toy, diloco: diloco_node.Diloco) -> None:
    for _ in range(3):
        toy.step(diloco)
        torch.cuda.synchronize()


class NoDoubles(TorchDispatchMode):
    """A device that has no float64, as some of Intel and Apple."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert not (isinstance(result, torch.Tensor) and result.is_cuda and result.dtype == torch.float64), func
        return result


def test_a_device_without_float64_may_train(folder: Path) -> None:
    toy = Toy()
    toy.model.append(nn.Linear(2, 2).requires_grad_(False))
    toy.model.append(nn.BatchNorm1d(2))
    with NoDoubles(), FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=torch.ones((), device="cuda"))
        daemon.commit(0, daemon.theta[0] + 1, -1)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        diloco.global_state_dict()
        diloco.checkpoint()


def test_an_optimizer_that_is_captured_can_not_count_its_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, step="auto"):
        toy.model(torch.ones(3, 6)).sum().backward()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(LearnerError, match="would miss its replays"):
            toy.optimizer.step()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
