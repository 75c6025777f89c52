"""The link between two regions over a shaped WAN, beside iperf3 with four streams on the same link in the same run.

    python benchmarks/link_wan.py --rate 2Gbit/s --rtt 40ms [--loss 1%] [--arms ours,bare,iperf3]
        [--connections 1,4] [--seconds 8] [--json]

Root: two network namespaces joined by the user-space router of `diloco_node.lab.wan`. In turns, each for some seconds:

- ours: the daemon's own transport (gRPC, mutual TLS, no budget) sends random bytes one way, over each number of bulk
  connections that `--connections` names ("auto": as many as it takes by itself);
- bare: one stream of grpc.aio with mutual TLS and messages of 1 MiB, with the same heap settings and nothing else of
  ours: what the transport costs beyond it is ours to answer for;
- iperf3: four streams.

All are counted in the same way (`link_count`): what the sender's kernel knows to have arrived, and the processor time
of both processes, over a window of the same length after the same warm-up. The router needs a core of its own at some
Gbit/s; what it used is shown, and how late it was: where it is late, the figures are the machine's and not the link's,
and only their ratios say something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import link_count
from link import RUN, Receiver, run_loop

from diloco_node.core.messages import BulkHeader, Payload
from diloco_node.errors import LinkLost
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.control import request
from diloco_node.lab.wan.emulation_state import EmulationState
from diloco_node.lab.wan.namespaces import Place
from diloco_node.lab.wan.tun import inside
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.kernel import congestion
from diloco_node.transport.streams import dial, make_server
from diloco_node.transport.transport import GrpcTransport

BODY_BYTES = 8 * 2**20
IN_FLIGHT = 4
"""Transfers that are asked for at a time: the link must not run dry between two."""

MESSAGE_BYTES = 2**20
"""Of a bare stream."""

DRAIN_S = 1.0
"""After the last write, for what is still on its way."""

SPARE_S = 2.0
"""What a flow runs longer than it is counted: it does not begin at once."""

ENDING_S = 90.0

PORT = 7400
IPERF_PORT = 5201
IPERF = "iperf3"
WITHOUT_BBR = "LINK_WAN_WITHOUT_BBR"
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
    """One end; the receiving one adds up what came."""

    def __init__(self) -> None:
        super().__init__()
        self.body_bytes = 0

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview:
        """One buffer for all: what arrives is not looked at."""
        if len(self.buffer) != raw_bytes:
            self.buffer = bytearray(raw_bytes)
        return memoryview(self.buffer)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Count it."""
        if is_whole:
            self.body_bytes += len(buffer)


