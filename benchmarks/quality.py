"""How well does a model train under diloco-node, compared with data-parallel and synchronous DiLoCo?

    python benchmarks/quality.py                      # everything: hours on one core, resumes where it stopped
    python benchmarks/quality.py --quick              # 1,200 steps, one seed, the undisturbed arms
    python benchmarks/quality.py --arms ours,half --steps 1200 --seeds 1 --json

The real cores, codec and apply rule run in lock-step virtual time, M learners in one process, without sockets
(`quality_merge`), on the built-in model and data (`quality_stack`). Every arm sees the same data at the same step.

The inner learning rate of every arm is the best of three by the mean of all seeds, at `--tune-steps`, by default at
full length; then, where an arm's outer optimizer is tuned too, the best pair at that rate, by the same mean. (One seed
chooses badly: a run scatters by 0.6 %, as much as neighbouring rates differ.)
Arms that differ from another only by a disturbance which nobody plans (a learner cut off, or gone wild) use that other
arm's rate.
Finished runs are kept in a JSON-lines file, so an interrupted benchmark goes on; `REVISION` is part of their key and
grows with every change that moves numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from quality_merge import Attendance, Rounds
from quality_stack import Batches, Inner, Stack

from diloco_node.config.resolve import default_outer
from diloco_node.core.types import CarryMode, Codec, MergeRule, RunSettings
from diloco_node.learner.builtin.adamw import BETAS
from diloco_node.learner.builtin.data import Corpus, load_corpus
from diloco_node.learner.builtin.shape import ModelSettings

REVISION: Final = 5
LEARNERS: Final = 4
BATCH: Final = 8
CONTEXT: Final = 32
SYNC_EVERY: Final = 16
RATES: Final = (3e-3, 4e-3, 6e-3)
HELD_OUT_WINDOWS: Final = 2048
CUT_STARTS_AT: Final = 0.3
"""The cut begins after this part of the run: after the warm-up, early enough for 100 of 250 cycles."""

SYNC_OUTER: Final = ((1.0, 0.0), (0.7, 0.6), (0.5, 0.6), (0.4, 0.8), (0.7, 0.9))
"""Tuned over, for synchronous DiLoCo: local SGD, three moderate ones, and the paper's 0.7 / 0.9."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        name: as in `--arms`.
        rounds: settings of the rounds; None is data-parallel.
        included: learners in each round (in turn, in random order); 0 means all.
        cut_cycles: how many cycles of H steps the last learner is cut off.
        keep_cut_work: what it learnt meanwhile goes through the carry-over rule, or is thrown away.
        share: rounds are scaled by included / live.
        outlier: the last learner's outer gradients are made so many times as long in every round; 0: they are not.
        beta2: of AdamW. Learners of batch 8 are better with the built-in trainer's 0.99, a batch of 32 with 0.95, so
            data-parallel gets what is best for it.
        rate_of: the arm whose inner learning rate is taken; "" means that its own is tuned.
        outer_choices: pairs of outer rate and momentum that are tuned together with the inner rate.
    """

    name: str
    rounds: RunSettings | None
    included: int = 0
    cut_cycles: int = 0
    keep_cut_work: bool = True
    share: bool = True
    outlier: float = 0.0
    beta2: float = BETAS[1]
    rate_of: str = ""
    outer_choices: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One training run."""

    arm: Arm
    rate: float
    seed: int
    steps: int

    def key(self) -> str:
        """Names everything that the result depends on."""
        arm = asdict(self.arm)
        for cosmetic in ("name", "rate_of", "outer_choices"):
            arm.pop(cosmetic)
        if not self.arm.outlier:
            arm.pop("outlier")  # runs from before there was any keep their key
        shape = (LEARNERS, BATCH, CONTEXT, SYNC_EVERY)
        return json.dumps([REVISION, arm, self.rate, self.seed, self.steps, shape], sort_keys=True)


