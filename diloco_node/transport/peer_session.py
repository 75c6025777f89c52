"""The streams of a link while they live: control and the first bulk connection, each with a reader and a writer.

The side that dialed opens more bulk connections when the link is worth them (`pacing.link_stats`), while the
session goes on; one that can't be had is tried again later. Whatever ends first ends all of it, a further connection
too: what it held can't be told from what has arrived. The handler then has its unfinished buffer back, and every
transfer has failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

import structlog

from diloco_node.backoff import Backoff
from diloco_node.errors import LinkLost, PeerError, RateExceeded
from diloco_node.numeric import NS_PER_S
from diloco_node.ticks import to_tick_s
from diloco_node.transport.certificates import Certificate
from diloco_node.transport.credentials import Credentials
from diloco_node.transport.inbound import BulkInbound, TransportHandler
from diloco_node.transport.intake import MESSAGES_PER_S, Intake
from diloco_node.transport.kernel.wire_meter import WireMeter
from diloco_node.transport.outbound import BulkOutbound, ControlQueue
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.streams import DialedStream, Stream, raise_if_cancelled
from diloco_node.wire.envelope import KIND_BEGIN, PING_FRAME, Hello, Lane, TransferBegin, decode_control

_log = structlog.get_logger(part="transport")

BEGIN_KIND: Final = bytes([KIND_BEGIN])

ALIVE_PINGS: Final = 3
"""A peer of which nothing came for so many of its pings may be dead."""


MORE_AGAIN_S_MAX: Final = 600.0
"""Between two tries to open another connection; from `backoff_max_s` on, doubling."""


class Ping:
    """The kind of message that a ping is, for the intake."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Deadlines of a link, in seconds.

    Attributes:
        handshake_s: to connect and finish TLS; hello_s: for the hello on each stream and for the second stream.
        fallback_s: without a session before the side that need not dial does.
        backoff_min_s, backoff_max_s: between two dials, doubling, each drawn from the upper half of its range.
        violation_backoff_s: after the peer broke the protocol.
        ping_s: the control lane sends something at least this often; silent_s: when nothing came, it is lost.
        farewell_s: of a link to a region that was removed from the run. former_s: between two dials of such a region.
        transfer_silent_s: an open transfer of which nothing comes is lost.
    """

    handshake_s: float = 5.0
    hello_s: float = 5.0
    fallback_s: float = 3.0
    backoff_min_s: float = 0.1
    backoff_max_s: float = 5.0
    violation_backoff_s: float = 5.0
    ping_s: float = 1.0
    silent_s: float = 10.0
    farewell_s: float = 5.0
    former_s: float = 60.0
    transfer_silent_s: float = 30.0


@dataclass(slots=True)
class LinkEnvironment:
    """The objects that all links of a transport share.

    Attributes:
        hello: ours, apart from lane, dial and connection; another one once the run has begun.
        is_advertised: the others know where to dial us. meter: read once more before a session's streams are closed.
        connections: how many bulk connections the link to a peer is worth now.
        reject: called with (peer, error) for what is the peer's fault: counts it and logs it.
        superseded: called with (peer, error) when a peer has refused us for a while, for a newer process of ours is
            linked with it, and with (peer, None) when a link to it is up again.
        quarantine_reason: why a peer is shut out now, and for how long; empty when it is not.
        messages_per_s: what a peer may send of one kind of message.
    """

    hello: Hello
    credentials: Credentials
    handler: TransportHandler
    executor: Executor
    times: LinkTimes
    is_advertised: bool
    meter: WireMeter
    pacer: Pacer
    connections: Callable[[str], int]
    reject: Callable[[str, PeerError], None]
    superseded: Callable[[str, PeerError | None], None] = lambda _peer, _error: None
    quarantine_reason: Callable[[str], str] = lambda _peer: ""
    messages_per_s: int = MESSAGES_PER_S


More = Callable[[int], Awaitable[DialedStream]]


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await what must not be given up half-way: a cancellation that comes meanwhile is raised when it is done."""
    task = asyncio.create_task(work, name="to the end")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


def reason_of_end(peer: str, tasks: Iterable[asyncio.Task[None]], dropped: LinkLost | None) -> PeerError:
    """The worst of what ended a session: a violation says more than the lost stream that follows it. Raises Exception:
    a bug of ours. dropped: why it was dropped, or None."""
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, PeerError):
            raise error
    peer_errors = [error for error in errors if isinstance(error, PeerError)]
    peer_errors.sort(key=lambda error: isinstance(error, LinkLost))
    # gRPC cancels a read when its call is torn down under us: nobody says why.
    torn_down = LinkLost(f"{peer}: the connection was torn down")
    return peer_errors[0] if peer_errors else dropped or torn_down


