"""codec/projection.py with core/merge/freivalds.py: honest sums pass whatever the codec, wrong ones do not."""

from collections.abc import Callable

import numpy as np
import pytest

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.codec.projection import project
from diloco_node.core.merge.freivalds import (
    AUDIT_EVERY,
    ROWS_DUE_EVERY,
    WINDOW_BLOCKS,
    are_rows_due,
    draw_windows,
    has_other_projections,
    lacking_rows,
    wrong_reducers,
)
from diloco_node.core.projections import Projection, Window
from diloco_node.core.types import Codec, Contribution, Stripe
from diloco_node.numeric import F32, U8

PIECES = (40_000, 300, 5_000)
STRIPES = (Stripe("a", 0, 70), Stripe("b", 70, 130), Stripe("a", 130, 150), Stripe("c", 150, 179))
COEFFICIENTS = ((0.5, 0.25, 0.125), (0.2, 0.5, 0.25), (0.3, 0.25, 0.625))


def audited(seed: int) -> tuple[bytes, ...]:
    """Nonces by which a payload is audited."""
    pairs = ((seed.to_bytes(2, "big"), turn.to_bytes(2, "big")) for turn in range(1000))
    return next(pair for pair in pairs if draw_windows(pair, STRIPES, piece_blocks()))


def piece_blocks() -> tuple[int, ...]:
    return tuple(-(-size // 256) for size in PIECES)


def contributions(rng: np.random.Generator, *, tails: float) -> list[F32]:
    """Three with heavy tails: values times a log-normal length."""
    lengths = np.exp(tails * rng.standard_normal((3, sum(PIECES))))
    return list((1e-3 * rng.standard_normal((3, sum(PIECES))) * lengths).astype(np.float32))


def slice_of(blocks: FragmentBlocks, encoded: U8, window: Window) -> U8:
    return encoded[blocks.byte_slice(window.block_start, window.block_stop)]


def audit(
    codec_up: Codec,
    codec_down: Codec,
    change: Callable[[F32], F32],
    *,
    seed: int,
    tails: float = 0.5,
) -> dict[str, str]:
    """Reduce as a reducer does, and compare as a leader does."""
    rng = np.random.default_rng(seed)
    up, down = FragmentBlocks(PIECES, codec_up), FragmentBlocks(PIECES, codec_down)
    windows = draw_windows(audited(seed), STRIPES, piece_blocks())
    total, bodies = np.zeros(sum(PIECES), np.float32), []
    for gradient, row in zip(contributions(rng, tails=tails), COEFFICIENTS, strict=True):
        body = np.empty(up.encoded_bytes, np.uint8)
        kernels.encode(up, gradient, body)
        kernels.accumulate(up, body, 0, up.block_count, np.array(row, np.float32), total)
        bodies.append(body)
    payload = np.empty(down.encoded_bytes, np.uint8)
    kernels.encode(down, change(total), payload)
    pairs = [project(down, slice_of(down, payload, window), window) for window in windows]
    rows = [[project(up, slice_of(up, body, window), window)[0] for window in windows] for body in bodies]
    sums, errors = (tuple(column) for column in zip(*pairs, strict=True))
    return wrong_reducers(windows, Projection(sums, errors), COEFFICIENTS, rows)


@pytest.mark.parametrize("codec", list(Codec))
def test_an_honest_sum_passes_with_what_its_encoding_loses(codec: Codec) -> None:
    for seed in range(12):
        for tails in (0.0, 2.0):
            assert audit(Codec.INT4, codec, lambda total: total, seed=seed, tails=tails) == {}


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.BF16, Codec.FP32])
@pytest.mark.parametrize("factor", [-1.0, 1.5, 0.8])
def test_a_sum_times_something_is_found_at_once(codec: Codec, factor: float) -> None:
    for seed in range(4):
        assert audit(Codec.INT4, codec, lambda total: np.float32(factor) * total, seed=seed).keys() == {"a", "b", "c"}


def test_a_flipped_sum_in_four_bits_is_found_in_a_few_audits() -> None:
    names = [name for seed in range(8) for name in audit(Codec.INT4, Codec.INT4, np.negative, seed=seed)]
    assert all(names.count(reducer) >= 4 for reducer in "abc"), names


