"""Trained counters: what each life of a region's learner trained, in shared memory and in a file of 20 bytes.

The learner writes steps and tokens of its incarnation into the supervisor's memory at each step: no write waits for a
disk, and no SIGKILL undoes it. `learner/trained-<incarnation>` holds the same, two little-endian u64 and their CRC-32,
for when the memory is gone. Booked counts must survive a power cut, so learner and daemon save it before they tell
them.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from diloco_node.atomic_file import sync_folder
from diloco_node.core.bounds import INCARNATION_MAX, STEP_MAX, TOKENS_MAX
from diloco_node.errors import StorageError
from diloco_node.file_lock import lock_file
from diloco_node.storage.durable import disk_errors, make_folder, replace_file

_COUNTERS: Final = struct.Struct("<QQ")
_CHECKSUM: Final = struct.Struct("<I")
_FILE_BYTES: Final = _COUNTERS.size + _CHECKSUM.size
_DAMAGED_BYTES_MAX: Final = 4096
"""Bytes of a damaged file that are set aside."""
_SLOT: Final = struct.Struct("<QQQ")

_SLOTS: Final = 16
"""A slot in the area belongs to one incarnation of sixteen: an old life that still steps writes into its own."""

AREA_BYTES: Final = _SLOTS * _SLOT.size
"""Size of the shared area."""

READS_MAX: Final = 1000
"""Tries to read a slot between two writes; each write takes under a microsecond."""

_DIGITS_MAX: Final = len(str(INCARNATION_MAX))


class TrainedCounter:
    """The learner's side of its counter. area: AREA_BYTES of memory that outlives this process. Raises StorageError:
    the daemon has not allotted this incarnation."""

    def __init__(self, state_dir: Path, incarnation: int, area: mmap.mmap) -> None:
        self._state_dir = state_dir
        self._incarnation = incarnation
        self._area = area
        path = _counter_path(state_dir, incarnation)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise StorageError(
                f"trained counter {path}: {error}; does the daemon use the same state folder?"
            ) from error

    def write(self, steps: int, tokens: int) -> None:
        """Set both. It is a copy of 24 bytes in memory, so a kill leaves the old or the new ones."""
        start = _slot_start(self._incarnation)
        self._area[start : start + _SLOT.size] = _SLOT.pack(self._incarnation, steps, tokens)

    def flush(self) -> None:
        """Make the counters survive a power cut, by a disk write: not for the training thread. Raises StorageError."""
        save_trained(self._state_dir, self._incarnation, self._area)

    def close(self) -> None:
        """Save them if the disk takes them; else the daemon does, as long as the memory is there."""
        with suppress(StorageError):
            self.flush()


class Trained(NamedTuple):
    """Steps and tokens of one incarnation of a region's learner in its life, as its counter says."""

    incarnation: int
    steps: int
    tokens: int


def read_trained(state_dir: Path, area: mmap.mmap | None = None) -> tuple[Trained, ...]:
    """All counters in the state folder, by incarnation, durable on return; `area` may have newer ones.

    After a power cut one may lie behind the ledger: take the larger. Raises StorageError: a file is damaged.
    """
    numbers = [number for number, _ in _counter_files(state_dir)]
    # Each older file was synced by later reads: its slot is another life's, so nobody has written it since.
    old = set(numbers[:-_SLOTS])
    return tuple(save_trained(state_dir, number, area, is_durable=number in old) for number in numbers)


def set_damaged_aside(state_dir: Path) -> tuple[str, ...]:
    """Replace damaged counters by empty ones, before a learner attaches; their names. The numbers stay used.

    Steps of a dead learner beyond the ledger are not known then; a living one's memory has them. Raises StorageError.
    """
    damaged_names = []
    for _, path in _counter_files(state_dir):
        with _lock(path) as descriptor:
            raw = os.pread(descriptor, _DAMAGED_BYTES_MAX, 0)
            if _decode(raw) is not None:
                continue
            # A copy, so that the name is there at each moment: without it the number would be given to another life.
            replace_file(path.with_name(path.name + ".damaged"), [raw])
            replace_file(path, [_encode(0, 0)])
            damaged_names.append(path.name)
    return tuple(damaged_names)


