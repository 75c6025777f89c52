"""The inner loops of the codec, for numba to compile. Call them through `kernels`, which checks sizes and raises the
errors; `kernel_cache` says where numba keeps the machine code, and is the only one to import this.

The bytes are equal on every machine: there is no fast-math and no contraction of `a * b + c` into one rounding.
Reductions are over integers where the order would matter, and in a fixed order where they are over floats. All loops
are in this one file, for numba's cache notices only changes of the file that the called function is in.

Written so that LLVM vectorises them: unsigned indices (signed ones are checked for negative values), integer maximum
over the bit patterns instead of a float maximum, codes in a small scratch array between quantising and packing.
Scratch memory of every call: `codes` 512 bytes, `floats` 256 float32, `sums` 32 float64.

The loops return the first block that they refuse, or -1. Refused while encoding: a magnitude above 2^100, infinity,
NaN. Refused while decoding: what the encoder can't have written (see `_checked_norm`).
"""

# ruff: noqa: PLR0917 (numeric kernels: arrays by position, as in numpy)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
from numba import config, from_dtype, njit, types
from numpy.typing import NDArray

from diloco_node.numeric import F32, F64, U8

F = TypeVar("F", bound=Callable[..., Any])
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

INT4, INT8, BF16, FP32 = 0, 1, 2, 3

MAGNITUDE_MAX_BITS: Final = np.int32(0x71800000)
"""2^100 as a float32 bit pattern. NaN and infinity lie above it, so one integer comparison finds all three. A
gradient of that size is a fault anyway, and below it no sum of contributions can overflow."""

FLUSH_BITS: Final = np.int32(0x0D800000)
"""2^-100: blocks whose largest magnitude is below become zeros. So `levels / absmax` stays finite, and no kernel
works on denormal scales, which some machines flush and others don't."""

SCALE_MIN_BITS: Final = np.uint32(0x0A000000)
"""2^-107, just below the smallest scale that the encoder writes: 2^-100 / 127."""

_SIGNLESS = np.int32(0x7FFFFFFF)
# 1.5 * 2^23: adding it rounds to an integer, ties to even, and leaves that in the low bits
_ROUNDER = np.float32(12582912.0)
_ROUNDER_BITS = np.int32(0x4B400000)

PIECE, START, STOP, FIRST_VALUE, FIRST_BYTE = 0, 1, 2, 3, 4
"""The entries of a `span`: the piece of its first block, its blocks [start, stop), and where its arrays begin in the
fragment."""

_njit: Any = njit  # its types don't know `_nrt`


def _array(dtype: type[np.generic], *, is_writable: bool = False, dimensions: int = 1) -> Any:
    return types.Array(from_dtype(np.dtype(dtype)), dimensions, "C", readonly=not is_writable)


_BYTES, _VALUES, _FACTOR = _array(np.uint8), _array(np.float32), types.float32
_BYTES_OUT, _VALUES_OUT = _array(np.uint8, is_writable=True), _array(np.float32, is_writable=True)
_NORMS = _array(np.float64, is_writable=True)
_PLACE = (_array(np.int64, dimensions=2), _array(np.int64, is_writable=True))
_SCRATCH = (_BYTES_OUT, _VALUES_OUT, _NORMS)


def compiler(*signatures: tuple[Any, ...], is_cached: bool = False) -> Callable[[F], F]:
    """numba's decorator with the options of all loops.

    _nrt: without reference counts, for their atomic additions per block and view cost half of the speed. So the loops
    can't allocate: scratch memory comes from the caller. (inline="always" would give another fifth, and takes 14
    instead of 8 CPU-seconds to compile.)

    signatures: what a loop takes; compiled at once and for nothing else. None: for what it is called with.
    """
    options = {"nogil": True, "fastmath": False, "boundscheck": False, "_nrt": False, "cache": is_cached}
    return cast(Callable[[F], F], _njit(list(signatures) or None, **options))


def _compile_part(function: F) -> F:
    return compiler()(function)


def _callable(*signatures: tuple[Any, ...]) -> Callable[[F], F]:
    """Compile what Python calls. Only these are cached, with the loops that they call: no cached part can be stale."""
    return compiler(*signatures, is_cached=bool(cast(Any, config).CACHE_DIR))


@_compile_part
def _block_at(layout: I64, span: I64, piece: int, block: int) -> tuple[int, int, int]:
    """First value and first byte of a block of this piece, counted from the start of the span, and its values."""
    before = block - layout[piece, 0]
    kind = layout[piece, 3]
    first_value = layout[piece, 1] + before * 256
    full_bytes = 132
    if kind == INT8:
        full_bytes = 260
    elif kind == BF16:
        full_bytes = 512
    elif kind == FP32:
        full_bytes = 1024
    first_byte = layout[piece, 2] + before * full_bytes
    n = min(256, layout[piece + 1, 1] - first_value)
    return first_value - span[FIRST_VALUE], first_byte - span[FIRST_BYTE], n


