"""Collectives of tensors on the fake devices: Gloo's, of copies on the host. Each is waited for, as NCCL's are not."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

NAMES: Final = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "broadcast_",
    "reduce_scatter_",
    "scatter_",
)

_library: torch.library.Library | None = None


def begin_ranks() -> None:
    """Make the process group, for tensors on the host and on devices."""
    global _library
    dist.init_process_group("cpu:gloo,cuda:gloo")
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # there is one for NCCL
        for name in NAMES:
            overload = getattr(torch.ops.c10d, name).default
            _library.impl(name, partial(_on_the_host, overload), "CUDA")


def _on_the_host(collective: Callable[..., Any], *arguments: Any) -> Any:
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [replaced(item) for item in value]
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        copies.append((value, value.detach().cpu()))
        return copies[-1][1]

    result = collective(*map(replaced, arguments))
    work = result[-1] if isinstance(result, tuple | list) else result
    work.wait()
    for target, source in copies:
        target.detach().copy_(source)
    if result is work:
        return work
    # What is returned beside the work are the tensors that were written: the first argument.
    return arguments[0], work
