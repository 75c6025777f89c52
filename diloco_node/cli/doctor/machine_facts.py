"""Facts of this machine: each function reads one and judges nothing. A fact that can't be read is None."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from diloco_node.cli.places import is_there
from diloco_node.errors import DiskRefused
from diloco_node.file_lock import lock_file

FSYNCS: Final = 100
FSYNC_S_MAX: Final = 2.0
FSYNC_BYTES: Final = b"d" * 4096
CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")

_TIMEX_BYTES: Final = 512
"""Larger than `struct timex` on every platform; it begins with `modes`, and 0 only reads."""

_TIME_ERROR: Final = 5
"""Result of adjtimex while nothing keeps the clock right."""


def sysctl_last(name: str) -> int | None:
    """The last number of a setting of the kernel, as net/ipv4/tcp_rmem."""
    try:
        return int((Path("/proc/sys") / name).read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


def descriptor_limit() -> int:
    """The hard limit of open files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the closest one above it that is there."""
    return next(folder for folder in (path, *path.parents) if is_there(folder))


def free_bytes(folder: Path) -> tuple[int | None, str]:
    """Bytes that this user may still write below an existing folder, or None and the reason."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(FSYNC_BYTES)
            file.flush()
        return shutil.disk_usage(folder).free, ""
    except OSError as error:
        return None, error.strerror or str(error)


def used_bytes(folder: Path) -> int:
    """Bytes of the files in a folder; unreadable ones count nothing."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(base) / name).lstat().st_size
    return total


def fsync_seconds(folder: Path) -> list[float]:
    """Times of small durable writes one after the other; none where nothing can be written."""
    times: list[float] = []
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        begun_s = time.monotonic()
        while len(times) < FSYNCS and time.monotonic() - begun_s < FSYNC_S_MAX:
            file.write(FSYNC_BYTES)
            file.flush()
            before_s = time.monotonic()
            os.fsync(file.fileno())
            times.append(time.monotonic() - before_s)
    return times


def lock_error(folder: Path) -> str:
    """The reason why a file in an existing folder can't be locked; empty if it can, or if none can be written there."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            lock_file(file.fileno(), Path(file.name))
        except DiskRefused as error:
            return str(error)
    return ""


def bind_error(folder: Path) -> str:
    """The reason why no Unix socket can be bound in an existing folder; empty if one can."""
    path = folder / f"{os.getpid():x}.s"  # as short as the shortest name that the program binds
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            return f"{path}: {error.strerror or error}"
    path.unlink()
    return ""


def available_memory() -> int | None:
    """Bytes: of the machine, and of the control group where that is less."""
    limits = [limit for limit in (_machine_memory(), group_memory(CONTROL_GROUPS, _own_group())) if limit is not None]
    return min(limits, default=None)


def _machine_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _own_group() -> str:
    """The control group of this process, as the kernel names it; "/" in a container."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")


def group_memory(root: Path, group: str) -> int | None:
    """Bytes that a control group (version 2) below `root` and those above it still allow; None: none has a limit."""
    folder = root / group.lstrip("/")
    rooms = [_left_in(ancestor) for ancestor in (folder, *folder.parents) if ancestor.is_relative_to(root)]
    return min((room for room in rooms if room is not None), default=None)


def _left_in(group: Path) -> int | None:
    """Files that were read count as used until the kernel drops them, which it does first: they are not."""
    try:
        limit, usage = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - usage + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # "max" is no number
        return None


def is_clock_synced() -> bool | None:
    """Whether the kernel's clock is kept right (adjtimex)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        state = int(libc.adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def missing_modules(modules: Sequence[str]) -> dict[str, str]:
    """Modules that this Python does not find, with the reason. Only packages above them are imported."""
    missing = {}
    for name in modules:
        try:
            if importlib.util.find_spec(name) is None:
                missing[name] = "there is no such module"
        except (ImportError, ValueError) as error:
            missing[name] = str(error)
    return missing
