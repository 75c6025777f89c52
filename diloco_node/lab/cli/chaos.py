"""`diloco-node chaos`: one fault, on purpose, in a demo or in the containers of a compose run; and tapes of faults."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, TypeVar

import typer

if TYPE_CHECKING:
    from diloco_node.lab.chaos.executor import StruckFault

app = typer.Typer(
    help="Strike a demo that runs on this machine, or with --compose the containers of docker-compose.yml.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

T = TypeVar("T")

TargetArgument = Annotated[
    str, typer.Argument(metavar="TARGET", help="us-east, us-east.daemon, us-east.learner, us-east.supervisor.")
]
RegionArgument = Annotated[str, typer.Argument(metavar="REGION", help="Such as us-east.")]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", metavar="FOLDER", help="Of the demo [default: the one that runs in runs/].")
]
ComposeOption = Annotated[bool, typer.Option("--compose", help="Strike containers, through the docker command.")]
ProjectOption = Annotated[
    str | None, typer.Option("--project", metavar="NAME", help="Of Compose [default: the one that is up].")
]
ForOption = Annotated[str, typer.Option("--for", metavar="TIME", help="How long it lasts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]

FOR_DEFAULT: Final = "5s"


class StruckRun(NamedTuple):
    """Which run to strike, as the options name it."""

    folder: Path | None
    is_compose: bool
    project: str | None


@app.command()
def kill(
    *,
    target: TargetArgument,
    folder: FolderOption = None,
    compose: ComposeOption = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGKILL. What has died is started again: by the region's supervisor, and that by the demo or by this command."""
    _strike("kill", target, "", StruckRun(folder, compose, project), as_json)


@app.command()
def stop(
    *,
    target: TargetArgument,
    folder: FolderOption = None,
    compose: ComposeOption = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGTERM: it ends in order, and is started again. A region is its supervisor, which stops the other two."""
    _strike("stop", target, "", StruckRun(folder, compose, project), as_json)


@app.command()
def pause(
    *,
    target: TargetArgument,
    lasts: ForOption = FOR_DEFAULT,
    folder: FolderOption = None,
    compose: ComposeOption = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIGSTOP, and SIGCONT after a time; this command lasts as long."""
    _strike("pause", target, lasts, StruckRun(folder, compose, project), as_json)


@app.command()
def slow(
    *,
    target: TargetArgument,
    lasts: ForOption = FOR_DEFAULT,
    folder: FolderOption = None,
    compose: ComposeOption = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """A quarter of its time to run, by SIGSTOP and SIGCONT; this command lasts as long."""
    _strike("slow", target, lasts, StruckRun(folder, compose, project), as_json)


@app.command()
def partition(
    *,
    target: RegionArgument,
    lasts: ForOption = FOR_DEFAULT,
    folder: FolderOption = None,
    compose: ComposeOption = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """End all links of a region and refuse new ones; a container's link goes down. Others: `demo --wan`, `wan cut`."""
    _strike("partition", target, lasts, StruckRun(folder, compose, project), as_json)


@app.command()
def disk(
    *,
    target: RegionArgument,
    lasts: ForOption = FOR_DEFAULT,
    folder: FolderOption = None,
    compose: ComposeOption = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let every fsync of a region's daemon fail with EIO; containers must be up with docker/chaos.yml."""
    _strike("disk", target, lasts, StruckRun(folder, compose, project), as_json)


@app.command()
def tape(
    *,
    chips: Annotated[int, typer.Option("--chips", min=1024, max=100_000_000, help="Of all regions together.")],
    regions: Annotated[int, typer.Option("--regions", min=1, max=16, help="As many as the demo's.")] = 4,
    seconds: Annotated[float, typer.Option("--seconds", min=5, max=86_400, help="As long as the demo.")] = 90.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the failures.")] = 0,
) -> None:
    """Print the failures of the paper's model as a tape for `demo --chaos --tape`; see `simulate goodput`."""
    from diloco_node.errors import ConfigError
    from diloco_node.lab.chaos.fault_plan import FAULTS_MAX
    from diloco_node.lab.chaos.tape import tape_text
    from diloco_node.lab.demo.demo_run import NAMES
    from diloco_node.lab.sim.goodput import failure_plan

    plan = failure_plan(chips, NAMES[:regions], seconds=seconds, seed=seed)
    if len(plan.faults) > FAULTS_MAX:
        raise ConfigError(f"{len(plan.faults):,} faults are more than a tape has ({FAULTS_MAX:,}): take fewer --chips")
    typer.echo(tape_text(plan), nl=False)


def _strike(kind: str, target: str, lasts: str, run: StruckRun, as_json: bool) -> None:
    import asyncio

    from diloco_node.cli.options import parsed
    from diloco_node.config.units import parse_duration
    from diloco_node.errors import ConfigError, PeersUnreachable

    lasts_ns = parsed("--for", lasts, parse_duration).ns if lasts else 0
    in_containers = run.is_compose or run.project is not None
    if in_containers and run.folder is not None:
        raise ConfigError("--folder is for a demo, --compose and --project are for containers: leave one of them out")
    if in_containers:
        work = _in_container(kind, target, lasts_ns, run.project)
    else:
        work = _in_demo(kind, target, lasts_ns, run.folder)
    try:
        done, where = asyncio.run(_until_told(work))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if done.is_missed:
        raise PeersUnreachable(f"{target} has no such process just now: it is being started again, or has ended")
    if as_json:
        typer.echo(json.dumps(done.document()))
    else:
        over = f", over after {lasts}" if lasts else ""
        typer.echo(f"{kind} {target}: process {', '.join(map(str, done.pids))}{where}{over}")


async def _in_demo(kind: str, target: str, lasts_ns: int, folder: Path | None) -> tuple[StruckFault, str]:
    import time

    from diloco_node.errors import ConfigError
    from diloco_node.lab.chaos.demo_processes import DemoFile, running_demo
    from diloco_node.lab.chaos.executor import FaultExecutor
    from diloco_node.lab.chaos.fault_plan import PlannedFault, parse_target

    place = folder if folder is not None else running_demo()
    demo = DemoFile.load(place)
    if not demo.is_running:
        raise ConfigError(f"the demo of {place} has ended: name the folder of one that runs")
    fault = PlannedFault(0, kind, parse_target(target, list(demo.supervisors)), lasts_ns)
    began_ns = time.monotonic_ns()
    executor = FaultExecutor(
        lambda: DemoFile.load(place),
        now_ns=lambda: time.monotonic_ns() - began_ns,
        attached=lambda region: attached(place / region),
    )
    return await executor.strike(fault), ""


async def _in_container(kind: str, target: str, lasts_ns: int, project: str | None) -> tuple[StruckFault, str]:
    from diloco_node.lab.chaos.containers import find_run
    from diloco_node.lab.chaos.fault_plan import PlannedFault, parse_target

    run = await find_run(project)
    fault = PlannedFault(0, kind, parse_target(target, list(run.regions)), lasts_ns)
    return await run.strike(fault), f" in {run.regions[fault.target.region].name}"


async def _until_told(work: Awaitable[T]) -> T:
    """SIGTERM and SIGHUP end it in order, as Ctrl-C does: else what is paused would stand still for ever."""
    import asyncio
    import signal

    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await work


def attached(state_dir: Path) -> int | None:
    """The process that the daemon of this folder names as its learner, if it answers."""
    from diloco_node.cli.admin_client import ask_in
    from diloco_node.lab.demo.region_processes import attached_learner

    return attached_learner(ask_in(state_dir))
