"""The two ends of a measured flow between daemons: one sends `Probe` transfers, the other counts what arrives.

Unlike the flows of `adapters.flows`, these go over the link that rounds use, or over connections that take turns with
it (`adapters.asides`), in the measurement lane and within the budget. All times are integer nanoseconds of one
monotonic clock; bytes are raw bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from diloco_node.adapters.flows import CpuUse, Sent
from diloco_node.core.measuring import BODY_BYTES_MAX, NS_PER_S, MeasurementAsked, MeasurementReceived, Probe
from diloco_node.core.messages import BulkHeader
from diloco_node.errors import LinkLost
from diloco_node.measure.samples import Mark, goodput
from diloco_node.transport.kernel.tcp_info import TcpCounters

BODY_BYTES_MIN: Final = 64 * 2**10
BODY_S: Final = 0.05
"""A transfer is what the link carries in so long: it counts when it is whole, and rounds on other links wait for it."""

MARK_NS: Final = 1_000_000
"""Probes that end closer together than this are one mark of the measurement."""

TRANSFERS_QUEUED: Final = 2
"""So that the link has the next one when one is done."""

SENDER_GRACE_S: Final = 10.0
"""The sender waits so long after its time is up to be told that enough has arrived."""

START_S: Final = 10.0
LATE_S: Final = 10.0
"""The receiver waits so long for the first bytes, and for the last after their time: rounds go before them."""


class Bulk(Protocol):
    """What a sending end needs of what carries it; see `GrpcTransport` and `asides.Aside`."""

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """Stream a body; raises LinkLost."""
        ...

    async def give_way(self) -> None:
        """Wait while rounds are on their way elsewhere."""
        ...

    async def tcp_now(self, peer: str) -> TcpCounters | None:
        """What TCP did there."""
        ...


# ---- sending ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SentOverLink:
    """What the sending end found after the warm-up.

    Attributes:
        sent: CPU time of the process; TCP payload of the whole link, other lanes included.
        wire_bytes: that the budget booked in the measurement lane.
    """

    sent: Sent
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class _Counted:
    at_ns: int
    cpu_ns: int
    wire_bytes: int
    tcp: TcpCounters | None


class SendingEnd:
    """Sends probes to a peer until it is told to stop, or has used up its bytes or its time. `run` once.

    Args:
        transport: the link, or connections beside it. peer: to whom. asked: how much, how long.
        body: `BODY_BYTES_MAX` bytes to send from.
        booked: bytes of the measurement lane to this peer until now.
    """

    def __init__(
        self, transport: Bulk, peer: str, asked: MeasurementAsked, body: memoryview, booked: Callable[[], int]
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._asked = asked
        self._body = body
        self._booked = booked
        self._left = asked.bytes_max
        self._size = BODY_BYTES_MIN
        self._stop = asyncio.Event()

    @property
    def used_bytes(self) -> int:
        """Raw bytes that were handed to the link."""
        return self._asked.bytes_max - self._left

    def stop(self) -> None:
        """Enough has arrived."""
        self._stop.set()

    async def run(self) -> SentOverLink:
        """Send.

        Raises:
            LinkLost: the link went down, or nobody said that it is enough.
        """
        tasks = [asyncio.create_task(self._fill(), name=f"probes {self._peer}") for _ in range(TRANSFERS_QUEUED)]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            before = await self._count()
            if not await self._stopped_within(tasks, stopped, self._asked.warm_up_ns / NS_PER_S):
                before = await self._count()
                await self._stopped_within(tasks, stopped, self._asked.span_ns / NS_PER_S)
            after = await self._count()
            if not await self._stopped_within(tasks, stopped, SENDER_GRACE_S + START_S):
                raise LinkLost(f"{self._peer}: it does not say what it received of a measurement")
            return _between(before, after)
        finally:
            for task in (*tasks, stopped):
                task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)

    async def _stopped_within(
        self, tasks: list[asyncio.Task[None]], stopped: asyncio.Task[bool], limit_s: float
    ) -> bool:
        """Whether it was told to stop. Raises what the sending raised; that the bytes are used up is no end."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while not stopped.done() and (left_s := end_s - loop.time()) > 0:
            waited = [task for task in tasks if not task.done()]
            await asyncio.wait([*waited, stopped], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        return stopped.done()

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        header = Probe(self._asked.measurement, self._asked.is_compressible)
        while self._left:
            await self._transport.give_way()
            size = min(self._size, self._left)
            if not size:  # the other task took the last of it meanwhile
                return
            self._left -= size
            began_s = loop.time()
            await self._transport.transfer(self._peer, header, self._body[:size])
            # Two of them share the link, so each takes twice its own time. It doubles at most: buffers take the first.
            wanted = int(TRANSFERS_QUEUED * size * BODY_S / max(loop.time() - began_s, 1e-6))
            self._size = max(BODY_BYTES_MIN, min(wanted, 2 * size, BODY_BYTES_MAX))

    async def _count(self) -> _Counted:
        tcp = await self._transport.tcp_now(self._peer)
        return _Counted(time.monotonic_ns(), time.process_time_ns(), self._booked(), tcp)


def _between(before: _Counted, after: _Counted) -> SentOverLink:
    cpu = CpuUse(after.cpu_ns - before.cpu_ns, max(1, after.at_ns - before.at_ns))
    sent: tuple[int, int] | tuple[None, None] = (None, None)
    if before.tcp is not None and after.tcp is not None:
        sent = (
            after.tcp.sent_bytes - before.tcp.sent_bytes,
            after.tcp.retransmitted_bytes - before.tcp.retransmitted_bytes,
        )
    return SentOverLink(Sent(cpu, *sent), after.wire_bytes - before.wire_bytes)


# ---- receiving -------------------------------------------------------------------------------------------------------


class ReceivingEnd:
    """Counts the probes of one measurement as they arrive. `run` once; `opened` and `closed` from the transport.

    Args:
        asked: how much, how long. now_ns: monotonic.
    """

    def __init__(self, asked: MeasurementAsked, *, now_ns: Callable[[], int]) -> None:
        self._asked = asked
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

    def opened(self, raw_bytes: int) -> memoryview:
        """A transfer begins, after the one before has ended: where its bytes go, over and over."""
        self._begin()
        if self._buffer is None or self._buffer.nbytes < raw_bytes:
            self._buffer = memoryview(bytearray(raw_bytes))
        return self._buffer[:raw_bytes]

    def arrived(self, size: int) -> None:
        """Bytes that are no transfer have arrived."""
        self._begin()
        self.closed(size)

    def _begin(self) -> None:
        if not self._marks:
            self._marks.append((self._now_ns(), 0))
            self._begun.set()

    def closed(self, raw_bytes: int) -> None:
        """A transfer has arrived whole."""
        at_ns, total = self._now_ns(), self._marks[-1][1] + raw_bytes
        if len(self._marks) > 1 and at_ns - self._marks[-1][0] < MARK_NS:
            self._marks[-1] = (self._marks[-1][0], total)  # a peer that sends tiny ones must not fill our memory
        else:
            self._marks.append((at_ns, total))
        if at_ns >= self._marks[0][0] + self._asked.warm_up_ns:
            self._warm.set()
        if at_ns >= self._end_ns or total >= self._asked.bytes_max:
            self._warm.set()  # bytes that are used up early are not waited for
            self._enough.set()

    @property
    def _end_ns(self) -> int:
        return self._marks[0][0] + self._asked.warm_up_ns + self._asked.span_ns

    async def run(self) -> MeasurementReceived:
        """Wait for enough.

        Raises:
            LinkLost: nothing arrived.
        """
        if not await _is_set_within(self._begun, START_S):
            raise LinkLost(f"nothing arrived in {START_S:.0f} s: rounds and recovery go before a measurement")
        cpu = [self._cpu_now()]
        is_warm = await _is_set_within(self._warm, self._asked.warm_up_ns / NS_PER_S + LATE_S)
        if is_warm and not self._enough.is_set():
            cpu.append(self._cpu_now())
        left_s = max(0.0, (self._end_ns - self._now_ns()) / NS_PER_S)
        await _is_set_within(self._enough, left_s + LATE_S)
        if self.used_bytes == 0:
            raise LinkLost("nothing arrived whole: rounds and recovery go before a measurement")
        start_ns, span_ns = self._counted()
        rates = goodput([self._marks], start_ns=start_ns, span_ns=span_ns)
        used, now = cpu[-1], self._cpu_now()
        return MeasurementReceived(
            self._asked.measurement,
            rates.mean,
            rates.median,
            rates.p10,
            rates.p90,
            span_ns,
            now[0] - used[0],
            max(1, now[1] - used[1]),
        )

    def _counted(self) -> tuple[int, int]:
        """Where what counts begins, and how long it is. Bytes used up too early: the second half of the time."""
        first_ns, last_ns = self._marks[0][0], self._marks[-1][0]
        end_ns = min(last_ns, self._end_ns) if self.used_bytes >= self._asked.bytes_max else self._end_ns
        warm_ns = min(self._asked.warm_up_ns, (end_ns - first_ns) // 2)
        return first_ns + warm_ns, max(1, end_ns - first_ns - warm_ns)

    @staticmethod
    def _cpu_now() -> tuple[int, int]:
        return time.process_time_ns(), time.monotonic_ns()


async def _is_set_within(event: asyncio.Event, limit_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
    return event.is_set()
