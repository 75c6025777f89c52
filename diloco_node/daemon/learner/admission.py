"""Admission of the newest learner process: by incarnation, and by when the processes were started. An older one may
attach
late: it was stopped, was slow to start, or finds a new daemon before the newer one does.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import structlog

from diloco_node.errors import StorageError
from diloco_node.storage.durable import replace_file
from diloco_node.storage.trained import newest_incarnation
from diloco_node.unix_sockets import Process, ancestors_of, process_of
from diloco_node.wire.learner_link import NEW_PROCESS, Attach

HOLDER_NAME: Final = "learner.process"

log = structlog.get_logger(part="learner")


class Admission:
    """Remembers who was let in last, on disk for the next daemon, too. disk: one thread: later writes come later."""

    def __init__(self, state_dir: Path, disk: Executor) -> None:
        self._state_dir = state_dir
        self._path = state_dir / HOLDER_NAME
        self._disk = disk
        self._holder: Process | None = None

    def rejection_reason(
        self, attach: Attach, process: Process | None, known_incarnation: int = 0, *, is_attached: bool = False
    ) -> str:
        """Why this process may not take the learner's place; empty if it may.

        process: what the kernel says of it; None if that can't be had. known_incarnation: the newest in the ledger.
        is_attached: the last one let in is still there.
        """
        newest = known_incarnation
        with contextlib.suppress(StorageError):  # then no number is allotted either
            newest = max(newest, newest_incarnation(self._state_dir))
        if NEW_PROCESS < attach.incarnation < newest:
            return f"incarnation {attach.incarnation} of this learner was over when incarnation {newest} began"
        if attach.incarnation > newest > 0:
            return f"incarnation {attach.incarnation} of this learner was never allotted here, the newest is {newest}"
        holder = self._holder or self._last_holder()
        if holder is None:
            return ""  # nobody yet, or the disk: then the incarnations decide alone
        is_older = process is not None and process.is_older_than(holder)
        if is_older and process_of(holder.pid) == holder:
            return f"process {holder.pid} was started later and is this region's learner"
        if is_attached and process is not None and holder.pid in ancestors_of(process.pid):
            return (
                f"it is a child of process {holder.pid}, this region's learner, which is at work: start other programs "
                "without DILOCO_SOCKET in their environment"
            )
        return ""

    def _last_holder(self) -> Process | None:
        try:
            pid, ticks, boot = self._path.read_text().split()
            return Process(int(pid), int(ticks), boot)
        except (OSError, ValueError):
            return None

    def let_in(self, process: Process | None) -> None:
        """This process has the place now."""
        if process is not None:
            self._holder = process
            self._disk.submit(self._write, process)

    def _write(self, process: Process) -> None:
        try:
            replace_file(self._path, [f"{process.pid} {process.start_ticks} {process.boot}\n".encode()])
        except StorageError as error:
            log.warning("which learner came last is not on disk", reason=str(error))
