"""Memory that outlives a process: memfd areas handed over a Unix socket, and counters mapped from a file.

An **area** is anonymous memory (`memfd_create`) with a name and a size. The supervisor's `MemoryStore` creates it when
it is first asked for and keeps it open, so that daemon and learner, each of which may die and come back, find what was
in it. `request_area` maps it. Two requests with the same name and size get the same memory. Another size *replaces* the
area: the daemon names the sizes, and it asks for another one only when the model is another one, so the old contents
are worthless. Who still maps the old area keeps it until he unmaps it. Areas are sealed against shrinking and growing:
a mapping never faults.

`multiprocessing.shared_memory` is not used: on Python 3.11 a process that merely attached unlinks the segment when it
exits, and /dev/shm has 64 MiB in a container.

A **trained counter** is a file of 16 bytes, `learner/trained-<incarnation>` in the region's state folder: inner steps
and tokens of one life of the learner, two little-endian u64. The learner writes it through a mapping at each step,
which a SIGKILL does not undo; the daemon reads it to book what died as discarded.

Standard library only: the supervisor imports this and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import socket
import struct
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import BindError, LearnerError, StorageError

AREAS_MAX: Final = 16
"""Areas one store keeps; daemon and learner use two."""

AREA_BYTES_MAX: Final = 1 << 42
"""Largest area: 4 TiB, a trillion float32."""

REQUEST_BYTES_MAX: Final = 4096
SOCKET_PATH_BYTES_MAX: Final = 107
"""What fits into sockaddr_un on Linux."""

REQUEST_TIMEOUT_S: Final = 10.0
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_COUNTERS: Final = struct.Struct("<QQ")
_CREDENTIALS: Final = struct.Struct("3i")
_START_TICKS: Final = 19
"""Field 22 of /proc/PID/stat; the first two, pid and name, are cut off."""


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end of a connected Unix socket, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return int(uid)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this machine, told from all others.

    Attributes:
        start_ticks: when the kernel started it, since the machine was booted. boot: which boot.
    """

    pid: int
    start_ticks: int
    boot: str

    def is_older_than(self, other: Process) -> bool:
        """Whether it was started before the other one, as far as that can be told."""
        return self.boot == other.boot and self.start_ticks < other.start_ticks


def peer_process(connection: socket.socket) -> Process | None:
    """The process that connected to a Unix socket, as the kernel knows it; None if it is gone or can't be seen here."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _uid, _gid = _CREDENTIALS.unpack(raw)
    return process_of(pid)


def process_of(pid: int) -> Process | None:
    """The process that has this number now; None if there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return Process(pid, int(after_name[_START_TICKS]), boot)


def socket_path(state_dir: Path, name: str) -> Path:
    """Where a region's Unix socket of this name lies; the same for every process of the region.

    In the state folder where the path fits into a socket address (107 bytes), else in a folder of the user under the
    temporary directory, named after the state folder.

    Raises:
        BindError: the folder under the temporary directory is not the user's own.
    """
    direct = state_dir.resolve() / name
    if len(os.fsencode(direct)) <= SOCKET_PATH_BYTES_MAX:
        return direct
    digest = hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"diloco-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise BindError(
            f"{folder} belongs to someone else or is open to others: remove it, or use a shorter state folder"
        )
    return folder / name


@dataclass(frozen=True, slots=True)
class _Area:
    fd: int
    size_bytes: int


