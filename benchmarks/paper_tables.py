"""The paper's two tables: goodput under chip failures, and bandwidth; printed, by formula, and simulated.

    python benchmarks/paper_tables.py goodput|bandwidth [--seed 0] [--steps 6000] [--json]

Goodput is the part of the cluster's time in which steps are made; a step with fewer slices counts less. Uptime is the
part in which any learner steps. `chip_failures.py` has the model. Without elasticity a learner stands until the
slice is repaired.

Bandwidth is Gbit/s that a model of 5 B parameters needs, with M = 8 learners. The paper's DiLoCo rows follow only with
a cycle of 100 steps, but its experiments merge every fragment every 24 steps; `bandwidth_honest` says what that takes.

Source: Decoupled DiLoCo (arXiv 2604.21428), section 3.3, tables 1 and 13.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from chip_failures import MODEL, YEAR_S, FailureModel, return_scale, unit_return
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

PAPER_CYCLE_STEPS: Final = 100
"""Steps in which the whole model crosses the links once in the paper's table; its experiments use H = 24."""

PAPER_HIDDEN_STEPS: Final = 36
"""Steps of transfer in such a cycle that cost no compute."""

DATA_PARALLEL_HIDDEN_STEPS: Final = 0.65
"""Part of a step, the backward pass, behind which an all-reduce of gradients hides. Fitted to the paper's cells."""

CHIPS: Final = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

# Percent, per (learners, elastic): goodput and uptime at each number of chips.
GOODPUT_PRINTED: Final = {
    (1, False): ((72, 57, 38, 27, 18), (72, 57, 38, 27, 18)),
    (1, True): ((88, 80, 69, 58, 40), (88, 81, 69, 59, 42)),
    (2, True): ((94, 88, 80, 70, 54), (100, 97, 96, 90, 80)),
    (4, True): ((96, 93, 89, 82, 73), (100, 100, 99, 99, 99)),
    (8, True): ((98, 96, 94, 88, 80), (100, 100, 100, 100, 99)),
    (16, True): ((99, 98, 96, 93, 86), (100, 100, 100, 100, 99)),
}


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
    scale = return_scale(model)
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
            heapq.heappush(returns, now_s + scale * unit_return(rng.random(), model))
        now_s += model.down_s * (hits > 0) + model.up_s * is_back


def _rigid(
    rng: random.Random, slices: int, horizon_s: float, model: FailureModel
) -> Iterator[tuple[float, float, int]]:
    """The same for a learner that stands until the lost slice is repaired."""
    scale = return_scale(model) * model.repair_s / model.return_s
    now_s = 0.0
    while now_s < horizon_s:
        end_s = min(now_s + model.step_s, horizon_s)
        yield now_s, end_s, slices
        now_s = end_s
        if _poisson(rng, slices * model.slice_chips * model.step_s / YEAR_S):
            now_s += model.down_s + scale * unit_return(rng.random(), model) + model.up_s


def _poisson(rng: random.Random, mean: float) -> int:
    """Knuth's method: `mean` is below ten here."""
    limit, count, product = math.exp(-mean), 0, rng.random()
    while product > limit:
        count += 1
        product *= rng.random()
    return count


