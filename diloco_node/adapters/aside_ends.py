"""The connections of one measurement while they are open: what sends over them, and what takes in what arrives.

See `asides` for how they come to be. Both kinds are in the measurement lane; the sending side is a `flow_ends.Bulk`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Protocol

from diloco_node.adapters.flows import PLAIN_BYTES, SocketsOf
from diloco_node.core.measuring import Probe
from diloco_node.core.messages import BulkHeader, Message
from diloco_node.errors import LinkLost, PeerError, ProtocolViolation
from diloco_node.transport.certs import Identity
from diloco_node.transport.inbound import BulkInbound
from diloco_node.transport.kernel.tcp_info import TcpCounters, tcp_of
from diloco_node.transport.kernel.wire_meter import WireMeter
from diloco_node.transport.outbound import BulkOutbound
from diloco_node.transport.pacing.budget import BudgetLane
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.streams import DialedStream, Stream

_LANE: Final = BudgetLane.MEASUREMENT


class Sink(Protocol):
    """What takes in what arrives; see `node.local_ends`."""

    def transfer_opened(self, peer: str, header: Probe, raw_bytes: int) -> memoryview | None:
        """Where probes go. Raises ProtocolViolation."""
        ...

    def transfer_closed(self, peer: str, header: Probe, raw_bytes: int, *, is_whole: bool) -> None:
        """Probes arrived, or broke off."""
        ...

    def plain_arrived(self, peer: str, measurement: int, size: int) -> None:
        """Bytes over plain TCP. Raises ProtocolViolation."""
        ...


@dataclass(frozen=True, slots=True)
class AsideEnvironment:
    """What asides need of the transport.

    Attributes:
        identity: ours. addresses: of the peers, `host:port`, None where we can't dial.
        host, plain_port: where plain connections come in; port 0: a free one each time.
        before: the bulk of the link to a peer, which goes first; raises LinkLost while there is none.
        give_way: waits while rounds are on their way on other links.
        reject: called with (peer, error) for what is the peer's fault.
    """

    identity: Identity
    addresses: Mapping[str, str | None]
    host: str
    plain_port: int
    pacer: Pacer
    meter: WireMeter
    executor: Executor
    before: Callable[[str], BulkOutbound]
    give_way: Callable[[], Awaitable[None]]
    reject: Callable[[str, PeerError], None]


class Aside:
    """The connections of one measurement while it lasts. One side calls `transfer`, the other one `receive`.

    Args:
        peer: the other side. measurement: its number. sockets: that are meant, as the kernel knows them.
    """

    def __init__(self, peer: str, measurement: int, sockets: SocketsOf, env: AsideEnvironment) -> None:
        self._peer = peer
        self._measurement = measurement
        self._sockets = sockets
        self._env = env
        self._lost: LinkLost | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def cookies(self) -> frozenset[int]:
        """The kernel's numbers of its sockets; none where it does not tell."""
        return self._sockets.only or frozenset()

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """Send a body. Raises LinkLost."""
        raise NotImplementedError

    async def receive(self, sink: Sink) -> None:
        """Take what arrives. Raises LinkLost when a connection ends, ProtocolViolation and PayloadCorrupt before."""
        raise NotImplementedError

    async def give_way(self) -> None:
        """Wait while rounds are on their way elsewhere."""
        await self._env.give_way()

    async def tcp_now(self, peer: str) -> TcpCounters | None:
        """What TCP did on these connections alone."""
        del peer
        return tcp_of(await asyncio.get_running_loop().run_in_executor(None, self._sockets.read))

    async def close(self) -> None:
        """End all of them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"aside {self._peer}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _all(self, readers: list[Coroutine[Any, Any, None]]) -> None:
        """Run readers until one of them ends. Raises the worst of what ended them: a violation before a lost stream."""
        tasks = [asyncio.create_task(reader, name=f"aside {self._peer}") for reader in readers]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
            for is_lost in (False, True):
                for error in errors:
                    if error is not None and isinstance(error, LinkLost) is is_lost:
                        raise error
            # gRPC cancels a read when its call is torn down under us: nobody says why.
            raise LinkLost(f"{self._peer}: a connection of a measurement was torn down")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class TransportAside(Aside):
    """Connections as those of the link's bulk: the daemon's own parts carry the bytes."""

    def __init__(
        self, peer: str, measurement: int, streams: list[Stream], sockets: SocketsOf, env: AsideEnvironment
    ) -> None:
        super().__init__(peer, measurement, sockets, env)
        self._streams = streams
        self._outbound = BulkOutbound(peer, streams[0], env.executor, env.pacer, before=env.before(peer))
        for stream in streams[1:]:
            self._outbound.add(stream)
        self._spawn(self._run())

    async def _run(self) -> None:
        try:
            await self._outbound.run()
        except PeerError as error:
            self._outbound.close(f"a connection of a measurement broke off ({error})")

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """See `Aside.transfer`."""
        del peer
        await self._outbound.transfer(header, body)

    async def receive(self, sink: Sink) -> None:
        """See `Aside.receive`."""
        inbound = BulkInbound(self._peer, _ProbesOnly(sink, self._measurement), self._env.executor)
        try:
            await self._all([self._read(stream, index, inbound) for index, stream in enumerate(self._streams)])
        finally:
            await inbound.close()

    async def _read(self, stream: Stream, index: int, inbound: BulkInbound) -> None:
        pacer = self._env.pacer
        while True:
            await pacer.until_readable(self._peer)
            frame = await stream.read()
            pacer.was_read(self._peer, len(frame))
            await inbound.feed(frame, index)

    async def close(self) -> None:
        """See `Aside.close`."""
        self._outbound.close("the measurement is over")
        await super().close()
        for stream in self._streams:
            stream.close()
            if isinstance(stream, DialedStream):
                await stream.aclose()


class _ProbesOnly:
    """Implements the bulk part of `ports.TransportHandler` for connections that carry one measurement only."""

    def __init__(self, sink: Sink, measurement: int) -> None:
        self._sink = sink
        self._measurement = measurement

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        if not isinstance(header, Probe) or header.measurement != self._measurement:
            raise ProtocolViolation(f"{header} on a connection of measurement {self._measurement}")
        return self._sink.transfer_opened(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        assert isinstance(header, Probe)
        self._sink.transfer_closed(peer, header, buffer.nbytes, is_whole=is_whole)

    def control_arrived(self, peer: str, message: Message) -> None:
        pass

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        pass


class PlainAside(Aside):
    """TCP without TLS, frames or compression. Each connection has one write at a time, each write its turn."""

    def __init__(
        self, peer: str, measurement: int, connections: list[socket.socket], sockets: SocketsOf, env: AsideEnvironment
    ) -> None:
        super().__init__(peer, measurement, sockets, env)
        self._connections = connections
        self._before = env.before(peer)
        self._free: asyncio.Queue[socket.socket] = asyncio.Queue()
        for connection in connections:
            self._free.put_nowait(connection)

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """See `Aside.transfer`."""
        del header
        pacer, at = self._env.pacer, 0
        pacer.begin(peer, _LANE, body.nbytes)
        try:
            while at < body.nbytes:
                piece = body[at : at + min(pacer.piece_bytes(peer), PLAIN_BYTES)]
                await self._before.lead(_LANE)
                connection = await self._free.get()  # a turn is taken for what can go at once
                try:
                    if self._lost is not None:
                        raise self._lost
                    await pacer.turn(peer, _LANE, piece.nbytes, ())
                except BaseException:
                    self._free.put_nowait(connection)
                    raise
                self._spawn(self._write(connection, piece))
                at += piece.nbytes
        finally:
            pacer.end(peer)

    async def _write(self, connection: socket.socket, piece: memoryview) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(connection, piece)
        except OSError as error:
            self._lost = LinkLost(f"{self._peer}: a plain connection broke off ({error.strerror or error})")
        finally:
            self._free.put_nowait(connection)

    async def receive(self, sink: Sink) -> None:
        """See `Aside.receive`."""
        await self._all([self._read(connection, sink) for connection in self._connections])

    async def _read(self, connection: socket.socket, sink: Sink) -> None:
        loop, pacer, buffer = asyncio.get_running_loop(), self._env.pacer, bytearray(PLAIN_BYTES)
        while True:
            await pacer.until_readable(self._peer)
            try:
                size = await loop.sock_recv_into(connection, buffer)
            except OSError as error:
                raise LinkLost(f"{self._peer}: a plain connection broke off ({error.strerror or error})") from None
            if not size:
                raise LinkLost(f"{self._peer}: a plain connection ended")
            pacer.was_read(self._peer, size)
            sink.plain_arrived(self._peer, self._measurement, size)

    async def close(self) -> None:
        """See `Aside.close`."""
        await super().close()
        for connection in self._connections:
            connection.close()
