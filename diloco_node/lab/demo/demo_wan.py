"""The WAN of a demo: brought up, and its part of the report."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.control import request
from diloco_node.lab.wan.emulation_state import EmulationState
from diloco_node.lab.wan.namespaces import Place
from diloco_node.lab.wan.topology import Topology, load_topology, parse_topology

OUTAGE_FROM: Final = 0.4
OUTAGE_UNTIL: Final = 0.6
"""The region is cut off between these parts of the training time."""


class DemoWan:
    """The emulated WAN of one demo; its topology is there at once, packets pass after `up`.

    Attributes:
        topology: with the outage of `--outage`, if there is to be one.

    Raises ConfigError: the topology is wrong, this machine can emulate none, or `--outage` has no place in it.
    """

    def __init__(self, options: DemoOptions) -> None:
        if options.wan is None:
            raise ConfigError("a WAN needs a topology file: --wan netem/us-4.toml")
        self._file, topology = options.wan, load_topology(options.wan)
        count = options.regions if options.regions is not None else len(topology.regions)
        self._text = options.wan.read_text()
        if options.has_outage:
            if topology.outages:
                raise ConfigError(f"{options.wan} has a timetable of outages already; leave --outage away")
            if count < 3:
                raise ConfigError("--outage needs three regions: of two, neither merges without the other")
            self._text += _outage_text(topology.first(count).names[-1], options.seconds)
        self.topology: Topology = parse_topology(self._text, name=topology.name).first(count)
        if fault := emulation.emulation_fault():
            raise ConfigError(f"--wan: no WAN can be emulated here: {fault}")
        self._state: EmulationState | None = None
        self._places: dict[str, Place] = {}
        self._carried: dict[str, Any] = {}
        self._seed = options.seed

    def place(self, region: str) -> Place:
        """Where a region is to be started."""
        return self._places[region]

    async def up(self, folder: Path, say: Callable[[str], None]) -> None:
        """Make it. folder: gets a copy of the topology, with the outage."""
        say(f"wan {self._file}: user-space router on tun devices")
        file = await asyncio.to_thread(self._copy, folder)
        self._state = await asyncio.to_thread(
            emulation.up,
            file,
            run=f"demo{os.getpid()}",
            regions=len(self.topology.names),
            owner_pid=os.getpid(),
            starts_timetable=False,
            seed=self._seed,
        )
        self._places = {place.region: place for place in self._state.places()}

    def _copy(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / self._file.name
        file.write_text(self._text)
        return file

    async def down(self) -> None:
        """Remove it."""
        if self._state is not None:
            state, self._state = self._state, None
            with contextlib.suppress(DilocoError):
                self._carried = await asyncio.to_thread(request, state.socket, {"do": "status"})
            await asyncio.to_thread(emulation.down, state.run)

    async def start_timetable(self) -> None:
        """The training has begun: the file's outages count from now."""
        if self.topology.outages and self._state is not None:
            await asyncio.to_thread(request, self._state.socket, {"do": "timetable"})

    def report(self) -> dict[str, Any]:
        """The report's field `wan`."""
        return {
            "file": str(self._file),
            "carried": {key: value for key, value in self._carried.items() if key not in ("pid", "log", "conditions")},
            "timetable": [
                {
                    "at_seconds": outage.at_ns / 1e9,
                    "seconds": outage.for_ns / 1e9,
                    "what": f"{'cut' if outage.change is None else 'degraded'} {outage.scope}",
                }
                for outage in self.topology.outages
            ],
        }


def _outage_text(region: str, seconds: float) -> str:
    """A line of the timetable that cuts a region off in the middle of so long a training."""
    at_ms, for_ms = (round(1000 * share * seconds) for share in (OUTAGE_FROM, OUTAGE_UNTIL - OUTAGE_FROM))
    return f'\n[[outages]]\nat = "{at_ms}ms"\nfor = "{for_ms}ms"\ncut = "{region}"\n'


def wan_lines(report: dict[str, Any]) -> list[str]:
    """The fields `wan` and `outage` for people."""
    wan, outage = report["wan"], report["outage"]
    lines = [f"wan                {wan['file']}"]
    if outage is not None:
        after = outage["seconds_to_merge"]
        lines.append(
            f"outage             {outage['region']} cut off for {outage['seconds']:.1f} s: "
            f"{outage['inner_steps']} steps of its own, {outage['commits_of_others']} rounds of the others, "
            + ("in no merge again in time" if after is None else f"in a merge again {after:.1f} s after the heal")
        )
    return lines
