"""What else lives in the process of a loop, in any state: no look at it ends a learner or names what is gone."""

import gc
import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from tests.kit.loop_kit import Loop, plain


@pytest.mark.no_device("there it would be a wait, so such copies are named")
def test_copies_that_nobody_has_any_more_are_not_named(folder: Path) -> None:
    """They are in circles, as those of compiled models, until Python looks for such."""
    gc.disable()
    try:
        with Loop(folder, plain()) as loop:
            for _ in range(4):
                circle: list[Any] = [parameter.detach().clone() for parameter in loop.model.parameters()]
                circle.append(circle)
                del circle
                loop.step()
                assert not loop.checkpoint()
    finally:
        gc.enable()


class Unhashable(nn.Linear):
    """As a dataclass that compares its fields."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class Broken(torch.optim.SGD):
    @property
    def state(self) -> Any:  # type: ignore[override]
        raise ZeroDivisionError


HALF_BUILT = (
    *(random.Random, random.SystemRandom, np.random.RandomState, np.random.Generator),
    *(
        nn.Linear,
        torch.optim.AdamW,
        torch.amp.GradScaler,
        StepLR,
        torch.utils.data.DataLoader,
        _SingleProcessDataLoaderIter,
    ),
)


@pytest.mark.parametrize("kind", HALF_BUILT, ids=lambda kind: kind.__name__)
def test_what_a_thread_or_an_error_left_half_built_ends_no_learner(folder: Path, kind: type) -> None:
    objects = [kind.__new__(kind)]
    with Loop(folder, plain()) as loop:
        objects.append(kind.__new__(kind))
        for _ in range(2):
            loop.step()
            assert not loop.checkpoint()
    assert len(objects) == 2


def test_objects_that_fail_at_a_look_end_no_learner(folder: Path) -> None:
    objects = [Unhashable(2, 2), Broken.__new__(Broken)]
    with Loop(folder, plain()) as loop:
        loop.step()
        assert not loop.checkpoint()
    assert len(objects) == 2


def test_a_module_whose_memory_is_gone_ends_no_learner(folder: Path) -> None:
    with Loop(folder, plain()) as loop:
        beside = nn.Linear(3, 3)
        loop.step()
        assert not loop.checkpoint()
        beside.weight.data.untyped_storage().resize_(0)  # as a sharded module's between its steps
        loop.step()
        assert not loop.checkpoint()


@pytest.mark.parametrize("is_saved", [True, False])
def test_an_average_that_was_begun_with_merged_parameters_is_named(folder: Path, is_saved: bool) -> None:
    with Loop(folder, plain()) as loop:
        loop.diloco.save_merged(loop.model)
        merged = loop.model.state_dict if is_saved else loop.diloco.global_state_dict
        average = merged()
        for _ in range(4):
            loop.step()
            loop.daemon.commit(0, loop.daemon.theta[0] + 0.01, -1)
            loop.diloco.settle(0.1)
            for name, value in merged().items():
                average[name].lerp_(value, 0.1)
            warnings = loop.checkpoint()
        assert len(warnings) == 1
        assert "copies of the parameters, such as averages" in warnings[0]


class Mine:
    """Holds what a script has; module globals and frames of functions do as well."""

    teacher: nn.Module


def test_what_a_script_has_frozen_for_the_garbage_collector_is_named(folder: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    Mine.teacher = nn.Linear(3, 3)
    beside = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = StepLR(beside, 1)
    gc.collect()
    gc.freeze()
    try:
        with Loop(folder, plain()) as loop:
            for _ in range(4):
                loop.step()
                beside.step()
                schedule.step()
                with torch.no_grad():
                    Mine.teacher.weight.add_(0.1)
                warnings = loop.checkpoint()
        text = "".join(warnings)
        for name in ("a GradScaler", "the position of a StepLR", "a Linear outside of what attach() was given"):
            assert name in text
        assert scaler.is_enabled()
    finally:
        gc.unfreeze()
        del Mine.teacher


def test_names_of_semaphores_are_no_draw_of_the_loop(folder: Path) -> None:
    """A data loader with workers makes some in each epoch."""
    with Loop(folder, plain()) as loop:
        for _ in range(4):
            multiprocessing.get_context("spawn").Lock()
            loop.step()
            assert loop.checkpoint() == []


def test_a_frozen_weight_that_adapters_were_merged_into_and_out_of_is_not_named(folder: Path) -> None:
    model = plain()
    bias = model.get_parameter("0.bias").requires_grad_(False)
    with Loop(folder, model) as loop:
        for _ in range(4):
            loop.step()
            with torch.no_grad():
                bias.add_(0.1).sub_(0.1)
            assert loop.checkpoint() == []
        with torch.no_grad():
            bias.mul_(1.01)
        for _ in range(4):
            loop.step()
            warnings = loop.checkpoint()
        assert "no checkpoint keeps frozen parameter '0.bias'" in warnings[0]
