"""The parent of a region's daemon and learner: keeps both alive, and keeps the memory they share.

Either child may die and is started again, the other goes on. Two starts are at least 0.2 s apart, then twice as long
up to 30 s. The 0.2 s are back after a healthy while, and where a learner that had made steps was killed from outside.
Standard library only, so that the parent is small and has nothing to crash on.

How it ends (`run_supervisor`'s result is the exit code):

- the daemon exits 0: it finished the run, or was told to. The learner gets time to end by itself, then is stopped; 0.
- the daemon exits with a code that a restart does not cure (2 settings, 3 bind at its first start, 4 identity, 6 a
  folder in use, or a disk that lost what it had written, 7 superseded): the learner is stopped; that code.
- the disk refuses (full, read-only, failing): 6 if the region has never run here. Else the learner goes on, and the
  daemon is started again until the disk takes what it writes.
- the learner exits 2 before it was ever healthy (a wrong setting, a missing data path): the daemon is stopped; 2.
- SIGTERM or SIGINT: the learner is stopped, then the daemon, each with SIGTERM, a deadline, SIGKILL; 0.
- the learner exits 0: it is done and not started again; the daemon goes on serving the other regions. After a signal
  that asked it to stop, which was not the supervisor's, and before the run's end, it is started again.
- the learner hangs, or crashes again and again (`learner_watch.py`): it is killed and started again, or stays
  stopped until SIGUSR1 or the next start, while the daemon votes and merges.

Children are put into process groups of their own (a Ctrl-C in the terminal reaches only the supervisor) and get
PR_SET_PDEATHSIG: when the supervisor dies, so do they. Processes that a dead learner command left behind (the
ranks of a killed `torchrun`, in sessions of their own) are found by their environment and killed before the next start;
so is what a dead supervisor left behind, such as a learner below a shell: it holds that one's memory.

The daemon starts first, for the other regions wait for its vote. Where processors are few, the learner's imports would
hold it up. So they begin when it is up, or `daemon_first_s` later.

With `preload` the learner is forked from a process that has imported these modules (`preload.py`). It is a child
of the supervisor like any other then. The first learner waits for the imports, for it would make the same ones itself;
later, where a fork can't be had, it is started as a new process.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from diloco_node.backoff import Backoff
from diloco_node.errors import StorageError
from diloco_node.file_lock import lock_file
from diloco_node.shared_memory import COUNTERS_AREA, PLACE_AREA, MemoryStore, PlaceMark
from diloco_node.state_names import ADMIN_PORT_NAME, DAEMON_SOCKET_NAME, FINAL_NAME, LEDGER_NAME, MEMORY_SOCKET_NAME
from diloco_node.supervisor.child import (
    KILLED_S,
    Child,
    ChildExited,
    ChildLog,
    end_orphans,
    memory_kills,
    reap_strangers,
)
from diloco_node.supervisor.learner_watch import FROM_OUTSIDE, Action, LearnerWatch
from diloco_node.supervisor.preload import ForkServer, ServerEnded, ServerReady, forkable_command
from diloco_node.supervisor.process_file import write_process
from diloco_node.supervisor.screen import SCREEN
from diloco_node.supervisor.service_manager import NOTIFY_VARIABLES, ServiceManager
from diloco_node.supervisor.supervisor_spec import FINAL_CODES, LEARNER_SHARE, LEAVE_S_MAX, SCRIPT_CODE, SupervisorSpec
from diloco_node.unix_sockets import socket_path

BIND_CODE: Final = 3
"""Final at the daemon's first start; later its own old connections may linger, and it tries again."""

DISK_CODE: Final = os.EX_TEMPFAIL
"""The daemon's when the disk refuses: a full disk must not stop a training that has begun."""

STORAGE_CODE: Final = 6
USAGE_CODE: Final = 2
COUNTERS_POLL_S: Final = 1.0
"""Between two looks at the learner's counters."""

FIRST_PID: Final = 1
"""The id of a container's or a machine's first process."""

REAP_POLL_S: Final = 5.0

READY_POLL_S: Final = 0.05
"""Between two looks whether the daemon is up, until it is."""


