"""`diloco-node measure`: round trips and goodput between regions, by the path that a run would take."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node.cli.options import ConfigOption, OwnRegionOption
from diloco_node.errors import DilocoError, PeersUnreachable

if TYPE_CHECKING:
    from diloco_node.measure.measurement import OnPartial

app = typer.Typer(
    help="Measure round trips and goodput between regions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SECONDS: Final = 5.0
SECONDS_MIN: Final = 0.2
SECONDS_MAX: Final = 120.0

SecondsOption = Annotated[
    float, typer.Option("--seconds", min=SECONDS_MIN, max=SECONDS_MAX, help="Of each flow, its warm-up apart.")
]
WarmUpOption = Annotated[
    float | None,
    typer.Option("--warm-up", min=0, max=30, help="Seconds not counted [default: 25 round trips, 1 to 5 s]."),
]
AloneOption = Annotated[
    bool, typer.Option("--alone", help="Not through the daemon that runs here, but with a `measure serve` there.")
]
MostOption = Annotated[
    int | None,
    typer.Option(
        "--most",
        metavar="MIB",
        min=16,
        max=262_144,
        help="MiB of each flow, its warm-up too [default and most through a daemon: 4096].",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]
PeerArgument = Annotated[str, typer.Argument(metavar="PEER", help="Another region of run.toml.")]


@app.command()
def serve(*, region: OwnRegionOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Answer measurements until Ctrl-C, before a run or, at measure_port, beside it."""
    from diloco_node.cli.measure import own_links

    def on_listening(end: dict[str, Any]) -> None:
        if as_json:
            typer.echo(json.dumps(end))
        else:
            place = f"{end['host']}:{end['port']}"
            typer.echo(f"region {end['region']} answers measurements at {place}; Ctrl-C ends it")
        sys.stdout.flush()

    here = own_links.Here.find(config, region)
    own_links.run(lambda: own_links.serve(here, on_listening))


@dataclass(frozen=True, slots=True)
class _Way:
    config: Path | None
    region: str | None
    alone: bool
    seconds: float
    warm_up: float | None
    most: int | None
    as_json: bool

    def measure(self, document: dict[str, Any]) -> dict[str, Any]:
        """Measure and show the document. Cut short, by Ctrl-C or an error that goes on, show the results so far."""
        so_far: deque[dict[str, Any]] = deque(maxlen=1)
        try:
            result = self._run(document, so_far.append)
        except (KeyboardInterrupt, DilocoError):
            if so_far:
                self._show({**so_far.pop(), "ended_early": True})
            raise
        self._show(result)
        return result

    def _run(self, document: dict[str, Any], on_partial: OnPartial) -> dict[str, Any]:
        from diloco_node.cli.measure import live_measurement, own_links

        request = {**document, "seconds": self.seconds, "warm_up_seconds": self.warm_up}
        if self.most is not None:
            request["bytes_max"] = self.most * 2**20
        daemon = None if self.alone else live_measurement.find_daemon(self.config, self.region)
        if daemon is None:
            here = own_links.Here.find(self.config, self.region)
            return own_links.run(lambda: own_links.measure(here, request, on_partial))
        with own_links.progress(f"asking the daemon of {daemon.name}") as on_progress:
            return live_measurement.measure(daemon, request, on_progress, on_partial)

    def _show(self, document: dict[str, Any]) -> None:
        if self.as_json:
            typer.echo(json.dumps(document, indent=1))
        else:
            from diloco_node.cli.measure.measure_view import show

            show(document)


@app.command()
def latency(
    *,
    peer: PeerArgument,
    region: OwnRegionOption = None,
    config: ConfigOption = None,
    seconds: SecondsOption = SECONDS,
    load: Annotated[bool, typer.Option("--load", help="Also while the link is full, out, then in.")] = False,
    warm_up: WarmUpOption = None,
    most: MostOption = None,
    alone: AloneOption = False,
    as_json: JsonOption = False,
) -> None:
    """Round trips through the whole path: p50, p99, jitter (RFC 3550), and what TCP retransmitted.

    Through the daemon of the region if it runs here, over the links that it has; else with a `measure serve` there.
    """
    way = _Way(config, region, alone, seconds, warm_up, most, as_json)
    way.measure({"what": "latency", "peer": peer, "load": load})


@app.command()
def bandwidth(
    *,
    peer: PeerArgument,
    region: OwnRegionOption = None,
    config: ConfigOption = None,
    seconds: SecondsOption = SECONDS,
    warm_up: WarmUpOption = None,
    reverse: Annotated[bool, typer.Option("--reverse", "-R", help="From the peer to here.")] = False,
    most: MostOption = None,
    alone: AloneOption = False,
    as_json: JsonOption = False,
) -> None:
    """Goodput of the transport (TLS, incompressible bytes), CPU, and what TCP retransmitted.

    Through the daemon of the region if it runs here: over the link that the run uses, in its measurement lane, within
    its budget, behind all rounds. Else with a `measure serve` there, on a link of its own.
    """
    way = _Way(config, region, alone, seconds, warm_up, most, as_json)
    way.measure({"what": "bandwidth", "peer": peer, "reverse": reverse})


@app.command()
def mesh(
    *,
    region: OwnRegionOption = None,
    config: ConfigOption = None,
    seconds: SecondsOption = SECONDS,
    warm_up: WarmUpOption = None,
    most: MostOption = None,
    alone: AloneOption = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the JSON there, for plan --mesh.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """All ordered pairs of run.toml's regions, one after the other.

    Through the daemon of the region if it runs here: each region measures towards the others, over the links they have.
    Else `measure serve` must run in all other regions.
    """
    from diloco_node.cli.measure import own_links

    if out is not None:
        own_links.check_writable(out)  # before minutes are spent
    way = _Way(config, region, alone, seconds, warm_up, most, as_json)
    document = way.measure({"what": "mesh"})
    if out is not None:
        own_links.write(out, json.dumps(document, indent=1) + "\n")
    failures = document["failures"]
    if failures:
        first, count = failures[0], len(failures) + len(document["pairs"])
        raise PeersUnreachable(
            f"{len(failures)} of {count} pairs could not be measured, the first from {first['from']} to "
            f"{first['to']}: {first['error']}"
        )
