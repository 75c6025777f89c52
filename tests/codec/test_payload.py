"""Chunks: what comes back is what was sent, and hostile frames are refused before they cost anything."""

import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.codec import payload
from diloco_node.codec.payload import (
    CHUNK_RAW_BYTES_MAX,
    SAMPLE_BYTES,
    WINDOW_BYTES_MAX,
    CompressionPolicy,
    compress_chunk,
    decompress_chunk,
)
from diloco_node.errors import PayloadCorrupt

SEED = 4


def text(size: int, seed: int = SEED) -> bytes:
    """Bytes that compress to about 80 %, as quantised values do."""
    return bytes(random.Random(seed).choices(range(256), weights=[1 + (i < 60) * 12 for i in range(256)], k=size))


def frame(raw: bytes, **options: object) -> bytes:
    """A frame as a peer might make it, with our options unless others are given."""
    settings_ = {"write_checksum": True, "write_content_size": True, **options}
    return zstandard.ZstdCompressor(level=1, **settings_).compress(raw)  # type: ignore[arg-type]


def refused(data: bytes, raw_bytes: int, reason: str) -> None:
    """The chunk is refused with this reason and the target is not written."""
    target = bytearray(b"\xa5" * raw_bytes)
    with pytest.raises(PayloadCorrupt, match=f"^{reason}: "):
        decompress_chunk(memoryview(data), memoryview(target))
    assert target == b"\xa5" * raw_bytes


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=3000) | st.integers(0, 70_000).map(text))
def test_a_chunk_comes_back_as_it_was(raw: bytes) -> None:
    is_compressed, data = compress_chunk(memoryview(raw))
    if not is_compressed:
        assert bytes(data) == raw
        return
    assert len(data) < len(raw)
    target = bytearray(len(raw))
    decompress_chunk(data, memoryview(target))
    assert target == raw


def test_a_full_chunk_of_quantised_values_pays_and_one_of_noise_does_not() -> None:
    quantised, noise = text(CHUNK_RAW_BYTES_MAX), random.Random(SEED).randbytes(CHUNK_RAW_BYTES_MAX)
    is_compressed, data = compress_chunk(memoryview(quantised))
    assert is_compressed
    assert len(data) < 0.95 * len(quantised)
    raw = memoryview(noise)
    assert compress_chunk(raw) == (False, raw)
    assert compress_chunk(raw)[1] is raw


def test_empty_chunks_and_chunks_over_the_limit() -> None:
    assert compress_chunk(memoryview(b""))[0] is False
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        compress_chunk(memoryview(bytes(CHUNK_RAW_BYTES_MAX + 1)))
    refused(frame(b""), 0, "declared_size")
    refused(frame(bytes(CHUNK_RAW_BYTES_MAX + 1)), CHUNK_RAW_BYTES_MAX + 1, "declared_size")


def test_frames_carry_size_and_checksum() -> None:
    _, data = compress_chunk(memoryview(text(5000)))
    header = zstandard.get_frame_parameters(data)
    assert (header.content_size, header.has_checksum, header.dict_id) == (5000, True, 0)
    assert header.window_size <= WINDOW_BYTES_MAX


def test_threads_do_not_share_a_context() -> None:
    chunks = [text(20_000, seed) for seed in range(24)]

    def there_and_back(raw: bytes) -> bytes:
        _, data = compress_chunk(memoryview(raw))
        target = bytearray(len(raw))
        decompress_chunk(data, memoryview(target))
        return bytes(target)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(there_and_back, chunks)) == chunks


# ---- hostile frames --------------------------------------------------------------------------------------------------


def memory_of_refusal(data: bytes, raw_bytes: int, reason: str) -> int:
    """Peak bytes that Python and zstandard take from its allocator while the chunk is refused."""
    target = memoryview(bytearray(raw_bytes))
    tracemalloc.start()
    try:
        with pytest.raises(PayloadCorrupt, match=f"^{reason}: "):
            decompress_chunk(data, target)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_before_anything_is_allocated() -> None:
    bomb = frame(bytes(256 << 20))
    assert len(bomb) < 16_384
    for raw_bytes in (1 << 20, 65_536, 0):
        assert memory_of_refusal(bomb, raw_bytes, "declared_size") < 1 << 18


