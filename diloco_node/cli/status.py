"""`diloco-node status`: what is going on in one region or several, and why a round waits."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from diloco_node.cli.options import ConfigOption, load
from diloco_node.cli.status_view import status_lines
from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.escaping import escaped, escaped_document
from diloco_node.state_names import ADMIN_PORT_NAME, ADMIN_SOCKET_NAME
from diloco_node.unix_sockets import socket_path

TIMEOUT_S: Final = 3.0
PERIOD_S: Final = 1.0
ANSWER_BYTES_MAX: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """A region whose admin port is asked. `name` is what it is called until it answers.

    `socket` is asked first where it is there: a region in another network namespace (`demo --wan`) has its port there.
    """

    name: str
    port: int
    socket: Path | None = None


def status(
    *,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[REGION|PORT|FOLDER]...",
            help="Regions of run.toml, admin ports, state folders, a demo's folder.",
        ),
    ] = None,
    config: ConfigOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Every second; keys sort and choose, q ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object (a line each with --watch).")] = False,
) -> None:
    """Show the regions on this machine: of the places given, else of run.toml."""
    targets = targets_of(places or (), config)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(targets, as_json)
        return
    documents = ask_all(targets)
    is_answered = not all("error" in document for document in documents)
    if as_json:
        typer.echo(json.dumps({"regions": documents}))
    elif is_answered:
        # Piped lines stay whole: who searches them wants each fact in one.
        is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
        for line in status_lines(documents, shutil.get_terminal_size().columns if is_sized else None):
            typer.echo(line)
    if not is_answered:
        raise PeersUnreachable(
            f"none of {len(targets)} regions answers ({documents[0]['error']}); is it running? see logs/daemon.log"
        )


def targets_of(places: Sequence[str], config: Path | None) -> list[Target]:
    """The regions behind some arguments, which may also be names of run.toml; without any all of run.toml's.

    Raises:
        ConfigError: it is none of them. PeersUnreachable: none of the run's regions has run here.
    """
    if not places:
        return _targets_of_run(config)
    found = []
    for place in places:
        is_place = place.isdigit() or _exists(place)
        has_run = config is not None or Path("run.toml").exists()
        named = [] if is_place or not has_run else [one for one in _targets_of_run(config) if one.name == place]
        found += named or find_targets(place)
    return found


def find_targets(place: str) -> list[Target]:
    """The regions behind an argument: a port, a region's folder, or a folder of regions.

    Raises:
        ConfigError: it is none of them.
    """
    if place.isascii() and place.isdigit() and 1 <= int(place) <= 65_535:
        return [Target(f"port {place}", int(place))]
    folder = Path(place)
    patterns = (ADMIN_PORT_NAME, f"*/{ADMIN_PORT_NAME}", f"*/*/{ADMIN_PORT_NAME}") if _exists(place) else ()
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    if not files:
        raise ConfigError(
            f"{place!r} is neither a port nor a folder with {ADMIN_PORT_NAME}, nor a region of run.toml that runs "
            "here: give a port, a region's state folder, or a folder of regions; a region writes the file at its start"
        )
    return [_target(file) for file in sorted(files)]


def _exists(place: str) -> bool:
    try:
        return Path(place).exists()
    except OSError:  # as of a name that is too long for a file
        return False


def _target(file: Path) -> Target:
    text = file.read_text().strip()
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{file} holds {text[:20]!r}, not a port: start the region again")
    path = socket_path(file.parent, ADMIN_SOCKET_NAME)
    return Target(file.parent.resolve().name, int(text), path if path.exists() else None)


def _targets_of_run(config: Path | None) -> list[Target]:
    resolved = load(config, {}, None)
    targets = []
    for name, region in resolved.regions.items():
        file = resolved.state_dir(name) / ADMIN_PORT_NAME
        if file.exists():
            targets.append(_target(file))
        elif region.admin_port:
            targets.append(Target(name, region.admin_port))
    if not targets:
        raise PeersUnreachable(
            f"no region of run {resolved.run.id} has run here: {resolved.run.state_dir} holds no {ADMIN_PORT_NAME}; "
            "start one, or give an admin port"
        )
    return targets


def ask(target: Target, path: str = "/api/v1/status") -> dict[str, Any]:
    """The status document of one region, or another one; {"region", "error"} when it does not answer."""
    try:
        with contextlib.closing(connect(target)) as connection:
            connection.request("GET", path)
            document = json.loads(connection.getresponse().read(ANSWER_BYTES_MAX))
        if not isinstance(document, dict):
            raise ValueError("the answer is no JSON object")
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        return {"region": target.name, "error": escaped(f"no status from 127.0.0.1:{target.port}: {error}")}
    for key, usual in (("region", target.name), ("error", "unknown error")):
        if not isinstance(document.get(key, usual), str):
            document[key] = usual
    shown: dict[str, Any] = escaped_document({"region": target.name, **document})
    return shown


def connect(target: Target) -> http.client.HTTPConnection:
    """A connection to a region's daemon, by its socket if that is known; it is made by the first request."""
    if target.socket is not None:
        return UnixConnection(target.socket)
    return http.client.HTTPConnection("127.0.0.1", target.port, timeout=TIMEOUT_S)


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Instead of dialling the host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def ask_all(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """In order; asked at the same time, so that one which hangs delays the others by its own timeout only."""
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        return list(pool.map(ask, targets))


def _watch(targets: Sequence[Target], as_json: bool) -> None:
    if as_json:
        while True:
            typer.echo(json.dumps({"regions": ask_all(targets)}))
            time.sleep(PERIOD_S)
    if sys.stdin.isatty() and sys.stdout.isatty():
        from diloco_node.cli.watch import has_screen, run_screen

        if has_screen():
            run_screen(partial(ask_all, targets))
            return
    width = shutil.get_terminal_size().columns
    while True:  # nobody can press a key, or the terminal is an unknown one: a block of lines each time
        for line in status_lines(ask_all(targets), width):
            typer.echo(line)
        typer.echo("")
        time.sleep(PERIOD_S)
