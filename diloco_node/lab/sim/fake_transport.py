"""The links of one simulated daemon: `daemon.effects.sending.Transport` over the fake network, and its receiving half.

A transfer takes as long as the link's rate asks for. If the link goes down, the sender gives it up, or the network
breaks it, the receiver hears that it is not whole. Control messages are dropped while the link is down, and when the
queue of a link is full.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from diloco_node.core.messages import BulkHeader, Message, Payload, State
from diloco_node.errors import LinkLost, PeerError
from diloco_node.lab.sim.world import MS, SECOND, Life
from diloco_node.wire.envelope import TransferBegin, decode_bulk, encode_begin, encode_control
from diloco_node.wire.measure_messages import Probe

if TYPE_CHECKING:
    from diloco_node.lab.sim.daemon_host import DaemonHost

WATCH_NS = 500 * MS
"""So long after a sender has died, or lost its end of a connection, the receiver sees that its transfer broke."""

NUMBERS_PER_LIFE = 1_000_000
"""The numbers of a daemon's transfers differ from those of the daemons before it."""

RETRY_NS = 100 * MS
"""While a direction is cut, or does not let so much through, what is on the way is sent again so often."""


@dataclass(slots=True, eq=False)
class OutgoingBody:
    """A body on its way.

    Attributes:
        gate: done when the last byte has left, or the link is lost.
        link: which connection it is on, counted at the sender.
        is_lost: the connection is gone. has_begun: its beginning has reached the receiver, so its end may.
    """

    header: BulkHeader
    body: memoryview
    gate: asyncio.Future[None]
    link: int
    is_lost: bool = False
    has_begun: bool = False


