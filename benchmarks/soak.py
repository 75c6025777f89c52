"""Does anything grow? An hour of four real regions under a gentle storm, with figures of every process.

    python benchmarks/soak.py                                  # an hour; --json for one object
    python benchmarks/soak.py --minutes 6 --every 20 --json

The demo's regions on loopback. Every 30 s, at random moments that follow from `--seed`, a daemon or a learner is killed
with SIGKILL, and its supervisor starts another. Every 5 s the kernel is asked about each process: resident memory (RSS;
PSS, which counts shared pages in parts; and the part of RSS that is in no file, which is where a leak would show),
descriptors, threads; and each daemon about its asyncio tasks. A line is laid through each figure, with its standard
error (`soak_slopes`): through every life of a process that lasted some minutes, and through all of them in a region.
The first minute of a life is left out: it loads, compiles and fills.

The ledger is summed up every 64 entries instead of 1,024: each is some kB in memory, and a log that fills for a quarter
of an hour would look like something that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from soak_slopes import Slope, slope

from diloco_node.lab.chaos.fault_plan import PlannedFault, storm
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_report import build_report
from diloco_node.lab.demo.demo_run import Demo
from diloco_node.lab.demo.region_processes import RegionProcess, order_finish
from diloco_node.numeric import NS_PER_S

SAMPLE_S: Final = 5.0
WARM_UP_S: Final = 60.0
LIFE_MIN_S: Final = 180.0
"""Shorter lives, warm-up left out, are judged only together."""

START_S: Final = 240.0
FINISH_S: Final = 240.0
SUMMARY_ENTRIES: Final = 64
VICTIMS: Final = ("daemon", "learner")


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one process at one moment; `life` names the process."""

    at_s: float
    region: str
    role: str
    life: str
    figures: dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """The slope of one figure; `life` is empty for all processes of this role in the region."""

    region: str
    role: str
    figure: str
    life: str
    slope: Slope


def read_process(pid: int) -> tuple[str, dict[str, float]] | None:
    """Name of the life (pid and start) and figures of a process; None if it is gone, or not ours to ask."""
    folder = Path("/proc") / str(pid)
    try:
        started = folder.joinpath("stat").read_text().rpartition(")")[2].split()[19]
        status = dict(line.split(":", 1) for line in folder.joinpath("status").read_text().splitlines())
        rollup = folder.joinpath("smaps_rollup").read_text().splitlines()
        descriptors = len(list((folder / "fd").iterdir()))
        pss_kib = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        rss_kib, anon_kib = (int(status[key].split()[0]) for key in ("VmRSS", "RssAnon"))
    except (OSError, KeyError, StopIteration, IndexError):
        return None
    figures = {
        "rss_bytes": 1024.0 * rss_kib,
        "pss_bytes": 1024.0 * pss_kib,
        "anon_bytes": 1024.0 * anon_kib,
        "descriptors": float(descriptors),
        "threads": float(status["Threads"]),
    }
    return f"{pid}.{started}", figures


def judge(samples: Sequence[Sample]) -> list[Row]:
    """The slope of each figure, by region and role: of each long life, and of all together."""
    first: dict[str, float] = {}
    for sample in samples:
        first.setdefault(sample.life, sample.at_s)
    warm = [sample for sample in samples if sample.at_s - first[sample.life] >= WARM_UP_S]
    series: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for sample in warm:
        for figure, value in sample.figures.items():
            for life in ("", sample.life):
                series.setdefault((sample.region, sample.role, figure, life), []).append((sample.at_s, value))
    rows = []
    for (region, role, figure, life), points in sorted(series.items()):
        if not life or points[-1][0] - points[0][0] >= LIFE_MIN_S:
            rows.append(Row(region, role, figure, life, slope(*zip(*points, strict=True))))
    return rows


