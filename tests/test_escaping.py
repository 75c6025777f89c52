"""What peers write is shown escaped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.escaping import escaped, escaped_document
from tests.kit.hostile import TEXTS


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert escaped("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert escaped("one\ntwo\r\t\0") == "one\\ntwo\\r\\t\\x00"
    assert escaped("\x9b31m\x7f") == "\\x9b31m\\x7f", "the one-byte CSI, and delete"
    assert escaped("admin\u202egnp") == "admin\\u202egnp", "right to left"
    assert escaped("a\u2066b\u200bc\u2028d\ufeff") == "a\\u2066b\\u200bc\\u2028d\\ufeff"
    assert escaped("\ud800") == "\\ud800", "what no stream can encode"


def test_what_can_be_read_stays() -> None:
    for text in ("", "plain text, 5 % of it", "Zürich 東京", "C:\\path", "\\x1b"):
        assert escaped(text) == text


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_a_hostile_text_is_shown_in_one_line_without_anything_to_obey(text: str) -> None:
    assert escaped(text).isprintable()
    assert escaped_document({text: [text]}) == {escaped(text): [escaped(text)]}


@given(st.text(st.characters()))
def test_nothing_that_is_not_printable_is_left_and_twice_is_once(text: str) -> None:
    once = escaped(text)
    assert once.isprintable()
    assert escaped(once) == once


def test_a_document_is_escaped_in_depth_and_keeps_its_numbers() -> None:
    document = {"a\n": [1, 2.5, None, True, ("x\x1b", {"b": "\u202e"})], "c": "ok"}
    assert escaped_document(document) == {"a\\n": [1, 2.5, None, True, ["x\\x1b", {"b": "\\u202e"}]], "c": "ok"}
