"""A child of the supervisor through all its lives: how it is started, watched and cleared up after, and its log."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from diloco_node.backoff import Backoff
from diloco_node.supervisor.preload import Forked, ForkServer, give_way, start_reader
from diloco_node.supervisor.screen import SCREEN
from diloco_node.unix_sockets import ancestors_of

if TYPE_CHECKING:
    from diloco_node.supervisor.supervisor_spec import SupervisorSpec

LOG_BYTES_MAX: Final = 32 * 2**20
"""A child's log is rotated here; one older file is kept."""

TAIL_BYTES: Final = 16_384
"""The end of a child's output that is looked through for its last line."""

LAST_LINE_CHARS_MAX: Final = 300

_ERROR_LINE: Final = re.compile(
    r"(?:\[rank\d+\]: ?)?(?: +\| +)?(?!\S*ChildFailedError)[\w.]*(?:Error|Exception|Exit|Interrupt)(?:\(\w+\))?(?::.*)?"
)
"""Python's last line of a traceback, also of a rank or within a group of exceptions; not the launcher's own, which
names no cause."""

_CLEARING: Final = re.compile(
    r"^(?:Exception ignored |Error in atexit).*\n"
    r"(?:Traceback .*\n(?:[ \t].*\n)*\S.*\n?|[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*\n?)?",
    re.MULTILINE,
)
"""An error of what Python clears away at its end: it often follows the cause, and never is that."""

_ECHO: Final = re.compile(
    r"another rank of this region has ended|Connection (closed|reset) by peer|remote process exited"
)
"""In the error of a rank that has lost another: that of the other is the cause."""

_CRASH: Final = re.compile(
    r"(?:(?P<cause> {0,8}what\(\): .*|Fatal Python error: .*)\n(?:.*\n)*?)?"
    r"Current thread 0x.*\n *(?P<place>File .*)\n(?: +(?:File |\.\.\.).*\n|\n)*(?:Extension modules: .*\n?)?\Z"
)
"""The end of the output of a process that crashed outside of Python, as faulthandler writes it."""

KILLED_S: Final = 10.0
"""Limit for a killed process to leave the machine."""

ORPHAN_LEAVES_S: Final = 15.0
"""For the last checkpoint of a learner whose supervisor is gone."""

ORPHAN_POLL_S: Final = 0.05

COMMAND_CHARS_MAX: Final = 80
"""Characters of a child's command in a message, at most."""

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
class ChildExited:
    """A child has ended; `code` as in subprocess: negative for a signal."""

    child: Child
    code: int


