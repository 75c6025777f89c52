"""The process behind an emulation: serves its control socket, runs its timetable, and moves the packets.
`emulation.up` starts it as `python -m diloco_node.lab.wan.keeper STATE_FILE`.

It ends at SIGTERM, and when its owner ends (a demo that was killed); then it removes the namespaces. After SIGKILL the
namespaces stay; `diloco-node wan down` finds them by their names.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.wan.conditions import Conditions, Timetable
from diloco_node.lab.wan.control import ControlServer, scope_of
from diloco_node.lab.wan.emulation_state import EmulationState, remove_all
from diloco_node.lab.wan.namespaces import end_processes
from diloco_node.lab.wan.router import TunPlane
from diloco_node.lab.wan.topology import parse_change
from diloco_node.numeric import NS_PER_S

IDLE_S: Final = 3600.0


class Keeper:
    """Loop of an emulation.

    Args:
        state: what was written for it. plane: moves the packets. conditions: the same that the plane reads.

    Attributes:
        is_orphaned: whether it ended because its owner did.
    """

    def __init__(self, state: EmulationState, plane: TunPlane, conditions: Conditions) -> None:
        self._state = state
        self._plane = plane
        self._conditions = conditions
        self._timetable: Timetable | None = None
        self._log: list[str] = []
        self._is_stopping = False
        self.is_orphaned = False
        self._control = ControlServer(state.socket, self._handle)
        self._owner_fd = os.pidfd_open(state.owner_pid) if state.owner_pid else -1
        self._started_ns = time.monotonic_ns()
        if state.starts_timetable:
            self._start_timetable()

    def run(self) -> None:
        """Until it is stopped."""
        self._wake_fd, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._is_stopping:
            self._turn()
        self._control.close()
        self._plane.close()

    def _turn(self) -> None:
        plane, controls = self._plane, self._control.sockets
        fds = [self._wake_fd] + ([self._owner_fd] if self._owner_fd >= 0 else [])
        sources: list[int | socket.socket] = [*plane.fds, *controls, *fds]
        ready, _, _ = select.select(sources, [], [], self._wait_s())
        for source in ready:
            if isinstance(source, socket.socket):
                self._control.serve(source)
            elif source in fds:
                self._is_stopping = True
                self.is_orphaned = source == self._owner_fd
            else:
                plane.read(source)
                plane.forward()
        plane.forward()
        if self._timetable is not None:
            lines = self._timetable.advance(self._conditions, now_ns=time.monotonic_ns())
            if lines:
                plane.apply()
                self._note(lines)

    def _wait_s(self) -> float:
        due = [self._plane.wake_at_ns, self._timetable.wake_at_ns if self._timetable is not None else None]
        times = [time_s for time_s in due if time_s is not None]
        return min(IDLE_S, max(0, min(times) - time.monotonic_ns()) / NS_PER_S) if times else IDLE_S

    def _stop(self, number: int, frame: object) -> None:
        self._is_stopping = True

    def _handle(self, command: dict[str, Any]) -> Mapping[str, Any]:
        match command.get("do"):
            case "status":
                return self._status()
            case "cut":
                scope = scope_of(command)
                self._conditions.cut(scope)
                return self._apply_changes(f"{scope}: cut")
            case "heal":
                scope = scope_of(command)
                count = self._conditions.heal(scope)
                return {**self._apply_changes(f"{scope}: healed"), "healed": count}
            case "set":
                scope = scope_of(command)
                change = parse_change(command, "set")
                if change is None:
                    raise ConfigError("nothing to set: give a delay, jitter, loss or rate")
                self._conditions.change(scope, change)
                return self._apply_changes(f"{scope}: set")
            case "timetable":
                self._start_timetable()
                return {}
            case other:
                raise ConfigError(f"the emulation knows no command {other!r}")

    def _apply_changes(self, line: str) -> Mapping[str, Any]:
        self._plane.apply()
        self._note([line])
        return {"conditions": self._conditions.lines()}

    def _start_timetable(self) -> None:
        self._timetable = Timetable(self._conditions.topology.outages, started_ns=time.monotonic_ns())

    def _note(self, lines: list[str]) -> None:
        seconds = (time.monotonic_ns() - self._started_ns) / NS_PER_S
        self._log += [f"{seconds:.3f}s {line}" for line in lines]
        del self._log[:-100]

    def _status(self) -> Mapping[str, Any]:
        times = os.times()
        return {
            "pid": os.getpid(),
            "cpu_seconds": times.user + times.system,
            "seconds": (time.monotonic_ns() - self._started_ns) / NS_PER_S,
            "conditions": self._conditions.lines(),
            "log": list(self._log),
            **self._plane.status(),
        }


def main(state_file: Path) -> int:
    """Run the keeper of one emulation; the exit code."""
    state = EmulationState.load(state_file)
    conditions = Conditions(state.topology())
    _prefer()
    try:
        keeper = Keeper(state, TunPlane(state.places(), conditions, seed=state.seed), conditions)
    except (DilocoError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    keeper.run()
    if keeper.is_orphaned:
        # What a killed demo left would train on for ever, without a network.
        end_processes(state.run)
    remove_all(state.run)
    return 0


def _prefer() -> None:
    """Run before ordinary processes: a packet that waits for the processor arrives late, and the file is not kept.

    The kernel leaves the others their share of the processor all the same (sched_rt_runtime_us, or its fair server).
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    # Nothing here makes cycles, and a collection would delay packets.
    gc.disable()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
