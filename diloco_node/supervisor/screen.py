"""The supervisor's standard error, which a thread of its own writes: a terminal that takes nothing stops nobody.

Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from typing import Final

WAITING_BYTES_MAX: Final = 2**20
"""Bytes that wait for the terminal, at most; the log files have the rest."""

FLUSH_S: Final = 1.0

STANDARD_ERROR: Final = 2


class Screen:
    """The terminal, or whatever people read from this descriptor."""

    def __init__(self, descriptor: int = STANDARD_ERROR) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        # Not written yet; the first one is being written.
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # Lines that found no place; until all that waits is written, none does.
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Never waits and never fails."""
        with self._changed:
            if self._dropped or self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
                self._dropped += data.count(b"\n") or 1
                return
            self._put(data)
            if self._thread is None or not self._thread.is_alive():  # none is left in a fork
                self._thread = threading.Thread(target=self._write_all, daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can be started now
                    self._thread.start()

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting[0]
            with contextlib.suppress(OSError, ValueError):  # closed
                while data:
                    data = data[os.write(self._descriptor, data) :]
            with self._changed:
                self._waiting_bytes -= len(self._waiting.popleft())
                if self._dropped and not self._waiting:
                    text = f"{self._dropped} lines are not shown, for this terminal took none: see the folder logs\n"
                    self._put(text.encode())
                    self._dropped = 0
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all of it is written, as long as it goes on."""
        with self._changed:
            end_s, left_bytes = time.monotonic() + FLUSH_S, self._waiting_bytes
            while self._waiting and time.monotonic() < end_s:
                self._changed.wait(end_s - time.monotonic())
                if self._waiting_bytes < left_bytes:
                    end_s, left_bytes = time.monotonic() + FLUSH_S, self._waiting_bytes


SCREEN: Final = Screen()
"""The screen of this process."""
