"""`diloco-node status`: show what regions do, and what rounds wait for."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.places import RegionsArgument, find_targets

if TYPE_CHECKING:
    from diloco_node.cli.admin_client import Target

PERIOD_S: Final = 1.0
CLEAR: Final = "\x1b[H\x1b[2J"
"""Empties a terminal, and goes to its first line."""


def status(
    *,
    places: RegionsArgument = None,
    config: ConfigOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object (a line each with --watch).")] = False,
) -> None:
    """Show what regions do, what is wrong, and what rounds wait for."""
    from diloco_node.cli.admin_client import ask_all, check_answers
    from diloco_node.cli.status_view import status_lines
    from diloco_node.cli.tables import output_width

    targets = find_targets(places or (), config)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(targets, as_json)
        return
    documents = ask_all(targets)
    if as_json:
        typer.echo(json.dumps({"regions": documents}))
    check_answers(documents)
    if not as_json:
        typer.echo("\n".join(status_lines(documents, output_width())))


def _watch(targets: Sequence[Target], as_json: bool) -> None:
    from diloco_node.cli.admin_client import ask_all
    from diloco_node.cli.status_view import status_lines

    width = shutil.get_terminal_size().columns
    while True:
        documents = ask_all(targets)
        lines = [json.dumps({"regions": documents})] if as_json else [*status_lines(documents, width), ""]
        if not as_json and sys.stdout.isatty():
            typer.echo(CLEAR, nl=False)
        typer.echo("\n".join(lines))
        time.sleep(PERIOD_S)
