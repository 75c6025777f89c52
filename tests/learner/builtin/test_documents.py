"""Documents of text files, JSONL, Parquet and datasets, and what is said of bad ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin import documents
from diloco_node.learner.builtin.documents import TextSource, below, is_held_out, library, pieces, text_sources
from tests.kit.data_kit import datasets_library, rows_of, write_jsonl, write_parquet


def texts_of(path: Path | str, field: str = "text") -> list[str]:
    (source,) = text_sources([path])
    return [piece.text.decode() for piece in pieces(source, field)]


def test_files_come_in_order_of_their_paths_and_links_are_left_out(tmp_path: Path):
    for name in ("b/z.txt", "b.txt", "b/a/c.txt", "a.txt", "B.txt", "site-packages/d.txt", "b/.e/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "b")
    assert below(tmp_path) == ["B.txt", "a.txt", "b.txt", "b/a/c.txt", "b/z.txt"]


def test_a_file_is_what_its_name_ends_with(tmp_path: Path):
    for name in ("a.jsonl", "b.ndjson", "c.parquet", "d.txt", "e"):
        (tmp_path / name).write_text("")
    assert [source.kind for source in text_sources([tmp_path])] == ["jsonl", "jsonl", "parquet", "text", "text"]
    assert text_sources(["hf:owner/name#part"]) == [TextSource("hf:owner/name#part", "owner/name#part", "hub")]


def test_a_large_text_comes_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "PIECE_BYTES", 100)
    text = "".join(f"line {n} of a text\n" for n in range(50))
    (tmp_path / "t.txt").write_text(text)
    (source,) = text_sources([tmp_path / "t.txt"])
    found = list(pieces(source, ""))
    assert b"".join(piece.text for piece in found).decode() == text
    assert [piece.is_last for piece in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 8
    assert all(piece.text.endswith(b"\n") and len(piece.text) <= 200 for piece in found)
    assert len({piece.is_held_out for piece in found}) == 1


@pytest.mark.parametrize("character", ["ä", "語", "🜁", "x"])
def test_a_text_without_lines_is_cut_between_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, character: str
):
    monkeypatch.setattr(documents, "PIECE_BYTES", 10)
    (tmp_path / "t.txt").write_text(character * 40)
    found = texts_of(tmp_path / "t.txt")
    assert "".join(found) == character * 40
    assert len(found) > 3


@pytest.mark.parametrize("text", [b"", b"x\0y"])
def test_a_text_file_without_text_has_no_pieces(tmp_path: Path, text: bytes):
    (tmp_path / "t.txt").write_bytes(text)
    assert texts_of(tmp_path / "t.txt") == []
    assert list(pieces(TextSource("gone", str(tmp_path / "gone"), "text"), "")) == []


def test_rows_of_jsonl_and_parquet_are_documents_and_null_is_none(tmp_path: Path):
    rows = rows_of(100)
    assert texts_of(write_jsonl(tmp_path / "a.jsonl", rows)) == rows
    assert texts_of(write_jsonl(tmp_path / "b.jsonl", rows, "body"), "body") == rows
    (tmp_path / "c.jsonl").write_text('\n{"text": null}\n{"text": ""}\n{"text": "x"}\n')
    assert texts_of(tmp_path / "c.jsonl") == ["x"]
    assert texts_of(write_parquet(tmp_path / "a.parquet", [*rows, None, "", "y"])) == [*rows, "y"]


def test_about_five_rows_of_a_hundred_are_held_out_by_their_text(tmp_path: Path):
    rows = rows_of(2000)
    (source,) = text_sources([write_jsonl(tmp_path / "a.jsonl", rows)])
    held = [piece.text.decode() for piece in pieces(source, "text") if piece.is_held_out]
    assert 60 < len(held) < 140
    assert held == [row for row in rows if is_held_out(row.encode())]


def test_datasets_on_disk_and_those_that_the_library_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = datasets_library()
    rows = rows_of(30)
    made = datasets.Dataset.from_dict({"text": rows, "id": list(range(30))})
    made.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "parts"))
    datasets.DatasetDict({"test": made}).save_to_disk(str(tmp_path / "no-train"))
    assert texts_of(tmp_path / "saved") == rows
    assert texts_of(tmp_path / "parts") == rows
    with pytest.raises(ConfigError, match=r"no-train has no split 'train'.*test"):
        texts_of(tmp_path / "no-train")
    with pytest.raises(ConfigError, match=r"saved has no column 'body': it has text, id; name .* text_field"):
        texts_of(tmp_path / "saved", "body")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "hub" / "train.jsonl", rows)
    assert texts_of(f"hf:{tmp_path / 'hub'}") == rows
    with pytest.raises(ConfigError, match=r"hf:.*nowhere can't be loaded"):
        texts_of(f"hf:{tmp_path / 'nowhere'}")
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"saved can't be read as a dataset of save_to_disk"):
        texts_of(tmp_path / "saved")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "b"}', r"line 3 of .*a\.jsonl has no field 'text': it has body; name the one .* as text_field"),
        ('{"text": 7}', r"line 3 of .*field 'text' is a int, not a text"),
        ('["a"]', r'line 3 of .*has no field \'text\': give an object such as {"text": "..."} a line'),
        ("{}", r"line 3 of .*has no field 'text': it has none"),
        ('{"text": ', r"line 3 of .*a\.jsonl is no JSON.*one JSON object a line"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        texts_of(tmp_path / "a.jsonl")


def test_a_line_that_does_not_end_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "ROW_BYTES_MAX", 50)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 50}))
    with pytest.raises(ConfigError, match=r"line 1 of .*shorter rows"):
        texts_of(tmp_path / "a.jsonl")


def test_a_table_without_the_column_or_of_another_kind_is_refused(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(ConfigError, match=r"a\.parquet has no column 'body': it has id, text; name .* text_field"):
        texts_of(path, "body")
    with pytest.raises(ConfigError, match=r"field 'id' is a int, not a text"):
        texts_of(path, "id")
    path.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet can't be read as Parquet"):
        texts_of(path)


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"reading x needs pyarrow .*pip install 'diloco-node\[data\]'"):
        library("pyarrow.parquet", "reading x")
