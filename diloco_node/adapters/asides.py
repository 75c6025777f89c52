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
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final

import structlog

from diloco_node.adapters.aside_ends import Aside, AsideEnvironment, PlainAside, TransportAside
from diloco_node.adapters.flows import SocketsOf
from diloco_node.adapters.plain_accept import PlainAccept
from diloco_node.core.measuring import ASIDES_MAX, TOKEN_BYTES, AsideOpen, MeasurementAsked
from diloco_node.errors import LinkLost, PeerError, PeersUnreachable, ProtocolViolation
from diloco_node.transport.kernel.tcp_info import Address
from diloco_node.transport.streams import DialedStream, Stream, dial
from diloco_node.wire.measurement import ASIDE_BYTES, ASIDE_METHOD, decode_aside, encode_aside

_log = structlog.get_logger(__name__)

DIAL_S: Final = 5.0
JOIN_S: Final = 10.0
"""All connections of a measurement have come by then, or it fails."""

GREETED_MAX: Final = 16
"""Plain connections that have not named their token yet; others wait in the kernel."""

GREET_S: Final = 2.0


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
            self._spawn(PlainAccept(ASIDE_BYTES, GREET_S, GREETED_MAX, self._take, self._refused).run(listener))

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

    def _take(self, first: bytes, connection: socket.socket, remote: Address) -> None:
        """A connection that names the token. Raises LinkLost, ProtocolViolation."""
        token, index = decode_aside(first)
        if not self.is_for(token):
            raise ProtocolViolation("a wrong token")
        self.join(index, connection, remote)

    def _refused(self, remote: Address | None, reason: str) -> None:
        if remote is None:
            _log.warning("no plain connection", peer=self.peer, reason=reason)
        elif not self._told_wrong:  # strangers may come as often as they like
            self._told_wrong = True
            _log.warning("plain connection refused", peer=self.peer, address=remote[0], reason=reason)


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
            indexes = range(asked.connections)
            connections: list[Any]
            if asked.is_plain:
                connections = await _gather([self._dial_plain(peer, remotes, where, index) for index in indexes])
                sockets = SocketsOf(frozenset(_remote(one) for one in connections))
                for remote in sockets.remotes:
                    self._env.meter.assign(peer, remote, is_lasting=False)
            else:
                async with self._env.meter.opening(peer, is_bulk=False):
                    earlier = SocketsOf.to(remotes)
                    dials = [self._dial_transport(peer, address, where, index) for index in indexes]
                    connections = await _gather(dials)
                    sockets = earlier.fixed()
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
            kind = PlainAside if asked.is_plain else TransportAside
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
        why: object = ""
        for host, port in remotes:  # a name may stand for several addresses, not all of which can be reached
            try:
                return await _connect(host, port, encode_aside(where.token, index))
            except OSError as error:
                is_silent = isinstance(error, TimeoutError)
                why = f"no answer in {DIAL_S:.0f} s" if is_silent else error.strerror or error
        raise PeersUnreachable(
            f"port {where.port} of {peer} at {remotes[-1][0]} can't be reached from {self._env.identity.region} "
            f"({why}): open one in its firewall and set measure_port in [regions.{peer}], or measure with "
            "`measure serve`"
        )


async def _connect(host: str, port: int, first: bytes) -> socket.socket:
    """A plain connection that has said what it is for. Raises OSError."""
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(DIAL_S):
            await loop.sock_connect(connection, (host, port))
            await loop.sock_sendall(connection, first)
    except BaseException:
        connection.close()
        raise
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
