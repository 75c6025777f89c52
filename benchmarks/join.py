"""A region joins three others over the shaped links of `netem/us-4.toml`: bytes, seconds, and what it costs the others.

    python benchmarks/join.py [--parameters 3000000] [--arms plain,joiner_dies,donor_dies] [--seconds 20] [--json]

Root: network namespaces. The links' rates are scaled as the model is smaller than 124 M parameters, so a transfer takes
the seconds that it would take there. First us-west joins by one address. In the other arms it has lost its folder, and
starts with an empty one.

| arm | what happens when 40 % of the state have come |
|---|---|
| plain | nothing |
| joiner_dies | SIGKILL to all processes of the joiner, which is started again |
| donor_dies | SIGKILL to the daemon that sends just then; its supervisor starts it again |

`bytes` is all that the joiner received until it held every fragment, by the kernel's counters, over parameters and
momentum. So the heartbeats and rounds of that time are in it. `steps` and `commits` are the rates of the others
meanwhile, over those of the time before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_node.cli.members import change_members
from diloco_node.daemon.manifest_file import load_manifest
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.lab.wan import emulation
from diloco_node.transport.authority import add_regions, init_run
from diloco_node.transport.certificates import CA_KEY

TOPOLOGY = Path(__file__).resolve().parent.parent / "netem" / "us-4.toml"
FOUNDERS = ("us-central", "us-east", "us-south")
JOINER = "us-west"
PORT, ADMIN_PORT = 7400, 7401
LARGE = 124_000_000
LAYERS = 4
STATE_BYTES = 8
"""Of a parameter: itself and its momentum."""
KILL_AT = 0.4
POLL_S = 0.05
WAIT_S = 180.0
ARMS = ("plain", "joiner_dies", "donor_dies")

RUN_TOML = """\
[run]
id = "join"
state_dir = "."
certs_dir = "certs"

[model]
layers = {layers}
dim = {dim}
heads = 4
context = 64
batch = 1
schedule_steps = 100000
step_time_min = "500ms"

[rounds]
fragments = 12
sync_every = 12
overlap_steps = 2
"""


@dataclass(slots=True)
class JoinRun:
    """Founders and joiner, in their namespaces.

    Attributes:
        received: bytes in of the joiner's lives before. last: of its present one.
    """

    folder: Path
    founders: list[RegionProcess]
    joiner: RegionProcess
    received: int = 0
    last: int = 0
    state_bytes: int = 0
    rates: dict[str, float] = field(default_factory=dict)

    async def poll(self) -> None:
        """Ask everybody."""
        running = [*self.founders, *([self.joiner] if self.joiner.process is not None else [])]
        await asyncio.gather(*(region.poll() for region in running))
        for region in running:
            if region.has_exited:
                raise RuntimeError(f"{region.name} has ended:\n{region.last_lines(20)}")
        self.last = max(self.last, int(self.joiner.status.get("wire_bytes_in", 0)))

    async def until(self, what: str, is_so: Callable[[], bool]) -> float:
        """Poll until it is so; the seconds that it took."""
        begin_s = time.monotonic()
        while True:
            await self.poll()
            if is_so():
                return time.monotonic() - begin_s
            if time.monotonic() - begin_s > WAIT_S:
                raise TimeoutError(f"{what}: not within {WAIT_S:.0f} s: {self.joiner.status.get('reason')}")
            await asyncio.sleep(POLL_S)

    def marks(self) -> tuple[float, float, float]:
        """Now, steps of the founders' learners on average, and rounds."""
        steps = sum(_step(region.status) for region in self.founders) / len(self.founders)
        return time.monotonic(), steps, max(int(region.status.get("rounds_committed", 0)) for region in self.founders)

    def holds_all(self) -> bool:
        """Whether the joiner has parameters and momentum of every fragment."""
        versions = self.joiner.status.get("versions") or [-1]
        return min(versions) >= 0 and self.joiner.answered_s > 0

    async def undisturbed(self, seconds: float) -> None:
        """Measure the rates to compare with."""
        await self.poll()
        begin = self.marks()
        await asyncio.sleep(seconds)
        await self.poll()
        self.rates = _rates(begin, self.marks())

    async def begin(self, options: tuple[str, ...]) -> None:
        """Start the joiner's next life."""
        self.received, self.last = self.received + self.last, 0
        self.joiner.status, self.joiner.options = {}, options
        await self.joiner.start(self.folder / "run.toml")

    async def kill_joiner(self) -> None:
        """All its processes, at once."""
        pids = (self.joiner.status.get("pids") or {}).values()
        assert self.joiner.process is not None
        for pid in filter(None, (self.joiner.process.pid, *pids)):  # a learner that has not come is 0: this group
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.joiner.process.wait()
        self.joiner.process = None
        await asyncio.sleep(0.5)  # its children are gone, and their sockets

    async def join(self, arm: str, options: tuple[str, ...]) -> dict[str, Any]:
        """One arm; its figures."""
        self.received = self.last = 0
        begin, begin_s = self.marks(), time.monotonic()
        await self.begin(options)
        at_bytes = int(KILL_AT * self.state_bytes)
        if arm != "plain":
            await self.until("40 % of the state", lambda: self.holds_all() or self.received + self.last >= at_bytes)
        held, donors = int(self.received + self.last), self.donors()
        if arm == "joiner_dies":
            await self.kill_joiner()
            await self.begin(options)
        elif arm == "donor_dies" and donors:
            pid = next(region.status["pids"]["daemon"] for region in self.founders if region.name == donors[0])
            os.kill(pid, signal.SIGKILL)
        await self.until("the whole state", self.holds_all)
        seconds, received = time.monotonic() - begin_s, self.received + self.last
        await self.until("its first step", lambda: _step(self.joiner.status) > 0)
        first_step_s = time.monotonic() - begin_s
        await self.until("a merge with it", self.is_merged)
        rates = _rates(begin, self.marks())
        return {
            "killed_at": None if arm == "plain" else held / self.state_bytes,
            "donors": donors,
            "bytes": received / self.state_bytes,
            "state_s": seconds,
            "first_step_s": first_step_s,
            "merged_s": time.monotonic() - begin_s,
            "steps": rates["steps"] / self.rates["steps"],
            "commits": rates["commits"] / self.rates["commits"],
        }

    def donors(self) -> list[str]:
        """Regions that the joiner fetches from."""
        return sorted({row["peer"] for row in self.joiner.status.get("fetching", ())})

    def is_merged(self) -> bool:
        """Whether a round has the joiner's present learner."""
        learner = self.joiner.status.get("learner") or {}
        return any(position["included_step"] > 0 for position in learner.get("positions", ()))


