"""The supervisor's end of the fork server (`fork_server.py`): one process per region that learners fork from.

While there is none, because it still imports or was killed, the learner starts afresh. A learner that runs does not
depend on it, and a fork server that does not answer is killed. Standard library only: the supervisor imports this.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from diloco_node.backoff import Backoff

FORK_SERVER: Final = Path(__file__).resolve().with_name("fork_server.py")

ANSWER_BYTES_MAX: Final = 65_536
ANSWER_S: Final = 5.0
"""A fork takes hundredths of a second. A server that is silent for so long is stopped, or its memory is on disk."""

LEARNER_NICENESS: Final = 5
"""Added to the learner's niceness: where processors are few, the daemon gets three times its share, and heartbeats come
in time. More would stop the learner beside other programs, which are no more urgent than it is."""

LOWEST_NICENESS: Final = 19

AUTOGROUP_TRIES: Final = 5
"""The kernel takes one such wish in 0.1 s from all users of the machine but root."""

# Each CDLL brings types of its own, in a cycle: garbage that a process with many objects seldom collects.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER: Final = 36
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_OPTION: Final = re.compile(r"-[BdEIOPqsSuvb]+")
_LAUNCHERS: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_HAS_RANKS: Final = "starts its ranks itself, each as a process of its own"


def forkable_command(command: Sequence[str]) -> tuple[int, str]:
    """Where in a learner's command the script, or `-m`, stands, and ""; or 0, and why it can't be run in a fork."""
    name = Path(command[0]).name
    if name in _LAUNCHERS:
        return 0, f"{name} {_HAS_RANKS}"
    if not _PYTHON.fullmatch(name):
        return 0, f"{name} is not Python; a fork runs `python SCRIPT` or `python -m MODULE`"
    if shutil.which(command[0]) is None:
        return 0, f"{command[0]} is not there"
    at = 1
    while at < len(command):
        word = command[at]
        if word in ("-X", "-W"):
            at += 2
        elif word == "-m" and at + 1 < len(command):
            module = command[at + 1]
            return (0, f"{module} {_HAS_RANKS}") if module in _LAUNCHERS else (at, "")
        elif _OPTION.fullmatch(word):
            at += 1
        else:
            break
    if at < len(command) and not command[at].startswith("-") and Path(command[at]).is_file():
        return at, ""
    return 0, "the command is neither `python SCRIPT` with a file nor `python -m MODULE`"


class Forked:
    """A child that the fork server made: what the supervisor uses of `subprocess.Popen`. stdout: what it writes."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._lock = threading.Lock()
        self._has_ended = False

    def wait(self) -> int:
        """Its exit code, negative for a signal. Call once, when it has ended or is being killed: `send_signal`
        waits meanwhile."""
        # From here on the number may belong to another process.
        with self._lock:
            self._has_ended = True
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        with self._lock:
            if not self._has_ended:
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class ServerReady:
    """It has imported everything. seconds: that this took. error: why no learner can be forked; empty if one can."""

    seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class ServerEnded:
    """The fork server is gone; `code` as in subprocess."""

    code: int


ServerEvent = ServerReady | ServerEnded


