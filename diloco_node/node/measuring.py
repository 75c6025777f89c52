"""Measures the links of a running region, over the links themselves or beside them; answers peers that ask for it.

`core.measuring` has the messages and the limits, `flow_ends` the two ends of a flow, `measure_command` what an operator
asks for. Nothing here touches rounds: echoes are small control messages, probes go in the lane behind everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from diloco_node.adapters.aside_ends import Aside
from diloco_node.adapters.asides import JOIN_S
from diloco_node.adapters.flows import FlowTimes, make_body
from diloco_node.adapters.probe import UNANSWERED_AFTER_S, LatencyMeasured, warm_up_ns
from diloco_node.adapters.sockets import TcpCounters
from diloco_node.core import measuring as msg
from diloco_node.core.measuring import NS_PER_S, MeasuringMessage, Probe
from diloco_node.core.samples import summarise_rtts
from diloco_node.errors import ConfigError, DilocoError, LinkLost, PeerError, PeersUnreachable, ProtocolViolation
from diloco_node.node.flow_ends import LATE_S, SENDER_GRACE_S, START_S, Bulk, ReceivingEnd, SendingEnd, SentOverLink
from diloco_node.node.measure_opening import Opening, Opens, come_together, first_of, open_aside
from diloco_node.node.measure_talk import Echoes, Talk, ended, share_sent_again
from diloco_node.wire.measurement import FlowBody

ANSWER_S: Final = 10.0
BODY_MADE_S: Final = 10.0
"""A busy machine takes so long to make what is sent."""

ECHO_GAP_S: Final = 0.01
ECHO_SHARE: Final = 20
"""Echoes take at most a 20th of a budget."""

ECHO_WIRE_BYTES: Final = 180
ECHOES_SKIPPED: Final = 5
RTT_PROBE_S: Final = 0.5
REASON_CHARS_MAX: Final = 500

REASON_S: Final = 1.0
"""When connections of a measurement break, the peer may be about to say why."""

LINGER_S: Final = 5.0
"""Connections of a measurement stay open so long for the sender to hear that it is over, and close them."""


class MeasuringTransport(Bulk, Opens, Protocol):
    """What measuring needs of `GrpcTransport`."""

    def dials(self, peer: str) -> bool:
        """Whether the link is of our own dial. Raises LinkLost."""
        ...

    def reject(self, peer: str, error: PeerError) -> None:
        """Count what a peer did wrong."""
        ...

    def tcp(self, peer: str) -> TcpCounters | None:
        """What TCP did on the link, as of late."""
        ...

    def budget_status(self) -> dict[str, Any]:
        """Ceilings, and what each lane used."""
        ...

    def peer_status(self) -> Mapping[str, Any]:
        """What each link is doing."""
        ...


@dataclass(frozen=True, slots=True)
class FlowWanted:
    """One flow between here and a peer; see `MeasurementAsked`. `is_sending`: from here to there."""

    peer: str
    is_sending: bool
    is_compressible: bool
    times: FlowTimes
    bytes_max: int
    connections: int = 0
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class FlowOverLink:
    """What both ends found. `used_bytes`: that flowed, the warm-up included."""

    received: msg.MeasurementReceived
    sent: msg.MeasurementSent
    used_bytes: int


class Measuring:
    """The measurements of one region. All methods run on the event loop.

    Args:
        region: our name. peers: the others. transport: the links.
        spawn: runs a task of the daemon. executor: for making what is sent, behind everything else. now_ns: monotonic.
    """

    def __init__(
        self,
        *,
        region: str,
        peers: tuple[str, ...],
        transport: MeasuringTransport,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        executor: Executor,
        now_ns: Callable[[], int],
    ) -> None:
        self.region = region
        self.peers = peers
        self._transport = transport
        self._spawn = spawn
        self._executor = executor
        self._now_ns = now_ns
        self._gate = msg.MeasuringGate(peers, now_ns=now_ns())
        self._expected = {peer: msg.ProbesExpected() for peer in peers}
        self._receiving: dict[tuple[str, int], ReceivingEnd] = {}
        self._sending: dict[tuple[str, int], SendingEnd] = {}
        self._talks: dict[tuple[str, int], Talk] = {}
        self._serving: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._echoes: Echoes | None = None
        self._sequence = secrets.randbits(32)

    def describe(self) -> str:
        """The measurement that is going on here, for people; empty when none is."""
        return self._gate.describe(now_ns=self._now_ns())

    # ---- what the links bring ----------------------------------------------------------------------------------------

    def heard(self, peer: str, message: MeasuringMessage) -> None:
        """Take a message of a peer.

        Raises:
            ProtocolViolation: it asks for more than the limits, twice the same, or says more than it was asked.
        """
        match message:
            case msg.EchoWanted():
                self._answer_echo(peer, message)
            case msg.EchoAnswered():
                if self._echoes is not None and self._echoes.peer == peer:
                    self._echoes.heard(message, now_ns=self._now_ns())
            case msg.MeasurementAsked() | msg.LinkAsked():
                self._begin_for(peer, message)
            case msg.MeasurementStopped():
                self._stop_for(peer, message.measurement)
            case _:
                talk = self._talks.get((peer, message.measurement))
                if talk is not None:  # else it is late: nobody waits any more
                    talk.heard(message)

    def transfer_opened(self, peer: str, header: Probe, raw_bytes: int) -> memoryview | None:
        """Where probes go; None for those that come late. Raises ProtocolViolation for those nobody agreed to."""
        self._expected[peer].arrive(header.measurement, raw_bytes)
        end = self._receiving.get((peer, header.measurement))
        return None if end is None else end.opened(raw_bytes)

    def transfer_closed(self, peer: str, header: Probe, raw_bytes: int, *, is_whole: bool) -> None:
        """Probes arrived, or broke off."""
        end = self._receiving.get((peer, header.measurement))
        if end is not None and is_whole:
            end.closed(raw_bytes)

    def plain_arrived(self, peer: str, measurement: int, size: int) -> None:
        """Bytes arrived over plain TCP. Raises ProtocolViolation for more than was agreed to."""
        self._expected[peer].arrive(measurement, size)
        end = self._receiving.get((peer, measurement))
        if end is not None:
            end.arrived(size)

    def link_lost(self, peer: str) -> None:
        """The link is down: what went on over it is over."""
        for key, talk in self._talks.items():
            if key[0] == peer:
                talk.fail(LinkLost(f"the link to {peer} went down in the middle of a measurement"))
        for key, task in self._serving.items():
            if key[0] == peer:
                task.cancel()

    # ---- for peers ---------------------------------------------------------------------------------------------------

    def _answer_echo(self, peer: str, message: msg.EchoWanted) -> None:
        if self._gate.may_echo(peer, now_ns=self._now_ns()):
            tcp = self._transport.tcp(peer)
            counted = (-1, -1) if tcp is None else (tcp.sent_bytes, tcp.retransmitted_bytes)
            self._transport.send(peer, msg.EchoAnswered(message.sequence, *counted))

    def _begin_for(self, peer: str, asked: msg.MeasurementAsked | msg.LinkAsked) -> None:
        msg.check_asked(asked)
        key = (peer, asked.measurement)
        if key in self._serving:
            raise ProtocolViolation(f"{peer} asks twice for measurement {asked.measurement}")
        if isinstance(asked, msg.LinkAsked):
            what = f"the link to {asked.region}"
        else:
            what = f"bandwidth {'from' if asked.is_asker_sending else 'to'} {peer}"
        reason = self._gate.begin(what, asker=peer, bytes_max=msg.all_bytes_max(asked), now_ns=self._now_ns())
        if reason:
            self._transport.send(peer, msg.MeasurementDeclined(asked.measurement, _cut(f"{self.region}: {reason}")))
            return
        task = self._spawn(self._serve(peer, asked), f"measurement for {peer}")
        self._serving[key] = task
        task.add_done_callback(lambda _: self._serving.pop(key, None))

    async def _serve(self, peer: str, asked: msg.MeasurementAsked | msg.LinkAsked) -> None:
        """Do what a peer asked for, and tell it; what goes wrong is told, too."""
        serving = _Serving()
        answer: MeasuringMessage
        async with serving.stack:
            try:
                if isinstance(asked, msg.LinkAsked):
                    answer = await self._link_for(asked, serving)
                elif asked.is_asker_sending:
                    answer = await self._receive_for(peer, asked, serving)
                else:
                    answer = await self._send_for(peer, asked, serving)
            except DilocoError as error:
                answer = msg.MeasurementDeclined(asked.measurement, _cut(str(error)))
            finally:
                # Before the answer: the peer may ask for the next one at once.
                self._gate.end(used_bytes=serving.used_bytes)
            self._transport.send(peer, answer)
            if serving.reading is not None:  # until it knows, the peer sends: it must not find its connections broken
                await asyncio.wait([serving.reading], timeout=LINGER_S)

    async def _receive_for(self, peer: str, asked: msg.MeasurementAsked, serving: _Serving) -> msg.MeasurementReceived:
        with self._receiving_end(peer, asked) as end:
            try:
                aside = await come_together(self._transport, peer, asked, serving.stack)
                if aside is None:
                    return await end.run()
                serving.reading = asyncio.create_task(self._read(peer, aside), name=f"measurement from {peer}")
                await serving.stack.enter_async_context(ended(serving.reading))
                return await first_of(end.run(), serving.reading)
            finally:
                serving.used_bytes = end.used_bytes

    async def _send_for(self, peer: str, asked: msg.MeasurementAsked, serving: _Serving) -> msg.MeasurementSent:
        body = await self._body(asked)
        key = (peer, asked.measurement)
        end = self._sending_end(peer, asked, body, await come_together(self._transport, peer, asked, serving.stack))
        self._sending[key] = end
        try:
            return _told(asked.measurement, await end.run())
        finally:
            serving.used_bytes = end.used_bytes
            del self._sending[key]

    async def _read(self, peer: str, aside: Aside) -> None:
        """Take what arrives beside the link. Raises PeerError, in any case."""
        try:
            await aside.receive(self)
        except PeerError as error:
            if not isinstance(error, LinkLost):
                self._transport.reject(peer, error)
            raise

    async def _link_for(self, asked: msg.LinkAsked, serving: _Serving) -> msg.LinkTold:
        if asked.region not in self.peers:
            raise ConfigError(f"{asked.region} is no peer of {self.region}")
        self._check_link(asked.region)
        serving.used_bytes = msg.all_bytes_max(asked)  # if it fails nobody knows how much of it went out
        echoes = (await self._probe(asked.region, asked.probes_ns / NS_PER_S)).latency
        times = FlowTimes(asked.warm_up_ns or warm_up_ns(echoes.p50_ns), asked.span_ns)
        flow = await self._flow(FlowWanted(asked.region, True, False, times, asked.bytes_max))
        plain, plain_error = 0, ""
        if asked.is_plain_too:
            try:
                beside = await self._flow(
                    FlowWanted(asked.region, True, False, times, asked.bytes_max, 1, is_plain=True)
                )
                plain = beside.received.mean
                serving.used_bytes = flow.used_bytes + beside.used_bytes
            except DilocoError as error:  # the rest was measured all the same
                plain_error = _cut(str(error))
        else:
            serving.used_bytes = flow.used_bytes
        return msg.LinkTold(
            asked.measurement,
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
            plain,
            plain_error,
        )

    def _stop_for(self, peer: str, measurement: int) -> None:
        end, task = self._sending.get((peer, measurement)), self._serving.get((peer, measurement))
        if end is not None:
            end.stop()
        elif task is not None:
            task.cancel()

    # ---- for the operator --------------------------------------------------------------------------------------------

    async def latency(self, peer: str, span_s: float) -> LatencyMeasured:
        """Round trips through the control lane, one echo every 10 ms, whether or not the one before came back.

        Raises:
            PeersUnreachable: there is no link. LinkLost: none came back. PeerError: another measurement runs here.
        """
        with self._turn(f"latency to {peer}"):
            self._check_link(peer)
            return await self._probe(peer, span_s)

    async def loaded_latency(self, wanted: FlowWanted, span_s: float) -> LatencyMeasured:
        """The same while a flow fills the link, until its bytes are used up. Raises as `latency` and `flow`."""
        with self._turn(f"latency under load to {wanted.peer}"):
            self._check_link(wanted.peer)
            filling = asyncio.create_task(self._flow(wanted), name=f"load {wanted.peer}")
            try:
                await asyncio.wait([filling], timeout=wanted.times.warm_up_ns / NS_PER_S)
                if filling.done():
                    filling.result()
                    raise LinkLost(
                        f"{wanted.bytes_max} bytes were used up before the link was full: allow more with --most"
                    )
                measured = await self._probe(wanted.peer, span_s, load=filling)
                await filling  # had it failed on the way, these would not be times under load
                return measured
            finally:
                filling.cancel()
                await asyncio.gather(filling, return_exceptions=True)

    async def flow(self, wanted: FlowWanted) -> FlowOverLink:
        """Fill the measurement lane one way, and count at the far end.

        Raises:
            PeersUnreachable: there is no link. PeerError: it failed, or here or there another measurement runs.
        """
        with self._turn(f"bandwidth {'to' if wanted.is_sending else 'from'} {wanted.peer}"):
            self._check_link(wanted.peer)
            return await self._flow(wanted)

    async def times(self, peer: str, span_ns: int, warm_ns: int | None) -> tuple[FlowTimes, int]:
        """How long flows to a peer are to be, and the round trip (ns) that this was taken from."""
        rtt_ns = (await self.latency(peer, RTT_PROBE_S)).latency.p50_ns
        return FlowTimes(warm_up_ns(rtt_ns) if warm_ns is None else warm_ns, span_ns), rtt_ns

    async def far_link(self, source: str, asked: msg.LinkAsked) -> msg.LinkTold:
        """Let a peer measure from there to a third region. Raises as `flow`."""
        self._check_link(source)
        flow_s = (msg.WARM_UP_NS_MAX + asked.span_ns) / NS_PER_S + START_S + LATE_S + SENDER_GRACE_S + 2 * ANSWER_S
        limit_s = asked.probes_ns / NS_PER_S + flow_s + (flow_s + JOIN_S if asked.is_plain_too else 0)
        async with self._talk(source, asked.measurement) as talk:
            self._transport.send(source, asked)
            return await talk.answer(msg.LinkTold, limit_s)

    @staticmethod
    def new_measurement() -> int:
        """A number that no other measurement has."""
        return secrets.randbits(62)

    def address(self, peer: str) -> str | None:
        """Where we would dial a peer; None if only it can dial us."""
        found: str | None = self._transport.peer_status()[peer].address
        return found

    def connections(self, peer: str) -> int:
        """How many connections the link to a peer has for bulk now."""
        return int(self._transport.peer_status()[peer].connections)

    def link_error(self, peer: str) -> str:
        """Why there is no link to a peer, for people; empty when there is one."""
        status = self._transport.peer_status()[peer]
        if status.state.value == "up":
            return ""
        where = f" at {status.address}" if status.address else ""
        return f"{self.region} has no link to {peer}{where}: {status.error or status.state.value}"

    def _check_link(self, peer: str) -> None:
        error = self.link_error(peer)
        if error:
            raise PeersUnreachable(error)

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        reason = self._gate.begin(what, asker=None, bytes_max=0, now_ns=self._now_ns())
        if reason:
            raise PeerError(f"{self.region} is {reason}")
        try:
            yield
        finally:
            self._gate.end(used_bytes=0)

    # ---- echoes ------------------------------------------------------------------------------------------------------

    async def _probe(self, peer: str, span_s: float, *, load: asyncio.Task[Any] | None = None) -> LatencyMeasured:
        """Send echoes for so long, or until the load ends."""
        loop, gap_s = asyncio.get_running_loop(), self._echo_gap_s(peer)
        here = self._transport.tcp(peer)
        echoes = self._echoes = Echoes(peer)
        try:
            started_s, count = loop.time(), ECHOES_SKIPPED + max(1, round(span_s / gap_s))
            for number in range(1, count + 1):
                self._sequence += 1
                echoes.sent_ns[self._sequence] = self._now_ns()
                self._transport.send(peer, msg.EchoWanted(self._sequence))
                await asyncio.sleep(max(0.0, started_s + number * gap_s - loop.time()))
                if load is not None and load.done():
                    break
            await echoes.until_all_back(UNANSWERED_AFTER_S)
        finally:
            self._echoes = None
        order = sorted(echoes.sent_ns)[ECHOES_SKIPPED:]
        rtts = [echoes.back_ns[one] - echoes.sent_ns[one] for one in order if one in echoes.back_ns]
        if not rtts:
            raise LinkLost(f"{peer}: none of {len(order)} echoes came back in {UNANSWERED_AFTER_S:.0f} s")
        now = self._transport.tcp(peer)
        least_ns = now.rtt_min_ns if now is not None else 0
        share = share_sent_again(here, now, echoes.told)
        return LatencyMeasured(summarise_rtts(rtts, unanswered=len(order) - len(rtts)), share, least_ns or None)

    def _echo_gap_s(self, peer: str) -> float:
        rate = self._transport.budget_status()["peers"][peer]["egress_bytes_per_s"]
        return ECHO_GAP_S if rate is None else max(ECHO_GAP_S, ECHO_WIRE_BYTES * ECHO_SHARE / rate)

    # ---- flows -------------------------------------------------------------------------------------------------------

    async def _flow(self, wanted: FlowWanted) -> FlowOverLink:
        times = wanted.times
        asked = msg.MeasurementAsked(
            self.new_measurement(),
            wanted.is_sending,
            wanted.is_compressible,
            times.warm_up_ns,
            times.span_ns,
            wanted.bytes_max,
            wanted.connections,
            wanted.is_plain,
            None,
        )
        limit_s = times.total_s + START_S + LATE_S + ANSWER_S
        async with contextlib.AsyncExitStack() as stack:
            door = None
            if asked.connections and not self._transport.dials(wanted.peer):
                door = await stack.enter_async_context(self._transport.asides.door(wanted.peer, asked))
                asked = replace(asked, aside=door.open)
            async with self._talk(wanted.peer, asked.measurement) as talk:
                if wanted.is_sending:
                    return await self._flow_out(talk, asked, limit_s, Opening(stack, door))
                return await self._flow_in(talk, asked, limit_s, Opening(stack, door))

    async def _flow_out(
        self, talk: Talk, asked: msg.MeasurementAsked, limit_s: float, opening: Opening
    ) -> FlowOverLink:
        body = await self._body(asked)
        self._transport.send(talk.peer, asked)
        end = self._sending_end(
            talk.peer, asked, body, await open_aside(self._transport, talk, asked, opening, ANSWER_S)
        )
        sending = asyncio.create_task(end.run(), name=f"measurement to {talk.peer}")
        hearing = asyncio.create_task(talk.answer(msg.MeasurementReceived, limit_s))
        async with ended(sending, hearing):
            await asyncio.wait([sending, hearing], return_when=asyncio.FIRST_COMPLETED)
            if asked.connections and not hearing.done():
                await asyncio.wait([hearing], timeout=REASON_S)
            if not hearing.done():
                sending.result()  # it ends before only by failing
            received = await hearing
            end.stop()
            return FlowOverLink(received, _told(asked.measurement, await sending), end.used_bytes)

    async def _flow_in(self, talk: Talk, asked: msg.MeasurementAsked, limit_s: float, opening: Opening) -> FlowOverLink:
        with self._receiving_end(talk.peer, asked) as end:
            self._transport.send(talk.peer, asked)
            aside = await open_aside(self._transport, talk, asked, opening, ANSWER_S + BODY_MADE_S)
            tasks: list[asyncio.Task[Any]] = []
            if aside is not None:
                tasks.append(asyncio.create_task(self._read(talk.peer, aside), name=f"measurement from {talk.peer}"))
            receiving = asyncio.create_task(end.run(), name=f"measurement from {talk.peer}")
            hearing = asyncio.create_task(talk.answer(msg.MeasurementSent, limit_s + SENDER_GRACE_S))
            async with ended(receiving, hearing, *tasks):
                await asyncio.wait([receiving, hearing, *tasks], return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    if asked.connections and not hearing.done():
                        await asyncio.wait([hearing], timeout=REASON_S)
                    if hearing.done():
                        hearing.result()  # the sender has failed, and says why
                        raise LinkLost(f"{talk.peer} ended a measurement by itself")
                    tasks[0].result()
                received = receiving.result()
                self._transport.send(talk.peer, msg.MeasurementStopped(asked.measurement))
                return FlowOverLink(received, await hearing, end.used_bytes)

    async def _body(self, asked: msg.MeasurementAsked) -> memoryview:
        kind = FlowBody.INT4 if asked.is_compressible else FlowBody.RANDOM
        return await asyncio.get_running_loop().run_in_executor(self._executor, make_body, kind)

    def _sending_end(self, peer: str, asked: msg.MeasurementAsked, body: memoryview, aside: Aside | None) -> SendingEnd:
        def booked() -> int:
            lanes = self._transport.budget_status()["peers"][peer]["lanes"]
            return int(lanes["measurement"]["used_bytes"])

        return SendingEnd(aside or self._transport, peer, asked, body, booked)

    @contextlib.contextmanager
    def _receiving_end(self, peer: str, asked: msg.MeasurementAsked) -> Iterator[ReceivingEnd]:
        key = (peer, asked.measurement)
        self._expected[peer].expect(asked.measurement, asked.bytes_max)
        self._receiving[key] = end = ReceivingEnd(asked, now_ns=self._now_ns)
        try:
            yield end
        finally:
            del self._receiving[key]

    @contextlib.asynccontextmanager
    async def _talk(self, peer: str, measurement: int) -> AsyncIterator[Talk]:
        """A conversation; when it breaks off here the peer is told to stop."""
        talk = self._talks[peer, measurement] = Talk(peer, measurement)
        try:
            yield talk
        except BaseException:
            self._transport.send(peer, msg.MeasurementStopped(measurement))
            raise
        finally:
            del self._talks[peer, measurement]


class _Serving:
    """What a peer asked for, while it is done.

    Attributes:
        used_bytes: that flowed. stack: what lives as long. reading: takes what arrives beside the link.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.stack = contextlib.AsyncExitStack()
        self.reading: asyncio.Task[None] | None = None


def _told(measurement: int, found: SentOverLink) -> msg.MeasurementSent:
    sent = found.sent
    counted = (-1, -1)
    if sent.sent_bytes is not None and sent.retransmitted_bytes is not None:
        counted = (sent.sent_bytes, sent.retransmitted_bytes)
    return msg.MeasurementSent(measurement, sent.cpu.cpu_ns, sent.cpu.span_ns, found.wire_bytes, *counted)


def _cut(text: str) -> str:
    return text[:REASON_CHARS_MAX]
