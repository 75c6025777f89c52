"""How much of a budget is used, and how far it is ever exceeded, by what a network interface counts.

    python benchmarks/budget.py [--mbit 100] [--seconds 12] [--json]

Root: two network namespaces and a veth pair without segmentation offload. Both sides send to each other; one has the
budget out (its own bucket) and in (grants to the other side). Then the same while the other side's process stands still
for a while in the middle: what waited for it in the kernel is let through at once. Then both send as they can: where
this machine can't fill the budget even so, the share used is the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from budget_link import Found, Options, run_link

WINDOWS_S = (2.0, 10.0)
ARMS = ("budget", "stalled", "no_budget")


def arm(found: Found, per_s: int) -> dict[str, Any]:
    """What was used and the most in windows, as shares of a rate; and the most that was ever ahead of it."""
    return {
        way: {
            "used": found.used_per_s(way) / per_s,
            "ahead_seconds": found.ahead_s(way, per_s),
            **{f"most_in_{window_s:g}_seconds": found.most_per_s(way, window_s) / per_s for window_s in WINDOWS_S},
        }
        for way in ("in", "out")
    } | {"longest_sample_gap_seconds": found.gap_s(), "load_average": os.getloadavg()[0]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both arms, as shares of the budget."""
    per_s = int(options.mbit * 1e6 / 8)
    times = {"seconds": options.seconds, "settle_s": options.settle}
    return {
        "budget_mbit_s": options.mbit,
        "cpus": os.cpu_count(),
        "stall_seconds": options.stall,
        "budget": arm(run_link(Options(egress_a=per_s, ingress_a=per_s, **times)), per_s),
        "stalled": arm(run_link(Options(egress_a=per_s, ingress_a=per_s, stall_s=options.stall, **times)), per_s),
        "no_budget": arm(run_link(Options(**times)), per_s),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    shown = [f"shares of {result['budget_mbit_s']:g} Mbit/s, {result['cpus']} cores"]
    for name in ARMS:
        for way in ("in", "out"):
            one = result[name][way]
            most = ", ".join(f"{one[f'most_in_{window_s:g}_seconds']:.4f} in {window_s:g} s" for window_s in WINDOWS_S)
            shown.append(
                f"{name:<10}{way:<4}used {one['used']:.4f}, ahead by {one['ahead_seconds']:.3f} s, the most {most}"
            )
        shown.append(f"{'':<14}load {result[name]['load_average']:.1f}")
    return shown


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="the budget, Mbit/s [100]")
    parser.add_argument("--seconds", type=float, default=12.0, help="that count, of each arm [12]")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before [1]")
    parser.add_argument("--stall", type=float, default=2.0, help="seconds that the other side stands still [2]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("benchmarks/budget.py makes network namespaces: run it as root\n")
        return 2
    result = measure(options)
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