def logfmt(fact: Mapping[str, str]) -> str:
    """key=value, quoted where needed, as the daemon's log."""
    needs_quotes = re.compile(r'[\s="]')
    plain = ((key, value.replace('"', r"\"").replace("\n", r"\n")) for key, value in fact.items())
    return " ".join(f'{key}="{value}"' if needs_quotes.search(value) else f"{key}={value}" for key, value in plain)


_Event = ChildExited | ServerReady | ServerEnded | int
"""Or the number of a signal."""


class _Supervisor:
    def __init__(self, spec: SupervisorSpec, env: Mapping[str, str], memory: MemoryStore) -> None:
        self._spec = spec
        self._memory = memory
        self._watch = LearnerWatch(spec.hang_s, log=str(spec.state_dir.resolve() / "logs" / "learner.log"))
        # The counters' bytes when the learner's present life began.
        self._counters: bytes | None = None
        # A folder with a ledger is that of a run that has begun: a full disk must not end it.
        self._has_run = (spec.state_dir / LEDGER_NAME).exists()
        self._env = env
        # SimpleQueue.put is safe in a signal handler; Queue.put is not.
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._log = ChildLog(spec.state_dir / "logs" / "supervisor.log", is_echoing=False)
        self._manager = ServiceManager(os.environ, os.getpid())
        # Whether a daemon has written its port.
        self._is_ready = False
        # Whether the daemon is to read its settings again, and was not there yet, or would have died of the signal.
        self._wants_reload = False
        self._daemon = Child("daemon", spec.daemon_command, signal.SIGKILL, spec, logs_errors_only=True)
        # In the order of their start.
        self._children = [self._daemon]
        self._learner: Child | None = None
        if spec.learner_command is not None:
            # A learner may be a launcher with ranks below it: SIGTERM lets it take them along.
            self._learner = Child("learner", spec.learner_command, signal.SIGTERM, spec)
            self._children.append(self._learner)
            self._learner.forks = self._fork_server(spec.learner_command, self._learner)
        # The learner's, or None: without preloading, and without a learner.
        self._forks = self._learner.forks if self._learner is not None else None
        # Since when the daemon is done, and only what the learner's script does after its part is waited for.
        self._over_s: float | None = None
        # Whether the last life of the learner that had its part in the run failed after it.
        self._has_failed = False
        # Whether the fork server was started, which waits for the daemon.
        self._has_preloaded = False
        self._began_s = time.monotonic()

    def _fork_server(self, command: list[str], learner: Child) -> ForkServer | None:
        if not self._spec.preload:
            return None
        at, reason = forkable_command(command)
        if reason:
            self.say(f"no preload: {reason}; the learner starts afresh each time")
            return None
        return ForkServer(
            self._spec.preload,
            command,
            at,
            write=learner.log.write,
            report=self.events.put,
            say=self.say,
            backoff=Backoff(self._spec.backoff_min_s, self._spec.backoff_max_s),
        )

    def say(self, text: str) -> None:
        """Tell one fact to the log, to people, and to the service manager."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        fact = {"timestamp": stamp, "level": "info", "event": text, "region": self._spec.region, "part": "supervisor"}
        line = json.dumps(fact) if self._spec.log_format == "json" else logfmt(fact)
        self._log.write(f"{line}\n".encode())
        if self._spec.is_echoing:
            SCREEN.write(f"{stamp} {self._spec.region}: {text}\n".encode())
        self._manager.send(f"STATUS={text}")

    def run(self) -> int:
        try:
            # Not what the supervisor before said.
            write_process(self._spec.state_dir, None if self._learner is None else self._watch.document())
            if orphans := end_orphans(self._env["DILOCO_SUPERVISOR"], self._spec.state_dir):
                numbers = ", ".join(map(str, orphans))
                self.say(f"ended what the supervisor before left behind, with its memory: pid {numbers}")
            for child in self._children:
                if child is self._learner:
                    child.restart_at_s = time.monotonic() + self._spec.daemon_first_s
                else:
                    self._start(child)
            code: int | None = None
            while code is None:
                code = self._turn()
            return code
        finally:
            self._manager.send("STOPPING=1")
            self._stop_all()
            for log in (self._log, *(child.log for child in self._children)):
                log.close()
            SCREEN.flush()

    def _start_fork_server(self) -> None:
        if self._forks is not None and self._learner is not None:
            self._has_preloaded = True
            self._forks.start(self._learner.marked(self._env))

    def _start(self, child: Child) -> None:
        if child is self._learner and not child.starts and self._forks is not None:
            if not self._has_preloaded:
                self._start_fork_server()
            if self._forks.is_starting:
                child.restart_at_s = None  # both would import the same: ServerReady or ServerEnded brings it here again
                return
        if child is self._daemon:
            with suppress(OSError):  # that of a daemon before would say that this one is up
                (self._spec.state_dir / ADMIN_PORT_NAME).unlink()
        try:
            child.start(self._env, self.events.put, gives_way=child is not self._daemon)
        except (OSError, RuntimeError) as error:
            wait_s = child.schedule_restart(0.0)
            reason = error.strerror if isinstance(error, OSError) else error
            self.say(
                f"{child.name} can't be started ({reason}): trying again in {wait_s:.1f} s; look at the limits of "
                "processes, threads and open files (ulimit -u -n, pids.max)"
            )
            return
        self.say(f"{child.name} started, start={child.starts}{', forked' if child.is_forked else ''}")
        if child is self._learner:
            self._counters = self._memory.contents(COUNTERS_AREA)
            self._watch.started(
                self._counters, now_s=time.monotonic(), place=self._place(), memory_kills=memory_kills()
            )
            write_process(self._spec.state_dir, self._watch.document())
            imports = "" if child.is_forked else "; importing torch and building the model takes 15 to 40 s"
            self.say(f"waiting for the learner ({child.shown}) to attach{imports}")

    def _turn(self) -> int | None:
        """Carry out one event or one restart that is due. Returns the exit code when it is over."""
        now_s = time.monotonic()
        looks = self._look_at_daemon(now_s)
        due = [child for child in self._children if child.restart_at_s is not None and child.restart_at_s <= now_s]
        for child in due:
            self._start(child)
        waiting = [child.restart_at_s for child in self._children if child.restart_at_s is not None]
        if self._learner is not None and self._learner.is_running:
            self._look_at(self._learner)
            waiting.append(now_s + min(COUNTERS_POLL_S, self._spec.hang_s / 4 or COUNTERS_POLL_S))
        if self._over_s is not None:
            if not self._may_go_on(self._watch.awake_s(self._over_s)):
                return self._result
            waiting.append(now_s + COUNTERS_POLL_S)
        if self._over_s is None and self._forks is not None and self._forks.restart_at_s is not None:
            waiting.append(self._forks.restart_at_s)
            if waiting[-1] <= now_s:
                self._start_fork_server()
        waiting += looks
        if os.getpid() == FIRST_PID:
            reap_strangers({child.pid for child in self._children} | {self._forks.pid if self._forks else 0})
            waiting.append(now_s + REAP_POLL_S)
        try:
            event = self.events.get(timeout=max(0.0, min(waiting) - now_s) if waiting else None)
        except queue.Empty:
            return None
        return self._take(event)

    def _take(self, event: _Event) -> int | None:
        if event == signal.SIGHUP:
            self._wants_reload = True
            self.say("signal SIGHUP: the region goes on, and reads its settings again")
            return None
        if event == signal.SIGUSR1:
            self._revive_learner()
            return None
        if isinstance(event, int):
            self.say(f"signal {signal.Signals(event).name}: stopping, within {self._spec.stop_s:.0f} s")
            return 0
        if isinstance(event, ServerReady | ServerEnded):
            assert self._forks is not None
            assert self._learner is not None
            self._forks.note(event)
            if not self._learner.starts:
                self._start(self._learner)
            return None
        return self._child_exited(event.child, event.code)

    def _look_at_daemon(self, now_s: float) -> list[float]:
        """Tell the service manager that it is up, and that this process lives; pass SIGHUP on. When to look next."""
        is_awaited = not self._is_ready or self._wants_reload
        is_up = is_awaited and self._daemon.is_running and (self._spec.state_dir / ADMIN_PORT_NAME).exists()
        if is_up and self._wants_reload:
            self._wants_reload = False
            self._daemon.send_signal(signal.SIGHUP)
        if is_up and not self._is_ready:
            self._is_ready = True
            self._manager.send("READY=1")
            if self._learner is not None and not self._has_preloaded and not self._learner.starts:
                self._learner.restart_at_s = now_s
        every_s = self._manager.alive_every_s
        if every_s:
            self._manager.send("WATCHDOG=1")
        looks = [now_s + every_s] if every_s else []
        if is_awaited and not is_up:
            looks.append(
                now_s + (READY_POLL_S if now_s < self._began_s + self._spec.daemon_first_s else COUNTERS_POLL_S)
            )
        return looks

    def _may_go_on(self, since_s: float) -> bool:
        """Whether a learner may, whose daemon is done. One that has left the run does what its script wants."""
        place = self._place()
        limit_s, state = self._spec.finish_s, "has not left the run"
        if place is None or place == self._watch.old_place:
            state = "has not attached"
        elif place.is_over:
            return True
        elif (self._spec.state_dir / FINAL_NAME).exists():  # it is over for this learner, too, which was told so
            if place.activity and self._watch.awake_s(place.since_s) <= place.limit_s:
                return True
            limit_s = max(limit_s, self._watch.limit_s if self._spec.hang_s > 0 else LEAVE_S_MAX)
        if since_s < limit_s:
            return True
        self.say(f"the learner {state} {limit_s:.0f} s after the daemon's end: it is stopped")
        return False

    @property
    def _result(self) -> int:
        """The exit code of a region whose daemon is done."""
        return SCRIPT_CODE if self._has_failed else 0

    def _place(self) -> PlaceMark | None:
        return PlaceMark.decode(self._memory.contents(PLACE_AREA))

    def _loss(self, child: Child) -> str:
        """Note the steps that the learner's end costs, and say them; empty where there are none."""
        place = self._place()
        if child is not self._learner or place is None or place == self._watch.old_place or place.has_left:
            return ""
        self._watch.lost = place.losses
        if not any(place.losses.values()):
            return ""
        return "; lost: {unsaved_steps} steps since its checkpoint, {unmerged_steps} that no merge includes".format(
            **place.losses
        )

    def _look_at(self, learner: Child) -> None:
        counters = self._memory.contents(COUNTERS_AREA)
        action = self._watch.look(counters, now_s=time.monotonic(), place=self._place())
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
        learner = self._learner
        if learner is None or learner.is_running:
            self.say("signal SIGUSR1: there is no learner to be started")
            return
        self.say("signal SIGUSR1: the learner is started again")
        self._watch.revived()
        learner.schedule_restart(self._spec.healthy_s)

    def _child_exited(self, child: Child, code: int) -> int | None:
        lived_s = child.ended()
        place = self._place()
        is_left = place is None or place.has_left or place.is_interrupted
        has_fault = bool(code) or not is_left or (place is not None and bool(place.fault))
        exit_text = f"{child.name} exited, code={code} after {lived_s:.1f} s{self._loss(child)}"
        # A model that an extension goes on from is set aside before the learner attaches.
        is_after = place is not None and (place.has_left or (code and (self._spec.state_dir / FINAL_NAME).exists()))
        if child is self._learner and place != self._watch.old_place and is_after:
            self._has_failed = code != 0
        if self._over_s is not None:
            self.say(f"{exit_text}: the region ends with {self._result}")
            return self._result
        final = self._final_code(child, code, lived_s)
        if final == 0 and self._learner is not None and self._learner.is_running:
            self._over_s = time.monotonic()
            self.say(f"{exit_text}: the region ends with its learner ({self._learner.shown}), which may go on")
            return None
        if final is not None:
            final = final or self._result
            line = child.log.last_line() if child is self._learner else ""
            self.say(f"{exit_text}{f': {line}' * bool(line)}: the region ends with {final}")
            return final
        if child is self._daemon and code > 0 and (line := child.log.last_line()):
            exit_text += f": {line}"
        if child is self._learner:
            may_restart = self._learner_ended(child, code, lived_s)
            if not may_restart or not code:
                exit_text += f": {self._watch.reason or 'it is done'}"
            if not may_restart:
                self.say(exit_text)
                if self._forks is not None and self._watch.state == "done":
                    self._forks.close()
                return None
        counters = self._memory.contents(COUNTERS_AREA) or b""
        has_stepped = counters != self._counters and any(counters)  # zeros are a new area
        ran_well = child is self._learner and has_stepped and (not has_fault or -code in FROM_OUTSIDE)
        wait_s = child.schedule_restart(lived_s, ran_well=ran_well)
        self.say(f"{exit_text}: starting again in {wait_s:.1f} s")
        return None

    def _learner_ended(self, learner: Child, code: int, lived_s: float) -> bool:
        """Note the end of a life of the learner, for the status too. Returns whether the next one may begin."""
        may_restart = self._watch.ended(
            code,
            lived_s=lived_s,
            now_s=time.monotonic(),
            last_line=learner.log.last_line(),
            memory_kills=memory_kills(),
            place=self._place(),
        )
        write_process(self._spec.state_dir, self._watch.document())
        return may_restart

    def _final_code(self, child: Child, code: int, lived_s: float) -> int | None:
        if child is self._daemon:
            if code == 0 or code in FINAL_CODES or (code == BIND_CODE and child.starts == 1):
                return code
            if code == DISK_CODE and child.starts == 1 and lived_s < self._spec.healthy_s and not self._has_run:
                return STORAGE_CODE
            return None
        # A learner that never came up and says that its settings are wrong would say so for ever.
        return USAGE_CODE if code == USAGE_CODE and child.starts == 1 and lived_s < self._spec.healthy_s else None

    def _await_exit(self, child: Child, deadline_s: float) -> bool:
        while child.is_running:
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0:
                return False
            try:
                event = self.events.get(timeout=wait_s)
            except queue.Empty:
                return False
            if isinstance(event, ChildExited):
                lived_s = event.child.ended()
                self.say(f"{event.child.name} exited, code={event.code} after {lived_s:.1f} s{self._loss(event.child)}")
        return True

    def _stop_all(self) -> None:
        """Learner first, so that its last contribution and counters find a living daemon."""
        if self._forks is not None:
            self._forks.close()
        end_s = time.monotonic() + self._spec.stop_s
        reserve_s = (1.0 - LEARNER_SHARE) * self._spec.stop_s
        for child in (self._learner, self._daemon):
            if child is None or not child.is_running:
                continue
            now_s = time.monotonic()
            limit_s = max(reserve_s, end_s - now_s - (reserve_s if child is self._learner else 0.0))
            place = self._place()
            if child is self._learner and place is not None:
                child.stop_below(place.pid, limit_s)
            child.send_signal(signal.SIGTERM)
            if not self._await_exit(child, now_s + limit_s):
                self.say(f"{child.name} did not stop within {limit_s:.0f} s: killed")
                child.kill()
                self._await_exit(child, time.monotonic() + KILLED_S)


