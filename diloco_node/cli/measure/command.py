"""`diloco-node measure`: round trips and goodput between regions, by the path that a run would take."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from diloco_node.cli.options import ConfigOption
from diloco_node.errors import ConfigError, DilocoError, PeersUnreachable

if TYPE_CHECKING:
    from diloco_node.adapters.series import Keep
    from diloco_node.cli.measure.daemon import Running
    from diloco_node.cli.measure.run import HowLong

app = typer.Typer(
    help="Round trips and goodput between regions, by the path that a run would take.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SECONDS: Final = 5.0
SECONDS_MIN: Final = 0.2
SECONDS_MAX: Final = 120.0
CONNECTIONS: Final = "1,2,4,8"

RegionOption = Annotated[
    str | None,
    typer.Option("--region", "-r", metavar="NAME", help="Who we are [default: the one whose key is here]."),
]
CertsOption = Annotated[
    Path | None, typer.Option("--certs", metavar="FOLDER", help="That certs init made [default: run.toml's, or certs].")
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=SECONDS_MIN, max=SECONDS_MAX, help="Of each test, its warm-up apart.")
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
        max=4096,
        help="MiB of each test through a daemon, its warm-up too [default: 4096].",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]
PeerArgument = Annotated[str, typer.Argument(metavar="PEER", help="A region of run.toml, or HOST:PORT.")]
PlainOption = Annotated[bool | None, typer.Option("--plain/--no-plain", help="Plain TCP beside it.")]


@app.command()
def serve(
    *,
    region: RegionOption = None,
    config: ConfigOption = None,
    certs: CertsOption = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="What to bind [default: as the region's daemon]."),
    ] = None,
    plain_port: Annotated[
        int, typer.Option("--plain-port", min=0, max=65_535, help="For plain TCP, on the same host; 0: a free one.")
    ] = 0,
    plain: Annotated[bool, typer.Option("--plain/--no-plain", help="Plain TCP beside it.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Answer measurements until Ctrl-C. Before a run exists it takes the region's own port; needs certificates only."""
    from diloco_node.cli.measure import run as measure_run

    here = measure_run.Here.find(config, certs, region)
    where = measure_run.parse_address(listen, "--listen", port_min=0) if listen is not None else here.listen()

    def told(ends: dict[str, Any]) -> None:
        if as_json:
            typer.echo(json.dumps(ends))
        else:
            also = f", plain TCP at port {ends['plain_port']}" if ends["plain_port"] else ""
            place = f"{ends['host']}:{ends['port']}"
            typer.echo(f"region {ends['region']} answers measurements at {place}{also}; Ctrl-C ends it")
        sys.stdout.flush()

    measure_run.run(lambda: measure_run.serve(here, where, plain_port if plain else None, told))


@app.command()
def latency(
    *,
    peer: PeerArgument,
    region: RegionOption = None,
    config: ConfigOption = None,
    certs: CertsOption = None,
    seconds: SecondsOption = SECONDS,
    load: Annotated[bool, typer.Option("--load", help="Also while the link is full, out, then in.")] = False,
    warm_up: WarmUpOption = None,
    most: MostOption = None,
    alone: AloneOption = False,
    as_json: JsonOption = False,
) -> None:
    """Round trips through the whole path: p50, p99, jitter (RFC 3550), and what TCP had to send again.

    Through the daemon of the region if it runs here, over the links that it has; else with a `measure serve` there.

    \b
    diloco-node measure latency us-west --load
    """
    from diloco_node.cli.measure import run as measure_run

    show = partial(_show_latency, as_json=as_json)
    daemon = _daemon(config, region, peer, most, alone=alone, certs=certs)
    how_long = measure_run.HowLong(seconds, warm_up)
    with _kept(show) as keep:
        if daemon is not None:
            document = _ask(daemon, {"what": "latency", "peer": peer, "load": load}, how_long, most, keep)
        else:
            here = measure_run.Here.find(config, certs, region)
            document = measure_run.run(lambda: measure_run.latency(here, peer, how_long, is_loaded=load, keep=keep))
    show(document)


