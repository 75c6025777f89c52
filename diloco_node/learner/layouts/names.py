"""Names of parameters as they are without the wrappers that people put around parts of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from torch import Tensor, nn

V = TypeVar("V")

WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names by which torch.compile, activation checkpointing or offload, and FSDP hold the module inside. One region may
compile each block and another none: the names that they agree on have none of these, as torch's own distributed
checkpoints."""


def plain_name(name: str) -> str:
    """Leave out wrappers, at every level."""
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def by_plain_name(values: Mapping[str, V]) -> dict[str, V]:
    """The same values, where a script may have taken its names from a wrapped model."""
    return {plain_name(name): value for name, value in values.items()}


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """Each parameter with all its names; several for a tied one."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(plain_name(name))
    return names


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers, each once."""
    return by_plain_name(dict(model.named_buffers()))
