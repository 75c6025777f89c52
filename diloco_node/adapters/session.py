"""Both streams of a link while they live: control and bulk, each with a reader and a writer.

Whatever ends first ends all of it. The handler then has its unfinished buffer back, and every transfer has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.adapters.certs import Identity
from diloco_node.adapters.inbound import BulkInbound
from diloco_node.adapters.outbound import BulkOutbound, ControlQueue
from diloco_node.adapters.pacing import Pacer
from diloco_node.adapters.sockets import WireMeter
from diloco_node.adapters.streams import DialedStream, Stream
from diloco_node.errors import LinkLost, PeerError
from diloco_node.ports import TransportHandler
from diloco_node.wire.envelope import Echo, Hello, Ping, decode_control_lane, encode_echo, encode_ping

ALIVE_PINGS: Final = 3
"""A peer that was not heard for so many of its pings may be dead."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Deadlines of a link, in seconds.

    Attributes:
        handshake_s: to connect and finish TLS; hello_s: for the hello on each stream and for the second stream.
        fallback_s: without a session before the side that need not dial does.
        backoff_min_s, backoff_max_s: between two dials, doubling, each drawn from the upper half of its range.
        violation_backoff_s: after the peer broke the protocol.
        ping_s: the control lane says at least this often that it lives; silent_s: when nothing came, it is lost.
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
    transfer_silent_s: float = 30.0


@dataclass(frozen=True, slots=True)
class LinkEnvironment:
    """What all links of a transport share.

    Attributes:
        hello: ours, apart from lane and dial. is_advertised: the others know where to dial us.
        meter: counts wire bytes; read once more just before the streams of a session are closed.
        pacer: the bandwidth budget.
        reject: called with (peer, error) for what is the peer's fault: counts it and logs it.
        superseded: called with (peer, error) when a peer has refused us for a while because a newer process of ours is
            linked with it, and with (peer, None) when a link to it is up again.
        quarantined: why a peer is shut out now, and for how long; empty when it is not.
    """

    hello: Hello
    identity: Identity
    handler: TransportHandler
    executor: Executor
    times: LinkTimes
    is_advertised: bool
    meter: WireMeter
    pacer: Pacer
    reject: Callable[[str, PeerError], None]
    superseded: Callable[[str, PeerError | None], None] = lambda _peer, _error: None
    quarantined: Callable[[str], str] = lambda _peer: ""


class _Counted:
    """A stream whose bytes are counted, for the estimate where the kernel does not count."""

    def __init__(self, stream: Stream, peer: str, meter: WireMeter) -> None:
        self._stream = stream
        self._peer = peer
        self._meter = meter

    async def read(self) -> bytes:
        frame = await self._stream.read()
        self._meter.count(self._peer, bytes_in=len(frame))
        return frame

    async def write(self, frame: bytes) -> None:
        self._meter.count(self._peer, bytes_out=len(frame))
        await self._stream.write(frame)

    def close(self, error: PeerError | None = None) -> None:
        self._stream.close(error)


