"""More regions than a machine has room for: rounds in each minute, and the terms that leaders took.

    python benchmarks/starved.py [--regions 16] [--minutes 5] [--step-time 100ms] [--json]

The demo's regions on loopback. A minute counts from the first one in which all regions have a learner and a round is
committed. The exit code is 1 if a minute had no round, or more than three new terms.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from diloco_node.cli.admin_client import ask, target_in
from diloco_node.health.alerts import is_starved

START_S = 600.0
MINUTE_S = 60.0
POLL_S = 5.0
TERMS_MAX = 3


@dataclass(frozen=True)
class Look:
    """All regions at a moment: the highest round and term that any of them knows.

    Attributes:
        at_s: monotonic time. starved: regions whose status says that the machine is starved. load: of the machine.
    """

    at_s: float
    rounds: int
    term: int
    regions: int
    training: int
    starved: int
    load: float


@dataclass(frozen=True)
class Minute:
    """Of so many seconds: the rounds and new terms in them, and regions that called the machine starved at its end."""

    seconds: float
    rounds: int
    terms: int
    starved: int
    load: float

    @property
    def is_good(self) -> bool:
        """A round at least, and at most three terms."""
        return self.rounds >= 1 and self.terms <= TERMS_MAX


def look(folder: Path) -> Look:
    """Ask all regions; one that does not answer in time counts as not there."""
    documents = [ask(target_in(path.parent)) for path in sorted(folder.glob("*/admin.port"))]
    return summed([document for document in documents if "error" not in document], time.monotonic())


def summed(documents: Sequence[dict[str, Any]], at_s: float) -> Look:
    """Put the status documents of one moment together."""
    return Look(
        at_s,
        max((int(document.get("rounds_committed") or 0) for document in documents), default=0),
        max((int(document.get("term") or 0) for document in documents), default=0),
        len(documents),
        sum(bool(document.get("learner")) for document in documents),
        sum(is_starved(document) for document in documents),
        os.getloadavg()[0],
    )


def minutes_of(looks: Sequence[Look]) -> list[Minute]:
    """Return what happened between each two looks."""
    return [
        Minute(b.at_s - a.at_s, b.rounds - a.rounds, b.term - a.term, b.starved, b.load) for a, b in pairwise(looks)
    ]


def watch(demo: subprocess.Popen[bytes], folder: Path, regions: int, minutes: int) -> Iterator[Look]:
    """Look at the demo in this folder, once a minute. Raises SystemExit: it has ended, or does not train in START_S."""
    deadline_s = time.monotonic() + START_S
    while (first := look(folder)).training < regions or not first.rounds:
        if time.monotonic() > deadline_s or demo.poll() is not None:
            raise SystemExit(f"after {START_S:.0f} s not all regions train and merge: {first}")
        time.sleep(POLL_S)
    yield first
    for number in range(1, minutes + 1):
        time.sleep(max(0.0, first.at_s + number * MINUTE_S - time.monotonic()))
        yield look(folder)


def main() -> int:
    """Run the demo, and print a line for each minute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regions", type=int, default=16, help="of the demo [16]")
    parser.add_argument("--minutes", type=int, default=5, help="to measure [5]")
    parser.add_argument("--step-time", default="100ms", help="of an inner step, at least [100ms]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args()
    looks: list[Look] = []
    with tempfile.TemporaryDirectory(prefix="starved-") as name:
        folder = Path(name) / "demo"
        words = ["-m", "diloco_node.main", "demo", "--regions", str(arguments.regions), "--folder", str(folder)]
        words += ["--step-time", arguments.step_time, "--seconds", str(START_S + 2 * MINUTE_S * arguments.minutes)]
        with (Path(name) / "demo.log").open("wb") as output:
            demo = subprocess.Popen([sys.executable, *words], stdout=output, stderr=output)
        try:
            for sight in watch(demo, folder, arguments.regions, arguments.minutes):
                looks.append(sight)
                if not arguments.json and len(looks) > 1:
                    minute = minutes_of(looks[-2:])[0]
                    print(
                        f"minute {len(looks) - 1}: {minute.rounds} rounds, {minute.terms} new terms, "
                        f"{minute.starved} regions say starved, load {minute.load:.0f}",
                        flush=True,
                    )
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(START_S)
    minutes = minutes_of(looks)
    if arguments.json:
        print(json.dumps({"regions": arguments.regions, "cpus": os.cpu_count(), "minutes": list(map(asdict, minutes))}))
    return 0 if all(minute.is_good for minute in minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
