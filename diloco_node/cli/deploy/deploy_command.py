"""`diloco-node deploy ssh`: certificates, run.toml and units to the machines of a run; start there, show the status."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco_node import __version__
from diloco_node.cli.options import ConfigOption, load
from diloco_node.errors import ConfigError
from diloco_node.escaping import escaped

if TYPE_CHECKING:
    from diloco_node.cli.deploy.remote import Shipment

app = typer.Typer(help="Bring a run to other machines and start it there.", no_args_is_help=True)


@app.callback()
def _top() -> None:
    pass


@app.command("ssh")
def deploy_ssh(
    *,
    hosts: Annotated[Path, typer.Argument(metavar="HOSTS.TOML", help="A table [hosts.REGION] for each machine.")],
    regions: Annotated[
        list[str] | None, typer.Option("--region", "-r", metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the commands.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Also restart regions that run.")] = False,
    certs_dir: Annotated[Path | None, typer.Option("--certs", help="Folder that certs init made.")] = None,
    ssh_config: Annotated[
        Path | None, typer.Option("--ssh-config", metavar="FILE", help="For ssh and scp, instead of ~/.ssh/config.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Copy run.toml and certificates to each region's machine, install a unit of its user, start it, show the status.

    A region that runs already gets the new files and goes on; --restart has it read them.
    """
    from diloco_node.cli.deploy.remote import Remote

    shipments = chosen_shipments(hosts, config, certs_dir, regions)
    remotes = [Remote(one, ssh_config, is_dry=dry_run, say=_told if dry_run else _unsaid) for one in shipments]
    for remote in remotes:  # all of them before anything is changed on one
        remote.check(__version__)
    for remote in remotes:
        remote.copy()
    for one, remote in zip(shipments, remotes, strict=True):
        remote.start(is_restarted=restart)
        if not dry_run:
            typer.echo(f"{one.region} on {one.host.user}@{one.host.address}: {one.unit_name} is started")
    for one, remote in zip(shipments, remotes, strict=True):
        said = remote.state()
        if not dry_run:
            typer.echo(f"--- {one.region}\n" + "\n".join(escaped(line) for line in said.splitlines()))


def chosen_shipments(
    hosts_file: Path, config: Path | None, certs_dir: Path | None, only: list[str] | None
) -> list[Shipment]:
    """What goes where; checked on this machine.

    Raises:
        ConfigError: hosts.toml and run.toml do not fit. IdentityError: a certificate is missing or wrong.
    """
    from diloco_node.cli.deploy.hosts import read_hosts
    from diloco_node.cli.deploy.remote import Shipment
    from diloco_node.transport.certificates import load_identity

    resolved = load(config, {"run.certs_dir": ("--certs", certs_dir)}, None)
    hosts = read_hosts(hosts_file)
    unknown = sorted({*hosts, *(only or ())} - set(resolved.regions))
    if unknown:
        there = ", ".join(resolved.regions)
        raise ConfigError(
            f"{hosts_file}: {', '.join(unknown)} is no region of run {resolved.run.id}, which has {there}"
        )
    missing = sorted(set(only or ()) - set(hosts))
    if missing:
        raise ConfigError(f"{hosts_file} has no host for {', '.join(missing)}: add [hosts.{missing[0]}]")
    chosen = [name for name in hosts if not only or name in only]
    for name in chosen:
        load_identity(resolved.identity_dir(name), region=name, run_id=resolved.run.id)
    return [Shipment(name, resolved.run.id, hosts[name], resolved.path, resolved.identity_dir(name)) for name in chosen]


def _told(command: str) -> None:
    typer.echo(command)


def _unsaid(command: str) -> None:
    del command