class Session:
    """Both streams of one link while they live. `run` once; `drop` from anywhere."""

    def __init__(self, peer: str, control: Stream, bulk: Stream, env: LinkEnvironment) -> None:
        self._peer = peer
        self._env = env
        self._streams = (control, bulk)
        self._control = _Counted(control, peer, env.meter)
        self._bulk = _Counted(bulk, peer, env.meter)
        self.queue = ControlQueue()
        self.outbound = BulkOutbound(peer, self._bulk, env.executor, env.pacer)
        self._inbound = BulkInbound(peer, env.handler, env.executor)
        self._heard_s = 0.0
        self._has_run = False
        self.instance = b""
        """Of the peer's process, as its hello said."""
        loop = asyncio.get_running_loop()
        self._dropped: asyncio.Future[PeerError] = loop.create_future()
        self.ended = asyncio.Event()

    def drop(self, reason: str) -> None:
        """End the session soon; `ended` is set when its last callback is done."""
        if not self._dropped.done():
            self._dropped.set_result(LinkLost(f"{self._peer}: {reason}"))

    @property
    def is_alive(self) -> bool:
        """Whether the peer was heard of late: it says at least every `ping_s` that it lives."""
        silent_s = asyncio.get_running_loop().time() - self._heard_s
        return self._has_run and silent_s < ALIVE_PINGS * self._env.times.ping_s

    async def run(self) -> PeerError:
        """Carry frames both ways until one stream fails or `drop` is called. Returns why it ended.

        Raises:
            Exception: what is no fault of the peer (a bug of ours), after the streams were closed.
        """
        self._has_run = True
        self._heard_s = asyncio.get_running_loop().time()
        self._env.pacer.connected(self._peer)
        parts = {
            "control reader": self._read_control(),
            "control writer": self._write_control(),
            "bulk reader": self._read_bulk(),
            "bulk writer": self.outbound.run(),
            "watch": self._watch(),
            "pings": self._ping(),
        }
        tasks = [asyncio.create_task(part, name=f"{name} {self._peer}") for name, part in parts.items()]
        why: PeerError | None = None
        try:
            waited: list[asyncio.Future[Any]] = [*tasks, self._dropped]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            why = self._why(tasks)
            return why
        finally:
            await self._close(tasks, why)

    def _why(self, tasks: list[asyncio.Task[None]]) -> PeerError:
        """The worst of what ended the session: a violation says more than the lost stream that follows it."""
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, PeerError):
                raise error
        found = [error for error in errors if isinstance(error, PeerError)]
        found.sort(key=lambda error: isinstance(error, LinkLost))
        if found:
            return found[0]
        if self._dropped.done():
            return self._dropped.result()
        # gRPC cancels a read when its call is torn down under us: nobody says why.
        return LinkLost(f"{self._peer}: the connection was torn down")

    async def discard(self) -> None:
        """Close the streams of a session that will not run; nothing to do after `run`."""
        if not self._has_run:
            await self._close([], None)

    async def _close(self, tasks: list[asyncio.Task[None]], why: PeerError | None) -> None:
        self.drop("the link is being closed")
        self.outbound.close("the link went down" + (f" ({why})" if why else ""))
        if self._has_run:
            self._env.pacer.lost(self._peer)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._env.meter.sample()
        for stream in self._streams:
            stream.close(None if isinstance(why, LinkLost) else why)
        await self._inbound.close()
        for stream in self._streams:
            if isinstance(stream, DialedStream):
                await stream.aclose()
        self.ended.set()

    async def _read_control(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._control.read()
            self._heard_s = loop.time()
            match decode_control_lane(frame):
                case Ping(sent_ns):
                    if sent_ns is not None:
                        self.queue.put(encode_echo(Echo(sent_ns, self._env.pacer.clock_ns())))
                case Echo(sent_ns, arrived_ns):
                    self._env.pacer.echoed(self._peer, sent_ns, arrived_ns)
                case message:
                    if not self._env.pacer.heard(self._peer, message):
                        self._env.handler.control_arrived(self._peer, message)

    async def _write_control(self) -> None:
        while True:
            frame = await self.queue.get()
            self._env.pacer.control_sent(self._peer, len(frame))
            await self._control.write(frame)

    async def _read_bulk(self) -> None:
        while True:
            await self._env.pacer.until_readable(self._peer)
            limit_s = self._env.times.transfer_silent_s if self._inbound.is_open else None
            try:
                async with asyncio.timeout(limit_s):
                    frame = await self._bulk.read()
            except TimeoutError:
                raise LinkLost(f"{self._peer}: too slow: nothing of an open transfer in {limit_s:.0f} s") from None
            self._env.pacer.was_read(self._peer, len(frame))
            await self._inbound.feed(frame)

    async def _watch(self) -> None:
        """Notice when the peer does not live."""
        loop = asyncio.get_running_loop()
        times = self._env.times
        while True:
            slept_from_s = loop.time()
            await asyncio.sleep(times.ping_s)
            now_s = loop.time()
            if now_s - slept_from_s > times.ping_s + times.silent_s / 4:
                self._heard_s = now_s  # our own loop stood still: what came meanwhile has not been read yet
            if now_s - self._heard_s > times.silent_s:
                raise LinkLost(f"{self._peer}: silent for {now_s - self._heard_s:.0f} s")

    async def _ping(self) -> None:
        """Say that we live, and ask how long that takes: often while something is on its way to a far peer."""
        while True:
            self.queue.put(encode_ping(Ping(self._env.pacer.clock_ns())))
            await self._env.pacer.until_ping(self._peer, self._env.times.ping_s)
