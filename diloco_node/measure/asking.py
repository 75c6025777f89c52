"""What this region asks peers to measure: flows from here or to here, and links from there to a third region."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Final

from diloco_node.adapters.asides import JOIN_S
from diloco_node.adapters.flows import FlowTimes
from diloco_node.core import measuring as msg
from diloco_node.core.measuring import NS_PER_S, MeasuringMessage
from diloco_node.errors import LinkLost
from diloco_node.measure.ends import LocalEnds, told
from diloco_node.measure.exchange import Talk, ended
from diloco_node.measure.measured_links import MeasuringTransport
from diloco_node.measure.opening import Opening, open_aside
from diloco_node.measure.probes import LATE_S, SENDER_GRACE_S, START_S

ANSWER_S: Final = 10.0
BODY_MADE_S: Final = 10.0
"""A busy machine takes so long to make what is sent."""

REASON_S: Final = 1.0
"""When connections of a measurement break, the peer may be about to say why."""


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


class AskingPeers:
    """The talks with peers that are to measure. `ends`: those of the flows that are here."""

    def __init__(self, transport: MeasuringTransport, ends: LocalEnds) -> None:
        self._transport = transport
        self._ends = ends
        self._talks: dict[tuple[str, int], Talk] = {}

    # ---- talks -------------------------------------------------------------------------------------------------------

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

    def heard(self, peer: str, measurement: int, message: MeasuringMessage) -> None:
        """A peer answered. Raises ProtocolViolation: it says more than it was asked."""
        talk = self._talks.get((peer, measurement))
        if talk is not None:  # else it is late: nobody waits any more
            talk.heard(message)

    def link_lost(self, peer: str) -> None:
        """The link is down: talks over it are over."""
        for key, talk in self._talks.items():
            if key[0] == peer:
                talk.fail(LinkLost(f"the link to {peer} went down in the middle of a measurement"))

    # ---- links of others ---------------------------------------------------------------------------------------------

    async def far_link(self, source: str, asked: msg.LinkAsked) -> msg.LinkTold:
        """Let a peer measure from there to a third region. Raises PeerError."""
        flow_s = (msg.WARM_UP_NS_MAX + asked.span_ns) / NS_PER_S + START_S + LATE_S + SENDER_GRACE_S + 2 * ANSWER_S
        limit_s = asked.probes_ns / NS_PER_S + flow_s + (flow_s + JOIN_S if asked.is_plain_too else 0)
        async with self._talk(source, asked.measurement) as talk:
            self._transport.send(source, asked)
            return await talk.answer(msg.LinkTold, limit_s)

    # ---- flows -------------------------------------------------------------------------------------------------------

    async def flow(self, wanted: FlowWanted) -> FlowOverLink:
        """Fill the measurement lane one way, and count at the far end. Raises PeerError."""
        times = wanted.times
        asked = msg.MeasurementAsked(
            new_measurement(),
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
                    return await self._out(talk, asked, limit_s, Opening(stack, door))
                return await self._in(talk, asked, limit_s, Opening(stack, door))

    async def _out(self, talk: Talk, asked: msg.MeasurementAsked, limit_s: float, opening: Opening) -> FlowOverLink:
        body = await self._ends.body(asked)
        self._transport.send(talk.peer, asked)
        end = self._ends.sending(
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
            return FlowOverLink(received, told(asked.measurement, await sending), end.used_bytes)

    async def _in(self, talk: Talk, asked: msg.MeasurementAsked, limit_s: float, opening: Opening) -> FlowOverLink:
        with self._ends.receiving(talk.peer, asked) as end:
            self._transport.send(talk.peer, asked)
            aside = await open_aside(self._transport, talk, asked, opening, ANSWER_S + BODY_MADE_S)
            tasks: list[asyncio.Task[Any]] = []
            if aside is not None:
                tasks.append(
                    asyncio.create_task(self._ends.read(talk.peer, aside), name=f"measurement from {talk.peer}")
                )
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


def new_measurement() -> int:
    """A number that no other measurement has."""
    return secrets.randbits(62)
