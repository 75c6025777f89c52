"""The kernels against vectors made by hand and, bit for bit, against a slow reference in numpy."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.types import SMALL_TENSOR_VALUES, Codec
from diloco_node.errors import PayloadCorrupt
from tests.kit.codec_reference import reference

F32 = kernels.F32
SEED = 20_260_421


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> None:
    kernels.warm_up()


def encoded_bytes(blocks: FragmentBlocks, values: F32) -> bytes:
    out = np.full(blocks.encoded_bytes, 0xA5, np.uint8)
    kernels.encode(blocks, values, out)
    return out.tobytes()


def spans_of(blocks: FragmentBlocks, count: int) -> list[tuple[int, int]]:
    """So many spans of about the same number of blocks."""
    return list(pairwise(blocks.block_count * index // count for index in range(count + 1)))


# ---- material --------------------------------------------------------------------------------------------------------

EDGES = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 2.0**-127, 2.0**-101, -(2.0**-100), 0.5, 1.5, 2.5, -2.5, 3.5, 7.0, 127.0, 1.00390625,
     1.01171875, 2.0**100, -(2.0**100), 1e-20, 3.0e29],
    np.float32,
)  # fmt: skip


def material(sizes: tuple[int, ...], seed: int) -> F32:
    """Blocks of very different magnitude, with zeros, denormals, ties and edges mixed in."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = rng.standard_normal(n).astype(np.float32)
    magnitudes = np.exp2(rng.choice([-140.0, -101.0, -99.0, -30.0, 0.0, 0.0, 20.0, 95.0], size=n // 64 + 1))
    x *= np.repeat(magnitudes, 64)[:n].astype(np.float32)
    x = np.where(rng.random(n) < 0.05, rng.choice(EDGES, size=n), x)
    ties = rng.random(n) < 0.05
    return np.where(ties, np.rint(x * 2) / 2, x).astype(np.float32)


sizes_lists = st.lists(
    st.one_of(st.integers(1, 20), st.integers(250, 530), st.sampled_from([4095, 4096, 4097, 4351, 4352, 5001])),
    min_size=1,
    max_size=4,
).map(tuple)
codecs = st.sampled_from(list(Codec))
seeds = st.integers(0, 2**32 - 1)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def whole_piece(head: list[float]) -> F32:
    """A piece just large enough to be quantised whose first block begins with `head`."""
    x = np.zeros(SMALL_TENSOR_VALUES, np.float32)
    x[: len(head)] = head
    return x


def test_int4_by_hand_rounds_ties_to_even_and_packs_low_nibble_first() -> None:
    # absmax 7: scale 1. 0.5 -> 0, 1.5 -> 2, 2.5 -> 2, -0.5 -> -0 = 0, -1.5 -> -2, -7 -> -7 (9 in four bits)
    blocks = FragmentBlocks((SMALL_TENSOR_VALUES,), Codec.INT4)
    x = whole_piece([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -7.0, 1.0])
    encoded = encoded_bytes(blocks, x)
    assert encoded[:8] == bytes.fromhex("0000803f07 22 e0 19")
    assert encoded[8:] == bytes(len(encoded) - 8)
    out = np.empty(blocks.values, np.float32)
    norms = kernels.decode(blocks, encoded, out)
    assert out[:8].tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, -7.0, 1.0]
    assert norms.tolist() == [49.0 + 4 + 4 + 4 + 49 + 1]


def test_int8_by_hand() -> None:
    # absmax 254: scale 2, so 3 -> 1.5 -> 2, 5 -> 2.5 -> 2, -1 -> -0.5 -> 0
    blocks = FragmentBlocks((SMALL_TENSOR_VALUES,), Codec.INT8)
    encoded = encoded_bytes(blocks, whole_piece([-254.0, 3.0, 5.0, -1.0, 254.0]))
    assert encoded[:10] == bytes.fromhex("0000004081 02 02 00 7f 00")


def test_bf16_by_hand_rounds_ties_to_even() -> None:
    # 1 + 2^-8 is half way between 0x3f80 and 0x3f81 (even wins), 1 + 3 * 2^-8 between 0x3f81 and 0x3f82
    blocks = FragmentBlocks((5,), Codec.INT4)
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -0.0, -2.0, 1 + 2**-8 + 2**-20], np.float32)
    assert encoded_bytes(blocks, x) == bytes.fromhex("803f 823f 0080 00c0 813f")


def test_fp32_is_exact_down_to_denormals_and_negative_zero() -> None:
    blocks = FragmentBlocks((EDGES.size,), Codec.FP32)
    assert encoded_bytes(blocks, EDGES) == EDGES.tobytes()


