"""The data of the built-in trainer: what is read and held out, whose part is whose, and going on where one was."""

from pathlib import Path

import numpy as np
import pytest

from diloco_node.core.data_shards import SHARDS
from diloco_node.errors import ConfigError
from diloco_node.learner.builtin import data
from diloco_node.learner.builtin.data import SIDE_BYTES_MIN, Corpus, ShardWindows, load_corpus


def numbered(size: int) -> Corpus:
    """A corpus in which four bytes tell their own place, so that a window says where it was cut."""
    text = np.arange(size // 4, dtype="<u4").view(np.uint8)
    return Corpus(train=text, held_out=text[:2000])


def everything() -> tuple[int, ...]:
    return tuple(range(SHARDS))


def folder_with(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def counting(tokens: int) -> Corpus:
    """A corpus whose tokens are their own places: a window says exactly where it was cut."""
    return Corpus(train=np.arange(tokens, dtype=np.uint32), held_out=np.arange(9, dtype=np.uint32))


def pass_of(sources: list[ShardWindows]) -> np.ndarray:
    """The windows of a pass of all ranks of a region, shape (windows, context + 1)."""
    order = sources[0].order
    wanted, taken = int(order.sizes[list(sources[0]._own())].sum()), [source.next_batch() for source in sources]
    while sum(map(len, taken)) < wanted:
        taken += [source.next_batch() for source in sources]
    assert sum(map(len, taken)) == wanted, "the test's batches are to make whole passes"
    return np.concatenate(taken)


@pytest.mark.parametrize("ranks", [(1,), (1, 1), (1, 3), (2, 1, 4)], ids=str)
def test_every_window_is_trained_once_in_a_pass_over_all_regions_and_ranks(ranks: tuple[int, ...]):
    context, windows = 50, 3 * SHARDS
    corpus = counting((windows + 1) * context + 7)
    regions = []
    for region, count in enumerate(ranks):
        # Four shards at a time: whole passes with each number of ranks.
        own = tuple(shard for shard in range(SHARDS) if shard // 4 % len(ranks) == region)
        regions.append(
            [
                ShardWindows(corpus, own=lambda own=own: own, batch=1, context=context, seed=3, rank=rank, ranks=count)
                for rank in range(count)
            ]
        )
    for _ in range(2):
        passes = [pass_of(sources) for sources in regions]
        whole = np.concatenate(passes)
        assert (np.diff(whole.astype(np.int64), axis=1) == 1).all()
        assert np.bincount(whole[:, 1:].ravel()).max() == 1
        assert len(whole) == windows


def test_passes_differ_in_order_and_in_where_windows_begin():
    source = ShardWindows(counting(7 * SHARDS), own=everything, batch=10, context=100, seed=1)
    rows = int(source.order.sizes[list(everything())].sum())
    assert rows == 70
    starts = [np.concatenate([source.next_batch()[:, 0] for _ in range(7)]) for _ in range(30)]
    assert len({int(places.min()) for places in starts}) > 20
    assert len({int(places[0]) // 100 for places in starts}) > 10
    assert max(int(places.max()) for places in starts) + 100 < 7 * SHARDS
    assert not np.array_equal(starts[0], np.sort(starts[0]))


def test_a_restored_one_goes_on_also_with_another_batch_and_other_ranks():
    corpus = counting(64 * SHARDS)
    before = ShardWindows(corpus, own=everything, batch=8, context=30, seed=1)
    batches = [before.next_batch() for _ in range(4)]
    after = [ShardWindows(corpus, own=everything, batch=6, context=30, seed=1, rank=rank, ranks=2) for rank in (0, 1)]
    for source in after:
        source.order.restore(before.order.state())
    windows = np.concatenate([*batches, *(source.next_batch() for _ in range(9) for source in after)])
    assert len(set(windows[:, 0].tolist())) == len(windows)
    np.testing.assert_array_equal(
        before.next_batch(), windows[32:44].reshape(2, 6, 31).transpose(1, 0, 2).reshape(12, 31)[:8]
    )


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


def test_the_standard_library_is_there_by_default_and_is_python():
    corpus = load_corpus()
    assert b"import " in corpus.train.tobytes()
    assert b"def " in corpus.held_out.tobytes()


def test_a_missing_path_says_which_and_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*--data"):
        load_corpus([tmp_path / "nowhere"])


def test_too_little_text_says_how_much_is_needed(tmp_path: Path):
    with pytest.raises(ConfigError, match="32 KiB"):
        load_corpus([folder_with(tmp_path, {"t.txt": b"short"})])


@pytest.mark.parametrize(("own", "context"), [((999,), 9), ((), 9), ((0,), 2 * SIDE_BYTES_MIN)])
def test_a_region_without_a_window_is_refused(own: tuple[int, ...], context: int):
    with pytest.raises(ConfigError, match=rf"no data for this region.* none in the {len(own)} that"):
        ShardWindows(counting(4000), own=lambda: own, batch=1, context=context, seed=1).next_batch()


def test_too_little_held_out_text_for_one_window_is_refused():
    with pytest.raises(ConfigError, match=r"2000 held-out bytes.*model\.context 2000"):
        numbered(4 * SIDE_BYTES_MIN).held_out_windows(1, 2000)


def test_held_out_windows_are_evenly_spread_and_within():
    corpus = numbered(4 * SIDE_BYTES_MIN)
    windows = corpus.held_out_windows(7, 50)
    assert windows.shape == (7, 51)
    np.testing.assert_array_equal(windows[0], corpus.held_out[:51])
    np.testing.assert_array_equal(windows[-1], corpus.held_out[-51:])


def test_more_text_than_memory_is_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "MEMORY_BYTES_MAX", 50_000)
    with pytest.raises(ConfigError, match=r"more than 0 MiB of text.*\[model\] hf"):
        load_corpus([folder_with(tmp_path, {f"{n}.txt": b"w" * 30_000 for n in range(2)})])
