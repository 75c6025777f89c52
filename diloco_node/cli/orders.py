"""Orders to a daemon on this machine: `budget`, `quarantine`, `learner start`, `drain` and `finish`.

They go over the daemon's admin socket, with the token of its state folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_node.cli.options import ConfigOption, parse_option
from diloco_node.cli.places import RegionArgument, region_folder
from diloco_node.cli.tables import table_lines
from diloco_node.errors import ConfigError, PeersUnreachable

budget = typer.Typer(help="Show or change the bandwidth budget of a running region.", no_args_is_help=True)
quarantine = typer.Typer(help="Expel a region from the run, or readmit it.", no_args_is_help=True)

learner = typer.Typer(help="Start a learner that was stopped.", no_args_is_help=True)


@budget.command("set")
def set_budget(
    *,
    place: RegionArgument = None,
    egress: Annotated[
        str | None, typer.Option("--egress", metavar="RATE", help='What it may send: 2Gbit/s, 25MB/s, or "none".')
    ] = None,
    ingress: Annotated[
        str | None, typer.Option("--ingress", metavar="RATE", help='What it may receive, or "none".')
    ] = None,
    peer: Annotated[str | None, typer.Option("--peer", metavar="NAME", help="Only to and from this peer.")] = None,
    config: ConfigOption = None,
) -> None:
    """Change a running region's budget until it starts again. To keep it: [budget] in run.toml, SIGHUP to `start`."""
    from diloco_node.config.budget_settings import parse_ceiling_or_none

    if egress is None and ingress is None:
        raise ConfigError("nothing to set: give --egress or --ingress, such as --egress 2Gbit/s")
    for flag, text in (("--egress", egress), ("--ingress", ingress)):
        if text is not None:
            parse_option(flag, text, parse_ceiling_or_none)
    folder = region_folder(place, config)
    change = {"egress": egress, "ingress": ingress, "peer": peer}
    answer = give_order(folder, "budget", change)
    from diloco_node.config.budget_plan import BudgetPlan

    typer.echo(f"{folder.name}: {BudgetPlan.from_plain(answer['budget'])}")


@budget.command("show")
def show_budget(
    *,
    place: RegionArgument = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with demand and use by lane.")] = False,
) -> None:
    """Show what a running region may send and receive, in all and with each peer."""
    from diloco_node.cli.admin_client import ask_in
    from diloco_node.cli.existing_state import no_daemon

    folder = region_folder(place, config)
    document = ask_in(folder)
    plan = document.get("budget")
    if "error" in document:
        raise no_daemon(folder, document["error"])
    if not isinstance(plan, dict):
        raise PeersUnreachable(
            f"{folder.name} has no budget in force: {document.get('reason') or 'it has just started'}"
        )
    if as_json:
        typer.echo(json.dumps(plan))
        return
    ceilings = {"in all": plan, **{f"with {name}": row for name, row in plan["peers"].items()}}
    rows = [(name, _ceiling(row, "egress"), _ceiling(row, "ingress")) for name, row in ceilings.items()]
    typer.echo("\n".join(table_lines([(folder.name, "left"), ("out", "right"), ("in", "right")], rows)))


def _ceiling(row: dict[str, Any], direction: str) -> str:
    from diloco_node.config.units import Rate

    rate = row.get(f"{direction}_bytes_per_s")
    return "without a limit" if rate is None else str(Rate(int(rate)))


@quarantine.command("add")
def expel(
    *,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A region that should take no part any more.")],
    place: RegionArgument = None,
    config: ConfigOption = None,
) -> None:
    """Expel a region from the run: the leader puts it into the ledger, and every region closes its links with it."""
    folder = region_folder(place, config)
    give_order(folder, "quarantine/add", {"peer": peer})
    typer.echo(f"{folder.name} expels {peer} when a majority agrees; `diloco-node quarantine lift` readmits it")


@quarantine.command("lift")
def lift_quarantine(
    *,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A region that is shut out.")],
    place: RegionArgument = None,
    config: ConfigOption = None,
) -> None:
    """Readmit a peer that was expelled, or shut out after three protocol violations; `status` says who is, and why."""
    folder = region_folder(place, config)
    if give_order(folder, "quarantine/lift", {"peer": peer})["lifted"]:
        typer.echo(f"{folder.name} readmits {peer}: its strikes are forgotten")
    else:
        typer.echo(f"{folder.name} has nothing against {peer}")


@learner.command("start")
def start_learner(*, place: RegionArgument = None, config: ConfigOption = None) -> None:
    """Start the learner again that was stopped after it crashed again and again; `status` says so."""
    folder = region_folder(place, config)
    was = str(give_order(folder, "learner/start", {})["was"])
    typer.echo(f"{folder.name} starts its learner, which was {was}; `diloco-node status` shows when it trains")


def finish(
    *,
    place: RegionArgument = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Goes into the ledger and the logs of all regions.")
    ] = "asked by the operator",
    config: ConfigOption = None,
) -> None:
    """End the run in all regions. After a last round of each fragment they write final.safetensors and exit 0."""
    folder = region_folder(place, config)
    give_order(folder, "finish", {"reason": reason})
    typer.echo(f"{folder.name} asks the leader to end the run; `diloco-node status` shows how far it is")


def drain(*, place: RegionArgument = None, config: ConfigOption = None) -> None:
    """Stop a region in order: its last steps are merged, a checkpoint is written, leadership is handed on."""
    folder = region_folder(place, config)
    give_order(folder, "drain", {})
    typer.echo(f"{folder.name} stops within `learner.stop_grace`; start it again as before")


def give_order(folder: Path, path: str, document: dict[str, Any]) -> dict[str, Any]:
    """Give the daemon of a state folder an order; its answer. Raises what `admin_client.order` does."""
    from diloco_node.cli.admin_client import order

    return order(folder, path, document)
