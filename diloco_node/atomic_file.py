"""Replace a file as a whole: a reader finds the old bytes or the new ones, never half of them. Standard library only.

A name that ends in `.tmp` is a file that was being written. Whoever opens the folder removes it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

TMP_SUFFIX: Final = ".tmp"
_PARTS_MAX: Final = 512
"""In one call of writev; Linux takes 1,024."""

_unique = itertools.count()


def replace_file(
    path: Path, data: bytes | Sequence[bytes | memoryview], *, is_durable: bool, mode: int = 0o644
) -> None:
    """Write a file under a temporary name, then rename it. Raises OSError: the disk refused; the old file is untouched.

    data: its bytes, or C-contiguous parts of them in order. is_durable: sync the file before, and its folder after the
    rename, so that a power cut leaves old or new. mode: of the new file, less what the umask takes.
    """
    temporary = path.with_name(f"{path.name}.{next(_unique)}{TMP_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            write_parts(descriptor, [data] if isinstance(data, bytes) else data)
            if is_durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
        if is_durable:
            sync_folder(path.parent)
    except OSError:
        remove_if_possible(temporary)
        raise


def write_parts(descriptor: int, chunks: Sequence[bytes | memoryview]) -> None:
    """Write all parts, one after the other, however often the kernel takes only some. Raises OSError."""
    views = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    while views:
        written_bytes = os.writev(descriptor, views[:_PARTS_MAX])
        while views and written_bytes >= len(views[0]):
            written_bytes -= len(views[0])
            views.pop(0)
        if views and written_bytes:
            views[0] = views[0][written_bytes:]


def write_at(descriptor: int, offset: int, data: bytes | memoryview) -> None:
    """Write all of it at its place, however often the kernel takes only some. Raises OSError."""
    remainder = memoryview(data)
    while remainder:
        written_bytes = os.pwrite(descriptor, remainder, offset)
        remainder, offset = remainder[written_bytes:], offset + written_bytes


def sync_folder(folder: Path) -> None:
    """Make renames and removals in the folder durable. Raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make durable what was written to the file, by whatever way. Raises OSError."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_if_possible(path: Path) -> None:
    """Remove a file that is not wanted any more.

    A disk that has just refused a write may refuse this too. Then the file stays; the next start knows its name.
    """
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
