"""Projections of encoded blocks on random signs (`core.merge.freivalds`)."""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks, piece_codec
from diloco_node.core.projections import Window
from diloco_node.core.types import BLOCK_VALUES, Codec
from diloco_node.numeric import F32, U8

ENCODING_ERRORS: Final = {Codec.INT4: 1 / 14, Codec.INT8: 1 / 254, Codec.BF16: 2.0**-8, Codec.FP32: 2.0**-20}
"""Change of a value by encoding, at most, as a part of its block's largest: half a step."""


def project(blocks: FragmentBlocks, encoded: U8, window: Window) -> tuple[float, float]:
    """Decode a window's bytes, shape (bytes,), uint8, for `project_values`. Raises PayloadCorrupt."""
    start, stop = window.block_start, window.block_stop
    values = np.empty(blocks.span_values(start, stop), np.float32)
    kernels.decode(blocks, encoded, values, start, stop)
    return project_values(values, window, piece_codec(blocks.piece_sizes[window.piece], blocks.codec))


def project_values(values: F32, window: Window, codec: Codec) -> tuple[float, float]:
    """Return the projection on the window's signs, and the square of what encoding may change in it at most.

    values: of the window, shape (n,), float32. codec: of its piece.
    """
    bits = np.frombuffer(hashlib.shake_128(window.seed).digest((len(values) + 7) // 8), np.uint8)
    signs = 1.0 - 2.0 * np.unpackbits(bits, count=len(values)).astype(np.float64)
    starts = np.arange(0, len(values), BLOCK_VALUES)
    peaks = np.maximum.reduceat(np.abs(values), starts).astype(np.float64)
    sizes = np.full(len(starts), float(BLOCK_VALUES))
    sizes[-1] = len(values) - starts[-1]
    error = float(np.dot(sizes, (ENCODING_ERRORS[codec] * peaks) ** 2))
    return float(np.dot(values.astype(np.float64), signs)), error
