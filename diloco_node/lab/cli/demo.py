"""`diloco-node demo`: its options, named as fields of `DemoOptions`. `lab.demo.demo_run` is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    *,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="Your training command, with OMP_NUM_THREADS=1 unless set; default: the built-in trainer.",
        ),
    ] = None,
    regions: Annotated[
        int | None,
        typer.Option("--regions", min=1, max=16, help="Regions on this machine [default: 4, or those of --wan]."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=5, max=86_400, help="How long to train [default: 90].")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            min=1,
            max=1 << 50,
            help="Train until so many are merged, instead; the schedule ends there.",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to keep it [default: a new folder].")] = None,
    data: Annotated[list[str] | None, typer.Option("--data", metavar="PATH", help="Text to train on.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of parameters, data order, and storm.")] = 0,
    wan: Annotated[
        Path | None, typer.Option("--wan", metavar="FILE", help="Run in an emulated WAN, such as netem/us-4.toml.")
    ] = None,
    has_outage: Annotated[bool, typer.Option("--outage", help="With --wan: cut one region off for a while.")] = False,
    budget: Annotated[
        str, typer.Option("--budget", metavar="RATE", help="What each region may send, and receive: 20Mbit/s.")
    ] = "",
    has_chaos: Annotated[bool, typer.Option("--chaos", help="A storm: processes are killed while it trains.")] = False,
    mtbf: Annotated[
        str, typer.Option("--mtbf", metavar="TIME", help="With --chaos: mean time between two kills [default: 5s].")
    ] = "",
    notice: Annotated[
        str,
        typer.Option(
            "--notice", metavar="TIME", help="With --chaos: machines are taken away, with so much notice, such as 30s."
        ),
    ] = "",
    script: Annotated[
        Path | None,
        typer.Option(
            "--script", metavar="FILE", help="Joins, leaves, kills, cuts ... at their times: docs/lab/chaos.md."
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="With a storm or script: report.json of the same undisturbed."),
    ] = None,
    step_time: Annotated[
        str, typer.Option("--step-time", metavar="TIME", help="Of an inner step, at least [default: 100ms].")
    ] = "",
    speeds: Annotated[
        str, typer.Option("--speeds", metavar="LIST", help="Relative speeds of the learners: 1,1,2,4.")
    ] = "",
    batches: Annotated[str, typer.Option("--batches", metavar="LIST", help="Batches of the learners: 8,8,4,16.")] = "",
    ranks: Annotated[str, typer.Option("--ranks", metavar="LIST", help="Processes of each learner: 2,2,1,2.")] = "",
    shards: Annotated[
        str,
        typer.Option("--shard", metavar="LIST", help="With --ranks, how each model is cut: fsdp,ddp,none,fsdp."),
    ] = "",
    is_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run several regions on this machine, with real processes and real links, and report."""
    options = dict(locals())
    from diloco_node.errors import ConfigError
    from diloco_node.lab.demo.demo_options import SECONDS_DEFAULT, DemoOptions
    from diloco_node.lab.demo.demo_run import run_demo

    if seconds is not None and tokens is not None:
        raise ConfigError("--seconds and --tokens both say when the training ends: give one of them")
    options |= {"seconds": seconds or SECONDS_DEFAULT, "tokens": tokens or 0, "data": tuple(data or ())}
    options["command"] = tuple(command or ())
    raise typer.Exit(run_demo(DemoOptions(**options)))