class FakeTransport:
    """Links of a daemon."""

    def __init__(self, host: DaemonHost, life: Life, lives: int) -> None:
        self._host = host
        self._life = life
        self._network = host.network
        self._world = host.world
        self._up: dict[str, int] = {}
        self._links = 0
        self._numbers = lives * NUMBERS_PER_LIFE
        self._turns: dict[tuple[str, bool], asyncio.Lock] = {}
        self._outgoing: dict[int, tuple[str, OutgoingBody]] = {}
        # Transfers that have begun here, and where their bytes go; None: nobody wants them.
        self._incoming: dict[tuple[str, int], tuple[BulkHeader, memoryview | None]] = {}

    def send(self, peer: str, message: Message) -> bool:
        """See Transport."""
        if peer not in self._up:
            return False
        if self._host.drop_chance and self._world.rng.random() < self._host.drop_chance:
            self._network.dropped += 1
            return False
        self._network.send(self._host.name, peer, encode_control(message))
        return True

    async def transfer(self, peer: str, header: BulkHeader, body: memoryview) -> None:
        """See Transport. Each lane has a single transfer at a time: rounds, and recovery."""
        lane = (peer, isinstance(header, (Payload, State)))
        async with self._turns.setdefault(lane, asyncio.Lock()):
            if peer not in self._up:
                raise LinkLost(f"{peer}: down")
            self._numbers += 1
            number = self._numbers
            transfer = OutgoingBody(header, body, asyncio.get_running_loop().create_future(), self._up[peer])
            self._outgoing[number] = (peer, transfer)
            try:
                self._begin(peer, number, transfer)
                await transfer.gate
            except asyncio.CancelledError:
                self._carry(peer, number, transfer, is_whole=False)
                raise
            finally:
                del self._outgoing[number]

    def reject(self, peer: str, error: PeerError) -> None:
        """See Transport. All regions with the daemon's effects are honest here (`run.simulate`)."""
        self._host.complain(f"strikes {peer}, which is honest: {error}")

    def _begin(self, peer: str, number: int, transfer: OutgoingBody) -> None:
        link = self._network.links[self._host.name, peer]
        frame = encode_begin(number, transfer.header, transfer.body.nbytes)
        spoil = self._network.bulk_spoilers.get(self._host.name)
        if spoil is not None:
            frame, body = spoil(peer, frame, bytes(transfer.body))
            transfer.body = memoryview(body)
        takes_ns = transfer.body.nbytes * SECOND // link.rate_bytes_per_s
        start_ns = max(link.free_at_ns, self._world.now_ns)
        link.free_at_ns = start_ns + takes_ns
        wait_ns = link.free_at_ns - self._world.now_ns
        self._deliver(peer, start_ns - self._world.now_ns + link.delay_ns, transfer, "transfer_begun", number, frame)
        life = self._network.places[peer].daemon_life
        if life is not None:
            self._world.after(WATCH_NS, life, self._watch, life, peer, number, transfer)
        if self._world.rng.random() < max(link.loss, self._host.break_chance):
            self._network.dropped += 1
            loss = LinkLost(f"{peer}: broke off")
            self._host.after(self._world.draw_ns(0, wait_ns), self._end, peer, number, loss)
        else:
            self._host.after(wait_ns, self._end, peer, number, None)

    def _watch(self, life: Life, peer: str, number: int, transfer: OutgoingBody) -> None:
        """At the receiver: whether the sender is still there."""
        if self._life.is_over or transfer.is_lost:
            place = cast("DaemonHost", self._network.places[peer])
            place.transfer_ended(self._host.name, number, None)
        elif number in self._outgoing:
            self._world.after(WATCH_NS, life, self._watch, life, peer, number, transfer)

    def _end(self, peer: str, number: int, error: LinkLost | None) -> None:
        """The last byte leaves, or the network breaks it half-way, if it has not been given up."""
        if number in self._outgoing:
            transfer = self._outgoing[number][1]
            self._carry(peer, number, transfer, is_whole=error is None)
            self._host.loop.enter(_open, transfer.gate, error)

    def _carry(self, peer: str, number: int, transfer: OutgoingBody, *, is_whole: bool) -> None:
        link = self._network.links[self._host.name, peer]
        delay_ns = link.delay_ns + self._world.rng.randint(0, link.jitter_ns)
        body = bytes(transfer.body) if is_whole else None
        self._deliver(peer, delay_ns, transfer, "transfer_ended", number, body)

    def _deliver(self, peer: str, delay_ns: int, transfer: OutgoingBody, method: str, *args: object) -> None:
        life = self._network.places[peer].daemon_life
        if life is not None:
            self._world.after(delay_ns, life, self._arrive, peer, transfer, method, args)

    def _arrive(self, peer: str, transfer: OutgoingBody, method: str, args: tuple[object, ...]) -> None:
        """At the receiver, unless the connection it came on is gone; what meets a cut, or overtakes, waits."""
        if self._life.is_over or self._up.get(peer) != transfer.link:
            return
        is_early = method == "transfer_ended" and not transfer.has_begun
        link = self._network.links[self._host.name, peer]
        is_stuck = link.cuts or link.bulk_cuts or 0 < link.bulk_bytes_max < transfer.body.nbytes
        if is_stuck or is_early:
            self._deliver(peer, RETRY_NS, transfer, method, *args)
            return
        transfer.has_begun = True
        getattr(self._network.places[peer], method)(self._host.name, *args)

    def begun(self, peer: str, number: int, frame: bytes) -> None:
        """A transfer begins."""
        begin = decode_bulk(frame)
        assert isinstance(begin, TransferBegin)
        assert not isinstance(begin.header, Probe)
        self._world.note(self._host.name, begin.header, frame)
        if peer in self._up:
            buffer = self._host.hands.transfer_opened(peer, begin.header, begin.raw_bytes)
            self._incoming[peer, number] = (begin.header, buffer)

    def ended(self, peer: str, number: int, body: bytes | None) -> None:
        """A transfer is whole, or (no body) broke off."""
        header, buffer = self._incoming.pop((peer, number), (None, None))
        if header is None or buffer is None:
            return
        if body is not None:
            buffer[:] = body
        self._host.hands.transfer_closed(peer, header, buffer, is_whole=body is not None)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """The connection came up or went down: what was on it breaks."""
        if is_up:
            self._links += 1
            self._up[peer] = self._links
        else:
            self._up.pop(peer, None)
            for _, transfer in [entry for entry in self._outgoing.values() if entry[0] == peer]:
                transfer.is_lost = True
                _open(transfer.gate, LinkLost(f"{peer}: link lost"))
            for key in sorted(key for key in self._incoming if key[0] == peer):
                self.ended(*key, None)
        self._host.hands.link_changed(peer, is_up=is_up)


def _open(gate: asyncio.Future[None], error: LinkLost | None) -> None:
    if gate.done():
        return
    if error is None:
        gate.set_result(None)
    else:
        gate.set_exception(error)
