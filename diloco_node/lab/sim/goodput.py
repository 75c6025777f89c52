"""The paper's goodput table: chips that fail, by a closed form and by an event-driven simulation.

Goodput is the part of the cluster's time in which steps are made, a step with fewer slices counting less; uptime is the
part in which any learner steps. N chips fail independently, each once a year. M learners share them equally. A failing
chip takes its whole slice out of its learner, which then reconfigures, and again when the slice comes back.

The paper publishes neither slice size nor times. What is used here is fitted to its table: a step of 10 s and 25 s lost
per interruption, half at the loss of a slice and half at its return. Without elasticity a learner stands until the
slice is repaired.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3.3 and table 1.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.lab.chaos.fault_plan import FaultPlan, FaultTarget, PlannedFault, draw_gap
from diloco_node.numeric import NS_PER_S

YEAR_S: Final = 365.25 * 86_400.0
RETURNS_BEFORE: Final = 10
"""Failures are drawn for so many mean times of return before a plan begins; fewer than one in 100,000 takes longer."""

CHIPS: Final = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

# Percent, per (learners, elastic): goodput and uptime at each number of chips.
PRINTED: Final = {
    (1, False): ((72, 57, 38, 27, 18), (72, 57, 38, 27, 18)),
    (1, True): ((88, 80, 69, 58, 40), (88, 81, 69, 59, 42)),
    (2, True): ((94, 88, 80, 70, 54), (100, 97, 96, 90, 80)),
    (4, True): ((96, 93, 89, 82, 73), (100, 100, 99, 99, 99)),
    (8, True): ((98, 96, 94, 88, 80), (100, 100, 100, 100, 99)),
    (16, True): ((99, 98, 96, 93, 86), (100, 100, 100, 100, 99)),
}


@dataclass(frozen=True, slots=True)
class FailureModel:
    """What the paper leaves open.

    Attributes:
        step_s: of an inner step.
        down_s, up_s: reconfiguring after a slice was lost, and after it is back.
        slice_chips: chips that go with a failing one.
        return_s: mean time until a slice is back. return_alpha, return_shape: of its exponentiated Weibull law.
        repair_s: mean time that a learner without elasticity waits for its slice, beside down_s and up_s.
    """

    step_s: float = 10.0
    down_s: float = 12.5
    up_s: float = 12.5
    slice_chips: int = 256
    return_s: float = 1200.0
    return_alpha: float = 1.5
    return_shape: float = 1.0
    repair_s: float = 60.0


MODEL: Final = FailureModel()


@dataclass(frozen=True, slots=True)
class GoodputCell:
    """One column of one row of the table; parts of 1.

    Attributes:
        learners: M. is_elastic: a learner goes on with fewer slices.
        chips: N, of all learners.
        goodput_printed, uptime_printed: in the paper.
        goodput_formula, uptime_formula: by `closed_form`.
        goodput, uptime: by `simulate_cluster`; nan when it was not run.
    """

    learners: int
    is_elastic: bool
    chips: int
    goodput_printed: float
    uptime_printed: float
    goodput_formula: float
    uptime_formula: float
    goodput: float = math.nan
    uptime: float = math.nan


def closed_form(
    chips: int, learners: int, *, is_elastic: bool = True, model: FailureModel = MODEL
) -> tuple[float, float]:
    """(goodput, uptime), as parts of 1.

    Per step, a learner is interrupted with probability `1 - e^(-rate step)`, however many chips fail in it, and then
    loses a fixed time. The slices that are out lower goodput by `slice size x mean return time / chip lifetime`.
    """
    rate = chips / (learners * YEAR_S)
    lost_s = model.down_s + model.up_s + (0.0 if is_elastic else model.repair_s)
    up = 1 / (1 + -math.expm1(-rate * model.step_s) * lost_s / model.step_s)
    out = model.slice_chips * model.return_s / YEAR_S if is_elastic else 0.0
    return up * (1 - out), 1 - (1 - up) ** learners


def simulate_cluster(
    chips: int,
    learners: int,
    *,
    is_elastic: bool = True,
    seed: int = 0,
    steps: int = 6000,
    model: FailureModel = MODEL,
) -> tuple[float, float]:
    """(goodput, uptime) of learners that fail independently, over `steps` x step_s of virtual time.

    Args:
        seed: everything random follows from it.
        steps: inner steps that a learner without failures would make; at least 100.

    Raises:
        ValueError: fewer than 100 steps, or a learner smaller than a slice.
    """
    slices = chips // learners // model.slice_chips
    if steps < 100 or slices < 1:
        raise ValueError(f"{steps} steps with {slices} slices per learner can't be simulated: at least 100 and 1")
    horizon_s = steps * model.step_s
    done_s = 0.0
    stepping: list[tuple[float, float]] = []
    for learner in range(learners):
        rng = random.Random(f"goodput {seed} {chips} {learners} {is_elastic} {learner}")
        runs = _elastic(rng, slices, horizon_s, model) if is_elastic else _rigid(rng, slices, horizon_s, model)
        for start_s, end_s, live in runs:
            done_s += (end_s - start_s) * live / slices
            stepping.append((start_s, end_s))
    return done_s / (horizon_s * learners), _union_s(stepping) / horizon_s


def _elastic(
    rng: random.Random, slices: int, horizon_s: float, model: FailureModel
) -> Iterator[tuple[float, float, int]]:
    """Runs of steps (start, end, live slices) of a learner that goes on with what it has.

    At the end of each step it sees which slices were lost or came back in it; whatever it sees at once costs one
    reconfiguration of each kind.
    """
    returns: list[float] = []
    scale = _return_scale(model)
    now_s = 0.0
    while now_s < horizon_s:
        live = slices - len(returns)
        end_s = min(now_s + model.step_s, horizon_s)
        if live:
            yield now_s, end_s, live
        now_s = end_s
        is_back = bool(returns) and returns[0] <= now_s
        while returns and returns[0] <= now_s:
            heapq.heappop(returns)
        hits = min(_poisson(rng, live * model.slice_chips * model.step_s / YEAR_S), live)
        for _ in range(hits):
            heapq.heappush(returns, now_s + scale * _unit_return(rng.random(), model))
        now_s += model.down_s * (hits > 0) + model.up_s * is_back


def _rigid(
    rng: random.Random, slices: int, horizon_s: float, model: FailureModel
) -> Iterator[tuple[float, float, int]]:
    """The same for a learner that stands until the lost slice is repaired."""
    scale = _return_scale(model) * model.repair_s / model.return_s
    now_s = 0.0
    while now_s < horizon_s:
        end_s = min(now_s + model.step_s, horizon_s)
        yield now_s, end_s, slices
        now_s = end_s
        if _poisson(rng, slices * model.slice_chips * model.step_s / YEAR_S):
            now_s += model.down_s + scale * _unit_return(rng.random(), model) + model.up_s


def failure_plan(
    chips: int, regions: Sequence[str], *, seconds: float, seed: int = 0, model: FailureModel = MODEL
) -> FaultPlan:
    """The model's failures as faults for real learners, second for second: one learner for each region.

    A chip that fails, and its slice that comes back, each interrupt their learner: it is killed. Failures begin long
    before the plan does, so that slices come back from its start on as often as in the end.

    Args:
        chips: of all regions. regions: they share the chips equally. seconds: of the plan. seed: everything random.
    """
    rng = random.Random(f"failures {seed} {chips} {len(regions)}")
    names, scale = sorted(regions), _return_scale(model)
    plan: list[PlannedFault] = []
    now_s = -RETURNS_BEFORE * model.return_s
    while (now_s := now_s + draw_gap(rng, YEAR_S / chips)) < seconds:
        target = FaultTarget(rng.choice(names), "learner")
        back_s = now_s + scale * _unit_return(rng.random(), model)
        plan += [PlannedFault(int(at_s * NS_PER_S), "kill", target) for at_s in (now_s, back_s) if 0 <= at_s < seconds]
    return FaultPlan(tuple(sorted(plan, key=lambda one: one.at_ns)))


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's method: `mean` is below ten here."""
    limit, count, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def _unit_return(uniform: float, model: FailureModel) -> float:
    """Quantile of the exponentiated Weibull law of scale 1: `(-ln(1 - u^(1/alpha)))^(1/shape)`."""
    return math.pow(-math.log1p(-math.pow(uniform, 1 / model.return_alpha)), 1 / model.return_shape)


