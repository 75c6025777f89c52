"""The two ends of a measured flow: one sends probes, the other counts what arrives.

Probes are bulk transfers in the measurement lane of a link, within the budget. They count where they arrive, after a
warm-up from the first byte on. All times are integer nanoseconds of one monotonic clock, bytes are raw bytes, CPU time
is that of the whole process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.errors import LinkLost
from diloco_node.measure.gate import ProbesExpected
from diloco_node.measure.samples import Mark, goodput
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire.measure_messages import (
    BODY_BYTES_MAX,
    MeasurementReceived,
    MeasurementRequested,
    MeasurementSent,
    Probe,
)

BODY_BYTES_MIN: Final = 64 * 2**10
BODY_S: Final = 0.05
"""A transfer is what the link carries in so long: it counts when it is whole, and rounds on other links wait for it."""

MARK_NS: Final = 1_000_000
"""Probes that end closer together than this are one mark of the measurement."""

TRANSFERS_QUEUED: Final = 2
"""So that the link has the next one when one is done."""

SENDER_GRACE_S: Final = 10.0
"""The sender waits so long after its time is up for the message that enough has arrived."""

START_S: Final = 10.0
LATE_S: Final = 10.0
"""The receiver waits so long for the first bytes, and for the last after their time: rounds go before them."""


def warm_up_ns(rtt_ns: int) -> int:
    """How long until a flow is at full speed: 25 round trips, 1 to 5 s. Slow start takes 11 of them to 25 MB."""
    return min(max(25 * rtt_ns, NS_PER_S), 5 * NS_PER_S)


@contextlib.asynccontextmanager
async def ending(*tasks: asyncio.Task[Any]) -> AsyncIterator[None]:
    """Tasks that are over when this is."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def make_body(executor: Executor) -> memoryview:
    """`BODY_BYTES_MAX` random bytes to send, made in a thread: it takes up to half a second of CPU time."""
    return memoryview(await asyncio.get_running_loop().run_in_executor(executor, os.urandom, BODY_BYTES_MAX))


@dataclass(frozen=True, slots=True)
class _Counted:
    at_ns: int
    cpu_ns: int
    wire_bytes: int
    tcp: TcpCounters | None


