"""One or two regions that lie: when they are named, what the others' model is worth, and how many rounds still commit.

    python benchmarks/lies.py [--arms "honest;without;sum_flipped"] [--regions 5 --liars 2] [--json FILE]

Each arm is a run of its own: daemons and learners on this machine, which train the built-in model. In `honest` nobody
lies, in `without` the same regions do not train. In the others they lie from the eighth round on (`gray_region`), in
consistent words: as reducers (`sum_...`), as learners (`tokens_...`, `flipped`, `against_x5`) or while they lead
(`factors`, `share`, `weights`, `early_end`). With `old_folder` a region's state folder is replaced by an older copy.

`named` is the number of rounds from then until another region's status names the liar: it is left out, followed no
more, or in an alert. `loss` is the held-out loss of the others at the last step that all arms reached, and `more` is
its distance from `without`. `rounds` are for each inner step of the others, beside `honest`. `cosine` is that of the
liar's contributions with the mean of the others, as the others' status says it. `others` are honest regions that were
left out for something that was proved.

With `--json` the file gets each arm as soon as it is measured, and arms that are in it are not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gray import PROGRAM, REGIONS, GrayRun, prepared
from gray_region import LEADER_FAULTS, SUMS

from diloco_node.atomic_file import replace_file
from diloco_node.health.alerts import find_alerts

LEARNERS = ("tokens_x2", "tokens_x8", "tokens_x64", "flipped", "tokens_x2,flipped", "tokens_x8,flipped")
ARMS = ("honest", "without", *SUMS, *LEARNERS, "tokens_x64,flipped", "against_x5", *LEADER_FAULTS, "old_folder")
POLL_S = 0.5
COPY_PART = 0.25
"""A folder is copied after so much of an arm, and put back after twice as much."""

PROOFS = frozenset({"A-LEDGER-FORKS", "A-LEADER-WRONG", "A-QUARANTINE"})
ACCUSING = PROOFS | {"A-OUTWEIGHS", "A-TOO-LONG", "A-AGAINST"}
"""The others tell of what may be other data, or one odd step: they name a liar, and an honest region is not wronged."""
LOSSES = 6
"""The loss at a step is the median of so many evaluations before it, of all honest learners."""


@dataclass
class Watch:
    """What the honest regions show while the others lie. cosines: by region, the last that was seen."""

    run: GrayRun
    liars: frozenset[str]
    losses: dict[tuple[int, str], float] = field(default_factory=dict)
    named: tuple[int, str] | None = None
    wronged: set[str] = field(default_factory=set)
    cosines: dict[str, float] = field(default_factory=dict)

    async def poll(self, first_round: int) -> None:
        """Read all statuses."""
        await self.run._poll()
        for name, region in self.run.regions.items():
            if name in self.liars:
                continue
            learner = region.status.get("learner") or {}
            if learner.get("val_loss_global") is not None:
                self.losses[learner["val_loss_global_step"], name] = learner["val_loss_global"]
            for row in region.status.get("standings") or ():
                if row["cosine"] is not None:
                    self.cosines[row["region"]] = row["cosine"]
            for accused, reason, is_proof in _accusations(region.status):
                if accused in self.liars and self.named is None:
                    self.named = self.run.samples[-1].rounds - first_round, reason
                elif is_proof and accused not in self.liars and accused in self.run.regions:
                    self.wronged.add(f"{accused}: {reason}")


def _accusations(status: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(region, reason, is it a proof) of each that a status accuses; slow links and machines aside."""
    for row in status.get("left_out") or ():
        if "deadline" not in row["reason"] and "late" not in row["reason"]:
            yield row["region"], str(row["reason"]), True
    for alert in find_alerts(status):
        if alert.code in ACCUSING:
            yield alert.regions[0], f"{alert.code}: {alert.text}", alert.code in PROOFS