def _encode(steps: int, tokens: int) -> bytes:
    counters = _COUNTERS.pack(steps, tokens)
    return counters + _CHECKSUM.pack(zlib.crc32(counters))


def _decode(raw: bytes) -> tuple[int, int] | None:
    """Decode a count that `_encode` encoded, and that a learner can reach: the ledger refuses others. None: damage."""
    if len(raw) != _FILE_BYTES:
        return None
    steps, tokens = _COUNTERS.unpack_from(raw)
    return (steps, tokens) if raw == _encode(steps, tokens) and _can_be(steps, tokens) else None


def save_trained(state_dir: Path, incarnation: int, area: mmap.mmap | None, *, is_durable: bool = False) -> Trained:
    """Bring an incarnation's file up to the memory, durably. is_durable: the file is. Raises as `read_trained`."""
    path = _counter_path(state_dir, incarnation)
    with _lock(path) as descriptor:
        raw = os.pread(descriptor, _FILE_BYTES + 1, 0)
        counters = _decode(raw)
        if counters is None:
            raise StorageError(f"trained counter {path} is damaged ({len(raw)} B: {raw.hex()}); look at the disk")
        newer = None if area is None else _read_slot(area, incarnation)
        if newer is not None and newer > counters:
            os.pwrite(descriptor, _encode(*newer), 0)
            counters, is_durable = newer, False
        if not is_durable:
            os.fdatasync(descriptor)
    return Trained(incarnation, *counters)


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """The file, for this process alone: learner and daemon both save, and the older count must not come last."""
    with disk_errors("save", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock_file(descriptor, path, waits=True)
            yield descriptor
        finally:
            os.close(descriptor)


def _slot_start(incarnation: int) -> int:
    return incarnation % _SLOTS * _SLOT.size


def _read_slot(area: mmap.mmap, incarnation: int) -> tuple[int, int] | None:
    """(steps, tokens) of an incarnation; None: the slot is another's, or holds no count."""
    start = _slot_start(incarnation)
    for _ in range(READS_MAX):
        raw = area[start : start + _SLOT.size]
        if raw == area[start : start + _SLOT.size]:  # else its learner was writing just then
            owner, steps, tokens = _SLOT.unpack(raw)
            return (steps, tokens) if owner == incarnation and _can_be(steps, tokens) else None
    return None


def newest_incarnation(state_dir: Path) -> int:
    """The last life that was allotted; 0 if there was none. Raises StorageError."""
    return max((number for number, _ in _counter_files(state_dir)), default=0)


def allot_incarnation(state_dir: Path, rule: Callable[[int], int] = lambda newest: newest + 1) -> int:
    """A number for a new life of the learner, higher than every one before; its counter file is durable on return.
    rule: gives it by the newest one here: the ledger may know of more. Raises StorageError."""
    number = rule(newest_incarnation(state_dir))
    path = _counter_path(state_dir, number)
    try:
        make_folder(path.parent)
        with path.open("xb") as file:
            file.write(_encode(0, 0))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        raise StorageError(f"trained counter {path}: {error}") from error
    return number


def _can_be(steps: int, tokens: int) -> bool:
    """Whether a learner can have counted so far."""
    return steps <= STEP_MAX and tokens <= TOKENS_MAX


def _counter_path(state_dir: Path, incarnation: int) -> Path:
    return state_dir / "learner" / f"trained-{incarnation}"


def _counter_files(state_dir: Path) -> list[tuple[int, Path]]:
    folder = state_dir / "learner"
    with disk_errors("read", folder):
        files = [(path.name.removeprefix("trained-"), path) for path in folder.glob("trained-*")]
    numbers = ((int(number), path) for number, path in files if number.isdecimal() and len(number) <= _DIGITS_MAX)
    return sorted((number, path) for number, path in numbers if number <= INCARNATION_MAX)
