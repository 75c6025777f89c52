"""A daemon that stops does stop.

Everything that must last is on the disk before a daemon stops; what follows only closes things. If that does not end,
a run that is finished would keep its region for ever. So it has a deadline: then the log says what is still under way,
and the process ends with the exit code that it was to have.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from typing import Final

import structlog

STOP_MAX_S: Final = 12.0
"""Leadership is handed over in 5 s at most, the admin port's last requests have 2. A supervisor kills after 15."""

log = structlog.get_logger()


class StopDeadline:
    """Ends the process when what follows `arm` takes longer, up to the end of its threads: Python waits for each.

    A thread does it: the loop may be what is stuck. seconds: from `arm` on.

    Attributes:
        code: the process's exit code then.
    """

    def __init__(self, region: str, *, seconds: float = STOP_MAX_S) -> None:
        self.code = 1
        self._region = region
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        # The loop whose tasks are told; None before `arm`.
        self._loop: asyncio.AbstractEventLoop | None = None

    def arm(self, code: int) -> None:
        """Begin to count, once, in a task of the loop that stops."""
        self.code, self._loop = code, asyncio.get_running_loop()
        self._timer.start()

    def _end(self) -> None:
        try:
            log.error("did not stop in time", region=self._region, exit_code=self.code, seconds=self._timer.interval)
            for task in asyncio.all_tasks(self._loop) if self._loop else ():
                sys.stderr.write(f"task {task.get_name()}:\n")
                task.print_stack(file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
        finally:
            os._exit(self.code)
