"""Settings of optimizers and schedules after a restart: those of the script, at the position of the checkpoint.

Somebody who starts again with another learning rate, decay or schedule means it. So a setting is that of the script,
and each difference is told in a line. Where a schedule has changed a rate, the script's is changed by the same factor.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.optim import lr_scheduler

POSITIONS: Final = frozenset(
    {"last_epoch", "_step_count", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "_schedulers"}
)
"""Where a schedule of torch's is; everything else in its state is a setting."""

_NO_SETTINGS: Final = frozenset(
    {"_last_lr", "base_lrs", "lr_lambdas", "verbose", "_is_initial", "_get_lr_called_within_step"}
)
"""Rates, functions, and what only some versions of torch have; neither position nor setting."""

BEGIN: Final = "initial_lr"
"""The rate of a group that its schedule begins with, as schedules of torch's write it into the group."""

SCHEDULE_KEYS: Final = (BEGIN, "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Settings that schedules of torch's write into a group, and read there."""

ROUNDED: Final = 1e-6
"""A rate that was a tensor of float32 is the same as a number."""

_BY_COUNT: Final = (lr_scheduler.LambdaLR, lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
"""Schedules whose rate follows from the count of their steps, and from nothing else."""

SCALER: Final = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings of a gradient scaler of torch's; its state is empty where it was not enabled."""

_SCRIPT: Final = "diloco: as the script made it"
"""Key of a schedule's settings in a checkpoint."""

MEMBERS: Final = ("params", "param_names")
"""Keys of a group's tensors; everything else in it is a setting or a state."""

log = logging.getLogger("diloco_node.learner")


Changes = dict[str, tuple[Any, Any]]
"""By key of a group of parameters, values that differ: in the checkpoint, in the script."""


def script_settings(group: Mapping[str, Any], findings: Collection[str]) -> dict[str, Any]:
    """Return what a script has set in a group of parameters, as JSON; what is none, or a finding, is left out."""
    plain = {
        key: float(value) if isinstance(value, Tensor) and value.numel() == 1 else without_numpy(value)
        for key, value in group.items()
        if key not in MEMBERS and key not in findings
    }
    return {key: value for key, value in plain.items() if _is_plain(value)}


def without_numpy(value: Any) -> Any:
    """Return a number of numpy's as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def take_settings(
    group: dict[str, Any],
    own_group: Mapping[str, Any],
    settings: Collection[str],
    before: Mapping[str, Any],
    *,
    is_lowered: bool = False,
) -> tuple[Changes, Changes]:
    """Put a script's settings into a group of parameters from a checkpoint.

    Args:
        group: from the checkpoint; changed. own_group: as the script has made it.
        settings: the keys that are settings. Others, such as a count of steps, stay, unless the script has changed
            them: a key of its own, such as a factor of each layer's rate.
        before: as the script had made it in the life of the checkpoint (`script_settings`); empty: nobody knows.
        is_lowered: a kept schedule without a formula (`lowers_rates`) has changed the rate since then.

    Returns: settings that the script has changed; and those that only its loop had changed, and may again.
    """
    changes: Changes = {}
    drifts: Changes = {}
    begins = group.get(BEGIN), own_group.get(BEGIN)
    if None in begins and is_lowered:
        begins = before.get("lr"), own_group.get("lr")
    rates = _schedule_rates(begins, group["lr"]) if "lr" in group else None
    group |= {key: own_group[key] for key in MEMBERS if key in own_group}
    state_keys = (group.keys() | own_group.keys()) - {*settings, *SCHEDULE_KEYS, *MEMBERS}
    changes |= _take_others(group, own_group, before, state_keys)
    for key in [key for key in (*settings, *SCHEDULE_KEYS) if key in group or key in own_group]:
        if key not in own_group:
            del group[key]
            continue
        old, own = group.get(key), own_group[key]
        group[key] = own
        if key == BEGIN or (key == "lr" and rates is not None) or old is None:
            continue
        if not is_same(script := before.get(key, old), own):
            changes[key] = (script, own)
        elif not is_same(old, own):
            drifts[key] = (old, own)
    if rates is not None:
        old_begin, own_begin, lr = rates
        group["lr"] = torch.full_like(group["lr"], lr) if isinstance(group["lr"], Tensor) else lr
        if old_begin != own_begin:
            changes["lr"] = (old_begin, own_begin)
    return changes, drifts


def _take_others(
    group: dict[str, Any], own_group: Mapping[str, Any], before: Mapping[str, Any], keys: Collection[str]
) -> Changes:
    """Take what is a state of the optimizer from the checkpoint, unless the script has set it to something else."""
    changes: Changes = {}
    for key in sorted(keys):
        if key not in own_group:
            if key in before:
                del group[key]
        elif key not in group or (key in before and not is_same(before[key], own_group[key])):
            group[key] = own_group[key]
            if before and _is_plain(group[key]):
                changes[key] = before.get(key, "absent"), group[key]
    return changes


def _schedule_rates(begins: tuple[Any, Any], lr: Any) -> tuple[float, float, float] | None:
    """Return the rates that schedules begin with, in the checkpoint and here, and the rate now; None without any."""
    if None in begins or not float(begins[0]):
        return None
    old_begin, own_begin = map(float, begins)
    return old_begin, own_begin, float(lr) if old_begin == own_begin else float(lr) / old_begin * own_begin


def lowers_rates(component: Any) -> bool:
    """Whether a part of `stateful` lowers a group's rate where it stands, and nothing else says by how much."""
    return isinstance(below_wrapper(component), lr_scheduler.ReduceLROnPlateau)


def below_wrapper(component: Any) -> Any:
    """The schedule that a wrapper, such as Accelerate's, has the state of; of anything else itself."""
    return getattr(component, "scheduler", component)


def schedules_of(components: Iterable[Any]) -> list[lr_scheduler.LRScheduler]:
    """Return torch's schedules among parts of a loop, below wrappers, and inside of each other."""
    schedules: list[lr_scheduler.LRScheduler] = []
    for schedule in map(below_wrapper, components):
        if isinstance(schedule, lr_scheduler.LRScheduler):
            schedules += [schedule, *schedules_of(getattr(schedule, "_schedulers", ()))]
    return schedules


def is_same(old: Any, own: Any) -> bool:
    """Whether a value is the same after it was JSON."""
    if isinstance(old, Tensor) or isinstance(own, Tensor) or (isinstance(old, float) and isinstance(own, float)):
        return old is not None and own is not None and math.isclose(float(old), float(own), rel_tol=ROUNDED)
    return bool((list(old) if isinstance(old, tuple) else old) == (list(own) if isinstance(own, tuple) else own))


def place_schedule(component: Any, state: dict[str, Any], components: Collection[Any] = ()) -> dict[str, Any]:
    """Return the state that `component.load_state_dict` is to be given: its own settings at a checkpoint's position.

    A schedule of torch's with other settings than before is stepped to its position, for most of them compute a rate
    from the one before it: a cosine that has come to zero would stay there, however long it is now.

    component: any, also in a wrapper; one that is no schedule or gradient scaler of torch's gets all of the
        state. state: from the checkpoint. components: of the loop; others may change the same rates.

    Raises ValueError: it has other parts than before, and can't be stepped there.
    """
    if isinstance(component, torch.amp.GradScaler):
        own_state = component.state_dict()
        tell_changes(_changes(state, {key: own_state[key] for key in SCALER if key in own_state}), "gradient scaler")
        return state | {key: value for key, value in own_state.items() if key in SCALER or key not in state}
    if isinstance(component, torch.optim.Optimizer):
        _tell_other_rates(component, state)
        return state
    schedule = below_wrapper(component)
    members = getattr(component, "schedulers", None)
    first = members[0] if isinstance(members, list) and members else None
    if isinstance(first, lr_scheduler.LRScheduler) and _is_of(first, state):  # in torchtitan's list
        return _position(first, state)
    return _at_place(schedule, state, components) if isinstance(schedule, lr_scheduler.LRScheduler) else state


def _tell_other_rates(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Log rates that an optimizer beside the merged model keeps from its checkpoint: the loop may have lowered them.

    A rate with a schedule is the schedule's, which has the script's settings.
    """
    for group, own_group in zip(state.get("param_groups", ()), optimizer.param_groups, strict=False):
        rate, own_rate = group.get("lr"), own_group.get("lr")
        if rate is not None and own_rate is not None and BEGIN not in own_group and not is_same(rate, own_rate):
            text = "%s in stateful: lr is %g as in the checkpoint, not %g as the script makes it: set it after attach"
            log.warning(text, type(optimizer).__name__, float(rate), float(own_rate))


def _is_of(schedule: lr_scheduler.LRScheduler, state: Mapping[str, Any]) -> bool:
    """Whether a state is that of such a schedule, and not of a container with more; of any version of torch."""
    return "last_epoch" in state and state.keys() - _NO_SETTINGS <= schedule.state_dict().keys()


def _at_place(schedule: lr_scheduler.LRScheduler, state: dict[str, Any], components: Collection[Any]) -> dict[str, Any]:
    if type(schedule).__module__ != lr_scheduler.__name__:
        return _position(schedule, state)
    own = schedule.state_dict()
    before, now = _settings(state), _settings(own)
    if before == now:
        return _position(schedule, state)
    tell_changes(_changes(before, now), type(schedule).__name__)
    rivals = [rival for item in components if (rival := below_wrapper(item)) is not schedule]
    is_alone = all(getattr(rival, "optimizer", None) is not schedule.optimizer for rival in rivals)
    if not (is_alone and _has_formula(schedule) and _place_of(own) == 0):
        return _position(schedule, state)
    if (steps := _place_of(state)) < 0:
        log.warning("%s: begun anew, for the checkpoint has another kind of schedule", type(schedule).__name__)
    _step_to(schedule, steps, own["_last_lr"])
    return schedule.state_dict()


def _position(schedule: lr_scheduler.LRScheduler, state: dict[str, Any]) -> dict[str, Any]:
    own = schedule.state_dict()
    if is_own := type(schedule).__module__ != lr_scheduler.__name__:
        position = state | {"base_lrs": own.get("base_lrs", state.get("base_lrs"))}
    else:
        position = own | {key: value for key, value in state.items() if key in POSITIONS}
    members, states = getattr(schedule, "_schedulers", ()), state.get("_schedulers", ())
    if len(members) != len(states):
        raise ValueError(f"a {type(schedule).__name__} of {len(states)} schedules was kept, here it has {len(members)}")
    if members:
        position["_schedulers"] = [_position(*pair) for pair in zip(members, states, strict=True)]
    if "_last_lr" in own and not is_own:
        position["_last_lr"] = [float(group["lr"]) for group in schedule.optimizer.param_groups]
    return position


def _settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a schedule's state a script has set, as JSON; of those inside of it, too."""
    settings: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            members = enumerate(map(_settings, value))
            settings |= {f"{name} of part {at}": own for at, member in members for name, own in member.items()}
        elif key not in POSITIONS | _NO_SETTINGS:
            settings[key.lstrip("_")] = json.loads(json.dumps(value, default=lambda _: None))
    return settings


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Return the settings that differ, but for what torch makes of them."""
    return {
        key: (before[key], value)
        for key, value in now.items()
        if key in before and before[key] != value and key != "schedule_phases"
    }


def _has_formula(schedule: Any) -> bool:
    """Whether it is torch's, and nothing else than the count of its steps says where it is."""
    is_torchs = type(schedule).__module__ == lr_scheduler.__name__ and not lowers_rates(schedule)
    return is_torchs and all(map(_has_formula, getattr(schedule, "_schedulers", ())))


def _place_of(state: Mapping[str, Any]) -> int:
    """Return the count of a schedule's steps, -1 if it has none; a chained one has only those of its parts."""
    members = state.get("_schedulers", ())
    return int(state["last_epoch"]) if "last_epoch" in state else max(map(_place_of, members), default=-1)


def _step_to(schedule: lr_scheduler.LRScheduler, steps: int, rates: Sequence[Any]) -> None:
    """Step a schedule that stands where it begins, with these rates."""
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps without the optimizer's
        _advance(schedule, steps)


def _advance(schedule: Any, steps: int) -> None:
    """Step a schedule that stands at its beginning; by its formula where it has one, for a million steps take long."""
    if steps <= 0:
        return
    # With no length at all such a formula divides by zero, or has another rate than the steps.
    has_formula = hasattr(schedule, "_get_closed_form_lr") and getattr(schedule, "total_iters", 1) != 0
    if isinstance(schedule, lr_scheduler.SequentialLR):
        stages = zip(schedule._schedulers, [0, *schedule._milestones], [*schedule._milestones, steps + 1], strict=True)
        for member, begin, end in stages:
            if begin <= steps and begin < end:
                if begin:
                    member.step(0)
                _advance(member, min(steps, end - 1) - begin)
                schedule._last_lr = member.get_last_lr()
        schedule.last_epoch = steps
    elif has_formula or isinstance(schedule, _BY_COUNT):
        schedule.step(steps)
        schedule._step_count = steps + 1
    else:
        for _ in range(steps):
            schedule.step()


def tell_changes(changes: Changes, label: str = "optimizer") -> None:
    """Log what differs from the checkpoint, a line each."""
    for key, (old, new) in changes.items():
        own = f"{float(new):g}" if isinstance(new, Tensor) else new
        log.warning("%s: %s is %s as the script sets it, not %s as in the checkpoint", label, key, own, old)


class KeptSchedule:
    """A schedule that is not torch's, or has such inside, as a part of `stateful`: which of its state are settings?

    A value that the script makes otherwise than it did for the schedule of the checkpoint is one, unless it has moved
    since: then it is a position.
    """

    def __init__(self, component: Any) -> None:
        self.scheduler = below_wrapper(component)
        self._component = component
        self._members = [as_schedule(member) for member in getattr(self.scheduler, "_schedulers", ())]
        self._script: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a checkpoint tells of it
            state = {key: value for key, value in component.state_dict().items() if not isinstance(value, Tensor)}
            self._script = json.loads(json.dumps(script_settings(state, {*POSITIONS, "_last_lr"})))

    def state_dict(self) -> Any:
        """Its state, and what of it is as the script had made it. A state that is no mapping is left as it is."""
        state = self._component.state_dict()
        if not isinstance(state, Mapping):
            return state
        members = {"_schedulers": [member.state_dict() for member in self._members]} if self._members else {}
        still = {key: value for key, value in self._script.items() if key in state and is_same(value, state[key])}
        return {**state, **members, _SCRIPT: still}

    def load_state_dict(self, state: Any) -> None:
        """Take what `state_dict` gave, but for settings that the script has changed since, which are told."""
        self._component.load_state_dict(self._placed(state))

    def _placed(self, state: Any) -> Any:
        if not isinstance(state, Mapping):
            return state
        state = dict(state)
        before, own = state.pop(_SCRIPT, {}), self._component.state_dict()
        changes = {
            key: (before[key], own[key])
            for key, value in self._script.items()
            if key in before and not is_same(before[key], value)
        }
        tell_changes(changes, type(self.scheduler).__name__)
        if self._members:
            pairs = zip(self._members, state["_schedulers"], strict=True)
            state["_schedulers"] = [
                member._placed(values) if isinstance(member, KeptSchedule) else values for member, values in pairs
            ]
        return state | {key: value for key, (_, value) in changes.items()}


def as_schedule(component: Any) -> Any:
    """Return a part of `stateful`, as a `KeptSchedule` if it is a schedule that is not torch's, or has such inside."""
    schedule = below_wrapper(component)
    is_own = any(type(item).__module__ != lr_scheduler.__name__ for item in schedules_of([schedule]))
    strangers = lr_scheduler.LRScheduler | torch.optim.Optimizer | torch.nn.Module
    if isinstance(getattr(schedule, "optimizer", None), torch.optim.Optimizer) and not isinstance(schedule, strangers):
        # A trainer, or an application's state, has an optimizer, too.
        is_own = callable(getattr(schedule, "step", None)) and not hasattr(schedule, "model")
    return KeptSchedule(component) if is_own else component
