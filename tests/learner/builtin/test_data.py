"""The data of the built-in trainer: what is read and held out, whose part is whose, and going on where one was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin import data
from diloco_node.learner.builtin.data import SHARD_BYTES, Corpus, RegionSampler, load_corpus


def numbered(size: int) -> Corpus:
    """A corpus in which four bytes tell their own place, so that a window says where it was cut."""
    text = np.arange(size // 4, dtype="<u4").view(np.uint8)
    return Corpus(train=text, held_out=text[:2000], files=1, skipped=0)


def places(windows: np.ndarray) -> set[int]:
    """Shards that the windows were cut from."""
    found = set()
    for window in windows:
        for shift in range(4):
            numbers = window[shift : shift + (len(window) - shift) // 4 * 4].copy().view("<u4")
            if len(numbers) > 2 and (np.diff(numbers.astype(np.int64)) == 1).all():
                found.add(int(numbers[0]) * 4 // SHARD_BYTES)
                found.add(int(numbers[-1]) * 4 // SHARD_BYTES)
    return found


def sampler(corpus: Corpus, region: int = 0, regions: int = 1, seed: int = 1, **shape: int) -> RegionSampler:
    return RegionSampler(corpus, region=region, regions=regions, seed=seed, **{"batch": 64, "context": 30, **shape})


def folder_with(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_regions_never_share_a_shard_and_together_have_all():
    corpus = numbered(40 * SHARD_BYTES)
    seen = [set().union(*(places(sampler(corpus, r, 3).batch_at(k)) for k in range(12))) for r in range(3)]
    assert set().union(*seen) == set(range(40))
    assert sum(map(len, seen)) == 40


def test_windows_stay_inside_the_corpus_and_reach_its_edges():
    corpus = numbered(SHARD_BYTES)
    batches = np.concatenate([sampler(corpus, batch=512, context=16_000).batch_at(k) for k in range(20)])
    starts = [bytes(window[:8]) in corpus.train[: SHARD_BYTES - 16_000 + 8].tobytes() for window in batches]
    assert all(starts)
    assert any(bytes(window[-4:]) == corpus.train[-4:].tobytes() for window in batches)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), region=st.integers(0, 3), position=st.integers(0, 10**9))
def test_a_batch_is_a_function_of_seed_region_and_position(seed: int, region: int, position: int):
    corpus = numbered(8 * SHARD_BYTES)
    one, other = sampler(corpus, region, 4, seed), sampler(corpus, region, 4, seed)
    other.next_batch()
    np.testing.assert_array_equal(one.batch_at(position), other.batch_at(position))
    assert not np.array_equal(one.batch_at(position), one.batch_at(position + 1))


def test_a_restored_sampler_goes_on_where_the_other_stood():
    corpus = numbered(8 * SHARD_BYTES)
    first, second = sampler(corpus), sampler(corpus)
    for _ in range(5):
        first.next_batch()
    second.restore(first.state())
    np.testing.assert_array_equal(second.next_batch(), first.next_batch())
    assert second.state() == {"position": 6}


def test_a_state_without_position_is_refused():
    with pytest.raises(ConfigError, match="position"):
        sampler(numbered(8 * SHARD_BYTES)).restore({})


def test_the_split_goes_by_file_and_does_not_depend_on_where_the_folder_lies(tmp_path: Path):
    files = {f"a/{n}.txt": (f"{n:04d} " * 400).encode() for n in range(400)}
    first, second = load_corpus([folder_with(tmp_path / "x", files)]), load_corpus([folder_with(tmp_path / "y", files)])
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)
    trained, held = (set(part.tobytes().split()) for part in (first.train, first.held_out))
    assert not trained & held
    assert len(trained | held) == 400
    assert 8 <= len(held) <= 40


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


def test_files_come_in_order_of_their_paths_and_links_are_left_out(tmp_path: Path):
    for name in ("b/z.txt", "b.txt", "b/a/c.txt", "a.txt", "B.txt", "site-packages/d.txt", "b/.e/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    assert data._below(tmp_path) == ["B.txt", "a.txt", "b.txt", "b/a/c.txt", "b/z.txt"]


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


def test_a_window_longer_than_a_shard_is_refused():
    with pytest.raises(ConfigError, match="context"):
        sampler(numbered(4 * SHARD_BYTES), context=SHARD_BYTES)


def test_held_out_windows_are_evenly_spread_and_within():
    corpus = numbered(4 * SHARD_BYTES)
    windows = corpus.held_out_windows(7, 50)
    assert windows.shape == (7, 51)
    np.testing.assert_array_equal(windows[0], corpus.held_out[:51])
    np.testing.assert_array_equal(windows[-1], corpus.held_out[-51:])