class ChildLog:
    """A log file with a size limit, for one reader thread at a time. tail: its last TAIL_BYTES of this life."""

    def __init__(self, path: Path, is_echoing: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._is_echoing = is_echoing
        self.tail = b""
        self._file = path.open("ab", buffering=0)
        self._size_bytes = self._file.tell()
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Never fails."""
        with self._lock:
            self.tail = (self.tail + data)[-TAIL_BYTES:]
            # A full disk or a closed terminal must stop neither the child nor the supervisor.
            if self._size_bytes > LOG_BYTES_MAX:
                with contextlib.suppress(OSError):
                    self._rotate()
            with contextlib.suppress(OSError):
                self._file.write(data)
                self._size_bytes += len(data)
            if self._is_echoing:
                SCREEN.write(data)

    def last_line(self) -> str:
        """The last error of Python's in this life's output (libraries print more after a traceback), if there is one of
        the rank that failed first; else where it crashed, or its last line."""
        text = self.tail.decode("utf-8", "replace")
        if crash := _CRASH.search(text):
            return ", at ".join(part.strip() for part in crash.groups() if part)[:LAST_LINE_CHARS_MAX]
        lines = [line for line in (_CLEARING.sub("", text).strip() or text).splitlines() if line.strip()] or [""]
        errors = [at for at, line in enumerate(lines) if _ERROR_LINE.fullmatch(line)]
        causes = [at for at in errors if not _ECHO.search(lines[at])]
        at = (causes or errors or [len(lines) - 1])[-1]
        line = lines[at].strip().removeprefix("| ").lstrip()
        if line.endswith(":") and at in errors:  # what is wrong stands below
            line = " ".join([line, *(below.strip() for below in lines[at + 1 : at + 2])])
        return line[:LAST_LINE_CHARS_MAX]

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # renamed already, by a try that went no further
            self._path.replace(self._path.with_suffix(".log.1"))
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file, self._size_bytes = file, 0

    def close(self) -> None:
        """Nobody writes any more."""
        with self._lock:
            self._file.close()


class Child:
    """A process that the supervisor keeps running, through all its lives. death_signal: what it gets when that dies.
    logs_errors_only: its standard output is shown, and not logged; its log is shown only to who wants to see all."""

    def __init__(
        self, name: str, command: list[str], death_signal: int, spec: SupervisorSpec, *, logs_errors_only: bool = False
    ) -> None:
        self.name = name
        self.starts = 0
        self.restart_at_s: float | None = None
        self._command = command
        self._death_signal = death_signal
        self._spec = spec
        self._logs_errors_only = logs_errors_only
        is_echoing = spec.is_echoing and (spec.is_verbose or not logs_errors_only)
        self.log = ChildLog(spec.state_dir / "logs" / f"{name}.log", is_echoing)
        self.forks: ForkServer | None = None
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._readers: list[threading.Thread] = []
        self._started_s = 0.0
        self._backoff = Backoff(spec.backoff_min_s, spec.backoff_max_s)
        self._marks: list[bytes] = []

    @property
    def is_running(self) -> bool:
        """Whether there is a process; also one whose end was not noted yet."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id; 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_forked(self) -> bool:
        """Whether this life is a fork of the preloaded process."""
        return isinstance(self._process, Forked)

    @property
    def shown(self) -> str:
        """Process id and command, for people: a long command loses its middle."""
        command = " ".join(shlex.join(self._command).split())
        if len(command) > COMMAND_CHARS_MAX:
            half = (COMMAND_CHARS_MAX - len(" ... ")) // 2
            command = f"{command[:half].rstrip()} ... {command[-half:].lstrip()}"
        return f"pid {self._process.pid if self._process is not None else '-'}: {command}"

    def start(self, env: Mapping[str, str], report: Callable[[ChildExited], None], *, gives_way: bool = False) -> None:
        """Start it, from the main thread: PR_SET_PDEATHSIG follows the thread that forked. gives_way: at a lower
        priority. Raises OSError, RuntimeError: the machine gives no process, descriptor or thread now."""
        self.log.tail = b""
        own_env = self.marked(env)
        self._marks = [f"{name}={own_env[name]}".encode() for name in ("DILOCO_CHILD", "DILOCO_SUPERVISOR")]
        process = (self.forks.fork() if self.forks is not None else None) or self._spawn(own_env, is_apart=gives_way)
        if gives_way:
            give_way(process.pid)
        assert process.stdout is not None
        outputs = [(process.stdout, self._show if self._logs_errors_only else self.log.write)]
        if isinstance(process, subprocess.Popen) and process.stderr is not None:
            outputs.append((process.stderr, self.log.write))
        self._readers = []
        try:
            for pipe, write in outputs:
                self._readers.append(start_reader(pipe, write))
            threading.Thread(target=self._watch, args=(process, report), daemon=True).start()
        except RuntimeError:  # no thread can be started: nobody would read what it writes
            _kill_group(process.pid, signal.SIGKILL)
            process.wait()
            for pipe, _ in outputs[len(self._readers) + 1 :]:
                pipe.close()
            raise
        self._process = process
        self.starts += 1
        self._started_s = time.monotonic()
        self.restart_at_s = None

    def marked(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment by which this child, and what it leaves behind, is known."""
        return {**env, "DILOCO_CHILD": f"{self.name}-{os.getpid()}"}

    def _spawn(self, env: Mapping[str, str], *, is_apart: bool) -> subprocess.Popen[bytes]:
        """Start the command; is_apart: in a session of its own, which `give_way` needs."""
        become = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), str(int(self._death_signal))]
        return subprocess.Popen(
            [*become, *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self._logs_errors_only else subprocess.STDOUT,
            env=env,
            process_group=None if is_apart else 0,
            start_new_session=is_apart,
        )

    def _show(self, data: bytes) -> None:
        if self._spec.is_echoing:
            SCREEN.write(data)

    def _watch(self, process: subprocess.Popen[bytes] | Forked, report: Callable[[ChildExited], None]) -> None:
        # Look at the exit without reaping: until then the process group's number can't belong to anyone else, and what
        # the child left behind in its group can be killed safely.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(process.pid, signal.SIGKILL)
        report(ChildExited(self, process.wait()))

    def ended(self) -> float:
        """Note the end of this life, and clear up after it. Returns how long it was, in seconds."""
        self._process = None
        self._kill_left_behind(signal.SIGKILL)
        for reader in self._readers:
            reader.join(1.0)
        return time.monotonic() - self._started_s

    def schedule_restart(self, lived_s: float, *, ran_well: bool = False) -> float:
        """Returns the wait in seconds: starts are the backoff apart, so who lived longer waits no more. ran_well: what
        it did was useful, and it was killed from outside: the backoff begins anew."""
        if ran_well or lived_s >= self._spec.healthy_s:
            self._backoff.reset()
        wait_s = max(0.0, self._backoff.next_s() - lived_s)
        self.restart_at_s = time.monotonic() + wait_s
        return wait_s

    def send_signal(self, number: int) -> None:
        """To the child alone: `torchrun` passes SIGTERM on to its ranks in its own order."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop_below(self, pid: int, limit_s: float) -> None:
        """Send SIGTERM to the process of the group that is `pid`, or that started it, and wait for its end: the child
        is a shell, which would end at once, and take the whole group along. Nothing where that is the child itself."""
        with contextlib.suppress(OSError):
            pid = next((other for other in (pid, *ancestors_of(pid)) if os.getpgid(other) == self.pid), self.pid)
            if pid == self.pid:
                return
            descriptor = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                select.select([descriptor], [], [], limit_s)
            finally:
                os.close(descriptor)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """With all of its process group, and the ranks of a launcher."""
        if self._process is not None:
            # Each process once: a second SIGABRT ends Python while it still writes its stacks.
            self._kill_left_behind(number, but_group=self._process.pid)
            _kill_group(self._process.pid, number)

    def _kill_left_behind(self, number: int, but_group: int = 0) -> None:
        """Kill ranks of a launcher and the like, but no process group left alone: that learners are forked from."""
        for pid in _left_behind(self._marks):
            if self.forks is None or pid != self.forks.pid:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if os.getpgid(pid) != but_group:
                        os.kill(pid, number)


def reap_strangers(own: Collection[int]) -> None:
    """Reap zombies that are children of this process but none of `own`: a container's orphans come to it."""
    with contextlib.suppress(OSError):
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) not in own:
                with contextlib.suppress(OSError):  # gone meanwhile, or no child
                    if (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
                        os.waitpid(int(folder.name), os.WNOHANG)


def memory_kills() -> int:
    """Return how many processes the kernel has killed here for want of memory; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines()).get("oom_kill", 0))
    return 0


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def end_orphans(memory: str, state_dir: Path) -> list[int]:
    """End what an earlier supervisor of this state folder started, and wait for that: it holds its memory, perhaps the
    device. It is asked first, for a checkpoint. Call with the folder's lock held. Returns the process ids."""
    victims: set[int] = set()
    kill_s = time.monotonic() + ORPHAN_LEAVES_S
    while orphans := {
        pid for pid in _left_behind([f"DILOCO_SUPERVISOR={memory}".encode()]) if _is_here(pid, state_dir)
    }:
        late_s = time.monotonic() - kill_s
        if late_s > KILLED_S:
            break
        for pid in orphans if late_s > 0.0 else orphans - victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if late_s > 0.0 else signal.SIGTERM)
        victims |= orphans
        time.sleep(ORPHAN_POLL_S)
    return sorted(victims)


def _is_here(pid: int, state_dir: Path) -> bool:
    """Whether it is a child of a supervisor of this folder, not of one that has this name in another container."""
    with contextlib.suppress(OSError):
        has_mark = b"\0DILOCO_CHILD=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        return pid != os.getpid() and has_mark and state_dir.samefile(f"/proc/{pid}/root{state_dir.resolve()}")
    return False


def _left_behind(marks: list[bytes]) -> list[int]:
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                settings = (folder / "environ").read_bytes().split(b"\0")
                if all(mark in settings for mark in marks):
                    pids.append(int(folder.name))
    return sorted(pids)