class Soak:
    """One run: start, sample and kill, finish."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._demo = Demo(
            DemoOptions(regions=options.regions, seconds=60 * options.minutes, folder=folder, is_json=True), folder
        )
        self._demo.prepare()
        config = folder / "run.toml"
        text = config.read_text().replace("[rounds]\n", f"[rounds]\nsummary_entries = {SUMMARY_ENTRIES}\n", 1)
        config.write_text(text)
        self._regions = {region.name: region for region in self._demo.regions}
        self.samples: list[Sample] = []
        self.kills: list[PlannedFault] = []

    async def run(self) -> dict[str, Any]:
        """The report."""
        try:
            await self._demo.compile()
            for region in self._regions.values():
                await region.start(self._folder / "run.toml")
            await self._until(lambda: all(_steps(region) > 0 for region in self._regions.values()), START_S)
            await self._storm()
            await order_finish(list(self._regions.values()), limit_s=FINISH_S)
            await self._until(lambda: all(region.has_exited for region in self._regions.values()), FINISH_S)
        finally:
            await asyncio.gather(*(region.stop() for region in self._regions.values()))
        report = build_report(self._folder, self._demo.names)
        kept = ("rounds_committed", "tokens", "equal_digests", "val_loss_global")
        return {
            "minutes": self._options.minutes,
            "kills": [{"at_seconds": one.at_ns / NS_PER_S, "target": str(one.target)} for one in self.kills],
            "samples": len(self.samples),
            "run": {key: report[key] for key in kept},
            "rows": [{**asdict(row), "verdict": row.slope.verdict} for row in judge(self.samples)],
        }

    async def _storm(self) -> None:
        seconds, started_s = 60 * self._options.minutes, time.monotonic()
        end_ns, mtbf_ns = int(seconds * NS_PER_S), int(self._options.every * NS_PER_S)
        drawn = storm(self._demo.names, seed=self._options.seed, mtbf_ns=mtbf_ns, end_ns=end_ns, victims=VICTIMS)
        plan = list(drawn.faults)
        next_sample_s = 0.0
        while (at_s := time.monotonic() - started_s) < seconds:
            while plan and plan[0].at_ns / NS_PER_S <= at_s:
                self._kill(plan.pop(0))
            if at_s >= next_sample_s:
                next_sample_s += SAMPLE_S
                await self._sample(at_s)
            due_s = min([next_sample_s, *(kill.at_ns / NS_PER_S for kill in plan[:1])])
            await asyncio.sleep(max(0.05, min(due_s, seconds) - (time.monotonic() - started_s)))

    async def _sample(self, at_s: float) -> None:
        await asyncio.gather(*(region.poll() for region in self._regions.values()))
        for region in self._regions.values():
            if region.has_exited:
                raise RuntimeError(f"{region.name} ended too early:\n{region.last_lines()}")
            for pid, role in _roles(region).items():
                found = read_process(pid)
                if found is None:
                    continue
                life, figures = found
                if role == "daemon":
                    figures["tasks"] = float(region.status.get("tasks", 0))
                self.samples.append(Sample(at_s, region.name, role, life, figures))
                if self._options.samples is not None:
                    with self._options.samples.open("a") as file:
                        file.write(json.dumps(asdict(self.samples[-1])) + "\n")

    def _kill(self, kill: PlannedFault) -> None:
        """Only what a supervisor started that was started here; who is gone already is not killed."""
        region = self._regions[kill.target.region]
        for pid in [pid for pid, role in _roles(region).items() if role == kill.target.part]:
            os.kill(pid, signal.SIGKILL)
            self.kills.append(kill)

    async def _until(self, is_so: Any, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"not within {limit_s:.0f} s; see the logs in {self._folder}")
            await asyncio.gather(*(region.poll() for region in self._regions.values() if not region.has_exited))
            await asyncio.sleep(1.0)


def _steps(region: RegionProcess) -> int:
    return int((region.status.get("learner") or {}).get("step", 0))


def _roles(region: RegionProcess) -> dict[int, str]:
    """All processes of a region: its supervisor, and what that started; "other" where the status does not name it."""
    assert region.process is not None
    named = {pid: role for role, pid in region.status.get("pids", {}).items() if pid}
    found = {region.process.pid: "supervisor"}
    waiting = [region.process.pid]
    while waiting:
        for pid in children(waiting.pop()):
            found[pid] = named.get(pid, "other")
            waiting.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Of a process, by the kernel; none if it is gone."""
    try:
        tasks = list((Path("/proc") / str(pid) / "task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: by role and figure, the whole run in every region, and how the single lives were judged."""
    lines = ["| role | figure | mean | slope per hour, by region | verdicts of lives |", "|---|---|---|---|---|"]
    names = sorted({(row["role"], row["figure"]) for row in rows})
    for role, figure in names:
        mine = [row for row in rows if (row["role"], row["figure"]) == (role, figure)]
        whole = [row["slope"] for row in mine if not row["life"]]
        lives = [row["verdict"] for row in mine if row["life"]]
        unit = 2**20 if figure.endswith("_bytes") else 1
        slopes = ", ".join(f"{one['per_hour'] / unit:+.2f} ± {one['error_per_hour'] / unit:.2f}" for one in whole)
        mean = sum(one["mean"] for one in whole) / len(whole) / unit
        counts = ", ".join(f"{lives.count(word)} {word}" for word in sorted(set(lives)))
        shown = figure.replace("_bytes", ", MiB")
        lines.append(f"| {role} | {shown} | {mean:.1f} | {slopes} | {counts} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--regions", type=int, default=4)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=Path, default=None, help="a file that gets each sample, one JSON a line")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = asyncio.run(Soak(options, Path(folder) / "run").run())
    run = report["run"]
    code = 0 if run["equal_digests"] and run["tokens"]["balanced"] else 1
    if options.json:
        print(json.dumps(report))
        return code
    print(f"{len(report['kills'])} kills, {run['rounds_committed']} rounds, equal digests: {run['equal_digests']}")
    for fault in run["tokens"]["faults"]:
        print(f"the account has a fault: {fault}")
    print(table(report["rows"]))
    return code


if __name__ == "__main__":
    sys.exit(main())
