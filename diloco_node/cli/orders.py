"""Orders to a daemon that runs on this machine: `budget`, `quarantine lift`, `learner start`, `log-level` and `finish`.

They go over the daemon's admin socket, with the token of its state folder.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from diloco_node.cli.options import ConfigOption, load, parsed
from diloco_node.cli.status import UnixConnection, ask, find_targets
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.state_names import ADMIN_PORT_NAME, ADMIN_SOCKET_NAME, ADMIN_TOKEN_NAME
from diloco_node.unix_sockets import socket_path

ANSWER_BYTES_MAX: Final = 2**20

PlaceArgument = Annotated[
    str | None, typer.Argument(metavar="[REGION|FOLDER]", help="A region of run.toml, or its state folder.")
]

budget = typer.Typer(help="The bandwidth budget of running regions.", no_args_is_help=True)
quarantine = typer.Typer(help="Peers that were shut out for what they sent.", no_args_is_help=True)

learner = typer.Typer(help="The learner of a running region.", no_args_is_help=True)


@budget.callback()
@quarantine.callback()
@learner.callback()
def _top() -> None:
    pass


@budget.command("set")
def set_budget(
    *,
    place: PlaceArgument = None,
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
    from diloco_node.config.budget_settings import parse_ceiling_or_none

    if egress is None and ingress is None:
        raise ConfigError("nothing to set: give --egress or --ingress, such as --egress 2Gbit/s")
    for flag, text in (("--egress", egress), ("--ingress", ingress)):
        if text is not None:
            parsed(flag, text, parse_ceiling_or_none)
    folder = _folder(place, config)
    wanted = {key: value for key, value in (("egress", egress), ("ingress", ingress), ("peer", peer)) if value}
    answer = order(folder, "budget", wanted)
    if as_json:
        typer.echo(json.dumps(answer["budget"]))
        return
    from diloco_node.config.budget_plan import BudgetPlan

    typer.echo(f"{folder.name}: {BudgetPlan.from_plain(answer['budget'])}")


@budget.command("show")
def show_budget(
    *,
    place: PlaceArgument = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with demand and use by lane.")] = False,
) -> None:
    """What a running region may send and receive, in all and with each peer."""
    folder = _folder(place, config)
    document = ask(find_targets(str(folder))[0])
    found = document.get("budget")
    if not isinstance(found, dict):
        reason = document.get("error") or document.get("reason") or "it has just started"
        raise PeersUnreachable(f"{folder.name} has no budget in force: {reason}")
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{folder.name}: out {_ceiling(found, 'egress')}, in {_ceiling(found, 'ingress')}")
    for name, row in found["peers"].items():
        typer.echo(f"  {name:<14} out {_ceiling(row, 'egress')}, in {_ceiling(row, 'ingress')}")


def _ceiling(row: dict[str, Any], direction: str) -> str:
    from diloco_node.config.units import Rate

    rate = row.get(f"{direction}_bytes_per_s")
    return "without a limit" if rate is None else str(Rate(int(rate)))


@quarantine.command("lift")
def lift_quarantine(
    *,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A region that is in quarantine.")],
    place: Annotated[
        str | None,
        typer.Option("--region", "-r", metavar="NAME", help="Who readmits it [default: the region that runs here]."),
    ] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Readmit a peer that was quarantined after three protocol violations; `status --json` shows who is, and why."""
    folder = _folder(place, config)
    is_lifted = bool(order(folder, "quarantine/lift", {"peer": peer})["lifted"])
    if as_json:
        typer.echo(json.dumps({"region": folder.name, "peer": peer, "lifted": is_lifted}))
    elif is_lifted:
        typer.echo(f"{folder.name} readmits {peer}: its strikes are forgotten")
    else:
        typer.echo(f"{folder.name} has nothing against {peer}")


@learner.command("start")
def start_learner(
    *,
    place: PlaceArgument = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Start the learner again that was stopped after it crashed again and again; `status` says so."""
    folder = _folder(place, config)
    was = str(order(folder, "learner/start", {})["was"])
    if as_json:
        typer.echo(json.dumps({"region": folder.name, "was": was}))
    else:
        typer.echo(f"{folder.name} starts its learner, which was {was}; `diloco-node status` shows when it trains")


def finish(
    *,
    place: PlaceArgument = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Goes into the ledger and the logs of all regions.")
    ] = "asked by the operator",
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """End the run in all regions: one last round per fragment, then each writes final.safetensors and exits 0."""
    folder = _folder(place, config)
    order(folder, "finish", {"reason": reason})
    if as_json:
        typer.echo(json.dumps({"region": folder.name, "accepted": True}))
    else:
        typer.echo(f"{folder.name} asks the leader to end the run; `diloco-node status` shows how far it is")


def log_level(
    *,
    part: Annotated[
        str, typer.Argument(metavar="PART", help="daemon, disk, learner, ledger, rounds, transport, or all.")
    ],
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="info, warning or error.")],
    place: Annotated[
        str | None,
        typer.Option("--region", "-r", metavar="NAME", help="Whose log [default: the region that runs here]."),
    ] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Change what a running daemon logs of one part, until it starts again. For good: [log] level in run.toml."""
    folder = _folder(place, config)
    levels = order(folder, "log-level", {"part": part, "level": level})["levels"]
    if as_json:
        typer.echo(json.dumps({"region": folder.name, "levels": levels}))
    else:
        typer.echo(f"{folder.name}: " + ", ".join(f"{name} {one}" for name, one in levels.items()))


def order(folder: Path, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """POST a JSON object; what the daemon answers.

    Args:
        folder: its state folder. path: below /api/v1/.

    Raises:
        ConfigError: it refuses. PeersUnreachable: it does not answer.
    """
    try:
        token = (folder / ADMIN_TOKEN_NAME).read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with contextlib.closing(UnixConnection(socket_path(folder, ADMIN_SOCKET_NAME))) as connection:
            connection.request("POST", f"/api/v1/{path}", json.dumps(document), headers)
            answer = connection.getresponse()
            body = json.loads(answer.read(ANSWER_BYTES_MAX))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise PeersUnreachable(
            f"the daemon of {folder.name} in {folder} does not answer ({error}); is it running?"
        ) from None
    if answer.status >= http.client.MULTIPLE_CHOICES:
        raise ConfigError(f"{folder.name} refuses: {body.get('error', answer.status)}")
    return dict(body)


def _folder(place: str | None, config: Path | None) -> Path:
    """The state folder of the region that is meant: a region's name, its folder, or None for the only one here."""
    if place is not None and (Path(place) / ADMIN_PORT_NAME).exists():
        return Path(place).resolve()
    resolved = load(config, {}, None)
    if place is not None:
        resolved.check_region(place)
    folders = [resolved.state_dir(name) for name in ([place] if place else resolved.regions)]
    found = [folder for folder in folders if (folder / ADMIN_PORT_NAME).exists()]
    if not found:
        raise PeersUnreachable(
            f"no region of run {resolved.run.id} has run here: {folders[0]} holds no {ADMIN_PORT_NAME}"
        )
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"{len(found)} regions run on this machine ({names}): name one of them")
    return found[0].resolve()
