"""What a restart brings back of a training loop, and what it names that it does not."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.living_objects import living_objects
from diloco_node.wire.learner_link import Warned
from tests.kit.loop_kit import Averages, Loop, Mean, plain

SCHEDULE = torch.optim.lr_scheduler.StepLR


class Student(nn.Module):
    """A model with a teacher inside, running statistics, and a cache that is no state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("cache", torch.zeros(6), persistent=False)
        self.register_buffer("still", torch.zeros(6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.cache += 1
        return (self.layer(rows) - self.teacher(rows)).square().mean() + self.layer(rows).square().mean()


# ---- random generators -----------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), np.random.randn(), float(torch.rand(()))]


@pytest.mark.no_device("devices in software draw from the host's generator, when their tasks run")
def test_pythons_numpys_and_torchs_generators_go_on(folder: Path) -> None:
    np.random.randn()
    with Loop(folder, plain()) as loop:
        loop.step()
        loop.diloco.checkpoint()
        expected = [draw(), draw()]
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        loop.diloco.close = lambda: loop.diloco._close(None)  # type: ignore[method-assign] # as if it were killed
    with Loop(folder, plain()):
        assert [draw(), draw()] == expected


@pytest.mark.parametrize(
    ("make", "value_of"),
    [
        (lambda: torch.Generator().manual_seed(5), lambda own: float(torch.rand((), generator=own, device="cpu"))),
        (lambda: np.random.default_rng(5), lambda own: own.random()),
        (lambda: np.random.RandomState(5), lambda own: own.rand()),
        (lambda: random.Random(5), lambda own: own.random()),
    ],
)
def test_a_generator_of_the_scripts_own_goes_on_when_it_is_given(
    folder: Path, make: Callable[[], Any], value_of: Callable[[Any], float]
) -> None:
    own = make()
    with Loop(folder, plain(), stateful={"draw": own}) as loop:
        value_of(own)
        loop.step()
    expected = value_of(own)
    own = make()
    with Loop(folder, plain(), stateful={"draw": own}):
        assert value_of(own) == expected


def test_what_can_not_be_kept_is_refused_at_attach(folder: Path) -> None:
    with pytest.raises(LearnerError, match=r"'rows'.*a list has no state_dict\(\)"):
        diloco_node.attach(plain(), stateful={"rows": [1, 2]})  # type: ignore[dict-item]
    with pytest.raises(LearnerError, match=r"'draw'.*a SystemRandom has no state to keep: leave it out"):
        diloco_node.attach(plain(), stateful={"draw": random.SystemRandom()})  # type: ignore[dict-item]


# ---- the model -------------------------------------------------------------------------------------------------------


def move_teacher_by_data(model: Student) -> None:
    model.teacher.weight.data.mul_(0.9).add_(model.layer.weight.data, alpha=0.1)


def move_teacher_in_place(model: Student) -> None:
    with torch.no_grad():
        model.teacher.weight.lerp_(model.layer.weight, 0.1)


def replace_buffer(model: Student) -> None:
    model.mean = model.mean + 1


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (move_teacher_by_data, "frozen parameter 'teacher.weight'"),
        (move_teacher_in_place, "frozen parameter 'teacher.weight'"),
        (replace_buffer, "buffer 'mean'"),
    ],
)
def test_frozen_parameters_and_buffers_that_move_are_named_once(
    folder: Path, move: Callable[[Student], None], text: str
) -> None:
    model = Student()
    with Loop(folder, model) as loop:
        for _ in range(3):
            loop.step()
            move(model)
            warnings = loop.checkpoint()
        assert len(warnings) == 1
        assert warnings[0].startswith(f"no checkpoint keeps {text}: a restart begins")
        assert loop.daemon.wait_for(Warned).text == warnings[0]


def test_what_begins_to_move_later_is_named_then(folder: Path) -> None:
    model = Student()
    with Loop(folder, model) as loop:
        loop.step()
        assert loop.checkpoint() == []
        move_teacher_by_data(model)
        replace_buffer(model)
        (warning,) = loop.checkpoint()
        assert "buffer 'mean'" in warning
        assert "frozen parameter 'teacher.weight'" in warning


def test_a_teacher_that_is_given_comes_back_and_is_not_named(folder: Path) -> None:
    model = Student()
    with Loop(folder, model, stateful={"teacher": model.teacher}) as loop:
        loop.step()
        move_teacher_by_data(model)
        assert loop.checkpoint() == []
        expected = model.teacher.weight.clone()
    model = Student()
    assert not torch.equal(model.teacher.weight, expected)
    with Loop(folder, model, stateful={"teacher": model.teacher}):
        assert torch.equal(model.teacher.weight, expected)


def test_buffers_that_are_merged_are_not_named(folder: Path) -> None:
    model = Student()
    with Loop(folder, model, buffers=["mean"]) as loop:
        loop.step()
        model.mean += 1
        assert loop.checkpoint() == []


