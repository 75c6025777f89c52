"""The two ends of a measured flow: one sends as much as goes, the other counts what arrives, and when.

A flow over the transport is made of the daemon's own parts (`outbound`, `inbound`, gRPC with TLS, zstd where it pays),
without a budget; a plain one of blocking sockets in threads. Bytes count where they arrive. The warm-up begins with the
first byte; only what comes after it counts. CPU time is that of the whole process, all threads, without what the kernel
does in interrupts.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from diloco_node.core.messages import BulkHeader, Payload
from diloco_node.errors import LinkLost, ProtocolViolation
from diloco_node.measure.samples import NS_PER_S, Goodput, Mark, goodput
from diloco_node.transport.inbound import BulkInbound
from diloco_node.transport.kernel.sock_diag import read_sockets_to
from diloco_node.transport.kernel.tcp_info import Address, SocketCounters, plain_ip
from diloco_node.transport.kernel.wire_meter import WireMeter
from diloco_node.transport.outbound import BulkOutbound
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.streams import Stream
from diloco_node.wire.envelope import TransferChunk, decode_bulk
from diloco_node.wire.measurement import FlowBody

BODY_BYTES_MAX: Final = 16 * 2**20
BODY_BYTES_MIN: Final = 64 * 2**10
BODY_S: Final = 0.05
"""A transfer is what the stream carries in so long: on a slow link a chunk of 1 MiB would be the grain of the whole
measurement, and a transfer of 16 MiB would not end in it."""

BODY_CHANGES_S: Final = 0.1
TRANSFERS_QUEUED: Final = 2
PLAIN_BYTES: Final = 256 * 2**10
PLAIN_WAKE_S: Final = 0.2

START_S: Final = 10.0
"""From the first to the last stream of a flow, and to the first byte."""

LAST_MARK_S: Final = 2.0
"""After the end, for the chunk that is on its way: its bytes before the end count."""

SENDER_GRACE_S: Final = 20.0
"""The sender goes on until it is told to stop, but not longer than this after its own time is up."""

_HEADER: Final[BulkHeader] = Payload(0, 0, bytes(32))
_BLOCK_VALUES: Final = 256
_INT4_MAX: Final = 7
_BASE_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class FlowTimes:
    """How long a flow is: `warm_up_ns` are not counted, `span_ns` are."""

    warm_up_ns: int
    span_ns: int

    @property
    def total_s(self) -> float:
        """Both, in seconds."""
        return (self.warm_up_ns + self.span_ns) / NS_PER_S


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU time of this process, and the time in which it was used."""

    cpu_ns: int
    span_ns: int


@dataclass(frozen=True, slots=True)
class Received:
    """What the receiving end found."""

    goodput: Goodput
    cpu: CpuUse


@dataclass(frozen=True, slots=True)
class Sent:
    """What the sending end found after the warm-up; bytes are None where the kernel does not tell."""

    cpu: CpuUse
    sent_bytes: int | None
    retransmitted_bytes: int | None


# ---- sockets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SocketsOf:
    """The sockets of a flow or a session among those of this process.

    Attributes:
        remotes: where they go to. earlier: cookies of those that were there before and are not meant.
        only: cookies of those that are meant; None: any.
    """

    remotes: frozenset[Address]
    earlier: frozenset[int] = frozenset()
    only: frozenset[int] | None = None

    @classmethod
    def to(cls, remotes: Sequence[Address]) -> SocketsOf:
        """Those that will be opened to an address from now on."""
        wanted = frozenset((plain_ip(host), port) for host, port in remotes)
        return cls(wanted, frozenset(found.cookie for found in read_sockets_to(wanted)))

    def read(self) -> list[SocketCounters]:
        """Their counters now."""
        return [found for found in read_sockets_to(self.remotes) if self._is_meant(found.cookie)]

    def fixed(self) -> SocketsOf:
        """Those that are there now, and none that come later."""
        return replace(self, only=frozenset(found.cookie for found in self.read()))

    def _is_meant(self, cookie: int) -> bool:
        return cookie not in self.earlier and (self.only is None or cookie in self.only)


