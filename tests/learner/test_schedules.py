"""Settings are the script's after a restart, positions the checkpoint's."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from diloco_node.learner.checkpoint import CheckpointWriter, TrainingProgress
from diloco_node.learner.checkpointing import Checkpointing
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.optimizer_parts import OptimizerParts
from diloco_node.learner.schedules import KeptSchedule, as_schedule, place_schedule
from tests.kit.learner_kit import read_newest

PROGRESS = TrainingProgress("model", incarnation=1, global_step=12, step=12, tokens=9)


def restart(folder: Path, old: Any, new: Any, *, parts: Any = None, new_parts: Any = None, **stateful: Any) -> None:
    """Keep what `old` has, as JSON and tensors, and give it to what a new script has made."""
    writer = CheckpointWriter(folder)
    states = {name: pair[0] for name, pair in stateful.items()}
    writer.save(PROGRESS, parts or OptimizerParts(old), states, is_waiting=True)
    writer.wait()
    checkpoint = read_newest(folder, "model")
    assert checkpoint is not None
    states = {name: pair[1] for name, pair in stateful.items()}
    checkpoint.restore(new_parts or OptimizerParts(new), states, rng=False)


def adamw(steps: int = 0, **settings: Any) -> torch.optim.AdamW:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [("lr", 1e-3, 3e-4), ("weight_decay", 0.01, 0.1), ("betas", (0.9, 0.999), (0.9, 0.95)), ("eps", 1e-8, 1e-6)],
)
def test_a_setting_that_the_script_changed_wins_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, before: Any, after: Any
) -> None:
    old, new = adamw(3, **{key: before}), adamw(**{key: after})
    with caplog.at_level(logging.WARNING):
        restart(tmp_path, old, new)
    assert new.param_groups[0][key] == after
    assert f"optimizer: {key} is {after} as the script sets it" in caplog.text
    (weight, *_), (old_weight, *_) = new.param_groups[0]["params"], old.param_groups[0]["params"]
    assert torch.equal(new.state[weight]["exp_avg"], old.state[old_weight]["exp_avg"])
    assert float(new.state[weight]["step"]) == 3.0


def test_settings_of_several_groups_are_told_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(*lrs: float) -> torch.optim.AdamW:
        layers = [nn.Linear(2, 2) for _ in lrs]
        return torch.optim.AdamW(
            [{"params": [*layer.parameters()], "lr": lr} for layer, lr in zip(layers, lrs, strict=True)]
        )

    with caplog.at_level(logging.WARNING):
        restart(tmp_path, build(0.1, 0.2, 0.1), build(0.3, 0.4, 0.3))
    messages = [record.message.partition(" as the")[0] for record in caplog.records]
    assert messages == ["optimizer: lr is 0.3", "optimizer: lr of group 1 is 0.4"]


def test_equal_settings_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        restart(tmp_path, adamw(3, betas=(0.9, 0.95)), adamw(betas=(0.9, 0.95)))
    assert "as the script sets it" not in caplog.text


@pytest.mark.parametrize(
    ("decayed", "moved", "text"),
    [
        (1e-4, 5e-4, ""),
        (1e-4, 1e-3, "lr is 0.001 as the script sets it, not 0.0001 as in the checkpoint"),
        (1e-3, 1e-3, ""),
    ],
)
def test_what_the_loop_alone_changes_is_told_where_it_does_not_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, decayed: float, moved: float, text: str
) -> None:
    old, new = adamw(3), adamw()
    parts = OptimizerParts(old)
    old.param_groups[0]["lr"] = decayed
    writer = CheckpointWriter(tmp_path)
    writer.save(PROGRESS, parts, {}, is_waiting=True)
    writer.wait()
    checkpoint = read_newest(tmp_path, "model")
    assert checkpoint is not None
    parts = OptimizerParts(new)
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(parts, {}, rng=False)
        assert caplog.text == "", "a loop may set its rate at each step"
        new.param_groups[0]["lr"] = moved
        parts.tell_drifts()
        parts.tell_drifts()
    assert [record.message for record in caplog.records] == ([f"optimizer: {text}"] if text else [])


@pytest.mark.parametrize(
    ("kind", "setting", "key"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (torch.optim.Adam, {"amsgrad": True, "foreach": False}, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {"centered": True}, "grad_avg"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "momentum_buffer"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_a_state_that_the_script_asks_for_since_begins_as_at_a_first_step(
    tmp_path: Path, kind: Any, setting: dict[str, Any], key: str
) -> None:
    def build(steps: int, **settings: Any) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer: torch.optim.Optimizer = kind([{"params": model.weight}, {"params": model.bias}], lr=0.1, **settings)
        train(optimizer, steps)
        return optimizer

    def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["params"][0].grad = torch.ones_like(group["params"][0])
            optimizer.step()

    old, new = build(3), build(0, **setting)
    restart(tmp_path, old, new)
    train(new, 1)
    for values in new.state.values():
        assert float(values[key].abs().max()) > 0.0
        step = values.get("step", 4.0)
        assert float(step) == 4.0, "the other states go on"


def test_a_count_that_an_optimizer_keeps_in_its_groups_is_no_setting(tmp_path: Path) -> None:
    old, new = adamw(1), adamw()
    old.param_groups[0]["k"] = new.param_groups[0]["k"] = 0
    parts = OptimizerParts(old)
    old.param_groups[0]["k"] = 7
    restart(tmp_path, old, new, parts=parts)
    assert new.param_groups[0]["k"] == 7


def grouped(*, order: tuple[int, ...] = (0, 1), factor: float = 0.5, steps: int = 0) -> tuple[nn.Module, Any]:
    """An optimizer with a group for matrices and another for biases, or a single one, and what it trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [
        {"params": [layer.weight for layer in model], "lr": 1e-2, "factor": factor},
        {"params": [layer.bias for layer in model], "lr": 1e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([groups[at] for at in order] if order else model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def restart_grouped(folder: Path, old: tuple[nn.Module, Any], new: tuple[nn.Module, Any], **stateful: Any) -> None:
    """As `restart`, where the parameters have names."""
    parts, new_parts = (OptimizerParts(optimizer, ModelTensors(model)) for model, optimizer in (old, new))
    restart(folder, old[1], new[1], parts=parts, new_parts=new_parts, **stateful)
    pairs = zip(old[0].parameters(), new[0].parameters(), strict=True)
    assert all(torch.equal(old[1].state[a]["exp_avg"], new[1].state[b]["exp_avg"]) for a, b in pairs)


def told(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {record.message for record in caplog.records if record.message.startswith("optimizer: ")}


def test_groups_in_another_order_are_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = grouped(steps=3), grouped(order=(1, 0))
    schedules = [
        lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.5**step][::turn])
        for (_, optimizer), turn in ((old, 1), (new, -1))
    ]
    rates(old[1], schedules[0], 2)
    with caplog.at_level(logging.WARNING):
        restart_grouped(tmp_path, old, new, schedule=schedules)
    assert [group["lr"] for group in new[1].param_groups] == pytest.approx([2.5e-4, 1e-2])
    assert told(caplog) == set()


@pytest.mark.parametrize("is_split", [True, False])
def test_groups_that_were_split_or_joined_have_the_scripts_settings_and_all_moments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_split: bool
) -> None:
    orders: list[tuple[int, ...]] = [(), (0, 1)] if is_split else [(0, 1), ()]
    old, new = grouped(order=orders[0], steps=3), grouped(order=orders[1])
    with caplog.at_level(logging.WARNING):
        restart_grouped(tmp_path, old, new)
    now = [(group["lr"], group["weight_decay"], group.get("factor")) for group in new[1].param_groups]
    assert now == ([(1e-2, 0.01, 0.5), (1e-3, 0.0, None)] if is_split else [(1e-3, 0.01, None)])
    assert "optimizer: lr is " in caplog.text


def test_a_key_of_the_scripts_own_in_a_group_is_the_scripts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = grouped(steps=3), grouped(factor=0.7)
    with caplog.at_level(logging.WARNING):
        restart_grouped(tmp_path, old, new)
    assert new[1].param_groups[0]["factor"] == 0.7
    assert told(caplog) == {"optimizer: factor is 0.7 as the script sets it, not 0.5 as in the checkpoint"}


class Adapting(torch.optim.SGD):
    """Finds out its step size, and keeps it in its group beside what the script sets, as Prodigy does."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6, growth: float = math.inf) -> None:
        super().__init__(params, lr=lr)
        self.defaults |= {"d0": d0, "d": d0, "k": 0, "growth": growth}
        for group in self.param_groups:
            group |= {"d0": d0, "d": d0, "k": 0, "growth": growth}


@pytest.mark.parametrize("rate", [torch.tensor(1e-3), torch.tensor(5e-4)])
def test_a_rate_that_became_a_tensor_is_told_where_it_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rate: torch.Tensor
) -> None:
    new = adamw(lr=rate, foreach=False)
    with caplog.at_level(logging.WARNING):
        restart(tmp_path, adamw(3, lr=1e-3), new)
    assert new.param_groups[0]["lr"] is rate
    is_other = float(rate) < 1e-3
    expected = {"optimizer: lr is 0.0005 as the script sets it, not 0.001 as in the checkpoint"} if is_other else set()
    assert {message for message in told(caplog) if ": lr " in message} == expected


def test_what_an_optimizer_has_found_out_is_no_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(lr: float) -> Adapting:
        return Adapting(nn.Linear(3, 2).parameters(), lr=lr)

    old, new = build(1.0), build(0.5)
    old.param_groups[0] |= {"d": 3e-4, "k": 70}
    with caplog.at_level(logging.WARNING):
        restart(tmp_path, old, new)
    assert {key: new.param_groups[0][key] for key in ("lr", "d", "k", "d0")} == {
        "lr": 0.5,
        "d": 3e-4,
        "k": 70,
        "d0": 1e-6,
    }
    assert new.param_groups[0]["growth"] == old.param_groups[0]["growth"] == math.inf
    assert [record.message.partition(" as the")[0] for record in caplog.records] == ["optimizer: lr is 0.5"]


def test_an_optimizer_that_takes_any_setting_has_those_of_the_script(tmp_path: Path) -> None:
    class Open(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=options.pop("lr"))
            self.defaults |= options
            self.param_groups[0] |= options

    old, new = (Open(nn.Linear(3, 2).parameters(), lr=0.1, warmth=warmth) for warmth in (1, 2))
    restart(tmp_path, old, new)
    assert new.param_groups[0]["warmth"] == 2


SCHEDULES = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "warm-up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
        ],
        milestones=[4],
    ),
}


SCHEDULES |= {
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 10 * begin_of(optimizer), total_steps=30),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, begin_of(optimizer), 4 * begin_of(optimizer), step_size_up=3, cycle_momentum=False
    ),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=5, T_mult=2),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5, 9], gamma=0.5),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, total_iters=20, power=2.0),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        ]
    ),
}


def begin_of(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])


def rates(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("peak", [1e-3, 3e-4])
def test_a_schedule_goes_on_where_it_was_at_the_scripts_rate(tmp_path: Path, kind: str, peak: float) -> None:
    old = adamw(1, lr=1e-3)
    old_schedule = SCHEDULES[kind](old)
    rates(old, old_schedule, 6)
    new = adamw(lr=peak)
    new_schedule = SCHEDULES[kind](new)
    restart(tmp_path, old, new, schedule=(old_schedule, new_schedule))
    untouched = adamw(lr=peak)
    expected = rates(untouched, SCHEDULES[kind](untouched), 12)
    assert new.param_groups[0]["lr"] == pytest.approx(expected[5])
    assert rates(new, new_schedule, 6) == pytest.approx(expected[6:])


@pytest.mark.parametrize("peak", [1e-3, 3e-4])
def test_a_rate_that_was_lowered_on_a_plateau_stays_low_at_the_scripts_rate(tmp_path: Path, peak: float) -> None:
    old = adamw(1, lr=1e-3)
    parts = OptimizerParts(old)  # as the script had made it
    plateaus = [lr_scheduler.ReduceLROnPlateau(old, factor=0.1, patience=2)]
    for _ in range(6):
        plateaus[0].step(1.0)
    assert old.param_groups[0]["lr"] == pytest.approx(1e-4)
    new = adamw(lr=peak)
    plateaus.append(lr_scheduler.ReduceLROnPlateau(new, factor=0.1, patience=2))
    writer = CheckpointWriter(tmp_path)
    writer.save(PROGRESS, parts, {"plateau": plateaus[0]}, is_waiting=True)
    writer.wait()
    checkpoint = read_newest(tmp_path, "model")
    assert checkpoint is not None
    checkpoint.restore(OptimizerParts(new), {"plateau": plateaus[1]}, rng=False)
    assert new.param_groups[0]["lr"] == pytest.approx(peak / 10)
    assert plateaus[1].num_bad_epochs == plateaus[0].num_bad_epochs == 2
    plateaus[1].step(1.0)
    assert new.param_groups[0]["lr"] == pytest.approx(peak / 100)


def test_a_schedule_that_the_script_changed_is_the_scripts(tmp_path: Path) -> None:
    old = adamw(1)
    old_schedule = lr_scheduler.StepLR(old, step_size=100, gamma=0.5)
    rates(old, old_schedule, 5)
    new = adamw()
    new_schedule = lr_scheduler.StepLR(new, step_size=6, gamma=0.1)
    restart(tmp_path, old, new, schedule=(old_schedule, new_schedule))
    assert rates(new, new_schedule, 1) == pytest.approx([1e-4])


class Wrapper:
    """A schedule as Accelerate wraps it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)

    def step(self) -> None:
        self.scheduler.step()


