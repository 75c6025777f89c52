"""Two transports on a private network, loaded in both directions: what the kernel counts and control waits meanwhile.

    python benchmarks/budget_link.py OPTIONS_JSON

Run as root inside a fresh network namespace (`unshare -n`). It makes a second one, joins them by a veth pair without
segmentation offload, and prints one JSON object. Or inside the first namespace of an emulated WAN, with the name of the
second one in `namespace_b`. `run_link` does either; `benchmarks/budget.py`, `benchmarks/control_wan.py` and
`tests/transport/pacing/test_budget_on_a_link.py` begin there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.messages import BulkHeader, Message, Payload, PayloadRequested, Refused
from diloco_node.core.types import RateLimits
from diloco_node.errors import LinkLost
from diloco_node.lab.wan.tun import inside
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.kernel import congestion
from diloco_node.transport.transport import GrpcTransport

ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 7400
SAMPLE_S = 0.05
PING_S = 0.05
CONNECT_S = 60.0
HANG_S = 200.0
"""Beyond what was asked for: then something hangs, on however slow a machine."""


class NoNamespace(RuntimeError):
    """This machine lets nobody make a network namespace."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run, and for how long.

    Attributes:
        seconds: that count, after settle_s.
        egress_a, ingress_a, egress_b, ingress_b: budgets, bytes/s; 0: none.
        load: who sends bulk. body_bytes: of a transfer, two of which are under way from each side.
        is_by_loss: TCP goes by loss (Reno), not by BBR, and fills the line's queue.
        namespace_b: of an emulated WAN, for side b.
        idle: (namespace, address) of two more regions there; both processes bounce datagrams over their link, which is
            idle: that is how late the machine itself is.
        stall_s: so long side b's process stands still, in the middle.
    """

    seconds: float = 4.0
    settle_s: float = 1.0
    egress_a: int = 0
    ingress_a: int = 0
    egress_b: int = 0
    ingress_b: int = 0
    load: str = "ab"
    body_bytes: int = 2 * 2**20
    is_by_loss: bool = False
    namespace_b: str = ""
    idle: Sequence[Sequence[str]] = ()
    stall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The interface's counters, read at some moment between two readings of the clock.

    Attributes:
        before_s, after_s: since the load began. bytes_in, bytes_out: since the interface was made.
    """

    before_s: float
    after_s: float
    bytes_in: int
    bytes_out: int

    def counted(self, way: str) -> int:
        """The bytes of a way, "in" or "out"."""
        return self.bytes_in if way == "in" else self.bytes_out


@dataclass(frozen=True, slots=True)
class Found:
    """What a run gave.

    Attributes:
        samples: the first one is from before the load. settle_s: see Options.
        control_s: round trips of the control lane after settle_s; what had no answer yet, as long as it had waited.
        idle_s: of datagrams over the idle link, at the same time, between the same two event loops.
    """

    samples: list[Sample]
    settle_s: float
    control_s: list[float]
    idle_s: list[float]

    def used_per_s(self, way: str) -> float:
        """Bytes/s in or out, after settle_s."""
        late = [sample for sample in self.samples if sample.before_s >= self.settle_s]
        return (late[-1].counted(way) - late[0].counted(way)) / (late[-1].after_s - late[0].before_s)

    def ahead_s(self, way: str, bytes_per_s: int) -> float:
        """How far the bytes since the load began were ever ahead of a rate, in seconds of that rate."""
        first = self.samples[0]
        return max(
            (sample.counted(way) - first.counted(way)) / bytes_per_s - (sample.after_s - first.before_s)
            for sample in self.samples
        )

    def most_per_s(self, way: str, window_s: float) -> float:
        """The most bytes/s between any two samples at least so far apart; 0 if none are.

        The time is from before the first one was read until after the second one was: it may be too long on a machine
        that stands still meanwhile, never too short.
        """
        most, end = 0.0, 0
        for start, first in enumerate(self.samples):
            end = max(end, start)
            while end < len(self.samples) and self.samples[end].before_s - first.after_s < window_s:
                end += 1
            if end == len(self.samples):
                break
            last = self.samples[end]
            most = max(most, (last.counted(way) - first.counted(way)) / (last.after_s - first.before_s))
        return most

    def gap_s(self) -> float:
        """The longest time between two samples, which should be SAMPLE_S."""
        befores = [sample.before_s for sample in self.samples]
        return max(later - sooner for sooner, later in itertools.pairwise(befores))


def quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ranked = sorted(values)
    return ranked[min(int(len(ranked) * share), len(ranked) - 1)]


