"""Text files as bytes: which files belong to a corpus, in which order, and which of them are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import ConfigError, DiskRefused

HELD_OUT_PERCENT: Final = 5
FILES_MAX: Final = 200_000

_SNIFF_BYTES: Final = 8192
_SKIPPED_FOLDERS: Final = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules", "lost+found"})


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of a corpus. name: the same wherever the folder lies. path: its place on this machine."""

    name: str
    path: Path

    @property
    def is_held_out(self) -> bool:
        """Whether it is among the 5 % that nobody trains on; the same everywhere and always."""
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT

    @property
    def is_binary(self) -> bool:
        """Whether there is a NUL in its first 8 KiB, or it is gone. Raises DiskRefused."""
        head = self._read(_SNIFF_BYTES)
        return head is None or b"\0" in head

    def read(self) -> bytes | None:
        """Read it whole. None: it is gone, empty or binary. Raises DiskRefused."""
        return None if self.is_binary else self._read() or None

    def _read(self, size: int = -1) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                return file.read(size)
        except FileNotFoundError:
            return None  # gone since it was listed
        except OSError as error:
            raise _refusal(self.path, error) from error


def standard_library() -> Path:
    """Folder of Python's own sources: the corpus of a run that names no data."""
    return Path(sysconfig.get_path("stdlib"))


def text_files(paths: Sequence[str | Path]) -> list[TextFile]:
    """List the files of a corpus, path after path, sorted by name in each.

    Raises:
        ConfigError: a path is not there, or has too many.
        DiskRefused: one can't be read, or is without files, as a folder whose disk is not mounted yet. The others alone
            would be another corpus than that of the other regions.
    """
    if not paths:
        root = standard_library()
        # Not the standard library's own tests: they are half of it, often missing, and repeat themselves.
        names = (name for name in files_below(root) if name.endswith(".py") and not name.startswith("test/"))
        return [TextFile(name, root / name) for name in names]
    return [file for path in paths for file in _files_at(Path(path))]


def _files_at(path: Path) -> list[TextFile]:
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # a parent is closed, or the disk is away
        raise _refusal(path, error) from error
    if is_file:
        return [TextFile(path.name, path)]
    if is_folder:
        if names := files_below(path):
            return [TextFile(name, path / name) for name in names]
        raise DiskRefused(
            f"data path {path} has no files but links and hidden ones: mount its disk, put text there, or take it out "
            "of data.paths"
        )
    fault = "is no file or folder" if os.path.lexists(path) else "does not exist"
    raise ConfigError(f"data path {path} {fault}: give files or folders of text with --data PATH, or none")


def files_below(root: Path) -> list[str]:
    """Relative paths of the files below, sorted, without hidden files, links and folders of installed packages, which
    are not entered: a restarted learner waits for it. Raises ConfigError: more than FILES_MAX files. DiskRefused."""
    names: list[str] = []
    folders = [""]
    while folders:
        prefix = folders.pop()
        try:
            with os.scandir(root / prefix) as entries:
                for entry in entries:
                    if entry.name in _SKIPPED_FOLDERS or entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{prefix}{entry.name}/")
                    elif entry.is_file(follow_symlinks=False):
                        names.append(prefix + entry.name)
        except OSError as error:
            if not prefix or not isinstance(error, FileNotFoundError):  # else gone since it was listed
                raise _refusal(root / prefix, error) from error
        if len(names) > FILES_MAX:
            raise ConfigError(f"more than {FILES_MAX} files below {root}: give a smaller folder with --data PATH")
    return sorted(names)


def _refusal(path: Path, error: OSError) -> DiskRefused:
    return DiskRefused(
        f"data path {path} can't be read ({error.strerror}): mount its disk, make it readable, or give data.paths "
        "without it, in all regions alike"
    )
