"""Files and folders of a region's state that outlive a power cut, and what to say when the disk refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from diloco_node import atomic_file
from diloco_node.atomic_file import TMP_SUFFIX, sync_file, sync_folder
from diloco_node.errors import ConfigError, DiskRefused, StorageError

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
    """The file holds other bytes than were written, or the disk can't read it: another copy is needed. Any other
    StorageError may be over at the next try, and the file is still good."""


def disk_error(verb: str, path: Path, error: OSError) -> DiskRefused:
    """The error to raise for an OSError: what failed, where, why, and what to do."""
    remedy = _REMEDIES.get(error.errno or 0, f"{error.strerror or error}: look at the disk and its mount")
    if error.errno == errno.ENOSPC:
        with contextlib.suppress(OSError):
            remedy = f"{remedy}; {shutil.disk_usage(path.parent).free:,} bytes are free"
    refusal = DiskRefused(f"can't {verb} {path}: {remedy}")
    with contextlib.suppress(OSError):
        refusal.disk = path.parent.stat().st_dev, error.errno or 0
    return refusal


@contextlib.contextmanager
def disk_errors(verb: str, path: Path) -> Iterator[None]:
    """Raise each OSError of a block as `disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(verb, path, error) from error


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, durably; also where it is there: who made it may have been killed before.
    Raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # who may not read the folder above has not made this one
        sync_folder(folder.parent)


@contextlib.contextmanager
def new_folder(folder: Path, *, is_forced: bool = False) -> Iterator[Path]:
    """Hand out an empty folder to fill; after the block it is durable and has the name. Raises ConfigError: it is
    there. StorageError: the disk refused, and nothing is left."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_forced:
        raise ConfigError(f"{folder} is there and not empty: name another folder, or add --force to replace it")
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)  # in a container the number of one that was killed comes again
        fresh.mkdir()
        yield fresh
        for path in fresh.iterdir():
            sync_file(path)
        sync_folder(fresh)
        if folder.is_dir():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        fresh.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        raise StorageError(str(disk_error("write", folder, error))) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def replace_file(path: Path, data: Sequence[bytes | memoryview]) -> None:
    """Replace a file by these parts, durably; not begun without room for all: the ledger needs what is left. Raises
    StorageError: the old file, if any, is untouched."""
    nbytes = sum(memoryview(part).nbytes for part in data)
    with disk_errors("write", path):
        if shutil.disk_usage(path.parent).free < nbytes:
            raise OSError(errno.ENOSPC, "")
        atomic_file.replace_file(path, data, is_durable=True)


def remove_temporaries(folder: Path) -> None:
    """Remove what a crash left half-written; safetensors begins its names with the suffix. Raises OSError."""
    for path in sorted({*folder.glob(f"*{TMP_SUFFIX}"), *folder.glob(f"{TMP_SUFFIX}*")}):
        if not path.is_dir():
            path.unlink(missing_ok=True)
