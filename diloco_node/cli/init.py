"""`diloco-node init`: from a few questions to run.toml, certificates, and the commands to type next."""

from __future__ import annotations

import filecmp
import ipaddress
import itertools
import json
import shlex
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from diloco_node.cli.options import CONFIG_NAME, load_text, parse_option
from diloco_node.errors import ConfigError

CERTS_NAME: Final = "certs"
RUN_ID: Final = "my-run"
ADMIN_PORT: Final = 7401
LATER: Final = (
    "More regions may join while it runs: here `diloco-node certs add NAME`, there `diloco-node start --join HOST:PORT "
    "--region NAME`, then here `diloco-node members add NAME`. `diloco-node members remove NAME` lets one go."
)
LOOPBACK: Final = "localhost"
"""A region's, on loopback; of several on one machine, that of the first."""

LOOPBACK_NAMES: Final = (LOOPBACK, "ip6-localhost", "ip6-loopback")


@dataclass(frozen=True, slots=True)
class NewRun:
    """Answers. regions: HOST:PORT by name; None: it can't be dialled. script: None: the built-in trainer. steps: 0: no
    end."""

    run_id: str
    regions: dict[str, str | None]
    script: Path | None
    steps: int
    budget: str


def init(
    *,
    regions: Annotated[
        str | None,
        typer.Option("--regions", metavar="NAME=HOST:PORT,...", help="One may lack its address: it dials the others."),
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="NAME", help=f"[default: {RUN_ID}]")] = None,
    script: Annotated[
        str | None, typer.Option("--script", metavar="FILE", help="Your training script [default: built-in trainer].")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=0, help="End of the run. [default: 0, no end]")] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="RATE", help="Ceiling of each region, in and out: 2Gbit/s.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults for what no flag says.")] = False,
) -> None:
    """Write run.toml and a certificate for each region; ask for what no flag says."""
    _check_free(folder, CONFIG_NAME, CERTS_NAME)
    new = NewRun(
        run_id=_answer(run_id, "Name of the run", RUN_ID, yes),
        regions=parse_regions(_answer(regions, "Regions, as us-east=203.0.113.10:7400,us-west=...", None, yes)),
        script=_script(_answer(script, "Your training script (empty: the built-in trainer)", "", yes)),
        steps=_steps(_answer(None if steps is None else str(steps), "Steps of the run (0: no end)", "0", yes)),
        budget=_budget(_answer(budget, "Bandwidth of each region, as 2Gbit/s (empty: no ceiling)", "", yes)),
    )
    text = run_toml(new)
    load_text(text, "the ")  # nothing is written before all of it is known to be right
    if new.script is not None:
        there = folder / new.script.name
        if there.exists() and not filecmp.cmp(new.script, there, shallow=False):
            _check_free(folder, there.name)
    _write(folder, new, text)
    typer.echo("\n".join(next_commands(folder, new)))


def _check_free(folder: Path, *names: str) -> None:
    try:
        paths = [path for path in (folder / name for name in names) if path.exists()]
    except OSError as error:
        raise _unwritable(folder, error) from error
    if paths:
        raise ConfigError(f"{paths[0]} is there already: choose another --out, or move it away")


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} can't be written ({error.strerror or error}): choose another --out")


def _answer(flag: str | None, question: str, default: str | None, is_silent: bool) -> str:
    if flag is not None:
        return flag
    if not is_silent:
        return str(typer.prompt(question, default=default, show_default=bool(default)))
    if default is None:
        raise ConfigError("--yes asks nothing, so give --regions us-east=203.0.113.10:7400,us-west=198.51.100.20:7400")
    return default


def parse_regions(text: str) -> dict[str, str | None]:
    """`us-east=203.0.113.10:7400,eu-west`, in that order. Raises ConfigError; addresses are checked with all of
    run.toml."""
    from diloco_node.core.shapes import REGION_NAMES, is_region_name

    regions: dict[str, str | None] = {}
    for item in (item.strip() for item in text.split(",") if item.strip()):
        name, equals, address = item.partition("=")
        if not is_region_name(name):
            raise ConfigError(f"--regions names {name!r}: use {REGION_NAMES}")
        if name in regions:
            raise ConfigError(f"--regions names {name} twice: every region needs a name of its own")
        regions[name] = address if equals else None
    if not regions:
        raise ConfigError("no regions: write us-east=203.0.113.10:7400,us-west=198.51.100.20:7400")
    return regions


def _script(text: str) -> Path | None:
    if not text:
        return None
    if not Path(text).is_file():
        raise ConfigError(f"--script {text}: there is no such file; name your training script, or leave it out")
    return Path(text)


def _steps(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"--steps is {text!r}: write a whole number, 0 for a run without an end")
    return int(text)


