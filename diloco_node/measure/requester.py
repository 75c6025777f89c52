"""Requests to peers to measure: flows from here or to here, and links from there to a third region."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, TypeVar

from diloco_node.errors import DilocoError, LinkLost, PeerError, ProtocolViolation
from diloco_node.escaping import escaped
from diloco_node.measure.probes import (
    LATE_S,
    SENDER_GRACE_S,
    START_S,
    ProbeReceiver,
    ProbeReceivers,
    ProbeSender,
    ending,
    make_body,
)
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import measure_messages as msg
from diloco_node.wire.measure_messages import MeasureMessage

T = TypeVar("T")

ANSWERS_MAX: Final = 8
REPLY_S: Final = 10.0
BODY_MADE_S: Final = 10.0
"""A busy machine takes so long to make what is sent."""

REASON_S: Final = 1.0
"""When a flow breaks, the peer may be about to say why."""


@dataclass(frozen=True, slots=True)
class FlowMeasured:
    """The results of both ends. `used_bytes`: that flowed, the warm-up included."""

    received: msg.MeasurementReceived
    sent: msg.MeasurementSent
    used_bytes: int


class Exchange:
    """A peer's answers to one request of ours."""

    def __init__(self, peer: str, measurement: int) -> None:
        self.peer = peer
        self.measurement = measurement
        self._answers: asyncio.Queue[MeasureMessage | DilocoError] = asyncio.Queue(ANSWERS_MAX)

    def take(self, message: MeasureMessage) -> None:
        """The peer answered. Raises ProtocolViolation: more than was requested."""
        try:
            self._answers.put_nowait(message)
        except asyncio.QueueFull:
            raise ProtocolViolation(f"{self.peer} says more than it was asked in a measurement") from None

    def fail(self, error: DilocoError) -> None:
        """No further answer will come."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self._answers.put_nowait(error)

    async def answer(self, kind: type[T], limit_s: float) -> T:
        """The next answer, which must be of a kind. Raises PeerError."""
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._answers.get()
        except TimeoutError:
            raise LinkLost(f"{self.peer} said nothing for {limit_s:.0f} s ({kind.__name__} was due)") from None
        if isinstance(answer, DilocoError):
            raise answer
        if isinstance(answer, msg.MeasurementDeclined):
            raise PeerError(f"{self.peer} can't: {escaped(answer.reason)}")
        if not isinstance(answer, kind):
            raise PeerError(f"{self.peer} said {type(answer).__name__}; expected {kind.__name__}")
        return answer


class MeasurementRequester:
    """The exchanges with peers that were requested to measure."""

    def __init__(self, transport: GrpcTransport, receivers: ProbeReceivers, executor: Executor) -> None:
        self._transport = transport
        self._receivers = receivers
        self._executor = executor
        self.exchanges: dict[tuple[str, int], Exchange] = {}

    @contextlib.asynccontextmanager
    async def _exchange(self, peer: str, measurement: int) -> AsyncIterator[Exchange]:
        """A conversation; when it breaks off here the peer is told to stop."""
        exchange = self.exchanges[peer, measurement] = Exchange(peer, measurement)
        try:
            yield exchange
        except BaseException:
            self._transport.send(peer, msg.MeasurementStopped(measurement))
            raise
        finally:
            del self.exchanges[peer, measurement]

    def take_answer(self, peer: str, measurement: int, message: MeasureMessage) -> None:
        """A peer answered. Raises ProtocolViolation: more answers than were requested."""
        exchange = self.exchanges.get((peer, measurement))
        if exchange is not None:  # else it is late: nobody waits any more
            exchange.take(message)

    def link_lost(self, peer: str) -> None:
        """The link is down: exchanges over it are over."""
        for key, exchange in self.exchanges.items():
            if key[0] == peer:
                exchange.fail(LinkLost(f"the link to {peer} went down in the middle of a measurement"))

    async def remote_link(self, source: str, request: msg.LinkTestRequested) -> msg.LinkMeasured:
        """Let a peer measure from there to a third region. Raises PeerError."""
        measured_s = (request.probes_ns + msg.WARM_UP_NS_MAX + request.span_ns) / NS_PER_S
        limit_s = measured_s + START_S + LATE_S + SENDER_GRACE_S + 2 * REPLY_S
        async with self._exchange(source, request.measurement) as exchange:
            self._transport.send(source, request)
            return await exchange.answer(msg.LinkMeasured, limit_s)

    async def flow(self, peer: str, request: msg.MeasurementRequested) -> FlowMeasured:
        """Fill the measurement lane one way, and count at the far end. Raises PeerError."""
        limit_s = (request.warm_up_ns + request.span_ns) / NS_PER_S + START_S + LATE_S + REPLY_S
        async with contextlib.AsyncExitStack() as stack:
            exchange = await stack.enter_async_context(self._exchange(peer, request.measurement))
            if request.is_requester_sending:
                body = await make_body(self._executor)
                await self._until_ready(exchange, request)
                return await self._out(exchange, ProbeSender(self._transport, peer, request, body), limit_s)
            receiver = stack.enter_context(self._receivers.receiver(peer, request))
            await self._until_ready(exchange, request)
            return await self._in(exchange, receiver, limit_s + SENDER_GRACE_S)

    async def _until_ready(self, exchange: Exchange, request: msg.MeasurementRequested) -> None:
        self._transport.send(exchange.peer, request)
        await exchange.answer(msg.MeasurementReady, REPLY_S + BODY_MADE_S)

    async def _out(self, exchange: Exchange, sender: ProbeSender, limit_s: float) -> FlowMeasured:
        sending = asyncio.create_task(sender.run(), name=f"measurement to {exchange.peer}")
        report = asyncio.create_task(exchange.answer(msg.MeasurementReceived, limit_s))
        async with ending(sending, report):
            await asyncio.wait([sending, report], return_when=asyncio.FIRST_COMPLETED)
            if not report.done():
                await asyncio.wait([report], timeout=REASON_S)
            if not report.done():
                sending.result()  # it ends before only by failing
            arrival = await report
            sender.stop()
            return FlowMeasured(arrival, await sending, sender.used_bytes)

    async def _in(self, exchange: Exchange, receiver: ProbeReceiver, limit_s: float) -> FlowMeasured:
        peer, measurement = exchange.peer, exchange.measurement
        receiving = asyncio.create_task(receiver.run(), name=f"measurement from {peer}")
        report = asyncio.create_task(exchange.answer(msg.MeasurementSent, limit_s))
        async with ending(receiving, report):
            await asyncio.wait([receiving, report], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                report.result()  # the sender has failed, and says why
                raise LinkLost(f"{peer} ended a measurement by itself")
            arrival = receiving.result()
            self._transport.send(peer, msg.MeasurementStopped(measurement))
            return FlowMeasured(arrival, await report, receiver.used_bytes)


def new_measurement() -> int:
    """A number that no other measurement has."""
    return secrets.randbits(62)


def new_flow(is_sending: bool, *, warm_up_ns: int, span_ns: int, bytes_max: int) -> msg.MeasurementRequested:
    """The request for one flow to a peer, or from there."""
    return msg.MeasurementRequested(new_measurement(), is_sending, warm_up_ns, span_ns, bytes_max)
