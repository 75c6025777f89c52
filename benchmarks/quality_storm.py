"""What a storm costs the model, and which part of it does: losses after as many tokens.

    python benchmarks/quality_storm.py [--seeds 4] [--arms undisturbed,storm] [--json]

Lock-step virtual time as in `quality.py`, on the model, batches and H of `diloco-node demo --tokens`. The learning
rate ends with the run, outer rates follow from its length, and the final model is measured. Each learner's region is
struck as `demo --chaos --mtbf 1s` does it: a quarter of the kills takes its daemon, a quarter its learner, half takes
both. What comes back takes as long as it did there (docs/results.md). Rounds need three regions of four.

Every arm ends when the learners have made as many steps in all, so all merge the same tokens. It says how long that
took, in steps of a learner that is never struck.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

from quality_merge import Rounds
from quality_stack import Batches, Inner, Stack

from diloco_node.config.resolve import default_outer
from diloco_node.core.types import RunSettings
from diloco_node.learner.builtin.data import load_corpus
from diloco_node.learner.builtin.shape import ModelSettings

LEARNERS: Final = 4
BATCH: Final = 8
CONTEXT: Final = 64
SYNC_EVERY: Final = 16
LR: Final = 0.006
HELD_OUT_WINDOWS: Final = 1024

KILL_EVERY_MIN: Final = 6.0

DAEMON_AWAY: Final = 22.0
"""Steps from a daemon's kill until its region is in merges again."""
LEARNER_AWAY: Final = 8.0
REGION_AWAY: Final = 33.0
REGION_LEARNER_AWAY: Final = 31.0
"""Steps in which nobody trains, where the whole region was killed."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train through it.

    Attributes:
        is_struck: there is a storm.
        waits: a learner makes no step while its region is in no rounds.
        sync_every: H.
        quorum: regions that a round needs; fewer than a majority would not be safe, and show what the majority costs.
    """

    is_struck: bool = True
    waits: bool = False
    sync_every: int = SYNC_EVERY
    quorum: int = 3


ARMS: Final = {
    "undisturbed": Arm(is_struck=False),
    "undisturbed_24": Arm(is_struck=False, sync_every=24),
    "storm": Arm(),
    "waits": Arm(waits=True),
    "any_quorum": Arm(quorum=1),
}


