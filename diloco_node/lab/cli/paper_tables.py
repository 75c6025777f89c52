"""The paper's two tables, as documents and as text: what is printed, and what we compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco_node.cli.tables import plain_table
from diloco_node.lab.sim import bandwidth as bandwidth_table
from diloco_node.lab.sim import goodput as goodput_table

# ---- bandwidth -------------------------------------------------------------------------------------------------------


def bandwidth_document() -> dict[str, Any]:
    """Every cell of the paper's table with our figure, and the honest figures; rates in Gbit/s."""
    return {
        "parameters": bandwidth_table.VALUES,
        "settings": {one.name: dataclasses.asdict(one) for one in bandwidth_table.SETTINGS},
        "cells": [
            {**dataclasses.asdict(cell), "deviation": cell.deviation, "is_rounding": cell.is_rounding}
            for cell in bandwidth_table.table()
        ],
        "sync_every": bandwidth_table.SYNC_EVERY,
        "honest": [dataclasses.asdict(one) for one in bandwidth_table.honest()],
    }


def render_bandwidth(document: Mapping[str, Any]) -> Any:
    """Two tables: printed / computed, and what P = H = 24 takes."""
    from rich.console import Group
    from rich.text import Text

    parts = [f"{one:.0%}" for one in bandwidth_table.UTILISATIONS]
    table = _table("printed/computed", "", *parts)
    cells = list(document["cells"])
    for start in range(0, len(cells), len(parts)):
        row = cells[start : start + len(parts)]
        setting = document["settings"][row[0]["setting"]]
        shown = (f"{cell['printed']}/{_figure(cell)}" for cell in row)
        table.add_row(
            _setting(setting) if row[0]["method"] == bandwidth_table.DATA_PARALLEL else "", row[0]["method"], *shown
        )
    honest = _table("links never idle", "", "bf16", "int4", "here: int4 up, int8 down", "here: int4 both")
    for one in document["honest"]:
        rates = (f"{one[key]:.2f}" for key in ("bf16", "int4", "here", "here_int4"))
        honest.add_row(_setting(one["setting"]), "", *rates)
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


# ---- goodput ---------------------------------------------------------------------------------------------------------


def goodput_document(seed: int, steps: int) -> dict[str, Any]:
    """Every cell of the paper's table, by formula and simulated, as parts of 1; how far both are from the print."""
    cells = goodput_table.table(seed=seed, steps=steps)
    elastic = [cell for cell in cells if cell.is_elastic]
    return {
        "seed": seed,
        "steps": steps,
        "model": dataclasses.asdict(goodput_table.MODEL),
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "elastic_cells": len(elastic),
        "formula": _distance([cell.goodput_formula - cell.goodput_printed for cell in elastic]),
        "simulation": _distance([cell.goodput - cell.goodput_printed for cell in elastic]),
    }


def _distance(differences: list[float]) -> dict[str, float]:
    return {
        "root_mean_square": goodput_table.root_mean_square(differences),
        "largest": max(abs(one) for one in differences),
    }


def render_goodput(document: Mapping[str, Any]) -> Any:
    """Goodput and uptime, each cell as printed/formula/simulated."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    for name in ("goodput", "uptime"):
        parts += [
            Text(f"{name} in %: printed/formula/simulated", style="bold"),
            _goodput_table(document, name),
            Text(""),
        ]
    model, formula, simulation = document["model"], document["formula"], document["simulation"]
    parts.append(
        Text(
            f"Goodput of the {document['elastic_cells']} elastic cells, percentage points from the paper: formula "
            f"{_points(formula)}; simulation {_points(simulation)}."
        )
    )
    parts.append(
        Text(
            f"Fitted, for the paper leaves them open: step {model['step_s']:g} s, "
            f"{model['down_s'] + model['up_s']:g} s lost per interruption, slices of {model['slice_chips']} "
            f"chips that return after {model['return_s'] / 60:g} min. Seed {document['seed']}, "
            f"{document['steps']} steps.",
            style="dim",
        )
    )
    return Group(*parts)


def _points(distance: Mapping[str, float]) -> str:
    return f"{100 * distance['root_mean_square']:.1f} (root mean square), at most {100 * distance['largest']:.1f}"


def _goodput_table(document: Mapping[str, Any], name: str) -> Any:
    table = _table("learners", "", *(_chips(chips) for chips in goodput_table.CHIPS))
    for learners, is_elastic in goodput_table.PRINTED:
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
    adjusted = [(name, "left" if index < 2 else "right") for index, name in enumerate(columns)]
    return plain_table(*adjusted, is_wrapping=False)