@dataclass(slots=True)
class Summary:
    """What an arm came to.

    Attributes:
        rate, outer: the chosen inner rate, and outer rate and momentum.
        losses: held-out loss of the global parameters per seed, nats per byte.
        tried: mean loss of the tuning runs over the seeds, by their settings.
    """

    name: str
    rate: float
    outer: tuple[float, float] | None
    losses: list[float]
    tried: dict[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.losses)


def arms_for(steps: int) -> list[Arm]:
    """All arms that fit into so many steps."""
    lr, momentum = default_outer(steps // SYNC_EVERY)
    ours = RunSettings(fragments=4, sync_every=SYNC_EVERY, overlap_steps=2, outer_lr=lr, outer_momentum=momentum)
    overwrite = replace(ours, carry=CarryMode.OVERWRITE)
    sync = replace(
        overwrite,
        fragments=1,
        overlap_steps=0,
        merge=MergeRule.AVG,
        codec_up=Codec.FP32,
        codec_down=Codec.FP32,
    )
    arms = [
        Arm("data_parallel", None, beta2=0.95),
        Arm("sync_diloco", sync, outer_choices=SYNC_OUTER),
        Arm("ours", ours),
        Arm("overwrite", overwrite),
        Arm("avg", replace(ours, merge=MergeRule.AVG)),
        Arm("half", ours, included=2),
        Arm("half_overwrite", overwrite, included=2),
        Arm("one", ours, included=1),
        Arm("one_overwrite", overwrite, included=1),
        Arm("outlier", ours, outlier=1000.0, rate_of="ours"),
    ]
    for cycles in (4, 25, 100):
        if (CUT_STARTS_AT * steps / SYNC_EVERY) + cycles + 10 <= steps / SYNC_EVERY:
            arms.append(Arm(f"cut_{cycles}", ours, cut_cycles=cycles, rate_of="ours"))
            arms.append(Arm(f"cut_{cycles}_dropped", ours, cut_cycles=cycles, keep_cut_work=False, rate_of="ours"))
    return arms


def attendance(included: int, seed: int) -> Attendance | None:
    """Who is in which round: everybody once in a block of M / included rounds, in random order; None: all."""
    if not included:
        return None
    turns = LEARNERS // included

    def members(fragment: int, version: int) -> Sequence[int]:
        block, turn = divmod(version, turns)
        order = np.random.default_rng([seed, 7, fragment, block]).permutation(LEARNERS)
        return sorted(int(m) for m in order[turn * included : (turn + 1) * included])

    return members


def train(job: Job, corpus: Corpus, *, compiled: bool = False) -> dict[str, Any]:
    """One run from start to end: the record that is kept. `compiled`: see `quality_stack.Stack`."""
    arm, started = job.arm, time.perf_counter()
    model = ModelSettings(context=CONTEXT)
    inner = Inner(lr=job.rate, steps=job.steps, beta2=arm.beta2)
    stack = Stack(model, inner, replicas=LEARNERS if arm.rounds else 1, seed=job.seed, compiled=compiled)
    data = Batches(corpus, learners=LEARNERS, batch=BATCH, context=CONTEXT, seed=job.seed)
    rounds = _rounds(job, stack) if arm.rounds else None
    for step in range(1, job.steps + 1):
        stack.step(data.separate(step - 1) if rounds else data.together(step - 1))
        if rounds and step < job.steps:
            rounds.after_step(step)
    if rounds:
        rounds.finish(job.steps)
    final = rounds.global_parameters() if rounds else stack.theta[0]
    loss = stack.loss(final, corpus.held_out_windows(HELD_OUT_WINDOWS, CONTEXT))
    return {"key": job.key(), "arm": arm.name, "loss": loss, "seconds": time.perf_counter() - started}


def _rounds(job: Job, stack: Stack) -> Rounds:
    arm, settings = job.arm, job.arm.rounds
    assert settings is not None
    cut = None
    if arm.cut_cycles:
        start = int(CUT_STARTS_AT * job.steps) // settings.sync_every * settings.sync_every
        cut = (start, start + arm.cut_cycles * settings.sync_every)
    return Rounds(
        settings,
        stack.shapes,
        stack.theta,
        tokens_per_step=BATCH * CONTEXT,
        attendance=attendance(arm.included, job.seed),
        cut_steps=cut,
        keep_cut_work=arm.keep_cut_work,
        share=arm.share,
        outlier=arm.outlier,
    )


class Cache:
    """Finished runs in a JSON-lines file; a line is written when its run ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, float] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                self._known[record["key"]] = record["loss"]

    def loss(self, job: Job, run: Callable[[Job], dict[str, Any]]) -> float:
        """The loss of a job, from the file or from running it."""
        key = job.key()
        if key not in self._known:
            record = run(job)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            self._known[key] = record["loss"]
            outer = f" outer {job.arm.rounds.outer_lr}/{job.arm.rounds.outer_momentum}" if job.arm.rounds else ""
            print(
                f"{job.arm.name:>16} lr {job.rate:g}{outer} seed {job.seed}: {record['loss']:.4f} "
                f"({record['seconds']:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
        return self._known[key]


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often.

    Attributes:
        steps: of a measured run. tune_steps: of a run that only helps to choose the inner rate.
        seeds: every setting that is weighed runs with all of them.
        rates: the inner learning rates to choose from; of a single one nothing is tuned.
    """

    steps: int
    tune_steps: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = RATES


def summarise(
    arms: Sequence[Arm], plan: Plan, loss_of: Callable[[Job], float], all_arms: Sequence[Arm]
) -> list[Summary]:
    """Tune each arm, then run it with what was chosen; both with all seeds."""
    by_name = {arm.name: arm for arm in all_arms}
    result = []
    for arm in arms:
        tried: dict[str, float] = {}
        rate = _tuned_rate(by_name[arm.rate_of or arm.name], plan, loss_of, tried)
        variant = _tuned_outer(arm, rate, plan, loss_of, tried)
        losses = _losses(variant, rate, plan.steps, plan, loss_of)
        outer = (variant.rounds.outer_lr, variant.rounds.outer_momentum) if variant.rounds else None
        result.append(Summary(arm.name, rate, outer, losses, tried))
    return result


def _losses(arm: Arm, rate: float, steps: int, plan: Plan, loss_of: Callable[[Job], float]) -> list[float]:
    return [loss_of(Job(arm, rate, seed, steps)) for seed in plan.seeds]


def _tuned_rate(arm: Arm, plan: Plan, loss_of: Callable[[Job], float], tried: dict[str, float]) -> float:
    if len(plan.rates) == 1:
        return plan.rates[0]
    found = {rate: statistics.fmean(_losses(arm, rate, plan.tune_steps, plan, loss_of)) for rate in plan.rates}
    tried.update({f"{_label(arm, rate)}, {plan.tune_steps} steps": loss for rate, loss in found.items()})
    return min(found, key=found.__getitem__)


def _tuned_outer(arm: Arm, rate: float, plan: Plan, loss_of: Callable[[Job], float], tried: dict[str, float]) -> Arm:
    variants = _variants(arm)
    if len(variants) == 1:
        return variants[0]
    losses = [statistics.fmean(_losses(variant, rate, plan.steps, plan, loss_of)) for variant in variants]
    labels = [f"{_label(variant, rate)}, {plan.steps} steps" for variant in variants]
    tried.update(zip(labels, losses, strict=True))
    return variants[losses.index(min(losses))]


def _variants(arm: Arm) -> list[Arm]:
    if not arm.outer_choices or arm.rounds is None:
        return [arm]
    return [
        replace(arm, rounds=replace(arm.rounds, outer_lr=lr, outer_momentum=momentum))
        for lr, momentum in arm.outer_choices
    ]


def _label(arm: Arm, rate: float) -> str:
    outer = f" outer {arm.rounds.outer_lr:g}/{arm.rounds.outer_momentum:g}" if arm.rounds else ""
    return f"lr {rate:g}{outer}"


def verdicts(summaries: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """What the project promises, with the figure that decides; only for arms that were run."""
    mean = {one.name: one.mean for one in summaries}
    checks: dict[str, dict[str, Any]] = {}

    def check(name: str, worse: str, better: str, percent_max: float) -> None:
        if worse in mean and better in mean:
            percent = 100 * (mean[worse] / mean[better] - 1)
            checks[name] = {"percent": round(percent, 3), "percent_max": percent_max, "holds": percent <= percent_max}

    check("ours is no worse than synchronous DiLoCo", "ours", "sync_diloco", 0.0)
    check("ours is within 2 % of data-parallel", "ours", "data_parallel", 2.0)
    for part in ("half", "one"):
        check(f"{part}: at most 2 % worse than overwrite", part, f"{part}_overwrite", 2.0)
    for cycles in (4, 25, 100):
        check(f"cut_{cycles}: no worse than work thrown away", f"cut_{cycles}", f"cut_{cycles}_dropped", 0.0)
    return checks


def table(summaries: Sequence[Summary]) -> str:
    """Markdown."""
    reference = next((one.mean for one in summaries if one.name == "data_parallel"), None)
    lines = [
        "| arm | inner lr | outer lr / momentum | loss (mean) | spread | to data-parallel |",
        "|---|---|---|---|---|---|",
    ]
    for one in summaries:
        outer = f"{one.outer[0]:g} / {one.outer[1]:g}" if one.outer else ""
        spread = max(one.losses) - min(one.losses)
        gap = f"{100 * (one.mean / reference - 1):+.2f} %" if reference else ""
        lines.append(f"| {one.name} | {one.rate:g} | {outer} | {one.mean:.4f} | {spread:.4f} | {gap} |")
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", default="", help="comma-separated; default: all")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tune-steps", type=int, default=4000, help="of the runs that choose the inner learning rate")
    parser.add_argument("--rates", default="", help="inner learning rates, comma-separated; one: nothing is tuned")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--quick", action="store_true", help="1,200 steps, one seed, data_parallel sync_diloco ours")
    parser.add_argument("--cache", type=Path, default=Path("runs/quality.jsonl"))
    parser.add_argument("--compile", action="store_true", help="a fifth faster; needs a C++ compiler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.seeds = 1200, 1
        options.arms = options.arms or "data_parallel,sync_diloco,ours"
    known = [arm.name for arm in arms_for(options.steps)]
    unknown = sorted(set(filter(None, options.arms.split(","))) - set(known))
    if unknown:
        parser.error(f"unknown arms {', '.join(unknown)}; at {options.steps} steps there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and print it."""
    options = parsed(arguments)
    torch.set_num_threads(1)
    corpus, cache, every = load_corpus(), Cache(options.cache), arms_for(options.steps)
    wanted = [arm for arm in every if not options.arms or arm.name in options.arms.split(",")]

    def loss_of(job: Job) -> float:
        return cache.loss(job, lambda job: train(job, corpus, compiled=options.compile))

    rates = tuple(float(rate) for rate in options.rates.split(",")) if options.rates else RATES
    plan = Plan(options.steps, min(options.tune_steps, options.steps), tuple(range(1, options.seeds + 1)), rates)
    summaries = summarise(wanted, plan, loss_of, every)
    checks = verdicts(summaries)
    if options.json:
        arms = [{**asdict(one), "mean": one.mean} for one in summaries]
        print(json.dumps({"steps": options.steps, "seeds": plan.seeds, "arms": arms, "checks": checks}))
        return 0
    print(table(summaries))
    for name, one in checks.items():
        print(f"{'yes' if one['holds'] else 'NO '}  {name}: {one['percent']:+.2f} % (at most {one['percent_max']:g} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
