"""Text as numbers: bytes as they are, or the tokens of a `tokenizer.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.documents import TextPiece, library
from diloco_node.learner.builtin.shape import VOCABULARY

TOKENIZER_FILE: Final = "tokenizer.json"
END_TOKENS: Final = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
"""Names of the token that ends a document, where `tokenizer_config.json` beside the tokenizer names none."""

Tokens = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


class TextEncoding:
    """How text becomes tokens; without a tokenizer, each byte is one.

    Args:
        tokenizer: a `tokenizer.json`, or a folder that has one; "": bytes.

    Attributes:
        vocabulary: one more than the largest token. end: the token put after each document, None for none.
        dtype: the smallest that holds every token. fingerprint: differs where the tokens would.

    Raises:
        ConfigError: there is no such file, or it is no tokenizer.
    """

    def __init__(self, tokenizer: str | Path = "") -> None:
        self.vocabulary, self.fingerprint = VOCABULARY, "bytes"
        self.end: int | None = None
        self._tokenizer: Any = None
        if tokenizer:
            self._load(_tokenizer_file(Path(tokenizer)))
        self.dtype: np.dtype[Any] = np.dtype("u1" if not tokenizer else "<u2" if self.vocabulary <= 1 << 16 else "<u4")

    def _load(self, file: Path) -> None:
        tokenizers = library("tokenizers", f"the tokenizer {file}")
        try:
            text = file.read_bytes()
            found = tokenizers.Tokenizer.from_str(text.decode())
        except Exception as error:  # the library raises no other
            raise ConfigError(f"{file} is no tokenizer of the library tokenizers: {error}") from error
        # What a fine-tuned model keeps in the file would cut or fill each document.
        found.no_truncation()
        found.no_padding()
        numbers = found.get_vocab(with_added_tokens=True)
        if not numbers:
            raise ConfigError(f"{file} has no tokens: train the tokenizer first")
        self._tokenizer = found
        self.vocabulary = max(numbers.values()) + 1
        self.end = _end_token(file, numbers)
        self.fingerprint = f"{hashlib.sha256(text).hexdigest()} {self.end}"

    def encode(self, batch: Sequence[TextPiece]) -> list[Tokens]:
        """The tokens of each piece; after the last of a document its end, which is a line break for rows as bytes."""
        if self._tokenizer is None:
            return [np.frombuffer(piece.text + _row_end(piece), np.uint8) for piece in batch]
        texts = [piece.text.decode("utf-8", "replace") for piece in batch]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ends = [self.end] if self.end is not None else []
        return [
            np.array(one.ids + ends if piece.is_last else one.ids, self.dtype)
            for one, piece in zip(found, batch, strict=True)
        ]

    def check_model(self, vocabulary: int) -> None:
        """Whether a model with so many tokens can read them.

        Raises:
            ConfigError: it has fewer.
        """
        if self.vocabulary > vocabulary:
            kind = "the tokenizer" if self._tokenizer is not None else "text as bytes"
            raise ConfigError(
                f"{kind} has {self.vocabulary} tokens and model.vocabulary is {vocabulary}: "
                f"set model.vocabulary to {self.vocabulary} or more"
            )


def _row_end(piece: TextPiece) -> bytes:
    return b"\n" if piece.is_row and not piece.text.endswith(b"\n") else b""


def _tokenizer_file(path: Path) -> Path:
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer {file}: give a {TOKENIZER_FILE}, or a folder that has one")
    return file


def _end_token(file: Path, numbers: dict[str, int]) -> int | None:
    """As Hugging Face's `tokenizer_config.json` beside it says, else by its usual names."""
    try:
        config = json.loads((file.parent / "tokenizer_config.json").read_bytes())
        named = config.get("eos_token")
    except (OSError, ValueError, AttributeError):
        named = None
    if isinstance(named, dict):
        named = named.get("content")
    if isinstance(named, str) and named in numbers:
        return numbers[named]
    return next((numbers[name] for name in END_TOKENS if name in numbers), None)