def test_a_short_last_block_of_odd_length_leaves_its_padding_zero() -> None:
    blocks = FragmentBlocks((SMALL_TENSOR_VALUES + 3,), Codec.INT4)
    x = np.full(blocks.values, -7.0, np.float32)
    assert encoded_bytes(blocks, x)[-6:] == bytes.fromhex("0000803f99 09")


def test_outer_step_by_hand() -> None:
    # d = 0.5 * 4 = 2; m = 0.5 * 8 + 2 = 6; theta = 10 - 0.25 * (2 + 0.5 * 6) = 8.75
    blocks = FragmentBlocks((1, 1), Codec.FP32)
    encoded = np.array([4.0, 0.0], np.float32).tobytes()
    theta, momentum = (np.array(v, np.float32) for v in ([10.0, 1.0], [8.0, 4.0]))
    kernels.outer_step(blocks, encoded, np.array([0.5, 9.0], np.float32), 0.25, 0.5, theta, momentum)
    assert momentum.tolist() == [6.0, 2.0]
    assert theta.tolist() == [8.75, 0.75]


# ---- against the reference, bit for bit ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(sizes_lists, codecs, seeds)
def test_encode_and_decode_equal_the_reference(sizes: tuple[int, ...], codec: Codec, seed: int) -> None:
    blocks = FragmentBlocks(sizes, codec)
    x = material(sizes, seed)
    before = x.tobytes()
    encoded, decoded, norms = reference(blocks, x)
    out = np.full(blocks.encoded_bytes, 0xA5, np.uint8)
    assert kernels.encode(blocks, x, out).tolist() == norms
    assert out.tobytes() == encoded
    assert x.tobytes() == before
    back = np.full(blocks.values, np.nan, np.float32)
    assert kernels.decode(blocks, encoded, back).tolist() == norms
    assert back.tobytes() == decoded.tobytes()
    assert kernels.squared_norms(blocks, encoded).tolist() == norms


@settings(max_examples=40, deadline=None)
@given(sizes_lists, codecs, seeds)
def test_a_delta_encoded_in_two_ways_is_the_same(sizes: tuple[int, ...], codec: Codec, seed: int) -> None:
    blocks = FragmentBlocks(sizes, codec)
    base = material(sizes, seed) * np.float32(0.25)
    theta = (base + material(sizes, seed + 1) * np.float32(0.25)).astype(np.float32)
    two, one = np.empty(blocks.encoded_bytes, np.uint8), np.empty(blocks.encoded_bytes, np.uint8)
    norms = kernels.encode(blocks, base - theta, two)
    assert kernels.encode_delta(blocks, base, theta, one).tolist() == norms.tolist()
    assert one.tobytes() == two.tobytes()


@settings(max_examples=40, deadline=None)
@given(sizes_lists, codecs, seeds, st.data())
def test_a_span_is_a_slice_of_the_whole(sizes: tuple[int, ...], codec: Codec, seed: int, data: st.DataObject) -> None:
    blocks = FragmentBlocks(sizes, codec)
    x = material(sizes, seed)
    encoded, decoded, _ = reference(blocks, x)
    start = data.draw(st.integers(0, blocks.block_count))
    stop = data.draw(st.integers(start, blocks.block_count))
    values, octets = blocks.value_slice(start, stop), blocks.byte_slice(start, stop)
    out = np.full(octets.stop - octets.start, 0xA5, np.uint8)
    norms = kernels.encode(blocks, x[values], out, start, stop)
    assert out.tobytes() == encoded[octets]
    back = np.full(values.stop - values.start, np.nan, np.float32)
    assert kernels.decode(blocks, memoryview(encoded)[octets], back, start, stop).tolist() == norms.tolist()
    assert back.tobytes() == decoded[values].tobytes()
    for piece in range(blocks.pieces):
        first, last = sum(sizes[:piece]), sum(sizes[: piece + 1])
        inside = decoded[max(first, values.start) : max(min(last, values.stop), first, values.start)]
        assert norms[piece] == pytest.approx(np.square(inside.astype(np.float64)).sum(), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(sizes_lists, codecs, seeds)
def test_accumulate_is_two_rounded_operations_per_value(sizes: tuple[int, ...], codec: Codec, seed: int) -> None:
    blocks = FragmentBlocks(sizes, codec)
    rng = np.random.default_rng(seed)
    acc = rng.standard_normal(blocks.values).astype(np.float32)
    expected = acc.copy()
    for learner in range(3):
        encoded, decoded, norms = reference(blocks, material(sizes, seed + learner))
        c = rng.standard_normal(blocks.pieces).astype(np.float32)
        expected += np.repeat(c, sizes) * decoded
        assert kernels.accumulate(blocks, encoded, 0, blocks.block_count, c, acc).tolist() == norms
    assert acc.tobytes() == expected.tobytes()


@settings(max_examples=40, deadline=None)
@given(sizes_lists, codecs, seeds, st.floats(0, 2, width=32), st.floats(0, 1, width=32))
def test_outer_step_equals_the_reference_in_one_span_and_in_several(
    sizes: tuple[int, ...], codec: Codec, seed: int, lr: float, mu: float
) -> None:
    blocks = FragmentBlocks(sizes, codec)
    encoded, decoded, _ = reference(blocks, material(sizes, seed))
    rng = np.random.default_rng(seed)
    theta, momentum = (rng.standard_normal(blocks.values).astype(np.float32) for _ in range(2))
    factors = rng.random(blocks.pieces).astype(np.float32)
    d = np.repeat(factors, sizes) * decoded
    new_momentum = np.float32(mu) * momentum + d
    new_theta = theta - np.float32(lr) * (d + np.float32(mu) * new_momentum)
    for parts in (1, 3):
        t, m = theta.copy(), momentum.copy()
        for start, stop in spans_of(blocks, parts):
            values = blocks.value_slice(start, stop)
            body = encoded[blocks.byte_slice(start, stop)]
            kernels.outer_step(blocks, body, factors, lr, mu, t[values], m[values], start, stop)
        assert m.tobytes() == new_momentum.tobytes()
        assert t.tobytes() == new_theta.tobytes()


def test_threads_over_spans_give_the_same_bytes() -> None:
    sizes = (70_000, 300, 41_111)
    blocks = FragmentBlocks(sizes, Codec.INT4)
    x = material(sizes, SEED)
    out = np.empty(blocks.encoded_bytes, np.uint8)

    def encode_part(span: tuple[int, int]) -> None:
        kernels.encode(blocks, x[blocks.value_slice(*span)], out[blocks.byte_slice(*span)], *span)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(encode_part, spans_of(blocks, 9)))
    assert out.tobytes() == encoded_bytes(blocks, x)