def _union_s(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total_s = reached_s = 0.0
    for start_s, end_s in sorted(intervals):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def goodput_table(
    *, seed: int = 0, steps: int = 6000, is_simulated: bool = True, model: FailureModel = MODEL
) -> list[GoodputCell]:
    """The paper's 30 columns; a few seconds with the simulation, nothing without."""
    cells = []
    for (learners, is_elastic), (goodputs, uptimes) in GOODPUT_PRINTED.items():
        for index, chips in enumerate(CHIPS):
            formula = closed_form(chips, learners, is_elastic=is_elastic, model=model)
            simulation = (
                simulate_cluster(chips, learners, is_elastic=is_elastic, seed=seed, steps=steps, model=model)
                if is_simulated
                else (math.nan, math.nan)
            )
            paper = goodputs[index] / 100, uptimes[index] / 100
            cells.append(GoodputCell(learners, is_elastic, chips, *paper, *formula, *simulation))
    return cells


def root_mean_square(differences: list[float]) -> float:
    """Of at least one number."""
    return math.sqrt(sum(difference * difference for difference in differences) / len(differences))


VALUES: Final = 5_000_000_000
UTILISATIONS: Final = (0.50, 0.75, 0.90, 0.95, 0.99)
SYNC_EVERY: Final = 24
GIGA: Final = 1e9
DATA_PARALLEL: Final = "data-parallel"
DATA_PARALLEL_UTILISATION_MAX: Final = 0.95
"""The formula for data-parallel holds up to here."""

BLOCK_BITS: Final = {4: 4.125, 8: 8.125, 16: 16.0}
"""Bits per value with a float32 scale per 256."""

OVERHEAD: Final = 1.06


@dataclass(frozen=True, slots=True)
class Setting:
    """One block of the table."""

    name: str
    step_s: float
    datacenters: int


SETTINGS: Final = (Setting("a", 1.0, 2), Setting("b", 5.0, 2), Setting("c", 1.0, 8), Setting("d", 5.0, 8))

# As printed, as text: how many digits are printed says how exact a cell is.
BANDWIDTH_PRINTED: Final = {
    ("a", DATA_PARALLEL): "49 81 104 113 195",
    ("a", "bf16"): "0.58 1.2 1.7 1.9 2.2",
    ("a", "int4"): "0.15 0.29 0.43 0.49 0.53",
    ("b", DATA_PARALLEL): "9.5 16 21 23 49",
    ("b", "bf16"): "0.12 0.23 0.34 0.39 0.43",
    ("b", "int4"): "0.03 0.06 0.08 0.10 0.11",
    ("c", DATA_PARALLEL): "85 140 183 198 391",
    ("c", "bf16"): "1.0 2.0 3.0 3.3 3.8",
    ("c", "int4"): "0.26 0.51 0.75 0.84 0.94",
    ("d", DATA_PARALLEL): "17 28 37 40 49",
    ("d", "bf16"): "0.21 0.40 0.59 0.68 0.75",
    ("d", "int4"): "0.05 0.10 0.15 0.17 0.19",
}
VALUE_BITS: Final = {"bf16": 16, "int4": 4}


@dataclass(frozen=True, slots=True)
class BandwidthCell:
    """One printed number.

    Attributes:
        setting: "a" to "d". method: "data-parallel", "bf16" or "int4".
        utilisation: part of the time that is compute.
        printed: as in the paper, in Gbit/s.
        computed: by formula, in Gbit/s.
        is_covered: the formula is meant to give this cell (not so the 99 % column of data-parallel).
    """

    setting: str
    method: str
    utilisation: float
    printed: str
    computed: float
    is_covered: bool

    @property
    def deviation(self) -> float:
        """Of the computed number from the printed one, as a part of it."""
        return self.computed / float(self.printed) - 1

    @property
    def is_rounding(self) -> bool:
        """The computed number, rounded to as many places as are printed, is the printed one."""
        places = len(self.printed.partition(".")[2])
        return abs(self.computed - float(self.printed)) <= 0.5 / 10.0**places


@dataclass(frozen=True, slots=True)
class Honest:
    """What hides all transfer behind compute, with P = H = 24 and links that are never idle, in Gbit/s.

    Attributes:
        bf16, int4: by the paper's count: bits of values only.
        here: of this program's defaults, int4 up and int8 down: with scales and 6 % wire overhead.
        here_int4: the same with int4 both ways.
    """

    setting: Setting
    bf16: float
    int4: float
    here: float
    here_int4: float


def bandwidth_table() -> tuple[BandwidthCell, ...]:
    """All 60 cells, in the paper's order."""
    return tuple(_cells())


def _cells() -> Iterator[BandwidthCell]:
    for setting in SETTINGS:
        for method in (DATA_PARALLEL, *VALUE_BITS):
            words = BANDWIDTH_PRINTED[setting.name, method].split()
            for utilisation, text in zip(UTILISATIONS, words, strict=True):
                is_covered = method != DATA_PARALLEL or utilisation <= DATA_PARALLEL_UTILISATION_MAX
                yield BandwidthCell(
                    setting.name, method, utilisation, text, _bandwidth(setting, method, utilisation), is_covered
                )


def ring_factor(places: int) -> Fraction:
    """`2 (D - 1) / D`: how often each byte of an all-reduce among D places leaves, and enters, each of them."""
    return Fraction(2 * (places - 1), places)


def _bandwidth(setting: Setting, method: str, utilisation: float) -> float:
    if method == DATA_PARALLEL:
        waits = 1 / utilisation - 1 + DATA_PARALLEL_HIDDEN_STEPS  # steps of waiting per step of compute
        return 16 * VALUES * float(ring_factor(setting.datacenters)) / (setting.step_s * waits) / GIGA
    # The paper's own figure for DiLoCo. The constants are fitted to its cells, and give all 40 of them.
    hidden = PAPER_CYCLE_STEPS * (1 / utilisation - 1) + PAPER_HIDDEN_STEPS
    bits = VALUE_BITS[method] * VALUES * float(ring_factor(setting.datacenters))
    return bits / (setting.step_s * hidden) / GIGA


def bandwidth_honest() -> tuple[Honest, ...]:
    """For each block of the table, the rate at which H = 24 costs no compute."""
    return tuple(
        Honest(
            setting,
            bf16=_hidden(setting, 16),
            int4=_hidden(setting, 4),
            here=OVERHEAD * _hidden(setting, (BLOCK_BITS[4] + BLOCK_BITS[8]) / 2),
            here_int4=OVERHEAD * _hidden(setting, BLOCK_BITS[4]),
        )
        for setting in SETTINGS
    )


def _hidden(setting: Setting, bits: float) -> float:
    """Gbit/s that move the whole model once in H steps over links that are never idle: compute waits for nothing."""
    return bits * VALUES * float(ring_factor(setting.datacenters)) / (setting.step_s * SYNC_EVERY) / GIGA


def bandwidth_document() -> dict[str, Any]:
    """Every cell of the paper's table with our figure, and the honest figures; rates in Gbit/s."""
    return {
        "parameters": VALUES,
        "settings": {setting.name: dataclasses.asdict(setting) for setting in SETTINGS},
        "cells": [
            {**dataclasses.asdict(cell), "deviation": cell.deviation, "is_rounding": cell.is_rounding}
            for cell in bandwidth_table()
        ],
        "sync_every": SYNC_EVERY,
        "honest": [dataclasses.asdict(need) for need in bandwidth_honest()],
    }


def render_bandwidth(document: Mapping[str, Any]) -> Any:
    """Two tables: printed / computed, and what P = H = 24 takes."""
    columns = [f"{utilisation:.0%}" for utilisation in UTILISATIONS]
    table = _table("printed/computed", "", *columns)
    cells = list(document["cells"])
    for start in range(0, len(cells), len(columns)):
        row = cells[start : start + len(columns)]
        setting = document["settings"][row[0]["setting"]]
        figures = (f"{cell['printed']}/{_figure(cell)}" for cell in row)
        table.add_row(_setting(setting) if row[0]["method"] == DATA_PARALLEL else "", row[0]["method"], *figures)
    honest = _table("links never idle", "", "bf16", "int4", "here: int4 up, int8 down", "here: int4 both")
    for need in document["honest"]:
        rates = (f"{need[key]:.2f}" for key in ("bf16", "int4", "here", "here_int4"))
        honest.add_row(_setting(need["setting"]), "", *rates)
    return Group(
        Text("Gbit/s for 5 B parameters, M = 8, by part of the time that is compute (paper, table 13)", style="bold"),
        table,
        Text("The DiLoCo rows follow with a cycle of 100 steps, 36 of them hidden; * the formula does not cover it."),
        Text(""),
        Text(
            f"Gbit/s so that P = H = {document['sync_every']}, as in the paper's experiments, costs no compute",
            style="bold",
        ),
        honest,
        Text("'here' counts scales and 6 % wire overhead, the paper's figures only the bits of the values."),
    )


def _figure(cell: Mapping[str, Any]) -> str:
    places = len(cell["printed"].partition(".")[2])
    return f"{cell['computed']:.{places}f}{'' if cell['is_covered'] else '*'}"


def _setting(setting: Mapping[str, Any]) -> str:
    return f"({setting['name']}) {setting['step_s']:g} s, {setting['datacenters']} DCs"


def goodput_document(seed: int, steps: int) -> dict[str, Any]:
    """Every cell of the paper's table, by formula and simulated, as parts of 1; how far both are from the print."""
    cells = goodput_table(seed=seed, steps=steps)
    elastic = [cell for cell in cells if cell.is_elastic]
    return {
        "seed": seed,
        "steps": steps,
        "model": dataclasses.asdict(MODEL),
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "elastic_cells": len(elastic),
        "formula": _distance([cell.goodput_formula - cell.goodput_printed for cell in elastic]),
        "simulation": _distance([cell.goodput - cell.goodput_printed for cell in elastic]),
    }


def _distance(differences: list[float]) -> dict[str, float]:
    return {
        "root_mean_square": root_mean_square(differences),
        "largest": max(abs(difference) for difference in differences),
    }


def render_goodput(document: Mapping[str, Any]) -> Any:
    """Goodput and uptime, each cell as printed/formula/simulated."""
    blocks: list[Any] = []
    for name in ("goodput", "uptime"):
        blocks += [
            Text(f"{name} in %: printed/formula/simulated", style="bold"),
            _goodput_rows(document, name),
            Text(""),
        ]
    model, formula, simulation = document["model"], document["formula"], document["simulation"]
    blocks.append(
        Text(
            f"Goodput of the {document['elastic_cells']} elastic cells, percentage points from the paper: formula "
            f"{_points(formula)}; simulation {_points(simulation)}."
        )
    )
    blocks.append(
        Text(
            f"Fitted, for the paper leaves them open: step {model['step_s']:g} s, "
            f"{model['down_s'] + model['up_s']:g} s lost per interruption, slices of {model['slice_chips']} "
            f"chips that return after {model['return_s'] / 60:g} min. Seed {document['seed']}, "
            f"{document['steps']} steps.",
            style="dim",
        )
    )
    return Group(*blocks)


def _points(distance: Mapping[str, float]) -> str:
    return f"{100 * distance['root_mean_square']:.1f} (root mean square), at most {100 * distance['largest']:.1f}"


def _goodput_rows(document: Mapping[str, Any], name: str) -> Any:
    table = _table("learners", "", *(_chips(chips) for chips in CHIPS))
    for learners, is_elastic in GOODPUT_PRINTED:
        cells = [cell for cell in document["cells"] if (cell["learners"], cell["is_elastic"]) == (learners, is_elastic)]
        percents = (
            "/".join(f"{100 * cell[key]:.0f}" for key in (f"{name}_printed", f"{name}_formula", name)) for cell in cells
        )
        table.add_row(f"M = {learners}", "" if is_elastic else "not elastic", *percents)
    return table


def _chips(chips: int) -> str:
    return f"{chips / 1e6:g} M chips" if chips >= 10**6 else f"{chips // 1000} k chips"


def _table(*columns: str) -> Any:
    """The first two columns are words."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", choices=("goodput", "bandwidth"))
    parser.add_argument("--seed", type=int, default=0, help="of the simulated failures [0]")
    parser.add_argument("--steps", type=int, default=6000, help="inner steps of each simulated learner [6000]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    is_goodput = options.table == "goodput"
    document = goodput_document(options.seed, options.steps) if is_goodput else bandwidth_document()
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        Console(width=100).print(render_goodput(document) if is_goodput else render_bandwidth(document))


if __name__ == "__main__":
    main()
