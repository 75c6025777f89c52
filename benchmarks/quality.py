"""How well does a model train under diloco-node, compared with data-parallel and synchronous DiLoCo?

    python benchmarks/quality.py                      # everything: hours on one core, resumes where it stopped
    python benchmarks/quality.py --quick              # 1,200 steps, one seed, the undisturbed arms
    python benchmarks/quality.py --arms ours,half --steps 1200 --seeds 1 --json
    python benchmarks/quality.py --arms data_parallel,ours --size 1m --every 30 --steps 2000
    python benchmarks/quality.py --arms ours --rates 0.004 --codec topk:12.5% --every 8

The real cores, codec and apply rule run in lock-step virtual time, M learners in one process, without sockets
(`quality_merge`), on the built-in model and data (`quality_stack`). Every arm sees the same data at the same step.

The inner learning rate of every arm is the best of three by the mean of all seeds, at `--tune-steps`, by default at
full length; then, where an arm's outer optimizer is tuned too, the best pair at that rate, by the same mean. (One seed
chooses badly: a run scatters by 0.6 %, as much as neighbouring rates differ.)
Arms that differ from another only by a disturbance which nobody plans (a learner cut off, or gone wild) use that other
arm's rate.
Finished runs are kept in a JSON-lines file, so an interrupted benchmark goes on; `REVISION` is part of their key and
grows with every change that moves numbers. `quality_lines.py` makes tables of such a file, whatever its runs were.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from quality_codecs import Sparse, SparseRounds
from quality_lines import Lines, settings_of, table
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

SIZES: Final = {
    "0.13m": ModelSettings(context=CONTEXT),
    "1m": ModelSettings(layers=5, dim=128, heads=4, context=CONTEXT),
    "10m": ModelSettings(layers=6, dim=384, heads=6, context=CONTEXT),
    "30m": ModelSettings(layers=9, dim=512, heads=8, context=CONTEXT),
}
SMALLEST: Final = "0.13m"
OUTER_TOTAL: Final = 1.25
"""lr / (1 - mu) of the default pair 0.5 / 0.6 (D-Q5)."""

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
        sparse: what learners send instead of the settings' codec; None: that codec.
        outer_total: see `quality_merge.Rounds`.
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
    sparse: Sparse | None = None
    outer_total: float = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """One training run. size: one of `SIZES`."""

    arm: Arm
    rate: float
    seed: int
    steps: int
    size: str = SMALLEST
    learners: int = LEARNERS

    def key(self) -> str:
        """Names everything that the result depends on."""
        arm = asdict(self.arm)
        for cosmetic in ("name", "rate_of", "outer_choices"):
            arm.pop(cosmetic)
        for late in ("outlier", "sparse", "outer_total"):
            if not arm[late]:
                arm.pop(late)  # runs from before there was any keep their key
        shape = (self.learners, BATCH, CONTEXT, SYNC_EVERY, *([self.size] if self.size != SMALLEST else []))
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


def arms_for(steps: int, every: int = SYNC_EVERY) -> list[Arm]:
    """All arms that fit into so many steps, merged every so many."""
    lr, momentum = default_outer(steps // every)
    ours = RunSettings(fragments=4, sync_every=every, overlap_steps=2, outer_lr=lr, outer_momentum=momentum)
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
        if (CUT_STARTS_AT * steps / every) + cycles + 10 <= steps / every:
            arms.append(Arm(f"cut_{cycles}", ours, cut_cycles=cycles, rate_of="ours"))
            arms.append(Arm(f"cut_{cycles}_dropped", ours, cut_cycles=cycles, keep_cut_work=False, rate_of="ours"))
    return arms


def varied(arm: Arm, codec: str, merge: str, outer: str) -> Arm:
    """The arm with another codec up, merge rule or outer rates, where the texts of the command line say so.

    Raises ValueError: a text means nothing.
    """
    if arm.rounds is None:
        return arm
    name, *numbers = codec.split(":")
    if name in ("topk", "2bit"):
        share = float(numbers.pop(0).rstrip("%")) / 100 if name == "topk" else 1.0
        flush = numbers[-1:] != ["drop"]
        arm = replace(arm, sparse=Sparse(share, *map(float, numbers if flush else numbers[:-1]), flush=flush))
    elif codec:
        arm = replace(arm, rounds=replace(arm.rounds, codec_up=Codec(codec)))
    rounds = replace(arm.rounds, merge=MergeRule(merge)) if merge else arm.rounds
    if outer.startswith("auto"):
        return replace(arm, rounds=rounds, outer_choices=(), outer_total=float(outer.partition(":")[2] or OUTER_TOTAL))
    if outer:
        lr, momentum = map(float, outer.split("/"))
        return replace(arm, rounds=replace(rounds, outer_lr=lr, outer_momentum=momentum), outer_choices=())
    return replace(arm, rounds=rounds)


def attendance(included: int, seed: int, learners: int = LEARNERS) -> Attendance | None:
    """Who is in which round: everybody once in a block of M / included rounds, in random order; None: all."""
    if not included:
        return None
    turns = learners // included

    def members(fragment: int, version: int) -> Sequence[int]:
        block, turn = divmod(version, turns)
        order = np.random.default_rng([seed, 7, fragment, block]).permutation(learners)
        return sorted(int(m) for m in order[turn * included : (turn + 1) * included])

    return members


def train(job: Job, corpus: Corpus, *, compiled: bool = False) -> dict[str, Any]:
    """One run from start to end: the record that is kept. `compiled`: see `quality_stack.Stack`."""
    arm, started = job.arm, time.perf_counter()
    model = SIZES[job.size]
    inner = Inner(lr=job.rate, steps=job.steps, beta2=arm.beta2)
    stack = Stack(model, inner, replicas=job.learners if arm.rounds else 1, seed=job.seed, compiled=compiled)
    data = Batches(corpus, learners=job.learners, batch=BATCH, context=CONTEXT, seed=job.seed)
    rounds = _rounds(job, stack) if arm.rounds else None
    for step in range(1, job.steps + 1):
        stack.step(data.separate(step - 1) if rounds else data.together(step - 1))
        if rounds and step < job.steps:
            rounds.after_step(step)
    if rounds:
        rounds.finish(job.steps)
    final = rounds.global_parameters() if rounds else stack.theta[0]
    loss = stack.loss(final, corpus.held_out_windows(HELD_OUT_WINDOWS, CONTEXT))
    result = {"arm": arm.name, "loss": loss, "seconds": round(time.perf_counter() - started, 1)}
    return result | facts(job, rounds, stack.theta.shape[1])


def facts(job: Job, rounds: Rounds | None, parameters: int) -> dict[str, Any]:
    """What readers of a record want to know of its run.

    bits: up, per parameter and 1,000 tokens, of a learner. autocorrelation: of merged gradients, per fragment.
    """
    tokens = job.steps * BATCH * CONTEXT
    known: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "size": job.size,
        "parameters": parameters,
        "learners": job.learners,
        "tokens": tokens * job.learners,
        "steps": job.steps,
        "rate": job.rate,
        "seed": job.seed,
    }
    if rounds:
        settings = rounds.settings
        outer = f"{settings.outer_lr:g} / {settings.outer_momentum:g}"
        known |= {
            "every": settings.sync_every,
            "codec": str(job.arm.sparse or settings.codec_up),
            "merge": str(settings.merge),
            "outer": f"measured, total {rounds.outer_total:g}" if rounds.outer_total else outer,
            "bits": round(1000 * rounds.bits_up / (job.learners * parameters * tokens), 4),
            "autocorrelation": [round(value, 3) for value in rounds.autocorrelation()],
        }
    return known


def _rounds(job: Job, stack: Stack) -> Rounds:
    arm, settings = job.arm, job.arm.rounds
    assert settings is not None
    cut = None
    if arm.cut_cycles:
        start = int(CUT_STARTS_AT * job.steps) // settings.sync_every * settings.sync_every
        cut = (start, start + arm.cut_cycles * settings.sync_every)
    disturbances: dict[str, Any] = {
        "tokens_per_step": BATCH * CONTEXT,
        "attendance": attendance(arm.included, job.seed, job.learners),
        "cut_steps": cut,
        "keep_cut_work": arm.keep_cut_work,
        "share": arm.share,
        "outlier": arm.outlier,
        "outer_total": arm.outer_total,
    }
    if arm.sparse:
        return SparseRounds(settings, stack.shapes, stack.theta, sparse=arm.sparse, **disturbances)
    return Rounds(settings, stack.shapes, stack.theta, **disturbances)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often.

    Attributes:
        steps: of a measured run. tune_steps: of a run that only helps to choose the inner rate.
        seeds: every setting that is weighed runs with all of them.
        rates: the inner learning rates to choose from; of a single one nothing is tuned.
        size, learners: of every run.
    """

    steps: int
    tune_steps: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = RATES
    size: str = SMALLEST
    learners: int = LEARNERS


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
    return [loss_of(Job(arm, rate, seed, steps, plan.size, plan.learners)) for seed in plan.seeds]


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


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arms", default="", help="comma-separated; default: all")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tune-steps", type=int, default=4000, help="of the runs that choose the inner learning rate")
    parser.add_argument("--rates", default="", help="inner learning rates, comma-separated; one: nothing is tuned")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--size", choices=SIZES, default=SMALLEST)
    parser.add_argument("--learners", type=int, default=LEARNERS)
    parser.add_argument("--every", type=int, default=SYNC_EVERY, help="H")
    parser.add_argument(
        "--codec", default="", help="up: int4, ..., topk:12.5%%, 2bit; the last two with :FEEDBACK, :drop"
    )
    parser.add_argument("--merge", default="", help="rda or avg")
    parser.add_argument("--outer", default="", help="RATE/MOMENTUM, or auto[:TOTAL] by the measured autocorrelation")
    parser.add_argument("--quick", action="store_true", help="1,200 steps, one seed, data_parallel sync_diloco ours")
    parser.add_argument("--cache", type=Path, default=Path("runs/quality.jsonl"))
    parser.add_argument("--compile", action="store_true", help="a fifth faster; needs a C++ compiler")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.seeds = 1200, 1
        options.arms = options.arms or "data_parallel,sync_diloco,ours"
    known = [arm.name for arm in arms_for(options.steps, options.every)]
    unknown = sorted(set(filter(None, options.arms.split(","))) - set(known))
    try:
        varied(arms_for(options.steps)[2], options.codec, options.merge, options.outer)
    except (TypeError, ValueError) as error:
        parser.error(f"--codec, --merge or --outer: {error}; see --help")
    if unknown:
        parser.error(f"unknown arms {', '.join(unknown)}; at {options.steps} steps there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and print it."""
    options = parsed(arguments)
    torch.set_num_threads(1)
    corpus, lines, asked = load_corpus(), Lines(options.cache), dict[str, dict[str, Any]]()
    arms = arms_for(options.steps, options.every)
    every = [varied(arm, options.codec, options.merge, options.outer) for arm in arms]
    wanted = [arm for arm in every if not options.arms or arm.name in options.arms.split(",")]

    def loss_of(job: Job) -> float:
        record = lines.record(job.key(), partial(train, job, corpus, compiled=options.compile))
        return float(asked.setdefault(job.key(), record)["loss"])

    rates = tuple(float(rate) for rate in options.rates.split(",")) if options.rates else RATES
    seeds = tuple(range(1, options.seeds + 1))
    tune_steps = min(options.tune_steps, options.steps)
    plan = Plan(options.steps, tune_steps, seeds, rates, options.size, options.learners)
    summaries = summarise(wanted, plan, loss_of, every)
    checks = verdicts(summaries)
    if options.json:
        measured = [{**asdict(one), "mean": one.mean} for one in summaries]
        print(json.dumps({"steps": options.steps, "seeds": plan.seeds, "arms": measured, "checks": checks}))
        return 0
    print(table(settings_of(asked.values())))
    for name, one in checks.items():
        print(f"{'yes' if one['holds'] else 'NO '}  {name}: {one['percent']:+.2f} % (at most {one['percent_max']:g} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
