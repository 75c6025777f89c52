"""The lock of a file, which the kernel lets go with its process. It imports no more than the supervisor may."""

from __future__ import annotations

import fcntl
from pathlib import Path

from diloco_node.errors import DiskRefused


def lock_file(descriptor: int, path: Path, *, waits: bool = False) -> None:
    """Hold an open file's lock until the descriptor is closed. path: for the message. waits: for another process.

    Raises BlockingIOError: another process holds it. DiskRefused: the file system gives no locks, which says nothing
    about other processes.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        raise DiskRefused(
            f"{path} can't be locked ({error.strerror or error}): the file system of this folder gives no locks. "
            "On NFS start its lock service (rpc.statd) here and on the server; else set run.state_dir (--state-dir) "
            "to a local disk"
        ) from error
