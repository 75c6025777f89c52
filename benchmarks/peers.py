"""One round on a link, beside the peers: torchft's DiLoCo, hivemind, PCCL, and plain torch.distributed over Gloo.

    python benchmarks/peers.py [--links 1g,home] [--arms ours,torchft] [--sizes 20,124] [--regions 2,4] [--json]

Root. Each region has a network namespace behind the user-space router of `diloco_node.lab.wan`; `loopback` has one
namespace for all and no router. Every arm trains the same parameters in paced steps that cost nothing, and merges all
of them in one round (`peers_learner`). In turns, each arm from its start:

- seconds: from the moment when the last region has made its steps until all have the merged parameters. Ours: from the
  leader's opening of the round until every learner can read them, with mutual TLS, ledger and payloads on disk.
- wire: bytes of all regions, with headers, for each round. CPU-s: of the arm's whole process trees, also between two
  rounds. The router's own are apart, and so are the packets that it handed over late: with many of them the figures
  are the machine's and not the link's.
- still: seconds for each round in which the slowest region's loop did not make steps.
- cut: in the middle of a round the last region is cut off. What share of its steps it made meanwhile, and how long
  after the heal every region had finished a round: by itself, or it is told why not.

Peers are installed into environments of their own below `--peers` at their first use, once: remove the folder to try
again. What can't be installed or ends is a row with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from peers_learner import SIDE, Spec

from diloco_node.errors import DilocoError
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.control import request
from diloco_node.lab.wan.emulation_state import EmulationState
from diloco_node.lab.wan.namespaces import Place, create, remove
from diloco_node.lab.wan.tun import DEVICE
from diloco_node.transport.authority import init_run

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"
"""Named with its version: newer builds bring gigabytes of CUDA."""

REQUIREMENTS = {
    "torchft": ("torchft==0.2.0", TORCH),
    "torchft_nightly": ("torchft-nightly", TORCH),
    "hivemind": ("hivemind", TORCH),
    "pccl": ("pypccl", TORCH),
}
PROGRAMS = {
    "allreduce": "peers_allreduce.py",
    "torchft": "peers_torchft.py",
    "torchft_nightly": "peers_torchft.py",
    "hivemind": "peers_hivemind.py",
}
CODECS = {"ours": ("int4", "int8"), "ours_fp32": ("fp32", "fp32")}
ARMS = (*CODECS, "allreduce", *REQUIREMENTS)

REGIONS = ("a", "b", "c", "d")
PORT = 29_500
STEP_S = 0.01
STEPS = 200
"""Between two rounds, of every arm."""

WARM_UP_ROUNDS = 2
POLL_S = 0.05
STATUS_EVERY_S = 1.0
START_S = 120.0
ROUND_S_MAX = 150.0
BACK_S = 60.0
CUT_AT = 0.25
"""Part of a round's bytes that have passed when the link is cut."""

RUN_TOML = """\
[run]
id = "peers"
state_dir = "."
certs_dir = "certs"

[rounds]
fragments = 1
sync_every = {steps}
rounds_in_flight_max = 1
codec_up = "{up}"
codec_down = "{down}"
"""

LINKS = {
    "loopback": "",
    "1g": 'rtt = "20ms"\n{lines}egress = "1Gbit/s"\n',
    "2g": 'rtt = "40ms"\n{lines}egress = "2Gbit/s"\n',
    "lossy": 'rtt = "100ms"\nloss = "1%"\n{lines}egress = "200Mbit/s"\n',
    "home": (HERE.parent / "netem" / "home.toml").read_text(),
}


class ArmEnded(Exception):
    """An arm that can't go on; the reason."""


def topology(link: str, regions: int) -> str:
    """The file of a link, the same for each region."""
    head, lines, tail = LINKS[link].partition("{lines}")
    if not lines:
        return head
    return f"[default_link]\n{head}" + "".join(f"\n[regions.{name}]\n{tail}" for name in REGIONS[:regions])


# ---- the network -----------------------------------------------------------------------------------------------------


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


