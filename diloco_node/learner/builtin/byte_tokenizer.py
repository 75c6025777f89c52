"""The built-in model's tokens as a tokenizer of Hugging Face's: token id = byte value, and nothing else.

A byte-level BPE without merges. Its letters stand for the bytes as GPT-2's do: printable Latin-1 for itself, the rest
from U+0100 on. The byte NUL, which is in no text that is trained on, stands for the end and for padding. It is found in
the text before bytes become letters, so it is written as itself: its letter is a real one that texts may have.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Final

_PRINTABLE: Final = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))


def byte_letters() -> list[str]:
    """The letter of each byte; NUL is itself."""
    further = count(0x100)
    letters = [chr(byte) if byte in _PRINTABLE else chr(next(further)) for byte in range(256)]
    return ["\0", *letters[1:]]


def byte_tokenizer_files(context: int) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json, as JSON objects by file name."""
    letters = byte_letters()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": 0, "content": letters[0], "special": True}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end | dict.fromkeys(flags, False)],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {letter: byte for byte, letter in enumerate(letters)},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": letters[0],
            "pad_token": letters[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        },
    }
