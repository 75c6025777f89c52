"""A measuring end: measures the links of a transport, and answers the requests of peers.

A daemon has one beside its core, on the links that its rounds use; `measure serve` and the command line have one on
links of their own (`measure.ends`). The handler of the links passes on its messages and probes. Nothing here touches
rounds: echoes are small control messages, probes go in the lane behind everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor

from diloco_node.errors import ConfigError, LinkLost, PeerError, PeersUnreachable
from diloco_node.measure.echoes import EchoProbe
from diloco_node.measure.gate import MeasuringGate
from diloco_node.measure.probes import ProbeReceivers, ending, warm_up_ns
from diloco_node.measure.requester import FlowMeasured, MeasurementRequester, new_flow
from diloco_node.measure.responder import MeasurementResponder, Spawn
from diloco_node.measure.samples import Latency
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.kernel.congestion import own_congestion_controls
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import measure_messages as msg
from diloco_node.wire.measure_messages import MeasureMessage, Probe

Linked = Callable[[tuple[str, ...]], contextlib.AbstractAsyncContextManager["Measuring"]]
"""Called with peers: the end that has links to them, until the end of the block. Raises PeersUnreachable or
IdentityError when the link to a single peer can't be had.
"""


class Measuring:
    """The measurements of one transport, whose handler passes on what is for them. All on the event loop.

    dial: has links to third regions when a peer asks for them; None: over the links of this transport. is_bounded:
    peers may ask for so many bytes only: rounds use the same links.
    """

    def __init__(
        self,
        *,
        region: str,
        transport: GrpcTransport,
        spawn: Spawn,
        executor: Executor,
        now_ns: Callable[[], int],
        dial: Linked | None = None,
        is_bounded: bool = True,
    ) -> None:
        self.region = region
        self.transport = transport
        self._dial = dial
        self._now_ns = now_ns
        self.receivers = ProbeReceivers(now_ns=now_ns)
        self.gate = MeasuringGate(is_bounded=is_bounded)
        self.echoes = EchoProbe(transport, self.gate, now_ns=now_ns)
        self.requester = MeasurementRequester(transport, self.receivers, executor)
        self.responder = MeasurementResponder(
            transport=transport,
            gate=self.gate,
            receivers=self.receivers,
            remote_link=self._remote_link_for_peer,
            spawn=spawn,
            executor=executor,
            now_ns=now_ns,
        )

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers of the transport."""
        return tuple(self.transport.addresses)

    @contextlib.asynccontextmanager
    async def own_links(self) -> AsyncIterator[Measuring]:
        """This end with the links that it has, as a `Linked` gives it."""
        yield self

    def describe(self) -> str:
        """The measurement that is going on here, for people; empty when none is."""
        return self.gate.describe(now_ns=self._now_ns())

    def control_arrived(self, peer: str, message: MeasureMessage) -> None:
        """Take a message of a peer. Raises ProtocolViolation: beyond the limits, twice the same, or not asked for."""
        match message:
            case msg.EchoRequest():
                self.echoes.answer_request(peer, message)
            case msg.EchoReply():
                self.echoes.take_reply(peer, message)
            case msg.MeasurementRequested() | msg.LinkTestRequested():
                self.responder.begin(peer, message)
            case msg.MeasurementStopped():
                self.responder.stop(peer, message.measurement)
            case _:
                self.requester.take_answer(peer, message.measurement, message)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """End the measurements over a link that is down."""
        if not is_up:
            self.requester.link_lost(peer)
            self.responder.link_lost(peer)

    def transfer_opened(self, peer: str, header: Probe, raw_bytes: int) -> memoryview | None:
        """Where probes go. Raises ProtocolViolation for those nobody agreed to."""
        return self.receivers.open_transfer(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: Probe, buffer: memoryview, *, is_whole: bool) -> None:
        """Probes arrived, or broke off."""
        self.receivers.close_transfer(peer, header, buffer.nbytes, is_whole=is_whole)

    def address(self, peer: str) -> str | None:
        """Where we would dial a peer; None if only it can dial us."""
        return self.transport.peer_status()[peer].address

    def connections(self, peer: str) -> int:
        """How many connections the link to a peer has for bulk now."""
        return self.transport.peer_status()[peer].connections

    def congestion_control(self, peer: str) -> dict[str, str | None]:
        """By what the sockets of a link go at its round trip, "here" and "there"; None where nobody tells."""
        counters = self.transport.tcp(peer)
        rtt_min_ns = counters.rtt_min_ns if counters is not None else 0
        ends = {"here": own_congestion_controls(), "there": self.transport.peer_status()[peer].congestion}
        return {end: controls.at(rtt_min_ns) if controls is not None else None for end, controls in ends.items()}

    def link_error(self, peer: str) -> str:
        """Why there is no link to a peer, for people; empty when there is one."""
        status = self.transport.peer_status()[peer]
        if status.state.value == "up":
            return ""
        where = f" at {status.address}" if status.address else ", which has no address to dial"
        return f"{self.region} has no link to {peer}{where}: {status.error or status.state.value}"

    def _check_link(self, peer: str) -> None:
        error = self.link_error(peer)
        if error:
            raise PeersUnreachable(error)

    async def latency(self, peer: str, span_s: float) -> Latency:
        """Round trips through the control lane, one echo every 10 ms, whether or not the one before came back.

        Raises PeersUnreachable: there is no link. LinkLost: none came back. PeerError: another measurement runs here.
        """
        with self.exclusive(f"latency to {peer}"):
            self._check_link(peer)
            return await self.echoes.measure(peer, span_s)

    async def loaded_latency(self, peer: str, request: msg.MeasurementRequested, span_s: float) -> Latency:
        """The same while a flow fills the link, until its bytes are used up. Raises as `latency` and `flow`."""
        with self.exclusive(f"latency under load to {peer}"):
            self._check_link(peer)
            filling = asyncio.create_task(self.requester.flow(peer, request), name=f"load {peer}")
            async with ending(filling):
                await asyncio.wait([filling], timeout=request.warm_up_ns / NS_PER_S)
                if filling.done():
                    filling.result()
                    raise LinkLost(
                        f"{request.bytes_max} bytes were used up before the link was full: allow more with --most"
                    )
                latency = await self.echoes.measure(peer, span_s, load=filling)
                await filling  # had it failed on the way, these would not be times under load
                return latency

    async def flow(self, peer: str, request: msg.MeasurementRequested) -> FlowMeasured:
        """Fill the measurement lane one way, and count at the far end.

        Raises PeersUnreachable: there is no link. PeerError: it failed, or here or there another measurement runs.
        """
        with self.exclusive(f"bandwidth {'to' if request.is_requester_sending else 'from'} {peer}"):
            self._check_link(peer)
            return await self.requester.flow(peer, request)

    async def warm_up(self, peer: str, warm_ns: int | None) -> tuple[int, int]:
        """How long (ns) flows to a peer warm up, by default by the round trip (ns), which is the other number."""
        rtt_ns = (await self.latency(peer, 0.5)).p50_ns
        return warm_up_ns(rtt_ns) if warm_ns is None else warm_ns, rtt_ns

    async def link(self, peer: str, request: msg.LinkTestRequested, *, is_sending: bool = True) -> msg.LinkMeasured:
        """Measure one way between here and a peer: round trips, and a flow. Raises: as `flow`.

        request: its times; the region in it does not matter.
        """
        with self.exclusive(f"the link to {peer}"):
            return (await self._link(peer, request, is_sending=is_sending))[0]

    async def _link(
        self, peer: str, request: msg.LinkTestRequested, *, is_sending: bool
    ) -> tuple[msg.LinkMeasured, int]:
        self._check_link(peer)
        echoes = await self.echoes.measure(peer, request.probes_ns / NS_PER_S)
        warm_ns = request.warm_up_ns or warm_up_ns(echoes.p50_ns)
        limits = {"span_ns": request.span_ns, "bytes_max": request.bytes_max}
        flow = await self.requester.flow(peer, new_flow(is_sending, warm_up_ns=warm_ns, **limits))
        link = msg.LinkMeasured(
            request.measurement,
            echoes.p50_ns,
            echoes.p99_ns,
            echoes.jitter_ns,
            echoes.answered,
            echoes.unanswered,
            flow.received.mean,
            flow.received.p10,
            flow.received.p90,
            flow.sent.sent_bytes,
            flow.sent.retransmitted_bytes,
        )
        return link, flow.used_bytes

    async def remote_link(self, source: str, request: msg.LinkTestRequested) -> msg.LinkMeasured:
        """Let a peer measure from there to a third region. Raises as `flow`."""
        error = self.link_error(source)
        if error:
            raise PeersUnreachable(f"{error}; it can't be asked to measure")
        return await self.requester.remote_link(source, request)

    async def _remote_link_for_peer(self, request: msg.LinkTestRequested) -> tuple[msg.LinkMeasured, int]:
        """A peer requests the link to a third region; the gate has admitted it already. Raises DilocoError."""
        if self._dial is not None:
            async with self._dial((request.region,)) as end:
                return await end.link(request.region, request), 0
        if request.region not in self.peers:
            raise ConfigError(f"{request.region} is no peer of {self.region}")
        return await self._link(request.region, request, is_sending=True)

    @contextlib.contextmanager
    def exclusive(self, purpose: str) -> Iterator[None]:
        """Measure alone: raise where another measurement runs here."""
        reason = self.gate.begin(purpose, requester=None, bytes_max=0, now_ns=self._now_ns())
        if reason:
            raise PeerError(f"{self.region} is {reason}")
        try:
            yield
        finally:
            self.gate.end(used_bytes=0)
