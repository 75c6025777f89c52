"""Encode, decode, reduce and apply: the typed face of the compiled loops.

The same rule holds for all of them: a call works on the span of blocks [block_start, block_stop), and every array is
exactly that span (`FragmentBlocks.value_slice`, `byte_slice`). Only the per-piece arrays are always whole. Without
a range the span is the whole fragment. Spans of one fragment can run in different threads: the loops release the GIL
and share nothing.

Results are bit for bit the same on every machine; what each value is:

- int4, int8: with `levels` 7 or 127 and float32 arithmetic, `scale = absmax / levels`, `code = rint(x * (levels /
  absmax))` with ties to even, decoded `scale * code`. A block with absmax below 2^-100 is all zero with scale 0.
- bf16: nearest, ties to even; a block with absmax below 2^-100 is all zero. fp32: the bits as they are.
- Squared norms are of the decoded values, in float64: for int4 and int8 `scale * scale * sum(code^2)` per block, for
  bf16 and fp32 32 sums by index mod 32 per block, folded in halves; blocks are added in order. The sum over several
  spans can therefore differ from that of the whole in the last bits.

Refused with PayloadCorrupt: magnitudes above 2^100, infinities and NaN, and encoded bytes that the encoder can't have
written.
"""

# ruff: noqa: PLR0917 (numeric kernels: arrays by position, as in numpy)

from __future__ import annotations

from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.kernel_cache import loops
from diloco_node.errors import PayloadCorrupt
from diloco_node.numeric import F32, F64, U8

Buffer = bytes | bytearray | memoryview | U8
"""Encoded bytes; only read unless an argument says otherwise."""

_Scalar = TypeVar("_Scalar", bound=np.generic)


def encode(
    blocks: FragmentBlocks, values: F32, out: Buffer, block_start: int = 0, block_stop: int | None = None
) -> F64:
    """Encode a span of values, shape (values of the span,), float32; not changed.

    out: writable bytes of the span; overwritten. Half written when the values are refused.

    Returns: shape (pieces,), float64: squared norm of the *decoded* values of the span per piece, 0 for pieces outside.
    Raises PayloadCorrupt: a value is NaN, infinite or above 2^100 in magnitude; the message names the block and piece.
    ValueError: an array has another size, type or layout than the span asks for.
    """
    return _encode(blocks, values, None, out, block_start, block_stop)


def encode_delta(
    blocks: FragmentBlocks, base: F32, theta: F32, out: Buffer, block_start: int = 0, block_stop: int | None = None
) -> F64:
    """Encode the outer gradient `base - theta` without a temporary: same bytes and norms as `encode(base - theta)`.

    base: what the learner last applied. theta: its parameters now. Shapes, result and errors as of `encode`.
    """
    return _encode(blocks, base, theta, out, block_start, block_stop)


def squared_norms(blocks: FragmentBlocks, payload: Buffer, block_start: int = 0, block_stop: int | None = None) -> F64:
    """Check what arrived and measure it, without decoding it anywhere: what passes is not refused by `accumulate`,
    `decode` or `outer_step` later.

    Returns: shape (pieces,), float64, as `encode`. Raises PayloadCorrupt: the length is wrong, or a block is one that
    no encoder wrote.
    """
    span = _Span(blocks, block_start, block_stop)
    span.raise_if_corrupt(loops().norms_span(*span.place, span.payload(payload), span.norms, *_scratch()))
    return span.norms


def decode(
    blocks: FragmentBlocks, payload: Buffer, out: F32, block_start: int = 0, block_stop: int | None = None
) -> F64:
    """Decode a span into `out`, shape (values of the span,), float32, overwritten.

    Returns and raises: as `squared_norms`; ValueError if `out` does not fit. `out` is half written when refused.
    """
    span = _Span(blocks, block_start, block_stop)
    source, target = span.payload(payload), span.writable(out, np.float32, "out")
    span.raise_if_corrupt(loops().decode_span(*span.place, source, target, span.norms, *_scratch()))
    return span.norms


def accumulate(
    blocks: FragmentBlocks, payload: Buffer, block_start: int, block_stop: int, coefficients: F32, acc: F32
) -> F64:
    """Add one contribution's stripe to the sum: `acc += coefficients[piece] * decoded`, each operation rounded to
    float32.

    Args:
        payload: bytes of the span. coefficients: shape (pieces,), float32.
        acc: shape (values of the span,), float32; changed in place, and half changed when the bytes are refused.

    Returns and raises: as `squared_norms`, without the coefficient; ValueError: another array does not fit.
    """
    span = _Span(blocks, block_start, block_stop)
    source, target = span.payload(payload), span.writable(acc, np.float32, "acc")
    factors = span.per_piece(coefficients, "coefficients")
    span.raise_if_corrupt(loops().accumulate_span(*span.place, source, factors, target, span.norms, *_scratch()))
    return span.norms