def test_minus_one_times_the_encoded_sum_leaves_the_residual() -> None:
    blocks = FragmentBlocks((5000,), Codec.INT8)
    acc = material((5000,), SEED)
    encoded, decoded, _ = reference(blocks, acc)
    expected = acc - decoded
    kernels.accumulate(blocks, encoded, 0, blocks.block_count, np.array([-1.0], np.float32), acc)
    assert acc.tobytes() == expected.tobytes()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize(
    "bad", [np.nan, -np.nan, np.inf, -np.inf, np.nextafter(np.float32(2.0**100), np.float32(np.inf))]
)
def test_one_bad_value_in_a_million_is_found_wherever_it_is(codec: Codec, bad: float) -> None:
    n = 1_000_003
    blocks = FragmentBlocks((n,), codec)
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal(n).astype(np.float32)
    out = np.empty(blocks.encoded_bytes, np.uint8)
    kernels.encode(blocks, x, out)
    for at in (0, 255, 256, n - 1, *rng.integers(0, n, 3).tolist()):
        kept, x[at] = x[at], bad
        with pytest.raises(PayloadCorrupt, match=f"block {at // 256} "):
            kernels.encode(blocks, x, out)
        with pytest.raises(PayloadCorrupt, match=f"block {at // 256} "):
            kernels.encode_delta(blocks, x, np.zeros(n, np.float32), out)
        x[at] = kept


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8, Codec.BF16])
def test_blocks_of_denormals_become_zero_and_the_smallest_that_stays_is_exact(codec: Codec) -> None:
    blocks = FragmentBlocks((SMALL_TENSOR_VALUES,), codec)
    x = np.full(blocks.values, -1e-44, np.float32)
    x[256:512] = np.nextafter(np.float32(2.0**-100), np.float32(0))
    x[512:768] = 2.0**-100
    encoded = encoded_bytes(blocks, x)
    out = np.empty_like(x)
    kernels.decode(blocks, encoded, out)
    assert out[:512].tobytes() == bytes(2048)
    assert encoded[: blocks.byte_offset(2)] == bytes(blocks.byte_offset(2))
    np.testing.assert_allclose(out[512:768], 2.0**-100, rtol=1e-6)


