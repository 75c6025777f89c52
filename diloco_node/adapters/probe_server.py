"""The measuring end that others dial (`diloco-node measure serve`), before a run or beside it.

It takes calls of members of its run only, by their certificates, and plain TCP connections that name a token which it
gave out over TLS. One flow at a time: two would measure each other. A member may ask it to measure towards another
region; it dials only what shows a certificate of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final

import structlog

from diloco_node.adapters import flows
from diloco_node.adapters.flows import FlowTimes, SendingEnd, SocketsOf
from diloco_node.adapters.pairs import measure_out
from diloco_node.adapters.plain_accept import PlainAccept
from diloco_node.adapters.probe import BUSY_S, open_session
from diloco_node.errors import BindError, DilocoError, LinkLost, PeerError, PeerIncompatible, ProtocolViolation
from diloco_node.transport.certs import Identity, tls_name
from diloco_node.transport.kernel.tcp_info import Address
from diloco_node.transport.streams import AcceptedStream, Caller, Server, caller, make_server, refuse
from diloco_node.wire import measurement as wire
from diloco_node.wire.measurement import FlowPath

_log = structlog.get_logger(__name__)

HANDSHAKE_S: Final = 5.0
SESSIONS_MAX: Final = 64
IDLE_S: Final = 600.0
"""A session in which nothing is said for so long is over."""

PLAIN_HANDSHAKES_MAX: Final = 64
STOP_S: Final = 5.0
_CONGESTION_CONTROL: Final = Path("/proc/sys/net/ipv4/tcp_congestion_control")


class _Flow:
    """A flow of a session: its streams or connections as they join."""

    def __init__(self, asked: wire.FlowAsked) -> None:
        self.asked = asked
        self.streams: dict[int, AcceptedStream] = {}
        self.connections: dict[int, socket.socket] = {}
        self.remotes: set[Address] = set()
        self.joined = asyncio.Event()
        self.stop = asyncio.Event()

    def join(self, index: int, one: AcceptedStream | socket.socket, address: Address) -> None:
        """Take a stream or a connection. Raises ProtocolViolation."""
        is_plain = isinstance(one, socket.socket)
        taken: dict[int, Any] = self.connections if is_plain else self.streams
        if is_plain is not (self.asked.path is FlowPath.PLAIN) or index in taken or index >= self.asked.connections:
            raise ProtocolViolation(f"connection {index} does not belong to the flow")
        taken[index] = one
        self.remotes.add(address)
        if len(taken) == self.asked.connections:
            self.joined.set()

    def close(self) -> None:
        """Let go of everything."""
        for stream in self.streams.values():
            stream.close()
        for connection in self.connections.values():
            connection.close()


class _Session:
    """One dialing side: answers its echoes at once, runs its flows one after the other."""

    def __init__(self, server: ProbeServer, who: Caller, stream: AcceptedStream) -> None:
        self.token = secrets.token_bytes(wire.TOKEN_BYTES)
        self.flow: _Flow | None = None
        self._server = server
        self._who = who
        self._stream = stream
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._own = SocketsOf(frozenset([who.address]))

    async def run(self) -> None:
        """Serve until the dialing side ends it. Raises PeerError."""
        await self._say(
            wire.SessionOpened(wire.MEASUREMENT_VERSION, self.token, self._server.plain_port, congestion_control())
        )
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        frame = await self._stream.read()
                except TimeoutError:
                    raise LinkLost(f"{self._who.region}: nothing was said for {IDLE_S:.0f} s") from None
                await self._take(wire.decode_session(frame))
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)

    async def _take(self, found: wire.SessionFrame) -> None:
        match found:
            case (wire.KIND_ECHO, int(sequence)):
                await self._write(wire.encode_echo(wire.KIND_ECHOED, sequence))
            case wire.FlowAsked():
                wire.check_flow(found)
                self._start(self._run_flow(found))
            case wire.PairAsked():
                self._start(self._run_pair(found))
            case wire.FlowStopped():
                if self.flow is not None and self.flow.asked.flow == found.flow:
                    self.flow.stop.set()
            case wire.SocketAsked():
                await self._say(wire.SocketTold(*(flows.sent_bytes(self._own.read()) or (-1, -1))))
            case _:
                raise ProtocolViolation(f"{type(found).__name__} in the middle of a measurement")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # A flow that was stopped may still be closing: it has the lock, and the next one waits for that.
        before, self._task = self._task, asyncio.create_task(self._carry_out(work))
        if before is not None and not before.done():
            self._server.keep(before)

    async def _carry_out(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what was asked; say why if it can't be done."""
        try:
            async with self._server.turn(self._who.region):
                await work
        except DilocoError as error:
            _log.warning("measurement failed", peer=self._who.region, error=str(error))
            with contextlib.suppress(LinkLost):
                await self._say(wire.Declined(str(error)[:1000]))
        finally:
            work.close()

    async def _run_flow(self, asked: wire.FlowAsked) -> None:
        self.flow = flow = _Flow(asked)
        times = FlowTimes(asked.warm_up_ns, asked.span_ns)
        try:
            content = memoryview(b"")
            if not asked.is_dialer_sending:
                content = await asyncio.to_thread(flows.make_body, asked.body)
            await self._say(wire.FlowReady(asked.flow))
            await _joined(flow)
            if asked.is_dialer_sending:
                await self._receive(flow, times)
            else:
                await self._send(flow, content, times)
        finally:
            self.flow = None
            flow.close()

    async def _receive(self, flow: _Flow, times: FlowTimes) -> None:
        if flow.asked.path is FlowPath.PLAIN:
            found = await flows.receive_plain(list(flow.connections.values()), times)
        else:
            found = await flows.receive_transport(list(flow.streams.values()), self._who.region, times)
        rates, cpu = found.goodput, found.cpu
        await self._say(
            wire.FlowReceived(flow.asked.flow, rates.mean, rates.median, rates.p10, rates.p90, cpu.cpu_ns, cpu.span_ns)
        )
        self._log_rate("received", flow.asked, rates.mean)
        with contextlib.suppress(TimeoutError):  # the connections stay open until the sender has counted, too
            async with asyncio.timeout(STOP_S):
                await flow.stop.wait()

    async def _send(self, flow: _Flow, content: memoryview, times: FlowTimes) -> None:
        end = SendingEnd(content, times, SocketsOf(frozenset(flow.remotes)), flow.stop)
        if flow.asked.path is FlowPath.PLAIN:
            sent = await flows.send_plain(list(flow.connections.values()), end)
        else:
            sent = await flows.send_transport(list(flow.streams.values()), self._who.region, end)
        counted = (-1, -1)
        if sent.sent_bytes is not None and sent.retransmitted_bytes is not None:
            counted = (sent.sent_bytes, sent.retransmitted_bytes)
        await self._say(wire.FlowSent(flow.asked.flow, sent.cpu.cpu_ns, sent.cpu.span_ns, *counted))
        self._log_rate("sent", flow.asked, max(counted[0], 0) * 10**9 // max(sent.cpu.span_ns, 1))

    def _log_rate(self, what: str, asked: wire.FlowAsked, bytes_per_s: int) -> None:
        mbit_per_s = round(bytes_per_s * 8 / 1e6, 1)
        _log.info(what, peer=self._who.region, path=asked.path, connections=asked.connections, mbit_per_s=mbit_per_s)

    async def _run_pair(self, asked: wire.PairAsked) -> None:
        address = self._server.addresses.get(asked.region, asked.address)
        _log.info("measuring", peer=asked.region, address=address, asked_by=self._who.region)
        async with open_session(self._server.identity, asked.region, address) as session:
            await self._say(await measure_out(session, asked, is_sending=True))

    async def _say(self, message: wire.MeasurementMessage) -> None:
        await self._write(wire.encode_message(message))

    async def _write(self, frame: bytes) -> None:
        async with self._writing:
            await self._stream.write(frame)


async def _joined(flow: _Flow) -> None:
    try:
        async with asyncio.timeout(flows.START_S):
            await flow.joined.wait()
    except TimeoutError:
        there = len(flow.streams) + len(flow.connections)
        raise LinkLost(
            f"{there} of {flow.asked.connections} connections of the flow came in {flows.START_S:.0f} s"
        ) from None


class ProbeServer:
    """Serves measurements to the members of a run.

    Args:
        identity: ours. listen: host and port; port 0: a free one.
        plain_port: for plain TCP connections, on the same host; 0: a free one, None: none are taken.
        addresses: `host:port` of other regions that we know; they beat what a coordinator says.
    """

    def __init__(
        self,
        identity: Identity,
        listen: tuple[str, int],
        *,
        plain_port: int | None = 0,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self.identity = identity
        self.addresses = dict(addresses or {})
        self.port = 0
        self.plain_port = 0
        self._listen = listen
        self._plain_wanted = plain_port
        self._server: Server | None = None
        self._listener: socket.socket | None = None
        self._sessions: dict[bytes, _Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy = asyncio.Lock()
        self._busy_with = ""

    async def start(self) -> None:
        """Bind both ports. Raises BindError, IdentityError."""
        host, port = self._listen
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._server, self.port = make_server(
            self.identity, address, self._serve, handshake_s=HANDSHAKE_S, lanes=(wire.METHOD,)
        )
        if self._plain_wanted is not None:
            self._listener = _listener(host, self._plain_wanted)
            self.plain_port = self._listener.getsockname()[1]
            accept = PlainAccept(
                wire.PREAMBLE_BYTES, HANDSHAKE_S, PLAIN_HANDSHAKES_MAX, self._take_plain, self._plain_refused
            )
            self.keep(asyncio.create_task(accept.run(self._listener), name="plain connections"))
        await self._server.start()

    async def stop(self) -> None:
        """Close everything."""
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        if self._server is not None:
            await self._server.stop(None)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it is done; `stop` cancels it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """One measurement at a time. Raises PeerError when others take too long."""
        try:
            async with asyncio.timeout(BUSY_S):
                await self._busy.acquire()
        except TimeoutError:
            raise PeerError(f"{self.identity.region} is busy measuring with {self._busy_with}: try again") from None
        self._busy_with = peer
        try:
            yield
        finally:
            self._busy.release()

    async def _serve(self, _lane: str, context: Any) -> None:
        """Carry one call to its end."""
        who = caller(context)
        stream = AcceptedStream(context, peer=who.region)
        try:
            if who.tls_name != tls_name(who.region, self.identity.run_id):
                raise PeerIncompatible(f"{who.tls_name!a} is not a region of run {self.identity.run_id}")
            first = await _first(stream, who)
            if isinstance(first, wire.StreamJoined):
                self._find_flow(first).join(first.index, stream, who.address)
                await stream.until_closed()
            elif isinstance(first, wire.SessionAsked):
                await self._run_session(_Session(self, who, stream))
            else:
                raise ProtocolViolation("a measurement must begin with SessionAsked or StreamJoined")
        except PeerError as error:
            if not isinstance(error, LinkLost):
                _log.warning("rejected", peer=who.region, error=str(error))
            await refuse(context, error)

    async def _run_session(self, session: _Session) -> None:
        if len(self._sessions) >= SESSIONS_MAX:
            raise LinkLost(f"{SESSIONS_MAX} measurements are open already")
        self._sessions[session.token] = session
        try:
            await session.run()
        finally:
            del self._sessions[session.token]

    def _find_flow(self, joined: wire.StreamJoined) -> _Flow:
        session = self._sessions.get(joined.token)
        if session is None or session.flow is None or session.flow.asked.flow != joined.flow:
            raise ProtocolViolation("the flow that a connection wants to join is not there")
        return session.flow

    def _take_plain(self, first: bytes, connection: socket.socket, address: Address) -> None:
        """A plain connection that names a flow. Raises LinkLost, ProtocolViolation, OSError."""
        joined = wire.decode_preamble(first)
        flow = self._find_flow(joined)
        connection.setblocking(True)
        flow.join(joined.index, connection, address)

    def _plain_refused(self, address: Address | None, reason: str) -> None:
        _log.warning("plain connection refused", address=address[0] if address is not None else None, error=reason)


async def _first(stream: AcceptedStream, who: Caller) -> wire.SessionFrame:
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            return wire.decode_session(await stream.read())
    except TimeoutError:
        raise LinkLost(f"{who.region}: said nothing for {HANDSHAKE_S:.0f} s") from None


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(PLAIN_HANDSHAKES_MAX)
    except OSError as error:
        listener.close()
        raise BindError(
            f"port {port} for plain TCP can't be bound at {host} ({error.strerror}): give another --plain-port"
        ) from error
    listener.setblocking(False)
    return listener


def congestion_control() -> str:
    """The kernel's default, as cubic; empty where it does not tell."""
    try:
        return _CONGESTION_CONTROL.read_text().strip()[:32]
    except OSError:
        return ""
