"""`diloco-node certs init`: a run's certificate authority and one certificate per region."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco_node.cli.options import ConfigOption, load
from diloco_node.errors import ConfigError

app = typer.Typer(help="Identities of the regions.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def init(
    *,
    regions: Annotated[
        list[str] | None, typer.Argument(metavar="[REGION]...", help="Names; default: run.toml's.")
    ] = None,
    config: ConfigOption = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="The run's name; default: run.toml's run.id.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where to; default: run.toml's run.certs_dir.")
    ] = None,
) -> None:
    """Make certificates for a run. Copy FOLDER/REGION to its region, and keep ca.key away from all of them."""
    names = list(regions or ())
    if not names or run_id is None or folder is None:
        if names and config is None and not Path("run.toml").exists():
            raise ConfigError("without run.toml, certs init needs all of: regions, --run-id NAME and --out FOLDER")
        run_config = load(config)
        names = names or list(run_config.regions)
        run_id = run_id if run_id is not None else run_config.run.id
        folder = folder if folder is not None else run_config.run.certs_dir
    from diloco_node.transport.certificates import init_run

    init_run(folder, run_id, names)
    typer.echo(f"certificates of run {run_id} are in {folder}: ca.key stays here, each folder goes to its region")
    for name in sorted(names):
        typer.echo(f"  {folder / name}")
