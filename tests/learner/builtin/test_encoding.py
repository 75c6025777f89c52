"""Text as bytes or tokens: where documents end, and whether the model has so many tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.documents import TextPiece
from diloco_node.learner.builtin.encoding import TextEncoding
from tests.kit.data_kit import write_tokenizer


def whole(text: str, *, is_last: bool = True, is_row: bool = True) -> TextPiece:
    return TextPiece(text.encode(), is_last, False, is_row)


def test_bytes_are_themselves_and_rows_end_their_line():
    encoding = TextEncoding()
    found = encoding.encode([whole("aé", is_row=False), whole("b"), whole("c\n")])
    assert [bytes(tokens).decode() for tokens in found] == ["aé", "b\n", "c\n"]
    assert (encoding.vocabulary, encoding.end, encoding.dtype) == (256, None, np.uint8)


def test_documents_end_with_the_token_for_it_and_are_neither_cut_nor_filled(tmp_path: Path):
    encoding = TextEncoding(write_tokenizer(tmp_path))
    words = " ".join(f"w{n}" for n in range(9))
    found = encoding.encode([whole(words), whole("w0 nowhere", is_last=False), whole("w1")])
    assert [tokens.tolist() for tokens in found] == [[*range(2, 11), 1], [2, 0], [3, 1]]
    assert (encoding.vocabulary, encoding.end, encoding.dtype) == (352, 1, np.uint16)


def test_a_folder_may_say_which_token_ends_a_document(tmp_path: Path):
    write_tokenizer(tmp_path)
    for named, end in (("w3", 5), ({"content": "w4"}, 6), (None, 1), ("not there", 1), (7, 1)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
        assert TextEncoding(tmp_path).end == end
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert TextEncoding(tmp_path).end == 1


def test_without_a_token_for_it_documents_follow_each_other(tmp_path: Path):
    encoding = TextEncoding(write_tokenizer(tmp_path, end="[other]"))
    assert encoding.end is None
    assert encoding.encode([whole("w0")])[0].tolist() == [2]


def test_many_tokens_want_a_wider_type_and_others_another_fingerprint(tmp_path: Path):
    few, many = TextEncoding(write_tokenizer(tmp_path / "a")), TextEncoding(write_tokenizer(tmp_path / "b", 70_000))
    assert many.dtype == np.uint32
    assert many.encode([whole("n69999")])[0].tolist() == [70_051, 1]
    assert len({few.fingerprint, many.fingerprint, TextEncoding().fingerprint}) == 3


def test_a_model_with_fewer_tokens_is_refused_with_what_to_set(tmp_path: Path):
    encoding = TextEncoding(write_tokenizer(tmp_path))
    encoding.check_model(352)
    encoding.check_model(50_304)
    with pytest.raises(ConfigError, match=r"the tokenizer has 352 tokens and model.vocabulary is 256: set .* to 352"):
        encoding.check_model(256)
    with pytest.raises(ConfigError, match=r"text as bytes has 256 tokens and model.vocabulary is 100: set .* to 256"):
        TextEncoding().check_model(100)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"there is no tokenizer .*tokenizer\.json: give"):
        TextEncoding(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no tokenizer .*gone\.json"):
        TextEncoding(tmp_path / "gone.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer of the library tokenizers"):
        TextEncoding(tmp_path)
