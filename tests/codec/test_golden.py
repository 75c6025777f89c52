"""The golden vectors: right by an independent account, and a kernel that differs in one bit is named."""

import hashlib
from typing import Any

import numpy as np
import pytest

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.golden import DIGESTS, PIECES, GoldenMismatch, check_golden, golden_input
from diloco_node.core.types import Codec
from diloco_node.errors import DilocoError
from diloco_node.numeric import F32
from tests.kit.codec_reference import reference

BY_HAND = {
    # scale 1: 0.5 and -0.5 round to 0, 1.5 and 2.5 to 2, -1.5 to -2; low half first: 07 | 2,2 | 0,-2 | -7,1
    Codec.INT4: ([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -7.0, 1.0], "0000803f 07 22 e0 19"),
    # scale 2: 3 -> 1.5 -> 2, 5 -> 2.5 -> 2, -1 -> -0.5 -> 0
    Codec.INT8: ([-254.0, 3.0, 5.0, -1.0, 254.0], "00000040 81 02 02 00 7f"),
    # 1 + 2^-8 and 1 + 3 * 2^-8 are half way: the even neighbour wins
    Codec.BF16: ([1 + 2**-8, 1 + 3 * 2**-8, -0.0, -2.0], "803f 823f 0080 00c0"),
    Codec.FP32: ([1.0, -0.0, 2.0**-149], "0000803f 00000080 01000000"),
}
"""The first values of a piece of 4,096 (the rest is zero), and the first bytes that they become."""


def sha(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(a if isinstance(a, bytes) else a.tobytes() for a in arrays)).hexdigest()[:16]


def step(theta: F32, momentum: F32, d: F32, lr: float, mu: float) -> tuple[F32, F32]:
    new = np.float32(mu) * momentum + d
    return theta - np.float32(lr) * (d + np.float32(mu) * new), new


@pytest.mark.parametrize("codec", list(Codec))
def test_the_literals_are_what_the_slow_reference_gives(codec: Codec) -> None:
    blocks = FragmentBlocks(PIECES, codec)
    x, y = golden_input(1), golden_input(2)
    encoded, decoded, norms = reference(blocks, x)
    delta, _, delta_norms = reference(blocks, x - y)
    c = np.repeat(np.array([1 / 3, -0.7, 1e-3, 0.9, 2.5], np.float32), PIECES)
    theta, momentum = step(y, x, c * decoded, 0.7, 0.9)
    later = step(theta, momentum, c * decoded, 0.4, 0.8)
    assert DIGESTS[codec] == {
        "encode": sha(encoded, np.array(norms)),
        "encode_delta": sha(delta, np.array(delta_norms)),
        "squared_norms": sha(np.array(norms)),
        "decode": sha(decoded, np.array(norms)),
        "accumulate": sha(y + c * decoded, np.array(norms)),
        "outer_step": sha(*later),
    }


def test_the_vector_holds_what_it_promises() -> None:
    x = golden_input(1)
    bits = x.view(np.uint32)
    assert np.count_nonzero(bits == 0x80000000) > 10, "negative zeros"
    assert np.count_nonzero((np.abs(x) < 2.0**-126) & (x != 0)) > 500, "denormals"
    first = np.abs(x[: 256 * 16]).reshape(16, 256).max(axis=1)
    assert np.count_nonzero(first < 2.0**-100) >= 2, "blocks that are flushed"
    assert np.count_nonzero((first >= 2.0**-100) & (first < 2.0**-99)) >= 1, "a block just above the limit"
    assert np.count_nonzero(np.abs(x - np.trunc(x)) == 0.5) > 50, "ties"


def test_this_machine_passes() -> None:
    check_golden()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("encode", "encode"),
        ("encode_delta", "encode_delta"),
        ("squared_norms", "squared_norms"),
        ("decode", "decode"),
        ("accumulate", "accumulate"),
        ("outer_step", "outer_step"),
    ],
)
def test_a_kernel_that_differs_in_one_bit_is_named(name: str, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(kernels, name)

    def wrong(blocks: FragmentBlocks, *arguments: Any) -> Any:
        result = right(blocks, *arguments)
        if blocks.codec is Codec.INT8:
            target = result if result is not None else arguments[4]
            target.view(np.uint8)[0] ^= 1
        return result

    monkeypatch.setattr(kernels, name, wrong)
    with pytest.raises(GoldenMismatch, match=f"int8 {changed}") as caught:
        check_golden()
    assert isinstance(caught.value, DilocoError)
    assert "int4" not in str(caught.value)


@pytest.mark.parametrize("codec", list(Codec))
def test_the_first_bytes_are_those_that_a_person_works_out(codec: Codec) -> None:
    values, first_bytes = BY_HAND[codec]
    blocks = FragmentBlocks((4096,) if codec is not Codec.BF16 else (4000,), codec)
    x = np.zeros(blocks.values, dtype=np.float32)
    x[: len(values)] = values
    payload = np.zeros(blocks.encoded_bytes, dtype=np.uint8)
    kernels.encode(blocks, x, payload)
    expected = bytes.fromhex(first_bytes)
    assert payload[: len(expected)].tobytes() == expected
