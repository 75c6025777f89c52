"""Connections that carry one measurement between two daemons and nothing else, beside those of their link.

They are of the transport's own kind (gRPC, TLS, chunks, zstd), or plain TCP for comparison. The side that accepted the
link opens a **door** and tells its token over the link; the side that dialed the link dials. Plain connections come in
at a listener that exists only until all have come; the others at the port between regions. All of them are in the
measurement lane: each piece goes after what the link has to send in the lanes before, waits for its turn within the
budget and the peer's grant, and is counted as the link's own bytes are. Whatever happens they are closed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog

from diloco_node.adapters.certs import Identity
from diloco_node.adapters.flows import SocketsOf
from diloco_node.adapters.inbound import BulkInbound
from diloco_node.adapters.outbound import BulkOutbound
from diloco_node.adapters.pacing import Pacer
from diloco_node.adapters.sockets import Address, TcpCounters, WireMeter, tcp_of
from diloco_node.adapters.streams import DialedStream, Stream, dial
from diloco_node.core.budget import BudgetLane
from diloco_node.core.measuring import ASIDES_MAX, TOKEN_BYTES, AsideOpen, MeasurementAsked, Probe
from diloco_node.core.messages import BulkHeader, Message
from diloco_node.errors import LinkLost, PeerError, PeersUnreachable, ProtocolViolation
from diloco_node.wire.measurement import ASIDE_BYTES, ASIDE_METHOD, decode_aside, encode_aside

_log = structlog.get_logger(__name__)

DIAL_S: Final = 5.0
JOIN_S: Final = 10.0
"""All connections of a measurement have come by then, or it fails."""

GREETED_MAX: Final = 16
"""Plain connections that have not named their token yet; others wait in the kernel."""

GREET_S: Final = 2.0

PLAIN_BYTES: Final = 256 * 2**10
"""Of one write, and of one read: as much as `measure serve` takes."""

_LANE: Final = BudgetLane.MEASUREMENT


class Sink(Protocol):
    """What takes in what arrives; see `node.measuring`."""

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


# ---- while they are open ---------------------------------------------------------------------------------------------


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


class _TransportAside(Aside):
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
        del peer
        self._env.meter.count(self._peer, bytes_out=body.nbytes)
        await self._outbound.transfer(header, body)

    async def receive(self, sink: Sink) -> None:
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
            self._env.meter.count(self._peer, bytes_in=len(frame))
            await inbound.feed(frame, index)

    async def close(self) -> None:
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


class _PlainAside(Aside):
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
        self._env.meter.count(self._peer, bytes_out=piece.nbytes)
        try:
            await asyncio.get_running_loop().sock_sendall(connection, piece)
        except OSError as error:
            self._lost = LinkLost(f"{self._peer}: a plain connection broke off ({error.strerror or error})")
        finally:
            self._free.put_nowait(connection)

    async def receive(self, sink: Sink) -> None:
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
            self._env.meter.count(self._peer, bytes_in=size)
            sink.plain_arrived(self._peer, self._measurement, size)

    async def close(self) -> None:
        await super().close()
        for connection in self._connections:
            connection.close()


# ---- until they are open ---------------------------------------------------------------------------------------------


class Door:
    """Lets the connections of one measurement in, each of them once; see `Asides.door`."""

    def __init__(self, peer: str, asked: MeasurementAsked, listener: socket.socket | None) -> None:
        self.peer = peer
        self.asked = asked
        port = listener.getsockname()[1] if listener is not None else 0
        self.open = AsideOpen(secrets.token_bytes(TOKEN_BYTES), port)
        """What the peer needs to come in."""
        self._listener = listener
        self._joined: dict[int, Stream | socket.socket] = {}
        self._remotes: set[Address] = set()
        self._is_full = asyncio.Event()
        self._is_closed = False
        self._told_wrong = False
        self._tasks: set[asyncio.Task[None]] = set()
        if listener is not None:
            self._spawn(self._accept(listener))

    def is_for(self, token: bytes) -> bool:
        """Whether a token is this door's."""
        return secrets.compare_digest(token, self.open.token)

    def join(self, index: int, one: Stream | socket.socket, remote: Address) -> None:
        """Take a connection that has named the token; from now on the door's. Raises LinkLost, ProtocolViolation."""
        if self._is_closed:
            raise LinkLost(f"{self.peer}: a connection for a measurement that is over")
        if index in self._joined or index >= self.asked.connections:
            raise ProtocolViolation(f"connection {index} of a measurement with {self.asked.connections}")
        self._joined[index] = one
        self._remotes.add(remote)
        if len(self._joined) == self.asked.connections:
            self._is_full.set()

    async def all_in(self) -> tuple[list[Any], frozenset[Address]]:
        """Wait for all, and hand them over in order, with where they come from. Raises LinkLost."""
        try:
            async with asyncio.timeout(JOIN_S):
                await self._is_full.wait()
        except TimeoutError:
            port = f" at port {self.open.port}" if self.open.port else ""
            raise LinkLost(
                f"{len(self._joined)} of {self.asked.connections} connections of a measurement came in from "
                f"{self.peer}{port} in {JOIN_S:.0f} s"
            ) from None
        found, self._joined = [self._joined[index] for index in sorted(self._joined)], {}
        return found, frozenset(self._remotes)

    async def close(self) -> None:
        """Nobody comes in any more; who came and was not handed over goes."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for one in self._joined.values():
            one.close()
        self._joined.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"door for {self.peer}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(GREETED_MAX)
        while True:
            await slots.acquire()
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or it was gone before we took it
                _log.warning("no plain connection", peer=self.peer, reason=str(error))
                await asyncio.sleep(GREET_S)
                slots.release()
                continue
            self._spawn(self._greet(connection, (str(address[0]), int(address[1])), slots))

    async def _greet(self, connection: socket.socket, remote: Address, slots: asyncio.Semaphore) -> None:
        """Take a connection that names the token; close any other one."""
        try:
            connection.setblocking(False)
            async with asyncio.timeout(GREET_S):
                token, index = decode_aside(await _read_exactly(connection, ASIDE_BYTES))
            if not self.is_for(token):
                raise ProtocolViolation("a wrong token")
            self.join(index, connection, remote)
        except BaseException as error:
            connection.close()
            if not isinstance(error, (OSError, PeerError)):  # TimeoutError is one of OSError
                raise
            if not self._told_wrong:  # strangers may come as often as they like
                self._told_wrong = True
                _log.warning(
                    "plain connection refused", peer=self.peer, address=remote[0], reason=str(error) or "silent"
                )
        finally:
            slots.release()


class Asides:
    """All asides of a transport. Methods run on its event loop."""

    def __init__(self, env: AsideEnvironment) -> None:
        self._env = env
        self._doors: set[Door] = set()
        self._open: defaultdict[str, set[Aside]] = defaultdict(set)
        self._places: defaultdict[str, int] = defaultdict(int)

    def find(self, peer: str, token: bytes) -> Door:
        """The door that a connection of the transport's kind asks for. Raises LinkLost."""
        for door in self._doors:
            if door.peer == peer and not door.asked.is_plain and door.is_for(token):
                return door
        raise LinkLost(f"{peer}: a connection for a measurement that is not there, or not any more")

    @contextlib.asynccontextmanager
    async def door(self, peer: str, asked: MeasurementAsked) -> AsyncIterator[Door]:
        """Wait for connections of a peer; give them to `come_in`.

        Raises:
            PeerError: the port can't be had, or too many are open.
        """
        with self._place(peer):
            door = Door(peer, asked, self._listen() if asked.is_plain else None)
            self._doors.add(door)
            try:
                yield door
            finally:
                self._doors.discard(door)
                await door.close()

    @contextlib.asynccontextmanager
    async def come_in(self, door: Door) -> AsyncIterator[Aside]:
        """The connections that came in at a door, until the end of the block. Raises LinkLost: not all came."""
        connections, remotes = await door.all_in()
        try:
            await door.close()  # nobody else is waited for, and a listener is closed as early as can be
        except BaseException:
            await _close_all(connections)
            raise
        for remote in remotes:
            self._env.meter.assign(door.peer, remote, is_lasting=False)
        async with self._use(door.peer, door.asked, connections, SocketsOf(remotes)) as aside:
            yield aside

    @contextlib.asynccontextmanager
    async def dialed(self, peer: str, asked: MeasurementAsked, where: AsideOpen) -> AsyncIterator[Aside]:
        """Connections that we dial, until the end of the block.

        Raises:
            PeersUnreachable: the port for plain connections can't be reached. LinkLost: another one can't be had.
            PeerError: too many are open.
        """
        address = self._env.addresses[peer]
        if address is None:
            raise LinkLost(f"{peer} has no address that we could dial")
        with self._place(peer):
            host, _, port = address.rpartition(":")
            remotes = await _resolve(peer, host.strip("[]"), where.port if asked.is_plain else int(port))
            sockets = SocketsOf.to(remotes)
            dials: list[Coroutine[Any, Any, Any]] = [
                self._dial_plain(peer, remotes, where, index)
                if asked.is_plain
                else self._dial_transport(peer, address, where, index)
                for index in range(asked.connections)
            ]
            connections = await _gather(dials)
            if asked.is_plain:
                sockets = SocketsOf(frozenset(_remote(one) for one in connections))
                for remote in sockets.remotes:
                    self._env.meter.assign(peer, remote, is_lasting=False)
            async with self._use(peer, asked, connections, sockets) as aside:
                yield aside

    @contextlib.contextmanager
    def _place(self, peer: str) -> Iterator[None]:
        if self._places[peer] >= ASIDES_MAX:
            raise PeerError(f"the connections of {ASIDES_MAX} measurements with {peer} are still open: try again")
        self._places[peer] += 1
        try:
            yield
        finally:
            self._places[peer] -= 1

    @contextlib.asynccontextmanager
    async def _use(
        self, peer: str, asked: MeasurementAsked, connections: list[Any], sockets: SocketsOf
    ) -> AsyncIterator[Aside]:
        try:
            kind = _PlainAside if asked.is_plain else _TransportAside
            aside: Aside = kind(peer, asked.measurement, connections, sockets.fixed(), self._env)
        except BaseException:
            await _close_all(connections)
            raise
        try:
            self._mark(peer, aside, is_open=True)
            yield aside
        finally:
            self._env.meter.sample()  # what a socket carried since the last sample is not known any more afterwards
            await aside.close()
            self._mark(peer, aside, is_open=False)

    def _mark(self, peer: str, aside: Aside, *, is_open: bool) -> None:
        (self._open[peer].add if is_open else self._open[peer].discard)(aside)
        self._env.meter.set_asides(peer, frozenset(cookie for one in self._open[peer] for cookie in one.cookies))

    def _listen(self) -> socket.socket:
        host, port = self._env.host, self._env.plain_port
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((host, port))
            listener.listen(GREETED_MAX)
        except OSError as error:
            listener.close()
            region = self._env.identity.region
            raise PeerError(
                f"port {port} for plain TCP can't be bound at {host} by {region} ({error.strerror or error}): "
                f"set another measure_port in [regions.{region}]"
            ) from None
        return listener

    async def _dial_transport(self, peer: str, address: str, where: AsideOpen, index: int) -> DialedStream:
        stream = await dial(self._env.identity, peer, address, ASIDE_METHOD, timeout_s=DIAL_S)
        try:
            await stream.write(encode_aside(where.token, index))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def _dial_plain(self, peer: str, remotes: tuple[Address, ...], where: AsideOpen, index: int) -> socket.socket:
        loop, host = asyncio.get_running_loop(), remotes[0][0]
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            async with asyncio.timeout(DIAL_S):
                await loop.sock_connect(connection, (host, where.port))
                await loop.sock_sendall(connection, encode_aside(where.token, index))
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError):
                raise
            why = f"no answer in {DIAL_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise PeersUnreachable(
                f"port {where.port} of {peer} at {host} can't be reached from {self._env.identity.region} ({why}): "
                f"open one in its firewall and set measure_port in [regions.{peer}], or measure with `measure serve`"
            ) from None
        return connection


async def _gather(dials: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All of them at once; when one fails, or nobody wants them any more, those that are open are closed."""
    tasks = [asyncio.create_task(one) for one in dials]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await _close_all([one for one in found if not isinstance(one, BaseException)])
        raise


async def _close_all(connections: list[Any]) -> None:
    for one in connections:
        if isinstance(one, DialedStream):
            await one.aclose()
        else:
            one.close()


def _remote(connection: socket.socket) -> Address:
    host, port, *_ = connection.getpeername()
    return str(host), int(port)


async def _resolve(peer: str, host: str, port: int) -> tuple[Address, ...]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkLost(f"{peer}: {host} can't be resolved ({error.strerror or error})") from None
    return tuple((str(where[0]), int(where[1])) for *_, where in found)


async def _read_exactly(connection: socket.socket, size: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size:
        more = await loop.sock_recv(connection, size - len(data))
        if not more:
            break
        data += more
    return data
