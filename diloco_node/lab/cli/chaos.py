"""`diloco-node chaos`: one fault on purpose in a demo that runs on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from diloco_node.lab.chaos.executor import StruckFault

app = typer.Typer(help="Strike a demo that runs on this machine.", no_args_is_help=True, rich_markup_mode=None)

FOR_DEFAULT: Final = "5s"


@app.command()
def strike(
    *,
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="kill, stop, pause, slow; of a region's daemon: partition, disk.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="us-east, us-east.daemon, us-east.learner, us-east.supervisor.")
    ],
    lasts: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help=f"How long, but for kill and stop [default: {FOR_DEFAULT}]."),
    ] = None,
    place: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Of the demo.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Strike a region, or one of its processes; returns when the fault is over.

    Ended processes are started again: children by their supervisor, supervisors by the demo. Stopping a region stops
    its supervisor, which stops the other two. A slowed process runs for a quarter of the time. Lost packets, slow
    links and cuts between two regions: `demo --wan`, `wan set` and `wan cut`.
    """
    import asyncio

    from diloco_node.cli.options import parse_option
    from diloco_node.config.units import parse_duration
    from diloco_node.errors import PeersUnreachable
    from diloco_node.lab.chaos.fault_plan import LASTING

    if lasts is None and kind in LASTING:
        lasts = FOR_DEFAULT
    lasts_ns = parse_option("--for", lasts, parse_duration).ns if lasts is not None else 0
    try:
        fault = asyncio.run(_strike(kind, target, lasts_ns, place))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if fault.is_missed:
        raise PeersUnreachable(f"{target} has no such process just now: it is being started again, or has ended")
    if as_json:
        typer.echo(json.dumps(fault.document()))
    else:
        end = f", over after {lasts}" if lasts else ""
        typer.echo(f"{kind} {target}: process {', '.join(map(str, fault.pids))}{end}")


async def _strike(kind: str, target: str, lasts_ns: int, place: Path) -> StruckFault:
    import asyncio
    import signal
    import time

    from diloco_node.errors import ConfigError
    from diloco_node.lab.chaos.demo_processes import DemoFile
    from diloco_node.lab.chaos.executor import FaultExecutor
    from diloco_node.lab.chaos.fault_plan import PlannedFault, parse_target

    demo = DemoFile.load(place)
    if not demo.is_running:
        raise ConfigError(f"the demo of {place} has ended: name the folder of one that runs")
    fault = PlannedFault(0, kind, parse_target(target, list(demo.supervisors)), lasts_ns)
    began_ns = time.monotonic_ns()
    executor = FaultExecutor(
        lambda: DemoFile.load(place),
        now_ns=lambda: time.monotonic_ns() - began_ns,
        learner_pid=lambda region: _attached_learner(place / region),
    )
    task = asyncio.current_task()
    assert task is not None
    # As for Ctrl-C: a paused process would stand still for ever after a sudden end of this one.
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await executor.strike(fault)


def _attached_learner(state_dir: Path) -> int | None:
    """Process id of the learner, as its daemon names it; None if the daemon does not answer."""
    from diloco_node.cli.admin_client import ask_in
    from diloco_node.lab.demo.region_processes import attached_learner

    return attached_learner(ask_in(state_dir))
