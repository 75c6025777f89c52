"""The Unix sockets between the processes of a region: where they lie, and which process is at the other end.

Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import BindError

SOCKET_PATH_BYTES_MAX: Final = 107
"""Longest path that fits into sockaddr_un on Linux."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_CREDENTIALS: Final = struct.Struct("3i")
_PARENT, _START_TICKS = 1, 19
"""Fields 4 and 22 of /proc/PID/stat; the first two, pid and name, are cut off."""


def socket_path(state_dir: Path, name: str) -> Path:
    """Where a region's Unix socket of this name lies; the same for every process of the region.

    In the state folder where the path fits into a socket address (107 bytes), else in a folder of the user under the
    temporary directory, named after the state folder.

    Raises BindError: the folder under the temporary directory is not the user's own.
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


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end of a connected Unix socket, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return int(uid)


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process of this machine. start_ticks: when the kernel started it, since the boot."""

    pid: int
    start_ticks: int
    boot: str

    def is_older_than(self, process: Process) -> bool:
        """Whether it was started before the other one, as far as that can be told."""
        return self.boot == process.boot and self.start_ticks < process.start_ticks


def peer_process(connection: socket.socket) -> Process | None:
    """The process that connected to a Unix socket, as the kernel knows it; None if it is gone or can't be seen here."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _uid, _gid = _CREDENTIALS.unpack(raw)
    return process_of(pid)


def process_of(pid: int) -> Process | None:
    """The process that has this number now; None if there is none."""
    try:
        return Process(pid, int(_stat(pid)[_START_TICKS]), BOOT_ID.read_text().strip())
    except OSError:
        return None


def ancestors_of(pid: int) -> list[int]:
    """Return the numbers of a process's parent, its parent, and so on, as far as they can be seen here."""
    pids: list[int] = []
    try:
        while (pid := int(_stat(pid)[_PARENT])) > 1 and pid not in pids:
            pids.append(pid)
    except OSError:
        pass
    return pids


def _stat(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
