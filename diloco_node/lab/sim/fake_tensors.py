"""The arithmetic of the fake world: tiny fragments in bf16 or fp32, float32 sums in a fixed order, digests.

Pieces under 4,096 values travel in bf16 under int4, int8 and bf16, so these bytes are what the real codec would send
for such a model. fp32 shows every bit of a sum taken in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco_node.codec import digest
from diloco_node.core.types import BLOCK_VALUES, Codec
from diloco_node.numeric import F32

VALUE_BYTES = {Codec.BF16: 2, Codec.FP32: 4}
"""Bytes of one encoded value."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """A merged stripe: its bytes, and what they decode to."""

    encoded: bytes
    decoded: F32


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """Where the pieces and blocks of one fragment lie.

    Attributes:
        pieces: values of each piece. piece_starts: first value of each piece, and one past the last.
        block_starts: first value of each block, and one past the last; blocks never cross the edge of a piece.
    """

    pieces: tuple[int, ...]
    piece_starts: tuple[int, ...]
    block_starts: tuple[int, ...]

    @classmethod
    def of(cls, pieces: Sequence[int]) -> FragmentLayout:
        """Lay out a fragment of pieces of the given sizes."""
        starts = [0]
        blocks = [0]
        for size in pieces:
            blocks.extend(starts[-1] + min(size, at + BLOCK_VALUES) for at in range(0, size, BLOCK_VALUES))
            starts.append(starts[-1] + size)
        return cls(tuple(pieces), tuple(starts), tuple(blocks))

    @property
    def values(self) -> int:
        """Values of the fragment."""
        return self.piece_starts[-1]

    @property
    def blocks(self) -> int:
        """Blocks of the fragment."""
        return len(self.block_starts) - 1

    def byte_range(self, block_start: int, block_stop: int, codec: Codec) -> tuple[int, int]:
        """Where these blocks lie in the encoded fragment."""
        value_bytes = VALUE_BYTES[codec]
        return value_bytes * self.block_starts[block_start], value_bytes * self.block_starts[block_stop]

    def spread(self, per_piece: Sequence[float], block_start: int, block_stop: int) -> F32:
        """Spread factors of pieces to the values of the block range, float32."""
        low, high = self.block_starts[block_start], self.block_starts[block_stop]
        whole = np.repeat(np.array(per_piece, np.float32), self.pieces)
        return whole[low:high]

    def squared_norms(self, values: F32, block_start: int, block_stop: int) -> tuple[float, ...]:
        """Per piece, the sum of squares (float64) of those of its values that lie in the block range."""
        low, high = self.block_starts[block_start], self.block_starts[block_stop]
        wide = values.astype(np.float64)
        norms = []
        for start, stop in zip(self.piece_starts, self.piece_starts[1:], strict=False):
            block = wide[max(start, low) - low : max(0, min(stop, high) - low)]
            norms.append(float(np.dot(block, block)))
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


def payload_digest(data: bytes, layout: FragmentLayout, ranges: Sequence[tuple[int, int]], codec: Codec) -> bytes:
    """The codec's digest of a payload whose stripes have these block ranges."""
    cuts = (layout.byte_range(block_start, block_stop, codec) for block_start, block_stop in ranges)
    return digest.payload_digest(digest.stripe_digest(data[low:high]) for low, high in cuts)


def split_state(data: bytes) -> tuple[F32, F32]:
    """Parameters and momentum from the bytes of a state transfer."""
    values = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
    half = len(values) // 2
    return values[:half], values[half:]
