"""Small data sets and tokenizers, made on the spot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

END = "<|endoftext|>"


def rows_of(count: int, words: int = 12) -> list[str]:
    """Texts that differ, each of so many words, of which the last is its own number."""
    return [" ".join([*(f"w{(n * 7 + k) % 50}" for k in range(words - 1)), f"n{n}"]) for n in range(count)]


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": n, field: text}) + "\n" for n, text in enumerate(texts)))
    return path


def write_parquet(path: Path, texts: Sequence[str | None], field: str = "text") -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra `hf`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra `hf`")
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": list(range(len(texts))), field: pyarrow.array(texts, pyarrow.string())})
    parquet.write_table(table, path, row_group_size=40)
    return path


def datasets_library() -> Any:
    return pytest.importorskip("datasets", reason="needs the extra `hf`")


def write_tokenizer(folder: Path, words: int = 300, *, end: str = END) -> Path:
    """A tokenizer of whole words: w0 to w49, n0 to n<words>, one for unknown ones, and one that ends documents."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    names = ["[UNK]", end, *(f"w{n}" for n in range(50)), *(f"n{n}" for n in range(words))]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end])
    # What a fine-tuned model keeps in its file.
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=20)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
