"""The parent of a region's daemon and learner: keeps both alive, and keeps the memory they share.

Either child may die and is started again (after 0.2 s, then doubling up to 30 s, from the beginning after a healthy
while), the other goes on. Standard library only, so that the parent is small and has nothing to crash on.

How it ends (`run_supervisor`'s result is the exit code):

- the daemon exits 0: it finished the run, or was told to. The learner gets time to end by itself, then is stopped; 0.
- the daemon exits with a code that a restart does not cure (2 settings, 3 bind at its first start, 4 identity, 6 a
  folder in use, or a disk that lost what it had written, 7 superseded): the learner is stopped; that code.
- the disk refuses (full, read-only, failing): 6 if that is so at the daemon's first start. Later the learner goes on,
  and the daemon is started again until the disk takes what it writes.
- the learner exits 2 before it was ever healthy (a wrong setting, a missing data path): the daemon is stopped; 2.
- SIGTERM or SIGINT: the learner is stopped, then the daemon, each with SIGTERM, a deadline, SIGKILL; 0.
- the learner exits 0: it is done and not started again; the daemon goes on serving the other regions.
- the learner hangs, or crashes again and again (`daemon.learner.watch`): it is killed and started again, or stays
  stopped until SIGUSR1 or the next start, while the daemon votes and merges.

Children are put into process groups of their own (a Ctrl-C in the terminal reaches only the supervisor) and get
PR_SET_PDEATHSIG: when the supervisor dies, so do they. What a dead learner command left behind (the ranks of a killed
`torchrun`, which have sessions of their own) is found by its environment and killed before the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

from diloco_node.daemon.learner.process_file import write_process
from diloco_node.daemon.learner.watch import COUNTERS_AREA, Action, LearnerWatch
from diloco_node.errors import StorageError
from diloco_node.shared_memory import MemoryStore
from diloco_node.unix_sockets import socket_path

FINAL_CODES: Final = frozenset({2, 4, 6, 7})
"""The daemon's exit codes that another start would only repeat."""

BIND_CODE: Final = 3
"""Final at the daemon's first start; later its own old connections may linger, and it tries again."""

DISK_CODE: Final = os.EX_TEMPFAIL
"""The daemon's when the disk refuses: a full disk must not stop a training that has begun."""

STORAGE_CODE: Final = 6
USAGE_CODE: Final = 2
LOG_BYTES_MAX: Final = 32 * 2**20
"""A child's log is rotated here; one older file is kept."""

LOOK_S: Final = 1.0
"""Between two looks at the learner's counters."""

COMMAND_CHARS_MAX: Final = 80
"""Of a child's command in a message."""

DAEMON_SOCKET: Final = "learner.sock"
MEMORY_SOCKET: Final = "memory.sock"

# prctl(PR_SET_PDEATHSIG) must be called by the child, after fork. A tiny program does it and then becomes the command:
# `preexec_fn` would run Python between fork and exec, which can deadlock in a process with threads.
_BECOME: Final = """
import ctypes, os, sys
ctypes.CDLL(None, use_errno=True).prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[3]}: {error.strerror}\\n")
    sys.stderr.flush()
    os._exit(127)
"""


@dataclass(frozen=True, slots=True)
class SupervisorSpec:
    """What to run.

    Attributes:
        region: for messages.
        state_dir: the region's folder; logs go to `logs/daemon.log` and `logs/learner.log` in it.
        daemon_command, learner_command: argument lists; no learner command: the region is a witness, or its learner
            is started by someone else.
        env: added to the children's environment, beside DILOCO_SOCKET, DILOCO_SUPERVISOR and DILOCO_STATE.
        backoff_min_s, backoff_max_s: wait before the first and the later restarts.
        healthy_s: a child that lived so long begins again with backoff_min_s.
        learner_stop_s, daemon_stop_s: from SIGTERM to SIGKILL.
        finish_s: what the learner has to end by itself once the daemon has finished the run.
        hang_s: a learner that makes no step for so long may hang; 0: it never does.
        is_echoing: children's output also goes to the supervisor's own standard error.
    """

    region: str
    state_dir: Path
    daemon_command: list[str]
    learner_command: list[str] | None
    env: Mapping[str, str] = field(default_factory=dict)
    backoff_min_s: float = 0.2
    backoff_max_s: float = 30.0
    healthy_s: float = 30.0
    learner_stop_s: float = 10.0
    daemon_stop_s: float = 15.0
    finish_s: float = 30.0
    hang_s: float = 300.0
    is_echoing: bool = True


