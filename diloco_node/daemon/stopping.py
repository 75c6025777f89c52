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
    """Ends the process when the block that it is used on takes longer. A thread does it: the loop may be what is stuck.

    code: the process's exit code then. seconds: what the block may take.
    """

    def __init__(self, region: str, code: int, *, seconds: float = STOP_MAX_S) -> None:
        self._region = region
        self._code = code
        self._loop = asyncio.get_running_loop()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        try:
            log.error("did not stop in time", region=self._region, exit_code=self._code, seconds=self._timer.interval)
            for task in asyncio.all_tasks(self._loop):
                sys.stderr.write(f"task {task.get_name()}:\n")
                task.print_stack(file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
        finally:
            os._exit(self._code)
