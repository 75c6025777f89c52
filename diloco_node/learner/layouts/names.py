"""Names of parameters as they are without the wrappers that people put around parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from diloco_node.errors import LearnerError

V = TypeVar("V")

REPLICAS: Final = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Wrappers that hold the module inside as `module`, which others may call theirs, too."""

WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names by which torch.compile, activation checkpointing or offload, and FSDP hold the module inside. One region may
compile each block and another none: the names that they agree on have none of these, as torch's own distributed
checkpoints."""


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module below DistributedDataParallel and torch.compile. Wrappers of parts of it stay.

    Raises LearnerError: it is, or has, a module of TorchScript.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise LearnerError("a TorchScript module can't be followed: attach the model that it was made from, unscripted")
    while True:
        inner = model.module if isinstance(model, REPLICAS) else model._modules.get("_orig_mod")
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def replicas_in(model: nn.Module) -> tuple[str, ...]:
    """The beginnings of the names that are inside REPLICAS in the model, such as "encoder.module.", innermost first."""
    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{name}.module." for name, module in modules if isinstance(module, REPLICAS))[::-1]


def plain_name(name: str, replicas: Sequence[str] = ()) -> str:
    """Leave out wrappers, at every level.

    Args:
        replicas: of the model, as `replicas_in` returns them.
    """
    for prefix in replicas:
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def by_plain_name(values: Mapping[str, V], model: nn.Module) -> dict[str, V]:
    """The same values, where a script may have taken its names from a wrapped model."""
    replicas = replicas_in(model)
    return {plain_name(name, replicas): value for name, value in values.items()}


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Each parameter with all its names; several for a tied one."""
    names: dict[Tensor, list[str]] = {}
    replicas = replicas_in(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(plain_name(name, replicas))
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers, each once."""
    return by_plain_name(dict(model.named_buffers()), model)