# ---- the loop --------------------------------------------------------------------------------------------------------


def teacher_beside(loop: Loop) -> tuple[Any, Callable[[], None]]:
    teacher = copy.deepcopy(loop.model).requires_grad_(False)

    def follow() -> None:
        for mine, other in zip(teacher.parameters(), loop.model.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.5)

    return teacher, follow


def averaged(loop: Loop) -> tuple[Any, Callable[[], None]]:
    model = torch.optim.swa_utils.AveragedModel(loop.model)
    return model, lambda: model.update_parameters(loop.model)


def averages(loop: Loop) -> tuple[Any, Callable[[], None]]:
    shadow = {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}

    def follow() -> None:
        for name, parameter in loop.model.named_parameters():
            shadow[name] = shadow[name] * 0.9 + parameter.detach() * 0.1

    return shadow, follow


class SharpnessAware(torch.optim.Optimizer):
    """Has an optimizer inside, whose state its own does not hold."""

    def __init__(self, parameters: Any) -> None:
        self.base_optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        super().__init__(self.base_optimizer.param_groups, {})


def scaler(_: Loop) -> tuple[Any, Callable[[], None]]:
    return torch.amp.GradScaler("cpu"), lambda: None


def schedule(loop: Loop) -> tuple[Any, Callable[[], None]]:
    return SCHEDULE(loop.optimizer, 3), lambda: None


def data(_: Loop) -> tuple[Any, Callable[[], None]]:
    batches = iter(torch.utils.data.DataLoader(list(range(40))))
    return batches, lambda: next(batches)


def moments(loop: Loop) -> tuple[Any, Callable[[], None]]:
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.01)
    return optimizer, optimizer.step


def numpys(_: Loop) -> tuple[Any, Callable[[], None]]:
    generator = np.random.default_rng(1)
    return generator, lambda: generator.normal(size=2)  # type: ignore[return-value]


def old_numpys(_: Loop) -> tuple[Any, Callable[[], None]]:
    generator = np.random.RandomState(1)
    return generator, generator.rand  # type: ignore[return-value]


def pythons(_: Loop) -> tuple[Any, Callable[[], None]]:
    generator = random.Random(1)
    return generator, generator.random  # type: ignore[return-value]


def torchs_in_a_loader(_: Loop) -> tuple[Any, Callable[[], None]]:
    loader = torch.utils.data.DataLoader(list(range(8)), shuffle=True, generator=torch.Generator().manual_seed(1))
    return loader, lambda: list(loader)  # type: ignore[return-value]


def torchs_in_a_module(_: Loop) -> tuple[Any, Callable[[], None]]:
    noise = nn.Identity()
    noise.own = torch.Generator().manual_seed(1)
    return noise, lambda: torch.rand((), generator=noise.own, device="cpu")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torchs_in_a_loader, "a generator (torch's Generator)"),
        (torchs_in_a_module, "a generator (torch's Generator)"),
        (moments, "the moments of AdamW, which attach() was not given"),
        (numpys, "a generator (numpy's Generator)"),
        (old_numpys, "a generator (numpy's RandomState)"),
        (pythons, "a generator (random's Random)"),
        (teacher_beside, "a Sequential outside of what attach() was given"),
        (averaged, "a AveragedModel outside"),
        (averages, "copies of the parameters, such as averages"),
        (scaler, "a GradScaler"),
        (schedule, "the position of a StepLR"),
        (data, "the position of a DataLoader"),
    ],
)
def test_what_lives_in_the_loop_is_named(
    folder: Path, make: Callable[[Loop], tuple[Any, Callable[[], None]]], text: str
) -> None:
    with Loop(folder, plain()) as loop:
        thing, move = make(loop)
        for _ in range(4):
            loop.step()
            move()
            warnings = loop.checkpoint()
        assert thing is not None
        assert len(warnings) == 1
        assert text in warnings[0]


def test_moments_that_a_wrapper_leaves_out_of_its_state_are_named(folder: Path) -> None:
    model = plain()
    with Loop(folder, model) as loop:
        loop.diloco.close()
        shutil.rmtree(folder / "learner")
        optimizer = SharpnessAware(model.parameters())
        loop.optimizer = optimizer.base_optimizer
        stateful = {"schedule": SCHEDULE(optimizer.base_optimizer, 3)}
        loop.diloco = diloco_node.attach(model, optimizer, stateful=stateful)
        loop.step()
        (warning,) = loop.checkpoint()
        assert "no checkpoint keeps the moments of SGD, which attach() was not given" in warning


