"""Gray failures on four real regions: a region whose control lives while a part of it fails, and what the others do.

    python benchmarks/gray.py [--arms bulk_out,mtu] [--leader] [--json]

Each arm is a run of its own: four daemons and learners on this machine. They train for a while, then one region gets
the fault, for a minute, and then it is over. The figures are rounds that the *other* regions commit per second: before,
in the first half of that minute, and in the second. `kept` compares the second half with before, per inner step of the
others: so a machine that others use as well does not count. `back` is the time from the end of the fault until merges
of every fragment have the region again.

| arm | what fails at one region |
|---|---|
| bulk_out | its bulk connections carry nothing away from it; control lives |
| bulk_in | they carry nothing towards it |
| bulk_both | both |
| bulk_slow | 100 bytes a second in both directions |
| mtu | IP packets over 1,280 bytes are lost, in both directions (root: network namespaces and iptables) |
| drop_merged | it sends no merged stripe |
| corrupt_merged | a bit in each of its merged stripes is wrong |
| nan_merged | its merged stripes are NaN, with the right digest |
| mute | it sends no stripe of its contributions |
| fsync | each fsync of its daemon fails |
| learner | its learner is stopped and answers nothing |

Two cores are not many for eight processes: the rates of one arm belong together, those of two arms may not.
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
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gray_region import BULK_VARIABLE, FAULTS, FAULTS_VARIABLE
from gray_relay import Relays

from diloco_node.lab.chaos.story import longest_gap
from diloco_node.lab.demo.demo_run import NAMES
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports, order_finish
from diloco_node.lab.wan import namespaces
from diloco_node.lab.wan.namespaces import run_ip
from diloco_node.transport.authority import init_run

RELAYED = ("bulk_out", "bulk_in", "bulk_both", "bulk_slow")
ARMS = (*RELAYED, "mtu", *FAULTS, "learner")
REGIONS = 4
MTU_BYTES = 1280
WAIT_S = 300.0
POLL_S = 0.25
PORT = 7400
RUN = "gray"
PROGRAM = str(Path(__file__).resolve().with_name("gray_region.py"))

RUN_TOML = """\
[run]
id = "gray"
state_dir = "."
certs_dir = "certs"

[model]
layers = 2
dim = 64
heads = 4
context = 64
batch = 8
step_time_min = "{step_ms}ms"

[rounds]
fragments = 4
sync_every = {sync_every}
overlap_steps = 2
"""


@dataclass(frozen=True)
class Sample:
    """The most rounds that any of the other regions had committed at a time, and the mean of their learners' steps."""

    at_s: float
    rounds: int
    steps: float = 0.0


def rate(samples: Sequence[Sample], from_s: float, to_s: float) -> float:
    """Rounds per second between two times; 0 where fewer than two samples lie between them."""
    inside = [one for one in samples if from_s <= one.at_s <= to_s]
    if len(inside) < 2:
        return 0.0
    return (inside[-1].rounds - inside[0].rounds) / (inside[-1].at_s - inside[0].at_s)


def rounds_per_step(samples: Sequence[Sample], from_s: float, to_s: float) -> float:
    """Rounds for each inner step of the other regions: what a busy machine slows down, it slows down on both sides."""
    inside = [one for one in samples if from_s <= one.at_s <= to_s]
    steps = inside[-1].steps - inside[0].steps if inside else 0.0
    return (inside[-1].rounds - inside[0].rounds) / steps if steps > 0 else 0.0


def longest_gap_s(samples: Sequence[Sample], from_s: float, to_s: float) -> float:
    """The longest time in which no round was committed."""
    inside = [one for one in samples if from_s <= one.at_s <= to_s]
    return longest_gap([one.at_s for before, one in pairwise(inside) if one.rounds > before.rounds], from_s, to_s)


