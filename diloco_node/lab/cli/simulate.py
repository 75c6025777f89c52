"""`diloco-node simulate`: the protocol under faults, on virtual time, from one seed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import signal
from typing import Annotated

import typer

app = typer.Typer(help="Run without a network.", no_args_is_help=True, rich_markup_mode=None)

_SCHEDULE_HELP = "Which faults: usual, elections, gray, away, swarm. The seed chooses if not given."
_LIAR_HELP = (
    "How one region lies: words (fields of what it sends), sum x1.5, tokens x8, ... The seed chooses if not given."
)
_JOINERS_HELP = "Regions that join: with any, members come and go. The seed chooses if not given."


@app.command()
def run(
    *,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Everything random follows from it.")],
    regions: Annotated[int, typer.Option("--regions", min=0, max=7, help="0 lets the seed choose 3 to 5.")] = 0,
    joiners: Annotated[int | None, typer.Option("--joiners", min=0, max=6, help=_JOINERS_HELP)] = None,
    events: Annotated[int, typer.Option("--events", min=1, max=1_000_000, help="Events under faults.")] = 3000,
    schedule: Annotated[str, typer.Option("--schedule", help=_SCHEDULE_HELP)] = "",
    liar: Annotated[str | None, typer.Option("--liar", help=_LIAR_HELP)] = None,
    effects: Annotated[str, typer.Option("--effects", help="fast: fakes. daemon: the daemon's own code.")] = "fast",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Real region cores in a fake world: crashes, cuts, loss. Exit code 1 if a promise was broken."""
    import structlog

    from diloco_node.lab.sim.seed_report import format_report
    from diloco_node.lab.sim.simulation import simulate

    # What the daemon's code would log is in the trace, at its virtual time.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    report = simulate(
        seed, regions=regions, joiners=joiners, events=events, schedule=schedule, liar=liar, effects=effects
    )
    typer.echo(json.dumps(dataclasses.asdict(report), indent=1) if as_json else format_report(report))
    if not report.is_good:
        raise typer.Exit(1)


@app.command()
def hunt(
    *,
    seeds: Annotated[str, typer.Option("--seeds", help="A..B, both counted.")],
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=1024, help="Processes.")] = 1,
    regions: Annotated[int, typer.Option("--regions", min=0, max=7, help="0 lets each seed choose 3 to 5.")] = 0,
    joiners: Annotated[int | None, typer.Option("--joiners", min=0, max=6, help=_JOINERS_HELP)] = None,
    events: Annotated[int, typer.Option("--events", min=1, max=1_000_000, help="Events under faults.")] = 3000,
    schedule: Annotated[str, typer.Option("--schedule", help=_SCHEDULE_HELP)] = "",
    liar: Annotated[str | None, typer.Option("--liar", help=_LIAR_HELP)] = None,
    failures_max: Annotated[int, typer.Option("--failures-max", min=1, help="Stop after so many.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, at the end.")] = False,
) -> None:
    """Many seeds, for a night. Each failure is printed with the command that runs it again; exit code 1 if any."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from diloco_node.lab.sim.hunt import reports, seed_range
    from diloco_node.lab.sim.seed_report import format_report

    first, last = seed_range(seeds)
    options = {"regions": regions, "joiners": joiners, "events": events, "schedule": schedule, "liar": liar}
    order = range(first, last + 1)
    began_s, count, total_events, failures = time.monotonic(), 0, 0, []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failures]} failed"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=len(order), failures=0)
        # Told to end, it ends its processes, and says how far it came.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        results = reports(order, jobs=jobs, **options)
        with contextlib.closing(results), contextlib.suppress(KeyboardInterrupt):
            for report in results:
                count, total_events = count + 1, total_events + report.events
                if not report.is_good:
                    failures.append(report)
                    if not as_json:
                        typer.echo(format_report(report))
                progress.update(bar, completed=count, failures=len(failures))
                if len(failures) >= failures_max:
                    break
    took_s = time.monotonic() - began_s
    if as_json:
        document = {
            "seeds": [first, last],
            "done": count,
            "events": total_events,
            "seconds": round(took_s, 3),
            "failed": [dataclasses.asdict(report) | {"command": report.command} for report in failures],
        }
        typer.echo(json.dumps(document, indent=1))
    else:
        pace = f"{total_events / took_s:,.0f} events a second" if took_s else ""
        typer.echo(f"{count} of {len(order)} seeds run, {len(failures)} failed; {total_events:,} events, {pace}")
        for report in failures:
            typer.echo(report.command)
    if failures:
        raise typer.Exit(1)
    if count < len(order):
        raise KeyboardInterrupt  # for the exit code
