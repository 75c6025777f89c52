"""`diloco-node certs`: a run's certificate authority, and the certificates of its regions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco_node.cli.options import ConfigOption, has_config, load
from diloco_node.cli.orders import give_order
from diloco_node.cli.places import RegionArgument, region_folder
from diloco_node.errors import ConfigError

app = typer.Typer(help="Certificates of the regions.", no_args_is_help=True, rich_markup_mode=None)

RunIdOption = Annotated[str | None, typer.Option("--run-id", help="The run's name; default: run.toml's run.id.")]
FolderOption = Annotated[
    Path | None, typer.Option("--out", metavar="FOLDER", help="Folder with ca.key; default: run.toml's run.certs_dir.")
]


@app.command()
def init(
    *,
    regions: Annotated[
        list[str] | None, typer.Argument(metavar="[REGION]...", help="Names; default: run.toml's.")
    ] = None,
    config: ConfigOption = None,
    run_id: RunIdOption = None,
    folder: FolderOption = None,
) -> None:
    """Make certificates for a run. Copy FOLDER/REGION to its region, and keep ca.key away from all of them."""
    names = list(regions or ())
    if not names or run_id is None or folder is None:
        if names and not has_config(config):
            raise ConfigError("without run.toml, certs init needs all of: regions, --run-id NAME and --out FOLDER")
        run_config = load(config)
        names = names or list(run_config.regions)
        run_id = run_id if run_id is not None else run_config.run.id
        folder = folder if folder is not None else run_config.run.certs_dir
    from diloco_node.transport.authority import init_run

    init_run(folder, run_id, names)
    typer.echo(f"certificates of run {run_id} are in {folder}: ca.key stays here, each folder goes to its region")
    _list(folder, sorted(names))


@app.command()
def add(
    *,
    regions: Annotated[list[str], typer.Argument(metavar="REGION...", help="Names of further regions.")],
    config: ConfigOption = None,
    run_id: RunIdOption = None,
    folder: FolderOption = None,
) -> None:
    """Make certificates for further regions, where ca.key is."""
    from diloco_node.transport.authority import add_regions

    folder = folder if folder is not None else load(config).run.certs_dir
    add_regions(folder, regions, run_id=run_id)
    typer.echo(f"{folder}: each folder goes to its region")
    _list(folder, sorted(regions))


@app.command()
def renew(
    *,
    regions: Annotated[
        list[str] | None, typer.Argument(metavar="[REGION]...", help="Names; default: all that have a certificate.")
    ] = None,
    is_authority: Annotated[
        bool, typer.Option("--ca", help="The authority instead: ca.pem then holds the new one and the old one.")
    ] = False,
    is_last: Annotated[
        bool, typer.Option("--drop-old-ca", help="Trust the new authority only, when all regions are renewed by it.")
    ] = False,
    config: ConfigOption = None,
    folder: FolderOption = None,
) -> None:
    """Give regions another key and certificate, where ca.key is. A running region takes them at SIGHUP."""
    from diloco_node.transport import authority

    if is_authority + is_last + bool(regions) > 1:
        raise ConfigError("one thing at a time: regions, --ca (for all), or --drop-old-ca (for all)")
    folder = folder if folder is not None else load(config).run.certs_dir
    if is_authority:
        names = authority.renew_authority(folder)
        news = "trusts both authorities when ca.pem is there"
        remark = "Then renew all regions: diloco-node certs renew"
    elif is_last:
        names = authority.drop_old_authority(folder)
        news = "trusts the new authority only when ca.pem is there"
        remark = (
            "Members that were ever changed are signed by the old one: change them once more, as by `members demote` "
            "and `promote` (a witness: remove and add it), or no region comes back with an empty folder"
        )
    else:
        names = authority.renew_regions(folder, regions or ())
        news, remark = "has another certificate when its whole folder is there", "The old key is gone"
    typer.echo(f"each of these regions {news}, and `diloco-node start` there got SIGHUP. {remark}.")
    _list(folder, names)


@app.command()
def revoke(
    *,
    region: Annotated[str, typer.Argument(metavar="REGION", help="A region with a certificate that was stolen.")],
    place: RegionArgument = None,
    certificate: Annotated[
        Path | None,
        typer.Option("--certificate", metavar="FILE", help="Its node.pem; default: what it has shown last."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a certificate for good: the leader puts it into the ledger, and every region closes its links with it."""
    folder = region_folder(place, config)
    document = {"peer": region}
    if certificate is not None:
        try:
            document["certificate"] = certificate.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{certificate} is no certificate that can be read: {error}") from None
    fingerprint = give_order(folder, "certificates/revoke", document)["revokes"]
    typer.echo(
        f"{folder.name} revokes certificate {fingerprint} of {region} when a majority agrees; "
        f"`diloco-node certs renew {region}` makes another one"
    )


def _list(folder: Path, names: list[str]) -> None:
    for name in names:
        typer.echo(f"  {folder / name}")
