"""The link between two regions over a shaped WAN, beside iperf3 with four streams on the same link in the same run.

    python benchmarks/link_wan.py --rate 2Gbit/s --rtt 40ms [--loss 1%] [--seconds 10] [--connections 1,4] [--json]

Root: two network namespaces joined by the user-space router of `diloco_node.wan`. The daemon's own transport (gRPC,
mutual TLS, no budget) sends random bytes one way for some seconds, over each number of bulk connections that
`--connections` names ("auto": as many as it takes by itself); then iperf3 does, four streams, and by `--turns` all
again. Goodput is counted where it arrives, after a warm-up, CPU time per side in user and system mode of
the whole process. The router needs a core of its own at some Gbit/s; what it used is shown, and how late it was:
where it is late, both figures are the machine's and not the link's, and only their ratio says something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from link import RUN, Receiver, cpu_seconds, run_loop

from diloco_node.adapters.certs import init_run, load_identity
from diloco_node.adapters.transport import GrpcTransport
from diloco_node.core.messages import BulkHeader, Payload
from diloco_node.errors import LinkLost
from diloco_node.wan import emulation
from diloco_node.wan.namespaces import Place
from diloco_node.wan.state import EmulationState
from diloco_node.wan.tun import inside

BODY_BYTES = 8 * 2**20
IN_FLIGHT = 4
"""Transfers that are asked for at a time: the link must not run dry between two."""

PORT = 7400
IPERF_PORT = 5201
AUTO = "auto"
STREAMS = 4
CONNECT_S = 20.0
CONGESTION_FILE = Path("/proc/sys/net/ipv4/tcp_congestion_control")

TOPOLOGY = """\
[wan]
queue = "{queue_ms}ms"

[default_link]
rtt = "{rtt}"
loss = "{loss}"

[regions.a]
egress = "{rate}"

[regions.b]
egress = "{rate}"
"""


class Side(Receiver):
    """One end; the receiving one notes when whole transfers came, and what the processor had done until then."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[tuple[float, float]] = []

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview:
        """One buffer for all: what arrives is not looked at."""
        if len(self.buffer) != raw_bytes:
            self.buffer = bytearray(raw_bytes)
        return memoryview(self.buffer)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Note it."""
        if is_whole:
            self.marks.append((time.monotonic(), cpu_seconds()))


def transport_of(
    folder: Path, region: str, addresses: dict[str, str], handler: Side, connections: str
) -> GrpcTransport:
    """The daemon's transport of a region; only a dials."""
    peer = "b" if region == "a" else "a"
    transport = GrpcTransport(
        region=region,
        run_id=RUN,
        epoch=0,
        settings_digest="s",
        manifest_digest="m",
        identity=load_identity(folder / region),
        listen=(addresses[region], PORT),
        peers={peer: f"{addresses[peer]}:{PORT}" if region == "a" else None},
        handler=handler,
        executor=ThreadPoolExecutor(2),
        connections=None if connections == AUTO else int(connections),
    )
    handler.transport = transport
    return transport


async def receive(folder: Path, addresses: dict[str, str]) -> None:
    """Receive until standard input ends; print the marks."""
    side = Side()
    transport = transport_of(folder, "b", addresses, side, AUTO)
    await transport.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.stop()
    print(json.dumps(side.marks), flush=True)


async def send(folder: Path, addresses: dict[str, str], seconds: float, connections: str) -> None:
    """Send for so long; print (seconds, CPU seconds) marks of this end, and over how many connections at the end."""
    side = Side()
    transport = transport_of(folder, "a", addresses, side, connections)
    await transport.start()
    await asyncio.wait_for(side.up.wait(), CONNECT_S)
    body = memoryview(os.urandom(BODY_BYTES))
    ends_s = time.monotonic() + seconds
    marks: list[tuple[float, float]] = []

    async def one() -> None:
        while time.monotonic() < ends_s:
            await transport.transfer("b", Payload(0, 0, b""), body)
            marks.append((time.monotonic(), cpu_seconds()))

    with contextlib.suppress(LinkLost):
        await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    used = transport.peer_status()["b"].connections
    await asyncio.sleep(0.5)
    await transport.stop()
    print(json.dumps({"marks": marks, "connections": used}), flush=True)