def refused_everywhere(blocks: FragmentBlocks, encoded: bytes) -> None:
    """Every kernel that reads encoded bytes refuses these, and the outer step leaves its arrays alone."""
    ones, factors = np.ones(blocks.values, np.float32), np.ones(blocks.pieces, np.float32)
    with pytest.raises(PayloadCorrupt):
        kernels.squared_norms(blocks, encoded)
    with pytest.raises(PayloadCorrupt):
        kernels.decode(blocks, encoded, ones.copy())
    with pytest.raises(PayloadCorrupt):
        kernels.accumulate(blocks, encoded, 0, blocks.block_count, factors, ones.copy())
    theta, momentum = ones.copy(), ones.copy()
    with pytest.raises(PayloadCorrupt):
        kernels.outer_step(blocks, encoded, factors, 1.0, 0.5, theta, momentum)
    assert theta.tobytes() == momentum.tobytes() == ones.tobytes()


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8])
@pytest.mark.parametrize(
    "scale", [np.nan, np.inf, -np.inf, -1.0, -0.0, 1e-45, 1e-38, 2.0**-108, 2.0**100 * 1.001], ids=repr
)
def test_scales_that_no_encoder_writes_are_refused(codec: Codec, scale: float) -> None:
    blocks = FragmentBlocks((5000,), codec)
    encoded = bytearray(encoded_bytes(blocks, np.ones(5000, np.float32)))
    at = blocks.byte_offset(19)
    encoded[at : at + 4] = np.float32(scale).tobytes()
    refused_everywhere(blocks, bytes(encoded))


@pytest.mark.parametrize(
    ("codec", "at", "byte"),
    [
        (Codec.INT4, 4, 0x08),
        (Codec.INT4, 4, 0x80),
        (Codec.INT4, 131, 0x81),
        (Codec.INT8, 4, 0x80),
        (Codec.INT8, 259, 0x80),
    ],
)
def test_codes_that_no_encoder_writes_are_refused(codec: Codec, at: int, byte: int) -> None:
    blocks = FragmentBlocks((4097,), codec)
    encoded = bytearray(encoded_bytes(blocks, np.ones(4097, np.float32)))
    encoded[at] = byte
    refused_everywhere(blocks, bytes(encoded))


def test_a_used_padding_nibble_is_refused() -> None:
    blocks = FragmentBlocks((4097,), Codec.INT4)
    encoded = bytearray(encoded_bytes(blocks, np.ones(4097, np.float32)))
    assert encoded[-1] == 0x07
    encoded[-1] = 0x17
    refused_everywhere(blocks, bytes(encoded))


@pytest.mark.parametrize("codec", [Codec.INT4, Codec.INT8])
def test_codes_under_a_zero_scale_are_refused(codec: Codec) -> None:
    blocks = FragmentBlocks((4096,), codec)
    encoded = bytearray(blocks.encoded_bytes)
    kernels.squared_norms(blocks, encoded)
    encoded[77] = 1
    refused_everywhere(blocks, bytes(encoded))


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1, 0x7181, 0xF181])
def test_bf16_values_beyond_the_range_are_refused(bits: int) -> None:
    blocks = FragmentBlocks((300,), Codec.BF16)
    encoded = bytearray(blocks.encoded_bytes)
    encoded[2 * 299 :] = bits.to_bytes(2, "little")
    refused_everywhere(blocks, bytes(encoded))


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00001, 0x71800001, 0xF1800001])
def test_fp32_values_beyond_the_range_are_refused(bits: int) -> None:
    blocks = FragmentBlocks((300,), Codec.FP32)
    encoded = bytearray(blocks.encoded_bytes)
    encoded[4 * 299 :] = bits.to_bytes(4, "little")
    refused_everywhere(blocks, bytes(encoded))


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("difference", [-1, 1])
def test_encoded_bytes_of_another_length_are_refused(codec: Codec, difference: int) -> None:
    blocks = FragmentBlocks((5000, 17), codec)
    refused_everywhere(blocks, bytes(blocks.encoded_bytes + difference))


def test_arrays_that_do_not_fit_are_a_bug_of_the_caller() -> None:
    blocks = FragmentBlocks((300,), Codec.FP32)
    good, out = np.zeros(300, np.float32), np.zeros(blocks.encoded_bytes, np.uint8)
    for bad in (good[:-1], good.astype(np.float64), np.zeros(600, np.float32)[::2], good.reshape(3, 100)):
        with pytest.raises(ValueError, match="contiguous vector of 300 float32"):
            kernels.encode(blocks, bad, out)
    unaligned = np.zeros(1201, np.uint8)[1:].view(np.float32)
    with pytest.raises(ValueError, match="aligned"):
        kernels.encode(blocks, unaligned, out)
    with pytest.raises(ValueError, match="1200 uint8"):
        kernels.encode(blocks, good, out[:-1])
    with pytest.raises(ValueError, match="read-only"):
        kernels.encode(blocks, good, bytes(out))
    with pytest.raises(ValueError, match="coefficients must be a contiguous vector of 1 "):
        kernels.accumulate(blocks, out, 0, 2, np.ones(2, np.float32), good)
    with pytest.raises(ValueError, match="within the fragment"):
        kernels.encode(blocks, good, out, 0, 3)
