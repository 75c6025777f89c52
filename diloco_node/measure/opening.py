"""How the two ends of a measurement come to connections of its own: who waits for them, who dials, who says so when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from diloco_node.adapters.aside_ends import Aside
from diloco_node.adapters.asides import JOIN_S, Asides, Door
from diloco_node.core import measuring as msg
from diloco_node.core.messages import Message
from diloco_node.errors import PeerError
from diloco_node.measure.exchange import T, Talk, ended


class Opens(Protocol):
    """What this needs of `GrpcTransport`."""

    @property
    def asides(self) -> Asides:
        """Connections beside those of the links."""
        ...

    def send(self, peer: str, message: Message) -> bool:
        """Queue a control message; False if it was dropped."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """Connections that are about to be opened for a flow: how long they live, and where they come in, if here."""

    stack: contextlib.AsyncExitStack
    door: Door | None


async def come_together(
    transport: Opens, peer: str, asked: msg.MeasurementAsked, stack: contextlib.AsyncExitStack
) -> Aside | None:
    """Say that we are ready, and have the connections that the asker wants; None: those of the link.

    Raises:
        PeerError: they can't be had.
    """
    asides = transport.asides
    if not asked.connections or asked.aside is not None:
        aside = None
        if asked.aside is not None:
            aside = await stack.enter_async_context(asides.dialed(peer, asked, asked.aside))
        transport.send(peer, msg.MeasurementReady(asked.measurement, None))
        return aside
    door = await stack.enter_async_context(asides.door(peer, asked))
    transport.send(peer, msg.MeasurementReady(asked.measurement, door.open))
    return await stack.enter_async_context(asides.come_in(door))


async def open_aside(
    transport: Opens, talk: Talk, asked: msg.MeasurementAsked, opening: Opening, limit_s: float
) -> Aside | None:
    """Wait until the peer is ready, and have the connections that we want; None: those of the link.

    Raises:
        PeersUnreachable: its port for plain TCP can't be reached. PeerError: it says no, or they can't be had.
    """
    ready = await talk.answer(msg.MeasurementReady, limit_s + (JOIN_S if asked.connections else 0))
    if not asked.connections:
        return None
    asides = transport.asides
    if opening.door is not None:
        return await opening.stack.enter_async_context(asides.come_in(opening.door))
    if ready.aside is None:
        raise PeerError(f"{talk.peer} does not say where connections of a measurement may come in")
    msg.check_aside(ready.aside, asked)
    return await opening.stack.enter_async_context(asides.dialed(talk.peer, asked, ready.aside))


async def first_of(receiving: Coroutine[Any, Any, T], reading: asyncio.Task[None]) -> T:
    """What was received; or why reading has ended before."""
    task = asyncio.create_task(receiving)
    async with ended(task):
        await asyncio.wait([task, reading], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            reading.result()
        return await task
