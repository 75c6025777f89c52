"""A schedule, scaler or optimizer that the script makes otherwise after a restart is the script's, where it was."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import diloco_node
from diloco_node.learner.schedules import _step_to, place_schedule
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.watched_model import make, net, train

Build = Callable[[torch.optim.Optimizer], Any]


def warm_up(steps: int, rest: int) -> Build:
    """Linear, then a cosine."""
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps),
            lr_scheduler.CosineAnnealingLR(optimizer, rest),
        ],
        [steps],
    )


def chained(*gammas: float) -> Build:
    return lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in gammas]
    )


CHANGES: dict[str, tuple[Build, Build]] = {
    "a cosine that is longer, where the shorter one has come to zero": (
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    ),
    "steps": (
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: lr_scheduler.StepLR(optimizer, 100, 0.5),
    ),
    "milestones": (
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [5, 30]),
    ),
    "cycles": (
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    ),
    "another kind": (
        lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.3, 100),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 12),
    ),
    "a longer warm-up": (warm_up(2, 4), warm_up(4, 10)),
    "of one part, then of two": (lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), warm_up(2, 10)),
    "of two parts, then of one": (warm_up(2, 4), lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 12)),
    "of more parts": (chained(0.9), chained(0.9, 0.5)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_schedule_that_the_script_changed_has_the_rates_of_the_new_one(name: str, folder: Path) -> None:
    theta, versions = None, None
    for build in CHANGES[name]:
        with FakeDaemon(folder, theta=theta, versions=versions) as daemon:
            model = net()
            optimizer = make(model)
            schedule = build(optimizer)
            rates = []
            with diloco_node.attach(model, optimizer, stateful={"schedule": schedule}) as diloco:
                for _ in range(6):
                    rates.append(float(optimizer.param_groups[0]["lr"]))
                    train(model, optimizer, diloco)
                    schedule.step()
            theta, versions = daemon.theta, daemon.versions
    assert {float(state["step"]) for state in optimizer.state.values()} == {12.0}, "moments stay"
    optimizer = make(net())
    schedule = CHANGES[name][1](optimizer)
    expected = []
    for _ in range(12):
        expected.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(expected[6:])


OTHERS: dict[str, Build] = {
    "a factor": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=14),
    "triangles": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, step_size_up=3),
    "products": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda count: 0.9 + 0.001 * count),
    "cycles that grow": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2, 2),
    "a warm-up of no length": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.5, total_iters=0),
    "a constant of no length": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=0),
    "a power of no length": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=0),
    "three parts, and one of no length": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer, factor, 3) for factor in (0.1, 0.2, 0.3)]
        + [lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)],
        [2, 2, 5],
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("build", [*OTHERS.values(), *(new for _, new in CHANGES.values())], ids=[*OTHERS, *CHANGES])
def test_a_place_in_a_schedule_is_that_to_which_it_is_stepped(build: Build) -> None:
    for steps in range(12):
        stepped, placed = (build(torch.optim.SGD(net().parameters(), lr=0.05, momentum=0.9)) for _ in range(2))
        for _ in range(steps):
            stepped.step()
        _step_to(placed, steps, placed.get_last_lr())
        for _ in range(2):
            assert placed.get_last_lr() == pytest.approx(stepped.get_last_lr())
            assert placed.optimizer.param_groups[0]["lr"] == pytest.approx(stepped.optimizer.param_groups[0]["lr"])
            assert counts_of(placed.state_dict()) == counts_of(stepped.state_dict())
            stepped.step()
            placed.step()


def counts_of(state: dict[str, Any]) -> list[Any]:
    members = [counts_of(member) for member in state.get("_schedulers", ())]
    return [state.get("last_epoch"), state.get("T_cur"), state.get("T_i"), *members]


def test_a_million_steps_of_a_changed_schedule_are_not_made_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    step = lr_scheduler.LRScheduler.step

    def count(schedule: Any, *place: int) -> None:
        calls.append(1)
        step(schedule, *place)

    monkeypatch.setattr(lr_scheduler.LRScheduler, "step", count)
    old = warm_up(1000, 2_000_000)(make(net())).state_dict() | {"last_epoch": 1_000_000}
    new = warm_up(2000, 1_998_000)(make(net()))
    calls.clear()
    new.load_state_dict(place_schedule(new, old))
    assert len(calls) < 10
    assert new.get_last_lr() == pytest.approx([0.01 * (1 + math.cos(math.pi * 998 / 1998)) / 2])
    assert new.last_epoch == 1_000_000


def test_a_changed_setting_is_told_and_an_equal_schedule_is_not(caplog: pytest.LogCaptureFixture) -> None:
    def place(*steps: int) -> list[str]:
        old, new = (lr_scheduler.StepLR(make(net()), count) for count in steps)
        old.optimizer.step()
        for _ in range(3):
            old.step()
        caplog.clear()
        new.load_state_dict(place_schedule(new, old.state_dict()))
        assert new.last_epoch == 3
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING):
        assert place(4, 4) == []
        assert place(4, 7) == ["StepLR: step_size is 7 as the script sets it, not 4 as in the checkpoint"]


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.01)
    optimizers = [torch.optim.SGD(net().parameters(), lr=lr) for lr in (0.01, rate)]
    old, new = (lr_scheduler.CosineAnnealingLR(optimizer, 6 * n) for n, optimizer in enumerate(optimizers, 1))
    optimizers[0].step()
    for _ in range(6):
        old.step()
    rate.fill_(0.0)  # from the checkpoint
    new.load_state_dict(place_schedule(new, old.state_dict()))
    assert optimizers[1].param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.005)


def test_of_two_schedules_of_one_optimizer_none_is_stepped_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizers = [make(net()) for _ in range(2)]
    pairs = [
        (lr_scheduler.StepLR(optimizer, size), lr_scheduler.ExponentialLR(optimizer, 0.9))
        for size, optimizer in enumerate(optimizers, 3)
    ]
    optimizers[0].step()
    for schedule in pairs[0]:
        schedule.step()
    optimizers[1].param_groups[0]["lr"] = 0.004  # from the checkpoint
    for old, new in zip(*pairs, strict=True):
        new.load_state_dict(place_schedule(new, old.state_dict(), pairs[1]))
    assert [schedule.last_epoch for schedule in pairs[1]] == [1, 1]
    assert optimizers[1].param_groups[0]["lr"] == 0.004
    assert caplog.messages == ["StepLR: step_size is 4 as the script sets it, not 3 as in the checkpoint"]


@pytest.mark.parametrize("build", [*OTHERS.values(), *(new for _, new in CHANGES.values())], ids=[*OTHERS, *CHANGES])
def test_a_schedule_that_begins_anew_has_its_first_rate(build: Build) -> None:
    """As after a checkpoint of one that counts its steps in its own way."""
    fresh, placed = (build(torch.optim.SGD(net().parameters(), lr=0.05, momentum=0.9)) for _ in range(2))
    placed.load_state_dict(place_schedule(placed, {"gamma": 0.5, "steps": 7}))
    assert placed.get_last_lr() == fresh.get_last_lr()
    assert placed.optimizer.param_groups[0]["lr"] == fresh.optimizer.param_groups[0]["lr"]
    assert counts_of(placed.state_dict()) == counts_of(fresh.state_dict())


class Titans:
    """Schedules in a list, as torchtitan has them: their state is that of the first."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.schedulers = [lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]

    def step(self) -> None:
        for schedule in self.schedulers:
            schedule.optimizer.step()
            schedule.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule in self.schedulers:
            schedule.load_state_dict(dict(state))


