"""Round rate of four real regions while one of them is attacked over HTTP/2, beside the rate without an attack.

    python benchmarks/attacks.py [--attacks "rapid reset,pings"] [--strangers] [--nice 19] [--json]

One run: four daemons and learners on this machine. For each attack the rounds are counted for a while without it, and
then for as long while it goes on. The clients (`http2_attacks`) have the certificate of one region, and attack the
leader's port; with `--strangers` they have none. They share this machine's processors with the regions that they
attack; with `--nice 19` they take what these leave, as a client elsewhere would. `kept` is rounds per second with the
attack over those before it, `kept per step` the same per inner step: what a busy machine slows down, it slows down on
both sides. `memory` is what the attacked daemon took more while it lasted, or that it died.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from gray import GrayRun, longest_gap_s, prepared, rate, rounds_per_step
from http2_attacks import ATTACKS, Attack, attacking

NAMES = [attack.name for attack in ATTACKS]
SETTLE_S = 2.0
"""Before it counts: the connections have to be made."""


def target_of(run: GrayRun) -> tuple[str, int]:
    """The leader, and its port between regions."""
    leader = next(one.status["leader"] for one in run.regions.values() if one.status.get("leader"))
    address = tomllib.loads((run.folder / "run.toml").read_text())["regions"][leader]["address"]
    return leader, int(address.rpartition(":")[2])


def memory_bytes(pid: int) -> int | None:
    """What a process has resident; None if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # a process that waits to be reaped has none


async def measure(run: GrayRun, attack: Attack, options: argparse.Namespace) -> dict[str, Any]:
    """One attack, after as long without it."""
    target, port = target_of(run)
    run.victim = next(name for name in sorted(run.regions) if name != target)  # whose key was taken
    identity = None if options.strangers else run.folder / "certs" / run.victim
    before = await run.watch(options.seconds)
    daemon = run.regions[target].status["pids"]["daemon"]
    memory = memory_bytes(daemon)
    async with attacking(attack, port, identity, niceness=options.nice) as progress:
        await asyncio.sleep(SETTLE_S)
        during = await run.watch(options.seconds)
        memory_then = memory_bytes(daemon)
    rates = [rate(run.samples, *one) for one in (before, during)]
    per_step = [rounds_per_step(run.samples, *one) for one in (before, during)]
    return {
        "before_per_s": rates[0],
        "during_per_s": rates[1],
        "kept": rates[1] / rates[0] if rates[0] else None,
        "kept_per_step": per_step[1] / per_step[0] if per_step[0] else None,
        "longest_gap_s": longest_gap_s(run.samples, *during),
        "memory_bytes": memory_then - memory if memory_then is not None and memory is not None else None,
        "daemon_died": memory_then is None,
        "connections": progress.connected,
        "closed": progress.closed,
        "sent_bytes": progress.sent_bytes,
        "load": os.getloadavg()[0],
    }


def line(name: str, one: dict[str, Any]) -> str:
    """A row of the table for people."""
    shown = [f"{one[key]:.0%}" if one[key] is not None else "-" for key in ("kept", "kept_per_step")]
    grown = (
        "died" if one["daemon_died"] else "-" if one["memory_bytes"] is None else f"{one['memory_bytes'] / 2**20:.1f}"
    )
    return (
        f"{name:<20} {one['before_per_s']:>8.2f} {one['during_per_s']:>8.2f} {shown[0]:>6} {shown[1]:>13} "
        f"{one['longest_gap_s']:>6.1f} {grown:>8} {one['connections']:>11} {one['load']:>6.1f}"
    )


HEAD = (
    f"{'attack':<20} {'before/s':>8} {'during/s':>8} {'kept':>6} {'kept per step':>13} "
    f"{'gap s':>6} {'MiB':>8} {'connections':>11} {'load':>6}"
)


async def measure_all(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All attacks in one run."""
    found: dict[str, Any] = {}
    async with prepared(folder, "attacks", options) as run:
        for attack in ATTACKS:
            if attack.name in options.attacks:
                found[attack.name] = await measure(run, attack, options)
                sys.stderr.write(line(attack.name, found[attack.name]) + "\n")
        ended = await run._end()
    return {"attacks": found, **ended}


def main() -> int:
    """Measure, and show."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attacks", type=lambda text: text.split(","), default=NAMES, help="which, with commas")
    parser.add_argument("--strangers", action="store_true", help="the clients have no certificate")
    parser.add_argument("--nice", type=int, default=0, choices=range(20), metavar="0..19", help="of the clients [0]")
    parser.add_argument("--seconds", type=float, default=20.0, help="with each attack, and before it without")
    parser.add_argument("--step-ms", type=int, default=100)
    parser.add_argument("--sync-every", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=None, help="where the run lies while it lasts")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := sorted(set(options.attacks) - set(NAMES)):
        parser.error(f"there is no attack {unknown[0]!r}: {', '.join(NAMES)}")
    options.leader = False
    folder = Path(tempfile.mkdtemp(prefix="attacks-", dir=options.folder))
    try:
        document = asyncio.run(measure_all(options, folder))
    finally:
        shutil.rmtree(folder)
    document = {
        "cpus": os.cpu_count(),
        "seconds": options.seconds,
        "strangers": options.strangers,
        "nice": options.nice,
        **document,
    }
    rows = [HEAD, *(line(name, one) for name, one in document["attacks"].items())]
    print(json.dumps(document) if options.json else "\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
