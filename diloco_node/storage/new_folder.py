"""A folder that has its name only when all of it is on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco_node.atomic_file import sync_file, sync_folder
from diloco_node.errors import ConfigError, StorageError
from diloco_node.storage.durable import disk_error


@contextmanager
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