def run_link(options: Options, namespace_a: str = "") -> Found:
    """Run both sides, in namespaces of their own or of an emulated WAN, and take what they print.

    They go ahead of what else runs here where the machine allows it: what is measured is time.

    Raises:
        NoNamespace: this machine makes none. RuntimeError: a side failed.
    """
    place = ["ip", "netns", "exec", namespace_a] if namespace_a else ["unshare", "-n"]
    command = [*place, "nice", "-n", "-15", sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(options))]
    limit_s = options.settle_s + options.seconds + HANG_S
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if "Operation not permitted" in done.stderr and not done.stdout:
        raise NoNamespace(done.stderr[-500:])
    if done.returncode:
        raise RuntimeError(f"a side of the link failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Found(
        [Sample(*sample) for sample in found["samples"]],
        options.settle_s,
        *([rtt_s for at_s, rtt_s in found[name] if at_s >= options.settle_s] for name in ("control_s", "idle_s")),
    )


# ---- the two sides ---------------------------------------------------------------------------------------------------


class RoundTrips:
    """Of something that is asked every PING_S and answered by its number."""

    def __init__(self) -> None:
        self._asked_s: dict[int, float] = {}
        self._took_s: list[tuple[float, float]] = []

    def asked(self, number: int) -> None:
        """Note when."""
        self._asked_s[number] = time.monotonic()

    def answered(self, number: int) -> None:
        """Note how long it took."""
        asked_s = self._asked_s.pop(number, None)
        if asked_s is not None:
            self._took_s.append((asked_s, time.monotonic() - asked_s))

    def since(self, started_s: float) -> list[tuple[float, float]]:
        """(asked at, took) of what was asked since; what has no answer yet has taken as long as it waited."""
        now_s = time.monotonic()
        waiting = [(asked_s, now_s - asked_s) for asked_s in self._asked_s.values()]
        return [(asked_s - started_s, took_s) for asked_s, took_s in self._took_s + waiting if asked_s >= started_s]


class Datagrams(asyncio.DatagramProtocol):
    """Sends back what comes from the other side; what is an answer is noted."""

    def __init__(self, trips: RoundTrips, *, is_mirror: bool) -> None:
        self._trips = trips
        self._is_mirror = is_mirror
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        """One came."""
        if self._is_mirror:
            self._transport.sendto(data, addr)
        else:
            self._trips.answered(int.from_bytes(data))


class Side:
    """One transport, loading the other."""

    def __init__(self, region: str, options: Options, folder: Path) -> None:
        self.region, self.peer = region, "b" if region == "a" else "a"
        self.options = options
        self.up = asyncio.Event()
        self.control, self.idle = RoundTrips(), RoundTrips()
        self.buffer = bytearray()
        is_a = region == "a"
        self.transport = GrpcTransport(
            region=region,
            run_id="run1",
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
        """Answer, or note the answer."""
        if isinstance(message, PayloadRequested):
            self.transport.send(peer, Refused(message.fragment, message.version, ""))
        elif isinstance(message, Refused):
            self.control.answered(message.version)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """Note it."""
        (self.up.set if is_up else self.up.clear)()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview:
        """One buffer for all: what arrives is not looked at."""
        if len(self.buffer) != raw_bytes:
            self.buffer = bytearray(raw_bytes)
        return memoryview(self.buffer)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """Nothing to do."""

    async def load(self) -> None:
        """Send random bytes for ever, two transfers at a time."""
        body = memoryview(os.urandom(self.options.body_bytes))
        await self.up.wait()

        async def one() -> None:
            while True:
                try:
                    await self.transport.transfer(self.peer, Payload(0, 0, bytes(32)), body)
                except LinkLost:
                    await self.up.wait()
                    await asyncio.sleep(0.05)

        await asyncio.gather(one(), one())

    async def ping(self) -> None:
        """Ask through the control lane, and by datagrams over the idle link if there is one."""
        idle = await self.open_idle()
        for number in range(2**31):
            self.control.asked(number)
            self.transport.send(self.peer, PayloadRequested(0, number, bytes(32)))
            if idle is not None:
                self.idle.asked(number)
                idle.sendto(number.to_bytes(8), (self.options.idle[1][1], PORT))
            await asyncio.sleep(PING_S)

    async def open_idle(self) -> asyncio.DatagramTransport | None:
        """Our end of the idle link; the socket belongs to another namespace than this process."""
        if not self.options.idle:
            return None
        namespace, address = self.options.idle["ab".index(self.region)]
        with inside(namespace):
            end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        end.setblocking(False)
        end.bind((address, PORT))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: Datagrams(self.idle, is_mirror=self.region == "b"), sock=end
        )
        return transport


