"""The codecs of the quality benchmark: nothing is lost, bits are those of a payload, and tables choose rightly."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import quality
import quality_lines
from quality_codecs import CHUNK, LEVELS_BITS, Sparse, SparseRounds
from quality_merge import Rounds

from diloco_node.core.types import Codec, MergeRule, RunSettings

SHAPES = {"a.weight": (64, 80), "b.weight": (2, CHUNK), "c.bias": (7,)}
SIZE = sum(math.prod(shape) for shape in SHAPES.values())
PLAIN = RunSettings(
    fragments=1,
    sync_every=4,
    overlap_steps=0,
    outer_lr=1.0,
    outer_momentum=0.0,
    merge=MergeRule.AVG,
    codec_up=Codec.FP32,
    codec_down=Codec.FP32,
)


def heavy_tailed(*shape: int, seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).standard_t(3, shape) * 1e-3).astype(np.float32)


def sparse_rounds(learners: int, sparse: Sparse, steps: int) -> tuple[SparseRounds, np.ndarray]:
    """Learners whose parameters move at random; also the sum of their mean moves, float64."""
    theta = np.ones((learners, SIZE), np.float32)
    rounds = SparseRounds(PLAIN, SHAPES, theta, sparse=sparse, tokens_per_step=10)
    moved = np.zeros(SIZE)
    for step in range(1, steps + 1):
        move = heavy_tailed(learners, SIZE, seed=step)
        theta += move
        moved += move.mean(0)
        if step < steps:
            rounds.after_step(step)
    return rounds, moved


@pytest.mark.parametrize("share", [1 / 16, 1 / 8, 1.0])
def test_what_is_not_sent_waits(share: float) -> None:
    """Error feedback keeps the sum: what arrived and what waits are together all that was learnt."""
    rounds, moved = sparse_rounds(3, Sparse(share), 41)
    rounds.theta[:] = rounds.globals[0].theta  # the steps after the last round are no matter here
    waiting = np.mean([line[0] for line in rounds.waiting], axis=0)
    moved -= heavy_tailed(3, SIZE, seed=41).mean(0)
    assert np.abs(waiting).max() > 1e-4
    np.testing.assert_allclose(rounds.global_parameters() - 1 - waiting, moved, atol=1e-5)


def test_a_last_round_brings_what_waits_unless_it_is_dropped() -> None:
    errors = {}
    for flush in (True, False):
        rounds, moved = sparse_rounds(3, Sparse(1 / 16, flush=flush), 41)
        rounds.finish(41)
        errors[flush] = float(np.abs(rounds.global_parameters() - 1 - moved).mean())
    assert errors[True] < 0.2 * errors[False]


def test_feedback_scales_what_waits() -> None:
    rounds, _ = sparse_rounds(1, Sparse(1 / 16, feedback=0.5), 4)
    base, offered = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    rounds.waiting[0][0][:] = waiting = heavy_tailed(SIZE)
    rounds._encoded(0, 0, base, offered, is_last=True)
    whole = rounds.waiting[0][0].copy()
    rounds.waiting[0][0][:] = waiting / 2
    rounds.sparse = Sparse(1 / 16)
    rounds._encoded(0, 0, base, offered, is_last=True)
    np.testing.assert_array_equal(rounds.waiting[0][0], whole)


def payload_of(arrived: np.ndarray, sparse: Sparse) -> str:
    """The bits of one chunk, written out: both magnitudes, then of each value its distance, sign and size."""
    places = np.flatnonzero(arrived)
    large, small = max(abs(arrived[places])), min(abs(arrived[places]))
    text = "".join(f"{int(np.float32(level).view(np.uint32)):032b}" for level in (large, small))
    before = -1
    for place in places:
        gap, before = int(place) - before - 1, int(place)
        if sparse.share < 1:
            text += "1" * (gap >> sparse.rice_bits) + "0"
            text += f"{gap & ((1 << sparse.rice_bits) - 1):0{sparse.rice_bits}b}"
        text += f"{int(arrived[place] < 0)}{int(abs(arrived[place]) == large)}"
    return text


def values_in(payload: str, sparse: Sparse, count: int) -> np.ndarray:
    """Read `payload_of` again."""
    levels = [np.uint32(int(payload[at : at + 32], 2)).view(np.float32) for at in (32, 0)]
    values, at, place = np.zeros(count, np.float32), LEVELS_BITS, -1
    while at < len(payload):
        gap = 0
        if sparse.share < 1:
            unary = payload.index("0", at) - at
            at += unary + 1
            gap = (unary << sparse.rice_bits) + int(payload[at : at + sparse.rice_bits], 2)
            at += sparse.rice_bits
        place += gap + 1
        values[place] = levels[int(payload[at + 1])] * (-1 if payload[at] == "1" else 1)
        at += 2
    return values


@pytest.mark.parametrize("share", [1 / 16, 1 / 8, 1.0])
def test_the_bits_counted_are_those_of_a_payload(share: float) -> None:
    sparse = Sparse(share)
    values = heavy_tailed(CHUNK + 1024)
    arrived, bits = sparse.sent(values)
    payloads = [payload_of(chunk, sparse) for chunk in (arrived[:CHUNK], arrived[CHUNK:])]
    assert bits == sum(map(len, payloads))
    read = [values_in(payload, sparse, count) for payload, count in zip(payloads, (CHUNK, 1024), strict=True)]
    np.testing.assert_array_equal(np.concatenate(read), arrived)
    taken = np.flatnonzero(arrived[:CHUNK])
    assert len(taken) == round(share * CHUNK)
    np.testing.assert_array_equal(np.sort(taken), np.sort(np.argsort(-abs(values[:CHUNK]))[: len(taken)]))
    taken = np.flatnonzero(arrived)
    assert np.square(arrived[taken] - values[taken]).sum() < 0.35 * np.square(values[taken]).sum()


def test_small_pieces_travel_in_bf16_and_a_last_round_in_int4() -> None:
    rounds, _ = sparse_rounds(1, Sparse(1.0), 1)
    base = np.zeros(SIZE, np.float32)
    _, _, bits = rounds._encoded(0, 0, base, heavy_tailed(SIZE), is_last=False)
    chunks = 2 + 2  # of 5,120 and of 8,192 values
    assert bits == 2 * (SIZE - 7) + chunks * LEVELS_BITS + 7 * 16
    _, _, bits = rounds._encoded(0, 0, base, heavy_tailed(SIZE), is_last=True)
    assert bits == 8 * ((SIZE - 7) // 2 + (SIZE - 7) // 256 * 4 + 7 * 2)


@pytest.mark.parametrize(("turn", "cosine"), [(1, 1.0), (-1, -1.0)])
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_autocorrelation_is_that_of_merged_gradients(turn: int, cosine: float, momentum: float) -> None:
    theta = np.zeros((2, SIZE), np.float32)
    settings = replace(PLAIN, outer_momentum=momentum, sync_every=1)
    rounds = Rounds(settings, SHAPES, theta, tokens_per_step=10, outer_total=0.0)
    for step in range(1, 9):
        theta += heavy_tailed(SIZE) * turn**step
        rounds.after_step(step)
    assert rounds.autocorrelation() == pytest.approx([cosine], abs=1e-3)
    assert len(rounds.cosines[0]) == 7
    rounds.outer_total = 1.25
    round_ = rounds._open or [type("round", (), {"is_last": False, "fragment": 0})()]
    rate, mu = rounds._outer_rates(round_[0])
    assert (rate, mu) == pytest.approx((1.25 * (1 - mu), 0.9 if turn > 0 else 0.0))


def test_options_change_each_arm_that_merges() -> None:
    arms = {arm.name: arm for arm in quality.arms_for(4000, 8)}
    ours = quality.varied(arms["ours"], "topk:12.5%:0.9:drop", "avg", "0.7/0.3")
    assert ours.sparse == Sparse(0.125, 0.9, flush=False)
    assert str(ours.sparse) == "top 12.5 %, feedback 0.9, rest dropped"
    settings = ours.rounds
    assert (settings.sync_every, settings.merge, settings.outer_lr, settings.outer_momentum) == (8, "avg", 0.7, 0.3)
    assert quality.varied(arms["ours"], "2bit", "", "").sparse == Sparse(1.0)
    assert quality.varied(arms["ours"], "int8", "", "auto").outer_total == quality.OUTER_TOTAL
    assert quality.varied(arms["data_parallel"], "int8", "avg", "1/0") == arms["data_parallel"]
    keys = {
        quality.Job(arm, 4e-3, 1, 4000, size).key() for arm in (ours, arms["ours"]) for size in (quality.SMALLEST, "1m")
    }
    assert len(keys) == 4


def test_a_table_takes_the_rate_with_most_seeds_then_the_best_and_compares_seed_by_seed(tmp_path: Path) -> None:
    def line(arm: str, rate: float, seed: int, loss: float, revision: int = 5) -> str:
        facts = {"arm": arm, "size": "1m", "parameters": 1, "learners": 4, "steps": 9, "rate": rate, "seed": seed}
        merged = {"every": 8, "codec": "int4", "merge": "rda", "outer": "1 / 0", "bits": 2.0, "autocorrelation": [0.5]}
        facts |= {"key": json.dumps([revision]), "loss": loss}
        return json.dumps(facts | (merged if arm == "ours" else {}))

    lines = [line("data_parallel", 1.0, 1, 1.0), line("data_parallel", 1.0, 2, 2.0), line("data_parallel", 2.0, 1, 0.5)]
    lines += [
        line("ours", 1.0, 1, 1.02),
        line("ours", 1.0, 2, 2.08),
        line("ours", 2.0, 1, 1.5),
        line("ours", 2.0, 2, 3),
        line("ours", 1.0, 1, 9.0, revision=4),
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join([*lines, lines[0][:20]]))
    reference, ours = quality_lines.read(path)
    assert (reference.facts["rate"], reference.losses, reference.gap_words) == (1.0, {1: 1.0, 2: 2.0}, "")
    assert (ours.losses, ours.bits, ours.autocorrelation) == ({1: 1.02, 2: 2.08}, 2.0, (0.5,))
    assert (ours.gap, ours.error) == pytest.approx((3.0, 1.0))
    assert ours.tried == {1.0: 1.55, 2.0: 2.25}
    assert "| +3.00 % ± 1.00 |" in quality_lines.table([ours])