def storm(seed: int, steps: int, *, kill_every: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Shape (M, steps) each: whether a region takes no part in rounds, and whether its learner makes no step.

    Args:
        kill_every: mean steps between two kills, over all regions.
    """
    draw = np.random.default_rng([seed, 99])
    away, idle = np.zeros((LEARNERS, steps), bool), np.zeros((LEARNERS, steps), bool)
    at = 0.0
    while (at := at + draw.exponential(kill_every)) < steps:
        m, kind, slower, begin = draw.integers(LEARNERS), draw.integers(4), draw.uniform(0.9, 1.4), int(at)
        if kind == 0:
            away[m, begin : begin + int(DAEMON_AWAY * slower)] = True
        elif kind == 1:
            idle[m, begin : begin + int(LEARNER_AWAY * slower)] = True
        else:
            away[m, begin : begin + int(REGION_AWAY * slower)] = True
            idle[m, begin : begin + int(REGION_LEARNER_AWAY * slower)] = True
    return away, idle


class StormRounds(Rounds):
    """Rounds of regions that are away at times; each learner counts its own steps in `own`."""

    def __init__(self, *args: Any, away: NDArray[np.bool_], quorum: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.quorum = quorum
        self.own, self.away, self.is_over = np.zeros(LEARNERS, int), away, False
        self.steps_held: list[int] = []

    def own_step(self, m: int, step: int) -> int:
        """As counted."""
        return int(self.own[m])

    def after_step(self, step: int) -> None:
        """Who is back takes what it missed; then rounds, where enough are there."""
        there = self._reachable(step)
        for m in there:
            for fragment in range(len(self.fragments)):
                self._apply(m, fragment, step)
        if len(there) >= self.quorum:
            super().after_step(step)

    def finish(self, step: int) -> None:
        """Everybody is in the last rounds."""
        self.is_over = True
        super().finish(step)

    def _reachable(self, step: int) -> list[int]:
        return [m for m in range(LEARNERS) if self.is_over or not self.away[m, step]]

    def _commit(self, one: Any) -> None:
        self.steps_held += [member.step_to - member.step_from for member in one.contributions]
        super()._commit(one)


def train(arm: Arm, seed: int, steps: int, *, kill_every: float) -> dict[str, float]:
    """One run until the learners have made `LEARNERS * steps` steps in all."""
    lr, momentum = default_outer(steps // SYNC_EVERY)
    settings = RunSettings(
        fragments=4, sync_every=arm.sync_every, overlap_steps=2, outer_lr=lr, outer_momentum=momentum
    )
    corpus = load_corpus()
    inner = Inner(lr=LR, steps=steps)
    stack = Stack(ModelSettings(context=CONTEXT), inner, replicas=LEARNERS, seed=seed)
    data = Batches(corpus, learners=LEARNERS, batch=BATCH, context=CONTEXT, seed=seed)
    away, idle = storm(seed, 4 * steps, kill_every=kill_every)
    away, idle = away & arm.is_struck, (idle | away & arm.waits) & arm.is_struck
    rounds = StormRounds(
        settings, stack.shapes, stack.theta, tokens_per_step=BATCH * CONTEXT, away=away, quorum=arm.quorum
    )
    step = 0
    while True:
        resting = idle[:, step]
        stack.step(data.separate(step), at=rounds.own.mean() + 1, resting=resting)
        rounds.own += ~resting
        step += 1
        if rounds.own.sum() >= LEARNERS * steps:
            break
        rounds.after_step(step)
    rounds.finish(step)
    loss = stack.loss(rounds.global_parameters(), corpus.held_out_windows(HELD_OUT_WINDOWS, CONTEXT))
    return {"loss": loss, "took_steps": step, "steps_held": statistics.fmean(rounds.steps_held)}


def summarised(losses: list[float], reference: list[float]) -> tuple[float, float]:
    """The mean relative change against the same seeds of another arm, and its standard error (NaN of a single seed)."""
    changes = [own / other - 1 for own, other in zip(losses, reference, strict=True)]
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return statistics.fmean(changes), error


def main() -> None:
    """Run the arms, and compare each with the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="how many [4]")
    parser.add_argument("--steps", type=int, default=800, help="of each learner, in the mean [800]")
    parser.add_argument(
        "--kill-every", type=float, default=11.0, help="mean steps of 0.1 s between two kills, over all regions [11]"
    )
    parser.add_argument("--arms", default=",".join(ARMS), help="with commas, the one to compare with first [all]")
    parser.add_argument("--json", action="store_true", help="one JSON object, with each seed")
    options = parser.parse_args()
    names = options.arms.split(",")
    if options.kill_every < KILL_EVERY_MIN:
        parser.error(f"--kill-every is at least {KILL_EVERY_MIN:g}: with less, hardly anybody is ever there")
    if unknown := sorted(set(names) - set(ARMS)):
        parser.error(f"unknown arms {', '.join(unknown)}; there are {', '.join(ARMS)}")
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {}
    for name in names:
        found[name] = [
            train(ARMS[name], seed, options.steps, kill_every=options.kill_every)
            for seed in range(1, options.seeds + 1)
        ]
        losses = [[run["loss"] for run in found[one]] for one in (name, names[0])]
        change, error = summarised(*losses)
        if not options.json:
            took, held = (statistics.fmean(run[key] for run in found[name]) for key in ("took_steps", "steps_held"))
            print(
                f"{name:>16}  loss {statistics.fmean(losses[0]):.4f}  {change:+.2%} +- {error:.2%}  "
                f"in {took:.0f} steps, {held:.1f} of them in a contribution",
                flush=True,
            )
    if options.json:
        print(json.dumps({"steps": options.steps, "kill_every": options.kill_every, "arms": found}))


if __name__ == "__main__":
    main()
