"""`diloco-node plan`: what bandwidth, memory and disk a model needs, and which change makes it fit the links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node.cli.options import has_config, load, parse_option
from diloco_node.errors import ConfigError
from diloco_node.state_names import NODE_NAME

if TYPE_CHECKING:
    from diloco_node.cli.plan.inputs import Mesh, Source
    from diloco_node.core.types import RunSettings

REGIONS_MAX: Final = 64
STEP_TIME_NS: Final = 1_000_000_000
RTT_NS: Final = 40_000_000
ASSUMED: Final = "assumed"


def plan(
    *,
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="REGION|STATE-FOLDER", help="The model of this region, also while it runs. [default: run.toml's]"
        ),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option("--parameters", "-n", metavar="N", help="Size of the model: 5e9, 5B, 350M.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="Model, schedule, regions, budget of this run.toml."),
    ] = None,
    regions: Annotated[
        int | None, typer.Option("--regions", "-m", min=1, max=REGIONS_MAX, help="How many. [default: 4]")
    ] = None,
    step_time: Annotated[
        str | None, typer.Option("--step-time", metavar="TIME", help="Compute of one inner step. [default: 1s]")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="rounds.KEY=VALUE", help="As rounds.sync_every=16; may be repeated."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="RATE", help="Ceiling of each region, in and out: 2Gbit/s. [default: --config's]"
        ),
    ] = None,
    egress: Annotated[str | None, typer.Option("--egress", metavar="RATE", help="Only out.")] = None,
    ingress: Annotated[str | None, typer.Option("--ingress", metavar="RATE", help="Only in.")] = None,
    mesh: Annotated[
        Path | None, typer.Option("--mesh", metavar="FILE", help="Links as `measure mesh --json` found them.")
    ] = None,
    rtt: Annotated[
        str | None, typer.Option("--rtt", metavar="TIME", help="Round trip, where no mesh says it. [default: 40ms]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Bandwidth, memory and disk that a model needs; what would make it fit. Exit code 1 if it does not fit.

    With --parameters the size is that one, and the rest is run.toml's, where there is one.
    """
    from diloco_node.cli.plan.inputs import read_mesh
    from diloco_node.cli.plan.plan_view import document, render
    from diloco_node.core.types import Direction
    from diloco_node.planning.plan import Network, Workload, make_plan

    source = _source(parameters, config, place, is_counted=regions is not None)
    limits = _limits(budget, egress, ingress)
    settings = _settings(source, assignments or ())
    links = None if mesh is None else read_mesh(mesh)
    origins = {"model": source.origin}
    step_time_ns, origins["step_time"] = _step_time(source, step_time)
    rtt_ns, origins["rtt"] = _rtt(source, rtt, mesh)
    names = _region_names(source, links, regions)
    workload = Workload(source.sizes(settings.fragments), names, settings, step_time_ns)
    ceilings = [source.ceilings(direction) for direction in Direction]
    out, into = (
        rates if limit is None else dict.fromkeys(names, limit) for rates, limit in zip(ceilings, limits, strict=True)
    )
    if links is None:
        network = Network(rtt_ns=rtt_ns, egress=out, ingress=into)
    else:
        network = links.network(names, workload.overhead, egress=out, ingress=into)
        if missing := links.missing(names):
            origins["mesh"] = missing
    if limits != (None, None):
        origins["budget"] = "command line"
    elif any(ceilings):
        origins["budget"] = source.origin
    result = make_plan(workload, network)
    if as_json:
        typer.echo(json.dumps(document(result, origins), indent=1))
    else:
        typer.echo("\n".join(render(result, origins)))
    if result.network.has_limits and not result.fits:
        raise typer.Exit(1)


def _region_names(source: Source, links: Mesh | None, count: int | None) -> tuple[str, ...]:
    regions = source.regions or (links.regions if links is not None else ())
    if not regions:
        return tuple(f"region-{index + 1:02d}" for index in range(count or 4))
    if count not in (None, len(regions)):
        where = source.origin if source.regions else "the mesh"
        raise ConfigError(f"--regions is {count}, but {where} names {len(regions)}: leave --regions out")
    return regions


def _source(parameters: str | None, config: Path | None, place: str | None, *, is_counted: bool) -> Source:
    """Where the numbers come from. A run.toml that nobody named says nothing of regions that were counted."""
    from diloco_node.cli.places import region_folder
    from diloco_node.cli.plan import inputs
    from diloco_node.core.types import RunSettings

    if place is not None:
        if parameters is not None:
            raise ConfigError(f"--parameters and {place!r} both name a model: give one of them")
        return inputs.source_of_state(region_folder(place, config, file=NODE_NAME))
    if has_config(config):
        run_config = load(config)
        if parameters is None:
            return inputs.source_of_config(run_config, config)
        source = inputs.source_of_size(parameters, run_config, config)
        is_named = config is not None or not is_counted
        return source if is_named else replace(source, regions=(), limits={})
    if parameters is None:
        raise ConfigError(
            "which model? give its size (--parameters 5e9), a run (--config run.toml) or a region's state folder "
            "(plan state/us-east)"
        )
    size = inputs.parse_parameters(parameters)
    return inputs.Source(f"--parameters {parameters}", size, None, RunSettings())


def _settings(source: Source, assignments: Sequence[str]) -> RunSettings:
    from pydantic import ValidationError

    from diloco_node.config.schema import RoundsSection
    from diloco_node.core.types import RunSettings

    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        table, _, name = key.strip().partition(".")
        if (
            not equals
            or table != "rounds"
            or name not in RoundsSection.model_fields
            or not hasattr(RunSettings(), name)
        ):
            raise ConfigError(f"--set {assignment!r}: write rounds.KEY=VALUE, for example --set rounds.sync_every=16")
        values[name] = value.strip()
    try:
        section = RoundsSection(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigError(f"--set rounds.{fault['loc'][0]} is {fault['input']!r}: {fault['msg']}") from None
    settings = replace(source.settings, **{name: getattr(section, name) for name in values})
    if settings.overlap_steps >= settings.sync_every:
        raise ConfigError(
            f"rounds.overlap_steps is {settings.overlap_steps}: it must be less than rounds.sync_every, "
            f"{settings.sync_every}"
        )
    return settings


def _step_time(source: Source, flag: str | None) -> tuple[int, str]:
    if flag is not None:
        from diloco_node.config.units import parse_duration

        step_time_ns = parse_option("--step-time", flag, parse_duration).ns
        if step_time_ns < 1:
            raise ConfigError("--step-time is 0: a step takes some time, as 1s or 250ms")
        return step_time_ns, "--step-time"
    return (source.step_time_ns, "as it runs") if source.step_time_ns else (STEP_TIME_NS, ASSUMED)


def _rtt(source: Source, flag: str | None, mesh: Path | None) -> tuple[int, str]:
    if mesh is not None:
        if flag is not None:
            raise ConfigError("--rtt and --mesh both say how far the regions are apart: give one of them")
        return 0, str(mesh)
    if flag is not None:
        from diloco_node.config.units import parse_duration

        return parse_option("--rtt", flag, parse_duration).ns, "--rtt"
    return (source.rtt_ns, "as it runs") if source.rtt_ns else (RTT_NS, ASSUMED)


def _limits(budget: str | None, egress: str | None, ingress: str | None) -> tuple[int | None, int | None]:
    from diloco_node.config.units import parse_rate

    total, out, into = (
        None if text is None else parse_option(flag, text, parse_rate).bytes_per_s
        for flag, text in (("--budget", budget), ("--egress", egress), ("--ingress", ingress))
    )
    return (total if out is None else out), (total if into is None else into)
