"""A daemon that stops waits for its learner, and does stop.

All that must last is on the disk before it stops; the rest only closes things. If that does not end, the log says what
is still under way, and the process ends with the exit code that it was to have.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from diloco_node.supervisor.supervisor_spec import LEARNER_SHARE

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

AGAIN_S: Final = 2.0
"""One stop may come twice, to all processes and passed on by another. Later it is somebody who insists."""

BACK_S: Final = 2.0
"""For a learner whose link drops to attach again."""

log = structlog.get_logger()


def limit_to_kill_s() -> float:
    """Return the seconds from SIGTERM to SIGKILL."""
    try:
        return float(os.environ.get(STOP_VARIABLE, ""))
    except ValueError:
        return STOP_S_DEFAULT


def supervisor() -> int | None:
    """Return the process that has started this one and keeps it; None where that is no supervisor."""
    parent = os.getppid()
    return parent if os.environ.get("DILOCO_SUPERVISOR_PID") == str(parent) else None


class StopSignals:
    """SIGTERM and SIGINT of a daemon. With a learner attached, the daemon goes on until that has left: its last steps
    are merged meanwhile. A supervisor stops one after the other; whoever stops a job may tell all processes at once.
    Without a supervisor nobody tells the learner, which goes on and looks for the next daemon: no wait.

    has_learner: whether one is attached that the supervisor runs. end: called when the daemon is to stop.
    """

    def __init__(self, region: str, has_learner: Callable[[], bool], end: Callable[[], None]) -> None:
        self._region, self._has_learner, self._end = region, has_learner, end
        # Of the loop's clock: the first one.
        self._first_s: float | None = None
        # Ends the wait for the learner; None: nobody waits.
        self._timer: asyncio.TimerHandle | None = None
        # Runs out when a link that ended without a word has not come back.
        self._back_timer: asyncio.TimerHandle | None = None

    def take(self) -> None:
        """Hear one."""
        loop = asyncio.get_running_loop()
        if self._first_s is None:
            self._first_s = loop.time()
            if (pid := supervisor()) is not None and self._has_learner():
                limit_s = limit_to_kill_s() * LEARNER_SHARE / (1.0 - LEARNER_SHARE)
                log.info("told to stop, waits for its learner", region=self._region, seconds=limit_s)
                self._timer = loop.call_later(limit_s, self._stop)
                with suppress(OSError):  # the learner may not have been told
                    os.kill(pid, signal.SIGTERM)
                return
        if self._timer is None or loop.time() - self._first_s >= AGAIN_S:
            self._stop()

    def learner_left(self, *, is_final: bool) -> None:
        """Stop, if that was all that was waited for. is_final: it has said so; else its link may come back."""
        if self._timer is None:
            return
        if is_final:
            self._stop()
            return
        log.warning("told to stop, and its learner's link has ended before all steps were merged", region=self._region)
        if self._back_timer is not None:
            self._back_timer.cancel()
        self._back_timer = asyncio.get_running_loop().call_later(BACK_S, self._stop_unless_back)

    def _stop_unless_back(self) -> None:
        if self._timer is not None and not self._has_learner():
            self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._has_learner():
                log.warning("stops before its learner has left: its last steps may be lost", region=self._region)
        self._end()


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