async def measure(arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """One arm: its losses by step, its rounds, and when the liars were named."""
    folder = Path(tempfile.mkdtemp(prefix=f"lies-{arm.replace(',', '-')}-"))
    options.leader = arm in LEADER_FAULTS
    command = (sys.executable, PROGRAM, "learn")
    try:
        async with prepared(folder, arm, options, count=options.regions, command=command) as run:
            return await _watch(run, arm, options)
    finally:
        shutil.rmtree(folder)


async def _watch(run: GrayRun, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    others = [name for name in sorted(run.regions) if name != run.victim]
    liars = [run.victim, *others[: options.liars - 1]]
    watch = Watch(run, frozenset(liars))
    before = run.samples[-1]
    if arm == "without":
        for name in liars:
            await run.regions.pop(name).stop()
    elif arm not in ("honest", "old_folder"):
        for name in liars:
            (run.folder / "faults" / name).write_text(arm)
    copies = iter((COPY_PART, 2 * COPY_PART) if arm == "old_folder" else ())
    copy_at = next(copies, None)
    started_s = time.monotonic()
    while (spent_s := time.monotonic() - started_s) < options.seconds:
        if copy_at is not None and spent_s > copy_at * options.seconds:
            await _swap_folder(run, is_copied=copy_at == COPY_PART)
            copy_at = next(copies, None)
        await watch.poll(before.rounds)
        await asyncio.sleep(POLL_S)
    after = run.samples[-1]
    return {
        "liars": liars,
        "rounds": after.rounds - before.rounds,
        "steps": after.steps - before.steps,
        "named_after": watch.named[0] if watch.named else None,
        "reason": watch.named[1] if watch.named else "",
        "wronged": sorted(watch.wronged),
        "cosines": watch.cosines,
        "losses": [(step, loss) for (step, _), loss in sorted(watch.losses.items())],
    }


async def _swap_folder(run: GrayRun, *, is_copied: bool) -> None:
    """Stop the victim; copy its state folder, or put the copy in its place; start it again."""
    region = run.regions.pop(run.victim)
    await region.stop()
    copy = run.folder / "older"
    if is_copied:
        shutil.copytree(region.state_dir, copy, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    else:
        shutil.rmtree(region.state_dir)
        shutil.move(copy, region.state_dir)
    await region.start(run.folder / "run.toml", run.command)
    run.regions[run.victim] = region


def loss_at(step: int, losses: list[tuple[int, float]]) -> float:
    """The median of the last losses up to a step: each is of a region's learner."""
    return statistics.median([loss for at, loss in losses if at <= step][-LOSSES:])


def lines(arms: dict[str, dict[str, Any]]) -> list[str]:
    """The rows of a table in Markdown."""
    step = min(arm["losses"][-1][0] for arm in arms.values())
    losses = {name: loss_at(step, arm["losses"]) for name, arm in arms.items()}
    rates = {name: arm["rounds"] / max(1.0, arm["steps"]) for name, arm in arms.items()}
    table = [f"| arm | named | loss at step {step} | more | rounds | cosine | others | reason |", f"|{8 * '---|'}"]
    for name, arm in arms.items():
        named = "-" if arm["named_after"] is None else str(arm["named_after"])
        more = f"{losses[name] / losses['without'] - 1:+.1%}" if "without" in losses else "-"
        rounds = f"{rates[name] / rates['honest']:.0%}" if rates.get("honest") else f"{arm['rounds']}"
        cosines = [arm["cosines"][region] for region in arm["liars"] if region in arm["cosines"]]
        cosine = f"{statistics.mean(cosines):+.2f}" if cosines else "-"
        cells = (name, named, f"{losses[name]:.4f}", more, rounds, cosine, str(len(arm["wronged"])), arm["reason"][:90])
        table.append(f"| {' | '.join(cells)} |")
    return table


def load_arms(file: Path, conditions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The arms that were measured before, under the same conditions. Raises ValueError: the file has others."""
    if not file.exists():
        return {}
    document = json.loads(file.read_text())
    if document["conditions"] != conditions:
        raise ValueError(f"{file} was measured with {document['conditions']}, not {conditions}: name another file")
    arms: dict[str, dict[str, Any]] = document["arms"]
    return arms


def main() -> int:
    """Run the arms, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default=";".join(ARMS), help="which, with semicolons")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each arm, from the first lie on")
    parser.add_argument("--regions", type=int, default=REGIONS)
    parser.add_argument("--liars", type=int, default=1, help="regions that lie the same way")
    parser.add_argument("--step-ms", type=int, default=60)
    parser.add_argument("--sync-every", type=int, default=16)
    parser.add_argument("--json", type=Path, help="goes on with the arms of this file")
    options = parser.parse_args()
    names = options.arms.split(";")
    if unknown := [name for name in names if name not in ARMS]:
        parser.error(f"there is no arm {unknown[0]!r}: {'; '.join(ARMS)}")
    keys = ("seconds", "regions", "liars", "step_ms", "sync_every")
    conditions = {"cpus": os.cpu_count(), **{key: getattr(options, key) for key in keys}}
    try:
        arms = load_arms(options.json, conditions) if options.json else {}
    except ValueError as error:
        parser.error(str(error))
    for name in names:
        if name in arms:
            continue
        arms[name] = asyncio.run(measure(name, options))
        sys.stderr.write(f"{name}: named after {arms[name]['named_after']} of {arms[name]['rounds']} rounds\n")
        if options.json:
            document = {"conditions": conditions, "arms": arms}
            replace_file(options.json, json.dumps(document).encode(), is_durable=False)
    print("\n".join(lines(arms)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