def transport_of(
    folder: Path, region: str, addresses: dict[str, str], handler: Side, connections: str
) -> GrpcTransport:
    """The daemon's transport of a region; only a dials."""
    peer = "b" if region == "a" else "a"
    transport = GrpcTransport(
        region=region,
        run_id=RUN,
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


async def receive(folder: Path, addresses: dict[str, str], connections: str) -> int:
    """Receive until standard input ends; the bytes of whole transfers that came."""
    side = Side()
    transport = transport_of(folder, "b", addresses, side, connections)
    await transport.start()
    await _until_told()
    await transport.stop()
    return side.body_bytes


async def send(folder: Path, addresses: dict[str, str], seconds: float, connections: str) -> int:
    """Send for so long; over how many connections at the end."""
    side = Side()
    transport = transport_of(folder, "a", addresses, side, connections)
    await transport.start()
    await asyncio.wait_for(side.up.wait(), CONNECT_S)
    body = memoryview(os.urandom(BODY_BYTES))
    ends_s = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < ends_s:
            await transport.transfer("b", Payload(0, 0, bytes(32)), body)

    with contextlib.suppress(LinkLost):
        await asyncio.gather(*(one() for _ in range(IN_FLIGHT)))
    used = transport.peer_status()["b"].connections
    await asyncio.sleep(DRAIN_S)
    await transport.stop()
    return used


async def receive_bare(folder: Path, addresses: dict[str, str], _connections: str) -> int:
    """As `receive`, with gRPC alone."""
    body_bytes = 0

    async def serve(_lane: str, context: Any) -> None:
        nonlocal body_bytes
        while (message := await context.read()) is not grpc.aio.EOF:
            body_bytes += len(message)

    server, _ = make_server(load_identity(folder / "b"), f"{addresses['b']}:{PORT}", serve, handshake_s=CONNECT_S)
    await server.start()
    await _until_told()
    await server.stop(None)
    return body_bytes


async def send_bare(folder: Path, addresses: dict[str, str], seconds: float, _connections: str) -> int:
    """As `send`, with gRPC alone: one stream on one connection."""
    stream = await dial(load_identity(folder / "a"), "b", f"{addresses['b']}:{PORT}", "bulk", timeout_s=CONNECT_S)
    # As many bytes as a body of ours: one message over and over would stay in the processor's cache.
    messages = itertools.cycle([os.urandom(MESSAGE_BYTES) for _ in range(BODY_BYTES // MESSAGE_BYTES)])
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        await stream.write(next(messages))
    await asyncio.sleep(DRAIN_S)
    await stream.aclose()
    return 1


async def _until_told() -> None:
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


ENDS = {("ours", "send"): send, ("ours", "receive"): receive, ("bare", "send"): send_bare} | {
    ("bare", "receive"): receive_bare
}


@dataclass(frozen=True, slots=True)
class Spans:
    """How long each arm is counted, and how long it runs before; in seconds."""

    counted_s: float
    warm_up_s: float

    @property
    def run_s(self) -> float:
        """How long to send."""
        return self.warm_up_s + self.counted_s + SPARE_S


def run_grpc(arm: str, folder: Path, places: Sequence[Place], spans: Spans, connections: str) -> dict[str, float]:
    """Ours or bare: two processes, one per namespace. Raises SystemExit when one fails."""
    addresses = json.dumps({place.region: place.address for place in places})
    program = [sys.executable, str(Path(__file__).resolve())]
    sending, receiving = (
        ["ip", "netns", "exec", place.namespace, *program, arm, end, str(folder), addresses, str(spans.run_s)]
        for place, end in zip(places, ("send", "receive"), strict=True)
    )
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(_started([*receiving, connections], takes_input=True))
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = stack.enter_context(_started([*sending, connections]))
        watch = link_count.Watch(
            places[0].namespace, (places[1].address, PORT), sender=sender.pid, receiver=receiver.pid
        )
        told, _ = sender.communicate(timeout=spans.run_s + ENDING_S)
        watch.close()
        received, _ = receiver.communicate(timeout=ENDING_S)
    if sender.returncode or receiver.returncode:
        raise SystemExit(f"{arm} failed: exit codes {sender.returncode} and {receiver.returncode}")
    framing = watch.samples[-1].arrived / int(received.splitlines()[-1])
    counted = link_count.figures(watch.samples, warm_up_s=spans.warm_up_s, seconds=spans.counted_s, framing=framing)
    return {**counted, "connections": int(told.splitlines()[-1])}


def run_iperf(places: Sequence[Place], spans: Spans, streams: int) -> dict[str, float]:
    """iperf3 from a to b. Raises SystemExit when it fails."""
    ends = [["ip", "netns", "exec", place.namespace, "iperf3", "-p", str(IPERF_PORT)] for place in places]
    client = [*ends[0], "-c", places[1].address, "-P", str(streams), "-t", str(math.ceil(spans.run_s))]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_started([*ends[1], "-s", "-1"]))
        time.sleep(0.5)
        sender = stack.enter_context(_started(client))
        watch = link_count.Watch(
            places[0].namespace, (places[1].address, IPERF_PORT), sender=sender.pid, receiver=server.pid
        )
        said, _ = sender.communicate(timeout=spans.run_s + ENDING_S)
        watch.close()
        if sender.returncode:
            raise SystemExit(f"iperf3 failed: {said[-500:]}")
        server.communicate(timeout=ENDING_S)
    counted = link_count.figures(watch.samples, warm_up_s=spans.warm_up_s, seconds=spans.counted_s)
    return {**counted, "connections": streams}


@contextlib.contextmanager
def _started(command: Sequence[str], *, takes_input: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextlib.contextmanager
def shaped(options: argparse.Namespace, folder: Path) -> Iterator[EmulationState]:
    """The link."""
    file = folder / "link.toml"
    file.write_text(TOPOLOGY.format(queue_ms=options.queue_ms, rtt=options.rtt, loss=options.loss, rate=options.rate))
    state = emulation.up(file, run=f"link{os.getpid()}", owner_pid=os.getpid())
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
    """All arms, in turns; medians and the ratios turn by turn."""
    turns: list[dict[str, dict[str, float]]] = []
    spans = Spans(options.seconds, options.warm_up)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_run(folder, RUN, ["a", "b"])
        with shaped(options, folder) as state:
            for _ in range(options.turns):
                turn: dict[str, dict[str, float]] = {}
                for arm, count in arms(options):
                    before = request(state.socket, {"do": "status"})
                    if arm == IPERF:
                        one = run_iperf(state.places(), spans, options.streams)
                    else:
                        one = run_grpc(arm, folder, state.places(), spans, count)
                    turn[f"{arm} {count}".strip()] = one | _router(before, request(state.socket, {"do": "status"}))
                turns.append(turn)
    return {
        "rate": options.rate,
        "rtt": options.rtt,
        "loss": options.loss,
        "streams": options.streams,
        "congestion_control": options.congestion or CONGESTION_FILE.read_text().strip(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "turns": turns,
        "medians": {arm: _medians(turns, arm) for arm in turns[0]},
    }


def arms(options: argparse.Namespace) -> list[tuple[str, str]]:
    """What runs in each turn: (arm, connections)."""
    return [
        (arm, count)
        for arm in options.arms.split(",")
        for count in (options.connections.split(",") if arm == "ours" else [""])
    ]


def _medians(turns: Sequence[dict[str, dict[str, float]]], arm: str) -> dict[str, float]:
    """Of one arm: its figures, and their ratios to those of the others in the same turn."""
    found = {key: statistics.median([turn[arm][key] for turn in turns]) for key in turns[0][arm]}
    if IPERF in turns[0]:
        found["share_of_iperf3"] = statistics.median(
            [turn[arm]["bits_per_s"] / turn[IPERF]["bits_per_s"] for turn in turns]
        )
    if "bare" in turns[0]:
        for side in ("out", "in"):
            key = f"cpu_seconds_per_gb_{side}"
            found[f"cpu_of_bare_{side}"] = statistics.median([turn[arm][key] / turn["bare"][key] for turn in turns])
    return found


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
        f"{'':<12}{'conn.':>6}{'Mbit/s':>9}{'again':>8}{'CPU-s/GB out':>14}{'in':>7}{'router cores':>14}{'late':>8}",
    ]
    for turn in result["turns"]:
        for name, one in turn.items():
            shown.append(
                f"{name:<12}{one['connections']:>6}{one['bits_per_s'] / 1e6:>9.0f}{one['sent_again']:>8.1%}"
                f"{one['cpu_seconds_per_gb_out']:>14.2f}{one['cpu_seconds_per_gb_in']:>7.2f}"
                f"{one['router_cores']:>14.2f}{one['router_packets_late']:>8.0f}"
            )
    for name, one in result["medians"].items():
        said = []
        if "share_of_iperf3" in one and name != IPERF:
            said.append(f"{one['share_of_iperf3']:.1%} of iperf3 with {result['streams']} streams")
        if "cpu_of_bare_out" in one and name != "bare":
            said.append(f"{one['cpu_of_bare_out']:.2f} and {one['cpu_of_bare_in']:.2f} of bare gRPC's CPU out and in")
        if said:
            shown.append(f"{name}: {', '.join(said)} (medians of the turns)")
    return shown


def main() -> int:
    """Command line; with an arm and `send` or `receive` it is one of the two ends, started inside the namespaces."""
    if len(sys.argv) > 6 and (end := ENDS.get((sys.argv[1], sys.argv[2]))) is not None:
        folder, addresses, seconds, connections = Path(sys.argv[3]), json.loads(sys.argv[4]), *sys.argv[5:7]
        if os.environ.get(WITHOUT_BBR):
            congestion.LONG_RTT_CONGESTION_CONTROL = b"none such"
        more = (float(seconds), connections) if sys.argv[2] == "send" else (connections,)
        print(run_loop(end(folder, addresses, *more)), flush=True)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="2Gbit/s", help="in and out of both ends [2Gbit/s]")
    parser.add_argument("--rtt", default="40ms", help="round trip [40ms]")
    parser.add_argument("--loss", default="0%", help="of packets, each way [0%%]")
    parser.add_argument("--queue-ms", type=int, default=50, help="how long the lines' queues are [50]")
    parser.add_argument("--seconds", type=float, default=8.0, help="that count, of each [8]")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before [3]")
    parser.add_argument("--turns", type=int, default=2, help="all arms, so often [2]")
    parser.add_argument("--arms", default="ours,iperf3", help="of ours, bare, iperf3 [ours,iperf3]")
    parser.add_argument("--connections", default=AUTO, help="ours for bulk, as 1,2,4,auto [auto]")
    parser.add_argument("--buffer-mib", type=int, help="TCP's largest buffers; Linux has 4 and 6 by itself [128]")
    parser.add_argument("--streams", type=int, default=STREAMS, help="of iperf3 [4]")
    parser.add_argument("--congestion", help="TCP's, in both namespaces: reno, or what the host allows [its own]")
    parser.add_argument(
        "--without-bbr", action="store_true", help="as if the hosts had none; and reno in both namespaces"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if options.without_bbr:
        options.congestion = "reno"
        os.environ[WITHOUT_BBR] = "1"  # for the ends, which are processes of their own
    if os.geteuid() != 0:
        sys.stderr.write("benchmarks/link_wan.py makes network namespaces: run it as root\n")
        return 2
    result = measure(options)
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
