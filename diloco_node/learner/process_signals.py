"""The signals by which the supervisor ends the learner's process."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from types import FrameType
from typing import Any, Final

from diloco_node.errors import LearnerError

_PR_SET_PDEATHSIG: Final = 1


class TerminateFlag:
    """SIGTERM asks the loop to end at a boundary, where the script has not its own handler."""

    def __init__(self) -> None:
        self.is_set = False
        self._before: Any = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Take SIGTERM, if nobody else has it."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.is_set = True
        else:
            # A process that the loop has forked: who ends a pool of workers waits until they are gone.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def restore(self) -> None:
        """Give it back."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None


def die_with_supervisor() -> None:
    """A learner whose parent is the supervisor must not outlive it, even if its loop never looks at `should_stop`."""
    if os.environ.get("DILOCO_SUPERVISOR_PID") == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def place() -> tuple[int, int]:
    """This region's index among the run's regions, sorted by name, and how many there are; (0, 1) when alone.

    Known before `attach`: for a data loader that has to be made first.

    Raises:
        LearnerError: DILOCO_PLACE, which `diloco-node start` sets, is not what that writes.
    """
    text = os.environ.get("DILOCO_PLACE", "0/1")
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise LearnerError(f"DILOCO_PLACE is {text!r}, not INDEX/COUNT: start this script with `diloco-node start`")
    return int(index), int(count)
