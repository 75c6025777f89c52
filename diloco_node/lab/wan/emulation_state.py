"""State of an emulation on this machine: one file per run in /run/diloco-wan, and how everything is removed."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.atomic_file import replace_file
from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.wan.namespaces import Place, existing, namespaces_of, places, remove, run_of
from diloco_node.lab.wan.topology import Topology, parse_topology

STATE_FOLDER: Final = Path("/run/diloco-wan")
FORMAT: Final = 1
STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class EmulationState:
    """An emulation, as its file says.

    Attributes:
        run: its name. topology_name, topology_text: the file. regions: how many of its regions, from the first.
        seed: of jitter and loss.
        starts_timetable: whether the file's outages count from the start; else from the command `timetable`.
        owner_pid: the process it ends with; 0: it stays until `wan down`.
        keeper_pid, keeper_start_ticks: of the keeper, which together name a process once and for all; 0 before it runs.
    """

    run: str
    topology_name: str
    topology_text: str
    regions: int
    seed: int = 0
    starts_timetable: bool = True
    owner_pid: int = 0
    keeper_pid: int = 0
    keeper_start_ticks: int = 0
    format: int = FORMAT

    @property
    def file(self) -> Path:
        """Where this is kept."""
        return state_file(self.run)

    @property
    def socket(self) -> Path:
        """The control socket."""
        return STATE_FOLDER / f"{self.run}.sock"

    @property
    def log(self) -> Path:
        """Path of the keeper's log."""
        return STATE_FOLDER / f"{self.run}.log"

    def topology(self) -> Topology:
        """The topology that runs."""
        return parse_topology(self.topology_text, name=self.topology_name).first(self.regions)

    def places(self) -> tuple[Place, ...]:
        """Where its regions live."""
        return places(self.run, self.topology().names)

    @property
    def is_kept(self) -> bool:
        """Whether the keeper lives."""
        return self.keeper_pid > 0 and start_ticks(self.keeper_pid) == self.keeper_start_ticks

    def save(self, *, is_new: bool = False) -> None:
        """Write the file. Raises ConfigError: `is_new` and there is one already."""
        STATE_FOLDER.mkdir(mode=0o700, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        if is_new:
            try:
                with self.file.open("x") as file:
                    file.write(text)
            except FileExistsError:
                raise ConfigError(
                    f"an emulation named {self.run} is there already; end it with: diloco-node wan down {self.run}"
                ) from None
            return
        replace_file(self.file, text.encode(), is_durable=False)

    @classmethod
    def load(cls, file: Path) -> EmulationState:
        """Read a file. Raises DilocoError: it is missing, or not one of this version."""
        try:
            document = json.loads(file.read_text())
            if document.get("format") != FORMAT:
                raise ValueError(f"format {document.get('format')}, not {FORMAT}")
            return cls(**document)
        except (OSError, ValueError, TypeError) as error:
            raise DilocoError(f"{file} can't be read ({error})") from error


def state_file(run: str) -> Path:
    """Where a run's state is kept."""
    return STATE_FOLDER / f"{run}.json"


def runs() -> list[str]:
    """Every run of which anything is left: a state file, or a namespace."""
    files = {file.stem for file in STATE_FOLDER.glob("*.json")} if STATE_FOLDER.is_dir() else set()
    run_names = {run for namespace in existing() if (run := run_of(namespace)) is not None}
    return sorted(files | run_names)


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command in parentheses may hold anything, spaces and parentheses too. A zombie has ended.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] == "Z" else int(fields[19])


def stop_keeper(state: EmulationState) -> None:
    """End an emulation's keeper, if it is still the process that the state names.

    Raises DilocoError: it does not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not state.is_kept:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.keeper_pid, number)
        ends_s = time.monotonic() + STOP_S
        while state.is_kept and time.monotonic() < ends_s:
            time.sleep(0.01)
    if state.is_kept:
        raise DilocoError(f"the keeper of {state.run}, process {state.keeper_pid}, does not end")


def remove_all(run: str) -> list[str]:
    """Remove a run's namespaces and files, whatever is left of it; the namespaces that were there."""
    names = namespaces_of(run)
    for name in names:
        # Two may clean up at the same time: the keeper that was stopped, and whoever stopped it.
        with contextlib.suppress(DilocoError):
            remove(name)
    leftovers = [name for name in namespaces_of(run) if name in names]
    if leftovers:
        raise DilocoError(f"these namespaces can't be removed: {', '.join(leftovers)}")
    for ending in ("json", "sock", "log", "json.*.tmp"):
        for file in STATE_FOLDER.glob(f"{glob.escape(run)}.{ending}"):
            file.unlink(missing_ok=True)
    return names