class ForkServer:
    """The fork server through all its lives. All methods must be called from the supervisor's main thread.

    at: the script's place in the command (`forkable_command`). report: takes what happens to it, from other threads.
    pid: 0 while there is none. restart_at_s: by the monotonic clock; None: it is not to be started again.
    """

    def __init__(
        self,
        modules: Sequence[str],
        command: Sequence[str],
        at: int,
        *,
        write: Callable[[bytes], None],
        report: Callable[[ServerEvent], None],
        say: Callable[[str], None],
        backoff: Backoff,
    ) -> None:
        self.restart_at_s: float | None = None
        self.is_starting = False
        self._is_ready = False
        self._is_useless = False
        self._interpreter, self._command = list(command[:at]), list(command[at:])
        self._modules = list(modules)
        self._write, self._report, self._say = write, report, say
        self._backoff = backoff
        self._ready_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """See the class."""
        return self._process.pid if self._process is not None else 0

    def start(self, env: Mapping[str, str]) -> None:
        """Start it with the learner's environment; what follows is reported."""
        try:
            self._begin(env)
        except (OSError, RuntimeError) as error:  # no process, descriptor or thread can be had
            self.close()
            self._let_go()
            self._is_useless = False
            reason = error.strerror if isinstance(error, OSError) else error
            self._schedule_restart(f"the preloading process can't be started ({reason})")
            return
        self.is_starting, self.restart_at_s = True, None
        self._say(f"preloading {', '.join(self._modules)} for the learner, in process {self.pid}")

    def _begin(self, env: Mapping[str, str]) -> None:
        self._orders, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            numbers = [str(remote.fileno()), str(os.getpid())]
            self._process = process = subprocess.Popen(
                [*self._interpreter, str(FORK_SERVER), *numbers, *self._modules, "--", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
                pass_fds=[remote.fileno()],
            )
        give_way(process.pid)  # before there are learners, which inherit it
        assert process.stdout is not None
        self._reader = start_reader(process.stdout, self._write)
        threading.Thread(target=self._watch, args=(process, self._orders), daemon=True).start()

    def _watch(self, process: subprocess.Popen[bytes], orders: socket.socket) -> None:
        """Its first packet, then its end. Nobody else reads the socket before ServerReady was reported."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            ready = json.loads(orders.recv(ANSWER_BYTES_MAX))
            self._report(ServerReady(float(ready.get("ready", 0.0)), str(ready.get("error", ""))))
        self._report(ServerEnded(process.wait()))

    def note(self, event: ServerEvent) -> None:
        """Take in what was reported."""
        self.is_starting = False
        if isinstance(event, ServerReady):
            self._is_ready, self._is_useless = not event.error, bool(event.error)
            self._ready_s = time.monotonic()
            self._say(
                f"no preload: {event.error}; the learner starts afresh: correct `[learner] preload`"
                if event.error
                else f"preloaded in {event.seconds:.1f} s: the learner is forked from process {self.pid}"
            )
            return
        has_served = self._is_ready and time.monotonic() - self._ready_s > self._backoff.max_s
        if has_served:
            self._backoff.reset()
        self._let_go()
        if self._is_useless:
            return
        self._schedule_restart(f"the preloading process ended, code={event.code}")

    def _schedule_restart(self, reason: str) -> None:
        wait_s = self._backoff.next_s()
        self.restart_at_s = time.monotonic() + wait_s
        self._say(f"{reason}: another in {wait_s:.1f} s; until that is ready the learner starts afresh")

    def fork(self) -> Forked | None:
        """A new learner; None if there is no server that makes one: then it must be started afresh."""
        if not self._is_ready or self._orders is None:
            return None
        output_read, output_write = os.pipe()
        go_read, go_write = os.pipe()
        pid, problem = 0, ""
        try:
            with _adopting():
                self._orders.settimeout(ANSWER_S)
                socket.send_fds(self._orders, [b"fork"], [output_write, go_read])
                answer = json.loads(self._orders.recv(ANSWER_BYTES_MAX))
            pid, problem = int(answer.get("pid", 0)), str(answer.get("error", ""))
            if pid > 0:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # it must be a child of this process
                os.write(go_write, b"1")
        except (OSError, ValueError, TypeError) as error:
            pid, problem = 0, f"{type(error).__name__}: {error}"
        finally:
            for descriptor in (output_write, go_read, go_write):
                os.close(descriptor)
        if pid > 0:
            return Forked(pid, os.fdopen(output_read, "rb"))
        os.close(output_read)
        self._say(f"no fork of process {self.pid} ({problem}): it is killed, the learner starts afresh")
        self.kill()
        return None

    def kill(self) -> None:
        """Its end is reported."""
        self._is_ready = False
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill it and wait for its end, for the last time."""
        self._is_useless, self.restart_at_s = True, None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._let_go()

    def _let_go(self) -> None:
        self._is_ready = self.is_starting = False
        self._process = None
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._reader is not None:
            self._reader.join(1.0)  # the log that it writes to may be closed next


def start_reader(pipe: IO[bytes], write: Callable[[bytes], None]) -> threading.Thread:
    """Hand on what a process writes, in a thread that ends with the pipe. Raises RuntimeError: there is no thread."""

    def copy() -> None:
        with pipe:
            while data := os.read(pipe.fileno(), 65_536):
                write(data)

    thread = threading.Thread(target=copy, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        pipe.close()
        raise
    return thread


def give_way(pid: int) -> None:
    """Lower the priority of a process that has just begun a session, and of what it starts there. Ranks of torchrun
    have sessions of their own, which keep their share."""
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + LEARNER_NICENESS
        os.setpriority(os.PRIO_PROCESS, pid, min(niceness, LOWEST_NICENESS))
    # Where no control group does, Linux shares processors among sessions, and niceness counts within each only.
    with contextlib.suppress(OSError, ValueError):
        niceness = autogroup_niceness(Path("/proc/self/autogroup").read_text()) + LEARNER_NICENESS
        for _ in range(AUTOGROUP_TRIES):
            try:
                Path(f"/proc/{pid}/autogroup").write_text(str(min(niceness, LOWEST_NICENESS)))
                break
            except BlockingIOError:
                time.sleep(0.1)


def autogroup_niceness(text: str) -> int:
    """Niceness of a session by its `/proc/PID/autogroup`: `/autogroup-123 nice 5`; 0 where the file is empty, as in the
    kernel's first session. Raises ValueError: it holds something else."""
    match text.split():
        case []:
            return 0
        case [_, "nice", niceness]:
            return int(niceness)
    raise ValueError(f"/proc/PID/autogroup holds {text!r}")


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """The kernel gives this process the orphans among its descendants; only while one is made on purpose."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