class Session:
    """The streams of one link while they live. `run` once; `drop` and `add` from anywhere.

    streams: of both lanes. own: our certificate, as it was before they were made.
    intake: the same for all sessions with the peer.
    instance: of the peer's process, from its hello. accepted_dial: the peer's number of this session; None: we dialed.
    more: opens the bulk connection of an index, where we dialed; raises PeerError.
    """

    def __init__(
        self,
        peer: str,
        streams: Mapping[Lane, Stream],
        env: LinkEnvironment,
        own: Certificate,
        intake: Intake,
        *,
        instance: bytes,
        accepted_dial: int | None = None,
        more: More | None = None,
    ) -> None:
        self._peer = peer
        self._env = env
        # Of the time before the streams were made: never newer than the one that the peer saw.
        self._own_certificate = own
        self.intake = intake
        # Control first, then bulk in the order of their numbers. The session closes them all.
        self.streams = [streams[Lane.CONTROL], streams[Lane.BULK]]
        # Dials a further bulk connection; None where the peer dialed.
        self._more = more
        # Control frames that wait for the writer.
        self.queue = ControlQueue()
        self.outbound = BulkOutbound(peer, streams[Lane.BULK], env.executor, env.pacer)
        self._inbound = BulkInbound(peer, env.handler, env.executor)
        # When the last frame came, of any lane and of bulk; the second is moved on while the peer owes no bulk.
        self._received_s = 0.0
        # When the last control frame left: pings are for a lane that says nothing else. And since when gRPC has not
        # taken it; infinite while it has. A timer for each frame would cost as much as the frame.
        self._sent_s = 0.0
        self._writes_since_s = math.inf
        self._bulk_received_s = 0.0
        # Bulk connections that are not read at this moment.
        self._unread = 0
        # True from the start of `run` on, and never false again.
        self._has_run = False
        self.instance = instance
        self.accepted_dial = accepted_dial
        # True while a further connection is greeted: one at a time.
        self.is_joining = False
        self._tasks: list[asyncio.Task[None]] = []
        # Set when one of the tasks has ended, or `drop` was called: then `run` ends them all.
        self._over = asyncio.Event()
        # The reason that `drop` was called with; None when it was not.
        self._dropped: LinkLost | None = None

    @property
    def connections(self) -> int:
        """How many carry bulk."""
        return self.outbound.connections

    def add(self, stream: Stream) -> None:
        """Use one more bulk connection from now on, and close it in the end. Raises LinkLost: the session is over."""
        if self._over.is_set() or not self._has_run:
            raise LinkLost(f"{self._peer}: a further connection for a session that is not up")
        self.streams.append(stream)
        connection = self.outbound.add(stream)
        self._env.pacer.has_connections(self._peer, self.connections)
        self._spawn(f"bulk reader {connection}", self._read_bulk(stream, connection))
        _log.info("bulk connections", peer=self._peer, count=self.connections)

    def drop(self, reason: str) -> None:
        """End the session soon."""
        self._dropped = self._dropped or LinkLost(f"{self._peer}: {reason}")
        self._over.set()

    @property
    def certificates(self) -> list[Certificate]:
        """The certificates by which its streams were made: ours first."""
        peers = dict.fromkeys(stream.certificate for stream in self.streams)
        return [self._own_certificate, *(certificate for certificate in peers if certificate is not None)]

    @property
    def is_alive(self) -> bool:
        """Whether the peer was heard of late: it says at least every `ping_s` that it lives."""
        silent_s = asyncio.get_running_loop().time() - self._received_s
        return self._has_run and silent_s < ALIVE_PINGS * self._env.times.ping_s

    async def run(self) -> PeerError:
        """Carry frames both ways until a stream fails or `drop` is called; why it ended. Raises Exception: our bug."""
        self._has_run = True
        self._received_s = self._bulk_received_s = asyncio.get_running_loop().time()
        self._env.pacer.link_up(self._peer)
        control, bulk = self.streams
        coroutines = {
            "control reader": self._read_control(control),
            "control writer": self._write_control(control),
            "bulk reader": self._read_bulk(bulk, 0),
            "bulk writer": self.outbound.run(),
            "watch": self._watch(),
        }
        if self._more is not None:
            coroutines["connections"] = self._open_more(self._more)
        for name, coroutine in coroutines.items():
            self._spawn(name, coroutine)
        why: PeerError | None = None
        try:
            await self._over.wait()
            why = reason_of_end(self._peer, self._tasks, self._dropped)
            return why
        finally:
            await to_the_end(self._close(why))

    def _spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine, name=f"{name} {self._peer}")
        task.add_done_callback(lambda _: self._over.set())
        self._tasks.append(task)

    async def discard(self) -> None:
        """Close the streams of a session that will not run; nothing to do after `run`."""
        if not self._has_run:
            await to_the_end(self._close(None))

    async def _close(self, why: PeerError | None) -> None:
        self.drop("the link is being closed")  # nothing is added from here on
        self.outbound.close("the link went down" + (f" ({why})" if why else ""))
        if self._has_run:
            self._env.pacer.link_down(self._peer)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._env.meter.sample()
        for stream in self.streams:
            stream.close(None if isinstance(why, LinkLost) else why)
        await self._inbound.close()
        for stream in self.streams:
            if isinstance(stream, DialedStream):
                await stream.aclose()

    async def _read_control(self, stream: Stream) -> None:
        loop, pacer = asyncio.get_running_loop(), self._env.pacer
        while True:
            frame = await stream.read()
            self._received_s = loop.time()
            pacer.was_read(self._peer, len(frame), is_bulk=False)
            message = None if frame == PING_FRAME else decode_control(frame)
            kind = Ping if message is None else type(message)
            if wait_ns := self.intake.take(kind, len(frame), now_ns=time.monotonic_ns()):
                await self._pace(kind, wait_ns)
            if message is not None and not pacer.take_message(self._peer, message):
                self._env.handler.control_arrived(self._peer, message)

    async def _write_control(self, stream: Stream) -> None:
        loop, pacer = asyncio.get_running_loop(), self._env.pacer
        while True:
            frame = await self.queue.get()
            self._sent_s = self._writes_since_s = loop.time()
            pacer.control_sent(self._peer, len(frame))
            await stream.write(frame)
            self._writes_since_s = math.inf

    async def _read_bulk(self, stream: Stream, connection: int) -> None:
        loop, pacer = asyncio.get_running_loop(), self._env.pacer
        self._unread += 1
        while True:
            await pacer.until_readable(self._peer)
            self._unread -= 1
            self._bulk_received_s = loop.time()
            frame = await stream.read()
            self._unread += 1
            pacer.was_read(self._peer, len(frame))
            is_begin = frame[:1] == BEGIN_KIND
            if is_begin and (wait_ns := self.intake.take(TransferBegin, 0, now_ns=time.monotonic_ns())):
                await self._pace(TransferBegin, wait_ns)
            await self._inbound.feed(frame, connection)

    async def _pace(self, kind: type, wait_ns: int) -> None:
        """Let the peer wait: it sends more than an honest one."""
        self._env.reject(self._peer, RateExceeded(f"{self._peer} sends {kind.__name__} too often: it has to wait"))
        await asyncio.sleep(wait_ns / NS_PER_S)

    async def _open_more(self, more: More) -> None:
        """Open bulk connections while the link is worth more than there are."""
        times = self._env.times
        backoff = Backoff(times.backoff_max_s, MORE_AGAIN_S_MAX)
        wait_s, last_reason = times.ping_s, ""
        while True:
            await asyncio.sleep(wait_s)  # first of all: the peer may not have this session yet
            wait_s = to_tick_s(times.ping_s)
            if self.connections >= self._env.connections(self._peer):
                continue
            try:
                stream = await more(self.connections)
                try:
                    self.add(stream)
                except LinkLost:
                    await stream.aclose()
                    raise
                wait_s = 0.0
                backoff.reset()
            except PeerError as error:
                raise_if_cancelled()
                if not isinstance(error, LinkLost):
                    self._env.reject(self._peer, error)
                if str(error) != last_reason:
                    _log.warning("no further bulk connection", peer=self._peer, reason=str(error))
                last_reason, wait_s = str(error), backoff.next_s()

    async def _watch(self) -> None:
        """Send pings; notice when the peer does not, takes nothing, or does not go on with what it began."""
        loop = asyncio.get_running_loop()
        times = self._env.times
        while True:
            slept_from_s = loop.time()
            if slept_from_s - self._sent_s > times.ping_s / 2:
                self.queue.put(PING_FRAME)
            await asyncio.sleep(to_tick_s(min(times.ping_s, times.transfer_silent_s / 4)))
            now_s = loop.time()
            if now_s - slept_from_s > times.ping_s + times.silent_s / 4:
                # Our own loop stood still: what came meanwhile has not been read yet.
                self._received_s = self._bulk_received_s = now_s
                self._writes_since_s = max(self._writes_since_s, now_s)
            if now_s - self._writes_since_s > times.silent_s:
                raise LinkLost(f"{self._peer}: takes nothing any more: its window is closed")
            if now_s - self._received_s > times.silent_s:
                raise LinkLost(f"{self._peer}: silent for {now_s - self._received_s:.0f} s")
            if not self._inbound.is_open or self._unread > self._inbound.waiting:
                self._bulk_received_s = now_s  # it owes us nothing, or we don't read
            elif now_s - self._bulk_received_s > times.transfer_silent_s:
                silent_s = now_s - self._bulk_received_s
                raise LinkLost(f"{self._peer}: too slow: nothing of an open transfer in {silent_s:.0f} s")