def test_a_wrapped_schedule_is_the_scripts_too(tmp_path: Path) -> None:
    old, new = adamw(1, lr=1e-3), adamw(lr=3e-4)
    old_schedule, new_schedule = Wrapper(SCHEDULES["cosine"](old)), Wrapper(SCHEDULES["cosine"](new))
    rates(old, old_schedule, 6)
    restart(tmp_path, old, new, schedule=(old_schedule, new_schedule))
    untouched = adamw(lr=3e-4)
    assert rates(new, new_schedule, 6) == pytest.approx(rates(untouched, SCHEDULES["cosine"](untouched), 12)[6:])


class WarmUp(lr_scheduler.LRScheduler):
    """A schedule of the script's own."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int, warmup: tuple[int, ...] = (2, 3)) -> None:
        self.total, self.warmup = total, warmup
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [float(rate) * (1 - self.last_epoch / self.total) for rate in self.base_lrs]


class Updates:
    """A schedule as timm has them: of no class of torch's, with rates of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int) -> None:
        self.optimizer, self.total, self.count = optimizer, total, 0
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.metric = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def step(self) -> None:
        self.count += 1
        self.metric = self.metric + torch.rand(())
        for group, value in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = value * (1 - self.count / self.total)


@pytest.mark.parametrize("kind", [WarmUp, Updates, lambda *arguments: Wrapper(WarmUp(*arguments))])
def test_a_schedule_that_is_not_torchs_has_the_settings_that_the_script_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    def begin(rate: float, total: int, steps: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = adamw(steps, lr=rate)
        return optimizer, Checkpointing(optimizer, {"it": kind(optimizer, total)}, every_s=9.0).stateful["it"]

    for number, (rate, total) in enumerate([(1e-3, 20), (1e-3, 40), (3e-4, 40)]):
        (old, old_schedule), (new, new_schedule) = begin(1e-3, 20, 1), begin(rate, total, 0)
        rates(old, old_schedule._component, 5)
        caplog.clear()
        restart(tmp_path / str(number), old, new, schedule=(old_schedule, new_schedule))
        assert rates(new, new_schedule._component, 1) == pytest.approx([rate * (1 - 6 / total)])
        name = type(new_schedule.scheduler).__name__
        assert (f"{name}: total is 40 as the script sets it, not 20 as in the checkpoint" in caplog.text) == (
            number > 0
        )
        assert ("is [0.0003] as the script sets it, not [0.001]" in caplog.text) == (number == 2)
        assert len([record for record in caplog.records if record.message.startswith(name)]) == number


def test_a_schedule_of_more_parts_than_before_is_named_where_it_has_no_formula() -> None:
    def build(*kinds: Any) -> Any:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        return lr_scheduler.ChainedScheduler([kind(optimizer, 20) for kind in kinds])

    own, kept = build(WarmUp, WarmUp), build(WarmUp)
    with pytest.raises(ValueError, match="a ChainedScheduler of 1 schedules was kept, here it has 2"):
        place_schedule(own, kept.state_dict())


def test_what_is_no_schedule_gets_all_of_its_state() -> None:
    state = {"position": 3, "base_lrs": [1.0]}
    assert place_schedule(object(), state) == state


def test_what_has_moved_since_the_script_made_it_is_a_position_though_a_second_attach_begins_there() -> None:
    """A second attach in one process, or a file of the script's that it loads first."""
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    schedule = Updates(optimizer, 1000)
    for steps in (100, 50):
        kept = as_schedule(schedule)
        for _ in range(steps):
            schedule.step()
    state = kept.state_dict()
    later = as_schedule(Updates(optimizer, 2000))
    later.load_state_dict(state)
    assert (later.scheduler.count, later.scheduler.total) == (150, 2000)


class Several:
    """Schedules in a list, of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.states = optimizer, [1, 2]

    def step(self) -> None:
        """As a schedule has it."""

    def state_dict(self) -> list[int]:
        return self.states

    def load_state_dict(self, state: list[int]) -> None:
        self.states = state


def test_a_schedule_whose_state_is_a_list_is_kept_as_it_is() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    first, later = as_schedule(Several(optimizer)), as_schedule(Several(optimizer))
    assert isinstance(first, KeptSchedule)
    first._component.states = [3, 4]
    later.load_state_dict(first.state_dict())
    assert later._component.states == [3, 4]


def test_a_trainer_with_an_optimizer_is_no_schedule() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=1.0)
    state = Several(optimizer)
    state.model = nn.Linear(1, 1)  # type: ignore[attr-defined]
    assert as_schedule(state) is state
    assert as_schedule(optimizer) is optimizer
