"""The optimizers that a loop gives to `attach`: several as one, and those whose state can't be kept refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from diloco_node.errors import LearnerError

REFUSALS: Final = {
    "ZeroRedundancyOptimizer": (
        "attach() can't keep the state of a ZeroRedundancyOptimizer, for each rank has a part of it that only a "
        "collective brings together. Shard the model with fully_shard (FSDP2) and give a plain optimizer, or give "
        "attach none: then the moments begin anew after a restart"
    ),
    "LBFGS": (
        "LBFGS can't train in a run: it takes the curvature from the ways and gradients between its own steps, and a "
        "merge in between makes them wrong; so it goes back to where it was. Use an optimizer whose steps take one "
        "gradient each, such as AdamW"
    ),
    "PostLocalSGDOptimizer": (
        "a PostLocalSGDOptimizer can't train in a run: it lets the ranks of this region come apart, and a merge takes "
        "the work of one. That is what the run does between regions: add up the gradients here, or make each rank a "
        "region"
    ),
    **dict.fromkeys(
        ("MADGRAD", "DAdaptAdaGrad"),
        "this optimizer takes each step from the parameters that it began with: it would take back each merge within "
        "some steps, and nothing would show it. Use one that steps from where it is, such as AdamW or Prodigy",
    ),
}
"""By name of the class: none is imported for it."""

OptimizerArgument = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def as_one(optimizers: OptimizerArgument) -> torch.optim.Optimizer | None:
    """Join what a checkpoint keeps as one optimizer.

    optimizers: one, several, or none; wrappers such as Accelerate's are looked into.

    Raises LearnerError: one of them is no optimizer, or of a kind in `REFUSALS`.
    """
    single: list[Any] = [] if optimizers is None else [optimizers]
    members = list(optimizers) if isinstance(optimizers, list | tuple) else single
    for member in members:
        if not isinstance(member, torch.optim.Optimizer):
            raise LearnerError(
                f"attach() was given a {type(member).__name__} as its optimizer: give one of torch.optim, or a list of "
                "them"
            )
        check_kind(member)
    return SeveralOptimizers(members) if len(members) > 1 else members[0] if members else None


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raise LearnerError: a run can't go together with an optimizer of this kind, or with one inside of it."""
    names = [kind.__name__ for inner in _inside(optimizer) for kind in type(inner).__mro__]
    if refusal := next((REFUSALS[name] for name in names if name in REFUSALS), ""):
        raise LearnerError(refusal)


def _inside(optimizer: Any) -> Iterator[Any]:
    """The optimizer, and those that it wraps."""
    while isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The class of the optimizer that keeps the state, below wrappers; of several all, in their order."""
    return ", ".join(type(inner).__name__ for inner in inner_of(optimizer))


def inner_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers below wrappers, one or several."""
    members = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
    return [[*_inside(member)][-1] for member in members]


def scaler_of(optimizer: torch.optim.Optimizer | None) -> torch.amp.GradScaler | None:
    """Return the gradient scaler that a wrapper such as Accelerate's steps with; None if there is none in use."""
    members = optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
    scalers = (getattr(member, "scaler", None) for member in members)
    return next((item for item in scalers if isinstance(item, torch.amp.GradScaler) and item.is_enabled()), None)


def settings_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Names of what a script sets in a group of parameters, such as `lr`: the arguments of the optimizer's class.

    Other defaults, such as the step size that Prodigy finds out by itself, are state.
    """
    names: set[str] = set()
    for inner in inner_of(optimizer):
        kinds = [kind for kind in type(inner).__mro__ if issubclass(kind, torch.optim.Optimizer)]
        arguments = [value for kind in kinds for value in inspect.signature(kind.__init__).parameters.values()]
        takes_any = any(value.kind is value.VAR_KEYWORD for value in arguments)
        names |= {key for key in inner.defaults if takes_any or key in {value.name for value in arguments}}
    return frozenset(names)


def findings_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Names of the other defaults: what it finds out by itself."""
    return frozenset(key for inner in inner_of(optimizer) for key in inner.defaults) - settings_of(optimizer)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors in the optimizer's groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict`. Groups stay the objects that they are, and so do tensors in them: a script may hold them."""
    handles = [
        inner.register_load_state_dict_post_hook(partial(_keep_groups, inner.param_groups, [*inner.param_groups]))
        for inner in inner_of(optimizer)
        if hasattr(inner, "_optimizer_load_state_dict_post_hooks")
    ]
    try:
        optimizer.load_state_dict(state)
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _keep_groups(groups: list[dict[str, Any]], members: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Move what was loaded into the groups from before."""
    for group, source in zip(members, optimizer.param_groups, strict=True):
        for key, value in source.items():
            own = group.get(key)
            if isinstance(own, Tensor) and isinstance(value, Tensor) and own.shape == value.shape:
                own.copy_(value)
            else:
                group[key] = value
    groups[:] = members
    optimizer.param_groups = groups


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers as one for a checkpoint: their groups and states stand one after the other."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(members)
        super().__init__([*dict.fromkeys(parameter for member in members for parameter in parameters_of(member))], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """The groups are those of the parts, so that a learning rate set here is set there."""
        self.param_groups = [group for member in self.parts for group in member.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer with the parameters of all, numbered in that order."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.parts:
            at = sum(len(group["params"]) for group in groups)
            member_state = member.state_dict()
            if strangers := [key for key in member_state["state"] if not isinstance(key, int)]:
                raise LearnerError(
                    f"{kind_of(member)} has a state {strangers[0]!r} that belongs to no parameter: of several "
                    "optimizers only the states of parameters can be kept. Put it into a group of the optimizer"
                )
            state |= {at + number: values for number, values in member_state["state"].items()}
            groups += [
                group | {"params": [at + number for number in group["params"]]}
                for group in member_state["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises ValueError: it is of other optimizers."""
        groups, at, offset = list(state_dict["param_groups"]), 0, 0
        if len(groups) != len(self.param_groups):
            raise ValueError(f"a state of {len(groups)} groups of parameters, here there are {len(self.param_groups)}")
        for member in self.parts:
            member_groups = groups[offset : offset + len(member.param_groups)]
            offset += len(member_groups)
            count = sum(len(group["params"]) for group in member_groups)
            member.load_state_dict(
                {
                    "state": {
                        number - at: values
                        for number, values in state_dict["state"].items()
                        if at <= number < at + count
                    },
                    "param_groups": [
                        group | {"params": [index - at for index in group["params"]]} for group in member_groups
                    ],
                }
            )
            at += count
        self._share_groups()
