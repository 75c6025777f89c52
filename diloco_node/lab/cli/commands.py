"""The laboratory's commands, added to the program's."""

from __future__ import annotations

import typer

from diloco_node.cli.program import LABORATORY
from diloco_node.lab.cli import chaos, simulate, wan
from diloco_node.lab.cli.demo import demo


def add_laboratory(app: typer.Typer) -> None:
    """Add `demo`, `simulate`, `wan` and `chaos` to the program's commands."""
    app.command("demo", rich_help_panel=LABORATORY)(demo)
    app.add_typer(simulate.app, name="simulate", rich_help_panel=LABORATORY)
    app.add_typer(wan.app, name="wan", rich_help_panel=LABORATORY)
    app.add_typer(chaos.app, name="chaos", rich_help_panel=LABORATORY)
