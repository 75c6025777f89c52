"""Files that a power cut leaves either old or new, and what to say when the disk refuses.

A name that ends in `.tmp` is a file that was being written; whoever opens the folder removes it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from diloco_node.errors import DiskRefused, StorageError

TMP_SUFFIX: Final = ".tmp"
_IOV_MAX: Final = 512
_unique = itertools.count()

_REMEDIES: Final = {
    errno.ENOSPC: "the disk is full: free some space or give the region a larger state folder",
    errno.EDQUOT: "the quota is used up: raise it or give the region another state folder",
    errno.EROFS: "the file system is read-only: remount it (a disk that fails is often remounted so) and look at dmesg",
    errno.EACCES: "permission denied: the folder must belong to the user that runs diloco-node",
    errno.EPERM: "permission denied: the folder must belong to the user that runs diloco-node",
    errno.EIO: "the disk reports an error: look at dmesg, copy the state folder to a good disk, and start again",
    errno.ENOENT: "it is gone: another program has removed it; restart the daemon",
}


class DamagedFile(StorageError):
    """What is in the file is not what was written, or the disk can't read it: another copy is needed.

    Any other StorageError may be over at the next try (too many open files, a wrong user), and the file is still good.
    """


def disk_error(what: str, path: Path, error: OSError) -> DiskRefused:
    """The error to raise for an OSError: what failed, where, why, and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, f"{error.strerror or error}: look at the disk and its mount")
    return DiskRefused(f"can't {what} {path}: {remedy}")


def sync_folder(folder: Path) -> None:
    """Make renames and removals in the folder durable. Raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make what was written to the file durable, by whatever way. Raises OSError."""
    _sync(path, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; durable when this returns. Raises OSError.

    Also where it is there: who made it may have been killed before its name was durable.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # who may not read the folder above has not made this one
        sync_folder(folder.parent)


def write_parts(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all of the parts, one after the other, however often the kernel takes only some. Raises OSError."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        written = os.writev(descriptor, views[:_IOV_MAX])
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if views and written:
            views[0] = views[0][written:]


def replace_file(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file under a temporary name, fsync, rename, fsync the folder. Durable when this returns.

    Args:
        path: the file; an old one of that name stays whole until the new one is.
        parts: its bytes, one part after the other. C-contiguous; not changed.

    Raises:
        StorageError: the disk refused; the old file, if any, is untouched.
    """
    temporary = path.with_name(f"{path.name}.{next(_unique)}{TMP_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_parts(descriptor, parts)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        remove_if_possible(temporary)
        raise disk_error("write", path, error) from error


def remove_if_possible(path: Path) -> None:
    """Remove a file that is not wanted any more. A disk that has just refused a write may refuse this too: then it
    stays, and has a name that the next start knows."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def remove_temporaries(folder: Path) -> None:
    """Remove what a crash left half-written. Raises OSError."""
    for path in sorted(folder.glob(f"*{TMP_SUFFIX}")):
        path.unlink()
