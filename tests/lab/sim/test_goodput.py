"""The paper's goodput table, by formula and by simulation."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from diloco_node.lab.sim.goodput import (
    CHIPS,
    MODEL,
    YEAR_S,
    GoodputCell,
    _poisson,
    _return_scale,
    _union_s,
    _unit_return,
    closed_form,
    failure_plan,
    root_mean_square,
    simulate_cluster,
    table,
)

STEPS = 2500
LEARNERS = (1, 2, 4, 8, 16)


@pytest.fixture(scope="module")
def cells() -> list[GoodputCell]:
    return table(seed=1, steps=STEPS)


def test_the_formula_gives_the_elastic_cells(cells: list[GoodputCell]) -> None:
    elastic = [cell for cell in cells if cell.is_elastic]
    assert len(elastic) == 25
    off = [cell.goodput_formula - cell.goodput_printed for cell in elastic]
    assert max(abs(one) for one in off) <= 0.04
    assert root_mean_square(off) <= 0.02


def test_the_formula_gives_uptime_and_the_row_without_elasticity(cells: list[GoodputCell]) -> None:
    for cell in cells:
        assert abs(cell.uptime_formula - cell.uptime_printed) <= 0.04, cell
        if not cell.is_elastic:
            assert abs(cell.goodput_formula - cell.goodput_printed) <= 0.04, cell


def test_the_simulation_is_near_the_paper_and_near_the_formula(cells: list[GoodputCell]) -> None:
    for cell in cells:
        assert abs(cell.goodput - cell.goodput_printed) <= 0.06, cell
        assert abs(cell.goodput - cell.goodput_formula) <= 0.04, cell
        assert abs(cell.uptime - cell.uptime_formula) <= 0.04, cell
    elastic = [cell for cell in cells if cell.is_elastic]
    assert root_mean_square([cell.goodput - cell.goodput_printed for cell in elastic]) <= 0.025


def test_more_learners_and_fewer_chips_are_better(cells: list[GoodputCell]) -> None:
    elastic = {(cell.learners, cell.chips): cell for cell in cells if cell.is_elastic}
    for chips in CHIPS:
        row = [elastic[learners, chips].goodput for learners in (1, 2, 4, 8, 16)]
        assert row == sorted(row), (chips, row)
    for learners in (1, 2, 4, 8, 16):
        column = [elastic[learners, chips].goodput for chips in CHIPS]
        assert column == sorted(column, reverse=True), (learners, column)


def is_rule_of_thumb_kept(cells: list[GoodputCell], tolerance: float) -> bool:
    """The paper's rule: as many times the learners bear as many times the chips, within `tolerance`."""
    elastic = {(cell.learners, cell.chips): cell.goodput_formula for cell in cells if cell.is_elastic}
    pairs = [
        (elastic[fewer, chips], elastic[more, larger])
        for fewer, more in pairwise(LEARNERS)
        for chips, larger in pairwise(CHIPS)
    ]
    return all(abs(one - other) <= tolerance for one, other in pairs)


def test_the_rule_of_thumb_holds(cells: list[GoodputCell]) -> None:
    assert is_rule_of_thumb_kept(cells, 0.001)
    broken = [replace(cell, goodput_formula=cell.goodput_formula - 0.01 * (cell.learners == 4)) for cell in cells]
    assert not is_rule_of_thumb_kept(broken, 0.001)


def test_a_seed_gives_the_same_failures_and_another_seed_others() -> None:
    first, again, other = (simulate_cluster(600_000, 4, seed=seed, steps=300) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_without_failures_all_time_is_useful() -> None:
    # Chips so few that none fails in a few hours, but enough for a slice.
    assert simulate_cluster(256, 1, steps=200) == (1.0, 1.0)
    goodput, uptime = closed_form(1, 1)
    assert goodput == pytest.approx(1, abs=0.01)
    assert uptime == pytest.approx(1, abs=1e-5)


def test_the_closed_form_by_hand() -> None:
    # One failure per 10 s on average: 1 - 1/e of the steps are followed by 25 s.
    chips = round(YEAR_S / 10)
    up = 1 / (1 + (1 - math.exp(-1)) * 2.5)
    goodput, uptime = closed_form(chips, 1, model=replace(MODEL, return_s=0.0))
    assert goodput == pytest.approx(up, rel=1e-5)
    assert uptime == pytest.approx(up, rel=1e-5)
    assert closed_form(2 * chips, 2, model=replace(MODEL, return_s=0.0))[1] == pytest.approx(
        1 - (1 - up) ** 2, rel=1e-5
    )


def test_slices_that_are_out_cost_goodput_but_no_uptime() -> None:
    slow = replace(MODEL, return_s=7200.0, slice_chips=1024)
    goodput, uptime = simulate_cluster(150_000, 1, steps=3000, model=slow)
    assert uptime - goodput > 0.1  # 1024 chips x 2 h / year: about a quarter of them are out


def test_uptime_counts_overlapping_learners_once() -> None:
    assert _union_s([]) == 0
    assert _union_s([(5, 7), (0, 2), (1, 3), (1, 2), (3, 4)]) == 6


def test_draws_have_their_means() -> None:
    rng = random.Random(3)
    counts = [_poisson(rng, 0.8) for _ in range(20_000)]
    assert sum(counts) / len(counts) == pytest.approx(0.8, abs=0.03)
    assert counts.count(0) / len(counts) == pytest.approx(math.exp(-0.8), abs=0.02)
    scale = _return_scale(MODEL)
    returns = [scale * _unit_return(rng.random(), MODEL) for _ in range(20_000)]
    assert sum(returns) / len(returns) == pytest.approx(MODEL.return_s, rel=0.03)


@pytest.mark.parametrize(("chips", "steps"), [(100, 1000), (150_000, 99)])
def test_what_can_not_be_simulated_is_refused(chips: int, steps: int) -> None:
    with pytest.raises(ValueError, match="can't be simulated"):
        simulate_cluster(chips, 1, steps=steps)


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
