"""The codec's int4 and int8 in torch's operators, for devices: the bytes and sums of `codec.kernels`.

A block is a row of 256 values, the last one of a piece filled up with zeros. Each operation is rounded by itself, as
the kernel's. Scales are divided by a tensor: CUDA multiplies by a rounded reciprocal where the divisor is a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco_node.codec import kernels
from diloco_node.codec.blocks import KIND, KIND_OF_CODEC, FragmentBlocks, block_bytes
from diloco_node.core.types import BLOCK_VALUES, Codec
from diloco_node.numeric import F32, U8

LEVELS: Final = {Codec.INT4: 7.0, Codec.INT8: 127.0}
"""Codecs of rows. The others cost the host little."""

# As in codec.loops, which is not to be imported from here.
_SIGNLESS: Final = 0x7FFFFFFF
_MAGNITUDE_MAX_BITS: Final = 0x71800000
_FLUSH_BITS: Final = 0x0D800000
_BITS_OF_ONE: Final = 0x3F800000
_ROUNDER: Final = 12582912.0
_ROUNDER_BITS: Final = 0x4B400000

_PROBE_VALUES: Final = 16 * BLOCK_VALUES


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The blocks of one piece as a device has encoded them.

    Attributes:
        code_bytes: shape (blocks, bytes of a whole block), uint8. The last block may count with its first bytes only.
        squares: shape (blocks,), int32: sums of squared codes; -1 where the kernel refuses the values.
    """

    code_bytes: U8
    squares: NDArray[np.int32]


def row_count(values: int) -> int:
    """Blocks of a piece."""
    return -(-values // BLOCK_VALUES)


def row_bytes(codec: Codec) -> int:
    """Bytes of a row and of its sum, as they leave the device."""
    return block_bytes(codec, BLOCK_VALUES) + 4


def is_in_rows(blocks: FragmentBlocks, piece: int) -> bool:
    """Whether the piece can be encoded here: small ones travel as bf16."""
    return blocks.codec in LEVELS and int(blocks.layout[piece, KIND]) == KIND_OF_CODEC[blocks.codec]


@torch.no_grad()
def encode_rows(gradient: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Encode blocks on their device, without waiting for it.

    gradient: shape (blocks, 256), float32; used up.

    Returns: `EncodedRows.code_bytes` and `squares`, on the same device.
    """
    largest = (gradient.view(torch.int32) & _SIGNLESS).amax(1)
    is_flushed = largest < _FLUSH_BITS
    most = largest.masked_fill(is_flushed, _BITS_OF_ONE).view(torch.float32)
    levels = torch.full_like(most, LEVELS[codec])
    scale = (most / levels).masked_fill_(is_flushed, 0.0)
    inverse = (levels / most).masked_fill_(is_flushed, 0.0)
    codes = gradient.mul_(inverse[:, None]).add_(_ROUNDER).view(torch.int32).sub_(_ROUNDER_BITS)
    squares = (codes * codes).sum(1, dtype=torch.int32).masked_fill_(largest > _MAGNITUDE_MAX_BITS, -1)
    small = codes.to(torch.int8)
    if codec is Codec.INT4:
        small = (small[:, 0::2] & 15) | (small[:, 1::2] << 4)
    return torch.cat([scale.view(torch.uint8).view(-1, 4), small.view(torch.uint8)], 1), squares


def differing_bytes(device: torch.device, codec: Codec) -> int:
    """Bytes and sums in which a device encodes otherwise than the kernel: normal values, ties, tiny blocks. Waits."""
    draw = np.random.default_rng(5)
    values = draw.standard_normal(_PROBE_VALUES, np.float32)
    values[: _PROBE_VALUES // 4] = np.round(values[: _PROBE_VALUES // 4] * 14) / np.float32(2)
    exponents = np.repeat(np.linspace(-135, 90, _PROBE_VALUES // BLOCK_VALUES).astype(int), BLOCK_VALUES)
    values[_PROBE_VALUES // 4 :] *= np.exp2(exponents.astype(np.float32))[_PROBE_VALUES // 4 :]
    blocks = FragmentBlocks([_PROBE_VALUES], codec)
    kernel_bytes: U8 = np.zeros(blocks.encoded_bytes, np.uint8)
    norms = kernels.encode_delta(blocks, values, np.zeros_like(values), kernel_bytes)
    rows, squares = encode_rows(torch.from_numpy(values).view(-1, BLOCK_VALUES).to(device), codec)
    copy = EncodedRows(rows.cpu().numpy(), squares.cpu().numpy())
    return int((copy.code_bytes.reshape(-1) != kernel_bytes).sum()) + int(squared_norm(copy) != norms[0])


def squared_norm(rows: EncodedRows) -> float:
    """The squared norm of what they decode to: products and sum in the kernel's order, in float64."""
    scales: F32 = np.ascontiguousarray(rows.code_bytes[:, :4]).view(np.float32)[:, 0]
    wide = scales.astype(np.float64)
    return float(np.cumsum(wide * wide * rows.squares)[-1])
