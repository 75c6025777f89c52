"""Commits under kills of daemons, on virtual time: the region's core alone, without processes and without noise.

    python benchmarks/storm_virtual.py [--seeds 40] [--seconds 120] [--mtbf 1.33] [--back 2.1] [--json]

Four regions on links of 40 ms, P = 4, H = 16, steps of 100 ms. Daemons are killed at random; each listens again after
`back` seconds, a tenth less to a third more. Each seed draws its own storm, and a change of the core leaves that storm
as it is. So two checkouts can be compared seed by seed. The defaults are what `demo --chaos --mtbf 1s` does to daemons:
three of its four kinds of victims take the daemon along.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco_node.numeric import NS_PER_S
from tests.kit import small_world
from tests.kit.small_world import Small

START_S = 10.0


def storm(seed: int, options: argparse.Namespace) -> tuple[int, float]:
    """Commits in this storm, and the longest time without one, in seconds."""
    small_world.SEED = seed
    with pytest.MonkeyPatch.context() as patch:
        small = Small(patch, sync_every=16)
        small.go(START_S)
        simulation, world, draw = small.sim, small.world, random.Random(seed)
        commits, begin_ns = simulation.checkers.commits, world.now_ns
        end_ns = begin_ns + round(options.seconds * NS_PER_S)

        def kill(name: str, back_ns: int) -> None:
            host = simulation.hosts[name]
            if host.core is not None:
                host.kill_daemon()
                world.after(back_ns, None, host.start_daemon)

        at_s = 0.0
        while (at_s := at_s + draw.expovariate(1 / options.mtbf)) < options.seconds:
            back_ns = round(options.back * draw.uniform(0.9, 1.3) * NS_PER_S)
            world.after(round(at_s * NS_PER_S), None, kill, draw.choice(sorted(simulation.hosts)), back_ns)
        seen, seen_ns, gap_ns = commits, begin_ns, 0

        def is_over() -> bool:
            nonlocal seen, seen_ns, gap_ns
            if simulation.checkers.commits > seen:
                seen, seen_ns = simulation.checkers.commits, world.now_ns
            gap_ns = max(gap_ns, world.now_ns - seen_ns)
            return world.now_ns > end_ns

        simulation.run_until(is_over)
        assert not simulation.checkers.violations, f"seed {seed}: {simulation.checkers.violations}"
        return simulation.checkers.commits - commits, gap_ns / NS_PER_S


def main() -> None:
    """Storms of the seeds from 1,000 on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="how many [40]")
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual, of each storm [120]")
    parser.add_argument(
        "--mtbf", type=float, default=1.33, help="mean seconds between two kills, over all daemons [1.33]"
    )
    parser.add_argument("--back", type=float, default=2.1, help="seconds from a kill until the daemon listens [2.1]")
    parser.add_argument("--json", action="store_true", help="one JSON object, with each seed")
    options = parser.parse_args()
    found = {seed: storm(seed, options) for seed in range(1000, 1000 + options.seeds)}
    gaps = [gap_s for _, gap_s in found.values()]
    figures: dict[str, Any] = {
        "commits": statistics.mean(commits for commits, _ in found.values()),
        "gap_s_mean": statistics.mean(gaps),
        "gap_s_max": max(gaps),
        "over_15_s": sum(gap_s > 15 for gap_s in gaps),
    }
    if options.json:
        print(json.dumps(figures | {"seeds": found}))
    else:
        print("  ".join(f"{name} {value:.1f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
