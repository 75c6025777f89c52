"""The built-in model's tokenizer gives each byte its own value, and text its own bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diloco_node.learner.builtin.byte_tokenizer import byte_letters, byte_tokenizer_files
from diloco_node.learner.builtin.shape import ModelSettings, hf_config

TEXTS = ("def f(x):\n\treturn 'äöü€😀'  # \x7f\x01\r\n", "  two  spaces , and . stops ", "Ā Ġ Ċ <s> [UNK]", "a\0b", "")


def test_each_byte_has_a_letter_of_its_own() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert all(len(letter) == 1 for letter in letters)
    assert letters[ord("a")] == "a"
    assert letters[0] == "\0"


def test_text_becomes_its_bytes_and_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, document in byte_tokenizer_files(64).items():
        (tmp_path / name).write_text(json.dumps(document))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(ModelSettings())))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 256
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        assert tokens == list(text.encode())
        assert tokenizer.decode(tokens) == text
