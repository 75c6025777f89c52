"""`diloco-node budget`: the bandwidth budget of running regions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from diloco_node.cli.admin_order import order
from diloco_node.cli.options import ConfigOption, load
from diloco_node.cli.status import PORT_FILE
from diloco_node.errors import ConfigError, PeersUnreachable

app = typer.Typer(help="The bandwidth budget of running regions.", no_args_is_help=True)


@app.callback()
def _top() -> None:
    pass


@app.command("set")
def set_budget(
    *,
    place: Annotated[
        str | None, typer.Argument(metavar="[REGION|FOLDER]", help="A region of run.toml, or its state folder.")
    ] = None,
    egress: Annotated[
        str | None, typer.Option("--egress", metavar="RATE", help='What it may send: 2Gbit/s, 25MB/s, or "none".')
    ] = None,
    ingress: Annotated[
        str | None, typer.Option("--ingress", metavar="RATE", help='What it may receive, or "none".')
    ] = None,
    peer: Annotated[str | None, typer.Option("--peer", metavar="NAME", help="Only to and from this peer.")] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The new budget as one JSON object.")] = False,
) -> None:
    """Change a running region's budget until it starts again. For good: [budget] in run.toml, SIGHUP to `start`."""
    if egress is None and ingress is None:
        raise ConfigError("nothing to set: give --egress or --ingress, such as --egress 2Gbit/s")
    for flag, text in (("--egress", egress), ("--ingress", ingress)):
        if text is not None:
            _check_rate(flag, text)
    folder = _folder(place, config)
    asked = {key: value for key, value in (("egress", egress), ("ingress", ingress), ("peer", peer)) if value}
    answer = order(folder, folder.name, "/api/v1/budget", asked)
    if as_json:
        typer.echo(json.dumps(answer["budget"]))
        return
    from diloco_node.core.budget_plan import BudgetPlan

    typer.echo(f"{folder.name}: {BudgetPlan.from_plain(answer['budget'])}")


def _check_rate(flag: str, text: str) -> None:
    from diloco_node.config.budget import parse_ceiling_or_none

    try:
        parse_ceiling_or_none(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}") from None


def _folder(place: str | None, config: Path | None) -> Path:
    """The state folder of the region that is meant."""
    if place is not None and (Path(place) / PORT_FILE).exists():
        return Path(place).resolve()
    resolved = load(config, {}, None)
    if place is not None:
        resolved.check_region(place)
    folders = [resolved.state_dir(name) for name in ([place] if place else resolved.regions)]
    found = [folder for folder in folders if (folder / PORT_FILE).exists()]
    if not found:
        raise PeersUnreachable(f"no region of run {resolved.run.id} has run here: {folders[0]} holds no {PORT_FILE}")
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"{len(found)} regions run on this machine ({names}): name one of them")
    return found[0].resolve()
