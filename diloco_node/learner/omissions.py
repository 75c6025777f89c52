"""Warnings of `attach`: parts of a model and its optimizers are not merged, though their user may think so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from diloco_node.learner.layouts.names import plain_name, replicas_in
from diloco_node.learner.layouts.tensors import ModelTensors

NAMED_MAX: Final = 3


def batch_norm_warning(model: nn.Module, merged_names: Iterable[str]) -> str:
    """Say what is wrong with batch normalisation; empty for a model without, or with statistics that are merged.

    merged_names: names of the tensors that the run merges.
    """
    name_set, replicas = set(merged_names), replicas_in(model)
    layers = [
        plain_name(name, replicas)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and module.running_mean is not None
        and plain_name(f"{name}.running_mean", replicas) not in name_set
    ]
    if not layers:
        return ""
    more = f" and {len(layers) - NAMED_MAX} more" if len(layers) > NAMED_MAX else ""
    return (
        f"the model has batch normalisation ({', '.join(layers[:NAMED_MAX])}{more}): its running statistics are not "
        "merged, and final.safetensors has none. Compute them anew for the merged model "
        "(torch.optim.swa_utils.update_bn), or use another normalisation"
    )


def attach_warnings(tensors: ModelTensors, merged_names: Sequence[str]) -> list[str]:
    """Say what of a model and its optimizers will not be merged, though its user may think so."""
    warnings = [batch_norm_warning(tensors.model, merged_names)]
    if tensors.idle:
        warnings.append(
            f"{_amount(tensors.idle.values())} of the model, such as {next(iter(tensors.idle))!r}, are in no optimizer "
            "that attach() was given: they are not merged. Freeze them (requires_grad=False), or give attach() all "
            "optimizers"
        )
    if tensors.strangers:
        warnings.append(
            f"{_amount(tensors.strangers)} that the optimizer holds are not in the model: each region trains them "
            "alone. Give attach() every module that is trained, attach([model, criterion], ...)"
        )
    return [text for text in warnings if text]


def _amount(tensors: Iterable[Tensor]) -> str:
    members = list(tensors)
    return f"{len(members)} parameters ({sum(tensor.numel() * tensor.element_size() for tensor in members)} bytes)"