def _return_scale(model: FailureModel) -> float:
    """The scale that makes the mean `return_s`: the mean of the unit law by the midpoint rule."""
    points = 4096
    mean = sum(_unit_return((index + 0.5) / points, model) for index in range(points)) / points
    return model.return_s / mean


def _union_s(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total_s = reached_s = 0.0
    for start_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def table(
    *, seed: int = 0, steps: int = 6000, is_simulated: bool = True, model: FailureModel = MODEL
) -> list[GoodputCell]:
    """The paper's 30 columns; a few seconds with the simulation, nothing without."""
    cells = []
    for (learners, is_elastic), (goodputs, uptimes) in PRINTED.items():
        for index, chips in enumerate(CHIPS):
            formula = closed_form(chips, learners, is_elastic=is_elastic, model=model)
            simulated = (
                simulate_cluster(chips, learners, is_elastic=is_elastic, seed=seed, steps=steps, model=model)
                if is_simulated
                else (math.nan, math.nan)
            )
            printed = goodputs[index] / 100, uptimes[index] / 100
            cells.append(GoodputCell(learners, is_elastic, chips, *printed, *formula, *simulated))
    return cells


def root_mean_square(differences: list[float]) -> float:
    """Of at least one number."""
    return math.sqrt(sum(one * one for one in differences) / len(differences))
