"""The built-in trainer on several ranks: their process group, and the model cut over them or copied to each.

`torchrun` starts the ranks and says in the environment which one a process is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """This process among the ranks of its region. rank: 0 <= rank < ranks. device: of its model."""

    rank: int
    ranks: int
    device: torch.device


class _Loss(nn.Module):
    """A loss as a module: DistributedDataParallel acts where its module is called."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._of = loss

    def forward(self, windows: Tensor) -> Tensor:
        return self._of(windows)


def begin_ranks() -> TrainerRank:
    """Make the process group that `torchrun` has prepared; without it there is one rank."""
    # A GPU of any maker.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        return TrainerRank(0, 1, device)
    if accelerator is not None:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.get_device_module(device).set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(dist.Backend.default_device_backend_map[device.type])
    return TrainerRank(dist.get_rank(), dist.get_world_size(), device)


def on_ranks(
    model: nn.Module, loss: Callable[[Tensor], Tensor], *, shard: str, place: TrainerRank
) -> Callable[[Tensor], Tensor]:
    """Make one model of those of all ranks, and return the loss (of windows) to train with; FSDP2 leaves each rank its
    part. shard: "fsdp", "ddp" or "none", which on several ranks is DistributedDataParallel too."""
    if place.ranks == 1:
        return loss
    if shard != "fsdp":
        return nn.parallel.DistributedDataParallel(_Loss(model, loss))
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return loss


def whole_norm(norm: Tensor) -> Tensor:
    """A gradient's norm, which is a DTensor where the model is cut."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