def _budget(text: str) -> str:
    from diloco_node.config.units import parse_rate

    if text:
        parse_option("--budget", text, parse_rate)
    return text


def run_toml(new: NewRun) -> str:
    """The file: what was said, and the settings that matter most as comments."""
    from diloco_node.core.types import RunSettings

    usual = RunSettings()
    # JSON's quotes and escapes are TOML's too.
    lines = [
        "# Written by diloco-node init. The same file serves all regions; docs/run.md says what each setting does.",
        "[run]",
        f"id = {json.dumps(new.run_id)}",
        f"steps = {new.steps}  # of the median learner; 0: no end",
        "",
        "[rounds]",
        f"# fragments = {usual.fragments}  # parts of the model, merged in turn",
        f"# sync_every = {usual.sync_every}  # inner steps between two merges of one part",
    ]
    if new.budget:
        lines += ["", "[budget]", f"egress = {json.dumps(new.budget)}", f"ingress = {json.dumps(new.budget)}"]
    ports = admin_ports(new.regions)
    for name, address in new.regions.items():
        where = "# no address: it dials the others" if address is None else f"address = {json.dumps(address)}"
        admin = f"admin_port = {ports[name]}  # dashboard, status and metrics, on loopback only"
        lines += ["", f"[regions.{name}]", where, admin]
    return "\n".join(lines) + "\n"


def _machines(regions: Mapping[str, str | None]) -> dict[str, str]:
    """By region the host of its machine, LOOPBACK for this one."""
    dialled = {name: address.rpartition(":")[0] for name, address in regions.items() if address is not None}
    hosts = {name: LOOPBACK if _is_loopback(host) else host.strip("[]") for name, host in dialled.items()}
    # Who has no address dials the others; those of loopback can be dialled from their own machine only.
    return {name: hosts.get(name, LOOPBACK if LOOPBACK in hosts.values() else name) for name in regions}


def admin_ports(regions: Mapping[str, str | None]) -> dict[str, int]:
    """By region: from `ADMIN_PORT` on, the first that nothing else of the run has on its machine."""
    hosts = _machines(regions)
    ports_in_use = {(hosts[name], address.rpartition(":")[2]) for name, address in regions.items() if address}
    ports: dict[str, int] = {}
    for name in regions:
        host = hosts[name]
        ports[name] = next(port for port in itertools.count(ADMIN_PORT) if (host, str(port)) not in ports_in_use)
        ports_in_use.add((host, str(ports[name])))
    return ports


def _is_loopback(host: str) -> bool:
    """Whether it is a name or address of the own machine: each region there has its admin port at 127.0.0.1."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        labels = host.lower().rstrip(".").split(".")
        first, last = labels[0], labels[-1]
        return last in LOOPBACK_NAMES or first in (*LOOPBACK_NAMES, socket.gethostname().lower().partition(".")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _write(folder: Path, new: NewRun, text: str) -> None:
    from diloco_node.transport.authority import init_run

    try:
        folder.mkdir(parents=True, exist_ok=True)
        init_run(folder / CERTS_NAME, new.run_id, list(new.regions))
        (folder / CONFIG_NAME).write_text(text)
        if new.script is not None and not (folder / new.script.name).exists():
            shutil.copy(new.script, folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def next_commands(folder: Path, new: NewRun) -> list[str]:
    """Commands to type next: copy, examine, start."""
    script = new.script.name if new.script is not None else ""
    files = f"{CONFIG_NAME} {shlex.quote(script)}" if script else CONFIG_NAME
    command = f" -- python {shlex.quote(script)}" if script else ""
    lines = [f"{folder / CONFIG_NAME} and {folder / CERTS_NAME} are written; ca.key stays here.", ""]
    lines += (
        ["Copy to each region:", f"  cd {shlex.quote(str(folder))}"] if folder != Path() else ["Copy to each region:"]
    )
    hosts = _machines(new.regions)
    # Of several on one machine each needs a folder, for its state lies there.
    places = {name: Path("machines", name) if host == LOOPBACK else Path(new.run_id) for name, host in hosts.items()}
    for name, host in hosts.items():
        unpack = f"mkdir -p {places[name]} && tar x -C {places[name]}"
        away = f"ssh {shlex.quote(host)} '{unpack}'" if host != LOOPBACK else f"({unpack})"
        lines.append(f"  tar c {files} {CERTS_NAME}/{name} | {away}")
    for name, host in hosts.items():
        # In full: who has followed the commands above is in another folder by now.
        place = (folder / places[name]).resolve() if host == LOOPBACK else places[name]
        lines += ["", f"In {name}:", f"  cd {shlex.quote(str(place))}"]
        lines += [f"  diloco-node {verb} --region {name}{command}" for verb in ("doctor", "start")]
    return [*lines, "", LATER]
