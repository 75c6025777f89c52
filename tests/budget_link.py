"""Two transports on a private network, loaded in both directions: what the kernel's interface counters say meanwhile.

    python -m tests.budget_link OPTIONS_JSON

Run as root inside a fresh network namespace (`unshare -n`). It makes a second one, joins them by a veth pair without
segmentation offload, and prints one JSON object. Or inside the first namespace of an emulated WAN, with the name of the
second one in `namespace_b`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_node.adapters.certs import init_run, load_identity
from diloco_node.adapters.transport import GrpcTransport
from diloco_node.core.budget_plan import BudgetPlan, RateLimits
from diloco_node.core.messages import BulkHeader, Message, Payload, PayloadWanted, Refused
from diloco_node.errors import LinkLost

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 7400
SAMPLE_S = 0.05
PING_S = 0.05


@dataclass
class Options:
    """Rates in bytes/s, 0: none. `load`: who sends. `shaped_mbit`: tc's ceiling on both ends."""

    seconds: float = 4.0
    settle_s: float = 1.0
    egress_a: int = 0
    ingress_a: int = 0
    egress_b: int = 0
    ingress_b: int = 0
    load: str = "ab"
    shaped_mbit: int = 0
    shaped_queue_ms: int = 400
    body_bytes: int = 2 * 2**20
    is_segmented: bool = True
    namespace_b: str = ""


class Side:
    """One transport, loading the other."""

    def __init__(self, region: str, options: Options, folder: Path) -> None:
        self.region, self.peer = region, "b" if region == "a" else "a"
        self.options = options
        self.up = asyncio.Event()
        self.rtts_s: list[tuple[float, float]] = []
        self.started_s = time.monotonic()
        self.asked_s: dict[int, float] = {}
        self.buffer = bytearray()
        is_a = region == "a"
        self.transport = GrpcTransport(
            region=region,
            run_id="run1",
            epoch=0,
            settings_digest="",
            manifest_digest="",
            identity=load_identity(folder / region),
            listen=(ADDRESSES[region], PORT),
            peers={self.peer: f"{ADDRESSES[self.peer]}:{PORT}"},
            handler=self,
            executor=ThreadPoolExecutor(2),
            budget=BudgetPlan(
                RateLimits(
                    (options.egress_a if is_a else options.egress_b) or None,
                    (options.ingress_a if is_a else options.ingress_b) or None,
                )
            ),
        )

    def control_arrived(self, peer: str, message: Message) -> None:
        if isinstance(message, PayloadWanted):
            self.transport.send(peer, Refused(message.fragment, message.version, ""))
        elif isinstance(message, Refused):
            asked_s = self.asked_s.pop(message.version)
            self.rtts_s.append((asked_s - self.started_s, time.monotonic() - asked_s))

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        (self.up.set if is_up else self.up.clear)()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview:
        if len(self.buffer) != raw_bytes:
            self.buffer = bytearray(raw_bytes)
        return memoryview(self.buffer)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        pass

    async def load(self) -> None:
        body = memoryview(os.urandom(self.options.body_bytes))
        await self.up.wait()

        async def one() -> None:
            while True:
                try:
                    await self.transport.transfer(self.peer, Payload(0, 0, b""), body)
                except LinkLost:
                    await self.up.wait()
                    await asyncio.sleep(0.05)

        await asyncio.gather(one(), one())

    async def ping(self) -> None:
        await self.up.wait()
        for number in range(10_000_000):
            self.asked_s[number] = time.monotonic()
            self.transport.send(self.peer, PayloadWanted(0, number, b""))
            await asyncio.sleep(PING_S)


def interface(name: str) -> tuple[int, int]:
    """Bytes received and sent, as the kernel counts them."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if f"{name}:" in line)
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def set_up(region: str, options: Options) -> None:
    """Our end of the veth pair."""
    name = f"v{region}"
    run("ip", "addr", "add", f"{ADDRESSES[region]}/24", "dev", name)
    if options.is_segmented:
        run("ip", "link", "set", name, "gso_max_segs", "1")
    run("ip", "link", "set", name, "up")
    if options.shaped_mbit:
        rate = f"{options.shaped_mbit}mbit"
        run(*f"tc qdisc add dev {name} root tbf rate {rate} burst 16kb latency {options.shaped_queue_ms}ms".split())


async def side_b(options: Options, folder: Path) -> None:
    """The other namespace: load until standard input ends."""
    print("here", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if not options.namespace_b:
        set_up("b", options)
    side = Side("b", options, folder)
    await side.transport.start()
    print("started", flush=True)
    load = asyncio.create_task(side.load()) if "b" in options.load else None
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(json.dumps(side.transport.budget_status()), flush=True)
    if load is not None:
        load.cancel()
    await side.transport.stop()


async def side_a(options: Options, folder: Path, child: Any) -> dict[str, Any]:
    """Here: load, ping, and read the interface's counters."""
    loop = asyncio.get_running_loop()
    # Before that its process may still be in our namespace, and its end of the pair would stay here.
    await loop.run_in_executor(None, child.stdout.readline)
    if not options.namespace_b:
        run(*f"ip link add va type veth peer name vb netns {child.pid}".split())
        set_up("a", options)
    device = next(name for _, name in socket.if_nameindex() if name != "lo")
    child.stdin.write("\n")
    child.stdin.flush()
    await loop.run_in_executor(None, child.stdout.readline)
    side = Side("a", options, folder)
    await side.transport.start()
    work = [side.ping()] + ([side.load()] if "a" in options.load else [])
    tasks = [asyncio.create_task(one) for one in work]
    await asyncio.wait_for(side.up.wait(), 20)
    samples = []
    started = time.monotonic()
    while time.monotonic() - started < options.settle_s + options.seconds:
        samples.append((time.monotonic() - started, *interface(device)))
        await asyncio.sleep(SAMPLE_S)
    here = side.transport.budget_status()
    child.stdin.write("\n")
    child.stdin.flush()
    there = json.loads(await loop.run_in_executor(None, child.stdout.readline))
    for task in tasks:
        task.cancel()
    await side.transport.stop()
    return {"samples": samples, "rtts_s": side.rtts_s, "a": here, "b": there}


def main() -> None:
    import structlog
    import uvloop

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    options = Options(**json.loads(sys.argv[1]))
    if len(sys.argv) > 2:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(side_b(options, Path(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as name:
        init_run(Path(name), "run1", ["a", "b"])
        place = ["ip", "netns", "exec", options.namespace_b] if options.namespace_b else ["unshare", "-n"]
        command = [*place, sys.executable, "-m", "tests.budget_link", json.dumps(asdict(options)), name]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            print(json.dumps(runner.run(side_a(options, Path(name), child))))


if __name__ == "__main__":
    main()
