"""The block layout: sizes, offsets, spans."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.codec.blocks import FragmentBlocks, block_bytes, piece_codec
from diloco_node.core.types import BLOCK_VALUES, SMALL_TENSOR_VALUES, Codec

piece_lists = st.lists(
    st.one_of(st.integers(1, 600), st.integers(4090, 4100), st.integers(4096, 9000)), min_size=1, max_size=6
)


def walk(piece_sizes: list[int], codec: Codec) -> list[tuple[int, int, int, int]]:
    """(piece, values, value offset, byte offset) of each block, by walking over them one by one."""
    found, value, byte = [], 0, 0
    for piece, size in enumerate(piece_sizes):
        kind = codec if codec is Codec.FP32 or size >= SMALL_TENSOR_VALUES else Codec.BF16
        for start in range(0, size, BLOCK_VALUES):
            n = min(BLOCK_VALUES, size - start)
            found.append((piece, n, value, byte))
            value += n
            byte += {"int4": 4 + -(-n // 2), "int8": 4 + n, "bf16": 2 * n, "fp32": 4 * n}[kind]
    return [*found, (len(piece_sizes), 0, value, byte)]


@given(piece_lists, st.sampled_from(list(Codec)))
def test_offsets_are_those_of_a_walk_over_the_blocks(piece_sizes: list[int], codec: Codec) -> None:
    blocks = FragmentBlocks(piece_sizes, codec)
    expected = walk(piece_sizes, codec)
    assert blocks.block_count == len(expected) - 1
    assert (blocks.values, blocks.encoded_bytes) == expected[-1][2:]
    for block, (piece, _, value, byte) in enumerate(expected[:-1]):
        assert (blocks.piece_of(block), blocks.value_offset(block), blocks.byte_offset(block)) == (piece, value, byte)
    assert blocks.value_offset(blocks.block_count) == blocks.values
    assert blocks.byte_offset(blocks.block_count) == blocks.encoded_bytes


@given(piece_lists, st.sampled_from(list(Codec)), st.data())
def test_spans_that_follow_each_other_have_no_gaps(piece_sizes: list[int], codec: Codec, data: st.DataObject) -> None:
    blocks = FragmentBlocks(piece_sizes, codec)
    edges = sorted(data.draw(st.lists(st.integers(0, blocks.block_count), min_size=2, max_size=9)))
    start, stop, spans = edges[0], edges[-1], list(pairwise(edges))
    for name in ("value_slice", "byte_slice"):
        slices = [getattr(blocks, name)(*span) for span in spans]
        whole = getattr(blocks, name)(start, stop)
        assert sum(part.stop - part.start for part in slices) == whole.stop - whole.start
    assert blocks.span_values(start, stop) == walk(piece_sizes, codec)[stop][2] - walk(piece_sizes, codec)[start][2]
    assert blocks.span_bytes(start, stop) == walk(piece_sizes, codec)[stop][3] - walk(piece_sizes, codec)[start][3]


def test_sizes_by_hand() -> None:
    # 5000 = 19 blocks of 256 and one of 136; 4095 is small and travels in bf16; 4097 = 16 blocks and one of 1
    blocks = FragmentBlocks((5000, 4095, 4097), Codec.INT4)
    assert blocks.block_count == 20 + 16 + 17
    assert blocks.byte_offset(20) == 19 * 132 + 4 + 68
    assert blocks.byte_offset(36) - blocks.byte_offset(20) == 2 * 4095
    assert blocks.encoded_bytes - blocks.byte_offset(36) == 16 * 132 + 5
    assert blocks.byte_slice(19, 21) == slice(19 * 132, 19 * 132 + 72 + 512)
    assert blocks.value_slice(19, 21) == slice(4864, 5256)


@pytest.mark.parametrize(
    ("values", "codec", "travels_as"),
    [
        (4095, Codec.INT4, Codec.BF16),
        (4096, Codec.INT4, Codec.INT4),
        (4095, Codec.INT8, Codec.BF16),
        (4096, Codec.INT8, Codec.INT8),
        (1, Codec.BF16, Codec.BF16),
        (1, Codec.FP32, Codec.FP32),
    ],
)
def test_small_pieces_travel_in_bf16_unless_the_codec_is_exact(values: int, codec: Codec, travels_as: Codec) -> None:
    assert piece_codec(values, codec) is travels_as


def test_odd_blocks_of_int4_use_a_whole_last_byte() -> None:
    assert [block_bytes(Codec.INT4, n) for n in (1, 2, 3, 255, 256)] == [5, 5, 6, 132, 132]


@pytest.mark.parametrize("sizes", [(), (0,), (5, -1)])
def test_pieces_without_values_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        FragmentBlocks(sizes, Codec.INT8)


@pytest.mark.parametrize("span", [(-1, 1), (2, 1), (0, 18), (18, 18)])
def test_spans_outside_the_fragment_are_refused(span: tuple[int, int]) -> None:
    blocks = FragmentBlocks((4096 + 1,), Codec.INT8)
    with pytest.raises(ValueError, match="within the fragment's 17"):
        blocks.value_slice(*span)


def test_the_layout_given_to_the_loops_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        FragmentBlocks((7,), Codec.FP32).layout[0, 0] = 1
