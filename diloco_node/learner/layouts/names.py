"""Names of parameters as they are without the wrappers that people put around parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from diloco_node.errors import LearnerError

V = TypeVar("V")

REPLICAS: Final = frozenset({"DistributedDataParallel", "DataParallel", "QuantWrapper"})
"""Classes, by name, that hold the module inside as `module`, which others may call theirs, too."""

WRAPPERS: Final = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module", "_original_module"}
)
"""Names by which torch.compile, activation checkpointing or offload, FSDP, and twice Lightning's Fabric hold the module
inside. One region may compile each block and another none: the names that they agree on have none of these, as torch's
own distributed checkpoints."""

UNSAVED: Final = frozenset({"_checkpoint_wrapped_module", "_original_module"})
"""Those that `state_dict()` leaves out by itself."""


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module below DistributedDataParallel and torch.compile. Wrappers of parts of it stay.

    Raises LearnerError: it is no module, or is or has one of TorchScript.
    """
    if not isinstance(model, nn.Module):
        raise LearnerError(
            f"attach() was given a {type(model).__name__} as its model: give an nn.Module, or a list of them"
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise LearnerError("a TorchScript module can't be followed: attach the model that it was made from, unscripted")
    while True:
        inner = model._modules.get("module" if _is_replica(model) else "_orig_mod")
        if inner is None:
            return model
        model = inner


def _is_replica(module: nn.Module) -> bool:
    return not REPLICAS.isdisjoint(kind.__name__ for kind in type(module).__mro__)


def replicas_in(model: nn.Module) -> tuple[str, ...]:
    """The beginnings of the names that are inside REPLICAS in the model, such as "encoder.module.", innermost first."""
    modules = model.named_modules(remove_duplicate=False)
    names = (f"{name}.module.".lstrip(".") for name, module in modules if _is_replica(module))
    return tuple(_without(UNSAVED, name) for name in names)[::-1]


def plain_name(name: str, replicas: Sequence[str] = ()) -> str:
    """Leave out wrappers, at every level. replicas: of the model, as `replicas_in` returns them."""
    name = _without(UNSAVED, name)
    for prefix in replicas:
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    return _without(WRAPPERS, name)


def _without(words: frozenset[str], name: str) -> str:
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(word for word in name.split(".") if word not in words)


def by_plain_name(values: Mapping[str, V], model: nn.Module) -> dict[str, V]:
    """The same values, where a script may have taken its names from a wrapped model."""
    replicas = replicas_in(model)
    return {plain_name(name, replicas): value for name, value in values.items()}


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Each parameter with all its names: of a tied one, or of one that stands at several places, several.

    Raises LearnerError: two parameters have one name.
    """
    names: dict[Tensor, list[str]] = {}
    owners: dict[str, Tensor] = {}
    replicas = replicas_in(model)
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(raw_name, replicas)
        if name not in owners:
            owners[name] = parameter
            names.setdefault(parameter, []).append(name)
        elif owners[name] is not parameter:
            raise LearnerError(
                f"two parameters are called {name!r} without the names of wrappers, one of them {raw_name!r}: give the "
                "layer beside the wrapper, or inside of it, another name"
            )
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers, each once."""
    return by_plain_name(dict(model.named_buffers()), model)
