"""Blocks encoded by torch's operators have the bytes and norms of the kernel."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.types import BLOCK_VALUES, SMALL_TENSOR_VALUES, Codec, MergeRule
from diloco_node.errors import PayloadCorrupt
from diloco_node.learner.contribution_area import ContributionArea, area_sizes
from diloco_node.learner.layouts.block_rows import (
    EncodedRows,
    differing_bytes,
    encode_rows,
    is_in_rows,
    row_count,
    squared_norm,
)
from diloco_node.learner.layouts.device import encodes_there

LARGE = SMALL_TENSOR_VALUES
KINDS = {
    "normal": lambda values, draw: values,
    "zero": lambda values, draw: values * 0,
    "every magnitude": lambda values, draw: values * np.exp2(draw.integers(-130, 90, values.size).astype(np.float32)),
    "ties": lambda values, draw: np.round(values * 14) / np.float32(2),
    "denormal": lambda values, draw: values * np.float32(1e-44),
    "too large": lambda values, draw: np.where(np.arange(values.size) == 300, np.float32(2.0**101), values),
    "no number": lambda values, draw: np.where(np.arange(values.size) == values.size - 1, np.float32("nan"), values),
}


def rows_of(values: np.ndarray, codec: Codec) -> EncodedRows:
    padded = torch.zeros(row_count(values.size) * BLOCK_VALUES, device="cpu")
    padded[: values.size] = torch.from_numpy(values)
    code_bytes, squares = encode_rows(padded.view(-1, BLOCK_VALUES), codec)
    return EncodedRows(code_bytes.numpy(), squares.numpy())


@pytest.mark.parametrize("sizes", [(LARGE,), (LARGE + 904, 300, LARGE + 1), (1, LARGE + 255, 257, 70_000)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8])
def test_an_area_gets_the_kernels_bytes_and_norms(codec: Codec, kind: str, sizes: tuple[int, ...]) -> None:
    draw = np.random.default_rng(5)
    specs = [TensorSpec(f"t{number}", (size,), MergeRule.AVG) for number, size in enumerate(sizes)]
    manifest = build_manifest(specs, 1)
    (blocks,) = (FragmentBlocks(fragment.piece_sizes, codec) for fragment in manifest.fragments)
    base = KINDS[kind](draw.standard_normal(sum(sizes), np.float32), draw).astype(np.float32)
    theta = draw.standard_normal(sum(sizes), np.float32) if kind == "normal" else np.zeros_like(base)
    rows, start = {}, 0
    for piece, size in enumerate(blocks.piece_sizes):
        if is_in_rows(blocks, piece):
            rows[piece] = rows_of((base - theta)[start : start + size], codec)
        start += size
    area, expected = (np.full(area_sizes(manifest, codec)[1], 7, np.uint8) for _ in range(2))
    assert len(rows) == sum(size >= LARGE for size in sizes)
    encoder = ContributionArea(manifest, codec, area)
    if kind in ("too large", "no number"):
        with pytest.raises(PayloadCorrupt, match="block"):
            encoder.encode(0, base, theta, rows)
        return
    norms = kernels.encode_delta(blocks, base, theta, expected)
    assert encoder.encode(0, base, theta, rows).tobytes() == norms.tobytes()
    assert np.array_equal(area, expected)


@given(
    arrays(np.float32, st.integers(LARGE, LARGE + 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.sampled_from([Codec.INT4, Codec.INT8]),
)
def test_any_values_have_the_kernels_bytes(values: np.ndarray, codec: Codec) -> None:
    blocks = FragmentBlocks([values.size], codec)
    expected = np.zeros(blocks.encoded_bytes, np.uint8)
    norms = kernels.encode(blocks, values, expected)
    rows = rows_of(values, codec)
    assert np.array_equal(rows.code_bytes.reshape(-1)[: expected.size], expected)
    assert squared_norm(rows) == norms[0]


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8])
def test_a_device_that_rounds_otherwise_is_found(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert differing_bytes(cpu, codec) == 0
    monkeypatch.setattr(torch.Tensor, "__truediv__", lambda value, other: value * (1.0 / other))
    assert differing_bytes(cpu, codec) > 0


@pytest.mark.parametrize(
    ("codec", "is_gathered", "reason"),
    [(Codec.FP32, False, "codec_up is fp32"), (Codec.INT4, True, "blocks lie across"), (Codec.INT8, False, "streams")],
)
def test_where_no_device_can_encode_it_is_said(
    codec: Codec, is_gathered: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not encodes_there([torch.device("cpu")], codec, "device", is_gathered=is_gathered)
    assert reason in caplog.text
    caplog.clear()
    assert not encodes_there([torch.device("cpu")], codec, "host", is_gathered=is_gathered)
    assert not caplog.text