@_compile_part
def _largest_bits(bits: I32, first: int, n: int) -> np.int32:
    """The bit pattern of the largest magnitude, which orders NaN above infinity above everything else."""
    o = np.uint64(first)
    largest = np.int32(0)
    for i in range(np.uint64(n)):
        largest = max(largest, np.int32(bits[o + i] & _SIGNLESS))
    return largest


@_compile_part
def _copy_bytes(source: U8, at: int, target: U8, to: int, n: int) -> None:
    """target[to:to+n] = source[at:at+n], for values that lie at any byte."""
    a, b = np.uint64(at), np.uint64(to)
    for i in range(np.uint64(n)):
        target[b + i] = source[a + i]


@_compile_part
def _squares(n: int, floats: F32, sums: F64) -> float:
    """Sum of decoded[i]^2, i < n, in float64: 32 sums by i mod 32, in order, folded in halves. Fills up with zeros."""
    for i in range(np.uint64(n), np.uint64(256)):
        floats[i] = np.float32(0.0)
    for lane in range(np.uint64(32)):
        total = 0.0
        for row in range(np.uint64(8)):
            value = np.float64(floats[lane + row * np.uint64(32)])
            total += value * value
        sums[lane] = total
    for lane in range(np.uint64(16)):
        sums[lane] += sums[lane + np.uint64(16)]
    for lane in range(np.uint64(8)):
        sums[lane] += sums[lane + np.uint64(8)]
    result: float = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]))
    return result


# ---- encoding --------------------------------------------------------------------------------------------------------


@_compile_part
def _encode_fp32(bits: I32, first: int, n: int, out: U8, to: int, floats: F32, sums: F64) -> float:
    raw_bits = floats.view(np.int32)
    raw = floats.view(np.uint8)
    o = np.uint64(first)
    for i in range(np.uint64(n)):
        raw_bits[i] = bits[o + i]
    _copy_bytes(raw, 0, out, to, 4 * n)
    return _squares(n, floats, sums)


@_compile_part
def _encode_bf16(
    bits: I32, first: int, n: int, keep: np.int32, out: U8, to: int, codes: U8, floats: F32, sums: F64
) -> float:
    """`keep` is -1, or 0 to flush the block."""
    pairs = codes.view(np.uint16)
    raw_bits = floats.view(np.int32)
    o = np.uint64(first)
    for i in range(np.uint64(n)):
        u = np.int32(bits[o + i])
        h = ((u + np.int32(0x7FFF) + ((u >> np.int32(16)) & np.int32(1))) >> np.int32(16)) & keep
        pairs[i] = np.uint16(h)
        raw_bits[i] = np.int32(h << np.int32(16))
    _copy_bytes(codes, 0, out, to, 2 * n)
    return _squares(n, floats, sums)


