"""Files of tokens: made once, found again, made anew when something changed, whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin import token_store
from diloco_node.learner.builtin.documents import is_held_out, text_sources
from diloco_node.learner.builtin.encoding import TextEncoding
from diloco_node.learner.builtin.token_store import StoredTokens, tokens_in_memory, tokens_on_disk
from tests.kit.data_kit import rows_of, write_jsonl, write_tokenizer


@pytest.fixture
def encoding(tmp_path: Path) -> TextEncoding:
    return TextEncoding(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were made, not found."""
    found: list[Path] = []
    plain = token_store._made
    monkeypatch.setattr(token_store, "_made", lambda folder, *rest: (found.append(folder), plain(folder, *rest))[1])
    return found


def stored(root: Path, encoding: TextEncoding, *paths: Path, field: str = "text") -> StoredTokens:
    return tokens_on_disk(text_sources(paths or [root / "rows"]), encoding, field, cache=root / "cache")


def test_all_rows_are_there_what_is_held_out_last(tmp_path: Path, encoding: TextEncoding):
    rows = rows_of(300)
    write_jsonl(tmp_path / "rows" / "a.jsonl", rows[:200])
    write_jsonl(tmp_path / "rows" / "b.jsonl", rows[200:])
    found = stored(tmp_path, encoding)
    held = [is_held_out(row.encode()) for row in rows]
    order = [n for n in range(300) if not held[n]] + [n for n in range(300) if held[n]]
    numbers = found.tokens.reshape(300, 13)[:, 11] - 52
    assert numbers.tolist() == order
    assert (found.tokens.reshape(300, 13)[:, 12] == 1).all()
    assert (found.train, found.files, found.skipped) == (13 * held.count(False), 2, 0)
    in_memory = tokens_in_memory(text_sources([tmp_path / "rows"]), encoding, "text", bytes_max=0)
    np.testing.assert_array_equal(in_memory.tokens, found.tokens)
    assert in_memory.train == found.train


def test_it_is_made_once_and_anew_when_something_changed(tmp_path: Path, made: list[Path], encoding: TextEncoding):
    path = write_jsonl(tmp_path / "rows" / "a.jsonl", rows_of(20))
    first = stored(tmp_path, encoding)
    again = stored(tmp_path, encoding)
    assert len(made) == 1
    np.testing.assert_array_equal(first.tokens, again.tokens)
    os.utime(path, ns=(1, 1))
    stored(tmp_path, encoding)
    stored(tmp_path, TextEncoding())
    write_jsonl(path, rows_of(20), "body")
    stored(tmp_path, encoding, field="body")
    assert len(set(made)) == len(made) == 4
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize("damage", ["cut", "no about", "bad about"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, made: list[Path], encoding: TextEncoding, damage: str):
    write_jsonl(tmp_path / "rows" / "a.jsonl", rows_of(20))
    whole = stored(tmp_path, encoding).tokens.tolist()
    if damage == "cut":
        os.truncate(made[0] / "tokens.bin", 100)
    elif damage == "no about":
        (made[0] / "corpus.json").unlink()
    else:
        (made[0] / "corpus.json").write_text("{}")
    (made[0].with_suffix(".partial")).mkdir()  # of a process that was killed
    assert stored(tmp_path, encoding).tokens.tolist() == whole
    assert len(made) == 2


def test_a_bad_row_leaves_nothing_behind(tmp_path: Path, encoding: TextEncoding):
    path = write_jsonl(tmp_path / "rows" / "a.jsonl", rows_of(20))
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ConfigError, match="line 21"):
        stored(tmp_path, encoding)
    assert [one.suffix for one in (tmp_path / "cache").iterdir()] == [".lock"]


def test_learners_that_start_together_make_it_once(tmp_path: Path, made: list[Path], encoding: TextEncoding):
    write_jsonl(tmp_path / "rows" / "a.jsonl", rows_of(20))
    found: list[StoredTokens] = []
    threads = [threading.Thread(target=lambda: found.append(stored(tmp_path, encoding))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len({one.tokens.tobytes() for one in found}) == 1
    assert len(found) == 4


def test_little_text_is_tokenised_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: TextEncoding):
    write_jsonl(tmp_path / "rows" / "a.jsonl", rows_of(300))
    monkeypatch.setattr(token_store, "PIECE_BYTES", 500)
    sizes: list[int] = []
    plain = TextEncoding.encode
    monkeypatch.setattr(
        TextEncoding, "encode", lambda one, batch: (sizes.append(sum(len(p.text) for p in batch)), plain(one, batch))[1]
    )
    stored(tmp_path, encoding)
    assert max(sizes) < 600
    assert len(sizes) > 20


def test_a_folder_that_can_not_be_written_says_what_to_set(tmp_path: Path, encoding: TextEncoding):
    write_jsonl(tmp_path / "rows" / "a.jsonl", rows_of(20))
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"the tokens can't be kept in .*name a folder with room as cache of \[data\]"
    ):
        tokens_on_disk(text_sources([tmp_path / "rows"]), encoding, "text", cache=tmp_path / "file" / "below")
