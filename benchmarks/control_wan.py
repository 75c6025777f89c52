"""How long control waits on a slow link that bulk fills in both directions, with and without a budget.

    python benchmarks/control_wan.py [--seconds 20] [--json]

Root: four network namespaces joined by the router of `diloco_node.lab.wan`, lines of 10 Mbit/s with a queue of 200
ms, 40 ms between any two. Two daemons' transports load one link; messages of the control lane, small as heartbeats,
go to and fro over it. Beside each figure stand those of the same run: datagrams between the same two processes over a
link that is idle, which is how late this machine is; and the same control lane where bulk fills the queue, because
TCP goes by loss (Reno) instead of BBR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from budget_link import Found, Options, quantile, run_link

from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.namespaces import Place

LINE_BYTES_PER_S = 10_000_000 // 8
BUDGET_BYTES_PER_S = 9_000_000 // 8

TOPOLOGY = """\
[wan]
queue = "200ms"

[default_link]
rtt = "40ms"

[regions.a]
egress = "10Mbit/s"
[regions.b]
egress = "10Mbit/s"
[regions.idle-a]
egress = "10Mbit/s"
[regions.idle-b]
egress = "10Mbit/s"
"""

ARMS: dict[str, dict[str, Any]] = {
    "budget": {"egress_a": BUDGET_BYTES_PER_S, "egress_b": BUDGET_BYTES_PER_S},
    "no_budget": {},
    "full_queue": {"is_by_loss": True},
}


@contextlib.contextmanager
def slow_lines() -> Iterator[Sequence[Place]]:
    """The loaded link's two places, and the idle one's; by a back-end that is not "none"."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "slow.toml"
        file.write_text(TOPOLOGY)
        state = emulation.up(file, run=f"ctl{os.getpid()}", owner_pid=os.getpid())
    try:
        yield state.places()
    finally:
        emulation.down(state.run)


def run_arm(places: Sequence[Place], arm: str, *, seconds: float, settle_s: float) -> Found:
    """One of ARMS on the loaded link."""
    idle = [(place.namespace, place.address) for place in places[2:]]
    more = {"namespace_b": places[1].namespace, "idle": idle, "seconds": seconds, "settle_s": settle_s}
    return run_link(Options(**ARMS[arm], **more), places[0].namespace)


def figures(found: Found) -> dict[str, Any]:
    """Of one arm, plain values for JSON."""
    shown: dict[str, Any] = {"mbit_s": {way: found.used_per_s(way) * 8 / 1e6 for way in ("in", "out")}}
    for name, trips_s in (("control", found.control_s), ("idle_link", found.idle_s)):
        shown |= {f"{name}_p{p}_seconds": quantile(trips_s, p / 100) for p in (50, 99)}
    return shown | {"longest_sample_gap_seconds": found.gap_s()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All arms, one after the other."""
    with slow_lines() as places:
        arms = {
            arm: figures(run_arm(places, arm, seconds=options.seconds, settle_s=options.settle))
            | {"load_average": os.getloadavg()[0]}
            for arm in options.arms.split(",")
        }
    return {"line_mbit_s": LINE_BYTES_PER_S * 8 / 1e6, "rtt_seconds": 0.040, "cpus": os.cpu_count(), "arms": arms}


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    shown = [
        f"{result['line_mbit_s']:g} Mbit/s, {result['rtt_seconds'] * 1e3:g} ms, both directions loaded, "
        f"{result['cpus']} cores; round trips in ms",
        f"{'':<12}{'control p50':>12}{'p99':>7}{'idle p50':>10}{'p99':>7}{'Mbit/s in':>11}{'out':>7}{'load':>6}",
    ]
    for name, one in result["arms"].items():
        times = [one[f"{what}_p{p}_seconds"] * 1e3 for what in ("control", "idle_link") for p in (50, 99)]
        shown.append(
            f"{name:<12}{times[0]:>12.1f}{times[1]:>7.1f}{times[2]:>10.1f}{times[3]:>7.1f}"
            f"{one['mbit_s']['in']:>11.2f}{one['mbit_s']['out']:>7.2f}{one['load_average']:>6.1f}"
        )
    return shown


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS), help="which, in this order [all]")
    parser.add_argument("--seconds", type=float, default=20.0, help="that count, of each [20]")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before [3]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("benchmarks/control_wan.py makes network namespaces: run it as root\n")
        return 2
    result = measure(options)
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
