"""The link between two regions on loopback, TLS on: goodput, CPU time per byte, round-trip time of a control message.

    python benchmarks/link.py [--mib 256] [--repeat 3] [--json]

Two processes. The body is random bytes, which zstd can't make smaller; int8 values of an outer gradient nearly are. CPU
time is of both processes together, threads of gRPC included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diloco_node.core.messages import BulkHeader, Message, Payload, PayloadRequested, Refused
from diloco_node.daemon.process_setup import keep_freed_memory
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.transport import GrpcTransport

RUN = "bench"
PINGS = 500


class Receiver:
    """Counts what arrives, answers every PayloadRequested, and reuses one buffer."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.answered = asyncio.Event()
        self.transport: GrpcTransport | None = None
        self.buffer = bytearray()
        self.done = asyncio.Event()

    def control_arrived(self, peer: str, message: Message) -> None:
        """Answer a want; note an answer."""
        if isinstance(message, PayloadRequested) and self.transport is not None:
            self.transport.send(peer, Refused(message.fragment, message.version, "unknown"))
        else:
            self.answered.set()

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """Note that the link is up."""
        if is_up:
            self.up.set()
        else:
            self.done.set()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview:
        """One buffer for all transfers, touched once."""
        if len(self.buffer) != raw_bytes:
            self.buffer = bytearray(raw_bytes)
        return memoryview(self.buffer)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Tell the sender that all of it is here."""
        if is_whole and self.transport is not None:
            self.transport.send(peer, Refused(0, 0, "whole"))


def make(folder: Path, region: str, peer: str, address: str | None, handler: Receiver) -> GrpcTransport:
    """A transport on a free loopback port."""
    transport = GrpcTransport(
        region=region,
        run_id=RUN,
        settings_digest="s",
        manifest_digest="m",
        identity=load_identity(folder / region),
        listen=("127.0.0.1", 0),
        peers={peer: address},
        handler=handler,
        executor=ThreadPoolExecutor(2),
    )
    handler.transport = transport
    return transport


def receive(folder: Path, pipe: Any) -> None:
    """The other process: listen, receive until the link goes down, report CPU seconds at each request."""

    async def run() -> None:
        handler = Receiver()
        transport = make(folder, "b", "a", None, handler)
        await transport.start()
        pipe.send(transport.port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(cpu_seconds())
        await transport.stop()

    run_loop(run())


def run_loop(work: Any) -> Any:
    """On uvloop and with a heap that keeps what is freed, as the daemon does."""
    import uvloop

    keep_freed_memory()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def cpu_seconds() -> float:
    """Of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(folder: Path, pipe: Any, mib: int, repeat: int) -> dict[str, float]:
    """Dial, ping, then send `repeat` times `mib` MiB."""
    handler = Receiver()
    port = pipe.recv()
    transport = make(folder, "a", "b", f"127.0.0.1:{port}", handler)
    await transport.start()
    await asyncio.wait_for(handler.up.wait(), 10)
    times = []
    for _ in range(PINGS):
        handler.answered.clear()
        started = time.perf_counter()
        transport.send("b", PayloadRequested(1, 2, b"x" * 32))
        await handler.answered.wait()
        times.append(time.perf_counter() - started)
    body = memoryview(os.urandom(mib * 2**20))
    rates, cpu = [], []
    for _ in range(repeat + 1):
        pipe.send(True)
        before = cpu_seconds() + pipe.recv()
        started = time.perf_counter()
        handler.answered.clear()
        await transport.transfer("b", Payload(0, 0, bytes(32)), body)
        await handler.answered.wait()
        rates.append(body.nbytes * 8 / 1e9 / (time.perf_counter() - started))
        pipe.send(True)
        cpu.append((cpu_seconds() + pipe.recv() - before) / (body.nbytes / 1e9))
    pipe.send(False)
    await transport.stop()
    return {
        "gbit_per_s": statistics.median(rates[1:]),
        "cpu_s_per_gb": statistics.median(cpu[1:]),
        "control_rtt_us_median": statistics.median(times) * 1e6,
        "control_rtt_us_p99": sorted(times)[int(len(times) * 0.99)] * 1e6,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        init_run(folder, RUN, ["a", "b"])
        ours, theirs = mp.get_context("spawn").Pipe()
        child = mp.get_context("spawn").Process(target=receive, args=(folder, theirs))
        child.start()
        result = run_loop(measure(folder, ours, options.mib, options.repeat))
        child.join(10)
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:24} {value:10.3f}")


if __name__ == "__main__":
    main()