def _show_latency(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    from diloco_node.cli.measure.view import LOSS_NOTE, latency_table
    from diloco_node.cli.tables import table_console

    table_console().print(latency_table(document), LOSS_NOTE, *_if_early(document), sep="\n\n")


@app.command()
def bandwidth(
    *,
    peer: PeerArgument,
    region: RegionOption = None,
    config: ConfigOption = None,
    certs: CertsOption = None,
    seconds: SecondsOption = SECONDS,
    warm_up: WarmUpOption = None,
    connections: Annotated[
        str | None,
        typer.Option(
            "--connections",
            metavar="N,...",
            help="Each a test of its own [default: 1,2,4,8; through a daemon those of the link].",
        ),
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", "-R", help="From the peer to here.")] = False,
    plain: PlainOption = None,
    most: MostOption = None,
    alone: AloneOption = False,
    as_json: JsonOption = False,
) -> None:
    """Goodput of the transport (TLS; incompressible, and int4 with zstd) beside plain TCP; CPU; what was sent again.

    Through the daemon of the region if it runs here: in its measurement lane, within its budget, behind all rounds;
    over the link that the run uses, or with --connections over as many opened for each test.

    \b
    diloco-node measure bandwidth us-west
    diloco-node measure bandwidth us-west --reverse --connections 1,4 --seconds 10
    """
    from diloco_node.cli.measure import run as measure_run

    counts = measure_run.parse_connections(CONNECTIONS if connections is None else connections)
    show = partial(_show_bandwidth, as_json=as_json)
    daemon = _daemon(config, region, peer, most, alone=alone, certs=certs)
    how_long = measure_run.HowLong(seconds, warm_up)
    with _kept(show) as keep:
        if daemon is not None:
            asked = {"what": "bandwidth", "peer": peer, "reverse": reverse, "plain": plain is not False}
            if connections is not None:
                asked["connections"] = counts
            document = _ask(daemon, asked, how_long, most, keep)
        else:
            here = measure_run.Here.find(config, certs, region)
            document = measure_run.run(
                lambda: measure_run.bandwidth(
                    here, peer, counts, how_long, is_reverse=reverse, is_plain_too=plain is not False, keep=keep
                )
            )
    show(document)
    failures = document.get("failures")
    if failures:
        raise PeersUnreachable(
            f"{len(failures)} of {len(failures) + len(document['tests'])} tests could not be carried out, the first: "
            f"{failures[0]['error']}"
        )


def _show_bandwidth(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=1))
    else:
        from diloco_node.cli.measure.view import bandwidth_table, bandwidth_title, failure_lines, short_lines
        from diloco_node.cli.tables import table_console

        console = table_console()
        console.print(bandwidth_title(document), soft_wrap=True)
        console.print(bandwidth_table(document))
        plain_error = [document["plain_error"]] if document.get("plain_error") else []
        for line in (*short_lines(document), *failure_lines(document), *plain_error, *_if_early(document)):
            console.print(line, markup=False, soft_wrap=True)


@app.command()
def mesh(
    *,
    region: RegionOption = None,
    config: ConfigOption = None,
    certs: CertsOption = None,
    seconds: SecondsOption = SECONDS,
    warm_up: WarmUpOption = None,
    plain: PlainOption = None,
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

    \b
    diloco-node measure mesh --out mesh.json
    diloco-node plan --mesh mesh.json
    """
    from diloco_node.cli.measure import run as measure_run

    if out is not None:
        measure_run.check_writable(out)  # before minutes are spent
    show = partial(_show_mesh, as_json=as_json)
    daemon = _daemon(config, region, None, most, alone=alone, certs=certs)
    how_long = measure_run.HowLong(seconds, warm_up)
    with _kept(show) as keep:
        if daemon is not None:
            document = _ask(daemon, {"what": "mesh", "plain": plain is True}, how_long, most, keep)
        else:
            here = measure_run.Here.find(config, certs, region)
            pairs = here.pairs()
            document = measure_run.run(
                lambda: measure_run.mesh(here, pairs, how_long, is_plain_too=plain is True, keep=keep)
            )
    show(document)
    if out is not None:
        measure_run.write(out, json.dumps(document, indent=1) + "\n")
    failures = document["failures"]
    if failures:
        first, count = failures[0], len(failures) + len(document["pairs"])
        raise PeersUnreachable(
            f"{len(failures)} of {count} pairs could not be measured, the first from {first['from']} to "
            f"{first['to']}: {first['error']}"
        )


def _show_mesh(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    from diloco_node.cli.measure.view import mesh_table
    from diloco_node.cli.tables import table_console

    console = table_console()
    console.print(mesh_table(document))
    for one in document.get("plain_errors", ()):
        text = f"{one['from']} -> {one['to']}: no plain TCP beside it: {one['error']}"
        console.print(text, markup=False, soft_wrap=True)
    for line in _if_early(document):
        console.print(line)


def _if_early(document: dict[str, Any]) -> list[str]:
    return ["ended early: this is what was measured until then"] if document.get("ended_early") else []


@contextmanager
def _kept(show: Callable[[dict[str, Any]], None]) -> Iterator[Keep]:
    """Keep what there is so far; shown when the measurement is cut short, by Ctrl-C or an error, which goes on."""
    so_far: deque[dict[str, Any]] = deque(maxlen=1)
    try:
        yield so_far.append
    except (KeyboardInterrupt, DilocoError):
        if so_far:
            show({**so_far.pop(), "ended_early": True})
        raise


# ---- through a daemon ------------------------------------------------------------------------------------------------


def _daemon(
    config: Path | None, region: str | None, peer: str | None, most: int | None, *, alone: bool, certs: Path | None
) -> Running | None:
    """The daemon to ask: none when the user names a measuring end (HOST:PORT), a folder of keys, or says --alone."""
    found = None
    if not alone and certs is None and (peer is None or ":" not in peer):
        from diloco_node.cli.measure.daemon import find_daemon

        found = find_daemon(config, region)
    if found is None and most is not None:
        raise ConfigError(
            "--most bounds a measurement through a running daemon, and this one does not go through one: leave it out, "
            "and bound it with --seconds"
        )
    return found


def _ask(daemon: Running, document: dict[str, Any], how_long: HowLong, most: int | None, keep: Keep) -> dict[str, Any]:
    from diloco_node.cli.measure.daemon import Progress, measure
    from diloco_node.cli.measure.run import progress

    asked = {**document, "seconds": how_long.seconds, "warm_up_seconds": how_long.warm_up}
    if most is not None:
        asked["bytes_max"] = most * 2**20
    with progress(f"asking the daemon of {daemon.region}") as say:
        return measure(daemon, asked, Progress(say), keep)
