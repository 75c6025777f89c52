"""Digests: against hashlib and BLAKE3 by hand, and sensitive to everything that must be equal."""

import hashlib

import numpy as np
import pytest
from blake3 import blake3

from diloco_node.codec.digest import LEAF_BYTES, fragment_digest, payload_digest, stripe_digest

SEED = 11
LEAF_VALUES = LEAF_BYTES // 4


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def state(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    return rng.standard_normal(n).astype(np.float32), rng.standard_normal(n).astype(np.float32)


def test_known_values() -> None:
    abc = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert stripe_digest(b"abc").hex() == abc
    assert stripe_digest(memoryview(bytearray(b"abc"))).hex() == abc
    assert stripe_digest(np.frombuffer(b"abc", np.uint8)).hex() == abc
    assert payload_digest([b"a" * 32, b"b" * 32]) == sha(b"a" * 32 + b"b" * 32)
    assert payload_digest([b"a" * 32, b"b" * 32]) != payload_digest([b"b" * 32, b"a" * 32])


@pytest.mark.parametrize("n", [0, 1, LEAF_VALUES - 1, LEAF_VALUES, LEAF_VALUES + 1, 3 * LEAF_VALUES])
def test_the_root_is_over_the_size_and_the_leaves_of_theta_then_momentum(n: int) -> None:
    theta, momentum = state(n)
    leaves = b""
    for data in (theta.tobytes(), momentum.tobytes()):
        for start in range(0, len(data), 1 << 20):
            leaves += blake3(data[start : start + (1 << 20)]).digest()
    assert fragment_digest(theta, momentum) == sha(n.to_bytes(8, "little") + leaves)


def test_every_bit_and_the_place_of_every_value_counts() -> None:
    theta, momentum = state(LEAF_VALUES + 5)
    seen = {fragment_digest(theta, momentum), fragment_digest(momentum, theta)}
    for array in (theta, momentum):
        for at in (0, LEAF_VALUES - 1, LEAF_VALUES, array.size - 1):
            array.view(np.uint32)[at] ^= 1
            seen.add(fragment_digest(theta, momentum))
            array.view(np.uint32)[at] ^= 1
    assert len(seen) == 2 + 8
    zero = np.zeros(4, np.float32)
    assert fragment_digest(zero, zero) != fragment_digest(-zero, zero), "0 and -0 are different bytes"


def test_arrays_that_are_not_a_state_are_refused() -> None:
    theta, momentum = state(8)
    for bad in (momentum[:-1], momentum.astype(np.float64), np.zeros(16, np.float32)[::2], momentum.reshape(2, 4)):
        with pytest.raises(ValueError, match="momentum must be a contiguous vector of 8 float32"):
            fragment_digest(theta, bad)
