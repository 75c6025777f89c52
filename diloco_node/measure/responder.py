"""Does the measurements that peers ask this end for, one at a time, and reports what came of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from diloco_node.errors import DilocoError, PeerError, ProtocolViolation
from diloco_node.measure.exchange import ended
from diloco_node.measure.gate import MeasuringGate
from diloco_node.measure.plain import PlainConnections, PlainListener, listening
from diloco_node.measure.probes import ProbeReceiver, ProbeReceivers, ProbeSender, booked_bytes, make_body
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import measure_messages as msg
from diloco_node.wire.measure_messages import MeasureMessage

REASON_CHARS_MAX: Final = 500

SERVING_MAX: Final = 3
"""Measurements of one peer whose plain connections are still open: each takes descriptors, and it closes them."""

LINGER_S: Final = 5.0
"""Plain connections stay open so long for the sender to be told that it is over, and to close them."""

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
RemoteLink = Callable[[msg.LinkTestRequested], Awaitable[tuple[msg.LinkMeasured, int]]]
"""Measures from here to a third region; returns also the bytes that flowed. Raises DilocoError."""


@dataclass(slots=True)
class _Serving:
    """A peer's request, while it is carried out.

    Attributes:
        used_bytes: that flowed. is_admitted: the gate has not been told of its end yet.
        stack: what lives as long. reading: takes what arrives over plain connections.
    """

    used_bytes: int = 0
    is_admitted: bool = True
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    reading: asyncio.Task[None] | None = None


class MeasurementResponder:
    """See the module.

    Args:
        transport: the links. gate: says what may run. receivers: those that are here. remote_link: see RemoteLink.
        plain_listen: host and port (0: a free one) for plain TCP; None: this end takes none.
        spawn: runs a task. executor: makes what is sent. now_ns: monotonic.
    """

    def __init__(
        self,
        *,
        transport: GrpcTransport,
        gate: MeasuringGate,
        receivers: ProbeReceivers,
        remote_link: RemoteLink,
        plain_listen: tuple[str, int] | None,
        spawn: Spawn,
        executor: Executor,
        now_ns: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._gate = gate
        self._receivers = receivers
        self._remote_link = remote_link
        self._plain_listen = plain_listen
        self._spawn = spawn
        self._executor = executor
        self._now_ns = now_ns
        self._senders: dict[tuple[str, int], ProbeSender] = {}
        self._serving: dict[tuple[str, int], asyncio.Task[None]] = {}

    def begin(self, peer: str, request: msg.MeasurementRequested | msg.LinkTestRequested) -> None:
        """A peer asks. Raises ProtocolViolation: for more than the limits, or twice for the same."""
        msg.check_request(request, is_daemon=self._gate.is_bounded)
        key = (peer, request.measurement)
        if key in self._serving:
            raise ProtocolViolation(f"{peer} asks twice for measurement {request.measurement}")
        if sum(name == peer for name, _ in self._serving) >= SERVING_MAX:
            reason = f"connections of {SERVING_MAX} measurements of {peer} are open: close them"
            self._transport.send(peer, msg.MeasurementDeclined(request.measurement, reason))
            return
        if isinstance(request, msg.LinkTestRequested):
            what = f"the link to {request.region}"
        else:
            what = f"bandwidth {'from' if request.is_requester_sending else 'to'} {peer}"
        reason = self._gate.begin(what, requester=peer, bytes_max=msg.all_bytes_max(request), now_ns=self._now_ns())
        if reason:
            self._transport.send(peer, msg.MeasurementDeclined(request.measurement, reason[:REASON_CHARS_MAX]))
            return
        serving = _Serving()

        def is_over(_: asyncio.Task[None]) -> None:
            del self._serving[key]
            self._release(serving)  # a task that is cancelled before its first step runs nothing of its own

        task = self._serving[key] = self._spawn(self._serve(peer, request, serving), f"measurement for {peer}")
        task.add_done_callback(is_over)

    def stop(self, peer: str, measurement: int) -> None:
        """A peer has enough, or gives up."""
        sender, task = self._senders.get((peer, measurement)), self._serving.get((peer, measurement))
        if sender is not None:
            sender.stop()
        elif task is not None:
            task.cancel()

    def link_lost(self, peer: str) -> None:
        """The link is down: nobody waits for what is found."""
        for key, task in self._serving.items():
            if key[0] == peer:
                task.cancel()

    def _release(self, serving: _Serving) -> None:
        if serving.is_admitted:
            serving.is_admitted = False
            self._gate.end(used_bytes=serving.used_bytes)

    async def _serve(
        self, peer: str, request: msg.MeasurementRequested | msg.LinkTestRequested, serving: _Serving
    ) -> None:
        """Do what a peer asked for, and report it; what goes wrong is reported, too."""
        answer: MeasureMessage
        async with serving.stack:
            try:
                if isinstance(request, msg.LinkTestRequested):
                    serving.used_bytes = msg.all_bytes_max(request)  # if it fails nobody knows how much of it went out
                    answer, serving.used_bytes = await self._remote_link(request)
                elif request.is_requester_sending:
                    answer = await self._receive(peer, request, serving)
                else:
                    answer = await self._send(peer, request, serving)
            except DilocoError as error:
                answer = msg.MeasurementDeclined(request.measurement, str(error)[:REASON_CHARS_MAX])
            finally:
                # Before the answer: the peer may ask for the next one at once.
                self._release(serving)
            self._transport.send(peer, answer)
            if serving.reading is not None:  # until it knows, the peer sends: it must not find its connections broken
                await asyncio.wait([serving.reading], timeout=LINGER_S)

    async def _come_together(
        self, peer: str, request: msg.MeasurementRequested, serving: _Serving
    ) -> PlainConnections | None:
        """Tell the requester that we are ready; the plain connections that it requested. Raises PeerError."""
        listener: PlainListener | None = None
        if request.plain_connections:
            if self._plain_listen is None:
                raise PeerError("it takes no plain TCP: only `measure serve` does, without --no-plain")
            coming = listening(peer, *self._plain_listen, request.plain_connections)
            listener = await serving.stack.enter_async_context(coming)
        where = listener.where if listener is not None else None
        self._transport.send(peer, msg.MeasurementReady(request.measurement, where))
        return await listener.joined() if listener is not None else None

    async def _receive(
        self, peer: str, request: msg.MeasurementRequested, serving: _Serving
    ) -> msg.MeasurementReceived:
        with self._receivers.receiver(peer, request) as receiver:
            try:
                plain = await self._come_together(peer, request, serving)
                return await (receiver.run() if plain is None else self._read(peer, request, receiver, plain, serving))
            finally:
                serving.used_bytes = receiver.used_bytes

    async def _read(
        self,
        peer: str,
        request: msg.MeasurementRequested,
        receiver: ProbeReceiver,
        plain: PlainConnections,
        serving: _Serving,
    ) -> msg.MeasurementReceived:
        """What was received over plain connections; or why reading them has ended before. Raises PeerError."""
        arrived = partial(self._receivers.plain_arrived, peer, request.measurement)
        reading = serving.reading = asyncio.create_task(plain.receive(arrived), name=f"measurement from {peer}")
        await serving.stack.enter_async_context(ended(reading))
        receiving = asyncio.create_task(receiver.run())
        async with ended(receiving):
            await asyncio.wait([receiving, reading], return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                error = reading.exception()
                if isinstance(error, ProtocolViolation):
                    self._transport.reject(peer, error)
                reading.result()
            return await receiving

    async def _send(self, peer: str, request: msg.MeasurementRequested, serving: _Serving) -> msg.MeasurementSent:
        body = await make_body(self._executor, is_compressible=request.is_compressible)
        bulk = await self._come_together(peer, request, serving) or self._transport
        sender = ProbeSender(bulk, peer, request, body, partial(booked_bytes, self._transport, peer))
        self._senders[peer, request.measurement] = sender
        try:
            return await sender.run()
        finally:
            serving.used_bytes = sender.used_bytes
            del self._senders[peer, request.measurement]
