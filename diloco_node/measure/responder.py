"""Does the measurements that peers ask this end for, one at a time, and reports what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_node.errors import DilocoError, ProtocolViolation
from diloco_node.measure.gate import MeasuringGate
from diloco_node.measure.probes import ProbeReceivers, ProbeSender, make_body
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import measure_messages as msg
from diloco_node.wire.measure_messages import MeasureMessage

REASON_CHARS_MAX: Final = 500

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
RemoteLink = Callable[[msg.LinkTestRequested], Awaitable[tuple[msg.LinkMeasured, int]]]
"""Measures from here to a third region; returns also the bytes that flowed. Raises DilocoError."""


@dataclass(slots=True)
class _Serving:
    """A peer's request, while it is carried out. is_admitted: the gate has not been told of its end yet."""

    used_bytes: int = 0
    is_admitted: bool = True


@dataclass(kw_only=True, slots=True)
class MeasurementResponder:
    """The end of a measurement that answers."""

    transport: GrpcTransport
    gate: MeasuringGate
    receivers: ProbeReceivers
    remote_link: RemoteLink
    spawn: Spawn
    executor: Executor
    now_ns: Callable[[], int]
    senders: dict[tuple[str, int], ProbeSender] = field(default_factory=dict)
    serving: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)

    def begin(self, peer: str, request: msg.MeasurementRequested | msg.LinkTestRequested) -> None:
        """A peer asks. Raises ProtocolViolation: for more than the limits, or twice for the same."""
        msg.check_request(request, is_daemon=self.gate.is_bounded)
        key = (peer, request.measurement)
        if key in self.serving:
            raise ProtocolViolation(f"{peer} asks twice for measurement {request.measurement}")
        if isinstance(request, msg.LinkTestRequested):
            purpose = f"the link to {request.region}"
        else:
            purpose = f"bandwidth {'from' if request.is_requester_sending else 'to'} {peer}"
        reason = self.gate.begin(purpose, requester=peer, bytes_max=request.bytes_max, now_ns=self.now_ns())
        if reason:
            self.transport.send(peer, msg.MeasurementDeclined(request.measurement, reason[:REASON_CHARS_MAX]))
            return
        serving = _Serving()

        def is_over(_: asyncio.Task[None]) -> None:
            del self.serving[key]
            self._release(serving)  # a task that is cancelled before its first step runs nothing of its own

        task = self.serving[key] = self.spawn(self._serve(peer, request, serving), f"measurement for {peer}")
        task.add_done_callback(is_over)

    def stop(self, peer: str, measurement: int) -> None:
        """A peer has enough, or gives up."""
        sender, task = self.senders.get((peer, measurement)), self.serving.get((peer, measurement))
        if sender is not None:
            sender.stop()
        elif task is not None:
            task.cancel()

    def link_lost(self, peer: str) -> None:
        """The link is down: nobody waits for what is found."""
        for key, task in self.serving.items():
            if key[0] == peer:
                task.cancel()

    def _release(self, serving: _Serving) -> None:
        if serving.is_admitted:
            serving.is_admitted = False
            self.gate.end(used_bytes=serving.used_bytes)

    async def _serve(
        self, peer: str, request: msg.MeasurementRequested | msg.LinkTestRequested, serving: _Serving
    ) -> None:
        """Do what a peer asked for, and report it; what goes wrong is reported, too."""
        answer: MeasureMessage
        try:
            if isinstance(request, msg.LinkTestRequested):
                serving.used_bytes = request.bytes_max  # if it fails nobody knows how much of it went out
                answer, serving.used_bytes = await self.remote_link(request)
            elif request.is_requester_sending:
                answer = await self._receive(peer, request, serving)
            else:
                answer = await self._send(peer, request, serving)
        except DilocoError as error:
            answer = msg.MeasurementDeclined(request.measurement, str(error)[:REASON_CHARS_MAX])
        finally:
            # Before the answer: the peer may ask for the next one at once.
            self._release(serving)
        self.transport.send(peer, answer)

    async def _receive(
        self, peer: str, request: msg.MeasurementRequested, serving: _Serving
    ) -> msg.MeasurementReceived:
        with self.receivers.receiver(peer, request) as receiver:
            self.transport.send(peer, msg.MeasurementReady(request.measurement))
            try:
                return await receiver.run()
            finally:
                serving.used_bytes = receiver.used_bytes

    async def _send(self, peer: str, request: msg.MeasurementRequested, serving: _Serving) -> msg.MeasurementSent:
        body = await make_body(self.executor)
        self.transport.send(peer, msg.MeasurementReady(request.measurement))
        sender = self.senders[peer, request.measurement] = ProbeSender(self.transport, peer, request, body)
        try:
            return await sender.run()
        finally:
            serving.used_bytes = sender.used_bytes
            del self.senders[peer, request.measurement]
