"""`diloco-node plan`: what bandwidth, memory and disk a model needs, and which change makes it fit the links."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from diloco_node.cli.options import parse_option
from diloco_node.errors import ConfigError
from diloco_node.state_names import NODE_NAME

if TYPE_CHECKING:
    from diloco_node.cli.plan.inputs import Mesh, Source
    from diloco_node.core.types import RunSettings
    from diloco_node.planning.plan import Network, Plan

T = TypeVar("T")

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
    fragments: Annotated[int | None, typer.Option("--fragments", min=1, max=1024, help="P. [default: 24]")] = None,
    sync_every: Annotated[
        int | None, typer.Option("--sync-every", min=1, max=100_000, help="H, in inner steps. [default: 24]")
    ] = None,
    overlap_steps: Annotated[
        int | None, typer.Option("--overlap-steps", min=0, max=99_999, help="tau. [default: 2]")
    ] = None,
    rounds_in_flight: Annotated[
        int | None, typer.Option("--rounds-in-flight", min=1, max=64, help="Rounds open at once. [default: 2]")
    ] = None,
    codec_up: Annotated[
        str | None,
        typer.Option("--codec-up", metavar="CODEC", help="Contributions: int4, int8, bf16, fp32. [default: int4]"),
    ] = None,
    codec_down: Annotated[
        str | None, typer.Option("--codec-down", metavar="CODEC", help="Merged fragments. [default: int8]")
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
    overhead: Annotated[
        str, typer.Option("--overhead", metavar="PERCENT", help="Wire bytes on top of the payload.")
    ] = "6%",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Bandwidth, memory and disk that a model needs; what would make it fit. Exit code 1 if it does not fit.

    With --parameters the size is that one, and the rest is run.toml's, where there is one.
    """
    from diloco_node.cli.plan.inputs import read_mesh

    source = _source(parameters, config, place, is_counted=regions is not None)
    flags = {
        "fragments": fragments,
        "sync_every": sync_every,
        "overlap_steps": overlap_steps,
        "rounds_in_flight_max": rounds_in_flight,
        "codec_up": codec_up,
        "codec_down": codec_down,
    }
    limits = _limits(budget, egress, ingress)
    request = _Request(
        source=source,
        settings=_settings(source, flags),
        mesh=None if mesh is None else read_mesh(mesh),
        region_count=regions,
        step_time=_step_time(source, step_time),
        rtt=_rtt(source, rtt, mesh),
        limits=limits,
        overhead=overhead,
    )
    result = request.plan()
    from diloco_node.cli.plan.plan_view import document, render

    if as_json:
        typer.echo(json.dumps(document(result, request.inputs()), indent=1))
    else:
        from diloco_node.cli.tables import table_console

        table_console().print(render(result, request.inputs()))
    if result.network.has_limits and not result.fits:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Request:
    """The request, each number with its origin."""

    source: Source
    settings: RunSettings
    mesh: Mesh | None
    region_count: int | None
    step_time: tuple[int, str]
    rtt: tuple[int, str]
    limits: tuple[int | None, int | None]
    overhead: str

    def plan(self) -> Plan:
        """Do the arithmetic."""
        from diloco_node.cli.plan.inputs import parse_overhead
        from diloco_node.planning.plan import Workload, make_plan

        overhead = parse_overhead(self.overhead)
        names = self._regions()
        workload = Workload(
            self.source.sizes(self.settings.fragments), names, self.settings, self.step_time[0], overhead
        )
        return make_plan(workload, self._network(names, workload.overhead))

    def inputs(self) -> dict[str, str]:
        """Origins, for the head of the report."""
        origins = {"model": self.source.origin, "step_time": self.step_time[1], "rtt": self.rtt[1]}
        if self.mesh is not None and (missing := self.mesh.missing(self._regions())):
            origins["mesh"] = missing
        if self.limits != (None, None):
            return origins | {"budget": "command line"}
        return origins | ({"budget": self.source.origin} if self.source.egress or self.source.ingress else {})

    def _regions(self) -> tuple[str, ...]:
        regions = self.source.regions or (self.mesh.regions if self.mesh is not None else ())
        if not regions:
            return tuple(f"region-{index + 1:02d}" for index in range(self.region_count or 4))
        if self.region_count not in (None, len(regions)):
            where = self.source.origin if self.source.regions else "the mesh"
            raise ConfigError(
                f"--regions is {self.region_count}, but {where} names {len(regions)}: leave --regions out"
            )
        return regions

    def _network(self, names: tuple[str, ...], overhead: Fraction) -> Network:
        from diloco_node.planning.plan import Network

        given_out, given_in = self.limits
        egress = self.source.egress if given_out is None else dict.fromkeys(names, given_out)
        ingress = self.source.ingress if given_in is None else dict.fromkeys(names, given_in)
        if self.mesh is not None:
            return self.mesh.network(names, overhead, egress=egress, ingress=ingress)
        return Network(rtt_ns=self.rtt[0], egress=egress, ingress=ingress)


def _source(parameters: str | None, config: Path | None, place: str | None, *, is_counted: bool) -> Source:
    """Where the numbers come from. A run.toml that nobody named says nothing of regions that were counted."""
    from diloco_node.cli.options import load
    from diloco_node.cli.places import region_folder
    from diloco_node.cli.plan import inputs
    from diloco_node.config.resolve import DEFAULT_NAME

    if place is not None:
        if parameters is not None:
            raise ConfigError(f"--parameters and {place!r} both name a model: give one of them")
        return inputs.source_of_state(region_folder(place, config, file=NODE_NAME))
    if config is not None or Path(DEFAULT_NAME).exists():
        run_config = load(config)
        if parameters is None:
            return inputs.source_of_config(run_config, config)
        source = inputs.source_of_size(parameters, run_config, config)
        is_named = config is not None or not is_counted
        return source if is_named else replace(source, regions=(), egress={}, ingress={})
    if parameters is None:
        raise ConfigError(
            "which model? give its size (--parameters 5e9), a run (--config run.toml) or a region's state folder "
            "(plan state/us-east)"
        )
    return inputs.source_of_parameters(parameters)


def _settings(source: Source, flags: dict[str, Any]) -> RunSettings:
    from diloco_node.core.types import Codec

    overrides = {name: value for name, value in flags.items() if value is not None}
    for name in ("codec_up", "codec_down"):
        if name in overrides:
            flag = f"--{name.replace('_', '-')}"
            if overrides[name] not in set(Codec):
                raise ConfigError(f"{flag} is {overrides[name]!r}: use one of {', '.join(Codec)}")
            overrides[name] = Codec(overrides[name])
    settings = replace(source.settings, **overrides)
    if settings.overlap_steps >= settings.sync_every:
        raise ConfigError(
            f"--overlap-steps is {settings.overlap_steps}: it must be less than --sync-every, {settings.sync_every}"
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
    """(egress, ingress) in wire bytes per second."""
    from diloco_node.config.units import parse_rate

    total, out, into = (
        None if text is None else parse_option(flag, text, parse_rate).bytes_per_s
        for flag, text in (("--budget", budget), ("--egress", egress), ("--ingress", ingress))
    )
    return (total if out is None else out), (total if into is None else into)
