"""A daemon that stops does stop.

All that must last is on the disk before it stops; the rest only closes things. If that does not end, the log says what
is still under way, and the process ends with the exit code that it was to have.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from typing import Final

import structlog

STOP_VARIABLE: Final = "DILOCO_DAEMON_STOP_S"
"""Set by the supervisor: seconds from the daemon's SIGTERM to its SIGKILL."""

STOP_S_DEFAULT: Final = 15.0
"""Where nobody kills: the run is over, or the daemon broke."""

STOP_SHARE: Final = 0.8
"""Share of these seconds after which the process ends itself."""

DRAIN_SHARE: Final = 0.4
"""Share of these seconds in which a leader hands over."""

ADMIN_SHARE: Final = 0.15
"""Share of these seconds for the admin port's last requests; files and links have the rest."""

log = structlog.get_logger()


def limit_to_kill_s() -> float:
    """Return the seconds from SIGTERM to SIGKILL."""
    try:
        return float(os.environ.get(STOP_VARIABLE, ""))
    except ValueError:
        return STOP_S_DEFAULT


class StopDeadline:
    """Ends the process, with exit code `code`, when all after `arm` takes longer; in a thread: the loop may hang."""

    def __init__(self, region: str) -> None:
        self.code = 1
        self._region = region
        # The loop whose tasks are told; None before `arm`.
        self._loop: asyncio.AbstractEventLoop | None = None

    def arm(self, code: int, stop_s: float) -> None:
        """Begin to count, in the loop that stops; again if less is left. stop_s: until the process might be killed."""
        self.code, self._loop = code, asyncio.get_running_loop()
        seconds = STOP_SHARE * stop_s
        timer = threading.Timer(seconds, self._end, [seconds])
        timer.daemon = True
        timer.start()

    def _end(self, seconds: float) -> None:
        try:
            log.error("did not stop in time", region=self._region, exit_code=self.code, seconds=seconds)
            for task in asyncio.all_tasks(self._loop) if self._loop else ():
                sys.stderr.write(f"task {task.get_name()}:\n")
                task.print_stack(file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
        finally:
            os._exit(self.code)
