"""The documents of a corpus, one after the other: text files, JSONL, Parquet, and datasets of Hugging Face.

Whatever they come from, pieces of at most about a megabyte are handed on, so that reading needs little memory. What is
held out is decided here: a text file by a hash of its relative path, a row of the other kinds by a hash of its text.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from diloco_node.errors import ConfigError

HELD_OUT_PERCENT: Final = 5
FILES_MAX: Final = 200_000
PIECE_BYTES: Final = 1 << 20
"""A text file is read in pieces of this size, and tokenised so."""

ROW_BYTES_MAX: Final = 256 << 20
"""A row of JSONL has to fit into memory; a longer line is no row."""

HUB: Final = "hf:"
"""What a data path begins with that names a dataset for `datasets.load_dataset`: hf:NAME or hf:NAME#CONFIG."""

_ROWS_AT_ONCE: Final = 256
_SNIFF_BYTES: Final = 8192
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})

SourceKind = Literal["text", "jsonl", "parquet", "saved", "hub"]

_KINDS: Final[dict[str, SourceKind]] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class TextSource:
    """A file, a folder that `save_to_disk` made, or the name of a dataset.

    Attributes:
        name: the same wherever the folder lies. path: where it lies; for the hub, what `load_dataset` is given.
    """

    name: str
    path: str
    kind: SourceKind


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of a document: UTF-8, or what a text file has instead.

    Attributes:
        is_last: the document ends with it. is_held_out: it is not trained on. is_row: it is a row, whole.
    """

    text: bytes
    is_last: bool
    is_held_out: bool
    is_row: bool = False


def library(name: str, what: str) -> Any:
    """A module of the extra `data`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(f"{what} needs {package} ({error}): pip install 'diloco-node[data]'") from error