class MemoryStore:
    """Creates memfd areas and serves them over a Unix socket to processes of the same user.

    Use as a context manager. The areas live until `close`. One thread serves; requests are tiny.

    Args:
        path: where the socket is bound; a stale socket file there is replaced.

    Raises:
        BindError: the path can't be bound.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._areas: dict[str, _Area] = {}
        self._closing = threading.Event()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(os.fspath(path))
            path.chmod(0o600)
            self._socket.listen(8)
        except OSError as error:
            self._socket.close()
            raise BindError(f"memory socket {path}: {error.strerror or error}; choose another state folder") from error
        self._thread = threading.Thread(target=self._serve, name="memory-store", daemon=True)
        self._thread.start()

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and forget the areas; processes that mapped them keep their mappings."""
        if self._closing.is_set():
            return
        self._closing.set()
        # Closing a socket does not wake a thread that accepts on it; shutting it down does.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(REQUEST_TIMEOUT_S)
        self._socket.close()
        self.path.unlink(missing_ok=True)
        for area in self._areas.values():
            os.close(area.fd)
        self._areas.clear()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closing.is_set():
                    return
                continue
            with connection:
                connection.settimeout(REQUEST_TIMEOUT_S)
                try:
                    self._answer(connection)
                except OSError:
                    continue  # the asker went away; the next one is served

    def _answer(self, connection: socket.socket) -> None:
        if peer_uid(connection) != os.getuid():
            return
        request = connection.recv(REQUEST_BYTES_MAX)
        try:
            asked = json.loads(request)
            area = self._area(asked["name"], asked["size_bytes"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            connection.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            return
        socket.send_fds(connection, [json.dumps({"size_bytes": area.size_bytes}).encode()], [area.fd])

    def _area(self, name: object, size_bytes: object) -> _Area:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(f"area name {name!r} is not lower-case letters, digits, - and _")
        if not isinstance(size_bytes, int) or not 0 < size_bytes <= AREA_BYTES_MAX:
            raise ValueError(f"area {name}: size {size_bytes!r} B is not in 1..{AREA_BYTES_MAX}")
        found = self._areas.get(name)
        if found is not None and found.size_bytes == size_bytes:
            return found
        if found is None and len(self._areas) >= AREAS_MAX:
            raise ValueError(f"area {name}: there are {AREAS_MAX} areas already")
        area = _Area(_create(name, size_bytes), size_bytes)
        if found is not None:
            os.close(found.fd)
        self._areas[name] = area
        return area


def _create(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(f"diloco-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def request_area(path: Path, name: str, size_bytes: int) -> mmap.mmap:
    """Map the area of this name and size, shared with every other process that maps it.

    Args:
        path: the store's socket. name: lower-case letters, digits, - and _. size_bytes: exact.

    Returns:
        A shared, writable mapping; zero bytes if the area is new. The caller closes it.

    Raises:
        LearnerError: the store does not answer, or refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            connection.connect(os.fspath(path))
            connection.send(json.dumps({"name": name, "size_bytes": size_bytes}).encode())
            answer, fds, _flags, _address = socket.recv_fds(connection, REQUEST_BYTES_MAX, 1)
        except OSError as error:
            raise LearnerError(
                f"memory area {name}: no answer from {path} ({error}); is the supervisor alive?"
            ) from error
    try:
        said = json.loads(answer) if answer else {"error": "the connection was closed (another user?)"}
        if "error" in said or len(fds) != 1 or said.get("size_bytes") != size_bytes:
            raise LearnerError(f"memory area {name} of {size_bytes} B refused: {said.get('error', said)}")
        return mmap.mmap(fds[0], size_bytes)
    finally:
        for fd in fds:
            os.close(fd)


# ---- trained counters ------------------------------------------------------------------------------------------------


class TrainedCounter:
    """The learner's side of its trained counter: steps and tokens of this incarnation, on disk at each step.

    Raises:
        StorageError: the daemon has not allotted this incarnation, or the file is damaged.
    """

    def __init__(self, state_dir: Path, incarnation: int) -> None:
        path = _counter_path(state_dir, incarnation)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"trained counter {path}: {error}; does the daemon use the same state folder?"
            ) from error
        try:
            self._map = mmap.mmap(self._fd, _COUNTERS.size)
        except (OSError, ValueError) as error:
            os.close(self._fd)
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
    return tuple(Trained(number, *_read_counter(path)) for number, path in _counter_files(state_dir))


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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (what a rename or a new file needs beside its own fsync)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _counter_path(state_dir: Path, incarnation: int) -> Path:
    return state_dir / "learner" / f"trained-{incarnation}"


def _counter_files(state_dir: Path) -> list[tuple[int, Path]]:
    found = ((path.name.removeprefix("trained-"), path) for path in (state_dir / "learner").glob("trained-*"))
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def _read_counter(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    if len(raw) != _COUNTERS.size:
        raise StorageError(f"trained counter {path} has {len(raw)} B, not {_COUNTERS.size}: the disk lost it")
    steps, tokens = _COUNTERS.unpack(raw)
    return steps, tokens
