"""Golden vectors: what every kernel must give on every machine, checked when a daemon starts.

Regions repeat the same arithmetic and compare digests. A compiler or processor that rounds otherwise (contracted
products, denormals flushed to zero, another tie rule) would show as an alarm in the middle of a run; here it shows
before joining.

They are SHA-256 digests of each kernel's output over one vector with ties, zeros of both signs, denormals, blocks just
above and below the flush limit, short and odd last blocks, and small pieces.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import Codec
from diloco_node.errors import DilocoError
from diloco_node.numeric import F32


class GoldenMismatch(DilocoError):
    """A kernel gives other bits than on other machines: this node would not keep equal versions equal."""


PIECES: Final = (4097, 300, 1, 5001, 7)
"""Quantised with a last block of one value, small, smallest, quantised with an odd last block, small."""

_TABLE: Final = {
    "encode": "4be99c4fcfbfa5e0 0d56156d411bfccc 4067adca797ac1a6 f656f654924aae1f",
    "encode_delta": "5df41292c8294c17 6cab15d2474d7961 393aab9cbf252d05 01724aefdcef5efa",
    "squared_norms": "3237dc9be13949e6 811e5097e2dc0381 9c75dd0c46edc7d4 eb8f61093361fc4b",
    "decode": "3de5330af9676f4a 01048d867fae1690 41fa2ec7282f8881 f656f654924aae1f",
    "accumulate": "d1a6be461eccfe4e 307284ee9c15dd4c f1bf256e6de2b98c e942e74c818454f5",
    "outer_step": "d55909f989f11966 e444b6467967dea4 598737d02bcb7e88 0b9f6a638a30818a",
}
DIGESTS: Final = {
    codec: {name: digests.split()[column] for name, digests in _TABLE.items()}
    for column, codec in enumerate((Codec.INT4, Codec.INT8, Codec.BF16, Codec.FP32))
}


def golden_input(seed: int) -> F32:
    """The vector: integers from a linear congruence, scaled by exact powers of two. No library's random numbers."""
    n = sum(PIECES)
    index = np.arange(n, dtype=np.uint64)
    bits = ((index + np.uint64(seed * 65_537)) * np.uint64(2_654_435_761) >> np.uint64(3)) & np.uint64(0xFFFFFF)
    values = (bits.astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-20)
    exponents = np.array([0, -20, 3, -143, -102, -103, 60, 0], dtype=np.int32)[
        (index // np.uint64(256)).astype(int) % 8
    ]
    values = np.ldexp(values, exponents)
    has_ties = (exponents == 0) & (index % np.uint64(17) == 5)
    values[has_ties] = np.rint(values[has_ties]) + np.float32(0.5)
    values[3::101] = 0.0
    values[4::101] = -0.0
    values[6::509] = 2.0**-149
    return np.asarray(values, dtype=np.float32)


def golden_digests(codec: Codec) -> dict[str, str]:
    """The first 16 hex digits of the SHA-256 of what each kernel gives under this codec, by name."""
    blocks = FragmentBlocks(PIECES, codec)
    x, y = golden_input(1), golden_input(2)
    digests: dict[str, str] = {}

    def note(name: str, *arrays: NDArray[np.generic]) -> None:
        digests[name] = sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]

    payload = np.zeros(blocks.encoded_bytes, dtype=np.uint8)
    norms = kernels.encode(blocks, x, payload)
    note("encode", payload, norms)
    delta = np.zeros_like(payload)
    note("encode_delta", delta, kernels.encode_delta(blocks, x, y, delta))
    note("squared_norms", kernels.squared_norms(blocks, payload))
    output = np.zeros_like(x)
    note("decode", output, kernels.decode(blocks, payload, output))
    coefficients = np.array([1 / 3, -0.7, 1e-3, 0.9, 2.5], dtype=np.float32)
    acc = y.copy()
    note("accumulate", acc, kernels.accumulate(blocks, payload, 0, blocks.block_count, coefficients, acc))
    theta, momentum = y.copy(), x.copy()
    kernels.outer_step(blocks, payload, coefficients, 0.7, 0.9, theta, momentum)
    kernels.outer_step(blocks, payload, coefficients, 0.4, 0.8, theta, momentum)
    note("outer_step", theta, momentum)
    return digests


def check_golden() -> None:
    """Run every kernel on the golden vectors, in milliseconds. Raises GoldenMismatch: names those with other bits."""
    wrong = []
    for codec in Codec:
        digests = golden_digests(codec)
        wrong += [f"{codec} {name}" for name, digest in DIGESTS[codec].items() if digests[name] != digest]
    if wrong:
        raise GoldenMismatch(
            f"this machine rounds otherwise than the others in: {', '.join(wrong)}; it can't keep equal versions "
            "equal. Look for a processor setting or a library that flushes denormals to zero, or for another numba"
        )