@dataclass
class GrayRun:
    """Four regions, one of them the victim, and what was seen of the others. `command`: of their learners."""

    folder: Path
    arm: str
    options: argparse.Namespace
    regions: dict[str, RegionProcess] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    victim: str = ""
    relays: Relays | None = None
    count: int = REGIONS
    command: tuple[str, ...] = ()

    async def prepare(self) -> None:
        """Certificates, run.toml, relays or namespaces."""
        names = sorted(NAMES[: self.count])
        init_run(self.folder / "certs", RUN, names)
        (self.folder / "faults").mkdir()
        text = RUN_TOML.format(step_ms=self.options.step_ms, sync_every=self.options.sync_every)
        ports = free_ports(2 * len(names))
        places = {place.region: place for place in namespaces.places(RUN, names)}
        addresses: dict[str, tuple[str, int]] = {}
        for index, name in enumerate(names):
            is_placed = self.arm == "mtu"
            host, port = (places[name].address, PORT) if is_placed else ("127.0.0.1", ports[2 * index])
            admin_port = PORT + 1 if is_placed else ports[2 * index + 1]
            addresses[name] = (host, port)
            text += f'\n[regions.{name}]\naddress = "{host}:{port}"\nadmin_port = {admin_port}\n'
            namespace = places[name].namespace if is_placed else ""
            self.regions[name] = RegionProcess(name, admin_port, self.folder / name, namespace, (PROGRAM,))
        (self.folder / "run.toml").write_text(text)
        if self.arm in RELAYED:
            self.relays = Relays(addresses)

    async def start(self) -> None:
        """All regions; returns when all of them train and rounds are committed."""
        dialed = await self.relays.start() if self.relays is not None else {}
        for name, region in self.regions.items():
            faults = str(self.folder / "faults")
            region.env = {FAULTS_VARIABLE: faults, BULK_VARIABLE: json.dumps(dialed.get(name, {}))}
            await region.start(self.folder / "run.toml", self.command)
        await self._until("all train", lambda: all(_trains(one.status) for one in self.regions.values()))
        await self._until("rounds", lambda: min(_rounds(one.status) for one in self.regions.values()) >= 8)
        leader = next(one.status["leader"] for one in self.regions.values() if one.status.get("leader"))
        followers = [name for name in self.regions if name != leader]
        self.victim = leader if self.options.leader else followers[0]

    async def _poll(self) -> None:
        await asyncio.gather(*(region.poll() for region in self.regions.values()))
        for region in self.regions.values():
            if region.has_exited:
                raise RuntimeError(f"{region.name} has ended:\n{region.last_lines(20)}")
        others = [region.status for name, region in self.regions.items() if name != self.victim]
        steps = sum((status.get("learner") or {}).get("step", 0) for status in others) / len(others)
        self.samples.append(Sample(time.monotonic(), max(_rounds(status) for status in others), steps))

    async def _until(self, what: str, is_so: Any, *, wait_s: float = WAIT_S) -> float:
        """Poll until it is so; the seconds that it took."""
        started_s = time.monotonic()
        while True:
            await self._poll()
            if is_so():
                return time.monotonic() - started_s
            if time.monotonic() - started_s > wait_s:
                states = {name: region.status.get("reason") for name, region in self.regions.items()}
                raise TimeoutError(f"{what}: not within {wait_s:.0f} s: {states}")
            await asyncio.sleep(POLL_S)

    async def watch(self, seconds: float, *, keeps_reasons: bool = False) -> tuple[float, float]:
        """Poll for a while; from when to when."""
        started_s = time.monotonic()
        while time.monotonic() - started_s < seconds:
            await self._poll()
            if keeps_reasons:
                for region in self.regions.values():
                    if region.name != self.victim and region.status.get("role") == "leader":
                        self.reasons[re.sub(r"\d+(\.\d+)?", "N", region.status.get("reason") or "-")] += 1
            await asyncio.sleep(POLL_S)
        return started_s, time.monotonic()

    def set_fault(self, *, on: bool) -> None:
        """Begin it, or end it."""
        victim, others = self.victim, sorted(self.regions.keys() - {self.victim})
        out, into = {(victim, other) for other in others}, {(other, victim) for other in others}
        if self.relays is not None:
            cut = {"bulk_out": out, "bulk_in": into, "bulk_both": out | into}.get(self.arm, set())
            slow = out | into if self.arm == "bulk_slow" else set()
            self.relays.change(cut=cut if on else set(), slow=slow if on else set())
        elif self.arm == "mtu":
            for chain in ("INPUT", "OUTPUT"):
                rule = ("-p", "tcp", "-m", "length", "--length", f"{MTU_BYTES + 1}:65535", "-j", "DROP")
                name = self.regions[victim].namespace
                run_ip("netns", "exec", name, "iptables", "-A" if on else "-D", chain, *rule)
        elif self.arm == "learner":
            os.kill(self.regions[victim].status["pids"]["learner"], signal.SIGSTOP if on else signal.SIGCONT)
        elif on:
            (self.folder / "faults" / victim).write_text(self.arm)
        else:
            (self.folder / "faults" / victim).unlink()

    async def run(self) -> dict[str, Any]:
        """The whole arm; its figures."""
        seconds = self.options.seconds
        before = await self.watch(self.options.before)
        leader_before = self.regions[self.victim].status.get("leader")
        self.set_fault(on=True)
        try:
            began_s = (await self.watch(seconds))[0]
            during = await self.watch(seconds, keeps_reasons=True)
        finally:
            self.set_fault(on=False)
        await self._poll()
        back = Back(self.regions[self.victim])
        figures = {
            "victim": self.victim,
            "was_leader": leader_before == self.victim,
            "before_per_s": rate(self.samples, *before),
            "first_per_s": rate(self.samples, began_s, during[0]),
            "during_per_s": rate(self.samples, *during),
            "longest_gap_s": longest_gap_s(self.samples, began_s, during[1]),
            "waits": [text for text, _ in self.reasons.most_common(3)],
        }
        healthy = rounds_per_step(self.samples, *before)
        figures["kept"] = rounds_per_step(self.samples, *during) / healthy if healthy else None
        try:
            figures["back_s"] = await self._until("in merges again", back.is_so, wait_s=self.options.back)
        except TimeoutError as error:
            figures |= {"back_s": None, "why_not_back": str(error)}
        return figures | await self._end()

    async def _end(self) -> dict[str, Any]:
        """End the run in order; whether all regions hold the same bytes then."""
        deadline_s = time.monotonic() + WAIT_S
        first = next(region for name, region in self.regions.items() if name != self.victim)
        with contextlib.suppress(TimeoutError):
            await order_finish([first], limit_s=WAIT_S, is_given_up=lambda: first.has_exited)
        codes = []
        for region in self.regions.values():
            assert region.process is not None
            with contextlib.suppress(TimeoutError):
                codes.append(await asyncio.wait_for(region.process.wait(), max(1.0, deadline_s - time.monotonic())))
        found = [self.folder / name / "report.json" for name in self.regions]
        digests = {json.loads(path.read_text()).get("digest") if path.exists() else None for path in found}
        return {"equal_digests": len(digests) == 1 and None not in digests, "exit_codes": codes}

    async def stop(self) -> None:
        """End what still runs."""
        await asyncio.gather(*(region.stop() for region in self.regions.values()))
        if self.relays is not None:
            await self.relays.stop()