@dataclass(frozen=True, slots=True)
class _Exited:
    """A child has ended; `code` as in subprocess: negative for a signal."""

    child: _Child
    code: int


_Event = _Exited | int
"""Or the number of a signal."""


class _Log:
    """A process's log file with a size limit. Written by one reader thread at a time."""

    def __init__(self, path: Path, is_echoing: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._is_echoing = is_echoing
        self._file = path.open("ab", buffering=0)
        self._size_bytes = self._file.tell()
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock:
            # A full disk or a closed terminal must stop neither the child nor the supervisor.
            if self._size_bytes > LOG_BYTES_MAX:
                with contextlib.suppress(OSError):
                    self._rotate()
            with contextlib.suppress(OSError):
                self._file.write(data)
                self._size_bytes += len(data)
            if self._is_echoing:
                with contextlib.suppress(OSError, ValueError):
                    os.write(2, data)

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # renamed already, by a try that went no further
            self._path.replace(self._path.with_suffix(".log.1"))
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file, self._size_bytes = file, 0

    def close(self) -> None:
        with self._lock:
            self._file.close()


class _Child:
    """One of the two processes, through all its lives."""

    def __init__(self, name: str, command: list[str], death_signal: int, spec: SupervisorSpec) -> None:
        self.name = name
        self.starts = 0
        self.restart_at_s: float | None = None
        self.is_done = False
        self._command = command
        self._death_signal = death_signal
        self._spec = spec
        self.log = _Log(spec.state_dir / "logs" / f"{name}.log", spec.is_echoing)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._started_s = 0.0
        self._backoff_s = spec.backoff_min_s
        self._marks: list[bytes] = []

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def shown(self) -> str:
        """Process id and command, for people: a long command loses its middle."""
        command = " ".join(shlex.join(self._command).split())
        if len(command) > COMMAND_CHARS_MAX:
            half = (COMMAND_CHARS_MAX - len(" ... ")) // 2
            command = f"{command[:half].rstrip()} ... {command[-half:].lstrip()}"
        return f"pid {self._process.pid if self._process is not None else '-'}: {command}"

    def start(self, env: Mapping[str, str], report: Callable[[_Event], None]) -> None:
        """Must be called from the main thread: PR_SET_PDEATHSIG follows the thread that forked."""
        become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(self._death_signal))]
        own_env = {**env, "DILOCO_CHILD": f"{self.name}-{os.getpid()}"}
        self._marks = [f"{name}={own_env[name]}".encode() for name in ("DILOCO_CHILD", "DILOCO_SUPERVISOR")]
        process = subprocess.Popen(
            [*become, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=own_env,
            process_group=0,
        )
        self._process = process
        self.starts += 1
        self._started_s = time.monotonic()
        self.restart_at_s = None
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._copy_output, args=(process.stdout,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(process, report), daemon=True).start()

    def _copy_output(self, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 65536):
                self.log.write(data)

    def _watch(self, process: subprocess.Popen[bytes], report: Callable[[_Event], None]) -> None:
        # Look at the exit without reaping: until then the process group's number can't belong to anyone else, and what
        # the child left behind in its group can be killed safely.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(process.pid, signal.SIGKILL)
        report(_Exited(self, process.wait()))

    def ended(self) -> float:
        """Note the end of this life, and clear up after it. Returns how long it was, in seconds."""
        self._process = None
        for pid in _left_behind(self._marks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if self._reader is not None:
            self._reader.join(1.0)
        return time.monotonic() - self._started_s

    def schedule_restart(self, lived_s: float) -> float:
        """Returns the wait in seconds."""
        if lived_s >= self._spec.healthy_s:
            self._backoff_s = self._spec.backoff_min_s
        wait_s = self._backoff_s
        self.restart_at_s = time.monotonic() + wait_s
        self._backoff_s = min(2 * self._backoff_s, self._spec.backoff_max_s)
        return wait_s

    def send_signal(self, number: int) -> None:
        """To the child alone: `torchrun` passes SIGTERM on to its ranks in its own order."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """With all of its process group, and the ranks of a launcher."""
        if self._process is not None:
            for pid in _left_behind(self._marks):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            _kill_group(self._process.pid, number)


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _left_behind(marks: list[bytes]) -> list[int]:
    """Processes whose environment holds all of these settings; ascending."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                settings = (folder / "environ").read_bytes().split(b"\0")
                if all(mark in settings for mark in marks):
                    found.append(int(folder.name))
    return sorted(found)


class _Supervisor:
    def __init__(self, spec: SupervisorSpec, env: Mapping[str, str], memory: MemoryStore) -> None:
        self._spec = spec
        self._memory = memory
        self._watch = LearnerWatch(spec.hang_s)
        self._env = env
        # SimpleQueue.put is safe in a signal handler; Queue.put is not.
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._log = _Log(spec.state_dir / "logs" / "supervisor.log", spec.is_echoing)
        self._daemon = _Child("daemon", spec.daemon_command, signal.SIGKILL, spec)
        self._children = [self._daemon]
        self._learner: _Child | None = None
        if spec.learner_command is not None:
            # A learner may be a launcher with ranks below it: SIGTERM lets it take them along.
            self._learner = _Child("learner", spec.learner_command, signal.SIGTERM, spec)
            self._children.append(self._learner)

    def say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._log.write(f"{stamp} supervisor region={self._spec.region} {text}\n".encode())

    def run(self) -> int:
        try:
            for child in self._children:
                self._start(child)
            code: int | None = None
            while code is None:
                code = self._turn()
            return code
        finally:
            self._stop_all()
            for log in (self._log, *(child.log for child in self._children)):
                log.close()

    def signalled(self, number: int, _frame: FrameType | None) -> None:
        """The handler of SIGTERM, SIGINT, SIGHUP and SIGUSR1."""
        self._events.put(number)

    def _start(self, child: _Child) -> None:
        child.start(self._env, self._events.put)
        self.say(f"{child.name} started, start={child.starts}")
        if child is self._learner:
            self._watch.started(self._memory.contents(COUNTERS_AREA), now_s=time.monotonic())
            write_process(self._spec.state_dir, self._watch.document())
            self.say(
                f"waiting for the learner ({child.shown}) to attach; "
                "importing torch and building the model takes 15 to 40 s"
            )

    def _turn(self) -> int | None:
        """Carry out one event or one restart that is due. Returns the exit code when it is over."""
        now_s = time.monotonic()
        due = [child for child in self._children if child.restart_at_s is not None and child.restart_at_s <= now_s]
        for child in due:
            self._start(child)
        waiting = [child.restart_at_s for child in self._children if child.restart_at_s is not None]
        if self._spec.hang_s > 0 and self._learner is not None and self._learner.is_running:
            self._look_at(self._learner)
            waiting.append(now_s + min(LOOK_S, self._spec.hang_s / 4))
        try:
            event = self._events.get(timeout=max(0.0, min(waiting) - now_s) if waiting else None)
        except queue.Empty:
            return None
        if event == signal.SIGHUP:
            self._daemon.send_signal(signal.SIGHUP)  # it reads its settings again; else it does when it starts
            return None
        if event == signal.SIGUSR1:
            self._revive_learner()
            return None
        if isinstance(event, int):
            self.say(f"signal {signal.Signals(event).name}: stopping")
            return 0
        return self._child_exited(event.child, event.code)

    def _look_at(self, learner: _Child) -> None:
        """Whether the learner makes steps."""
        action = self._watch.look(self._memory.contents(COUNTERS_AREA), now_s=time.monotonic())
        if action is Action.ABORT:
            self.say(f"learner {self._watch.reason}: it is stopped, and its stacks are in logs/learner.log")
            learner.kill(signal.SIGABRT)
        elif action is Action.KILL:
            learner.kill()
        elif action is Action.SAY:
            self.say(f"learner {self._watch.reason}")
        if action is not Action.NOTHING:
            write_process(self._spec.state_dir, self._watch.document())

    def _revive_learner(self) -> None:
        """Start it at once, whether it waits or was stopped."""
        learner = self._learner
        if learner is None or learner.is_running:
            self.say("signal SIGUSR1: there is no learner to be started")
            return
        self.say("signal SIGUSR1: the learner is started again")
        self._watch.revived()
        learner.schedule_restart(self._spec.healthy_s)

    def _child_exited(self, child: _Child, code: int) -> int | None:
        lived_s = child.ended()
        what = f"{child.name} exited, code={code} after {lived_s:.1f} s"
        final = self._final_code(child, code, lived_s)
        if final is not None:
            self.say(f"{what}: the region ends with {final}")
            if child is self._daemon and code == 0 and self._learner is not None:
                # The run is finished; the learner was told so and writes its last files.
                self._await_exit(self._learner, time.monotonic() + self._spec.finish_s, is_interruptible=True)
            return final
        if child is self._learner:
            may_restart = self._watch.ended(code, lived_s=lived_s, now_s=time.monotonic())
            write_process(self._spec.state_dir, self._watch.document())
            if not may_restart:
                self.say(f"{what}: {'it is done' if child.is_done else self._watch.reason}")
                return None
        wait_s = child.schedule_restart(lived_s)
        self.say(f"{what}: starting again in {wait_s:.1f} s")
        return None

    def _final_code(self, child: _Child, code: int, lived_s: float) -> int | None:
        if child is self._daemon:
            if code == 0 or code in FINAL_CODES or (code == BIND_CODE and child.starts == 1):
                return code
            if code == DISK_CODE and child.starts == 1 and lived_s < self._spec.healthy_s:
                return STORAGE_CODE
            return None
        child.is_done = code == 0
        # A learner that never came up and says that its settings are wrong would say so for ever.
        return USAGE_CODE if code == USAGE_CODE and child.starts == 1 and lived_s < self._spec.healthy_s else None

    def _await_exit(self, child: _Child, deadline_s: float, *, is_interruptible: bool = False) -> bool:
        while child.is_running:
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0:
                return False
            try:
                event = self._events.get(timeout=wait_s)
            except queue.Empty:
                return False
            if isinstance(event, _Exited):
                lived_s = event.child.ended()
                self.say(f"{event.child.name} exited, code={event.code} after {lived_s:.1f} s")
            elif is_interruptible:
                return False
        return True

    def _stop_all(self) -> None:
        """Learner first, so that its last contribution and counters find a living daemon."""
        stops = [(self._learner, self._spec.learner_stop_s), (self._daemon, self._spec.daemon_stop_s)]
        for child, deadline_s in stops:
            if child is None or not child.is_running:
                continue
            child.send_signal(signal.SIGTERM)
            if not self._await_exit(child, time.monotonic() + deadline_s):
                self.say(f"{child.name} did not stop within {deadline_s:.0f} s: killed")
                child.kill()
                self._await_exit(child, time.monotonic() + deadline_s)


def run_supervisor(spec: SupervisorSpec) -> int:
    """Run a region's two processes until the run is over or a signal comes. Call from the main thread.

    Returns:
        The exit code (see the module's docstring).

    Raises:
        StorageError: the state folder can't be made, or another supervisor runs on it.
        BindError: the memory socket can't be bound.
    """
    try:
        spec.state_dir.mkdir(parents=True, exist_ok=True)
        lock = (spec.state_dir / "supervisor.lock").open("a+b")
    except OSError as error:
        raise StorageError(
            f"state folder {spec.state_dir}: {error.strerror}; choose another with --state-dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"region {spec.region} already runs on {spec.state_dir}: stop it first, or choose another state folder"
            ) from error
        memory_path = socket_path(spec.state_dir, MEMORY_SOCKET)
        env = {
            **os.environ,
            **spec.env,
            "DILOCO_SOCKET": str(socket_path(spec.state_dir, DAEMON_SOCKET)),
            "DILOCO_SUPERVISOR": str(memory_path),
            "DILOCO_SUPERVISOR_PID": str(os.getpid()),
            "DILOCO_STATE": str(spec.state_dir.resolve()),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a learner that hangs shows where, and a crash of native code too
        }
        with MemoryStore(memory_path) as memory:
            supervisor = _Supervisor(spec, env, memory)
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
            before = [(number, signal.signal(number, supervisor.signalled)) for number in numbers]
            try:
                return supervisor.run()
            finally:
                for number, handler in before:
                    signal.signal(number, handler)