def interface(name: str) -> tuple[int, int]:
    """Bytes received and sent, as the kernel counts them."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if f"{name}:" in line)
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])


def samples(device: str, started_s: float) -> Iterator[Sample]:
    """Readings of an interface, for ever."""
    while True:
        before_s = time.monotonic() - started_s
        counted = interface(device)
        yield Sample(before_s, time.monotonic() - started_s, *counted)


def run(*words: str) -> None:
    """A command that must succeed."""
    subprocess.run(words, check=True, capture_output=True)


def set_up(region: str) -> None:
    """Our end of the veth pair; without segmentation offload it counts packets as they would be on a wire."""
    name = f"v{region}"
    run("ip", "addr", "add", f"{ADDRESSES[region]}/24", "dev", name)
    run("ip", "link", "set", name, "gso_max_segs", "1")
    run("ip", "link", "set", name, "up")


async def side_b(options: Options, folder: Path) -> None:
    """The other namespace. Each line on standard input is the next step: set up, load, stop."""
    loop = asyncio.get_running_loop()
    print("here", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    if not options.namespace_b:
        set_up("b")
    side = Side("b", options, folder)
    idle = await side.open_idle()
    await side.transport.start()
    print("started", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    load = asyncio.create_task(side.load()) if "b" in options.load else None
    await loop.run_in_executor(None, sys.stdin.readline)
    print("over", flush=True)
    if load is not None:
        load.cancel()
    if idle is not None:
        idle.close()
    await side.transport.stop()


async def stall(options: Options, pid: int) -> None:
    """Let a process stand still for a while."""
    await asyncio.sleep(options.settle_s + options.seconds / 3)
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(options.stall_s)
    finally:
        os.kill(pid, signal.SIGCONT)


async def side_a(options: Options, folder: Path, child: subprocess.Popen[str]) -> dict[str, Any]:
    """Here: load, ping, and read the interface's counters."""
    loop = asyncio.get_running_loop()
    assert child.stdin is not None
    assert child.stdout is not None

    def step() -> None:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()

    # Before that its process may still be in our namespace, and its end of the pair would stay here.
    await loop.run_in_executor(None, child.stdout.readline)
    if not options.namespace_b:
        run(*f"ip link add va type veth peer name vb netns {child.pid}".split())
        set_up("a")
    device = next(name for _, name in socket.if_nameindex() if name != "lo")
    step()
    await loop.run_in_executor(None, child.stdout.readline)
    side = Side("a", options, folder)
    await side.transport.start()
    await asyncio.wait_for(side.up.wait(), CONNECT_S)
    started_s = time.monotonic()
    readings = samples(device, started_s)
    found = [next(readings)]
    step()
    work = [side.ping()] + ([side.load()] if "a" in options.load else [])
    tasks = [asyncio.create_task(one) for one in work]
    stalling = asyncio.create_task(stall(options, child.pid)) if options.stall_s else None
    while found[-1].after_s < options.settle_s + options.seconds:
        await asyncio.sleep(SAMPLE_S)
        found.append(next(readings))
        for task in tasks:
            if task.done():
                task.result()
    trips = {"control_s": side.control.since(started_s), "idle_s": side.idle.since(started_s)}
    if stalling is not None:
        await stalling
    step()
    await loop.run_in_executor(None, child.stdout.readline)
    for task in tasks:
        task.cancel()
    await side.transport.stop()
    plain = [(one.before_s, one.after_s, one.bytes_in, one.bytes_out) for one in found]
    return {"samples": plain, **trips}


def main() -> None:
    """Command line: side a, which starts side b."""
    import structlog
    import uvloop

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    options = Options(**json.loads(sys.argv[1]))
    if options.is_by_loss:
        congestion.LONG_RTT_CONGESTION_CONTROL = b"reno"  # type: ignore[misc]
    if len(sys.argv) > 2:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(side_b(options, Path(sys.argv[2])))
        return
    with tempfile.TemporaryDirectory() as name:
        init_run(Path(name), "run1", ["a", "b"])
        place = ["ip", "netns", "exec", options.namespace_b] if options.namespace_b else ["unshare", "-n"]
        command = [*place, sys.executable, str(Path(__file__).resolve()), json.dumps(asdict(options)), name]
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            print(json.dumps(runner.run(side_a(options, Path(name), child))))


if __name__ == "__main__":
    main()
