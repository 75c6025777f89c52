"""CPU time of a region's daemon beside its learner: while rounds go on, and while none does.

    python benchmarks/idle.py [--seconds 60] [--regions 4] [--json]

The demo's regions on loopback: 0.13 M parameters, a round or two a second. Three windows of equal length: rounds with
the demo's table, which asks each daemon for its status every second; rounds that nobody looks at; and learners that are
stopped (SIGSTOP), so that no round goes on. CPU seconds are those of the kernel, in percent of one core. They hardly
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from diloco_node.cli.admin_client import ask, target_in

ROUNDS_BEFORE: Final = 12
"""Then each fragment was merged some times, and no kernel is compiled any more."""

START_S: Final = 180.0
SETTLE_S: Final = 8.0
"""An open round ends, and what follows it."""

POLL_S: Final = 1.0
WINDOWS: Final = ("rounds, looked at", "rounds", "no rounds")


def main() -> int:
    """Run the demo, measure the three windows, print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each window [60]")
    parser.add_argument("--regions", type=int, default=4, help="of the demo [4]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="idle-") as name:
        result = measure(Path(name), regions=arguments.regions, seconds=arguments.seconds)
    print(json.dumps(result) if arguments.json else table(result))
    return 0


def measure(folder: Path, *, regions: int, seconds: float) -> dict[str, Any]:
    """Return by window the rounds a second, and by region the daemon's CPU time in percent of a core."""
    words = ["-m", "diloco_node.main", "demo", "--regions", str(regions), "--folder", str(folder / "demo")]
    with (folder / "demo.log").open("wb") as output:
        demo = subprocess.Popen(
            [sys.executable, *words, "--seconds", str(START_S + 9 * seconds)], stdout=output, stderr=output
        )
    stopped: list[int] = []
    try:
        documents = wait_for_rounds(folder / "demo", regions)
        windows = {}
        for window in WINDOWS:
            stop = {WINDOWS[1]: [demo.pid], WINDOWS[2]: [row["pids"]["learner"] for row in documents.values()]}
            for process in stop.get(window, ()):
                os.kill(process, signal.SIGSTOP)
                stopped.append(process)
            time.sleep(SETTLE_S)
            windows[window] = measure_window(documents, folder / "demo", seconds)
        return {"regions": regions, "seconds": seconds, "windows": windows}
    finally:
        for process in stopped:
            os.kill(process, signal.SIGCONT)
        demo.send_signal(signal.SIGINT)
        demo.wait(60.0)


def wait_for_rounds(folder: Path, regions: int) -> dict[str, dict[str, Any]]:
    """Return the regions' status documents once so many rounds are committed.

    Raises SystemExit: not within START_S.
    """
    documents: dict[str, dict[str, Any]] = {}
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        documents = {path.parent.name: ask(target_in(path.parent)) for path in folder.glob("*/admin.port")}
        if len(documents) == regions and all(rounds_of(row) >= ROUNDS_BEFORE for row in documents.values()):
            return documents
        time.sleep(POLL_S)
    raise SystemExit(f"too few rounds: { {name: rounds_of(row) for name, row in documents.items()} }")


def rounds_of(document: Mapping[str, Any]) -> int:
    """Return the rounds that are committed; 0 where the daemon does not answer yet."""
    return int(document.get("rounds_committed", 0))


def measure_window(documents: Mapping[str, Mapping[str, Any]], folder: Path, seconds: float) -> dict[str, Any]:
    """Return the daemons' CPU time over so many seconds, and the rounds."""
    daemons = {name: psutil.Process(document["pids"]["daemon"]) for name, document in sorted(documents.items())}
    before = {name: rounds_of(ask(target_in(folder / name))) for name in daemons}
    begun_s, cpu_before = time.monotonic(), {name: cpu_s(daemon) for name, daemon in daemons.items()}
    time.sleep(seconds)
    passed_s = time.monotonic() - begun_s
    percent = {name: 100.0 * (cpu_s(daemon) - cpu_before[name]) / passed_s for name, daemon in daemons.items()}
    documents_after = {name: ask(target_in(folder / name)) for name in daemons}
    leader = next((name for name, row in documents_after.items() if row.get("role") == "leader"), "")
    rounds = max(rounds_of(documents_after[name]) - before[name] for name in daemons)
    return {"rounds_per_second": rounds / passed_s, "leader": leader, "cpu_percent": percent}


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far, all of its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def table(result: Mapping[str, Any]) -> str:
    """The result for people."""
    lines: Sequence[str] = [
        f"{window:<18} {row['rounds_per_second']:4.1f} rounds/s  "
        + "  ".join(
            f"{name}{' (leads)' * (name == row['leader'])} {percent:.1f} %"
            for name, percent in row["cpu_percent"].items()
        )
        for window, row in result["windows"].items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
