"""What a fragment of GPT-2 takes on the device, and whether torch's operators encode it as the CPU's kernel does.

Blocks are rows of 256 values: `encode` is the codec's int4, each operation rounded by itself. It divides by a tensor:
CUDA multiplies by a rounded reciprocal where the divisor is a number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch
from gpu_model import DEVICE, Moment
from torch import Tensor

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec

BLOCK = 256
LEVELS = 7.0
SMALLEST = 0x0D800000
"""Bits of 2^-100: blocks with less are all zero."""

ROUND = 12582912.0
"""1.5 x 2^23: adding it leaves the nearest integer, ties to even, in the last bits."""


def encode(base: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Encode `base - theta`, both of shape (blocks, 256): bytes of shape (blocks, 132), and squares of codes."""
    gradient = base - theta
    largest = (gradient.view(torch.int32) & 0x7FFFFFFF).amax(1)
    is_kept = largest >= SMALLEST
    most = torch.where(is_kept, largest, 0x3F800000).view(torch.float32)
    levels = torch.full_like(most, LEVELS)
    scale = torch.where(is_kept, most / levels, 0.0)
    inverse = torch.where(is_kept, levels / most, 0.0)
    codes = (gradient * inverse[:, None] + ROUND).view(torch.int32) - 0x4B400000
    small = codes.to(torch.int8)
    packed = (small[:, 0::2] & 15) | (small[:, 1::2] << 4)
    code_bytes = torch.cat([scale.view(torch.uint8).view(-1, 4), packed.view(torch.uint8)], 1)
    return code_bytes, (codes * codes).sum(1, dtype=torch.int32)


def differing_bytes(values: int) -> int:
    """Bytes in which the device's encoding is another than the kernel's: of random numbers, ties and tiny blocks."""
    draw = np.random.default_rng(5)
    base = draw.standard_normal(values, np.float32) * np.float32(2.0) ** draw.integers(-130, 30, values)
    base = base.astype(np.float32)
    base[: values // 4] = np.round(base[: values // 4] * 14) / np.float32(2)
    theta = np.where(np.arange(values) % 3 == 0, base * np.float32(0.5), np.float32(0)).astype(np.float32)
    blocks = FragmentBlocks([values], Codec.INT4)
    expected = np.zeros(blocks.encoded_bytes, np.uint8)
    kernels.encode_delta(blocks, base, theta, expected)
    rows = (torch.from_numpy(values).view(-1, BLOCK).to(DEVICE) for values in (base, theta))
    return int((encode(*rows)[0].cpu().numpy().reshape(-1) != expected).sum())


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
    size = values // tensors // BLOCK * BLOCK
    theta = [torch.randn(size, device=DEVICE) for _ in range(tensors)]
    halves = [one.to(torch.bfloat16) for one in theta]
    stage, new, anchor = (torch.randn(size * tensors, device=DEVICE) for _ in range(3))
    pinned = torch.zeros(size * tensors, device="cpu", pin_memory=True)
    pageable = torch.zeros(size * tensors, device="cpu")
    rows = new.view(-1, BLOCK), anchor.view(-1, BLOCK)

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
        "encode": milliseconds(lambda: encode(*rows)),
    }
