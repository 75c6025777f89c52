"""The data of the built-in trainer: what is read and held out, whose part is whose, and going on where one was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin import data
from diloco_node.learner.builtin.data import SHARD_BYTES, SHARD_WINDOWS_MIN, Corpus, RegionSampler, load_corpus


def numbered(size: int) -> Corpus:
    """A corpus in which four bytes tell their own place, so that a window says where it was cut."""
    text = np.arange(size // 4, dtype="<u4").view(np.uint8)
    return Corpus(train=text, held_out=text[:2000], files=1, skipped=0)


def places(windows: np.ndarray) -> set[int]:
    """Shards that the windows were cut from."""
    shards = set()
    for window in windows:
        for shift in range(4):
            numbers = window[shift : shift + (len(window) - shift) // 4 * 4].copy().view("<u4")
            if len(numbers) > 2 and (np.diff(numbers.astype(np.int64)) == 1).all():
                shards.add(int(numbers[0]) * 4 // SHARD_BYTES)
                shards.add(int(numbers[-1]) * 4 // SHARD_BYTES)
    return shards


def sampler(corpus: Corpus, region: int = 0, regions: int = 1, seed: int = 1, **shape: int) -> RegionSampler:
    return RegionSampler(corpus, region=region, regions=regions, seed=seed, **{"batch": 64, "context": 30, **shape})


def folder_with(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def counting(tokens: int) -> Corpus:
    """A corpus whose tokens are their own places: a window says exactly where it was cut."""
    return Corpus(train=np.arange(tokens, dtype=np.uint32), held_out=np.arange(9, dtype=np.uint32), files=1, skipped=0)


def epoch_of(source: RegionSampler, number: int = 0) -> np.ndarray:
    """The windows of one epoch, shape (samples, context + 1)."""
    batch = len(source.batch_at(0))
    first, last = source.samples * number, source.samples * (number + 1)
    windows = np.concatenate([source.batch_at(k) for k in range(first // batch, -(-last // batch))])
    return windows[first % batch :][: source.samples]


@pytest.mark.parametrize("ranks", [(1,), (1, 1), (2, 2, 2), (1, 3), (4, 1, 2, 1, 1)], ids=str)
@pytest.mark.parametrize(("context", "batch"), [(100, 97), (1024, 5), (3000, 3)])
def test_every_sample_is_trained_once_in_an_epoch_over_all_regions_and_ranks(
    ranks: tuple[int, ...], context: int, batch: int
):
    shard = max(SHARD_BYTES, SHARD_WINDOWS_MIN * context)
    shards = 17
    corpus = counting(shards * shard + shard // 2)
    shape = {"batch": batch, "context": context, "seed": 3}
    everybody = [
        RegionSampler(corpus, region=region, regions=len(ranks), rank=rank, ranks=count, **shape)
        for region, count in enumerate(ranks)
        for rank in range(count)
    ]
    per_shard = (shard - 1) // context
    assert sum(source.samples for source in everybody) == shards * per_shard
    for epoch in (0, 3):
        epochs = [epoch_of(source, epoch) for source in everybody]
        for windows in epochs:
            assert (np.diff(windows, axis=1) == 1).all()
            assert (windows[:, 0] // shard == windows[:, -1] // shard).all()
        counts = np.bincount(np.concatenate([windows[:, 1:].ravel() for windows in epochs]))
        assert (counts.max(), counts.sum()) == (1, shards * per_shard * context)
        owners = [set((windows[:, 0] // shard).tolist()) for windows in epochs]
        assert sum(map(len, owners)) == len(set().union(*owners)) == shards


def test_epochs_differ_in_order_and_in_where_windows_begin():
    source = RegionSampler(counting(4 * SHARD_BYTES), region=0, regions=1, batch=652, context=100, seed=1)
    starts = [epoch_of(source, epoch)[:, 0] for epoch in range(20)]
    assert len({int(places_[0]) for places_ in starts}) > 17
    assert len({int(places_.min()) % SHARD_BYTES for places_ in starts}) > 10
    first = starts[0]
    assert (np.abs(np.diff(first)) == 100).mean() < 0.02
    assert not np.array_equal(first, np.sort(first))


def test_parts_are_even_to_a_shard():
    corpus = counting(101 * SHARD_BYTES)
    sizes = [
        RegionSampler(corpus, region=r, regions=4, rank=k, ranks=3, batch=1, context=128, seed=2).samples // 127
        for r in range(4)
        for k in range(3)
    ]
    assert sum(sizes) == 101
    assert max(sizes) - min(sizes) <= 1


def test_regions_never_share_a_shard_and_together_have_all():
    corpus = numbered(10 * SHARD_BYTES)
    shards = [places(epoch_of(sampler(corpus, region, 3, context=500))) for region in range(3)]
    assert set().union(*shards) == set(range(10))
    assert sum(map(len, shards)) == 10


def test_windows_reach_the_edges_of_their_shard():
    source = RegionSampler(counting(SHARD_BYTES), region=0, regions=1, batch=819, context=20, seed=1)
    windows = np.concatenate([epoch_of(source, epoch) for epoch in range(60)])
    assert (windows.min(), windows.max()) == (0, SHARD_BYTES - 1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), region=st.integers(0, 3), position=st.integers(0, 10**9))
def test_a_batch_is_a_function_of_seed_region_and_position(seed: int, region: int, position: int):
    corpus = numbered(8 * SHARD_BYTES)
    source, twin = sampler(corpus, region, 4, seed), sampler(corpus, region, 4, seed)
    twin.next_batch()
    np.testing.assert_array_equal(source.batch_at(position), twin.batch_at(position))
    assert not np.array_equal(source.batch_at(position), source.batch_at(position + 1))


def test_a_restored_sampler_goes_on_where_the_other_stood():
    corpus = numbered(8 * SHARD_BYTES)
    first, second = sampler(corpus), sampler(corpus)
    for _ in range(5):
        first.next_batch()
    second.restore(first.state())
    np.testing.assert_array_equal(second.next_batch(), first.next_batch())
    assert second.state() == {"position": 6, "batch": 64}


def test_another_batch_size_goes_on_after_the_last_window_that_was_trained():
    corpus = counting(8 * SHARD_BYTES)
    before, after = sampler(corpus, batch=8), sampler(corpus, batch=6)
    batches = [before.next_batch() for _ in range(4)]
    after.restore(before.state())
    assert after.position == 6
    windows = np.concatenate([*batches, *(after.next_batch() for _ in range(9))])
    assert len(set(windows[:, 0].tolist())) == len(windows)
    after.restore({"position": 3})
    assert after.position == 3


@pytest.mark.parametrize("state", [{}, {"position": -1}, {"position": "3"}, {"position": 3, "batch": 0}])
def test_a_state_without_position_is_refused(state: dict[str, object]):
    with pytest.raises(ConfigError, match="position"):
        sampler(numbered(8 * SHARD_BYTES)).restore(state)


def test_the_split_goes_by_file_and_does_not_depend_on_where_the_folder_lies(tmp_path: Path):
    files = {f"a/{n}.txt": (f"{n:04d} " * 400).encode() for n in range(400)}
    first, second = load_corpus([folder_with(tmp_path / "x", files)]), load_corpus([folder_with(tmp_path / "y", files)])
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)
    train, held_out = (set(text.tobytes().split()) for text in (first.train, first.held_out))
    assert not train & held_out
    assert len(train | held_out) == 400
    assert 8 <= len(held_out) <= 40


def test_one_file_is_split_at_its_tail(tmp_path: Path):
    text = bytes(range(1, 251)) * 800
    (tmp_path / "one.txt").write_bytes(text)
    corpus = load_corpus([tmp_path / "one.txt"])
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == text
    assert len(corpus.held_out) == len(text) * 5 // 100


def test_binary_hidden_and_installed_files_are_left_out(tmp_path: Path):
    keep = b"text " * 20_000
    files = {"t.md": keep, "b.bin": b"x\0y" * 9999, ".git/h": keep, "site-packages/p.py": keep, "__pycache__/c": keep}
    corpus = load_corpus([folder_with(tmp_path, files)])
    assert len(corpus.train) + len(corpus.held_out) == len(keep)
    assert (corpus.files, corpus.skipped) == (1, 1)


def test_reading_stops_at_the_limit(tmp_path: Path):
    corpus = load_corpus([folder_with(tmp_path, {f"{n}.txt": b"w" * 50_000 for n in range(9)})], bytes_max=120_000)
    assert len(corpus.train) + len(corpus.held_out) == 120_000


def test_the_standard_library_is_there_by_default_and_is_python():
    corpus = load_corpus(bytes_max=2_000_000)
    assert b"import " in corpus.train.tobytes()
    assert b"def " in corpus.held_out.tobytes()


def test_a_missing_path_says_which_and_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*--data"):
        load_corpus([tmp_path / "nowhere"])


def test_too_little_text_says_how_much_is_needed(tmp_path: Path):
    with pytest.raises(ConfigError, match="32 KiB"):
        load_corpus([folder_with(tmp_path, {"t.txt": b"short"})])


@pytest.mark.parametrize(("region", "regions"), [(2, 2), (5, 9), (-1, 2)])
def test_a_region_without_shards_is_refused(region: int, regions: int):
    with pytest.raises(ConfigError, match="region"):
        sampler(numbered(4 * SHARD_BYTES), region, regions)


@pytest.mark.parametrize(("region", "rank", "ranks"), [(1, 2, 2), (1, 1, 3), (0, -1, 2)])
def test_a_rank_without_shards_is_refused(region: int, rank: int, ranks: int):
    with pytest.raises(ConfigError, match=rf"no text for region {region} of 2, rank {rank} of {ranks}.*--data"):
        RegionSampler(
            counting(3 * SHARD_BYTES), region=region, regions=2, rank=rank, ranks=ranks, batch=1, context=9, seed=0
        )


def test_long_windows_want_long_shards():
    with pytest.raises(ConfigError, match="131072 bytes make 0 shards of 262144"):
        sampler(numbered(8 * SHARD_BYTES), context=SHARD_BYTES)


def test_too_little_held_out_text_for_one_window_is_refused():
    with pytest.raises(ConfigError, match=r"2000 held-out bytes.*model\.context 2000"):
        numbered(4 * SHARD_BYTES).held_out_windows(1, 2000)


def test_held_out_windows_are_evenly_spread_and_within():
    corpus = numbered(4 * SHARD_BYTES)
    windows = corpus.held_out_windows(7, 50)
    assert windows.shape == (7, 51)
    np.testing.assert_array_equal(windows[0], corpus.held_out[:51])
    np.testing.assert_array_equal(windows[-1], corpus.held_out[-51:])


def test_more_text_than_memory_is_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "MEMORY_BYTES_MAX", 50_000)
    with pytest.raises(ConfigError, match=r"more than 0 MiB of text.*\[model\] hf"):
        load_corpus([folder_with(tmp_path, {f"{n}.txt": b"w" * 30_000 for n in range(2)})])