class ProbeSender:
    """Sends probes to a peer until it is stopped, or has used up its bytes or its time. `run` once.

    body: `BODY_BYTES_MAX` bytes to send from.
    """

    def __init__(self, transport: GrpcTransport, peer: str, request: MeasurementRequested, body: memoryview) -> None:
        self._transport = transport
        self._peer = peer
        self._request = request
        self._body = body
        self._left = request.bytes_max
        self._size = BODY_BYTES_MIN
        self._stop = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Raw bytes that were handed over."""
        return self._request.bytes_max - self._left

    def stop(self) -> None:
        """Enough has arrived."""
        self._stop.set()

    async def run(self) -> MeasurementSent:
        """Send; returns what was counted after the warm-up. Raises LinkLost: it is down, or nobody says "enough"."""
        tasks = [asyncio.create_task(self._fill(), name=f"probes {self._peer}") for _ in range(TRANSFERS_QUEUED)]
        stop = asyncio.create_task(self._stop.wait())
        async with ending(*tasks, stop):
            before = self._count()
            if not await self._stopped_within(tasks, stop, self._request.warm_up_ns / NS_PER_S):
                before = self._count()
                await self._stopped_within(tasks, stop, self._request.span_ns / NS_PER_S)
            after = self._count()
            if not await self._stopped_within(tasks, stop, SENDER_GRACE_S + START_S):
                raise LinkLost(f"{self._peer}: it does not say what it received of a measurement")
        tcp = (-1, -1)
        if before.tcp is not None and after.tcp is not None:
            tcp = (
                after.tcp.sent_bytes - before.tcp.sent_bytes,
                after.tcp.retransmitted_bytes - before.tcp.retransmitted_bytes,
            )
        return MeasurementSent(
            self._request.measurement,
            after.cpu_ns - before.cpu_ns,
            max(1, after.at_ns - before.at_ns),
            after.wire_bytes - before.wire_bytes,
            *tcp,
        )

    async def _stopped_within(self, tasks: list[asyncio.Task[None]], stop: asyncio.Task[bool], limit_s: float) -> bool:
        """Whether it was stopped. Raises what the sending raised; that the bytes are used up is no end."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while not stop.done() and (left_s := end_s - loop.time()) > 0:
            sending = [task for task in tasks if not task.done()]
            await asyncio.wait([*sending, stop], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():  # else the peer has enough, and a connection that ends with that is no failure
                for task in tasks:
                    if task.done():
                        task.result()
        return stop.done()

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        header = Probe(self._request.measurement)
        while self._left:
            await self._transport.give_way()
            size = min(self._size, self._left)
            if not size:  # the other task took the last of it meanwhile
                return
            self._left -= size
            began_s = loop.time()
            await self._transport.transfer(self._peer, header, self._body[:size])
            # Two of them share the link, so each takes twice its own time. It doubles at most: buffers take the first.
            target_bytes = int(TRANSFERS_QUEUED * size * BODY_S / max(loop.time() - began_s, 1e-6))
            self._size = max(BODY_BYTES_MIN, min(target_bytes, 2 * size, BODY_BYTES_MAX))

    def _count(self) -> _Counted:
        tcp = self._transport.tcp(self._peer, is_now=True)
        lane = self._transport.budget_status()["peers"][self._peer]["lanes"]["measurement"]
        return _Counted(time.monotonic_ns(), time.process_time_ns(), int(lane["used_bytes"]), tcp)


class ProbeReceiver:
    """Counts the probes of one measurement as they arrive. `run` once."""

    def __init__(self, request: MeasurementRequested, *, now_ns: Callable[[], int]) -> None:
        self._request = request
        self._now_ns = now_ns
        self._buffer: memoryview | None = None
        self._marks: list[Mark] = []
        self._begun = asyncio.Event()
        self._warm = asyncio.Event()
        self._enough = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Raw bytes that arrived."""
        return self._marks[-1][1] if self._marks else 0

    def open_transfer(self, raw_bytes: int) -> memoryview:
        """A transfer begins, after the one before has ended: where its bytes go, over and over."""
        self._begin()
        if self._buffer is None or self._buffer.nbytes < raw_bytes:
            self._buffer = memoryview(bytearray(raw_bytes))
        return self._buffer[:raw_bytes]

    def _begin(self) -> None:
        if not self._marks:
            self._marks.append((self._now_ns(), 0))
            self._begun.set()

    def close_transfer(self, raw_bytes: int) -> None:
        """A transfer has arrived whole; it may have begun before this receiver was there."""
        self._begin()
        at_ns, total = self._now_ns(), self._marks[-1][1] + raw_bytes
        if len(self._marks) > 1 and at_ns - self._marks[-1][0] < MARK_NS:
            self._marks[-1] = (self._marks[-1][0], total)  # a peer that sends tiny ones must not fill our memory
        else:
            self._marks.append((at_ns, total))
        if at_ns >= self._marks[0][0] + self._request.warm_up_ns:
            self._warm.set()
        if at_ns >= self._end_ns or total >= self._request.bytes_max:
            self._warm.set()  # bytes that are used up early are not waited for
            self._enough.set()

    @property
    def _end_ns(self) -> int:
        return self._marks[0][0] + self._request.warm_up_ns + self._request.span_ns

    async def run(self) -> MeasurementReceived:
        """Wait for enough. Raises LinkLost: nothing arrived."""
        if not await _is_set_within(self._begun, START_S):
            raise LinkLost(f"nothing arrived in {START_S:.0f} s: rounds and recovery go before a measurement")
        cpu = [self._cpu_now()]
        is_warm = await _is_set_within(self._warm, self._request.warm_up_ns / NS_PER_S + LATE_S)
        if is_warm and not self._enough.is_set():
            cpu.append(self._cpu_now())
        left_s = max(0.0, (self._end_ns - self._now_ns()) / NS_PER_S)
        await _is_set_within(self._enough, left_s + LATE_S)
        if self.used_bytes == 0:
            raise LinkLost("nothing arrived whole: rounds and recovery go before a measurement")
        start_ns, span_ns = self._counted_span()
        rates = goodput(self._marks, start_ns=start_ns, span_ns=span_ns)
        start, now = cpu[-1], self._cpu_now()
        return MeasurementReceived(
            self._request.measurement,
            rates.mean,
            rates.median,
            rates.p10,
            rates.p90,
            span_ns,
            now[0] - start[0],
            max(1, now[1] - start[1]),
        )

    def _counted_span(self) -> tuple[int, int]:
        """Where what counts begins, and how long it is. Bytes used up too early: the second half of the time."""
        first_ns, last_ns = self._marks[0][0], self._marks[-1][0]
        end_ns = min(last_ns, self._end_ns) if self.used_bytes >= self._request.bytes_max else self._end_ns
        warm_ns = min(self._request.warm_up_ns, (end_ns - first_ns) // 2)
        return first_ns + warm_ns, max(1, end_ns - first_ns - warm_ns)

    @staticmethod
    def _cpu_now() -> tuple[int, int]:
        return time.process_time_ns(), time.monotonic_ns()


async def _is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()


class ProbeReceivers:
    """The receivers that are here: brings what arrives to the right one, and refuses what nobody agreed to."""

    def __init__(self, *, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self.expected: defaultdict[str, ProbesExpected] = defaultdict(ProbesExpected)
        self._receivers: dict[tuple[str, int], ProbeReceiver] = {}

    @contextlib.contextmanager
    def receiver(self, peer: str, request: MeasurementRequested) -> Iterator[ProbeReceiver]:
        """A receiver that gets what arrives, for as long as this lasts."""
        key = (peer, request.measurement)
        self.expected[peer].expect(request.measurement, request.bytes_max)
        self._receivers[key] = receiver = ProbeReceiver(request, now_ns=self._now_ns)
        try:
            yield receiver
        finally:
            del self._receivers[key]

    def open_transfer(self, peer: str, header: Probe, raw_bytes: int) -> memoryview | None:
        """Where probes go; None for those that come late. Raises ProtocolViolation for those nobody agreed to."""
        self.expected[peer].arrive(header.measurement, raw_bytes)
        receiver = self._receivers.get((peer, header.measurement))
        return None if receiver is None else receiver.open_transfer(raw_bytes)

    def close_transfer(self, peer: str, header: Probe, raw_bytes: int, *, is_whole: bool) -> None:
        """Probes arrived, or broke off."""
        receiver = self._receivers.get((peer, header.measurement))
        if receiver is not None and is_whole:
            receiver.close_transfer(raw_bytes)
