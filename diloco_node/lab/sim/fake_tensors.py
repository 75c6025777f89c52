"""The arithmetic of the fake world: tiny fragments in bf16 or fp32, float32 sums in a fixed order, digests.

Pieces under 4,096 values travel in bf16 under int4, int8 and bf16, so these bytes are what the real codec would send
for such a model. fp32 shows every bit of a sum taken in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco_node.codec import digest
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec
from diloco_node.numeric import F32

VALUE_BYTES = {Codec.BF16: 2, Codec.FP32: 4}
"""Bytes of one encoded value."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A merged stripe: its bytes, and what they decode to."""

    encoded: bytes
    decoded: F32


def byte_range(layout: FragmentBlocks, block_start: int, block_stop: int, codec: Codec) -> tuple[int, int]:
    """Where these blocks lie in the encoded fragment."""
    value_bytes = VALUE_BYTES[codec]
    return value_bytes * layout.value_offset(block_start), value_bytes * layout.value_offset(block_stop)


def spread(layout: FragmentBlocks, per_piece: Sequence[float], block_start: int, block_stop: int) -> F32:
    """Spread factors of pieces to the values of the block range, float32."""
    whole = np.repeat(np.array(per_piece, np.float32), layout.piece_sizes)
    return whole[layout.value_slice(block_start, block_stop)]


def squared_norms(layout: FragmentBlocks, values: F32, block_start: int, block_stop: int) -> tuple[float, ...]:
    """Per piece, the sum of squares (float64) of those of its values that lie in the block range."""
    low, high = layout.value_offset(block_start), layout.value_offset(block_stop)
    wide, norms, start = values.astype(np.float64), [], 0
    for size in layout.piece_sizes:
        block = wide[max(start, low) - low : max(0, min(start + size, high) - low)]
        norms.append(float(np.dot(block, block)))
        start += size
    return tuple(norms)


def encode(values: F32, codec: Codec) -> bytes:
    """fp32 as it is, or bf16 rounded to nearest even. Values must be finite."""
    if codec is Codec.FP32:
        return values.astype("<f4", copy=False).tobytes()
    bits = values.view(np.uint32)
    halves = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    return halves.astype("<u2").tobytes()


def decode(data: bytes, codec: Codec) -> F32:
    """The float32 values of encoded bytes."""
    if codec is Codec.FP32:
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def reduce_stripe(vectors: Sequence[F32], coefficients: Sequence[F32], codec: Codec) -> Reduced:
    """The weighted float32 sum of decoded parts, in the given order, encoded again."""
    total = np.zeros(len(vectors[0]), np.float32)
    for vector, coefficient in zip(vectors, coefficients, strict=True):
        total += coefficient * vector
    body = encode(total, codec)
    return Reduced(body, decode(body, codec))


def payload_digest(data: bytes, layout: FragmentBlocks, ranges: Sequence[tuple[int, int]], codec: Codec) -> bytes:
    """The codec's digest of a payload whose stripes have these block ranges."""
    cuts = (byte_range(layout, block_start, block_stop, codec) for block_start, block_stop in ranges)
    return digest.payload_digest(digest.stripe_digest(data[low:high]) for low, high in cuts)


def split_state(data: bytes) -> tuple[F32, F32]:
    """Parameters and momentum from the bytes of a state transfer."""
    values = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    half = len(values) // 2
    return values[:half], values[half:]
