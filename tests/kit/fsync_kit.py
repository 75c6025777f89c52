"""Which files and folders a piece of code makes durable, in order. For tests that a lost fsync must fail."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def traced() -> Iterator[list[tuple[str, str]]]:
    """(what, path) of each fsync, fdatasync and rename: paths as they are at that moment; of a rename the new name."""
    trace: list[tuple[str, str]] = []
    real_rename, real_replace = Path.rename, Path.replace

    def synced(real: Any) -> Any:
        def sync(descriptor: int) -> None:
            trace.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
            real(descriptor)

        return sync

    def renamed(real: Any) -> Any:
        def rename(path: Path, target: Any) -> Any:
            trace.append(("rename", str(target)))
            return real(path, target)

        return rename

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced(os.fsync))
        patch.setattr(os, "fdatasync", synced(os.fdatasync))
        patch.setattr(Path, "rename", renamed(real_rename))
        patch.setattr(Path, "replace", renamed(real_replace))
        yield trace