def sent_bytes(found: Sequence[SocketCounters]) -> tuple[int, int] | None:
    """Sent and retransmitted bytes of sockets together; None when there are none."""
    if not found:
        return None
    return sum(one.bytes_sent for one in found), sum(one.bytes_retransmitted for one in found)


# ---- what is sent ----------------------------------------------------------------------------------------------------


def make_body(body: FlowBody) -> memoryview:
    """`BODY_BYTES_MAX` bytes to send. Takes up to half a second of CPU time: call it in a thread, before the flow.

    INT4 has the layout of encoded blocks: a float32 scale, then 256 values in 128 bytes, absmax-quantised normals.
    """
    rng = np.random.default_rng(20_428)
    if body is FlowBody.RANDOM:
        return memoryview(rng.bytes(BODY_BYTES_MAX))
    values = rng.standard_normal((_BASE_BYTES // (4 + _BLOCK_VALUES // 2), _BLOCK_VALUES), dtype=np.float32)
    scales = np.abs(values).max(axis=1, keepdims=True) / _INT4_MAX
    codes = np.rint(values / scales).astype(np.int8).view(np.uint8) & 15
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    encoded = np.concatenate([scales.view(np.uint8), packed], axis=1).tobytes()
    # Repeated further apart than a chunk is long, so zstd does not see it.
    return memoryview((encoded * (BODY_BYTES_MAX // len(encoded) + 1))[:BODY_BYTES_MAX])


# ---- sending ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendingEnd:
    """What the sending end of a flow is given.

    Attributes:
        body: see `make_body`. sockets: of the flow, for what the kernel counts. stop: set when enough has arrived.
    """

    body: memoryview
    times: FlowTimes
    sockets: SocketsOf
    stop: asyncio.Event


async def send_transport(streams: Sequence[Stream], peer: str, end: SendingEnd) -> Sent:
    """Fill streams with transfers until `stop` is set.

    Raises:
        LinkLost: a stream failed before.
    """
    pacer = Pacer([peer], meter=WireMeter(), send=lambda _peer, _message: None)
    with ThreadPoolExecutor(min(4, len(streams) + 1), thread_name_prefix="flow") as executor:
        outbounds = [BulkOutbound(peer, stream, executor, pacer) for stream in streams]
        tasks = [asyncio.create_task(outbound.run()) for outbound in outbounds]
        for outbound in outbounds:
            size = _BodySize(asyncio.get_running_loop().time())
            tasks += [asyncio.create_task(_keep_sending(outbound, end.body, size)) for _ in range(TRANSFERS_QUEUED)]
        try:
            return await _watch_sending(tasks, end)
        finally:
            await _end(tasks)
            pacer.close()


class _BodySize:
    """How long the next transfer of a stream is. It doubles at most, for gRPC's buffers take the first ones at once."""

    def __init__(self, now_s: float) -> None:
        self.bytes = BODY_BYTES_MIN
        self._since_s = now_s
        self._handed_bytes = 0

    def handed(self, size: int, *, now_s: float) -> None:
        """A transfer was handed over."""
        self._handed_bytes += size
        elapsed_s = now_s - self._since_s
        if elapsed_s >= BODY_CHANGES_S:
            wanted = int(self._handed_bytes / elapsed_s * BODY_S)
            self.bytes = max(BODY_BYTES_MIN, min(wanted, 2 * self.bytes, BODY_BYTES_MAX))
            self._since_s, self._handed_bytes = now_s, 0


async def _keep_sending(outbound: BulkOutbound, body: memoryview, size: _BodySize) -> None:
    loop = asyncio.get_running_loop()
    while True:
        length = size.bytes
        await outbound.transfer(_HEADER, body[:length])
        size.handed(length, now_s=loop.time())


async def send_plain(connections: Sequence[socket.socket], end: SendingEnd) -> Sent:
    """Fill plain connections until `stop` is set. They are closed at the end.

    Raises:
        LinkLost: a connection failed before.
    """
    ended = threading.Event()
    with ThreadPoolExecutor(len(connections), thread_name_prefix="flow") as executor:
        loop = asyncio.get_running_loop()
        tasks = [
            asyncio.ensure_future(loop.run_in_executor(executor, _fill, connection, end.body, ended))
            for connection in connections
        ]
        try:
            return await _watch_sending(tasks, end)
        finally:
            ended.set()
            _shut(connections)
            await asyncio.gather(*tasks, return_exceptions=True)
            for connection in connections:
                connection.close()


def _fill(connection: socket.socket, body: memoryview, ended: threading.Event) -> None:
    connection.settimeout(PLAIN_WAKE_S)
    piece = body[:PLAIN_BYTES]
    while not ended.is_set():
        try:
            connection.send(piece)
        except TimeoutError:
            continue
        except OSError as error:
            if not ended.is_set():
                raise LinkLost(f"a plain connection broke off ({error.strerror})") from None


async def _watch_sending(tasks: Sequence[asyncio.Future[Any]], end: SendingEnd) -> Sent:
    times, sockets = end.times, end.sockets
    stopped = asyncio.create_task(end.stop.wait())
    try:
        await _until_done([*tasks, stopped], times.warm_up_ns / NS_PER_S)
        before, cpu = sent_bytes(sockets.read()), _cpu_now()
        await _until_done([*tasks, stopped], times.span_ns / NS_PER_S)
        after, used = sent_bytes(sockets.read()), _cpu_since(cpu)
        # What was to be counted has been: a connection that ends now is the other side's way of saying enough.
        await asyncio.wait([*tasks, stopped], timeout=SENDER_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
    if before is None or after is None:
        return Sent(used, None, None)
    return Sent(used, after[0] - before[0], after[1] - before[1])


async def _until_done(tasks: Sequence[asyncio.Future[Any]], limit_s: float) -> None:
    """Wait until one is done, or for the time. Raises what it raised."""
    done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


# ---- receiving -------------------------------------------------------------------------------------------------------


class _Arrivals:
    """When bytes arrived on the connections of a flow. `add` from any thread, one for each connection."""

    def __init__(self, connections: int, times: FlowTimes) -> None:
        self._times = times
        self._loop = asyncio.get_running_loop()
        self.marks: list[list[Mark]] = [[(time.monotonic_ns(), 0)] for _ in range(connections)]
        self.first_ns: int | None = None
        self.begun = asyncio.Event()

    def add(self, connection: int, size: int) -> bool:
        """Bytes arrived now; whether this connection has to go on."""
        now_ns = time.monotonic_ns()
        marks = self.marks[connection]
        marks.append((now_ns, marks[-1][1] + size))
        first_ns = self.first_ns
        if first_ns is None:
            first_ns = self.first_ns = now_ns
            self._loop.call_soon_threadsafe(self.begun.set)
        return now_ns < first_ns + self._times.warm_up_ns + self._times.span_ns

    async def watch(self, tasks: Sequence[asyncio.Future[Any]]) -> Received:
        """Wait for the end of the flow. Raises LinkLost: nothing came, or a connection failed before the end."""
        begun = asyncio.create_task(self.begun.wait())
        try:
            await _until_done([*tasks, begun], START_S)
        finally:
            begun.cancel()
        if self.first_ns is None:
            raise LinkLost(f"nothing arrived in {START_S:.0f} s")
        await _all_until(tasks, self.first_ns + self._times.warm_up_ns)
        cpu = _cpu_now()
        await _all_until(tasks, self.first_ns + self._times.warm_up_ns + self._times.span_ns)
        used = _cpu_since(cpu)
        await _all_until(tasks, time.monotonic_ns() + int(LAST_MARK_S * NS_PER_S))
        start_ns = self.first_ns + self._times.warm_up_ns
        found = goodput([list(marks) for marks in self.marks], start_ns=start_ns, span_ns=self._times.span_ns)
        return Received(found, used)


async def _all_until(tasks: Sequence[asyncio.Future[Any]], end_ns: int) -> None:
    """Wait until a moment, or until all are done. Raises what one of them raised."""
    left_s = max(0.0, (end_ns - time.monotonic_ns()) / NS_PER_S)
    done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def receive_transport(streams: Sequence[Stream], peer: str, times: FlowTimes) -> Received:
    """Read streams until the flow's time is over.

    Raises:
        LinkLost: nothing came, or a stream failed before. ProtocolViolation, PayloadCorrupt: what came is no transfer.
    """
    arrivals = _Arrivals(len(streams), times)
    with ThreadPoolExecutor(4, thread_name_prefix="flow") as executor:
        tasks = [
            asyncio.create_task(_receive_stream(stream, peer, executor, index, arrivals))
            for index, stream in enumerate(streams)
        ]
        try:
            return await arrivals.watch(tasks)
        finally:
            await _end(tasks)


class _Scratch:
    """Takes transfers into one buffer, over and over: implements the bulk part of `ports.TransportHandler`."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BODY_BYTES_MAX))

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview:
        del header
        if raw_bytes > BODY_BYTES_MAX:
            raise ProtocolViolation(f"{peer}: a transfer of {raw_bytes} bytes; {BODY_BYTES_MAX} are allowed here")
        return self._buffer[:raw_bytes]

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        pass

    def control_arrived(self, peer: str, message: object) -> None:
        pass

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        pass


async def _receive_stream(
    stream: Stream, peer: str, executor: ThreadPoolExecutor, index: int, arrivals: _Arrivals
) -> None:
    inbound = BulkInbound(peer, _Scratch(), executor)
    try:
        is_on = True
        while is_on:
            frame = await stream.read()
            decoded = decode_bulk(frame)
            if isinstance(decoded, TransferChunk):
                is_on = arrivals.add(index, decoded.raw_bytes)
            await inbound.feed(frame)
    finally:
        await inbound.close()


async def receive_plain(connections: Sequence[socket.socket], times: FlowTimes) -> Received:
    """Read plain connections until the flow's time is over; they stay open, for the sender may not have done yet.

    Raises:
        LinkLost: nothing came, or a connection failed before.
    """
    arrivals = _Arrivals(len(connections), times)
    ended = threading.Event()
    with ThreadPoolExecutor(len(connections), thread_name_prefix="flow") as executor:
        loop = asyncio.get_running_loop()
        tasks = [
            asyncio.ensure_future(loop.run_in_executor(executor, _drain, connection, index, arrivals, ended))
            for index, connection in enumerate(connections)
        ]
        try:
            return await arrivals.watch(tasks)
        finally:
            ended.set()
            await asyncio.gather(*tasks, return_exceptions=True)


def _drain(connection: socket.socket, index: int, arrivals: _Arrivals, ended: threading.Event) -> None:
    connection.settimeout(PLAIN_WAKE_S)
    buffer = bytearray(PLAIN_BYTES)
    while not ended.is_set():
        try:
            count = connection.recv_into(buffer)
        except TimeoutError:
            continue
        except OSError as error:
            if ended.is_set():
                return
            raise LinkLost(f"a plain connection broke off ({error.strerror})") from None
        if count == 0:
            raise LinkLost("a plain connection ended too early")
        if not arrivals.add(index, count):
            return


# ---- both ------------------------------------------------------------------------------------------------------------


def _shut(connections: Sequence[socket.socket]) -> None:
    for connection in connections:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was first
            continue


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _cpu_now() -> CpuUse:
    return CpuUse(time.process_time_ns(), time.monotonic_ns())


def _cpu_since(start: CpuUse) -> CpuUse:
    return CpuUse(time.process_time_ns() - start.cpu_ns, time.monotonic_ns() - start.span_ns)