# ---- the arms --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arm:
    """A running arm, and what its learners logged.

    Attributes:
        events: of each region, in order. openings, offers: ours, monotonic seconds by version (and region).
    """

    name: str
    network: Network
    folder: Path
    events: list[list[dict[str, Any]]] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    regions: list[RegionProcess] = field(default_factory=list)
    openings: dict[int, float] = field(default_factory=dict)
    offers: dict[int, dict[str, float]] = field(default_factory=dict)

    async def start(self, spec: Spec, python: str) -> None:
        """Start a process, or a daemon with its learner, for each region."""
        self.events = [[] for _ in self.network.places]
        self.read_bytes = [0] * len(self.events)
        path = self.folder / "spec.json"
        path.write_text(json.dumps(asdict(spec)))
        if self.name in CODECS:
            await self._start_regions(spec, path)
        else:
            self._start_peers(path, python)

    def _start_peers(self, path: Path, python: str) -> None:
        ranks = [-1] if "torchft" in self.name else []
        for rank in (*ranks, *range(len(self.network.places))):
            place = self.network.places[max(0, rank)]
            command = ["ip", "netns", "exec", place.namespace, python, str(HERE / PROGRAMS[self.name]), str(path)]
            interface = "lo" if self.network.state is None else DEVICE
            with (self.folder / f"{rank}.out").open("wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*command, str(rank)],
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                        env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
                    )
                )

    async def _start_regions(self, spec: Spec, path: Path) -> None:
        places = self.network.places
        init_run(self.folder / "certs", "peers", [place.region for place in places])
        up, down = CODECS[self.name]
        text = RUN_TOML.format(steps=spec.steps, up=up, down=down)
        for number, place in enumerate(places):
            port, admin_port = spec.port + 2 * number, spec.port + 2 * number + 1
            text += f'\n[regions.{place.region}]\naddress = "{place.address}:{port}"\nadmin_port = {admin_port}\n'
            folder = self.folder / place.region
            self.regions.append(RegionProcess(place.region, admin_port, folder, place.namespace))
        file = self.folder / "run.toml"
        file.write_text(text)
        for rank, region in enumerate(self.regions):
            await region.start(file, [sys.executable, str(HERE / "peers_ours.py"), str(path), str(rank)])

    def read(self) -> None:
        """Take what the learners logged since the last time. Raises ArmEnded: one began anew."""
        for rank, events in enumerate(self.events):
            path = self.folder / f"{rank}.jsonl"
            if path.exists():
                if path.stat().st_size < self.read_bytes[rank]:
                    raise ArmEnded("a learner ended, and was started again")
                with path.open("rb") as file:
                    file.seek(self.read_bytes[rank])
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self.read_bytes[rank] += len(whole)
                events.extend(map(json.loads, whole.splitlines()))

    async def poll(self) -> None:
        """Ours: what the daemons noted, for the times of rounds."""
        for region in self.regions:
            status = await region.poll()
            for note in status.get("notes", ()):
                if note["kind"] == "open":
                    self.openings.setdefault(note["version"], note["at_ns"] / 1e9)
            for _, version, at_ns in status.get("offers", ()):
                self.offers.setdefault(version, {})[region.name] = at_ns / 1e9

    def check(self) -> None:
        """Raises ArmEnded: a process of it is gone."""
        for process in self.processes:
            if process.poll() is not None:
                raise ArmEnded(f"ended with exit code {process.returncode}: {self.last_line(process)}")
        for region in self.regions:
            if region.has_exited:
                raise ArmEnded(f"region {region.name} ended: {region.last_lines(1)}")

    def last_line(self, process: subprocess.Popen[bytes]) -> str:
        """What a process said last."""
        path = self.folder / f"{process.args[-1]}.out"  # type: ignore[index]
        lines = path.read_text(errors="replace").strip().splitlines()
        return lines[-1][-200:] if lines else "it said nothing"

    def rounds(self) -> dict[int, float]:
        """Seconds of each round that every region has finished, by its number."""
        if self.regions:
            whole = {version: at for version, at in self.offers.items() if len(at) == len(self.regions)}
            return {v: max(at.values()) - self.openings[v] for v, at in sorted(whole.items()) if v in self.openings}
        starts, ends = (
            [{event["number"]: event["at"] for event in events if event["kind"] == kind} for events in self.events]
            for kind in ("begin", "round")
        )
        numbers = sorted(set.intersection(*map(set, ends)))
        return {number: max(at[number] for at in ends) - max(at[number] for at in starts) for number in numbers}

    def finished(self, *, since_s: float = 0.0) -> int:
        """How many rounds the slowest region has finished since then."""
        return min(sum(at > since_s for at in round_times(events)) for events in self.events)

    def cpu_seconds(self) -> float:
        """Of all process trees."""
        pids = [process.pid for process in self.processes]
        pids += [region.process.pid for region in self.regions if region.process is not None]
        total = 0.0
        for pid in pids:
            top = psutil.Process(pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # it ended just now
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    async def stop(self) -> None:
        """End what was started."""
        await asyncio.gather(*(region.stop() for region in self.regions))
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that a peer started
            process.wait()


def environment(arm: str, folder: Path) -> str:
    """The Python of an arm, with the peer in it. Raises ArmEnded: it can't be installed."""
    if arm not in REQUIREMENTS:
        return sys.executable
    python = folder / arm / "bin" / "python"
    reason = folder / f"{arm}.failed"
    if reason.exists():
        raise ArmEnded(reason.read_text())
    if not (folder / f"{arm}.done").exists():
        venv.create(folder / arm, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS[arm]]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        if pip.returncode:
            errors = [line for line in pip.stderr.splitlines() if "error" in line.lower()]
            reason.write_text(f"can't be installed: {(errors or ['pip failed'])[-1][-200:]}")
            raise ArmEnded(reason.read_text())
        (folder / f"{arm}.done").touch()
    return str(python)


def pace(events: Sequence[Mapping[str, Any]]) -> float:
    """Steps a second of a region, while it did not stand still."""
    first, last = events[0], events[-1]
    return (last["steps"] - first["steps"]) / (last["at"] - first["at"] - last["still"] + first["still"])


def round_times(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """When a region had finished each of its rounds, monotonic."""
    return [event["at"] for event in events if event["kind"] == "round"]


# ---- measuring -------------------------------------------------------------------------------------------------------


async def until(arm: Arm, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
    """Read the logs until something is so. Raises ArmEnded: it ends before, or takes too long."""
    ends_s, poll_s = time.monotonic() + limit_s, 0.0
    while True:
        arm.check()
        arm.read()
        if is_so():
            return
        if time.monotonic() > ends_s:
            raise ArmEnded(f"{what} after {limit_s:.0f} s")
        if arm.regions and time.monotonic() > poll_s:
            await arm.poll()
            poll_s = time.monotonic() + STATUS_EVERY_S
        await asyncio.sleep(POLL_S)


async def measure(arm: Arm, spec: Spec, python: str, rounds: int, cut_s: float) -> dict[str, Any]:
    """Start an arm, warm up, count some rounds, cut the link. Raises ArmEnded."""
    try:
        await arm.start(spec, python)
        await until(arm, lambda: arm.finished() >= 1, START_S + ROUND_S_MAX, "no round")
        await until(arm, lambda: arm.finished() >= WARM_UP_ROUNDS, 2 * ROUND_S_MAX, "no second round")
        await arm.poll()
        before, before_s = _totals(arm), time.monotonic()
        warm_up = set(arm.rounds())
        target = arm.finished() + rounds
        await until(arm, lambda: arm.finished() >= target, rounds * ROUND_S_MAX, "too few rounds")
        await arm.poll()
        after, after_s = _totals(arm), time.monotonic()
        figures = window(arm, warm_up, before, after, seconds=after_s - before_s, rounds=rounds)
        if cut_s and arm.network.state is not None:
            figures["cut"] = await cut(arm, figures["wire_bytes"], cut_s)
        return figures
    finally:
        await arm.stop()


def _totals(arm: Arm) -> dict[str, float]:
    return {
        **arm.network.counters(),
        "cpu": arm.cpu_seconds(),
        **{f"still {rank}": events[-1]["still"] for rank, events in enumerate(arm.events)},
    }


def window(
    arm: Arm, warm_up: set[int], before: Mapping[str, float], after: Mapping[str, float], *, seconds: float, rounds: int
) -> dict[str, Any]:
    """Figures of the rounds between two totals. Raises ArmEnded: there are none."""
    each = {key: (after[key] - before[key]) / rounds for key in before}
    durations = [duration for number, duration in arm.rounds().items() if number not in warm_up]
    if not durations:
        raise ArmEnded("rounds went on, and nobody noted when they began")
    return {
        "rounds": rounds,
        "seconds": statistics.median(durations),
        "seconds_min": min(durations),
        "seconds_max": max(durations),
        "cycle_seconds": seconds / rounds,
        "wire_bytes": round(each["bytes"]),
        "cpu_seconds": each["cpu"],
        "still_seconds": max(value for key, value in each.items() if key.startswith("still")),
        "router_cpu_seconds": each["router_cpu"],
        "packets_late": round(after["late"] - before["late"]),
        "load": os.getloadavg()[0],
    }


async def cut(arm: Arm, wire_bytes: float, seconds: float) -> dict[str, Any]:
    """Cut the last region off within a round, heal it, and wait for the next round of all.

    Returns: made: the cut region's steps meanwhile, as a share of its pace. others: rounds that the first one finished
    meanwhile. back_seconds: from the heal until all have finished a round. reason: why they did not.
    """
    bytes_before = arm.network.counters()["bytes"]
    outcome: dict[str, Any] = {"seconds": seconds, "made": None, "others": None, "back_seconds": None, "reason": None}
    try:
        await until(
            arm, lambda: arm.network.counters()["bytes"] > bytes_before + CUT_AT * wire_bytes, ROUND_S_MAX, "no bytes"
        )
        steps_per_s = pace(arm.events[-1])
        arm.network.order("cut")
        cut_s = time.monotonic()
        with contextlib.suppress(ArmEnded):  # whoever ends meanwhile does so after the heal, too
            await until(arm, lambda: time.monotonic() > cut_s + seconds, seconds + 1, "")
        healed_s = time.monotonic()
        steps = [event["steps"] for event in arm.events[-1] if cut_s <= event["at"] <= healed_s] or [0]
        outcome["made"] = (steps[-1] - steps[0]) / (steps_per_s * seconds)
        outcome["others"] = sum(cut_s < at <= healed_s for at in round_times(arm.events[0]))
        arm.network.order("heal")
        await until(arm, lambda: arm.finished(since_s=healed_s) >= 1, BACK_S, "no round")
    except ArmEnded as error:
        return {**outcome, "reason": str(error)}
    finally:
        arm.network.order("heal")
    firsts = [next(at for at in round_times(events) if at > healed_s) for events in arm.events]
    return {**outcome, "back_seconds": max(firsts) - healed_s}


def run_all(options: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Every arm on every link, in turns; a row for each, after its last turn."""
    for link, regions, size in itertools.product(options.links, options.regions, options.sizes):
        with tempfile.TemporaryDirectory(prefix="peers-") as name, network(link, regions, Path(name)) as net:
            turns: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
            for turn in range(options.turns):
                # Every second turn backwards: what drifts on this machine meets all alike.
                for arm in options.arms if turn % 2 == 0 else reversed(options.arms):
                    folder = Path(name) / f"{arm}-{turn}"
                    folder.mkdir()
                    is_last = turn == options.turns - 1
                    turns[arm].append(run_arm(Arm(arm, net, folder), size, options, options.cut if is_last else 0.0))
                    if is_last:
                        start = {"arm": arm, "link": link, "regions": regions, "parameters": size * SIDE * SIDE}
                        yield {**start, **median(turns[arm])}


def run_arm(arm: Arm, matrices: int, options: argparse.Namespace, cut_s: float) -> dict[str, Any]:
    """One turn of an arm; its figures, or the reason why there are none."""
    addresses = tuple(place.address for place in arm.network.places)
    spec = Spec(addresses, PORT, matrices, STEPS, STEP_S, str(arm.folder))
    try:
        python = environment(arm.name, options.peers)
        return asyncio.run(measure(arm, spec, python, options.rounds, cut_s))
    except (ArmEnded, DilocoError) as error:
        return {"reason": str(error)}


def median(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all turns in one; the cuts of all; the first reason, if a turn has one."""
    if any("reason" in turn for turn in turns):
        return next(turn for turn in turns if "reason" in turn)
    figures: dict[str, Any] = {
        key: statistics.median(turn[key] for turn in turns) for key in turns[0] if key not in ("cut", "rounds")
    }
    figures["seconds_min"] = min(turn["seconds_min"] for turn in turns)
    figures["seconds_max"] = max(turn["seconds_max"] for turn in turns)
    figures["rounds"] = sum(turn["rounds"] for turn in turns)
    return figures | {"turns": len(turns), "cuts": [turn["cut"] for turn in turns if "cut" in turn]}


HEAD = (
    f"{'link':<9}{'regions':>7}{'M':>5}  {'arm':<16}{'s a round':>10}{'(least, most)':>16}{'MB':>7}{'CPU-s':>7}"
    f"{'still s':>8}{'router':>8}{'late':>6}  cut"
)


def line(row: Mapping[str, Any]) -> str:
    """A row for people."""
    start = f"{row['link']:<9}{row['regions']:>7}{row['parameters'] / 1e6:>5.0f}  {row['arm']:<16}"
    if "reason" in row:
        return start + row["reason"]
    spread = f"({row['seconds_min']:.2f}, {row['seconds_max']:.2f})"
    return (
        f"{start}{row['seconds']:>10.2f}{spread:>16}{row['wire_bytes'] / 1e6:>7.0f}{row['cpu_seconds']:>7.2f}"
        f"{row['still_seconds']:>8.3f}{row['router_cpu_seconds']:>8.2f}{row['packets_late']:>6.0f}  "
        + "; ".join(map(cut_words, row["cuts"]))
    )


def cut_words(outcome: Mapping[str, Any]) -> str:
    """What a cut did."""
    if outcome["made"] is None:
        return outcome["reason"]
    after = f"back after {outcome['back_seconds']:.1f} s" if outcome["reason"] is None else outcome["reason"]
    return (
        f"{outcome['made']:.0%} of its steps in {outcome['seconds']:.0f} s, others {outcome['others']} rounds, {after}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if unknown := sorted(set(text.split(",")) - set(known)):
                raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}: {', '.join(known)}")
            return text.split(",")

        return parse

    parser.add_argument("--arms", type=names(ARMS), default=list(ARMS), help="which [all]")
    parser.add_argument("--links", type=names(list(LINKS)), default=list(LINKS)[1:], help="which [all but loopback]")
    parser.add_argument("--regions", type=names("24"), default=["2"], help="2,4 [2]")
    parser.add_argument("--sizes", default="20", help="million parameters, as 20,124 [20]")
    parser.add_argument("--rounds", type=int, default=5, help="that count, in a turn of an arm [5]")
    parser.add_argument("--turns", type=int, default=1, help="all arms, so often [1]")
    parser.add_argument("--cut", type=float, default=20.0, help="seconds of the cut, in the last turn; 0: none [20]")
    parser.add_argument("--peers", type=Path, default=HERE.parent / "build" / "peers", help="their environments")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit in order removes the namespaces too
    options.regions = [int(count) for count in options.regions]
    options.sizes = [max(1, round(float(size) * 1e6 / SIDE**2)) for size in options.sizes.split(",")]
    if os.geteuid() != 0:
        sys.stderr.write("benchmarks/peers.py makes network namespaces: run it as root\n")
        return 2
    options.peers.mkdir(parents=True, exist_ok=True)
    out = sys.stderr if options.json else sys.stdout
    print(HEAD, file=out)
    rows: list[dict[str, Any]] = []
    try:
        with contextlib.closing(run_all(options)) as results:
            for row in results:
                rows.append(row)
                print(line(row), file=out, flush=True)
    finally:
        if options.json:  # also what there is when it is ended early
            command = " ".join(arguments if arguments is not None else sys.argv[1:])
            print(json.dumps({"date": time.strftime("%F"), "command": command, "cpus": os.cpu_count(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
