"""Stripes on their way to other regions, so that what nobody needs any more does not take the link from what they do.

A peer that is slower than the rounds would otherwise make stripes pile up in memory, each with the one before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import structlog

from diloco_node.core.events import Event, Note
from diloco_node.core.messages import BulkHeader, ContributionStripe, MergedStripe, Message
from diloco_node.core.types import Ballot
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.work import Spawn
from diloco_node.errors import LinkLost, PeerError
from diloco_node.numeric import U8
from diloco_node.storage.store import RegionStore

log = structlog.get_logger()


class Transport(Protocol):
    """The links to the other regions, as the effects need them."""

    def send(self, peer: str, message: Message) -> bool:
        """Queue a control message; False if it was dropped, for the link is down or its queue is full."""

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """Stream a body; returns when the link has its last chunk. Raises LinkLost: it is, or went, down."""

    def reject(self, peer: str, error: PeerError) -> None:
        """Count a fault of a peer. Faults that no honest process makes are strikes; three shut the peer out."""


@dataclass(slots=True, kw_only=True)
class EffectContext:
    """Parts of the daemon that all effects work with. pool: threads for sums. files: threads that wait for the disk."""

    parameters: Parameters
    store: RegionStore
    pool: Executor
    files: Executor
    post: Callable[[Event], None]
    note: Callable[[Note], None]
    spawn: Spawn


class Sending:
    """Starts transfers of stripes and gives up those that are void. All methods run on the event loop."""

    def __init__(self, transport: Transport, spawn: Spawn) -> None:
        self._transport = transport
        self._spawn = spawn
        self._tasks: dict[asyncio.Task[None], ContributionStripe | MergedStripe] = {}

    def send(self, peer: str, header: ContributionStripe | MergedStripe, body: U8) -> None:
        """Stream a stripe to a peer; lost with the link. body: shape (bytes,), uint8; nobody may change it any more."""
        task = self._spawn(self._stream(peer, header, body), f"{type(header).__name__} to {peer}")
        self._tasks[task] = header
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    def drop_earlier_ballots(self, fragment: int, ballot: Ballot) -> None:
        """A later ballot asks for the contribution: what is left of it for ballots before comes too late."""
        self._give_up(
            lambda header: (
                isinstance(header, ContributionStripe)
                and header.contribution.fragment == fragment
                and header.ballot < ballot
            )
        )

    def drop_ballot(self, ballot: Ballot) -> None:
        """Nobody applies what this ballot merged."""
        self._give_up(lambda header: isinstance(header, MergedStripe) and header.ballot == ballot)

    def drop_older_rounds(self, fragment: int, version: int) -> None:
        """A round committed. Its own stripes go on, for slower regions wait for them; those of rounds before are void.

        A region that still lacks those fetches the payload when it gets there, from whoever is best reached.
        """

        def is_void(header: ContributionStripe | MergedStripe) -> bool:
            place = header if isinstance(header, MergedStripe) else header.contribution
            return place.fragment == fragment and header.version < version

        self._give_up(is_void)

    def _give_up(self, is_void: Callable[[ContributionStripe | MergedStripe], bool]) -> None:
        for task, header in list(self._tasks.items()):
            if is_void(header):
                task.cancel()

    async def _stream(self, peer: str, header: ContributionStripe | MergedStripe, body: U8) -> None:
        try:
            await self._transport.transfer(peer, header, body.data.cast("B"))
        except LinkLost as error:
            log.info("transfer lost", peer=peer, transfer=type(header).__name__, reason=str(error))
