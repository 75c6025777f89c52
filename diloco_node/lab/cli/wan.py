"""`diloco-node wan`: an emulated WAN on this machine, driven by hand."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_node.cli.tables import table_lines
from diloco_node.errors import ConfigError

app = typer.Typer(
    help="An emulated WAN: one network namespace per region.", no_args_is_help=True, rich_markup_mode=None
)

NameOption = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Which emulation [default: the only one].")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]
OtherOption = Annotated[str, typer.Option("--from", metavar="REGION", help="Between these two only.")]
OneWayOption = Annotated[
    str, typer.Option("--one-way", metavar="out|in", help="Only what the region sends (out) or receives (in).")
]


@app.command()
def up(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Such as netem/us-4.toml.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the emulation [default: from the file's].")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of jitter and loss.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make the namespaces and shape the links between them, until `down`; the file's outages count from now."""
    from diloco_node.lab.wan import emulation
    from diloco_node.lab.wan.namespaces import run_name
    from diloco_node.lab.wan.topology import load_topology

    load_topology(file)
    _need_root()
    state = emulation.up(file, run=run_name(name or file.stem), seed=seed)
    if as_json:
        typer.echo(json.dumps(_document(state)))
        return
    places = [(place.region, place.address, f"ip netns exec {place.namespace} COMMAND") for place in state.places()]
    typer.echo("\n".join(table_lines([("region", "left"), ("address", "left"), ("run there", "left")], places)))
    typer.echo(f"end it with: diloco-node wan down {state.run}")


@app.command()
def down(
    *,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which; default: the only one.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All emulations, and what crashed ones left.")] = False,
) -> None:
    """Remove an emulation: its keeper, namespaces and files, also after a crash. Nothing else is touched."""
    from diloco_node.lab.wan import emulation
    from diloco_node.lab.wan import emulation_state as state
    from diloco_node.lab.wan.namespaces import PROBE

    _need_root()
    run_names = state.runs()
    if everything:
        chosen_names = run_names
    elif name is not None:
        chosen_names = [name]
    elif len(lasting := [run for run in run_names if not run.startswith(PROBE)]) <= 1:
        chosen_names = lasting
    else:
        raise ConfigError(f"several emulations are there: {', '.join(run_names)}; name one, or give --all")
    if not chosen_names:
        typer.echo("no emulation is there")
    for run in chosen_names:
        typer.echo("\n".join(emulation.down(run)))


@app.command()
def cut(
    *,
    region: Annotated[str, typer.Argument(metavar="REGION")],
    peer: OtherOption = "",
    one_way: OneWayOption = "",
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut a region off: from everyone or from one, both ways or one way. `heal` with the same words takes it back."""
    _send("cut", region, peer, one_way, name=name, as_json=as_json)


@app.command()
def heal(
    *,
    region: Annotated[str | None, typer.Argument(metavar="[REGION]", help="Default: all of them.")] = None,
    peer: OtherOption = "",
    one_way: OneWayOption = "",
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take back cuts and changes: without options all that names the region, without a region all there are."""
    if region is not None:
        _send("heal", region, peer, one_way, name=name, as_json=as_json)
        return
    if peer or one_way:
        raise ConfigError("--from and --one-way say which path of a region: name the region, or leave them out")
    from diloco_node.lab.wan import emulation
    from diloco_node.lab.wan.control import request

    _need_root()
    state = emulation.find(name)
    answers = [
        request(state.socket, {"do": "heal", "region": place.region, "other": "", "direction": "both"})
        for place in state.places()
    ]
    _show_answer({**answers[-1], "healed": sum(answer["healed"] for answer in answers)}, as_json=as_json)


@app.command("set")
def set_path(
    *,
    region: Annotated[str, typer.Argument(metavar="REGION")],
    peer: OtherOption = "",
    one_way: OneWayOption = "",
    delay: Annotated[str | None, typer.Option("--delay", help="One way, such as 80ms.")] = None,
    jitter: Annotated[str | None, typer.Option("--jitter", help="Such as 5ms.")] = None,
    loss: Annotated[str | None, typer.Option("--loss", help="Such as 1%.")] = None,
    rate: Annotated[str | None, typer.Option("--rate", help="Of each pair, such as 100Mbit/s.")] = None,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change paths of a region until `heal`: delay, jitter, loss, rate."""
    values = {"delay": delay, "jitter": jitter, "loss": loss, "rate": rate}
    values = {key: value for key, value in values.items() if value is not None}
    _send("set", region, peer, one_way, name=name, as_json=as_json, **values)


@app.command()
def status(*, name: NameOption = None, as_json: JsonOption = False) -> None:
    """Show what is emulated and cut, and how much each pair has carried, lost and dropped."""
    from diloco_node.lab.wan import emulation
    from diloco_node.lab.wan.control import request

    _need_root()
    state = emulation.find(name)
    answer = request(state.socket, {"do": "status"})
    if as_json:
        typer.echo(json.dumps({**_document(state), **answer}))
        return
    typer.echo(f"{state.run} in force: {', '.join(answer['conditions']) or 'nothing, all links are as in the file'}")
    for line in answer["log"]:
        typer.echo(f"  {line}")
    figures = ("bytes_passed", "packets_lost", "packets_overflowed", "packets_cut")
    pairs = [(pair["from"], pair["to"], *(f"{pair[key]:,}" for key in figures)) for pair in answer["pairs"]]
    headings = ("bytes", "packets lost", "overflowed", "cut")
    if pairs:
        columns = [("from", "left"), ("to", "left"), *((name, "right") for name in headings)]
        typer.echo("\n".join(table_lines(columns, pairs)))


def _send(verb: str, region: str, peer: str, one_way: str, *, name: str | None, as_json: bool, **values: Any) -> None:
    from diloco_node.lab.wan import emulation
    from diloco_node.lab.wan.control import request

    _need_root()
    if one_way not in ("", "out", "in"):
        raise ConfigError(f"--one-way is {one_way!r}: use out or in")
    state = emulation.find(name)
    command = {"do": verb, "region": region, "other": peer, "direction": one_way or "both", **values}
    _show_answer(request(state.socket, command), as_json=as_json)


def _show_answer(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(answer))
        return
    if answer.get("healed") == 0:
        typer.echo("there was nothing to heal")
    typer.echo(f"in force: {', '.join(answer['conditions']) or 'nothing, all links are as in the file'}")


def _need_root() -> None:
    from diloco_node.lab.wan.emulation import NEED_ROOT

    if os.geteuid() != 0:
        # With its folder: root's PATH has no virtual environment.
        raise ConfigError(f"{NEED_ROOT}: sudo {shlex.quote(sys.argv[0])} wan ...")


def _document(state: Any) -> dict[str, Any]:
    return {
        "name": state.run,
        "regions": [
            {"name": place.region, "namespace": place.namespace, "address": place.address} for place in state.places()
        ],
    }
