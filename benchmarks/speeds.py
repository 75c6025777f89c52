"""Learners of different speed and batch in one run: participation, and held-out loss at equal tokens.

    python benchmarks/speeds.py                       # all arms, three seeds: half an hour on one core
    python benchmarks/speeds.py --arms equal,mixed --steps 400 --seeds 1 --json

Virtual time, so the result depends on nothing but the arguments: the leader's own decisions, merge, codec and apply
rule on the built-in model and data (`speeds_rounds`, `quality_stack`). All arms train the same number of tokens in all;
`--steps` is how many steps each of four equal learners makes for it. A learner draws from its own part of the data.

The learning-rate schedule stands where the run is, or, in the arms that end with `_own_steps` and `_own_tokens`, where
each learner's own count of steps is: against the steps of the median learner at the end, down to 0, and against the
steps that equal learners would make, down to a tenth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from quality_stack import Inner, Stack
from region_sampler import RegionSampler
from speeds_rounds import TICK_NS, UnevenRounds

from diloco_node.config.resolve import default_outer
from diloco_node.core.types import RunSettings
from diloco_node.learner.builtin.data import Corpus, load_corpus
from diloco_node.learner.builtin.shape import ModelSettings, parameter_shapes
from diloco_node.numeric import F32

BATCH: Final = 8
CONTEXT: Final = 32
SYNC_EVERY: Final = 16
RATE: Final = 4e-3
HELD_OUT_WINDOWS: Final = 2048
FLOOR_OPEN: Final = 0.1
TICKS_PER_STEP: Final = 40
"""Of a learner of speed 1: 1, 2, 4, 5, 8 and 10 times as fast are whole numbers of ticks."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One mix of learners.

    Attributes:
        speeds: steps of each learner in the time of one of speed 1. batches: sequences in its steps.
        schedule: "run", "own_steps" or "own_tokens", see the module.
        quorum_min: 0 is the default, a majority.
    """

    name: str
    speeds: tuple[int, ...] = (1, 1, 1, 1)
    batches: tuple[int, ...] = (BATCH,) * 4
    schedule: str = "run"
    quorum_min: int = 0


MIXED: Final = (1, 1, 2, 4)
ARMS: Final = (
    Arm("equal"),
    Arm("mixed", MIXED),
    Arm("mixed_own_steps", MIXED, schedule="own_steps"),
    Arm("mixed_own_tokens", MIXED, schedule="own_tokens"),
    Arm("mixed_quorum_2", MIXED, quorum_min=2),
    Arm("mixed_quorum_1", MIXED, quorum_min=1),
    Arm("batches", batches=(8, 8, 4, 16)),
    Arm("one_slow", (10, 10, 10, 1)),
    Arm("one_fast", (1, 1, 1, 10)),
)


def tick_of(arm: Arm) -> list[int]:
    """Ticks of one step of each learner; every fastest learner of an arm steps in at most one tick."""
    return [TICKS_PER_STEP // speed for speed in arm.speeds]


def train(arm: Arm, *, steps: int, seed: int, corpus: Corpus) -> dict[str, Any]:
    """One run: its loss and who was in the merges."""
    started = time.perf_counter()
    model = ModelSettings(context=CONTEXT)
    periods = tick_of(arm)
    tokens_per_step = [batch * CONTEXT for batch in arm.batches]
    tokens_max = steps * len(arm.speeds) * BATCH * CONTEXT
    # What the median learner will have made by then.
    rate = sum(tokens / period for tokens, period in zip(tokens_per_step, periods, strict=True))
    ticks = tokens_max / rate
    median = sorted(periods, reverse=True)[(len(periods) - 1) // 2]
    median_steps = ticks / median
    length = {"run": median_steps, "own_steps": median_steps, "own_tokens": float(steps)}[arm.schedule]
    inner = Inner(lr=RATE, steps=max(1, round(length)), floor=FLOOR_OPEN if arm.schedule == "own_tokens" else 0.0)
    lr, momentum = default_outer(steps // SYNC_EVERY)
    settings = RunSettings(
        fragments=4,
        sync_every=SYNC_EVERY,
        overlap_steps=2,
        outer_lr=lr,
        outer_momentum=momentum,
        quorum_min=arm.quorum_min,
    )
    values = sum(int(np.prod(shape)) for shape in parameter_shapes(model).values())
    theta: F32 = np.empty((len(periods), values), np.float32)
    stacks = [Stack(model, inner, replicas=1, seed=seed, rows=theta[m : m + 1]) for m in range(len(periods))]
    samplers = [
        RegionSampler(corpus, region=m, regions=len(periods), batch=batch, context=CONTEXT, seed=seed)
        for m, batch in enumerate(arm.batches)
    ]
    rounds = UnevenRounds(
        settings,
        stacks[0].shapes,
        theta,
        tokens_per_step=tokens_per_step,
        periods=periods,
        sync_ticks=max(1, round(statistics.median(periods))),
    )
    tick, trained = 0, 0
    while trained < tokens_max:
        tick += 1
        stepping = [m for m, period in enumerate(periods) if tick % period == 0]
        for m in stepping:
            # The run's position is known up to a step of the median learner.
            at = 1 + tick / median if arm.schedule == "run" else rounds.steps[m] + 1
            stacks[m].step(samplers[m].next_batch()[None], at=min(at, inner.steps))
            trained += tokens_per_step[m]
        for m in stepping:
            rounds.boundary(m, tick)
        if stepping:
            rounds.lead(tick)
    rounds.finish_uneven()
    loss = stacks[0].loss(rounds.global_parameters(), corpus.held_out_windows(HELD_OUT_WINDOWS, CONTEXT))
    seen = rounds.seen
    return {
        "arm": arm.name,
        "seed": seed,
        "loss": loss,
        "rounds": seen.rounds,
        "steps": rounds.steps,
        "participation": [included / max(1, seen.rounds) for included in seen.included],
        "steps_missing_max": seen.steps_missing_max,
        "grace_ms_median": statistics.median(seen.graces_ns) / 1e6,
        "grace_steps_max": max(seen.graces_ns) / (median * TICK_NS),
        "round_steps_mean": statistics.fmean(seen.open_ticks) / median,
        "seconds": time.perf_counter() - started,
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an arm came to, over the seeds.

    Attributes:
        losses: held-out loss of the merged parameters by seed, nats per byte.
        percent: mean loss above that of equal learners. error: its standard error, from the pairs of equal seeds.
        participation: of each learner, the least of all seeds. steps: of each learner in the first seed.
    """

    name: str
    losses: list[float]
    percent: float | None
    error: float | None
    participation: list[float]
    steps: list[int]
    rounds: int


