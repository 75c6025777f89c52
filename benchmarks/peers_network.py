"""The links between the regions of benchmarks/peers.py: loopback, or an emulated WAN of network namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.control import request
from diloco_node.lab.wan.emulation_state import EmulationState
from diloco_node.lab.wan.namespaces import Place, create, remove

HERE = Path(__file__).resolve().parent


REGIONS = ("a", "b", "c", "d")


LINKS = {
    "loopback": "",
    "1g": 'rtt = "20ms"\n{lines}egress = "1Gbit/s"\n',
    "2g": 'rtt = "40ms"\n{lines}egress = "2Gbit/s"\n',
    "lossy": 'rtt = "100ms"\nloss = "1%"\n{lines}egress = "200Mbit/s"\n',
    "home": (HERE.parent / "netem" / "home.toml").read_text(),
}


def topology(link: str, regions: int) -> str:
    """The file of a link, the same for each region."""
    head, lines, tail = LINKS[link].partition("{lines}")
    if not lines:
        return head
    return f"[default_link]\n{head}" + "".join(f"\n[regions.{name}]\n{tail}" for name in REGIONS[:regions])


@dataclass(frozen=True, slots=True)
class Network:
    """Where the regions live. state: of the emulation; None: loopback."""

    places: Sequence[Place]
    state: EmulationState | None = None

    def counters(self) -> dict[str, float]:
        """Bytes that passed, with headers, and what the router needed for that; totals."""
        if self.state is None:
            text = run_inside(self.places[0], "cat", "/proc/net/dev")
            line = next(line for line in text.splitlines() if line.strip().startswith("lo:"))
            return {"bytes": float(line.split(":")[1].split()[8]), "router_cpu": 0.0, "late": 0.0}
        status = request(self.state.socket, {"do": "status"})
        passed = sum(pair["bytes_passed"] for pair in status["pairs"])
        return {"bytes": passed, "router_cpu": status["cpu_seconds"], "late": status["packets_late"]}

    def order(self, verb: str) -> None:
        """Cut the last region off, or heal it."""
        assert self.state is not None
        request(self.state.socket, {"do": verb, "region": self.places[-1].region})


def run_inside(place: Place, *command: str) -> str:
    """What a command prints in a region's namespace."""
    return subprocess.run(
        ["ip", "netns", "exec", place.namespace, *command], capture_output=True, text=True, check=True
    ).stdout


@contextlib.contextmanager
def network(link: str, regions: int, folder: Path) -> Iterator[Network]:
    """Make the link; it is removed afterwards, also when something failed."""
    run = f"peers{os.getpid()}"
    if not LINKS[link]:
        namespace = f"diloco-{run}-all"
        create(namespace)
        try:
            yield Network([Place(name, namespace, f"127.0.0.{n}") for n, name in enumerate(REGIONS[:regions], 1)])
        finally:
            remove(namespace)
        return
    file = folder / "link.toml"
    file.write_text(topology(link, regions))
    state = emulation.up(file, run=run, regions=regions, owner_pid=os.getpid())
    try:
        yield Network(state.places(), state)
    finally:
        emulation.down(run)
