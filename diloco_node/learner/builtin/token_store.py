"""Where the tokens of a corpus are: in memory for a little plain text, else in a file that is mapped.

A file is made once and found again by what it was made of: paths, sizes and times of the files, tokenizer, field. It
lies in a folder of its own, with `corpus.json` beside it, which appears whole or not at all. Learners of one machine
that want the same corpus wait for the first of them to make it.

The bound on memory: about 1 MiB of text and its tokens while a file is made, and nothing that grows with it later, for
the kernel may drop pages of a mapped file at any time. A row has to fit into memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from diloco_node.errors import ConfigError
from diloco_node.learner.builtin.documents import PIECE_BYTES, TextPiece, TextSource, below, load_hub, pieces
from diloco_node.learner.builtin.encoding import TextEncoding, Tokens

FORMAT: Final = 1
TOKENS_FILE: Final = "tokens.bin"
ABOUT_FILE: Final = "corpus.json"

_HELD_FILE: Final = "held_out.bin"
_COPY_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredTokens:
    """All tokens of a corpus.

    Attributes:
        tokens: shape (n,): what is trained on, then what is held out. train: where the second begins.
        files: how many files it came from. skipped: how many were left out.
    """

    tokens: Tokens
    train: int
    files: int
    skipped: int


@dataclass(slots=True)
class _Counts:
    files: int = 0
    skipped: int = 0


def tokens_in_memory(
    sources: Sequence[TextSource], encoding: TextEncoding, text_field: str, *, bytes_max: int
) -> StoredTokens:
    """Read into memory, at most so many bytes of text."""
    counts = _Counts()
    parts: tuple[list[Tokens], list[Tokens]] = ([], [])
    for piece, tokens in _encoded(sources, encoding, text_field, counts, bytes_max):
        parts[piece.is_held_out].append(tokens)
    whole = np.concatenate([np.empty(0, encoding.dtype), *parts[False], *parts[True]])
    return StoredTokens(whole, sum(map(len, parts[False])), counts.files, counts.skipped)


def tokens_on_disk(
    sources: Sequence[TextSource], encoding: TextEncoding, text_field: str, *, cache: Path
) -> StoredTokens:
    """Map the file of these sources, which is made if it is not there.

    Args:
        cache: the folder of all such files; made if it is not there.

    Raises:
        ConfigError: a source is wrong, or the file can't be written.
    """
    folder = cache / _key(sources, encoding, text_field)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        found = _opened(folder, encoding)
        if found is None:
            with _locked(folder.with_suffix(".lock")):
                found = _opened(folder, encoding) or _made(folder, sources, encoding, text_field)
    except OSError as error:
        raise ConfigError(
            f"the tokens can't be kept in {folder} ({error.strerror}): name a folder with room as cache of [data]"
        ) from error
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(folder: Path, encoding: TextEncoding) -> StoredTokens | None:
    """What was made before, None if it is not there or damaged."""
    try:
        about = json.loads((folder / ABOUT_FILE).read_bytes())
        size = (folder / TOKENS_FILE).stat().st_size
        total, train = int(about["total"]), int(about["train"])
        if size != total * encoding.dtype.itemsize or not 0 <= train <= total:
            return None
        counts = _Counts(int(about["files"]), int(about["skipped"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    # A mapping of nothing is an error.
    tokens = np.memmap(folder / TOKENS_FILE, encoding.dtype, "r") if total else np.empty(0, encoding.dtype)
    return StoredTokens(np.asarray(tokens), train, counts.files, counts.skipped)


def _made(folder: Path, sources: Sequence[TextSource], encoding: TextEncoding, text_field: str) -> StoredTokens:
    """With the lock held: nobody else writes there."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    partial.mkdir()
    counts = _Counts()
    written = [0, 0]
    try:
        with (partial / TOKENS_FILE).open("wb") as train, (partial / _HELD_FILE).open("w+b") as held:
            for piece, tokens in _encoded(sources, encoding, text_field, counts, 0):
                (held if piece.is_held_out else train).write(tokens.tobytes())
                written[piece.is_held_out] += len(tokens)
            held.seek(0)
            shutil.copyfileobj(held, train, _COPY_BYTES)
            _flush(train)
        (partial / _HELD_FILE).unlink()
        with (partial / ABOUT_FILE).open("w") as file:
            json.dump({"format": FORMAT, "total": sum(written), "train": written[0], **asdict(counts)}, file)
            _flush(file)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk is not to stay full because of it
        raise
    found = _opened(folder, encoding)
    assert found is not None
    return found


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _encoded(
    sources: Sequence[TextSource], encoding: TextEncoding, text_field: str, counts: _Counts, bytes_max: int
) -> Iterator[tuple[TextPiece, Tokens]]:
    """Every piece with its tokens, in order, tokenised about a megabyte at a time.

    Args:
        bytes_max: end after so many bytes of text; 0: at the end.
    """
    batch: list[TextPiece] = []
    total = waiting = 0
    for source in sources:
        is_read = False
        for piece in pieces(source, text_field) if not bytes_max or total < bytes_max else ():
            is_read = True
            kept = piece
            if bytes_max and total + len(piece.text) > bytes_max:
                kept = TextPiece(piece.text[: bytes_max - total], True, piece.is_held_out, piece.is_row)
            batch.append(kept)
            total += len(kept.text)
            waiting += len(kept.text)
            if waiting >= PIECE_BYTES:
                yield from zip(batch, encoding.encode(batch), strict=True)
                batch, waiting = [], 0
            if kept is not piece:
                break
        counts.files += is_read
        counts.skipped += not is_read
    yield from zip(batch, encoding.encode(batch), strict=True)


def _key(sources: Sequence[TextSource], encoding: TextEncoding, text_field: str) -> str:
    parts = [str(FORMAT), encoding.fingerprint, text_field]
    digest = hashlib.sha256("\0".join(parts).encode())
    for one in sources:
        for line in _identity(one):
            digest.update(f"{line}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _identity(source: TextSource) -> Iterator[str]:
    """What changes when its text does."""
    yield f"{source.kind} {source.name}"
    if source.kind == "hub":
        yield str(load_hub(source.path, streaming=False)._fingerprint)
        return
    path = Path(source.path).resolve()
    files = [path / name for name in below(path)] if source.kind == "saved" else [path]
    for file in files:
        try:
            about = file.stat()
        except OSError:
            continue
        yield f"{file} {about.st_size} {about.st_mtime_ns}"