def figures(marks: Sequence[Sequence[float]], *, warm_up_s: float) -> dict[str, float]:
    """Goodput and CPU time per GB from the marks of whole transfers after a warm-up.

    Args:
        marks: (monotonic seconds, CPU seconds) at the end of each transfer of BODY_BYTES.
        warm_up_s: from the first mark on.

    Raises:
        ValueError: fewer than two transfers came after the warm-up.
    """
    counted = [mark for mark in marks if mark[0] >= marks[0][0] + warm_up_s]
    if len(counted) < 2:
        raise ValueError(f"{len(counted)} transfers of {BODY_BYTES >> 20} MiB after the warm-up: measure for longer")
    count = (len(counted) - 1) * BODY_BYTES
    return {
        "bits_per_s": 8 * count / (counted[-1][0] - counted[0][0]),
        "cpu_seconds_per_gb": (counted[-1][1] - counted[0][1]) / (count / 1e9),
        "bytes": float(count),
    }


def run_ours(
    folder: Path, places: Sequence[Place], seconds: float, warm_up_s: float, connections: str
) -> dict[str, float]:
    """Two processes, one per namespace."""
    addresses = json.dumps({place.region: place.address for place in places})
    command = [sys.executable, str(Path(__file__).resolve())]
    ends = [["ip", "netns", "exec", place.namespace, *command] for place in places]
    receiver = subprocess.Popen(
        [*ends[1], "receive", str(folder), addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None
    try:
        receiver.stdout.readline()
        sent = subprocess.run(
            [*ends[0], "send", str(folder), addresses, str(seconds + warm_up_s), connections],
            capture_output=True,
            text=True,
            timeout=seconds + warm_up_s + 90,
            check=False,
        )
        if sent.returncode:
            raise SystemExit(f"the sender failed:\n{sent.stderr[-2000:]}")
        output, _ = receiver.communicate(timeout=30)
    finally:
        if receiver.poll() is None:
            receiver.kill()
            receiver.wait()
    there = figures(json.loads(output.splitlines()[-1]), warm_up_s=warm_up_s)
    told = json.loads(sent.stdout.splitlines()[-1])
    here = figures(told["marks"], warm_up_s=warm_up_s)
    return {
        "bits_per_s": there["bits_per_s"],
        "cpu_seconds_per_gb_out": here["cpu_seconds_per_gb"],
        "cpu_seconds_per_gb_in": there["cpu_seconds_per_gb"],
        "connections": told["connections"],
    }


def run_iperf(places: Sequence[Place], seconds: float, warm_up_s: float, streams: int) -> dict[str, float]:
    """iperf3 from a to b. Raises SystemExit when it fails."""
    ends = [["ip", "netns", "exec", place.namespace, "iperf3"] for place in places]
    server = subprocess.Popen([*ends[1], "-s", "-1", "-p", str(IPERF_PORT)], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        command = [*ends[0], "-c", places[1].address, "-p", str(IPERF_PORT), "-P", str(streams), "-J"]
        done = subprocess.run(
            [*command, "-t", str(round(seconds)), "-O", str(round(warm_up_s))],
            capture_output=True,
            text=True,
            timeout=seconds + warm_up_s + 60,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"iperf3 failed: {done.stdout[-500:]} {done.stderr[-500:]}")
        server.wait(timeout=10)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    end = json.loads(done.stdout)["end"]
    rate = end["sum_received"]["bits_per_second"]
    share = end["cpu_utilization_percent"]
    return {
        "bits_per_s": rate,
        "cpu_seconds_per_gb_out": share["host_total"] / 100 / (rate / 8e9),
        "cpu_seconds_per_gb_in": share["remote_total"] / 100 / (rate / 8e9),
        "retransmits": float(end["sum_sent"]["retransmits"]),
    }


@contextlib.contextmanager
def shaped(options: argparse.Namespace, folder: Path) -> Iterator[EmulationState]:
    """The link."""
    file = folder / "link.toml"
    file.write_text(TOPOLOGY.format(queue_ms=options.queue_ms, rtt=options.rtt, loss=options.loss, rate=options.rate))
    choice = emulation.choose_backend("tun")
    state = emulation.up(file, run=f"link{os.getpid()}", choice=choice, owner_pid=os.getpid())
    try:
        for place in state.places() if options.congestion else ():
            with inside(place.namespace):
                CONGESTION_FILE.write_text(options.congestion)
        for place in state.places() if options.buffer_mib else ():
            with inside(place.namespace):
                for name in ("tcp_rmem", "tcp_wmem"):
                    file = CONGESTION_FILE.with_name(name)
                    least, first, _ = file.read_text().split()
                    file.write_text(f"{least} {first} {options.buffer_mib << 20}")
        yield state
    finally:
        emulation.down(state.run)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both, in turns; medians and the ratio turn by turn."""
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_run(folder, RUN, ["a", "b"])
        with shaped(options, folder) as state:
            places = state.places()
            for _ in range(options.turns):
                ours = {}
                for count in options.connections.split(","):
                    before = emulation.command(state, {"do": "status"})
                    one = run_ours(folder, places, options.seconds, options.warm_up, count)
                    ours[count] = one | _router(before, emulation.command(state, {"do": "status"}))
                iperf = run_iperf(places, options.seconds, options.warm_up, options.streams)
                turns.append({"ours": ours, "iperf3": iperf})
    return {
        "rate": options.rate,
        "rtt": options.rtt,
        "loss": options.loss,
        "streams": options.streams,
        "congestion_control": options.congestion or CONGESTION_FILE.read_text().strip(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "turns": turns,
        "ours": {count: _medians(turns, count) for count in options.connections.split(",")},
    }


def _medians(turns: Sequence[dict[str, Any]], count: str) -> dict[str, float]:
    ratios = [turn["ours"][count]["bits_per_s"] / turn["iperf3"]["bits_per_s"] for turn in turns]
    keys = ("bits_per_s", "cpu_seconds_per_gb_out", "cpu_seconds_per_gb_in", "connections")
    medians = {key: statistics.median([turn["ours"][count][key] for turn in turns]) for key in keys}
    return {"share_of_iperf3": statistics.median(ratios), **medians}


def _router(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    return {
        "router_cores": (after["cpu_seconds"] - before["cpu_seconds"]) / (after["seconds"] - before["seconds"]),
        "router_packets_late": float(after["packets_late"] - before["packets_late"]),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    shown = [
        f"{result['rate']}, round trip {result['rtt']}, loss {result['loss']}, TCP {result['congestion_control']}, "
        f"{result['cpus']} cores, load {result['load_average']:.1f}",
        f"{'':<8}{'conn.':>6}{'Mbit/s':>9}{'CPU-s/GB out':>14}{'in':>7}{'router cores':>14}{'late':>8}",
    ]
    for turn in result["turns"]:
        rows = [("ours", one) for one in turn["ours"].values()]
        for name, one in [*rows, ("iperf3", {"connections": result["streams"], **turn["iperf3"]})]:
            cores, late = one.get("router_cores"), one.get("router_packets_late")
            shown.append(
                f"{name:<8}{one['connections']:>6}{one['bits_per_s'] / 1e6:>9.0f}{one['cpu_seconds_per_gb_out']:>14.2f}"
                f"{one['cpu_seconds_per_gb_in']:>7.2f}{'' if cores is None else format(cores, '.2f'):>14}"
                f"{'' if late is None else format(late, '.0f'):>8}"
            )
    for count, one in result["ours"].items():
        shown.append(
            f"connections {count}: {one['share_of_iperf3']:.1%} of iperf3 with {result['streams']} streams "
            "(median of the turns)"
        )
    return shown


def main() -> int:
    """Command line; `send` and `receive` are the two ends, started inside the namespaces."""
    if len(sys.argv) > 3 and sys.argv[1] in ("send", "receive"):
        folder, addresses = Path(sys.argv[2]), json.loads(sys.argv[3])
        if sys.argv[1] == "receive":
            run_loop(receive(folder, addresses))
        else:
            run_loop(send(folder, addresses, float(sys.argv[4]), sys.argv[5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="2Gbit/s", help="in and out of both ends [2Gbit/s]")
    parser.add_argument("--rtt", default="40ms", help="round trip [40ms]")
    parser.add_argument("--loss", default="0%", help="of packets, each way [0%%]")
    parser.add_argument("--queue-ms", type=int, default=50, help="how long the lines' queues are [50]")
    parser.add_argument("--seconds", type=float, default=8.0, help="that count, of each [8]")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before [3]")
    parser.add_argument("--turns", type=int, default=2, help="ours and iperf3, so often [2]")
    parser.add_argument("--connections", default=AUTO, help="ours for bulk, as 1,2,4,auto [auto]")
    parser.add_argument("--buffer-mib", type=int, help="TCP's largest buffers; Linux has 4 and 6 by itself [128]")
    parser.add_argument("--streams", type=int, default=STREAMS, help="of iperf3 [4]")
    parser.add_argument("--congestion", help="TCP's, in both namespaces: reno, or what the host allows [its own]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.stderr.write("benchmarks/link_wan.py makes network namespaces: run it as root\n")
        return 2
    result = measure(options)
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
