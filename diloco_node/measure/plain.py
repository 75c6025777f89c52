"""Plain TCP connections of one test, to compare the transport with: no TLS, no frames, no compression, no budget.

Only ends without a core use them (`diloco-node measure`). The responder listens until all connections of the
test have come, each of which begins with a token that was sent over the link; the requester dials.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable
from typing import Final

from diloco_node.errors import LinkLost, PeerError, PeersUnreachable
from diloco_node.transport.kernel.tcp_info import Address, TcpCounters, plain_ip, read_sockets, tcp_of
from diloco_node.wire.measure_messages import TOKEN_BYTES, PlainPort, ProbeHeader

DIAL_S: Final = 5.0
JOIN_S: Final = 10.0
"""All connections of a test have come by then, or it fails."""

GREETED_MAX: Final = 16
"""Connections that have not sent their token yet; a further one is closed."""

GREET_S: Final = 2.0
READ_BYTES: Final = 256 * 2**10

_Streams = tuple[StreamReader, StreamWriter]


class PlainConnections:
    """The open connections of one test. One end calls `transfer` (as `probes.Bulk`), the other one `receive`."""

    def __init__(self, peer: str, streams: list[_Streams]) -> None:
        self._peer = peer
        self._readers = [reader for reader, _ in streams]
        self._free: asyncio.Queue[StreamWriter] = asyncio.Queue()
        for _, writer in streams:
            self._free.put_nowait(writer)
        self._remotes = frozenset(_remote(writer) for _, writer in streams)

    async def transfer(self, peer: str, header: ProbeHeader, body: memoryview) -> None:
        """Send a body over the next connection that is free. Raises LinkLost."""
        del peer, header
        writer = await self._free.get()
        try:
            writer.write(body)
            await writer.drain()
        except OSError as error:
            raise self._lost(error) from None
        finally:
            self._free.put_nowait(writer)

    async def give_way(self) -> None:
        """There are no rounds that would go first."""

    async def tcp_now(self, peer: str) -> TcpCounters | None:
        """What TCP did on these connections."""
        del peer
        return tcp_of([one for one in read_sockets() if one.remote in self._remotes])

    async def receive(self, arrived: Callable[[int], None]) -> None:
        """Take what arrives. Raises LinkLost when a connection ends, and what `arrived` raises."""

        async def read(reader: StreamReader) -> None:
            try:
                while data := await reader.read(READ_BYTES):
                    arrived(len(data))
            except OSError as error:
                raise self._lost(error) from None
            raise LinkLost(f"{self._peer}: a plain connection ended")

        tasks = [asyncio.create_task(read(reader)) for reader in self._readers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _lost(self, error: OSError) -> LinkLost:
        return LinkLost(f"{self._peer}: a plain connection broke off ({error.strerror or error})")


class PlainListener:
    """Waits for the connections of one test; see `listening`."""

    def __init__(self, peer: str, connections: int) -> None:
        self._peer = peer
        self._connections = connections
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._port = 0
        self._joined: list[_Streams] = []
        self._writers: set[StreamWriter] = set()
        self._is_full = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def where(self) -> PlainPort:
        """What the peer needs to come in."""
        return PlainPort(self._token, self._port)

    async def open(self, host: str, port: int) -> None:
        """Bind. Raises PeerError, for the requester to read."""
        try:
            self._server = await asyncio.start_server(self._greet, host, port, limit=2 * READ_BYTES)
        except OSError as error:
            raise PeerError(
                f"port {port} for plain TCP can't be bound at {host} ({error.strerror or error}): "
                "give `measure serve` another --plain-port"
            ) from None
        self._port = self._server.sockets[0].getsockname()[1]

    async def _greet(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Let a connection in that names the token in time; strangers are closed."""
        self._writers.add(writer)
        token = b""
        if len(self._writers) - len(self._joined) <= GREETED_MAX:
            with contextlib.suppress(OSError, EOFError):  # a timeout is an OSError
                async with asyncio.timeout(GREET_S):
                    token = await reader.readexactly(TOKEN_BYTES)
        if secrets.compare_digest(token, self._token) and not self._is_full.is_set():
            self._joined.append((reader, writer))
            if len(self._joined) == self._connections:
                self._is_full.set()
        else:
            self._writers.discard(writer)
            writer.transport.abort()

    async def joined(self) -> PlainConnections:
        """All connections; nobody else is let in from then on. Raises LinkLost: not all came in time."""
        try:
            async with asyncio.timeout(JOIN_S):
                await self._is_full.wait()
        except TimeoutError:
            raise LinkLost(
                f"{len(self._joined)} of {self._connections} plain connections of a measurement came in from "
                f"{self._peer} at port {self._port} in {JOIN_S:.0f} s"
            ) from None
        assert self._server is not None
        self._server.close()
        return PlainConnections(self._peer, self._joined)

    def close(self) -> None:
        """End the listener and all its connections; one that is just coming in is shut out."""
        self._is_full.set()
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(peer: str, host: str, port: int, connections: int) -> AsyncIterator[PlainListener]:
    """A port for the connections of one test, until the end of the block.

    Args:
        port: 0 takes a free one. connections: how many are waited for.

    Raises:
        PeerError: the port can't be bound.
    """
    listener = PlainListener(peer, connections)
    try:
        await listener.open(host, port)
        yield listener
    finally:
        listener.close()


@contextlib.asynccontextmanager
async def dialed(peer: str, host: str, where: PlainPort, connections: int) -> AsyncIterator[PlainConnections]:
    """Connections that we dial, until the end of the block.

    Raises:
        PeersUnreachable: the port can't be reached.
    """
    streams: list[_Streams] = []
    try:
        try:
            for _ in range(connections):
                async with asyncio.timeout(DIAL_S):
                    streams.append(await asyncio.open_connection(host, where.port, limit=2 * READ_BYTES))
                    streams[-1][1].write(where.token)
        except OSError as error:
            why = f"no answer in {DIAL_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror or error
            raise PeersUnreachable(
                f"{peer}: its port for plain TCP, {where.port} at {host}, can't be reached ({why}): open one in the "
                "firewall and give it to `measure serve --plain-port`, or measure with --no-plain"
            ) from None
        yield PlainConnections(peer, streams)
    finally:
        for _, writer in streams:
            writer.transport.abort()


def _remote(writer: StreamWriter) -> Address:
    host, port, *_ = writer.get_extra_info("peername")
    return plain_ip(str(host)), int(port)
