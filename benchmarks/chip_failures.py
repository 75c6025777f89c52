"""The paper's model of chips that fail, as faults for real learners: a script for `demo --script`.

    python benchmarks/chip_failures.py --chips 2400000 [--regions 4] [--seconds 90] [--seed 0] > paper.jsonl

N chips fail independently, each once a year. The learners share them equally. A failing chip takes its whole slice out
of its learner, which then reconfigures, and again when the slice comes back.

The paper publishes neither slice size nor times. The values here are fitted to its table: a step of 10 s, and 25 s lost
per interruption, half at the loss of a slice and half at its return.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3.3 and table 1.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.lab.chaos.fault_plan import FaultPlan, FaultTarget, PlannedFault, draw_gap
from diloco_node.lab.chaos.fault_script import script_text
from diloco_node.lab.demo.demo_run import NAMES
from diloco_node.numeric import NS_PER_S

YEAR_S: Final = 365.25 * 86_400.0
RETURNS_BEFORE: Final = 10
"""Failures are drawn for so many mean times of return before a plan begins; fewer than one in 100,000 takes longer."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Values that the paper leaves open.

    Attributes:
        step_s: of an inner step. down_s, up_s: reconfiguring after a slice was lost, and after it is back.
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
    names, scale = sorted(regions), return_scale(model)
    plan: list[PlannedFault] = []
    now_s = -RETURNS_BEFORE * model.return_s
    while (now_s := now_s + draw_gap(rng, YEAR_S / chips)) < seconds:
        target = FaultTarget(rng.choice(names), "learner")
        back_s = now_s + scale * unit_return(rng.random(), model)
        plan += [PlannedFault(int(at_s * NS_PER_S), "kill", target) for at_s in (now_s, back_s) if 0 <= at_s < seconds]
    return FaultPlan(tuple(sorted(plan, key=lambda fault: fault.at_ns)))


def unit_return(uniform: float, model: FailureModel) -> float:
    """Quantile of the exponentiated Weibull law of scale 1: `(-ln(1 - u^(1/alpha)))^(1/shape)`."""
    return math.pow(-math.log1p(-math.pow(uniform, 1 / model.return_alpha)), 1 / model.return_shape)


def return_scale(model: FailureModel) -> float:
    """The scale that makes the mean `return_s`: the mean of the unit law by the midpoint rule."""
    points = 4096
    mean = sum(unit_return((index + 0.5) / points, model) for index in range(points)) / points
    return model.return_s / mean


def main() -> None:
    """Print a script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", type=int, required=True, help="of all regions together")
    parser.add_argument("--regions", type=int, default=4, help="as many as the demo's [4]")
    parser.add_argument("--seconds", type=float, default=90.0, help="as long as the demo [90]")
    parser.add_argument("--seed", type=int, default=0, help="of the failures [0]")
    options = parser.parse_args()
    names = NAMES[: options.regions]
    print(script_text(failure_plan(options.chips, names, seconds=options.seconds, seed=options.seed)), end="")


if __name__ == "__main__":
    main()
