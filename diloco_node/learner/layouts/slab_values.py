"""The values of a slab in the part of a tensor that lies on this rank, and the first ones of them."""

from __future__ import annotations

import copy
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from diloco_node.learner.layouts.shard_map import Slab

SAMPLE_VALUES: Final = 1024
"""Values to sample of each piece: enough to tell a reverted parameter from a trained one."""


def host_copy(value: Any) -> Any:
    """Return a copy: of a tensor on the CPU and without its graph, of another object as `copy.deepcopy` makes it."""
    if isinstance(value, Tensor):  # frozen weights that are somewhere else between two forward passes have no values
        return value.detach() if value.is_meta else value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def host_values(*shape: int) -> Tensor:
    """Zeros, float32, on the CPU, whatever torch's defaults are. From numpy: it asks the kernel for huge pages, with
    which copies and encoding take a quarter less time."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def cut(tensor: Tensor, slab: Slab) -> Tensor:
    """The slab of a tensor's part on this rank; mostly that is all of it, and each slice takes microseconds."""
    return tensor if slab.is_whole else tensor[slab.local]


def first_values(tensor: Tensor, slab: Slab) -> Tensor:
    """The first `SAMPLE_VALUES` of a slab: shape (k,), float32."""
    values = cut(tensor, slab)
    if values.numel() > SAMPLE_VALUES:
        # Rows first: making all of a slab that lies across memory contiguous would copy it.
        values = values[:SAMPLE_VALUES].reshape(-1)[:SAMPLE_VALUES]
    return values.reshape(-1).float()


def joined(pieces: list[Tensor]) -> Tensor:
    """Those that lie on the first one's device, in one."""
    return torch.cat([piece for piece in pieces if piece.device == pieces[0].device] or [host_values(0)])


def carry(theta: Tensor, new: Tensor, anchor: Tensor, carry_factor: float, *, keeps_sign: bool) -> None:
    """Set `theta` to `new + carry_factor * (theta - anchor)`, in place.

    keeps_sign: values that are never negative, as a variance that falls fast, stay between what they were and `new`.
    """
    least = torch.minimum(theta, new) if keeps_sign and theta.numel() else None
    theta.sub_(anchor)
    if carry_factor != 1.0:
        theta.mul_(carry_factor)
    theta.add_(new)
    if least is not None and least.min() >= 0.0:
        torch.where(theta < 0.0, least, theta, out=theta)
