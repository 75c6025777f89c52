"""A slow reference of the encoding in numpy and plain Python, written from its description and not from the kernels."""

import numpy as np

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import SMALL_TENSOR_VALUES, Codec
from diloco_node.numeric import F32


def reference_block(x: F32, kind: Codec) -> tuple[bytes, F32, float]:
    """(encoded, decoded, squared norm) of one block, one rule of the format after the other."""
    absmax = np.max(np.abs(x))
    flushed = absmax < np.float32(2.0**-100)
    if kind is Codec.FP32:
        return x.tobytes(), x.copy(), reference_squares(x)
    if kind is Codec.BF16:
        if flushed:
            return bytes(2 * x.size), np.zeros_like(x), 0.0
        high = (x.view(np.uint32) >> 16) << 16
        low = x.view(np.uint32) & 0xFFFF
        up = (low > 0x8000) | ((low == 0x8000) & ((high >> 16) & 1 == 1))
        rounded = (high + up.astype(np.uint32) * 0x10000).astype(np.uint32)
        return (
            (rounded >> 16).astype("<u2").tobytes(),
            rounded.view(np.float32),
            reference_squares(rounded.view(np.float32)),
        )
    levels = np.float32(7 if kind is Codec.INT4 else 127)
    if flushed:
        scale, codes = np.float32(0), np.zeros(x.size, np.int64)
    else:
        scale = absmax / levels
        codes = np.rint(x * (levels / absmax)).astype(np.int64)
    assert np.max(np.abs(codes)) <= levels
    decoded = scale * codes.astype(np.float32)
    norm = float(scale) * float(scale) * float((codes * codes).sum())
    if kind is Codec.INT8:
        body = codes.astype(np.int8).tobytes()
    else:
        padded = np.append(codes, np.zeros(codes.size % 2, np.int64)) & 15
        body = (padded[0::2] | (padded[1::2] << 4)).astype(np.uint8).tobytes()
    return scale.astype("<f4").tobytes() + body, decoded, norm


def reference_squares(x: F32) -> float:
    lanes = [0.0] * 32
    for i, value in enumerate(x):
        lanes[i % 32] += float(value) * float(value)
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def reference(blocks: FragmentBlocks, values: F32) -> tuple[bytes, F32, list[float]]:
    encoded, decoded, norms, first = b"", [], [0.0] * blocks.pieces, 0
    for piece, size in enumerate(blocks.piece_sizes):
        kind = blocks.codec if blocks.codec is Codec.FP32 or size >= SMALL_TENSOR_VALUES else Codec.BF16
        for start in range(first, first + size, 256):
            part, back, norm = reference_block(values[start : min(start + 256, first + size)], kind)
            encoded += part
            decoded.append(back)
            norms[piece] += norm
        first += size
    return encoded, np.concatenate(decoded), norms
