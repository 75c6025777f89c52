"""Schedules of the script's own inside of others: settings are the script's after a restart, positions the
checkpoint's."""

from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer, lr_scheduler

from diloco_node.learner.schedules import KeptSchedule, as_schedule
from tests.learner.test_schedules import WarmUp, Wrapper, adamw, rates, restart


class OwnSequence(lr_scheduler.SequentialLR):
    """A container of the script's own."""


def sequence(optimizer: Optimizer, total: int) -> Any:
    members: list[Any] = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3), WarmUp(optimizer, total)]
    return lr_scheduler.SequentialLR(optimizer, members, milestones=[3])


def wrapped(optimizer: Optimizer, total: int) -> Any:
    return Wrapper(sequence(optimizer, total))


def nested(optimizer: Optimizer, total: int) -> Any:
    members: list[Any] = [sequence(optimizer, total), lr_scheduler.ConstantLR(optimizer, 1.0)]
    return lr_scheduler.SequentialLR(optimizer, members, milestones=[100])


def chained(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.ChainedScheduler([WarmUp(optimizer, total)])


def own(optimizer: Optimizer, total: int) -> Any:
    members: list[Any] = [lr_scheduler.ConstantLR(optimizer, 1.0), lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)]
    return OwnSequence(optimizer, members, milestones=[3])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # torch's own, of what is nested
@pytest.mark.parametrize("build", [sequence, wrapped, nested, chained, own])
@pytest.mark.parametrize(("peak", "total"), [(1e-3, 20), (1e-3, 40), (3e-4, 40)])
def test_a_part_has_the_settings_that_the_script_has_changed_and_the_position_of_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Any, peak: float, total: int
) -> None:
    old, new = adamw(1, lr=1e-3), adamw(lr=peak)
    old_schedule, new_schedule = as_schedule(build(old, 20)), as_schedule(build(new, total))
    rates(old, getattr(old_schedule, "_component", old_schedule), 6)
    restart(tmp_path, old, new, schedule=(old_schedule, new_schedule))
    untouched = adamw(lr=peak)
    expected = rates(untouched, build(untouched, total), 8)
    assert isinstance(new_schedule, KeptSchedule)
    if build is own:  # a rate that follows from the one before, as torch's do, keeps what was
        assert new_schedule.scheduler._schedulers[1].total_iters == total
        assert new_schedule.scheduler._schedulers[1].last_epoch == old_schedule.scheduler._schedulers[1].last_epoch > 0
        return
    assert rates(new, new_schedule._component, 2) == pytest.approx(expected[6:])
    text = "WarmUp: total is 40 as the script sets it, not 20 as in the checkpoint"
    assert (text in caplog.text) == (total == 40 and build is not own)


def test_schedules_of_torchs_alone_stay_what_they_are() -> None:
    optimizer = adamw()
    schedule = lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ConstantLR(optimizer)], milestones=[2]
    )
    assert as_schedule(schedule) is schedule
