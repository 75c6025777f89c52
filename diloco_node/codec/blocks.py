"""Where each block of an encoded fragment lies, in values and in bytes.

A fragment is a vector of float32 values: its pieces one after the other. A piece is cut into blocks of 256 values;
its last block may be shorter, and no block crosses the edge of a piece. Encoded, the blocks follow each other without
gaps, so a range of blocks (a *span*; a stripe is one) is one slice of the values and one slice of the bytes.

==== =========================================================== ==================
kind bytes of a block of n values                                 values
==== =========================================================== ==================
int4 float32 scale, then ceil(n/2) bytes, even values in low half two's complement -7..7
int8 float32 scale, then n bytes                                 -127..127
bf16 2 n bytes                                                   nearest, ties to even
fp32 4 n bytes                                                   exact
==== =========================================================== ==================

All little-endian. Pieces with fewer than `SMALL_TENSOR_VALUES` values are bf16 under int4, int8 and bf16.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.core.types import BLOCK_VALUES, SMALL_TENSOR_VALUES, Codec

KIND_OF_CODEC: Final = {Codec.INT4: 0, Codec.INT8: 1, Codec.BF16: 2, Codec.FP32: 3}
"""The codec as the number that the compiled loops see."""

SCALE_BYTES: Final = 4

FIRST_BLOCK, FIRST_VALUE, FIRST_BYTE, KIND = 0, 1, 2, 3
"""Columns of `FragmentBlocks.layout`."""


def block_bytes(codec: Codec, values: int) -> int:
    """Bytes of one encoded block of `values` values (1..256)."""
    match codec:
        case Codec.INT4:
            return SCALE_BYTES + (values + 1) // 2
        case Codec.INT8:
            return SCALE_BYTES + values
        case Codec.BF16:
            return 2 * values
        case Codec.FP32:
            return 4 * values


def piece_codec(piece_values: int, codec: Codec) -> Codec:
    """How a piece of this size travels in a fragment that is sent with `codec`."""
    if codec is not Codec.FP32 and piece_values < SMALL_TENSOR_VALUES:
        return Codec.BF16
    return codec


class FragmentBlocks:
    """The block layout of one fragment under one codec. Immutable; safe to share between threads.

    Attributes:
        piece_sizes: values per piece, in fragment order; each at least 1. codec: how the fragment is to travel.
        values, block_count, encoded_bytes: of the whole fragment.
        layout: int64, shape (pieces + 1, 4), read-only. Per piece: its first block, first value, first byte, and its
            kind (`KIND_OF_CODEC`); the last row holds the totals. The compiled loops read it.

    Raises ValueError: there is no piece, or a piece without values.
    """

    def __init__(self, piece_sizes: Sequence[int], codec: Codec) -> None:
        if not piece_sizes or min(piece_sizes) < 1:
            raise ValueError(f"a fragment needs pieces of at least 1 value each, got {list(piece_sizes)[:8]}")
        self.piece_sizes = tuple(int(size) for size in piece_sizes)
        self.codec = codec
        self._codecs = tuple(piece_codec(size, codec) for size in self.piece_sizes)
        self._first_block, self._first_value, self._first_byte = [0], [0], [0]
        for size, kind in zip(self.piece_sizes, self._codecs, strict=True):
            full, tail = divmod(size, BLOCK_VALUES)
            size_bytes = full * block_bytes(kind, BLOCK_VALUES) + (block_bytes(kind, tail) if tail else 0)
            self._first_block.append(self._first_block[-1] + full + (tail > 0))
            self._first_value.append(self._first_value[-1] + size)
            self._first_byte.append(self._first_byte[-1] + size_bytes)
        self.block_count = self._first_block[-1]
        self.values = self._first_value[-1]
        self.encoded_bytes = self._first_byte[-1]
        kinds = [KIND_OF_CODEC[kind] for kind in self._codecs] + [-1]
        self.layout: NDArray[np.int64] = np.array(
            [self._first_block, self._first_value, self._first_byte, kinds], dtype=np.int64
        ).T.copy()
        self.layout.flags.writeable = False

    def __repr__(self) -> str:
        return f"FragmentBlocks({self.codec}: {self.pieces} pieces, {self.values} values, {self.block_count} blocks)"

    @property
    def pieces(self) -> int:
        """How many pieces the fragment has."""
        return len(self.piece_sizes)

    def piece_of(self, block: int) -> int:
        """Index of the piece that the block belongs to."""
        self.check_span(block, block + 1)
        return bisect_right(self._first_block, block) - 1

    def value_offset(self, block: int) -> int:
        """Index of the block's first value in the fragment; `block_count` gives the number of all values."""
        if block == self.block_count:
            return self.values
        piece = self.piece_of(block)
        return self._first_value[piece] + (block - self._first_block[piece]) * BLOCK_VALUES

    def byte_offset(self, block: int) -> int:
        """Index of the block's first byte in the encoded fragment; `block_count` gives the number of all bytes."""
        if block == self.block_count:
            return self.encoded_bytes
        piece = self.piece_of(block)
        full_bytes = block_bytes(self._codecs[piece], BLOCK_VALUES)
        return self._first_byte[piece] + (block - self._first_block[piece]) * full_bytes

    def value_slice(self, block_start: int, block_stop: int) -> slice:
        """Where the values of blocks [block_start, block_stop) lie in the fragment."""
        self.check_span(block_start, block_stop)
        return slice(self.value_offset(block_start), self.value_offset(block_stop))

    def byte_slice(self, block_start: int, block_stop: int) -> slice:
        """Where the bytes of blocks [block_start, block_stop) lie in the encoded fragment."""
        self.check_span(block_start, block_stop)
        return slice(self.byte_offset(block_start), self.byte_offset(block_stop))

    def span_values(self, block_start: int, block_stop: int) -> int:
        """How many values blocks [block_start, block_stop) have."""
        span = self.value_slice(block_start, block_stop)
        return int(span.stop - span.start)

    def span_bytes(self, block_start: int, block_stop: int) -> int:
        """How many bytes blocks [block_start, block_stop) have when encoded."""
        span = self.byte_slice(block_start, block_stop)
        return int(span.stop - span.start)

    def check_span(self, block_start: int, block_stop: int) -> None:
        """Raise ValueError unless 0 <= block_start <= block_stop <= block_count."""
        if not 0 <= block_start <= block_stop <= self.block_count:
            raise ValueError(f"blocks [{block_start}, {block_stop}) are not within the fragment's {self.block_count}")
