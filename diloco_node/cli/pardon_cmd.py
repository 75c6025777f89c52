"""`diloco-node pardon`: end the quarantine of a peer."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.errors import PeersUnreachable


def pardon(
    *,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A region that is in quarantine.")],
    region: Annotated[
        str | None,
        typer.Option("--region", "-r", metavar="NAME", help="Who pardons [default: the one that runs here]."),
    ] = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Let a peer link again that was shut out for what it sent; `status --json` shows who is, and why.

    \b
    diloco-node pardon us-west --region us-east
    """
    from diloco_node.cli.admin_order import order
    from diloco_node.cli.measure.daemon import find_daemon

    daemon = find_daemon(config, region)
    if daemon is None:
        raise PeersUnreachable("no region of this run answers on this machine; name its run.toml with --config")
    was = bool(order(daemon.folder, daemon.region, "/api/v1/pardon", {"peer": peer})["pardoned"])
    if as_json:
        typer.echo(json.dumps({"region": daemon.region, "peer": peer, "pardoned": was}))
    else:
        what = f"pardons {peer}: its strikes are forgotten" if was else f"had nothing against {peer}"
        typer.echo(f"{daemon.region} {what}")
