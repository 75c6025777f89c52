"""The processes of a demo: found by the files of its folder, and sent signals only while they are still the same ones.

A demo writes `demo.json`: who it is, and which process is the supervisor of each region. A supervisor marks its
children by their environment. A signal goes through a descriptor of the process, taken before it is looked at: a number
that the kernel gave to another process meanwhile is never hit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from diloco_node.atomic_file import replace_file
from diloco_node.errors import ConfigError, StorageError
from diloco_node.lab.chaos.fault_plan import REGION, FaultTarget
from diloco_node.supervisor.preload import FORK_SERVER
from diloco_node.unix_sockets import Process, process_of

DEMO_FILE: Final = "demo.json"
FAULTS_FOLDER: Final = "faults"
_FORMAT: Final = 1

_FLAGS: Final = 6
_FORKED_NO_EXEC: Final = 0x40
"""Where the kernel's flags stand in /proc/PID/stat behind the name, and the one of a fork that runs no new program."""


class ProcessHandle:
    """Handle of a process: a signal reaches this process or nobody, whatever happens to its number."""

    def __init__(self, process: Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor

    @classmethod
    def hold(cls, process: Process) -> ProcessHandle | None:
        """None if it has ended."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return None
        if not is_alive(process):
            os.close(descriptor)
            return None
        return cls(process, descriptor)

    def send(self, number: int) -> bool:
        """Whether it was still there."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


@contextlib.contextmanager
def hold_all(processes: list[Process]) -> Iterator[list[ProcessHandle]]:
    """Hold those processes that are still there, until the end of the block."""
    handles = [handle for process in processes if (handle := ProcessHandle.hold(process)) is not None]
    try:
        yield handles
    finally:
        for handle in handles:
            handle.close()


@dataclass(frozen=True, slots=True)
class DemoFile:
    """Contents of `demo.json`.

    Attributes:
        folder: of the demo, with a folder for each region. demo: the process of the demo.
        supervisors: of each region, None while there is none.
    """

    folder: Path
    demo: Process
    supervisors: Mapping[str, Process | None] = field(default_factory=dict)

    def save(self) -> None:
        """Write it, whole or not at all. Raises StorageError: the folder can't be written."""
        document = {
            "format": _FORMAT,
            "demo": dataclasses.asdict(self.demo),
            "regions": {
                name: None if process is None else dataclasses.asdict(process)
                for name, process in self.supervisors.items()
            },
        }
        path = self.folder / DEMO_FILE
        try:
            replace_file(path, (json.dumps(document, indent=1) + "\n").encode(), is_durable=False)
        except OSError as error:
            raise StorageError(f"{path} can't be written ({error.strerror}): make room, or give --folder") from error

    @classmethod
    def load(cls, folder: Path) -> DemoFile:
        """Read it. Raises ConfigError: it is missing or not of this version."""
        path = folder / DEMO_FILE
        try:
            document = json.loads(path.read_text())
            if document["format"] != _FORMAT:
                raise ValueError(f"format {document['format']!r}, not {_FORMAT}")
            supervisors = {
                str(name): None if document is None else _process(document)
                for name, document in document["regions"].items()
            }
            return cls(folder, _process(document["demo"]), supervisors)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} can't be read ({error}): name the folder of a running demo") from None

    @property
    def is_running(self) -> bool:
        """Whether its demo is."""
        return is_alive(self.demo)

    @property
    def faults(self) -> Path:
        """Where the daemons of this demo look for faults."""
        return self.folder / FAULTS_FOLDER

    def find(self, target: FaultTarget, *, learner_pid: int | None = None) -> list[Process]:
        """The processes of a target that are there now, the supervisor first.

        Args:
            learner_pid: the number of the process that the daemon names as its learner, if it does. Only that number
                among the region's own learner processes counts.

        Raises ConfigError: there is no such region.
        """
        if target.region not in self.supervisors:
            raise ConfigError(f"{self.folder} has no region {target.region!r}")
        supervisor = self.supervisors[target.region]
        if supervisor is None or not is_alive(supervisor):
            return []
        state = f"DILOCO_STATE={(self.folder / target.region).resolve()}"
        processes = {
            "supervisor": [supervisor],
            "daemon": find_marked(state, f"DILOCO_CHILD=daemon-{supervisor.pid}"),
            "learner": _learner(find_marked(state, f"DILOCO_CHILD=learner-{supervisor.pid}"), learner_pid),
        }
        return (
            [process for group in processes.values() for process in group]
            if target.part == REGION
            else processes[target.part]
        )


def is_alive(process: Process) -> bool:
    """Whether it is still there, and not only waiting to be reaped."""
    return _state(process) not in ("", "Z", "X")


def is_stopped(process: Process) -> bool:
    """Whether it is there and stands still: after SIGSTOP, or under a debugger."""
    return _state(process) in ("T", "t")


def _state(process: Process) -> str:
    """The kernel's letter; empty if it is gone."""
    return _stat(process.pid)[0] if process_of(process.pid) == process else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name; empty texts for a process that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return [""] * (_FLAGS + 1)


def find_left_behind(state_dir: Path) -> list[Process]:
    """Processes that a dead supervisor of this folder has left."""
    return find_marked(f"DILOCO_STATE={state_dir.resolve()}")


def find_marked(*settings: str) -> list[Process]:
    """Processes, the oldest first, whose environment holds all of these settings; never this one."""
    settings_wanted, processes = [setting.encode() for setting in settings], []
    for path in Path("/proc").iterdir():
        if not path.name.isdecimal() or int(path.name) == os.getpid():
            continue
        process = process_of(int(path.name))
        environment = _words(int(path.name), "environ")
        # Looked at before and after: else the environment may be that of an earlier process of this number.
        if (
            all(setting in environment for setting in settings_wanted)
            and process is not None
            and process_of(process.pid) == process
        ):
            processes.append(process)
    return sorted(processes, key=lambda process: (process.start_ticks, process.pid))


def _words(pid: int, file: str) -> list[bytes]:
    """Words of a process's `environ` or `cmdline`; empty for a process that is gone, or another user's."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    return []


def _learner(family: list[Process], learner_pid: int | None) -> list[Process]:
    """Return the process that trains: neither a learner's launcher nor the process that it was forked from.

    The one that is attached; if none is, the newest of those that have no child among them and are no fork server.
    """
    if same := [process for process in family if process.pid == learner_pid]:
        return same
    parents = {_stat(process.pid)[1] for process in family}
    return [process for process in family if str(process.pid) not in parents and not _is_fork_server(process.pid)][-1:]


def _is_fork_server(pid: int) -> bool:
    """Whether it was started as a fork server. Its forks have the same command line, but started no program."""
    return os.fsencode(FORK_SERVER) in _words(pid, "cmdline") and not int(_stat(pid)[_FLAGS] or "0") & _FORKED_NO_EXEC


def _process(document: Mapping[str, Any]) -> Process:
    pid, ticks, boot = document["pid"], document["start_ticks"], document["boot"]
    if not isinstance(pid, int) or pid <= 1 or not isinstance(ticks, int) or not isinstance(boot, str):
        raise ValueError("a process is its number, when it was started, and which boot that was in")
    return Process(pid, ticks, boot)
