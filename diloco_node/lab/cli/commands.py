"""The laboratory's commands, added to the program's."""

from __future__ import annotations

import typer

from diloco_node.lab.cli import chaos, simulate, wan
from diloco_node.lab.cli.demo import demo


def add_laboratory(app: typer.Typer) -> None:
    """Add `demo`, `simulate`, `wan` and `chaos` to the program's commands."""
    app.command("demo")(demo)
    app.add_typer(simulate.app, name="simulate")
    app.add_typer(wan.app, name="wan")
    app.add_typer(chaos.app, name="chaos")
