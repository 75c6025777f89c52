"""Wrong sums on four real regions: when the liar is named, and what the others' model is worth in the end.

    python benchmarks/lies.py [--arms honest,without,sum_flipped] [--seconds 120] [--json]

Each arm is a run of its own: four daemons and learners on this machine, which train the built-in model. In `honest`
nobody lies, in `without` the same region does not train; in the others its reducer lies from the eighth round on, in
consistent words (`gray_region`). `named` is the number of rounds from then until the leader leaves it out, or a region
says that it follows it no more. `loss` is the held-out loss of the others at the last step that all arms reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gray import GrayRun, prepared
from gray_region import SUMS

ARMS = ("honest", "without", *SUMS)
POLL_S = 0.5


async def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: its losses by step, and when the liar was named."""
    folder = Path(tempfile.mkdtemp(prefix=f"lies-{arm}-"))
    try:
        async with prepared(folder, arm, options) as run:
            return await _watch(run, arm, options.seconds)
    finally:
        shutil.rmtree(folder)


async def _watch(run: GrayRun, arm: str, seconds: float) -> dict[str, Any]:
    first = run.samples[-1].rounds
    if arm == "without":
        await run.regions[run.victim].stop()
        run.regions.pop(run.victim)
    elif arm != "honest":
        run.set_fault(on=True)
    losses: dict[int, float] = {}
    named: tuple[int, str] | None = None
    started_s = time.monotonic()
    while time.monotonic() - started_s < seconds:
        await run._poll()
        for name, region in run.regions.items():
            learner = region.status.get("learner") or {}
            if name != run.victim and learner.get("val_loss_global") is not None:
                losses[learner["step"]] = learner["val_loss_global"]
        reason = _accusation(run)
        if named is None and reason:
            named = (run.samples[-1].rounds - first, reason)
        await asyncio.sleep(POLL_S)
    return {
        "victim": run.victim,
        "rounds": run.samples[-1].rounds - first,
        "named_after": named[0] if named else None,
        "reason": named[1] if named else "",
        "losses": sorted(losses.items()),
    }


def _accusation(run: GrayRun) -> str:
    for name, region in run.regions.items():
        for line in region.status.get("left_out") or ():
            if name != run.victim and line["region"] == run.victim:
                return str(line["reason"])
    return ""


def loss_at(step: int, losses: list[tuple[int, float]]) -> float:
    """The mean of the last three losses up to a step: each is of another region's learner."""
    values = [loss for at, loss in losses if at <= step][-3:]
    return sum(values) / len(values)


def lines(arms: dict[str, dict[str, Any]]) -> list[str]:
    """The table for people."""
    step = min(arm["losses"][-1][0] for arm in arms.values())
    table = [f"{'arm':<12} {'rounds':>7} {'named':>6} {'loss':>7}  at step {step}"]
    for name, arm in arms.items():
        named = "-" if arm["named_after"] is None else str(arm["named_after"])
        loss = loss_at(step, arm["losses"])
        table.append(f"{name:<12} {arm['rounds']:>7} {named:>6} {loss:>7.4f}  {arm['reason'][:110]}")
    return table


def main() -> int:
    """Run the arms, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="which, with commas")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each arm, from the first lie on")
    parser.add_argument("--step-ms", type=int, default=60)
    parser.add_argument("--sync-every", type=int, default=16)
    parser.add_argument("--leader", action="store_true", help="the leader lies")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    arms: dict[str, dict[str, Any]] = {}
    for arm in options.arms.split(","):
        if arm not in ARMS:
            parser.error(f"there is no arm {arm!r}: {', '.join(ARMS)}")
        arms[arm] = asyncio.run(measure(arm, options))
        sys.stderr.write(f"{arm}: named after {arms[arm]['named_after']} of {arms[arm]['rounds']} rounds\n")
    print(json.dumps({"cpus": os.cpu_count(), "arms": arms}) if options.json else "\n".join(lines(arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
