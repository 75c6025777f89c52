"""Payloads that grow on the disk while their stripes are being merged, in files whose blocks are there already.

A new file costs the disk more than its bytes: blocks are allocated, and the first fsync writes the journal. To write
over a file of the same size took a third of the time here (20 MB in 12 ms instead of 40). So files that nobody needs
any more are kept as **spares**, and some are written ahead when nothing waits for the disk. Spares and drafts have
temporary names: what a crash leaves of them is removed when the folder is opened.
"""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Final

from diloco_node.atomic_file import TMP_SUFFIX, remove_if_possible, sync_folder, write_at
from diloco_node.storage.durable import disk_error, disk_errors

SPARES_MAX: Final = 4
"""Files that are kept for later; further ones are removed."""

SPARES_AHEAD: Final = 2
"""Spare files of one size, written before they are needed: as many as rounds are in flight."""

NEAR_DIVISOR: Final = 4
"""A spare may differ by a quarter: fragments are nearly equal, and the end of a file is quickly cut or grown."""

_FILL_BYTES: Final = 1 << 20


class SpareFiles:
    """Files of a folder that may be written over, beside the files that are made of them. Safe in any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._spares: list[tuple[int, Path]] = []

    def new_path(self) -> Path:
        """A name that nothing has."""
        return self._folder / f"spare-{next(self._numbers)}{TMP_SUFFIX}"

    def count(self, size_bytes: int) -> int:
        """How many there are of about this size."""
        with self._lock:
            return sum(_is_near(size, size_bytes) for size, _ in self._spares)

    def take(self, size_bytes: int) -> Path | None:
        """The spare that is nearest to this size, or None. The caller owns it from now on."""
        with self._lock:
            near = [spare for spare in self._spares if _is_near(spare[0], size_bytes)]
            if not near:
                return None
            nearest = min(near, key=lambda spare: (abs(spare[0] - size_bytes), spare[1]))
            self._spares.remove(nearest)
            return nearest[1]

    def give(self, path: Path) -> None:
        """Keep a file that nobody needs any more; the oldest one goes when there are too many. Raises OSError.

        A reader that still has it open may read what is written over it: it finds a wrong digest.
        """
        spare = self.new_path()
        try:
            size_bytes = path.stat().st_size
            path.rename(spare)
        except FileNotFoundError:
            return
        with self._lock:
            self._spares.append((size_bytes, spare))
            surplus = self._spares[:-SPARES_MAX]
            del self._spares[:-SPARES_MAX]
        for _, old in surplus:
            old.unlink(missing_ok=True)

    def write_ahead(self, size_bytes: int) -> None:
        """See that there are `SPARES_AHEAD` of about this size. Raises StorageError: the disk refused."""
        for _ in range(SPARES_AHEAD - self.count(size_bytes)):
            path = self.new_path()
            try:
                _fill(path, size_bytes)
                self.give(path)
            except OSError as error:
                remove_if_possible(path)
                raise disk_error("write", path, error) from error


class PayloadDraft:
    """A payload that is being written, part by part. `write` in any threads; `finish` or `discard` once, at the end.

    spares: where its file comes from, and goes when it is discarded. Raises StorageError: the disk refused.
    """

    def __init__(self, spares: SpareFiles, size_bytes: int) -> None:
        self._spares = spares
        self._path = spares.take(size_bytes) or spares.new_path()
        try:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(self._descriptor).st_size != size_bytes:
                    os.ftruncate(self._descriptor, size_bytes)
                    os.posix_fallocate(self._descriptor, 0, size_bytes)
            except OSError:
                os.close(self._descriptor)
                raise
        except OSError as error:
            remove_if_possible(self._path)
            raise disk_error("write", self._path, error) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Put bytes into their place; they are on the disk when this returns. Raises StorageError: the disk refused."""
        with disk_errors("write", self._path):
            write_at(self._descriptor, offset, data)
            os.fdatasync(self._descriptor)

    def finish(self, path: Path, header: bytes) -> None:
        """Write the first bytes and give the file its name: durable when this returns.

        Raises StorageError: the disk refused; there is no file of that name then, or the one before.
        """
        with disk_errors("write", path):
            write_at(self._descriptor, 0, header)
            os.fdatasync(self._descriptor)
            self._path.rename(path)
            sync_folder(path.parent)
        os.close(self._descriptor)

    def discard(self) -> None:
        """Nobody needs it: its file is a spare again."""
        os.close(self._descriptor)
        try:
            self._spares.give(self._path)
        except OSError:
            remove_if_possible(self._path)


def _is_near(size_bytes: int, wanted_bytes: int) -> bool:
    return abs(size_bytes - wanted_bytes) * NEAR_DIVISOR <= wanted_bytes


def _fill(path: Path, size_bytes: int) -> None:
    """A file of zeros whose blocks are all on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        zeros = memoryview(bytes(_FILL_BYTES))
        for start in range(0, size_bytes, _FILL_BYTES):
            write_at(descriptor, start, zeros[: size_bytes - start])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
