"""`diloco-node config show`: what is set, and by whom."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco_node.cli.options import ConfigOption, SetOption, load

app = typer.Typer(help="Look at the settings.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    pass


@app.command()
def show(
    *,
    config: ConfigOption = None,
    assignments: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value came from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show every setting as this command would use it, checked."""
    node_config = load(config, {}, assignments)
    rows = list(node_config.rows())
    if as_json:
        settings = {key: {"value": value, "origin": where} if origin else value for key, value, where in rows}
        typer.echo(json.dumps({"settings": settings, "settings_digest": node_config.settings_digest()}, indent=1))
        return
    key_width = max(len(key) for key, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for key, value, where in rows:
        typer.echo(
            f"{key:<{key_width}} = {value:<{value_width}}  # {where}" if origin else f"{key:<{key_width}} = {value}"
        )
    typer.echo(f"{'# settings digest':<{key_width}} = {node_config.settings_digest()[:16]}")
