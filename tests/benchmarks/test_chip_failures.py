"""The paper's failures of chips as faults for real learners."""

import random

import pytest
from chip_failures import MODEL, YEAR_S, failure_plan, return_scale, unit_return


def test_returns_have_their_mean() -> None:
    rng = random.Random(3)
    scale = return_scale(MODEL)
    returns = [scale * unit_return(rng.random(), MODEL) for _ in range(20_000)]
    assert sum(returns) / len(returns) == pytest.approx(MODEL.return_s, rel=0.03)


def test_a_plan_of_the_models_failures_has_as_many_as_the_model() -> None:
    """Failures at the chips' rate, and once the run is under way as many returns, evenly over the time."""
    regions, seconds = ("a", "b", "c", "d"), 40_000.0
    plan = failure_plan(2_400_000, regions, seconds=seconds, seed=2)
    times = [fault.at_ns / 1e9 for fault in plan.faults]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < seconds
    expected = 2 * seconds * 2_400_000 / YEAR_S
    assert len(times) == pytest.approx(expected, rel=0.05)
    assert sum(at < seconds / 2 for at in times) == pytest.approx(expected / 2, rel=0.06)
    counts = [sum(fault.target.region == region for fault in plan.faults) for region in regions]
    assert all(count == pytest.approx(expected / 4, rel=0.12) for count in counts)
    assert failure_plan(2_400_000, tuple(reversed(regions)), seconds=seconds, seed=2) == plan
    assert failure_plan(2_400_000, regions, seconds=seconds, seed=3) != plan