def test_schedules_in_a_list_of_torchtitan_have_the_rate_of_the_script() -> None:
    old, new = (Titans(*(make(net(), lr) for _ in range(2))) for lr in (0.01, 0.03))
    for _ in range(2):
        old.step()
    new.load_state_dict(place_schedule(new, old.state_dict()))
    new.step()
    assert [schedule.get_last_lr() for schedule in new.schedulers] == [[pytest.approx(0.03 / 4)]] * 2


def test_a_gradient_scaler_has_the_settings_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    def scaler(**settings: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **settings)

    old, new = scaler(init_scale=8.0, growth_interval=100), scaler(growth_interval=7)
    with caplog.at_level(logging.WARNING):
        new.load_state_dict(place_schedule(new, old.state_dict()))
    assert (new.get_scale(), new.get_growth_interval()) == (8.0, 7)
    assert caplog.messages == [
        "gradient scaler: growth_interval is 7 as the script sets it, not 100 as in the checkpoint"
    ]
    new.load_state_dict(place_schedule(new, scaler(enabled=False).state_dict()))  # of a life in float32
    assert (new.get_scale(), new.get_growth_interval()) == (8.0, 7)


@pytest.mark.parametrize(("lr", "is_told"), [(0.5, True), (0.1, False)])
def test_an_optimizer_beside_the_model_keeps_its_rate_and_says_so(
    lr: float, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A loop may have lowered it, and a script that is the same would take that back."""
    kept, own = (torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate) for rate in (0.1, lr))
    own.load_state_dict(place_schedule(own, kept.state_dict()))
    assert own.param_groups[0]["lr"] == 0.1
    text = "AdamW in stateful: lr is 0.1 as in the checkpoint, not 0.5 as the script makes it: set it after attach"
    assert caplog.messages == [text] * is_told


@pytest.mark.parametrize(("count", "is_told"), [(0, True), (12, False)])
def test_a_rate_that_begins_anew_is_told_in_the_first_step(
    count: int, is_told: bool, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a count of the loop's own, from which schedules of timm compute it."""
    theta, versions = None, None
    for begin in (0, count):
        with FakeDaemon(folder, theta=theta, versions=versions) as daemon:
            model = net()
            optimizer = make(model)
            with diloco_node.attach(model, optimizer) as diloco:
                for step in range(begin, begin + 12):
                    optimizer.param_groups[0]["lr"] = 0.01 * (1 + step) / 25
                    train(model, optimizer, diloco)
            theta, versions = daemon.theta, daemon.versions
    texts = [text for text in caplog.messages if "lr" in text]
    expected = (
        "optimizer: lr is 0.0004 in the first step, and was 0.0048 at the checkpoint: if a schedule or a count of "
        "steps begins anew, give it to attach(stateful=...), or count by diloco.global_step"
    )
    assert texts == [expected] * is_told


@pytest.mark.parametrize("count", [1, 2])
def test_an_optimizer_that_is_given_as_a_part_of_the_loop_too_has_the_rate_of_the_script(
    count: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeDaemon(folder):
        for rate in (0.01, 0.002):
            model = net()
            members = [torch.optim.AdamW(layers.parameters(), lr=rate) for layers in (model[:1], model[1:])]
            members = members if count > 1 else [make(model, lr=rate)]  # type: ignore[list-item]
            stateful = {f"optimizer {number}": member for number, member in enumerate(members)}
            with diloco_node.attach(model, members, stateful=stateful) as diloco:
                assert [member.param_groups[0]["lr"] for member in members] == [rate] * count
                assert sum(len(member.state) for member in members) == (0 if rate == 0.01 else 6)
                for member in members:
                    train(model, member, diloco)
    assert "optimizer: lr is 0.002 as the script sets it, not 0.01 as in the checkpoint" in caplog.messages
    assert "in stateful" not in caplog.text
