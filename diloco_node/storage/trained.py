"""Trained counters: what each life of a region's learner trained, in a file of 16 bytes that the learner writes itself.

`learner/trained-<incarnation>` in the region's state folder holds inner steps and tokens of one incarnation, two
little-endian u64. The learner writes it through a mapping at each step, which a SIGKILL does not undo. The daemon reads
it to book what died as discarded.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.core.bounds import INCARNATION_MAX, STEP_MAX, TOKENS_MAX
from diloco_node.errors import StorageError
from diloco_node.storage.durable import sync_folder

_COUNTERS: Final = struct.Struct("<QQ")
_DIGITS_MAX: Final = len(str(INCARNATION_MAX))


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
    """All counters in the state folder, by incarnation.

    After a power cut one may lie behind the ledger: take the larger.

    Raises:
        StorageError: a counter file has not 16 bytes.
    """
    found = []
    for incarnation, path in _counter_files(state_dir):
        raw = path.read_bytes()
        if len(raw) != _COUNTERS.size:
            raise StorageError(f"trained counter {path} has {len(raw)} B, not {_COUNTERS.size}: the disk lost it")
        steps, tokens = _COUNTERS.unpack(raw)
        is_possible = steps <= STEP_MAX and tokens <= TOKENS_MAX
        # The learner writes it: what no learner can have trained is not told, or the ledger would refuse it for ever.
        found.append(Trained(incarnation, steps, tokens) if is_possible else Trained(incarnation, 0, 0))
    return tuple(found)


def newest_incarnation(state_dir: Path) -> int:
    """The last life that was allotted; 0 if there was none."""
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
        path.parent.mkdir(parents=True, exist_ok=True)
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
    found = ((path.name.removeprefix("trained-"), path) for path in (state_dir / "learner").glob("trained-*"))
    numbered = ((int(number), path) for number, path in found if number.isdecimal() and len(number) <= _DIGITS_MAX)
    return sorted((number, path) for number, path in numbered if number <= INCARNATION_MAX)