def summarise(results: Sequence[dict[str, Any]]) -> list[Outcome]:
    """Each arm beside `equal`."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for one in results:
        by_arm.setdefault(one["arm"], []).append(one)
    reference = {one["seed"]: one["loss"] for one in by_arm.get("equal", ())}
    found = []
    for name, runs in by_arm.items():
        gaps = [100 * (one["loss"] / reference[one["seed"]] - 1) for one in runs if one["seed"] in reference]
        found.append(
            Outcome(
                name,
                [one["loss"] for one in runs],
                statistics.fmean(gaps) if gaps else None,
                statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
                [min(column) for column in zip(*(one["participation"] for one in runs), strict=True)],
                runs[0]["steps"],
                runs[0]["rounds"],
            )
        )
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| arm | loss (mean) | to equal | steps | rounds | participation |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        gap = "" if one.percent is None else f"{one.percent:+.2f} %"
        error = "" if one.error is None else f" ± {one.error:.2f}"
        steps = ", ".join(str(count) for count in one.steps)
        shares = ", ".join(f"{share:.0%}" for share in one.participation)
        mean = statistics.fmean(one.losses)
        lines.append(f"| {one.name} | {mean:.4f} | {gap}{error} | {steps} | {one.rounds} | {shares} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", default="", help=f"comma-separated, of {', '.join(arm.name for arm in ARMS)}")
    parser.add_argument("--steps", type=int, default=1200, help="of each of four equal learners")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    by_name = {arm.name: arm for arm in ARMS}
    names = [name for name in options.arms.split(",") if name] or list(by_name)
    unknown = sorted(set(names) - set(by_name))
    if unknown:
        parser.error(f"unknown arms {', '.join(unknown)}: use {', '.join(by_name)}")
    corpus = load_corpus(())
    results = []
    for seed in range(1, options.seeds + 1):
        for name in names:
            results.append(train(by_name[name], steps=options.steps, seed=seed, corpus=corpus))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    outcomes = summarise(results)
    if options.json:
        print(json.dumps({"steps": options.steps, "runs": results, "arms": [asdict(one) for one in outcomes]}))
    else:
        print(table(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
