"""Trained counters: what each life of a region's learner trained, in a file of 16 bytes that the learner writes itself.

`learner/trained-<incarnation>` in the region's state folder holds inner steps and tokens of one incarnation, two
little-endian u64. The learner writes it through a mapping at each step, which a SIGKILL does not undo. The daemon reads
it to book what died as discarded. What is booked must not be forgotten by a power cut, so it makes the file durable
first.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import StorageError
from diloco_node.storage.durable import disk_error, make_folder, sync_folder

_COUNTERS: Final = struct.Struct("<QQ")

COUNT_MAX: Final = 2**62
"""No learner counts so far; more is a damaged file. The wire's integers hold it."""


class TrainedCounter:
    """The learner's side of its trained counter: steps and tokens of this incarnation, on disk at each step.

    Raises:
        StorageError: the daemon has not allotted this incarnation, or the file is damaged.
    """

    def __init__(self, state_dir: Path, incarnation: int) -> None:
        path = _counter_path(state_dir, incarnation)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = mmap.mmap(self._fd, _COUNTERS.size)
            except (OSError, ValueError):
                os.close(self._fd)
                raise
        except (OSError, ValueError) as error:
            raise StorageError(
                f"trained counter {path}: {error}; does the daemon use the same state folder?"
            ) from error

    def write(self, steps: int, tokens: int) -> None:
        """Set both. One copy of 16 bytes, so a kill leaves the old or the new pair."""
        self._map[0 : _COUNTERS.size] = _COUNTERS.pack(steps, tokens)

    def flush(self) -> None:
        """Make the counters survive a power cut too; takes a disk write, so not from the training thread.

        Not `mmap.flush`, which holds the GIL for as long as the disk takes.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Unmap; the file stays."""
        self._map.close()
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one incarnation of a region's learner trained in its life, as its counter says."""

    incarnation: int
    steps: int
    tokens: int


def read_trained(state_dir: Path) -> tuple[Trained, ...]:
    """All counters in the state folder, by incarnation. They are durable on return: what is read may be told.

    After a power cut one may lie behind the ledger: take the larger.

    Raises:
        StorageError: a counter file has not 16 bytes, holds no count, or the disk refuses.
    """
    found = []
    for incarnation, path in _counter_files(state_dir):
        raw = _read_durable(path)
        if len(raw) != _COUNTERS.size:
            raise StorageError(f"trained counter {path} has {len(raw)} B, not {_COUNTERS.size}: the disk lost it")
        steps, tokens = _COUNTERS.unpack(raw)
        if max(steps, tokens) > COUNT_MAX:
            raise StorageError(f"trained counter {path} says {steps} steps and {tokens} tokens: it is damaged")
        found.append(Trained(incarnation, steps, tokens))
    return tuple(found)


def sync_trained(state_dir: Path, incarnation: int) -> None:
    """Make what an incarnation has counted so far durable, also while it counts on. Raises StorageError."""
    _read_durable(_counter_path(state_dir, incarnation))


def _read_durable(path: Path) -> bytes:
    """Read first, then fsync: a learner that lives writes on, and what was read before is on disk after."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            raw = os.read(descriptor, _COUNTERS.size + 1)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise disk_error("read", path, error) from error
    return raw


def newest_incarnation(state_dir: Path) -> int:
    """The last life that was allotted; 0 if there was none. Raises StorageError."""
    return max((number for number, _ in _counter_files(state_dir)), default=0)


def allot_incarnation(state_dir: Path, *, incarnation_min: int = 1) -> int:
    """A number for a new life of the learner, higher than every one before; its counter file is durable on return.

    Args:
        state_dir: the region's state folder.
        incarnation_min: one more than the highest that the ledger knows of this region; matters when the disk was lost.

    Raises:
        StorageError: the file can't be made.
    """
    number = max(incarnation_min, newest_incarnation(state_dir) + 1)
    path = _counter_path(state_dir, number)
    try:
        make_folder(path.parent)
        with path.open("xb") as file:
            file.write(_COUNTERS.pack(0, 0))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"trained counter {path}: {error}") from error
    return number


def _counter_path(state_dir: Path, incarnation: int) -> Path:
    return state_dir / "learner" / f"trained-{incarnation}"


def _counter_files(state_dir: Path) -> list[tuple[int, Path]]:
    folder = state_dir / "learner"
    try:
        found = [(path.name.removeprefix("trained-"), path) for path in folder.glob("trained-*")]
    except OSError as error:
        raise disk_error("read", folder, error) from error
    return sorted((int(number), path) for number, path in found if number.isdecimal())