def test_only_the_reducer_of_the_wrong_blocks_is_named() -> None:
    first, stop = (
        FragmentBlocks(PIECES, Codec.INT8).value_offset(70),
        FragmentBlocks(PIECES, Codec.INT8).value_offset(130),
    )

    def flip(total: F32) -> F32:
        total[first:stop] *= -1
        return total

    assert audit(Codec.INT4, Codec.INT8, flip, seed=1).keys() == {"b"}


def test_windows_lie_in_a_piece_and_in_a_stripe_of_their_reducer() -> None:
    windows = draw_windows(audited(0), STRIPES, piece_blocks())
    edges = (0, 157, 159, 179)
    assert {window.reducer for window in windows} == {"a", "b", "c"}
    assert len(windows) >= 6
    for window in windows:
        assert 0 < window.block_stop - window.block_start <= WINDOW_BLOCKS
        assert edges[window.piece] <= window.block_start < window.block_stop <= edges[window.piece + 1]
        assert any(
            stripe.reducer == window.reducer
            and stripe.block_start <= window.block_start < window.block_stop <= stripe.block_stop
            for stripe in STRIPES
        )
    assert draw_windows((), STRIPES, piece_blocks()) == ()


def test_other_blocks_and_signs_are_drawn_for_other_nonces() -> None:
    others = draw_windows(audited(1), STRIPES, piece_blocks())
    assert others != draw_windows(audited(0), STRIPES, piece_blocks())
    assert others == draw_windows(audited(1), STRIPES, piece_blocks())


def test_one_payload_of_so_many_is_audited() -> None:
    draws = [
        bool(draw_windows((bytes([first]), bytes([second])), STRIPES, piece_blocks()))
        for first in range(20)
        for second in range(100)
    ]
    assert abs(sum(draws) - len(draws) / AUDIT_EVERY) < 100


def test_nothing_is_said_while_a_member_has_told_nothing() -> None:
    windows = draw_windows(audited(0), STRIPES, piece_blocks())
    projection = Projection((9.0,) * len(windows), (1e-9,) * len(windows))
    rows = [(0.0,) * len(windows)] * 3
    assert wrong_reducers(windows, projection, COEFFICIENTS, rows).keys() == {"a", "b", "c"}
    assert wrong_reducers(windows, projection, COEFFICIENTS, [*rows[:2], ()]) == {}
    assert wrong_reducers(windows, projection, COEFFICIENTS, ()) == {}, "a leader may leave all of them away"


def test_rows_of_some_audits_are_due_and_nobody_knows_before_of_which() -> None:
    pairs = [(bytes([first]), bytes([second])) for first in range(20) for second in range(100)]
    due = [pair for pair in pairs if are_rows_due(pair)]
    assert all(draw_windows(pair, STRIPES, piece_blocks()) for pair in due)
    assert abs(len(due) - len(pairs) / AUDIT_EVERY / ROWS_DUE_EVERY) < 60
    assert len({first for first, _ in due}) == 20
    assert len({second for _, second in due}) > 80
    assert not are_rows_due(())


def test_a_row_that_is_in_no_sum_is_not_missed() -> None:
    windows = draw_windows(audited(0), STRIPES, piece_blocks())
    projection = Projection((9.0,) * len(windows), (1e-9,) * len(windows))
    rows = [(0.0,) * len(windows), (0.0,) * len(windows), ()]
    factors = [*COEFFICIENTS[:2], (0.0, 0.0, 0.0)]
    assert wrong_reducers(windows, projection, factors, rows).keys() == {"a", "b", "c"}
    assert wrong_reducers(windows, Projection(), factors, rows) == {}, "the payload is not projected here"
    assert (lacking_rows(factors, rows), lacking_rows(COEFFICIENTS, rows)) == ([], [2])
    assert lacking_rows(factors, ()) == [0, 1]


def test_what_the_encoder_flushes_to_zero_is_no_deviation() -> None:
    windows = draw_windows(audited(0), STRIPES, piece_blocks())
    zeros = (0.0,) * len(windows)
    rows = [(2.0**-101,) * len(windows)] * 3
    assert wrong_reducers(windows, Projection(zeros, zeros), COEFFICIENTS, rows) == {}


def test_projections_may_differ_by_the_order_of_their_sums_alone() -> None:
    window = Window("a", 0, 0, 4, b"seed")
    contribution = Contribution("a", 1, 0, 1, 0, 0, 4, 28, (4.0, 1.0, 1.0))
    assert not has_other_projections(contribution, [window], [1.0], [1.0 + 1e-7])
    assert has_other_projections(contribution, [window], [1.0], [1.001])