def test_thirteen_bytes_that_declare_a_terabyte_are_refused() -> None:
    # magic, descriptor (8-byte size, single segment, checksum), the size: the frame of 13 bytes, then nothing
    lying = bytes.fromhex("28b52ffd") + b"\xe4" + (1_100_000_000_000).to_bytes(8, "little")
    assert len(lying) == 13
    assert memory_of_refusal(lying, 1 << 20, "declared_size") < 1 << 18


@pytest.mark.parametrize("declared", [4999, 5001])
def test_a_header_that_lies_about_its_content_is_refused(declared: int) -> None:
    honest = bytearray(frame(text(5000)))
    at = honest.index((5000 - 256).to_bytes(2, "little"), 4)  # two-byte sizes are stored minus 256
    honest[at : at + 2] = (declared - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(bytes(honest)).content_size == declared
    target = bytearray(declared)
    with pytest.raises(PayloadCorrupt):
        decompress_chunk(bytes(honest), memoryview(target))
    assert target == bytes(declared)
    refused(bytes(honest), 5000, "declared_size")


@pytest.mark.parametrize("window_log", [24, 27, 31])
def test_windows_over_eight_mebibytes_are_refused(window_log: int) -> None:
    # checksum flag and a two-byte size with its own window descriptor, exponent = log - 10
    header = bytes.fromhex("28b52ffd") + b"\x44" + bytes([(window_log - 10) << 3]) + (5000 - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(header).window_size == 1 << window_log
    refused(header + bytes(40), 5000, "window_too_large")


def test_a_window_of_eight_mebibytes_is_allowed() -> None:
    raw = text(5000)
    single = frame(raw)
    header = bytes.fromhex("28b52ffd") + b"\x44" + bytes([(23 - 10) << 3]) + (5000 - 256).to_bytes(2, "little")
    assert single[4] == 0x64, "our frame is a single segment: the window descriptor is left out"
    target = bytearray(5000)
    decompress_chunk(header + single[7:], memoryview(target))
    assert target == raw


@pytest.mark.parametrize(
    "trailing",
    [frame(b"b" * 5000), frame(b""), bytes.fromhex("502a4d18 04000000 00000000"), b"\0", b"zz" * 50],
    ids=["second frame", "empty frame", "skippable frame", "one byte", "noise"],
)
def test_anything_after_the_frame_is_refused(trailing: bytes) -> None:
    refused(frame(text(5000)) + trailing, 5000, "trailing_data")


def test_a_skippable_frame_in_front_is_refused() -> None:
    skippable = bytes.fromhex("502a4d18 04000000 00000000")
    refused(skippable + frame(text(5000)), 5000, "declared_size")
    refused(skippable, 4, "checksum")  # zstandard reports the four skipped bytes as its content


@pytest.mark.parametrize(
    ("options", "reason"), [({"write_checksum": False}, "checksum"), ({"write_content_size": False}, "declared_size")]
)
def test_frames_without_size_or_checksum_are_refused(options: dict[str, bool], reason: str) -> None:
    refused(frame(text(5000), **options), 5000, reason)


def test_frames_that_want_a_dictionary_are_refused() -> None:
    # as in the window test, single segment, with a one-byte dictionary id of 7
    header = bytes.fromhex("28b52ffd") + b"\x65" + b"\x07" + (5000 - 256).to_bytes(2, "little")
    assert zstandard.get_frame_parameters(header).dict_id == 7
    refused(header + bytes(40), 5000, "dictionary")


@pytest.mark.parametrize("data", [b"", b"\x28", b"\x28\xb5\x2f\xfd", b"\x80\x02}q\x00.", bytes(100)], ids=repr)
def test_what_is_not_a_frame_is_refused(data: bytes) -> None:
    refused(data, 100, "frame")


@pytest.mark.parametrize("kept", [12, 2000, -4, -1])
def test_a_truncated_frame_is_refused(kept: int) -> None:
    refused(frame(text(5000))[:kept], 5000, "frame")


def wrong_bytes_pass(data: bytes, bit: int, raw: bytes) -> bool:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    target = bytearray(len(raw))
    try:
        decompress_chunk(bytes(damaged), memoryview(target))
    except PayloadCorrupt:
        return False
    return target != raw


def test_200_of_200_bit_flips_are_found() -> None:
    raw = text(100_000)
    _, data = compress_chunk(memoryview(raw))
    rng = random.Random(SEED)
    flips = rng.sample(range(8 * 8, 8 * len(data)), 200)
    for bit in flips:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadCorrupt):
            decompress_chunk(bytes(damaged), memoryview(bytearray(len(raw))))


@pytest.mark.parametrize("raw", [text(400), bytes(300), random.Random(SEED).randbytes(300)], ids=["text", "rle", "raw"])
def test_no_single_bit_flip_lets_wrong_bytes_pass(raw: bytes) -> None:
    data = frame(raw)
    assert not [bit for bit in range(8 * len(data)) if wrong_bytes_pass(data, bit, raw)]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_noise_behind_a_plausible_header_is_refused(noise: bytes, raw_bytes: int) -> None:
    magic = bytes.fromhex("28b52ffd")
    for data in (magic + noise, magic + b"\x24" + bytes([raw_bytes % 256]) + noise):
        target = bytearray(raw_bytes)
        with pytest.raises(PayloadCorrupt):
            decompress_chunk(data, memoryview(target))


# ---- the policy ------------------------------------------------------------------------------------------------------


def tries(outcomes: list[bool], policy: CompressionPolicy) -> list[int]:
    """Indices of the chunks that are tried when chunk i would pay as outcomes[i] says."""
    tried = []
    for index, paid in enumerate(outcomes):
        if policy.should_try():
            tried.append(index)
            policy.record(paid=paid)
    return tried


def test_the_policy_stops_after_two_misses_and_samples_every_sixteenth() -> None:
    assert tries([False] * 50, CompressionPolicy()) == [0, 1, 17, 33, 49]


def test_the_policy_tries_on_while_it_pays_and_starts_again_when_a_sample_pays() -> None:
    policy = CompressionPolicy()
    assert tries([True] * 5 + [False, True, False, True], policy) == list(range(9))
    assert tries([False] * 17, policy) == [0, 1]
    assert tries([True] * 3, policy) == [0, 1, 2]


def test_a_policy_saves_the_work_on_noise() -> None:
    noise, policy = memoryview(random.Random(SEED).randbytes(4096)), CompressionPolicy()

    def is_compressed(raw: memoryview) -> bool:
        if not policy.is_worth(raw):
            return False
        paid = compress_chunk(raw)[0]
        policy.record(paid=paid)
        return paid

    assert [is_compressed(noise) for _ in range(3)] == [False] * 3
    compressible = memoryview(text(4096))
    assert [is_compressed(compressible) for _ in range(17)] == [False] * 14 + [True] + [True] * 2


def test_a_sample_is_enough_to_see_that_a_chunk_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def compress(raw: memoryview) -> tuple[bool, bytes | memoryview]:
        sizes.append(raw.nbytes)
        return compress_chunk(raw)

    monkeypatch.setattr(payload, "compress_chunk", compress)
    noise, policy = memoryview(random.Random(SEED).randbytes(2 * SAMPLE_BYTES)), CompressionPolicy()

    def is_tried(raw: memoryview) -> bool:
        worth = policy.is_worth(raw)
        if worth:
            policy.record(paid=raw is not noise)
        return worth

    assert [is_tried(noise) for _ in range(34)] == [True] * 2 + [False] * 32
    assert sizes == [SAMPLE_BYTES] * 2, "one of 16, a part of it"
    compressible = memoryview(text(2 * SAMPLE_BYTES))
    assert [is_tried(compressible) for _ in range(18)] == [False] * 15 + [True] * 3
    assert sizes == [SAMPLE_BYTES] * 3, "no samples where it pays"
