"""Models whose running statistics stay in their region: what `attach` says of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from diloco_node.learner.layouts.names import plain_name, replicas_in

NAMED_MAX: Final = 3


def batch_norm_warning(model: nn.Module, merged_names: Iterable[str]) -> str:
    """Say what is wrong with batch normalisation; empty for a model without, or with statistics that are merged.

    Args:
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