def is_held_out(identity: bytes) -> bool:
    """Whether a document is among the 5 % that nobody trains on; the same everywhere and always."""
    return int.from_bytes(hashlib.sha256(identity).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def standard_library() -> Path:
    """The folder of Python's own sources: what is trained on when no data are named."""
    return Path(sysconfig.get_path("stdlib"))


def text_sources(paths: Sequence[str | Path]) -> list[TextSource]:
    """What there is to read, path after path, sorted by name inside each.

    Raises:
        ConfigError: a path does not exist, or a folder has too many files.
    """
    if not paths:
        root = standard_library()
        # Not the standard library's own tests: they are half of it, often missing, and repeat themselves.
        names = (name for name in below(root) if name.endswith(".py") and not name.startswith("test/"))
        return [TextSource(name, str(root / name), "text") for name in names]
    return [source for given in paths for source in _sources_of(str(given))]


def _sources_of(given: str) -> Iterator[TextSource]:
    path = Path(given)
    if given.startswith(HUB):
        yield TextSource(given, given.removeprefix(HUB), "hub")
    elif path.is_file():
        yield TextSource(path.name, given, _KINDS.get(path.suffix, "text"))
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        yield TextSource(path.name, given, "saved")
    elif path.is_dir():
        for name in below(path):
            yield TextSource(name, str(path / name), _KINDS.get(Path(name).suffix, "text"))
    else:
        raise ConfigError(f"data path {given} does not exist: give files or folders of text with --data PATH, or none")


def below(root: Path) -> list[str]:
    """Relative paths of the files below, sorted, without hidden files, links and folders of installed packages.

    A restarted learner waits for it: folders left out are not entered.

    Raises:
        ConfigError: more than FILES_MAX files.
    """
    found: list[str] = []
    folders = [""]
    while folders:
        prefix = folders.pop()
        with contextlib.suppress(OSError), os.scandir(root / prefix) as entries:
            for entry in entries:
                if entry.name in _SKIPPED_FOLDERS or entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    found.append(prefix + entry.name)
        if len(found) > FILES_MAX:
            raise ConfigError(f"more than {FILES_MAX} files below {root}: give a smaller folder with --data PATH")
    return sorted(found)


def pieces(source: TextSource, text_field: str) -> Iterator[TextPiece]:
    """The pieces of one source in order; none for a text file that is binary, empty or can't be read.

    Args:
        text_field: the field, or column, of a row that holds its text; rows without text are left out.

    Raises:
        ConfigError: a row has no such field, or a file is not what its name says.
    """
    if source.kind == "text":
        held_out = is_held_out(source.name.encode("utf-8", "surrogateescape"))
        return _text_pieces(Path(source.path), held_out)
    rows = {"jsonl": _jsonl, "parquet": _parquet, "saved": _saved, "hub": _hub}[source.kind](source.path, text_field)
    return (TextPiece(text, True, is_held_out(text), is_row=True) for text in rows if text)


def _text_pieces(path: Path, held_out: bool) -> Iterator[TextPiece]:
    try:
        with path.open("rb") as file:
            piece = file.read(PIECE_BYTES)
            if b"\0" in piece[:_SNIFF_BYTES]:
                return
            while more := file.read(PIECE_BYTES):
                at = _cut(piece)
                yield TextPiece(piece[:at], False, held_out)
                piece = piece[at:] + more
            if piece:
                yield TextPiece(piece, True, held_out)
    except OSError:
        return  # a file the user named himself is only one of many


def _cut(piece: bytes) -> int:
    """Where to cut: after the last line, else before the last character, which may be incomplete."""
    at = piece.rfind(b"\n") + 1
    if at:
        return at
    at = len(piece) - 1
    while at > max(1, len(piece) - 4) and piece[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _jsonl(path: str, text_field: str) -> Iterator[bytes]:
    number = 0
    try:
        with Path(path).open("rb") as file:
            while line := file.readline(ROW_BYTES_MAX):
                number += 1
                if not line.strip():
                    continue
                where = f"line {number} of {path}"
                if len(line) == ROW_BYTES_MAX:
                    raise ConfigError(f"{where} has {ROW_BYTES_MAX >> 20} MiB or more: cut its text into shorter rows")
                yield row_text(json.loads(line), text_field, where)
    except ValueError as error:
        raise ConfigError(f"line {number} of {path} is no JSON ({error}): give one JSON object a line") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def row_text(row: Any, text_field: str, where: str) -> bytes:
    """The text of one row, b"" where it is null.

    Raises:
        ConfigError: the row has no such field, or it holds no text.
    """
    if not isinstance(row, dict) or text_field not in row:
        raise ConfigError(f"{where} has no field {text_field!r}: {_instead(row)}")
    text = row[text_field]
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: field {text_field!r} is a {type(text).__name__}, not a text: {_instead(row)}")
    return text.encode("utf-8", "surrogatepass")


def _instead(row: Any) -> str:
    if not isinstance(row, dict):
        return 'give an object such as {"text": "..."} a line'
    return f"it has {', '.join(map(str, row)) or 'none'}; name the one with the text as text_field of [data]"


def _check_column(columns: Sequence[str], text_field: str, path: str) -> None:
    if text_field not in columns:
        raise ConfigError(f"{path} has no column {text_field!r}: {_instead(dict.fromkeys(columns))}")


def _parquet(path: str, text_field: str) -> Iterator[bytes]:
    parquet = library("pyarrow.parquet", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(file.schema_arrow.names, text_field, path)
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield row_text({text_field: text}, text_field, path)
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise ConfigError(f"{path} can't be read as Parquet: {error}") from error


def _saved(path: str, text_field: str) -> Iterator[bytes]:
    datasets = library("datasets", f"reading {path}")
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} can't be read as a dataset of save_to_disk: {error}") from error
    if isinstance(found, dict):
        if "train" not in found:
            raise ConfigError(f"{path} has no split 'train': name the folder of one of {', '.join(found)}")
        found = found["train"]
    return _dataset_rows(found, text_field, path)


def _hub(name: str, text_field: str) -> Iterator[bytes]:
    return _dataset_rows(load_hub(name, streaming=False), text_field, name)


def load_hub(name: str, *, streaming: bool) -> Any:
    """The split `train` of a dataset that `datasets` knows: NAME or NAME#CONFIG, also a folder here.

    Raises:
        ConfigError: it can't be loaded.
    """
    datasets = library("datasets", f"reading {HUB}{name}")
    repository, _, config = name.partition("#")
    try:
        return datasets.load_dataset(repository, config or None, split="train", streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"{HUB}{name} can't be loaded: {error}") from error


def _dataset_rows(dataset: Any, text_field: str, where: str) -> Iterator[bytes]:
    _check_column(dataset.column_names, text_field, where)
    for batch in dataset.select_columns([text_field]).iter(_ROWS_AT_ONCE):
        for text in batch[text_field]:
            yield row_text({text_field: text}, text_field, where)
