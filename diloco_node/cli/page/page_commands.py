"""`diloco-node dashboard` and `diloco-node report`: their options. The work is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.places import RegionsArgument, find_targets, run_folder

PORT: Final = 7480


def dashboard(
    *,
    places: RegionsArgument = None,
    config: ConfigOption = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Of the page, on loopback; 0: any.")] = PORT,
) -> None:
    """Serve one page about all regions that answer."""
    from diloco_node.cli.page.merged import MergedRegions, serve_dashboard

    serve_dashboard(MergedRegions(lambda: find_targets(places or (), config)), port)


def report(
    *,
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="REGION|STATE-FOLDER", help="A region of run.toml, or a state folder [default: that of the run]."
        ),
    ] = None,
    config: ConfigOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where to [default: report.html in the folder].")] = None,
) -> None:
    """Write the dashboard as one HTML file. It needs nothing else, and has all that is known of a run."""
    from diloco_node.cli.page.page_report import PAGE_NAME, write_page
    from diloco_node.health.reading import human_bytes

    folder = run_folder(place, config)
    path = write_page(folder, out or folder / PAGE_NAME)
    typer.echo(f"{path}  ({human_bytes(path.stat().st_size)})")