def _trains(status: dict[str, Any]) -> bool:
    return status.get("state") == "training" and (status.get("learner") or {}).get("step", 0) > 0


def _rounds(status: dict[str, Any]) -> int:
    return int(status.get("rounds_committed", 0))


class Back:
    """Whether a merge of each fragment has steps that the region's learner made after the fault was over.

    A region that was away for long gives its steps up and takes the others' state: they count as included then. So of a
    fragment that leaps over versions only later steps are looked at.
    """

    def __init__(self, region: RegionProcess) -> None:
        self._region = region
        self._incarnation = -1
        self._marks: list[int] = []
        self._versions: list[int] = []
        self.is_so()

    def is_so(self) -> bool:
        """Look at the newest status."""
        learner = self._region.status.get("learner")
        if learner is None:
            return False
        versions = [one["base_version"] for one in learner["positions"]]
        if learner["incarnation"] != self._incarnation:
            self._incarnation, self._versions = learner["incarnation"], versions
            self._marks = [learner["step"]] * len(versions)
        leaps = [now > before + 1 for now, before in zip(versions, self._versions, strict=True)]
        self._marks = [
            learner["step"] if leaps_now else mark for leaps_now, mark in zip(leaps, self._marks, strict=True)
        ]
        self._versions = versions
        included = [one["included_step"] for one in learner["positions"]]
        return all(step > mark for step, mark in zip(included, self._marks, strict=True))


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[None]:
    """A namespace for each region, joined by a bridge in one more."""
    places = namespaces.places(RUN, names)
    core = f"{namespaces.PREFIX}-{RUN}-{namespaces.CORE}"
    made: list[str] = []
    try:
        namespaces.create(core)
        made.append(core)
        run_ip("-n", core, "link", "add", "bridge", "type", "bridge")
        run_ip("-n", core, "link", "set", "bridge", "up")
        for index, place in enumerate(places):
            namespaces.create(place.namespace)
            made.append(place.namespace)
            far = f"port{index}"
            run_ip("-n", core, "link", "add", far, "type", "veth", "peer", "name", "wan", "netns", place.namespace)
            run_ip("-n", core, "link", "set", far, "master", "bridge", "up")
            run_ip("-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", "wan")
            run_ip("-n", place.namespace, "link", "set", "wan", "up")
        yield
    finally:
        for name in made:
            namespaces.remove(name)