@_compile_part
def _encode_codes(
    kind: int, x: F32, first: int, n: int, scale: np.float32, inverse: np.float32, out: U8, to: int, codes: U8
) -> float:
    """Scale and codes of an int4 or int8 block. |x * inverse| <= levels * (1 + 2^-22): there is nothing to clip."""
    pairs = codes.view(np.uint16)
    o, p, count = np.uint64(first), np.uint64(to), np.uint64(n)
    bits = np.float32(scale).view(np.uint32)
    for i in range(np.uint64(4)):
        out[p + i] = np.uint8(bits >> np.uint32(np.uint64(8) * i))
    total = np.int32(0)
    for i in range(count):
        q = np.int32(np.float32(x[o + i] * inverse + _ROUNDER).view(np.int32) - _ROUNDER_BITS)
        total = np.int32(total + np.int32(q * q))
        codes[i] = np.uint8(q)
    if kind == INT8:
        _copy_bytes(codes, 0, out, to + 4, n)
    else:
        if n % 2 == 1:
            codes[count] = np.uint8(0)
        p += np.uint64(4)
        for i in range((count + np.uint64(1)) // np.uint64(2)):
            t = pairs[i]
            out[p + i] = np.uint8((t & np.uint16(15)) | ((t >> np.uint16(4)) & np.uint16(0xF0)))
    return np.float64(scale) * np.float64(scale) * np.float64(total)


@_compile_part
def _encode_block(
    kind: int, x: F32, bits: I32, first: int, n: int, out: U8, to: int, codes: U8, floats: F32, sums: F64
) -> float:
    """Encode x[first:first+n] at out[to:]; the squared norm of the decoded block, or -1 if it is refused."""
    largest = np.int32(_largest_bits(bits, first, n))
    if largest > MAGNITUDE_MAX_BITS:
        return -1.0
    if kind == FP32:
        return _encode_fp32(bits, first, n, out, to, floats, sums)
    if kind == BF16:
        keep = np.int32(0) if largest < FLUSH_BITS else np.int32(-1)
        return _encode_bf16(bits, first, n, keep, out, to, codes, floats, sums)
    scale, inverse = np.float32(0.0), np.float32(0.0)
    if largest >= FLUSH_BITS:
        absmax = np.int32(largest).view(np.float32)
        levels = np.float32(7.0) if kind == INT4 else np.float32(127.0)
        scale, inverse = np.float32(absmax / levels), np.float32(levels / absmax)
    return _encode_codes(kind, x, first, n, scale, inverse, out, to, codes)


# ---- decoding: unpack, then check and measure, then scale; each loop below takes the parts it needs -----------------


@_compile_part
def _unpack(kind: int, payload: U8, at: int, n: int, codes: U8, floats: F32) -> np.uint32:
    """int4 and int8: codes as signed bytes to `codes`, returns the scale's bits. Others: to `floats`, returns 0."""
    pairs = codes.view(np.uint16)
    raw_bits = floats.view(np.int32)
    raw = floats.view(np.uint8)
    if kind == FP32:
        _copy_bytes(payload, at, raw, 0, 4 * n)
        return np.uint32(0)
    if kind == BF16:
        _copy_bytes(payload, at, codes, 0, 2 * n)
        for i in range(np.uint64(n)):
            raw_bits[i] = np.int32(np.int32(pairs[i]) << np.int32(16))
        return np.uint32(0)
    scale_bits = np.uint32(0)
    for i in range(4):
        scale_bits |= np.uint32(np.uint32(payload[np.uint64(at + i)]) << np.uint32(8 * i))
    if kind == INT8:
        _copy_bytes(payload, at + 4, codes, 0, n)
        return scale_bits
    p = np.uint64(at + 4)
    for i in range(np.uint64((n + 1) // 2)):
        t = np.uint16(payload[p + i])
        low = np.uint8(((t & np.uint16(15)) ^ np.uint16(8)) - np.uint16(8))
        high = np.uint16(((t >> np.uint16(4)) ^ np.uint16(8)) - np.uint16(8))
        pairs[i] = np.uint16(low) | np.uint16(high << np.uint16(8))
    return scale_bits


@_compile_part
def _checked_norm(kind: int, scale_bits: np.uint32, n: int, codes: U8, floats: F32, sums: F64) -> float:
    """The squared norm of the unpacked block, or -1 if it is refused.

    Refused: a value above 2^100, NaN or infinity; a scale that is negative, not finite, above 2^100 or below what
    the encoder writes; a code -8 or -128; a code that is not zero under a scale that is; a used padding half-byte.
    """
    int8_codes = codes.view(np.int8)
    raw_bits = floats.view(np.int32)
    if kind >= BF16:
        return -1.0 if _largest_bits(raw_bits, 0, n) > MAGNITUDE_MAX_BITS else _squares(n, floats, sums)
    lowest, total = np.int8(0), np.int32(0)
    for i in range(np.uint64(n)):
        q = int8_codes[i]
        lowest = min(lowest, q)
        total = np.int32(total + np.int32(np.int16(q) * np.int16(q)))
    if lowest == (-8 if kind == INT4 else -128) or (kind == INT4 and n % 2 == 1 and codes[np.uint64(n)] != 0):
        return -1.0
    if scale_bits == 0:
        return 0.0 if total == 0 else -1.0
    if scale_bits < SCALE_MIN_BITS or scale_bits > np.uint32(MAGNITUDE_MAX_BITS):
        return -1.0
    scale = np.float64(np.uint32(scale_bits).view(np.float32))
    return scale * scale * np.float64(total)


@_compile_part
def _scale_up(kind: int, scale_bits: np.uint32, n: int, codes: U8, floats: F32) -> None:
    """Turn unpacked codes into values; those of bf16 and fp32 are values already."""
    int8_codes = codes.view(np.int8)
    if kind < BF16:
        scale = np.uint32(scale_bits).view(np.float32)
        for i in range(np.uint64(n)):
            floats[i] = scale * np.float32(int8_codes[i])


# ---- what is called --------------------------------------------------------------------------------------------------


@_callable(
    (*_PLACE, _VALUES, types.none, _BYTES_OUT, _NORMS, _VALUES_OUT, *_SCRATCH),
    (*_PLACE, _VALUES, _VALUES, _BYTES_OUT, _NORMS, _VALUES_OUT, *_SCRATCH),
)
def encode_span(
    layout: I64,
    span: I64,
    values: F32,
    minus: F32 | None,
    out: U8,
    norms: F64,
    difference: F32,
    codes: U8,
    floats: F32,
    sums: F64,
) -> int:
    """Encode values (or values - minus, unless minus is None); add the decoded squared norms per piece to `norms`.

    `difference`: scratch, 256 float32. Not `floats`: vectorised loops need source and target apart.
    """
    difference_bits = difference.view(np.int32)
    value_bits = values.view(np.int32)
    piece = span[PIECE]
    for block in range(span[START], span[STOP]):
        while layout[piece + 1, 0] <= block:
            piece += 1
        value, byte, n = _block_at(layout, span, piece, block)
        kind = layout[piece, 3]
        if minus is None:
            norm = _encode_block(kind, values, value_bits, value, n, out, byte, codes, floats, sums)
        else:
            o = np.uint64(value)
            for i in range(np.uint64(n)):
                difference[i] = values[o + i] - minus[o + i]
            norm = _encode_block(kind, difference, difference_bits, 0, n, out, byte, codes, floats, sums)
        if norm < 0.0:
            return block
        norms[piece] += norm
    return -1


@_callable((*_PLACE, _BYTES, _NORMS, *_SCRATCH))
def norms_span(layout: I64, span: I64, payload: U8, norms: F64, codes: U8, floats: F32, sums: F64) -> int:
    """Check every block and add the squared norms per piece to `norms`."""
    piece = span[PIECE]
    for block in range(span[START], span[STOP]):
        while layout[piece + 1, 0] <= block:
            piece += 1
        _, byte, n = _block_at(layout, span, piece, block)
        kind = layout[piece, 3]
        norm = _checked_norm(kind, _unpack(kind, payload, byte, n, codes, floats), n, codes, floats, sums)
        if norm < 0.0:
            return block
        norms[piece] += norm
    return -1


@_callable((*_PLACE, _BYTES, _VALUES_OUT, _NORMS, *_SCRATCH))
def decode_span(layout: I64, span: I64, payload: U8, out: F32, norms: F64, codes: U8, floats: F32, sums: F64) -> int:
    """Write the decoded values to `out`, and add their squared norms per piece to `norms`."""
    piece = span[PIECE]
    for block in range(span[START], span[STOP]):
        while layout[piece + 1, 0] <= block:
            piece += 1
        value, byte, n = _block_at(layout, span, piece, block)
        kind = layout[piece, 3]
        scale_bits = _unpack(kind, payload, byte, n, codes, floats)
        norm = _checked_norm(kind, scale_bits, n, codes, floats, sums)
        if norm < 0.0:
            return block
        norms[piece] += norm
        _scale_up(kind, scale_bits, n, codes, floats)
        o = np.uint64(value)
        for i in range(np.uint64(n)):
            out[o + i] = floats[i]
    return -1


@_callable((*_PLACE, _BYTES, _VALUES, _VALUES_OUT, _NORMS, *_SCRATCH))
def accumulate_span(
    layout: I64, span: I64, payload: U8, coefficients: F32, acc: F32, norms: F64, codes: U8, floats: F32, sums: F64
) -> int:
    """acc += coefficients[piece] * decoded, two roundings; add the squared norms of the decoded values to `norms`."""
    piece = span[PIECE]
    for block in range(span[START], span[STOP]):
        while layout[piece + 1, 0] <= block:
            piece += 1
        value, byte, n = _block_at(layout, span, piece, block)
        kind = layout[piece, 3]
        scale_bits = _unpack(kind, payload, byte, n, codes, floats)
        norm = _checked_norm(kind, scale_bits, n, codes, floats, sums)
        if norm < 0.0:
            return block
        norms[piece] += norm
        _scale_up(kind, scale_bits, n, codes, floats)
        o = np.uint64(value)
        c = coefficients[piece]
        for i in range(np.uint64(n)):
            acc[o + i] += c * floats[i]
    return -1


@_callable((*_PLACE, _BYTES, _VALUES, _FACTOR, _FACTOR, _VALUES_OUT, _VALUES_OUT, *_SCRATCH))
def outer_span(
    layout: I64,
    span: I64,
    payload: U8,
    factors: F32,
    lr: np.float32,
    mu: np.float32,
    theta: F32,
    momentum: F32,
    codes: U8,
    floats: F32,
    sums: F64,
) -> None:
    """The outer step on one span (`kernels.outer_step`). Checks nothing: run `norms_span` over the same bytes first."""
    piece = span[PIECE]
    for block in range(span[START], span[STOP]):
        while layout[piece + 1, 0] <= block:
            piece += 1
        value, byte, n = _block_at(layout, span, piece, block)
        kind = layout[piece, 3]
        _scale_up(kind, _unpack(kind, payload, byte, n, codes, floats), n, codes, floats)
        o = np.uint64(value)
        factor = factors[piece]
        for i in range(np.uint64(n)):
            d = factor * floats[i]
            m = mu * momentum[o + i] + d
            momentum[o + i] = m
            theta[o + i] -= lr * (d + mu * m)