def _step(status: Mapping[str, Any]) -> int:
    return int((status.get("learner") or {}).get("step", 0))


def _rates(begin: tuple[float, float, float], end: tuple[float, float, float]) -> dict[str, float]:
    seconds = end[0] - begin[0]
    return {"steps": (end[1] - begin[1]) / seconds, "commits": (end[2] - begin[2]) / seconds}


def scaled_topology(parameters: int) -> str:
    """`us-4.toml` with rates as much lower as the model is smaller than `LARGE`."""
    scale = min(1.0, parameters / LARGE)
    return re.sub(r'"(\d+)Gbit/s"', lambda match: f'"{int(match[1]) * 1000 * scale:.3f}Mbit/s"', TOPOLOGY.read_text())


async def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All arms, one after the other, in one run of three regions."""
    dim = max(64, 64 * round((arguments.parameters / (12 * LAYERS)) ** 0.5 / 64))
    file = folder / "us-4.toml"
    file.write_text(scaled_topology(arguments.parameters))
    state = await asyncio.to_thread(emulation.up, file, run=f"join{os.getpid()}", owner_pid=os.getpid())
    try:
        return await _run(folder, {place.region: place for place in state.places()}, dim, arguments)
    finally:
        await asyncio.to_thread(emulation.down, state.run)


async def _run(folder: Path, places: Mapping[str, Any], dim: int, arguments: argparse.Namespace) -> dict[str, Any]:
    certs, key = folder / "certs", folder / "certs" / CA_KEY
    init_run(certs, "join", FOUNDERS)
    add_regions(certs, [JOINER])
    text = RUN_TOML.format(layers=LAYERS, dim=dim)
    for name in FOUNDERS:
        text += f'\n[regions.{name}]\naddress = "{places[name].address}:{PORT}"\nadmin_port = {ADMIN_PORT}\n'
    (folder / "run.toml").write_text(text)
    founders = [RegionProcess(name, ADMIN_PORT, folder / name, places[name].namespace) for name in FOUNDERS]
    joiner = RegionProcess(
        JOINER, ADMIN_PORT, folder / JOINER, places[JOINER].namespace, config=folder / f"{JOINER}.toml"
    )
    all_ = JoinRun(folder, founders, joiner)
    try:
        for region in founders:
            await region.start(folder / "run.toml")
        await all_.until("every founder trains", lambda: all(_step(region.status) > 0 for region in founders))
        await all_.until("a round of each fragment", lambda: all_.marks()[2] >= 12)
        manifest = load_manifest(founders[0].state_dir)
        assert manifest is not None
        all_.state_bytes = STATE_BYTES * sum(fragment.size for fragment in manifest.fragments)
        await all_.undisturbed(arguments.seconds)
        address = f"{places[JOINER].address}:{PORT}"
        leader = next(region for region in founders if region.status.get("leader") == region.name)
        change_members(leader.state_dir, JOINER, "contributor", key, is_forced=False, address=address)
        words = ("--join", f"{places[leader.name].address}:{PORT}", "--advertise", address)
        words += ("--admin-port", str(ADMIN_PORT), "--state-dir", str(folder), "--certs", str(certs))
        arms = {}
        for arm in arguments.arms.split(","):
            if joiner.process is not None:
                await all_.kill_joiner()
                shutil.rmtree(joiner.state_dir)
                await all_.undisturbed(arguments.seconds)
            arms[arm] = await all_.join(arm, words)
        return {
            "parameters": all_.state_bytes // STATE_BYTES,
            "cpus": os.cpu_count(),
            "undisturbed": all_.rates,
            "arms": arms,
        }
    finally:
        await asyncio.gather(*(region.stop() for region in (*founders, joiner)))


def main() -> int:
    """Run the arms and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=3_000_000, help="of the model, about [3000000]")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"which to run [{','.join(ARMS)}]")
    parser.add_argument("--seconds", type=float, default=20.0, help="undisturbed, before each arm [20]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.arms.split(",")) - set(ARMS)):
        parser.error(f"--arms has no {unknown[0]!r}: {', '.join(ARMS)}")
    with tempfile.TemporaryDirectory(prefix="dl-join-") as name:
        result = asyncio.run(run(Path(name), arguments))
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return 0
    print(f"{result['parameters']:,} parameters, {result['cpus']} cores")
    print(
        f"{'arm':<12} {'bytes / state':>13} {'state':>8} {'step':>8} {'merged':>8} {'steps':>7} {'commits':>8}  donors"
    )
    for arm, row in result["arms"].items():
        times = " ".join(f"{row[key]:6.1f} s" for key in ("state_s", "first_step_s", "merged_s"))
        print(
            f"{arm:<12} {row['bytes']:>13.2f} {times} {row['steps']:>7.1%} {row['commits']:>8.1%}  "
            f"{', '.join(row['donors'])}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
