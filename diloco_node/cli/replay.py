"""`diloco-node replay`: compute a region's parameters again, and compare them with what its ledger names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.cli.places import RegionArgument, region_folder
from diloco_node.state_names import LEDGER_NAME

if TYPE_CHECKING:
    from diloco_node.daemon.state_replay import ReplayReport


def replay(
    *,
    place: RegionArgument = None,
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compute a region's parameters again, and compare digests. Exit code 0: all of them agree.

    It begins with the first parameters, and takes the payloads that are on disk. Without Theta_0 or an early payload it
    begins at the first state from which nothing is missing. Nothing in the folder is changed, and a daemon may run on
    it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from diloco_node.daemon.state_replay import Replay

    work = Replay(region_folder(place, config, file=LEDGER_NAME))
    columns = (TextColumn("outer steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=work.rounds)
        report = work.run(lambda: progress.advance(bar))
    if as_json:
        typer.echo(json.dumps(as_document(report)))
    else:
        typer.echo("\n".join(report_lines(report)))
    if not report.agrees:
        raise typer.Exit(1)


def as_document(report: ReplayReport) -> dict[str, Any]:
    """Describe the result for `--json`."""
    return {
        "agrees": report.agrees,
        "fragments": [
            {
                "fragment": fragment.fragment,
                "from_version": fragment.start,
                "version": fragment.start + len(fragment.rounds),
                "lack": fragment.lack,
            }
            for fragment in report.plan
        ],
        "digests": [
            {
                "fragment": check.fragment,
                "version": check.version,
                "named": check.named.hex(),
                "computed": check.computed.hex(),
                "agrees": check.agrees,
            }
            for check in report.checks
        ],
        "final_agrees": report.final,
    }


def report_lines(report: ReplayReport) -> list[str]:
    """Describe the result for people: late beginnings, differences, and the sum of it."""
    from diloco_node.daemon.run_files import ARCHIVE_HINT

    late = [fragment for fragment in report.plan if fragment.start]
    lines = []
    if late:
        count, first = f"{len(late)} of {len(report.plan)} fragments begin later than Theta_0", late[0]
        lines.append(f"{count}, fragment {first.fragment} at version {first.start}; not here: {first.lack}")
        lines.append(ARCHIVE_HINT)
    for check in report.checks:
        if not check.agrees:
            ledger_hex, computed_hex = check.named.hex()[:16], check.computed.hex()[:16]
            lines.append(
                f"fragment {check.fragment} version {check.version} differs: ledger {ledger_hex}, "
                f"computed {computed_hex}"
            )
    steps = sum(len(fragment.rounds) for fragment in report.plan)
    agreements = sum(check.agrees for check in report.checks)
    lines.append(f"{steps} outer steps, {agreements} of {len(report.checks)} digests of the ledger agree")
    if report.final is not None:
        lines.append(f"final.safetensors holds {'the computed' if report.final else 'OTHER'} parameters")
    return lines