@contextlib.asynccontextmanager
async def prepared(folder: Path, arm: str, options: argparse.Namespace, **more: Any) -> AsyncIterator[GrayRun]:
    """A run that trains; it is stopped in the end."""
    run = GrayRun(folder, arm, options, **more)
    with network(sorted(NAMES[: run.count])) if arm == "mtu" else contextlib.nullcontext():
        try:
            await run.prepare()
            await run.start()
            yield run
        finally:
            await run.stop()


async def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One arm from start to end."""
    folder = Path(tempfile.mkdtemp(prefix=f"gray-{arm}-", dir=options.folder))
    try:
        async with prepared(folder, arm, options) as run:
            return await run.run()
    except (RuntimeError, TimeoutError, AssertionError) as error:
        return {"error": str(error)}
    finally:
        if not options.keep:
            shutil.rmtree(folder)


def lines(arms: dict[str, dict[str, Any]]) -> list[str]:
    """The table for people."""
    shown = [f"{'arm':<15} {'before/s':>9} {'first/s':>9} {'then/s':>9} {'kept':>6} {'gap s':>6} {'back s':>7}  equal"]
    for arm, one in arms.items():
        if "error" in one:
            shown.append(f"{arm:<15} {one['error'][:100]}")
            continue
        back = f"{one['back_s']:.1f}" if one["back_s"] is not None else "never"
        kept = f"{one['kept']:.0%}" if one["kept"] is not None else "-"
        shown.append(
            f"{arm:<15} {one['before_per_s']:>9.2f} {one['first_per_s']:>9.2f} {one['during_per_s']:>9.2f} {kept:>6} "
            f"{one['longest_gap_s']:>6.1f} {back:>7}  {'yes' if one['equal_digests'] else 'NO'}"
        )
    return shown


def main() -> int:
    """Run the arms, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="which, with commas")
    parser.add_argument("--leader", action="store_true", help="the fault is the leader's")
    parser.add_argument("--before", type=float, default=30.0, help="seconds before the fault")
    parser.add_argument("--seconds", type=float, default=30.0, help="each half of the fault; the second one counts")
    parser.add_argument("--back", type=float, default=180.0, help="seconds that the region has to come back")
    parser.add_argument("--step-ms", type=int, default=100)
    parser.add_argument("--sync-every", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=None, help="where the runs lie while they last")
    parser.add_argument("--keep", action="store_true", help="leave the runs there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = options.arms.split(",")
    if unknown := sorted(set(chosen) - set(ARMS)):
        parser.error(f"there is no arm {unknown[0]!r}: {', '.join(ARMS)}")
    done: dict[str, dict[str, Any]] = {}
    for arm in chosen:
        if arm == "mtu" and os.geteuid() != 0:
            done[arm] = {"error": "needs root: network namespaces"}
            continue
        done[arm] = asyncio.run(measure(arm, options))
        sys.stderr.write(lines({arm: done[arm]})[-1] + "\n")
    document = {"regions": REGIONS, "cpus": os.cpu_count(), "seconds": options.seconds, "arms": done}
    print(json.dumps(document) if options.json else "\n".join(lines(done)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