class Beside(torch.optim.SGD):
    """Has moments of its own, as optimizers of one file do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.members = [parameter for group in self.param_groups for parameter in group["params"]]
        self.means = [torch.zeros_like(parameter) for parameter in self.members]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for mean, parameter in zip(self.means, self.members, strict=True):
            mean.lerp_(parameter.grad, 0.1)
            parameter.sub_(mean, alpha=0.01)


def test_what_an_optimizer_has_beside_its_state_is_named(folder: Path) -> None:
    model = plain()
    with Loop(folder, model) as loop:
        loop.diloco.close()
        shutil.rmtree(folder / "learner")
        loop.optimizer = Beside(model.parameters())
        loop.diloco = diloco_node.attach(model, loop.optimizer)
        loop.step()
        (warning,) = loop.checkpoint()
        assert "keeps attribute 'means' of Beside, outside of its state_dict(): a restart" in warning


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_schedule_of_earlier_training_is_not_named_until_it_moves(folder: Path, is_moved: bool) -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    earlier = torch.optim.lr_scheduler.ChainedScheduler([SCHEDULE(optimizer, 3)])
    with Loop(folder, model) as loop:
        loop.step()
        if is_moved:
            optimizer.step()
            earlier.step()
        warnings = [text for text in loop.checkpoint() if "the position of a ChainedScheduler" in text]
        assert len(warnings) == is_moved


@pytest.mark.no_device("the copies of a state are on the CPU")
def test_a_merged_state_that_a_trainer_holds_while_it_saves_is_not_named(folder: Path) -> None:
    with Loop(folder, plain()) as loop:
        loop.diloco.save_merged(loop.model)
        held_out = copy.deepcopy(loop.model)
        for _ in range(4):
            loop.step()
            held_out.load_state_dict(loop.diloco.global_state_dict())
            loop.daemon.commit(0, loop.daemon.theta[0] + 1, -1)
            loop.diloco.settle(0.1)
            saved = loop.model.state_dict()
            assert loop.checkpoint() == []
        assert saved


@pytest.mark.no_device("copy.deepcopy of a state: the CPU build has no storages of a device")
def test_copies_that_are_kept_given_or_never_move_are_not_named(folder: Path) -> None:
    model = plain()
    average = Averages(model)
    first = copy.deepcopy(model.state_dict())
    with Loop(folder, model, stateful={"average": average}) as loop:
        for _ in range(4):
            loop.step()
            for value, parameter in zip(average.shadow, model.parameters(), strict=True):
                value.lerp_(parameter.detach(), 0.1)
            merged = loop.diloco.global_state_dict()
            assert loop.checkpoint() == []
        assert first.keys() == merged.keys()


def test_what_is_given_is_not_named(folder: Path) -> None:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    several = torch.optim.lr_scheduler.SequentialLR(optimizer, [SCHEDULE(optimizer, 3), SCHEDULE(optimizer, 5)], [9])
    draws = np.random.default_rng(1)
    given = {"scaler": torch.amp.GradScaler("cpu"), "schedule": several, "draws": draws}
    with Loop(folder, model, stateful=given) as loop:
        still = random.Random(2)
        for _ in range(4):
            draws.random()
            tempfile.mktemp()
            loop.step()
            assert loop.checkpoint() == []
        assert still


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_that_evaluates_the_merged_model_is_not_named_and_one_that_trains_is(
    folder: Path, dtype: torch.dtype
) -> None:
    with Loop(folder, plain()) as loop:
        held_out = copy.deepcopy(loop.model).to(dtype).eval()
        for _ in range(4):
            loop.step()
            with torch.no_grad():
                loop.daemon.theta[0] += 1
                loop.daemon.commit(0, loop.daemon.theta[0], -1)
            loop.diloco.settle(0.1)
            held_out.load_state_dict(loop.diloco.global_state_dict())
            assert loop.checkpoint() == []
        with torch.no_grad():
            next(held_out.parameters()).add_(1)
        for _ in range(4):
            loop.step()
            warnings = loop.checkpoint()
        assert "outside of what attach() was given" in warnings[0]


def test_objects_of_a_class_and_of_those_derived_from_it_are_found_also_without_weak_references() -> None:
    late = type("Late", (Mean,), {})()
    members = [Mean(), late, np.random.default_rng(1), random.Random(1)]
    ids = {id(item) for item in living_objects(Mean, np.random.Generator, random.Random)}
    assert {id(item) for item in members} <= ids
    assert id(members) not in ids


def test_nothing_is_named_that_needs_no_place(folder: Path) -> None:
    """A schedule that asks the run, a scaler that is off, a loader that is done, a module that stays, and garbage."""
    with Loop(folder, plain()) as loop:
        diloco = loop.diloco
        asking = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda _: 1.0 / (1 + diloco.global_step))
        off, loader = torch.amp.GradScaler("cpu", enabled=False), torch.utils.data.DataLoader([1.0, 2.0])
        judge, batches = nn.Linear(3, 3), iter(loader)
        list(batches)
        SCHEDULE(loop.optimizer, 3)
        for _ in range(3):
            loop.step()
            assert loop.checkpoint() == []
        assert asking
        assert off
        assert judge
