"""The signals by which the supervisor ends the learner's process."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import ClassVar, Final

from diloco_node.errors import LearnerError
from diloco_node.unix_sockets import process_of

LEARNER_VARIABLE: Final = "DILOCO_LEARNER_PROCESS"
"""Set by a learner for its children: number and start of the process that they are not to replace."""

STOP_VARIABLE: Final = "DILOCO_STOP_S"
"""Set by the supervisor: seconds from SIGTERM to SIGKILL."""

STOP_S_DEFAULT: Final = 20.0
LEAVE_SHARE: Final = 0.8
"""Share of these seconds in which a learner waits for a merge of its last steps; the rest is for what it closes."""

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers and spot notices send them. A script that has a handler for one may leave with exit code 0."""

AGAIN_S: Final = 2.0
"""A stop that comes so long after the one that waits is somebody who insists."""

STOP_LASTS_S: Final = 300.0
"""So long a stop signal is the reason of an end: a handler may be for a profile or a checkpoint only."""

log = logging.getLogger("diloco_node.learner")

_PR_SET_PDEATHSIG: Final = 1

_Handler = Callable[[int, FrameType | None], object]


class TerminateFlag:
    """SIGTERM asks the loop to end at a boundary. Handlers of the script are called as well.

    is_set: it came, or the script leaves its loop for another stop signal. note: called at each, in its handler.
    is_holding: an exit by a handler of the script's waits: for the end of a boundary, for the last merge or, where
    there are other ranks, which may be in the middle of a step, until all of them know that they are to leave.
    has_exit: an exit waits. are_exiting: the ranks have agreed that all of them exit where they leave.
    """

    def __init__(self) -> None:
        self.is_set = self.is_holding = self.has_exit = self.are_exiting = False
        self.note: Callable[[], None] = lambda: None
        # Monotonic: when SIGTERM came first, and the last stop signal.
        self._set_s: float | None = None
        self._held_s = -math.inf  # when the exit came that waits
        self._stop_s = -math.inf
        # By signal: the handler that stands here, and the one that it stands in for.
        self._handlers: dict[int, tuple[_Handler, _Handler | signal.Handlers]] = {}
        self._pid = os.getpid()
        # By which a handler of the script's ended its loop.
        self._exit: BaseException | None = None
        # Id of the exception within whose handling the script trains; the object would hold its frames.
        self._handled = id(None)

    def install(self) -> None:
        """Take SIGTERM, and stand in for the script's handlers of stop signals."""
        self._handled = id(sys.exc_info()[1])
        if threading.current_thread() is not threading.main_thread():
            log.warning("attach() was called in a thread: SIGTERM is the script's, which has to leave the loop then")
        elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._stand_in(signal.SIGTERM, signal.SIG_DFL)
        self.is_asked()

    def is_asked(self) -> bool:
        """Whether SIGTERM has come. Handlers that the script has set meanwhile are stood in for from now on."""
        if threading.current_thread() is threading.main_thread() and os.getpid() == self._pid:
            for number in STOP_SIGNALS:
                handler = signal.getsignal(number)
                # Nor for the stand-in of another learner in this process, such as one that a newer process replaced.
                function = getattr(handler.func, "__func__", None) if isinstance(handler, partial) else None
                is_stand_in = function is TerminateFlag._handle
                if callable(handler) and handler is not signal.default_int_handler and not is_stand_in:
                    self._stand_in(number, handler)
        return self.is_set

    @property
    def has_stop(self) -> bool:
        """Whether SIGTERM came, or of late another stop signal that the script handles."""
        return self._set_s is not None or time.monotonic() - self._stop_s < STOP_LASTS_S

    def is_orderly(self, error: BaseException, *, is_alone: bool) -> bool:
        """Whether a block that this ends is left in order: a stop signal's handler exits with any code.

        is_alone: no other rank may be in the middle of a step.
        """
        if error is self._exit:
            return is_alone
        return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)

    @contextlib.contextmanager
    def leaving(self, *, is_alone: bool) -> Iterator[None]:
        """Take a stop signal for the reason why the script leaves its loop. Exit at the end if an exit waits.

        is_alone: no other rank may wait for this one afterwards; else all ranks exit (`are_exiting`), or none.
        An exception that is on its way already, such as the loop's own error, goes on instead.

        Raises also where another rank has exited before the agreement.
        """
        self.is_set |= self.has_stop
        self.is_holding, is_failing = True, self.is_failing()
        try:
            yield
        except LearnerError as error:
            if isinstance(error.__cause__, RuntimeError):  # torch's: the other rank is gone
                self.exit_late()
            raise
        finally:
            self.is_holding = False
        is_exiting = self.has_exit if is_alone else self.are_exiting
        exit_error = self._exit if self.has_exit else None
        self.has_exit = self.are_exiting = False
        if is_exiting and not is_failing:
            raise exit_error or SystemExit
        if exit_error is not None:
            log.warning("the exit that a stop signal's handler wanted is left out: an error, or other ranks, go on")

    def is_failing(self) -> bool:
        """Whether an exception is on its way, other than the one that the script has handled to train at all."""
        error = sys.exc_info()[1]
        return error is not None and id(error) != self._handled and not isinstance(error, GeneratorExit)

    @property
    def deadline_s(self) -> float:
        """When this process must be about to end, monotonic: some time before the supervisor kills it."""
        return (time.monotonic() if self._set_s is None else self._set_s) + self._grace_s()

    def is_late(self) -> bool:
        """Whether a stop signal has come, and so long ago that this process must be about to end."""
        if not self.is_set:  # read first: a signal sets its time before it
            return False
        begun_s = self._stop_s if self._set_s is None else self._set_s
        return time.monotonic() >= begun_s + self._grace_s()

    @staticmethod
    def _grace_s() -> float:
        try:
            return LEAVE_SHARE * float(os.environ.get(STOP_VARIABLE, ""))
        except ValueError:
            return LEAVE_SHARE * STOP_S_DEFAULT

    def _stand_in(self, number: int, handler: _Handler | signal.Handlers) -> None:
        # A function of its own for each: the script's may call the one that stood there before.
        stand_in = partial(self._handle, handler)
        self._handlers[number] = stand_in, handler
        signal.signal(number, stand_in)

    def _handle(self, handler: _Handler | signal.Handlers, number: int, frame: FrameType | None) -> None:
        is_own = os.getpid() == self._pid
        now_s = time.monotonic()
        if is_own:
            self._stop_s = now_s
            if number == signal.SIGTERM:
                self.is_set, self._set_s = True, self._set_s or now_s
            self.note()
        elif not callable(handler):
            # A process that the loop has forked: who ends a pool of workers waits until they are gone.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if callable(handler):
            try:
                handler(number, frame)
            except (SystemExit, KeyboardInterrupt) as error:
                self._exit = error
                # Who insists, or has no time left, does not wait. One stop may be delivered twice.
                is_again = self.has_exit and now_s - self._held_s > AGAIN_S
                if not self.is_holding or is_again or self.is_late() or not is_own:
                    self.has_exit = False
                    raise
                if not self.has_exit:
                    self._held_s = now_s
                self.is_set = self.has_exit = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have an exit by a handler of the script's wait for the end of the block, at least."""
        before, was_holding, self.is_holding = self._exit, self.is_holding, True
        try:
            yield
        finally:
            self.is_holding = was_holding
        if self._exit is not before and not was_holding:
            self.exit_late()

    def exit_late(self) -> None:
        """Exit as a handler of the script's wanted to, if that waits."""
        if self.has_exit and self._exit is not None:
            self.has_exit = False
            raise self._exit

    def restore(self) -> None:
        """Give the signals back, unless the script has taken them meanwhile. Only the main thread can."""
        self.note, self.is_holding, self._handled = lambda: None, False, id(None)
        if threading.current_thread() is threading.main_thread():
            for number, (stand_in, handler) in self._handlers.items():
                if signal.getsignal(number) is stand_in:
                    signal.signal(number, handler)


