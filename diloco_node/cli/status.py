"""`diloco-node status`: show what regions do, and what rounds wait for."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.places import RegionsArgument, find_targets

if TYPE_CHECKING:
    from diloco_node.cli.admin_client import Target

PERIOD_S: Final = 1.0


def status(
    *,
    places: RegionsArgument = None,
    config: ConfigOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Every second; keys sort and choose, q ends.")] = False,
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
        for line in status_lines(documents, output_width()):
            typer.echo(line)


def _watch(targets: Sequence[Target], as_json: bool) -> None:
    from diloco_node.cli.admin_client import ask_all
    from diloco_node.cli.status_view import status_lines

    if as_json:
        while True:
            typer.echo(json.dumps({"regions": ask_all(targets)}))
            time.sleep(PERIOD_S)
    if sys.stdin.isatty() and sys.stdout.isatty():
        from diloco_node.cli.watch import has_screen, run_screen

        if has_screen():
            run_screen(partial(ask_all, targets))
            return
    width = shutil.get_terminal_size().columns
    while True:  # nobody can press a key, or the terminal is an unknown one: a block of lines each time
        for line in status_lines(ask_all(targets), width):
            typer.echo(line)
        typer.echo("")
        time.sleep(PERIOD_S)