def outer_step(
    blocks: FragmentBlocks,
    payload: Buffer,
    factors: F32,
    lr: float,
    mu: float,
    theta: F32,
    momentum: F32,
    block_start: int = 0,
    block_stop: int | None = None,
    *,
    is_checked: bool = False,
) -> None:
    """SGD with Nesterov momentum on the decoded merge: every region repeats it, and gets the same bits.

    Per value, each line one or two float32 operations rounded one by one:
    `d = factors[piece] * decoded`, `m = mu * m + d`, `theta = theta - lr * (d + mu * m)`.

    Args:
        payload: bytes of the span of the merged payload.
        factors: shape (pieces,), float32; share and radius of the merge.
        lr: outer learning rate. mu: outer momentum, 0 for plain SGD. Both are rounded to float32.
        theta, momentum: shape (values of the span,), float32; changed in place.
        is_checked: these very bytes have passed `squared_norms`, or were made here: a fifth of the time is saved.

    Raises PayloadCorrupt: the length is wrong, or a block is one that no encoder wrote. The span is checked before
    anything is changed, but other spans may have been applied: check whole payloads on arrival. ValueError: an array
    does not fit.

    Source: Decoupled DiLoCo (arXiv 2604.21428), outer optimizer; the form of torch.optim.SGD(nesterov=True).
    """
    span = _Span(blocks, block_start, block_stop)
    source = span.payload(payload)
    scale = span.per_piece(factors, "factors")
    arrays = span.writable(theta, np.float32, "theta"), span.writable(momentum, np.float32, "momentum")
    if not is_checked:
        span.raise_if_corrupt(loops().norms_span(*span.place, source, span.norms, *_scratch()))
    loops().outer_span(*span.place, source, scale, np.float32(lr), np.float32(mu), *arrays, *_scratch())


def warm_up() -> None:
    """Load every loop, or compile it (some 14 s): else the first round of a run would pay for the compiler."""
    loops()


def _encode(
    blocks: FragmentBlocks, values: F32, minus: F32 | None, out: Buffer, block_start: int, block_stop: int | None
) -> F64:
    span = _Span(blocks, block_start, block_stop)
    source = span.checked(values, np.float32, "values")
    subtrahend = None if minus is None else span.checked(minus, np.float32, "theta")
    target = span.writable(_as_bytes(out), np.uint8, "out", span.bytes_count)
    difference = np.empty(256, np.float32)
    bad_block = loops().encode_span(*span.place, source, subtrahend, target, span.norms, difference, *_scratch())
    if bad_block >= 0:
        piece = blocks.piece_of(bad_block)
        raise PayloadCorrupt(
            f"values to encode are NaN, infinite or above 2^100 in block {bad_block} (piece {piece}): "
            "the training run has diverged or its memory is damaged"
        )
    return span.norms


class _Span:
    """The checked range of one call, checks of the arrays that must fit it, and room for the norms of its pieces."""

    def __init__(self, blocks: FragmentBlocks, block_start: int, block_stop: int | None) -> None:
        stop = blocks.block_count if block_stop is None else block_stop
        self.blocks = blocks
        self.norms: F64 = np.zeros(blocks.pieces, dtype=np.float64)
        self.values_count = blocks.span_values(block_start, stop)
        self.bytes_count = blocks.span_bytes(block_start, stop)
        piece = blocks.piece_of(block_start) if block_start < stop else 0
        first_value, first_byte = blocks.value_offset(block_start), blocks.byte_offset(block_start)
        self.block_start, self.block_stop = block_start, stop
        entries = np.array([piece, block_start, stop, first_value, first_byte], dtype=np.int64)
        self.place = blocks.layout, entries

    def payload(self, buffer: Buffer) -> U8:
        """The encoded bytes as an array; their length comes from a peer, so a wrong one is PayloadCorrupt."""
        array = _as_bytes(buffer)
        if array.size != self.bytes_count:
            raise PayloadCorrupt(
                f"blocks [{self.block_start}, {self.block_stop}) have {self.bytes_count} encoded bytes, "
                f"found {array.size}"
            )
        return self.checked(array, np.uint8, "encoded", self.bytes_count)

    def per_piece(self, array: F32, name: str) -> F32:
        """An array with one float32 per piece of the whole fragment."""
        return self.checked(array, np.float32, name, self.blocks.pieces)

    def writable(
        self, array: NDArray[_Scalar], dtype: type[_Scalar], name: str, size: int | None = None
    ) -> NDArray[_Scalar]:
        """The array itself, after the checks."""
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only")
        return self.checked(array, dtype, name, size)

    def raise_if_corrupt(self, block: int) -> None:
        """Turn a loop's answer into the error."""
        if block >= 0:
            piece = self.blocks.piece_of(block)
            raise PayloadCorrupt(
                f"block {block} (piece {piece}) of the encoded fragment holds an illegal scale or value"
            )

    def checked(
        self, array: NDArray[_Scalar], dtype: type[_Scalar], name: str, size: int | None = None
    ) -> NDArray[_Scalar]:
        """The array itself, after the checks, whether it could be written or not."""
        count = self.values_count if size is None else size
        if array.dtype != dtype or array.ndim != 1 or array.size != count or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} must be a contiguous vector of {count} {np.dtype(dtype)}, "
                f"found {array.dtype} of shape {array.shape}"
            )
        if not array.flags.aligned:
            raise ValueError(f"{name} must be aligned to {array.dtype.itemsize} bytes")
        return array


def _as_bytes(buffer: Buffer) -> U8:
    if isinstance(buffer, np.ndarray):
        return buffer
    return cast(U8, np.frombuffer(buffer, dtype=np.uint8))


def _scratch() -> Any:
    """Working memory of one call: codes, decoded values and partial sums of one block."""
    return np.empty(512, np.uint8), np.empty(256, np.float32), np.empty(32, np.float64)
