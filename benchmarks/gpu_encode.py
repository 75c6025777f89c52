"""What a fragment of GPT-2 takes on the device."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from gpu_model import DEVICE, Moment

from diloco_node.core.types import BLOCK_VALUES, Codec
from diloco_node.learner.layouts.block_rows import encode_rows


def milliseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device."""
    moments = []
    for _ in range(repeats):
        before = Moment()
        work()
        moments.append((before, Moment()))
    torch.cuda.synchronize()
    return statistics.median(before.until(after) for before, after in moments[repeats // 4 :])


def figures(values: int, tensors: int) -> dict[str, float]:
    """Milliseconds of each part, for a fragment of so many values in so many tensors of equal size."""
    size = values // tensors // BLOCK_VALUES * BLOCK_VALUES
    theta = [torch.randn(size, device=DEVICE) for _ in range(tensors)]
    halves = [one.to(torch.bfloat16) for one in theta]
    stage, new, anchor = (torch.randn(size * tensors, device=DEVICE) for _ in range(3))
    pinned = torch.zeros(size * tensors, device="cpu", pin_memory=True)
    pageable = torch.zeros(size * tensors, device="cpu")
    rows, other = new.view(-1, BLOCK_VALUES), anchor.view(-1, BLOCK_VALUES)

    def apply() -> None:
        torch._foreach_sub_(theta, list(anchor.split(size)))
        torch._foreach_add_(theta, list(new.split(size)))

    def apply_halves() -> None:
        work = [one.float() for one in halves]
        torch._foreach_sub_(work, list(anchor.split(size)))
        torch._foreach_add_(work, list(new.split(size)))
        torch._foreach_copy_(halves, work)

    return {
        "pack": milliseconds(lambda: torch.cat(theta, out=stage)),
        "pack_bfloat16": milliseconds(lambda: torch._foreach_copy_(list(stage.split(size)), halves)),
        "down_pinned": milliseconds(lambda: pinned.copy_(stage, non_blocking=True)),
        "down_pageable": milliseconds(lambda: pageable.copy_(stage)),
        "up_pinned": milliseconds(lambda: stage.copy_(pinned, non_blocking=True)),
        "up_pageable": milliseconds(lambda: stage.copy_(pageable)),
        "apply": milliseconds(apply),
        "apply_bfloat16": milliseconds(apply_halves),
        "encode": milliseconds(lambda: encode_rows(rows - other, Codec.INT4)),
    }
