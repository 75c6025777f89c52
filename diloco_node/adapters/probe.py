"""The dialing side of a measurement: a session with the measuring end of another region (`probe_server`)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from diloco_node.adapters import flows
from diloco_node.adapters.flows import FlowTimes, Received, SendingEnd, Sent, SocketsOf
from diloco_node.errors import (
    IdentityError,
    LinkLost,
    PeerError,
    PeerIncompatible,
    PeersUnreachable,
    ProtocolViolation,
)
from diloco_node.measure.samples import NS_PER_S, Goodput, Latency, summarise_rtts
from diloco_node.transport.certs import Identity
from diloco_node.transport.kernel.tcp_info import Address
from diloco_node.transport.streams import DialedStream, dial
from diloco_node.wire import measurement as wire
from diloco_node.wire.measurement import FlowBody, FlowPath

T = TypeVar("T")

DIAL_S: Final = 5.0
ANSWER_S: Final = 10.0
ANSWERS_MAX: Final = 16
BUSY_S: Final = 90.0
"""A measuring end does one thing at a time; others wait so long for their turn."""

PROBE_GAP_S: Final = 0.01
PROBES_SKIPPED: Final = 5
"""The first round trips pay for what is done once."""

UNANSWERED_AFTER_S: Final = 2.0
WARM_UP_RTTS: Final = 25
WARM_UP_S_MIN: Final = 1.0
WARM_UP_S_MAX: Final = 5.0


@dataclass(frozen=True, slots=True)
class LatencyMeasured:
    """Round trips through the whole path: both processes, TLS, HTTP/2.

    Attributes:
        latency: of the probes.
        retransmitted: part of the bytes of both ends, on the probes' own connection, that was sent again, 0 to 1; None
            where the kernel does not tell. TCP hides loss: this is what it had to repair, rightly or not.
        tcp_rtt_min_ns: the kernel's least round trip of that connection; None where it does not tell.
    """

    latency: Latency
    retransmitted: float | None
    tcp_rtt_min_ns: int | None


@dataclass(frozen=True, slots=True)
class FlowMeasured:
    """A flow, as its receiving and its sending end saw it."""

    received: Received
    sent: Sent


def warm_up_ns(rtt_ns: int) -> int:
    """How long until a flow is at full speed: 25 round trips, 1 to 5 s. Slow start takes 11 of them to 25 MB."""
    return int(min(max(WARM_UP_RTTS * rtt_ns, WARM_UP_S_MIN * NS_PER_S), WARM_UP_S_MAX * NS_PER_S))


@dataclass(frozen=True, slots=True)
class _Place:
    """Whom a session dials: the region, its address, what that resolves to; and who we are."""

    identity: Identity
    peer: str
    address: str
    remotes: tuple[Address, ...]

    async def dial(self) -> DialedStream:
        """A stream of its own connection. Raises LinkLost."""
        return await dial(self.identity, self.peer, self.address, wire.METHOD, timeout_s=DIAL_S)


class ProbeSession:
    """An open session; see `open_session`. One flow at a time; `latency` may run beside it."""

    def __init__(self, place: _Place, stream: DialedStream, own: SocketsOf) -> None:
        self.peer = place.peer
        self._place = place
        self._stream = stream
        self._own = own
        self._writing = asyncio.Lock()
        self._answers: asyncio.Queue[wire.MeasurementMessage | PeerError] = asyncio.Queue(ANSWERS_MAX)
        # Apart, for probes run beside a flow, whose answers are waited for at the same time.
        self._sockets_told: asyncio.Queue[wire.MeasurementMessage | PeerError] = asyncio.Queue(ANSWERS_MAX)
        self._reader: asyncio.Task[None] | None = None
        self._echoed_ns: dict[int, int] = {}
        self._all_echoed = asyncio.Event()
        self._sequence = 0
        self._flow = 0
        self.opened = wire.SessionOpened(0, b"", 0, "")

    async def start(self) -> None:
        """Say hello. Raises PeerError."""
        self._reader = asyncio.create_task(self._read(), name=f"measurement {self.peer}")
        await self._say(wire.SessionAsked(wire.MEASUREMENT_VERSION))
        self.opened = await self._answer(wire.SessionOpened, ANSWER_S)
        self._own = self._own.fixed()  # sockets that go to the same address later are not the session's own
        if self.opened.version != wire.MEASUREMENT_VERSION:
            raise PeerIncompatible(
                f"{self.peer} measures by version {self.opened.version}, this program by {wire.MEASUREMENT_VERSION}: "
                "run the same diloco-node on both"
            )

    async def close(self) -> None:
        """End the session."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._stream.aclose()

    # ---- round trips -------------------------------------------------------------------------------------------------

    async def latency(self, span_s: float, *, gap_s: float = PROBE_GAP_S) -> LatencyMeasured:
        """Probe for so long, one probe every `gap_s`, whether or not the one before was answered.

        Raises:
            LinkLost: the session ended, or no probe was answered.
        """
        before = await self._told()
        sent_ns: dict[int, int] = {}
        loop = asyncio.get_running_loop()
        started_s, count = loop.time(), PROBES_SKIPPED + max(1, round(span_s / gap_s))
        for number in range(1, count + 1):
            await self._probe(sent_ns)
            await asyncio.sleep(max(0.0, started_s + number * gap_s - loop.time()))
        await self._wait_for_echoes(sent_ns)
        after = await self._told()
        order = sorted(sent_ns)[PROBES_SKIPPED:]
        rtts = [self._echoed_ns[one] - sent_ns[one] for one in order if one in self._echoed_ns]
        if not rtts:
            raise LinkLost(f"{self.peer}: none of {len(order)} probes was answered in {UNANSWERED_AFTER_S:.0f} s")
        self._echoed_ns.clear()
        least_us = [one.rtt_min_us for one in self._own.read() if one.rtt_min_us]
        return LatencyMeasured(
            summarise_rtts(rtts, unanswered=len(order) - len(rtts)),
            _share_sent_again(before, after),
            min(least_us) * 1000 if least_us else None,
        )

    async def _probe(self, sent_ns: dict[int, int]) -> None:
        self._sequence += 1
        sent_ns[self._sequence] = time.monotonic_ns()
        await self._write(wire.encode_echo(wire.KIND_ECHO, self._sequence))

    async def _wait_for_echoes(self, sent_ns: dict[int, int]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNANSWERED_AFTER_S):
                while len(self._echoed_ns) < len(sent_ns):
                    self._all_echoed.clear()
                    await self._all_echoed.wait()

    async def _told(self) -> tuple[int, int] | None:
        """Bytes sent and sent again by both ends of the session's connection."""
        await self._say(wire.SocketAsked())
        theirs = await self._answer(wire.SocketTold, ANSWER_S)
        ours = flows.sent_bytes(self._own.read())
        if ours is None or theirs.sent_bytes < 0:
            return None
        return ours[0] + theirs.sent_bytes, ours[1] + theirs.retransmitted_bytes

    # ---- flows -------------------------------------------------------------------------------------------------------

    async def flow(
        self, times: FlowTimes, *, is_sending: bool, path: FlowPath, body: FlowBody, connections: int
    ) -> FlowMeasured:
        """Fill the link one way, and count at the far end of it.

        Raises:
            PeersUnreachable: the peer's port for plain connections can't be reached. PeerError: the flow failed.
        """
        self._flow += 1
        asked = wire.FlowAsked(self._flow, is_sending, path, body, connections, times.warm_up_ns, times.span_ns)
        wire.check_flow(asked)
        content = await asyncio.to_thread(flows.make_body, body) if is_sending else memoryview(b"")
        await self._say(asked)
        await self._answer(wire.FlowReady, BUSY_S)
        if path is FlowPath.PLAIN:
            return await self._plain(asked, content, times)
        return await self._transport(asked, content, times)

    async def _transport(self, asked: wire.FlowAsked, content: memoryview, times: FlowTimes) -> FlowMeasured:
        sockets = SocketsOf.to(self._place.remotes)
        streams: list[DialedStream] = []
        try:
            for index in range(asked.connections):
                stream = await self._place.dial()
                streams.append(stream)
                await stream.write(wire.encode_message(wire.StreamJoined(self.opened.token, asked.flow, index)))
            if asked.is_dialer_sending:
                stop = asyncio.Event()
                sending = flows.send_transport(streams, self.peer, SendingEnd(content, times, sockets, stop))
                return await self._while_sending(asyncio.create_task(sending), stop, times)
            return await self._after_receiving(asked, await flows.receive_transport(streams, self.peer, times))
        finally:
            await self._stop(asked)
            for stream in streams:
                await stream.aclose()

    async def _plain(self, asked: wire.FlowAsked, content: memoryview, times: FlowTimes) -> FlowMeasured:
        connections: list[socket.socket] = []
        try:
            for index in range(asked.connections):
                joined = wire.StreamJoined(self.opened.token, asked.flow, index)
                connections.append(await asyncio.to_thread(self._connect_plain, joined))
            sockets = SocketsOf(frozenset((one.getpeername()[0], one.getpeername()[1]) for one in connections))
            if asked.is_dialer_sending:
                stop = asyncio.Event()
                sending = flows.send_plain(connections, SendingEnd(content, times, sockets, stop))
                return await self._while_sending(asyncio.create_task(sending), stop, times)
            return await self._after_receiving(asked, await flows.receive_plain(connections, times))
        finally:
            await self._stop(asked)
            for connection in connections:
                connection.close()

    def _connect_plain(self, joined: wire.StreamJoined) -> socket.socket:
        host, port = self._place.remotes[0][0], self.opened.plain_port
        try:
            connection = socket.create_connection((host, port), timeout=DIAL_S)
        except OSError as error:
            raise PeersUnreachable(
                f"{self.peer}: its port for plain TCP, {port} at {host}, can't be reached ({error.strerror or error}): "
                "open one in the firewall and give it to `measure serve --plain-port`, or measure with --no-plain"
            ) from None
        connection.sendall(wire.encode_preamble(joined))
        return connection

    async def _while_sending(self, sending: asyncio.Task[Sent], stop: asyncio.Event, times: FlowTimes) -> FlowMeasured:
        """Our end sends until the other says what it received."""
        limit_s = times.total_s + flows.START_S + flows.LAST_MARK_S + ANSWER_S
        hearing = asyncio.create_task(self._answer(wire.FlowReceived, limit_s))
        try:
            await asyncio.wait([sending, hearing], return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not hearing.done():
                sending.result()
            told = await hearing
            stop.set()
            sent = await sending
        finally:
            for task in (sending, hearing):
                task.cancel()
            await asyncio.gather(sending, hearing, return_exceptions=True)
        rates = Goodput(told.mean, told.median, told.p10, told.p90)
        return FlowMeasured(Received(rates, flows.CpuUse(told.cpu_ns, told.cpu_span_ns)), sent)

    async def _after_receiving(self, asked: wire.FlowAsked, received: Received) -> FlowMeasured:
        await self._say(wire.FlowStopped(asked.flow))
        told = await self._answer(wire.FlowSent, ANSWER_S)
        sent, again = (None, None) if told.sent_bytes < 0 else (told.sent_bytes, told.retransmitted_bytes)
        return FlowMeasured(received, Sent(flows.CpuUse(told.cpu_ns, told.cpu_span_ns), sent, again))

    async def _stop(self, asked: wire.FlowAsked) -> None:
        with contextlib.suppress(LinkLost):
            await self._say(wire.FlowStopped(asked.flow))

    async def pair(self, asked: wire.PairAsked) -> wire.PairMeasured:
        """Let the peer measure from there to another region. Raises PeerError."""
        await self._say(asked)
        limit_s = 2 * BUSY_S + (asked.probes_ns + 2 * (wire.WARM_UP_NS_MAX + asked.span_ns)) / NS_PER_S
        return await self._answer(wire.PairMeasured, limit_s)

    # ---- frames ------------------------------------------------------------------------------------------------------

    async def _say(self, message: wire.MeasurementMessage) -> None:
        await self._write(wire.encode_message(message))

    async def _write(self, frame: bytes) -> None:
        async with self._writing:
            await self._stream.write(frame)

    async def _read(self) -> None:
        try:
            while True:
                found = wire.decode_session(await self._stream.read())
                if isinstance(found, tuple):
                    self._echoed_ns[found[1]] = time.monotonic_ns()
                    self._all_echoed.set()
                else:
                    self._queue_of(type(found)).put_nowait(found)
        except asyncio.QueueFull:
            self._end(ProtocolViolation(f"{self.peer} says more than it was asked"))
        except PeerError as error:
            self._end(error)

    def _queue_of(self, kind: type) -> asyncio.Queue[wire.MeasurementMessage | PeerError]:
        return self._sockets_told if kind is wire.SocketTold else self._answers

    def _end(self, error: PeerError) -> None:
        """Tell it to whoever waits, or will wait; what was said before does not matter any more."""
        for queue in (self._answers, self._sockets_told):
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(error)

    async def _answer(self, kind: type[T], limit_s: float) -> T:
        """The next message, which must be of a kind. Raises PeerError."""
        try:
            async with asyncio.timeout(limit_s):
                found = await self._queue_of(kind).get()
        except TimeoutError:
            raise LinkLost(f"{self.peer} said nothing for {limit_s:.0f} s ({kind.__name__} was due)") from None
        if isinstance(found, PeerError):
            self._queue_of(kind).put_nowait(found)  # for whoever asks next: the session is over
            raise found
        if isinstance(found, wire.Declined):
            raise PeerError(f"{self.peer} can't: {found.reason}")
        if not isinstance(found, kind):
            raise PeerError(f"{self.peer} said {type(found).__name__}; expected {kind.__name__}")
        return found


def _share_sent_again(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[0] <= before[0]:
        return None
    return (after[1] - before[1]) / (after[0] - before[0])


@contextlib.asynccontextmanager
async def open_session(identity: Identity, peer: str, address: str) -> AsyncIterator[ProbeSession]:
    """Connect to the measuring end of a region.

    Args:
        identity: ours. peer: the region that must be there. address: `host:port`.

    Raises:
        PeersUnreachable: nobody answers there, or what answers does not measure.
        IdentityError: one of the two certificates is not accepted by the other side.
        PeerIncompatible: it is another version.
    """
    try:
        place = _Place(identity, peer, address, await _resolve(address))
        own = SocketsOf.to(place.remotes)
        stream = await place.dial()
    except LinkLost as error:
        raise _explained(error, peer, address) from None
    session = ProbeSession(place, stream, own)
    try:
        try:
            await session.start()
        except LinkLost as error:
            raise _explained(error, peer, address) from None
        yield session
    finally:
        await session.close()


def _explained(error: LinkLost, peer: str, address: str) -> PeersUnreachable | IdentityError:
    text = str(error)
    if "certificate" in text:
        return IdentityError(f"{text}; both must be of the same `diloco-node certs init`")
    if "Method not found" in text:
        return PeersUnreachable(
            f"{peer} at {address} is a running daemon, which does not serve measurements: measure before the run, or "
            "start `diloco-node measure serve` beside it with --listen HOST:PORT, and name that port"
        )
    return PeersUnreachable(f"{text}: is `diloco-node measure serve` running there, and its port open?")


async def _resolve(address: str) -> tuple[Address, ...]:
    host, _, port = address.rpartition(":")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkLost(f"{address} can't be resolved ({error.strerror})") from None
    return tuple((str(where[0]), int(where[1])) for *_, where in found)


async def region_at(address: str, folder: Path) -> str:
    """Which region of our run answers at an address, as its certificate says.

    Args:
        folder: ours, with `ca.pem`, `node.pem`, `node.key`.

    Raises:
        PeersUnreachable: nobody answers, or it does not speak TLS. IdentityError: it is not of our run.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the name is what we want to know; the run's authority is checked
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "node.pem", folder / "node.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context, server_hostname="")
    except ssl.SSLCertVerificationError as error:
        raise IdentityError(
            f"what answers at {address} is not of this run ({error.verify_message}); "
            "both must be of the same `diloco-node certs init`"
        ) from None
    except (OSError, TimeoutError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeersUnreachable(
            f"nobody speaks TLS at {address} ({why}): is `diloco-node measure serve` running there, and its port open?"
        ) from None
    del reader
    try:
        names = writer.get_extra_info("peercert").get("subject", ())
    finally:
        writer.transport.abort()  # a farewell in TLS would be waited for
    common = [value for part in names for key, value in part if key == "commonName"]
    return str(common[0]) if len(common) == 1 else ""
