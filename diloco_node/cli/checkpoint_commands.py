"""`diloco-node checkpoint list | verify | copy`: the versions that regions or copies can give back."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from diloco_node.cli.places import CopiesArgument, copies_or_run, folders_with
from diloco_node.cli.tables import table_lines
from diloco_node.errors import ConfigError
from diloco_node.escaping import escaped

app = typer.Typer(help="List, verify and copy versions of a run.", no_args_is_help=True, rich_markup_mode=None)

VersionOption = Annotated[int | None, typer.Option("--version", metavar="N", min=0, help="Only this version.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@app.command("list")
def list_versions(place: CopiesArgument, *, as_json: JsonOption = False) -> None:
    """List the versions that can be given back, and what the others lack."""
    from diloco_node.daemon.checkpoints import version_rows

    rows = version_rows(copies_or_run(place))
    if as_json:
        typer.echo(json.dumps({"versions": [asdict(row) for row in rows]}))
        return
    columns = [*((name, "right") for name in ("version", "step", "tokens", "bytes")), ("written at (UTC)", "left")]
    cells = []
    for row in rows:
        counts = ("-" if count is None else f"{count:,}" for count in (row.step, row.tokens, row.content_bytes))
        written_at, state = row.written_at[:19].replace("T", " "), f"lacks {row.lack}" if row.lack else "whole"
        cells.append((str(row.version), *counts, escaped(written_at), escaped(state)))
    typer.echo("\n".join(table_lines([*columns, ("state", "left")], cells)))


@app.command()
def verify(place: CopiesArgument, *, version: VersionOption = None) -> None:
    """Compare what is on disk, or in copies, with the digests that the run gave it. Exit code 0: all is equal.

    Nothing is changed, and a daemon may run on the folder. `diloco-node replay` computes all versions again.
    """
    from diloco_node.daemon.checkpoints import version_faults

    count, faults = version_faults(copies_or_run(place), version)
    for fault in faults:
        typer.echo(escaped(fault))
    typer.echo(f"{place}: {count} files, {len(faults) or 'none'} of them wrong")
    if faults:
        raise typer.Exit(1)


@app.command()
def copy(
    place: CopiesArgument,
    target: Annotated[str, typer.Argument(metavar="TO", help="s3://BUCKET/PREFIX, gs://, az://, or a folder.")],
    *,
    version: VersionOption = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="The newest version up to this step of the run.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write a copy that is there once more.")] = False,
) -> None:
    """Copy a version, by default the newest one, with its momentum. A whole copy that is there is left as it is.

    A daemon may run on the folder. Its bandwidth budget does not count these bytes.
    """
    from diloco_node.daemon.checkpoint_copies import CheckpointCopies
    from diloco_node.daemon.checkpoints import copy_version
    from diloco_node.daemon.manifest_file import MANIFEST_NAME
    from diloco_node.storage.object_store import folder_of

    if version is not None and step is not None:
        raise ConfigError("--version and --step both name a version: give one of them")
    if (folder := folder_of(target)) is not None and folders_with(MANIFEST_NAME, folder):
        raise ConfigError(f"{target} holds a region's state, which a copy would hide: name a folder of its own")
    source, copies = copies_or_run(place), CheckpointCopies(target)
    checkpoint, is_new = copy_version(source, copies, version=version, step=step, is_forced=force)
    typer.echo(
        f"{copies.place}@{checkpoint.version}: run {escaped(checkpoint.run_id)}, step {checkpoint.step:,}, "
        f"{checkpoint.content_bytes:,} bytes{'' if is_new else ', was there already'}"
    )
