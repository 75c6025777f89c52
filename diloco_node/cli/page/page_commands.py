"""`diloco-node dashboard` and `diloco-node report`: their options. What they do is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.status import targets_of

PORT: Final = 7480


def dashboard(
    *,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REGION|PORT|FOLDER]...",
            help="Regions of run.toml, admin ports, state folders, a demo's folder.",
        ),
    ] = None,
    config: ConfigOption = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65_535, help="Of the page, on loopback; 0: any.")] = PORT,
) -> None:
    """Serve one page about all regions that answer: of the places given, else of run.toml."""
    from diloco_node.cli.page.merged import MergedRegions, serve_dashboard

    serve_dashboard(MergedRegions(lambda: targets_of(places or (), config)), port)


def report(
    *,
    folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="The state folder of a run or of a region.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where to [default: RUN_FOLDER/report.html].")] = None,
) -> None:
    """Write the dashboard as one HTML file that needs nothing else, with all that is known of a run."""
    from diloco_node.cli.page.page_report import PAGE_NAME, write_page
    from diloco_node.cli.tables import human_bytes

    path = write_page(folder, out or folder / PAGE_NAME)
    typer.echo(f"{path}  ({human_bytes(path.stat().st_size)})")