class LearnerPlace:
    """A region has one learner: its children, and a second `attach` in it, are refused before the daemon hears them.

    A worker that multiprocessing spawns imports the training script again. Without a `__main__` guard it attaches, and
    would take the place of the learner that waits for it.
    """

    pid: ClassVar[int | None] = None
    """Process id of the learner that this process is; None while it is none."""

    def __init__(self) -> None:
        # Of the process that has taken it; None before, and afterwards.
        self._pid: int | None = None

    def take(self) -> None:
        """Be this process's learner. Raises LearnerError: it has one, or is a child of one."""
        pid = os.getpid()
        is_child = self._is_child()
        own_start = start_of(pid)
        # Nothing is waited for from here to the mark: two threads may come at once.
        if LearnerPlace.pid == pid:
            raise LearnerError(
                "attach() was called a second time in this process, where the first learner is still at work: close() "
                "it first. Several models of one loop are attached together, attach([model, criterion], ...)"
            )
        if is_child:
            raise LearnerError(
                "attach() was called in a child of the learner: a worker that multiprocessing has spawned runs the "
                "script again. Put what only the learner does under `if __name__ == '__main__':`, and start other "
                "programs without DILOCO_SOCKET in their environment"
            )
        LearnerPlace.pid = self._pid = pid
        os.environ[LEARNER_VARIABLE] = f"{pid} {own_start}"
        die_with_supervisor()

    @staticmethod
    def _is_child() -> bool:
        number, _, start = os.environ.get(LEARNER_VARIABLE, "").partition(" ")
        # A child that a shell has started in the background has lost its parent: only the variable tells.
        is_below = number.isdecimal() and int(number) != os.getpid() and start_of(int(number)) == start != ""
        return is_below or getattr(multiprocessing.current_process(), "_inheriting", False)

    @classmethod
    def is_free(cls) -> bool:
        """Whether this process is no learner, and no child of one."""
        return cls.pid is None and not cls._is_child()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child that the learner has forked, with a copy of it: not the learner."""
        return self._pid not in (None, os.getpid())

    def leave(self) -> None:
        """Let another be it."""
        if self._pid is not None and LearnerPlace.pid == os.getpid():
            LearnerPlace.pid = self._pid = None
            os.environ.pop(LEARNER_VARIABLE, None)


def start_of(pid: int) -> str:
    """When the process that has this number now was started; empty if there is none."""
    process = process_of(pid)
    return "" if process is None else f"{process.start_ticks} {process.boot}"


def die_with_supervisor() -> None:
    """A learner whose parent is the supervisor must not outlive it, even if its loop never looks at `should_stop`."""
    if os.environ.get("DILOCO_SUPERVISOR_PID") == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def place() -> tuple[int, int]:
    """This region's place among the run's regions, and how many there are or were; (0, 1) when alone.

    Known before `attach`: for a data loader that has to be made first.

    Raises LearnerError: DILOCO_PLACE, which `diloco-node start` sets, is not what that writes.
    """
    text = os.environ.get("DILOCO_PLACE", "0/1")
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise LearnerError(f"DILOCO_PLACE is {text!r}, not INDEX/COUNT: start this script with `diloco-node start`")
    return int(index), int(count)
