"""`diloco-node config`: what is set, and by whom; and settings of a run that goes on."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco_node.cli.options import ConfigOption, SetOption, load
from diloco_node.errors import ConfigError

app = typer.Typer(help="Look at the settings; change those of a run.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(
    setting: Annotated[str | None, typer.Argument(metavar="[SETTING]", help="Only this one, explained.")] = None,
    *,
    config: ConfigOption = None,
    assignments: SetOption = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also show where each value came from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show every setting as this command would use it, checked."""
    node_config = load(config, assignments=assignments)
    rows = [row for row in node_config.rows() if setting in (None, row[0])]
    if setting is not None:
        from diloco_node.config.reference import explanation

        if not rows:
            raise ConfigError(f"there is no setting {setting}: `diloco-node config show` lists them all")
        for key, value, where in rows:
            typer.echo(f"{key} = {value}  # {where}")
        typer.echo(explanation(setting))
        return
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


@app.command("set")
def set_in_run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE... [REGION]", help="As rounds.sync_every=32; and the region that leads."),
    ],
    *,
    config: ConfigOption = None,
) -> None:
    """Change settings of a run that goes on: at one entry of its ledger, in all regions."""
    from diloco_node.cli.orders import give_order
    from diloco_node.cli.places import region_folder

    assignments, places = [word for word in words if "=" in word], [word for word in words if "=" not in word]
    if not assignments or len(places) > 1:
        raise ConfigError(
            f"{' '.join(words)}: write KEY=VALUE for each setting, and at most one region, for example "
            "rounds.sync_every=32 us-east"
        )
    folder = region_folder(next(iter(places), None), config)
    changes = give_order(folder, "settings", {"set": assignments})["changes"]
    for change in changes:
        typer.echo(f"{folder.name} orders {change}")
    typer.echo("Each region says when it has it. Change run.toml in each, too: a start names what differs")
