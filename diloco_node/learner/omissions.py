"""Warnings of `attach`: parts of a model and its optimizers are not merged, though their user may think so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor, nn

from diloco_node.learner.frozen_tensors import running_buffers
from diloco_node.learner.layouts.names import plain_name, replicas_in
from diloco_node.learner.layouts.tensors import ModelTensors

DERIVED: Final = frozenset({"eps", "scale", "zero_point"})
"""Buffers of a fake quantiser that stay, or that its observer's ranges give."""

MEAN_KEYS: Final = ("running_mean", "running_var", "min_val", "max_val")
"""Buffers whose mean over regions is one of the data of all; of a direction, or a scale with an offset, it is none."""


def statistics_warning(model: nn.Module, merged_names: Iterable[str]) -> str:
    """Say which buffers follow the data in each region and are merged nowhere; empty where there are none."""
    name_set, replicas = set(merged_names), replicas_in(model)
    groups: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        running_ids = {*map(id, running_buffers(module))}
        for key, buffer in module._buffers.items():
            name = plain_name(f"{prefix}.{key}".lstrip("."), replicas)
            is_running = id(buffer) in running_ids and buffer is not None and buffer.is_floating_point()
            if is_running and key not in DERIVED and name not in name_set:
                groups.setdefault(type(module).__name__, []).append(name)
    if not groups:
        return ""
    listing = ", ".join(f"{len(names)} of {kind}, such as {names[0]!r}" for kind, names in groups.items())
    keys = {name.rpartition(".")[2] for names in groups.values() for name in names}
    patterns = [f"*{key}" for key in MEAN_KEYS if key in keys]
    way = (
        f"attach(buffers={patterns}) merges them by their mean, once a batch has filled them. Or make"
        if patterns
        else "Make"
    )
    return (
        f"buffers follow the data in each region, and no merge, checkpoint or final.safetensors has them: {listing}. "
        f"{way} them anew for the merged model: torch.optim.swa_utils.update_bn, or some batches in training mode"
    )


def restart_warning(model: nn.Module, merged_names: Iterable[str]) -> str:
    """Say which merged averages a region begins anew with its first batch after a start; empty where there are none.

    Arguments: as of `statistics_warning`.
    """
    name_set, replicas = set(merged_names), replicas_in(model)
    names = [
        name
        for prefix, module in model.named_modules()
        if getattr(module, "momentum", 0.0) is None and getattr(module, "num_batches_tracked", None) is not None
        if (name := plain_name(f"{prefix}.running_mean".lstrip("."), replicas)) in name_set
    ]
    if not names:
        return ""
    return (
        f"{len(names)} merged averages, such as {names[0]!r}, have momentum=None, which counts batches from 0 on at "
        "each start: the first batch then replaces what the run has. Give these layers a momentum"
    )


def attach_warnings(tensors: ModelTensors, merged_names: Sequence[str]) -> list[str]:
    """Say what of a model and its optimizers will not be merged, though its user may think so."""
    warnings = [report(tensors.model, merged_names) for report in (statistics_warning, restart_warning)]
    if tensors.idle:
        warnings.append(
            f"{_amount(tensors.idle.values())} of the model, such as {next(iter(tensors.idle))!r}, are in no optimizer "
            "that attach() was given: they are not merged. Freeze them (requires_grad=False), or give attach() all "
            "optimizers"
        )
    if tensors.strangers:
        warnings.append(
            f"{_amount(tensors.strangers)} that the optimizer holds are not in the model: each region trains them "
            "alone, and each start begins them anew. Give attach() every module that is trained, attach([model, "
            "criterion], ...)"
        )
    return [text for text in warnings if text]


def _amount(tensors: Iterable[Tensor]) -> str:
    members = list(tensors)
    return f"{len(members)} parameters ({sum(tensor.numel() * tensor.element_size() for tensor in members)} bytes)"
