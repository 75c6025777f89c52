"""Round trips and goodput between an emulation's regions, by the program's own `measure` inside the namespaces.

`measure serve` answers in every region but one, which runs `measure mesh`. All of them get certificates of their own
run. The figures are what a training run's transport reaches: payload over TLS, so goodput lies below the file's rate.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from diloco_node.errors import DilocoError
from diloco_node.lab.wan.namespaces import Place
from diloco_node.lab.wan.topology import Pair, Topology
from diloco_node.transport.authority import init_run

PORT: Final = 7399
SECONDS: Final = "0.5"
WARM_UP_SECONDS: Final = "1"
"""Each pair is measured for this long, after this long: a connection needs a dozen round trips to fill a link."""

STOP_S: Final = 10.0


def measure_pairs(topology: Topology, places: Sequence[Place]) -> list[dict[str, Any]]:
    """Measure all ordered pairs, one after the other: some two seconds each.

    Returns:
        Per pair the file's figures and the measured ones, in milliseconds and bits per second; None where a pair
        could not be measured, as over a link that loses nearly everything.

    Raises DilocoError: nothing could be measured.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-measure-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        _write_run(folder, places)
        log = stack.enter_context((folder / "measure.log").open("w+"))
        servers = [stack.enter_context(_serving(folder, place, log)) for place in places[1:]]
        for server in servers:
            assert server.stdout is not None
            if not server.stdout.readline():  # it says where it listens, or ends
                raise DilocoError(f"an emulated region answers no measurements: {_last_line(log)}")
        links = _mesh(folder, places[0], log)
    return [_document(topology, pair, links.get(pair)) for pair in topology.paths]


def _write_run(folder: Path, places: Sequence[Place]) -> None:
    init_run(folder / "certs", "measure", [place.region for place in places])
    regions = [f'[regions.{place.region}]\naddress = "{place.address}:{PORT}"\n' for place in places]
    (folder / "run.toml").write_text('[run]\nid = "measure"\ncerts_dir = "certs"\n' + "".join(regions))


def _command(folder: Path, place: Place, *words: str) -> list[str]:
    """`diloco-node measure ...` of a region, in its namespace."""
    program = (sys.executable, "-m", "diloco_node.main", "measure", *words)
    options = ("--region", place.region, "--config", str(folder / "run.toml"), "--json")
    return ["ip", "netns", "exec", place.namespace, *program, *options]


@contextlib.contextmanager
def _serving(folder: Path, place: Place, log: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Answer measurements in a region until the end of the block."""
    command = _command(folder, place, "serve")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True) as server:
        try:
            yield server
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _mesh(folder: Path, place: Place, log: IO[str]) -> dict[Pair, Mapping[str, Any]]:
    """All pairs that could be measured, as `measure mesh` reports them."""
    command = _command(folder, place, "mesh", "--alone", "--seconds", SECONDS, "--warm-up", WARM_UP_SECONDS)
    # Exit code 5 says that some pairs failed: the others stand in the output all the same.
    mesh = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, text=True, check=False)
    try:
        links = json.loads(mesh.stdout)["pairs"]
    except (ValueError, KeyError):
        raise DilocoError(f"the emulated pairs could not be measured: {_last_line(log)}") from None
    return {(link["from"], link["to"]): link for link in links}


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    return (log.read().strip().splitlines() or ["it printed nothing"])[-1]


def _document(topology: Topology, pair: Pair, link: Mapping[str, Any] | None) -> dict[str, Any]:
    source, target = pair
    return {
        "from": source,
        "to": target,
        "rtt_ms": topology.rtt_ns(source, target) / 1e6,
        "rtt_measured_ms": None if link is None else round(1e3 * link["rtt_seconds"], 3),
        "rate_bits_per_s": 8 * topology.rate(source, target).bytes_per_s,
        "goodput_bits_per_s": None if link is None else 8 * link["bytes_per_second"],
        "loss": topology.paths[pair].loss_ppm / 1e6,
        "probes": 0 if link is None else link["probes"],
        "unanswered": 0 if link is None else link["unanswered"],
    }


def pair_line(pair: Mapping[str, Any]) -> str:
    """Show a measured pair, for people."""
    rtt, goodput = pair["rtt_measured_ms"], pair["goodput_bits_per_s"]
    return (
        f"  {pair['from']:>14} -> {pair['to']:<14} RTT {pair['rtt_ms']:.1f} ms, measured "
        f"{'none' if rtt is None else f'{rtt:.1f}'}; rate {pair['rate_bits_per_s'] / 1e6:,.0f} Mbit/s, goodput "
        f"{'none' if goodput is None else f'{goodput / 1e6:,.0f}'}"
    )
