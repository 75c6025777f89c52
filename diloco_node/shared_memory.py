"""Memory that outlives a process: memfd areas handed over a Unix socket.

An **area** is anonymous memory (`memfd_create`) with a name and a size. The supervisor's `MemoryStore` creates it when
it is first asked for and keeps it open, so that daemon and learner, each of which may die and come back, find what was
in it. `request_area` maps it. Two requests with the same name and size get the same memory. Another size *replaces* the
area: the daemon names the sizes, and it asks for another one only when the model is another one, so the old contents
are worthless. A process that still maps the old area keeps it until it unmaps it. Areas are
sealed against shrinking and growing: a mapping never faults.

`multiprocessing.shared_memory` is not used: on Python 3.11 a process that merely attached unlinks the segment when it
exits, and /dev/shm has 64 MiB in a container.

Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import re
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import BindError, LearnerError
from diloco_node.unix_sockets import peer_uid

COUNTERS_AREA: Final = "counters"
"""Name of the area of a learner's trained counters, which all three processes know."""

PLACE_AREA: Final = "place"
"""Name of the area where the learner writes its `PlaceMark` for supervisor and daemon."""

BUSY_MAX_S: Final = 3600.0
"""A longer pause counts as a hang: a device that is stuck in an evaluation must not keep its region for ever."""

AREAS_MAX: Final = 16
"""Areas one store keeps; daemon and learner use four."""

AREA_BYTES_MAX: Final = 1 << 42
"""Largest area: 4 TiB, a trillion float32."""

CONTENTS_BYTES_MAX: Final = 4096
REQUEST_BYTES_MAX: Final = 4096
REQUEST_TIMEOUT_S: Final = 10.0
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class PlaceMark:
    """Where a learner stands, as it writes it at each step boundary: what its death would lose, and why it pauses.

    pid: of its rank 0. step: of its incarnation. included_step: of the fragment that was merged least. checkpoint_step:
    of the newest checkpoint on disk; -1: none of this process. since_s, limit_s: monotonic begin of a pause that the
    loop has announced, and how long it may last. activity: of the pause; empty: the loop makes steps. is_interrupted: a
    signal asked this process to stop, which is no reason to end the region's part in the run. has_left: this process
    has had its part, and does what else its script wants, for as long as it takes. fault: why it was refused, which its
    script may catch. has_ended: its Python came to the end of the script, closed or not, without an exception.
    """

    pid: int
    step: int = 0
    included_step: int = 0
    checkpoint_step: int = -1
    since_s: float = 0.0
    limit_s: float = 0.0
    activity: str = ""
    is_interrupted: bool = False
    has_left: bool = False
    fault: str = ""
    has_ended: bool = False

    def encode(self) -> bytes:
        """As it stands in the area: PLACE_BYTES."""
        activity = self.activity.encode(errors="replace")[:_ACTIVITY_BYTES]
        fault = self.fault.encode(errors="replace")[:_FAULT_BYTES]
        numbers = (self.pid, self.step, self.included_step, self.checkpoint_step, self.since_s, self.limit_s)
        return _PLACE.pack(*numbers, activity, self.is_interrupted, self.has_left, fault, self.has_ended)

    @classmethod
    def decode(cls, raw: bytes | None) -> PlaceMark | None:
        """The inverse; None: no learner has written there, or what it wrote can't be."""
        if raw is None or len(raw) != PLACE_BYTES:
            return None
        *numbers, activity, is_interrupted, has_left, fault, has_ended = _PLACE.unpack(raw)
        pid, step, included_step, checkpoint_step, since_s, limit_s = numbers
        pause, words = (text.rstrip(b"\0").decode(errors="replace") for text in (activity, fault))
        pauses = (since_s, limit_s, pause)
        mark = cls(
            pid, step, included_step, checkpoint_step, *pauses, is_interrupted, has_left, words, has_ended=has_ended
        )
        return mark if mark.pid > 0 and math.isfinite(mark.since_s) and math.isfinite(mark.limit_s) else None

    @property
    def is_over(self) -> bool:
        """Whether this process has left the run, or came to its end."""
        return self.has_left or self.has_ended

    @property
    def losses(self) -> dict[str, int]:
        """Steps that are lost when the learner ends now: since its checkpoint, and those that no merge includes."""
        return {
            "unsaved_steps": max(0, self.step - max(0, self.checkpoint_step)),
            "unmerged_steps": max(0, self.step - self.included_step),
        }


_ACTIVITY_BYTES: Final = 40
_FAULT_BYTES: Final = 240
_PLACE: Final = struct.Struct(f"<QQQqdd{_ACTIVITY_BYTES}s??{_FAULT_BYTES}s?")
PLACE_BYTES: Final = _PLACE.size


class MemoryStore:
    """Creates memfd areas and serves them over a Unix socket to processes of the same user. Raises BindError.

    A context manager. The areas live until `close`; a stale socket file is replaced. A single thread serves.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._areas: dict[str, int] = {}  # descriptors
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
        self._socket.close()  # its file stays: by now it may be that of another, in a folder that was emptied meanwhile
        for area in self._areas.values():
            os.close(area)
        self._areas.clear()

    def contents(self, name: str) -> bytes | None:
        """Return the contents of a small area, at most `CONTENTS_BYTES_MAX`; None if there is none of this name."""
        area = self._areas.get(name)
        if area is None:
            return None
        try:
            return os.pread(area, CONTENTS_BYTES_MAX, 0)
        except OSError:  # replaced by one of another size in this moment
            return None

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
            fields = json.loads(request)
            area = self._area(fields["name"], fields["size_bytes"])
        except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            connection.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            return
        socket.send_fds(connection, [json.dumps({"size_bytes": os.fstat(area).st_size}).encode()], [area])

    def _area(self, name: object, size_bytes: object) -> int:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(f"area name {name!r} is not lower-case letters, digits, - and _")
        if not isinstance(size_bytes, int) or not 0 < size_bytes <= AREA_BYTES_MAX:
            raise ValueError(f"area {name}: size {size_bytes!r} B is not in 1..{AREA_BYTES_MAX}")
        current = self._areas.get(name)
        if current is not None and os.fstat(current).st_size == size_bytes:
            return current
        if current is None and len(self._areas) >= AREAS_MAX:
            raise ValueError(f"area {name}: there are {AREAS_MAX} areas already")
        area = _create(name, size_bytes)
        if current is not None:
            os.close(current)
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
    """Map the area of this name and exact size, shared with every other process that maps it; writable, and zero bytes
    if it is new. The caller closes it. Raises LearnerError: the store does not answer, or refuses."""
    fd = _request(path, name, size_bytes)
    try:
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def area_inode(path: Path, name: str, size_bytes: int) -> int:
    """The kernel's number of what `request_area` maps: of another store's area it is another one, as long as somebody
    maps this one. Raises LearnerError: as there."""
    fd = _request(path, name, size_bytes)
    try:
        return os.fstat(fd).st_ino
    finally:
        os.close(fd)


def _request(path: Path, name: str, size_bytes: int) -> int:
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
        reply = json.loads(answer) if answer else {"error": "the connection was closed (another user?)"}
        if "error" in reply or len(fds) != 1 or reply.get("size_bytes") != size_bytes:
            raise LearnerError(f"memory area {name} of {size_bytes} B refused: {reply.get('error', reply)}")
        return fds.pop()
    finally:
        for fd in fds:
            os.close(fd)
