"""Does the measurements that peers ask this region for, one at a time, and tells them what came of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final

from diloco_node.adapters.flows import FlowTimes
from diloco_node.adapters.probe import warm_up_ns
from diloco_node.core import measuring as msg
from diloco_node.core.measuring import NS_PER_S, MeasuringMessage
from diloco_node.errors import ConfigError, DilocoError, ProtocolViolation
from diloco_node.measure.asking import AskingPeers, FlowWanted
from diloco_node.measure.echoes import EchoProbe
from diloco_node.measure.ends import LocalEnds, told
from diloco_node.measure.exchange import ended
from diloco_node.measure.measured_links import MeasuredLinks, MeasuringTransport
from diloco_node.measure.opening import come_together, first_of
from diloco_node.measure.probes import SendingEnd

REASON_CHARS_MAX: Final = 500

LINGER_S: Final = 5.0
"""Connections of a measurement stay open so long for the sender to hear that it is over, and close them."""


class FarLink:
    """Measures the link from here to a third region."""

    def __init__(self, peers: tuple[str, ...], links: MeasuredLinks, echoes: EchoProbe, asking: AskingPeers) -> None:
        self._peers = peers
        self._links = links
        self._echoes = echoes
        self._asking = asking

    async def measure(self, asked: msg.LinkAsked, serving: _Serving) -> msg.LinkTold:
        """Echoes, a flow, one over plain TCP if asked for; `serving` learns the bytes. Raises DilocoError."""
        if asked.region not in self._peers:
            raise ConfigError(f"{asked.region} is no peer of {self._links.region}")
        self._links.check(asked.region)
        serving.used_bytes = msg.all_bytes_max(asked)  # if it fails nobody knows how much of it went out
        echoes = (await self._echoes.measure(asked.region, asked.probes_ns / NS_PER_S)).latency
        times = FlowTimes(asked.warm_up_ns or warm_up_ns(echoes.p50_ns), asked.span_ns)
        flow = await self._asking.flow(FlowWanted(asked.region, True, False, times, asked.bytes_max))
        plain, plain_error = 0, ""
        if asked.is_plain_too:
            try:
                beside = await self._asking.flow(
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


class MeasurementsForPeers:
    """See the module. `gate` says what may run; `far_link` does what is asked about a third region."""

    def __init__(
        self,
        *,
        transport: MeasuringTransport,
        gate: msg.MeasuringGate,
        ends: LocalEnds,
        far_link: FarLink,
        spawn: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
        now_ns: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._gate = gate
        self._ends = ends
        self._far_link = far_link
        self._spawn = spawn
        self._now_ns = now_ns
        self._sending: dict[tuple[str, int], SendingEnd] = {}
        self._serving: dict[tuple[str, int], asyncio.Task[None]] = {}

    def begin(self, peer: str, asked: msg.MeasurementAsked | msg.LinkAsked) -> None:
        """A peer asks. Raises ProtocolViolation: for more than the limits, or twice for the same."""
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
            self._transport.send(peer, msg.MeasurementDeclined(asked.measurement, _cut(reason)))
            return
        task = self._spawn(self._serve(peer, asked), f"measurement for {peer}")
        self._serving[key] = task
        task.add_done_callback(lambda _: self._serving.pop(key, None))

    def stop(self, peer: str, measurement: int) -> None:
        """A peer has enough, or gives up."""
        end, task = self._sending.get((peer, measurement)), self._serving.get((peer, measurement))
        if end is not None:
            end.stop()
        elif task is not None:
            task.cancel()

    def link_lost(self, peer: str) -> None:
        """The link is down: nobody waits for what is found."""
        for key, task in self._serving.items():
            if key[0] == peer:
                task.cancel()

    async def _serve(self, peer: str, asked: msg.MeasurementAsked | msg.LinkAsked) -> None:
        """Do what a peer asked for, and tell it; what goes wrong is told, too."""
        serving = _Serving()
        answer: MeasuringMessage
        async with serving.stack:
            try:
                if isinstance(asked, msg.LinkAsked):
                    answer = await self._far_link.measure(asked, serving)
                elif asked.is_asker_sending:
                    answer = await self._receive(peer, asked, serving)
                else:
                    answer = await self._send(peer, asked, serving)
            except DilocoError as error:
                answer = msg.MeasurementDeclined(asked.measurement, _cut(str(error)))
            finally:
                # Before the answer: the peer may ask for the next one at once.
                self._gate.end(used_bytes=serving.used_bytes)
            self._transport.send(peer, answer)
            if serving.reading is not None:  # until it knows, the peer sends: it must not find its connections broken
                await asyncio.wait([serving.reading], timeout=LINGER_S)

    async def _receive(self, peer: str, asked: msg.MeasurementAsked, serving: _Serving) -> msg.MeasurementReceived:
        with self._ends.receiving(peer, asked) as end:
            try:
                aside = await come_together(self._transport, peer, asked, serving.stack)
                if aside is None:
                    return await end.run()
                serving.reading = asyncio.create_task(self._ends.read(peer, aside), name=f"measurement from {peer}")
                await serving.stack.enter_async_context(ended(serving.reading))
                return await first_of(end.run(), serving.reading)
            finally:
                serving.used_bytes = end.used_bytes

    async def _send(self, peer: str, asked: msg.MeasurementAsked, serving: _Serving) -> msg.MeasurementSent:
        body = await self._ends.body(asked)
        key = (peer, asked.measurement)
        end = self._ends.sending(peer, asked, body, await come_together(self._transport, peer, asked, serving.stack))
        self._sending[key] = end
        try:
            return told(asked.measurement, await end.run())
        finally:
            serving.used_bytes = end.used_bytes
            del self._sending[key]


class _Serving:
    """What a peer asked for, while it is done.

    Attributes:
        used_bytes: that flowed. stack: what lives as long. reading: takes what arrives beside the link.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.stack = contextlib.AsyncExitStack()
        self.reading: asyncio.Task[None] | None = None


def _cut(text: str) -> str:
    return text[:REASON_CHARS_MAX]