def run_supervisor(spec: SupervisorSpec) -> int:
    """Run a region's two processes until the run is over or a signal comes; the exit code. From the main thread. Raises
    StorageError: the state folder can't be made, or is in use. BindError: the memory socket can't be bound."""
    try:
        spec.state_dir.mkdir(parents=True, exist_ok=True)
        lock = (spec.state_dir / "supervisor.lock").open("a+b")
    except OSError as error:
        raise StorageError(
            f"state folder {spec.state_dir}: {error.strerror}; choose another with --state-dir"
        ) from error
    with lock:
        try:
            lock_file(lock.fileno(), Path(lock.name))
        except BlockingIOError as error:
            raise StorageError(
                f"region {spec.region} already runs on {spec.state_dir}: stop it first, or choose another state folder"
            ) from error
        memory_path = socket_path(spec.state_dir, MEMORY_SOCKET_NAME)
        env = {
            **{name: value for name, value in os.environ.items() if name not in NOTIFY_VARIABLES},
            **spec.env,
            "DILOCO_SOCKET": str(socket_path(spec.state_dir, DAEMON_SOCKET_NAME)),
            "DILOCO_SUPERVISOR": str(memory_path),
            "DILOCO_SUPERVISOR_PID": str(os.getpid()),
            "DILOCO_STATE": str(spec.state_dir.resolve()),
            "DILOCO_STOP_S": str(LEARNER_SHARE * spec.stop_s),
            "DILOCO_DAEMON_STOP_S": str((1.0 - LEARNER_SHARE) * spec.stop_s),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",  # a learner that hangs shows where, and a crash of native code too
        }
        with MemoryStore(memory_path) as memory:
            supervisor = _Supervisor(spec, env, memory)
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
            before = [(item, signal.signal(item, lambda number, _: supervisor.events.put(number))) for item in numbers]
            try:
                return supervisor.run()
            finally:
                for number, handler in before:
                    signal.signal(number, handler)
