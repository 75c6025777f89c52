"""Codecs that no daemon speaks, to see what smaller contributions cost: the largest values of each chunk, in two bits.

A piece is cut into chunks of 4,096 values. Of each chunk the largest magnitudes are sent in two bits: a sign, and one
of two magnitudes, which are the chunk's own (Lloyd's quantiser). The distances between their places are Rice codes.
The rest waits at the learner and is added to its next outer gradient (error feedback).

Source: SparseLoCo (arXiv 2508.15706). Pieces below 4,096 values travel in bf16, as under int4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from quality_merge import Rounds

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import SMALL_TENSOR_VALUES, Codec, RunSettings
from diloco_node.numeric import F32, F64

CHUNK: Final = 4096
LEVELS_BITS: Final = 2 * 32
"""The two magnitudes of a chunk, float32."""
LLOYD_STEPS: Final = 3


@dataclass(frozen=True, slots=True)
class Sparse:
    """What is sent of an outer gradient.

    Attributes:
        share: part of each chunk's values; 1 sends all, without places.
        feedback: factor on what waits.
        flush: a fragment's last round sends all that waits, in int4; False drops it.
    """

    share: float
    feedback: float = 1.0
    flush: bool = True

    def __str__(self) -> str:
        what = "2 bits" if self.share == 1.0 else f"top {100 * self.share:g} %"
        feedback = "" if self.feedback == 1.0 else f", feedback {self.feedback:g}"
        return what + feedback + ("" if self.flush else ", rest dropped")

    @property
    def rice_bits(self) -> int:
        """Bits of a distance that are sent as they are; the rest of it is unary. Best for a geometric distribution."""
        return max(0, round(math.log2(max(1.0, math.log(2) * (1 / self.share - 1)))))

    def sent(self, values: F32) -> tuple[F32, int]:
        """Return what arrives of a piece, shape (n,), and the bits that its payload takes."""
        full = len(values) // CHUNK * CHUNK
        arrived, bits = np.zeros_like(values), 0
        for start, stop, width in ((0, full, CHUNK), (full, len(values), len(values) - full)):
            if stop > start:
                rows, row_bits = self._sent_rows(values[start:stop].reshape(-1, width))
                arrived[start:stop], bits = rows.ravel(), bits + row_bits
        return arrived, bits

    def _sent_rows(self, rows: F32) -> tuple[F32, int]:
        """Return the same of chunks of equal length, one a row."""
        count, width = rows.shape
        taken = max(1, round(self.share * width))
        bits = count * (LEVELS_BITS + 2 * taken)
        if taken == width:
            return _in_two_bits(rows), bits
        places = np.sort(np.argpartition(np.abs(rows), width - taken, axis=1)[:, width - taken :], axis=1)
        arrived = np.zeros_like(rows)
        np.put_along_axis(arrived, places, _in_two_bits(np.take_along_axis(rows, places, 1)), 1)
        gaps = np.diff(places, axis=1, prepend=-1) - 1
        return arrived, bits + int((gaps >> self.rice_bits).sum()) + gaps.size * (1 + self.rice_bits)


def _in_two_bits(rows: F32) -> F32:
    """Each value as its sign times the mean of its row's small, or of its large magnitudes."""
    sizes = np.abs(rows)
    border = sizes.mean(1, keepdims=True)
    for _ in range(LLOYD_STEPS):
        is_large = sizes > border
        count = np.maximum(1, is_large.sum(1, keepdims=True))
        large = np.where(is_large, sizes, 0).sum(1, keepdims=True) / count
        small = np.where(is_large, 0, sizes).sum(1, keepdims=True) / np.maximum(1, (~is_large).sum(1, keepdims=True))
        border = (large + small) / 2
    levels: F32 = np.copysign(np.where(is_large, large, small), rows).astype(np.float32)
    return levels


class SparseRounds(Rounds):
    """Rounds whose contributions are `Sparse`; what arrived goes on to the merge as float32. Arguments as `Rounds`."""

    def __init__(
        self, settings: RunSettings, shapes: dict[str, tuple[int, ...]], theta: F32, *, sparse: Sparse, **more: Any
    ) -> None:
        super().__init__(replace(settings, codec_up=Codec.FP32), shapes, theta, **more)
        self.sparse = sparse
        self._int4 = [FragmentBlocks(fragment.piece_sizes, Codec.INT4) for fragment in self.fragments]
        self.waiting = [[np.zeros(blocks.values, np.float32) for blocks in self._up] for _ in range(self.learners)]

    def _encoded(
        self, m: int, fragment: int, base: F32, offered: F32, *, is_last: bool
    ) -> tuple[NDArray[np.uint8], F64, int]:
        waiting, blocks = self.waiting[m][fragment], self._int4[fragment]
        wanted = base - offered + np.float32(self.sparse.feedback) * waiting
        payload, arrived = np.empty(blocks.encoded_bytes, np.uint8), np.empty_like(wanted)
        kernels.encode(blocks, wanted, payload)
        kernels.decode(blocks, payload, arrived)
        bits, stop = 8 * payload.size, 0
        if not (is_last and self.sparse.flush):
            bits = 0
            for size in blocks.piece_sizes:
                piece, stop = slice(stop, stop + size), stop + size
                is_small = size < SMALL_TENSOR_VALUES
                arrived[piece], piece_bits = (
                    (arrived[piece], 16 * size) if is_small else self.sparse.sent(wanted[piece])
                )
                bits += piece_bits
        waiting[:] = wanted - arrived
        encoded = np.empty(self._up[fragment].encoded_bytes, np.uint8)
        return encoded, kernels.encode(self._up[fragment], arrived, encoded), bits
