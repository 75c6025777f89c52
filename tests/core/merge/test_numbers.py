"""core/merge/numbers.py: no honest sum is beyond the bound, whatever the codec does to it, and longer ones are."""

from types import SimpleNamespace

import numpy as np
import pytest

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.numbers import is_same_number, length_limits, merge_numbers, stripe_radii
from diloco_node.core.merge.outliers import RecentRounds
from diloco_node.core.types import Codec, Contribution, MergeRule, RunSettings
from diloco_node.numeric import F32

SIZES = (5000, 300)
"""The second piece travels in bf16 whatever the codec."""

CUT = ((0, 7), (7, 22))
"""20 blocks of the first piece, 2 of the second."""
ROUNDS = 6


def values_of(rng: np.random.Generator, kind: str, direction: F32) -> F32:
    """Contributions that a codec changes little, or as much as it can."""
    if kind == "parallel":
        return direction * np.float32(rng.uniform(0.5, 2.0))
    values = rng.standard_normal(direction.size).astype(np.float32)
    if kind == "spikes":  # one large value in each block, and all others just above half a step of it
        values[:] = np.float32(0.501 / 7 if rng.random() < 0.5 else 0.501 / 127)
        values[::256] = 1.0
        values[5000] = 1.0
    return values


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8, Codec.BF16, Codec.FP32])
@pytest.mark.parametrize("kind", ["parallel", "random", "spikes"])
@pytest.mark.parametrize("rule", list(MergeRule))
def test_no_honest_sum_is_beyond_its_limit(codec: Codec, kind: str, rule: MergeRule) -> None:
    rng = np.random.default_rng(7)
    up, down = FragmentBlocks(SIZES, Codec.INT4), FragmentBlocks(SIZES, codec)
    settings = RunSettings(codec_down=codec)
    fragment = SimpleNamespace(piece_sizes=SIZES, rules=(rule, rule))
    direction = rng.standard_normal(sum(SIZES)).astype(np.float32)
    recent = RecentRounds()
    for version in range(1, ROUNDS + 1):
        bodies, contributions = [], []
        for place in range(3):
            body = np.zeros(up.encoded_bytes, np.uint8)
            norms = kernels.encode(up, values_of(rng, kind, direction) / np.float32(10**version), body)
            bodies.append(body)
            contributions.append(
                Contribution("abc"[place], 1, 0, version - 1, 1, 0, 8, 64 + 9 * place, tuple(map(float, norms)))
            )
        numbers = merge_numbers(
            fragment,  # type: ignore[arg-type]
            settings,
            tuple(contributions),
            carried_since=[version - 1] * 3,
            recent=recent,
            version=version,
            is_last=False,
        )
        rows = numbers.coefficients()
        total_norms = np.zeros(2)
        for start, stop in CUT:
            place_up = up.byte_slice(start, stop)
            total = np.zeros(up.span_values(start, stop), np.float32)
            parts = [
                kernels.accumulate(up, body[place_up], start, stop, np.array(row, np.float32), total)
                for body, row in zip(bodies, rows, strict=True)
            ]
            merged = np.zeros(down.span_bytes(start, stop), np.uint8)
            norms = kernels.encode(down, total, merged, start, stop)
            total_norms += norms
            limits = length_limits(stripe_radii(rows, [tuple(part) for part in parts]), settings)
            assert all(norms <= limits), (version, start)
        limits = length_limits(numbers.radii(), settings)
        assert all(total_norms <= limits), version
        if kind == "parallel" and codec is not Codec.INT4:
            assert all(1.5**2 * total_norms > limits), "of contributions that agree a sum times 1.5 is found"
        assert all(1000.0**2 * total_norms > limits)
        recent = recent.after(contributions, tuple(total_norms))


def test_numbers_are_the_same_but_for_the_last_bits_and_nothing_is_only_nothing() -> None:
    assert is_same_number(1.0, 1.0 + 2.0**-23)
    assert is_same_number(0.0, 0.0)
    assert not is_same_number(1.0, 1.0 + 2.0**-19)
    assert not is_same_number(0.0, 2.0**-149)
    assert not is_same_number(1.0, -1.0)
    assert not is_same_number(1.0, float("nan"))
    assert not is_same_number(float("inf"), 1.0)
