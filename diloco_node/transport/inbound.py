"""The receiving half of a bulk lane: frames of all its connections in, filled buffers out.

At most one transfer of each lane (rounds, recovery, measurement) is open at a time. Begin, end and abort come over the
first connection, chunks over any, each at its offset (`transport.reassembly`). A chunk ahead of its begin waits, and
with it what follows on its connection; an end waits for chunks on their way elsewhere, and with it the next begin. Each
chunk is checked and decoded into the handler's buffer, larger ones in a thread. Nothing but the bulk connections waits
for that: a slow decode never holds up the control lane.

Why two connections never wait for each other for ever: a sender hands a transfer's chunks to connections after its
begin, and its end after all of its chunks, and each connection keeps the order in which it was handed things. Say the
first connection stands at the end of T for a chunk of T that stands behind a chunk of U whose begin has not come. The
chunk of U was handed over before the one of T, as they are on one connection, and so before the end of T; the begin of
U still before that, on the first connection: it has come. A peer that does otherwise waits until its link counts as too
slow (`transfer_silent_s`), with one frame in memory for each connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from diloco_node.codec.payload import decompress_chunk
from diloco_node.errors import ProtocolViolation
from diloco_node.transport.reassembly import Reassembly
from diloco_node.wire.envelope import TransferAbort, TransferBegin, TransferChunk, TransferEnd, decode_bulk
from diloco_node.wire.message_tables import BULK_LANES, BudgetLane, TransferHeader

INLINE_BYTES_MAX: Final = 64 * 2**10
"""Compressed chunks up to this many raw bytes are decoded on the loop: it takes under 0.1 ms."""

DECODING_MAX: Final = 3
"""Chunks of one peer being decoded at once; a connection whose chunk is the next is not read before one is done."""


class TransportHandler(Protocol):
    """The receiver of messages and transfers. All calls are made on the event loop, and must not block it."""

    def control_arrived(self, peer: str, message: Any) -> None:
        """A decoded control message, but none of `wire.link_messages`."""

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """The connections to the peer are up (hello done), or one of them is gone."""

    def transfer_opened(self, peer: str, header: Any, raw_bytes: int) -> memoryview | None:
        """A transfer begins: return a writable buffer of exactly `raw_bytes`, or None to skip its bytes."""

    def transfer_closed(self, peer: str, header: Any, buffer: memoryview, *, is_whole: bool) -> None:
        """The buffer is full, or (not whole) the transfer broke off."""


@dataclass(slots=True, eq=False)
class _Open:
    """A transfer that is coming in. buffer: None when the handler does not want it, or not any more.

    unwritten: chunks that came and are not in the buffer yet. decoding: those that a thread works on.
    """

    transfer: int
    lane: BudgetLane
    header: TransferHeader
    raw_bytes: int
    buffer: memoryview | None
    parts: Reassembly
    unwritten: int = 0
    decoding: set[asyncio.Future[None]] = field(default_factory=set)


class BulkInbound:
    """Takes the frames of one peer's bulk connections, in order on each. `feed` each frame; `close` at the end."""

    def __init__(self, peer: str, handler: TransportHandler, executor: Executor) -> None:
        self._peer = peer
        self._handler = handler
        self._executor = executor
        self._open: dict[BudgetLane, _Open] = {}
        self._transfer_last = -1
        self._slots = asyncio.Semaphore(DECODING_MAX)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.waiting = 0
        """Connections that wait for what the peer has to send on another one."""

    @property
    def is_open(self) -> bool:
        """Whether something has begun, or came ahead of its begin, and the rest has to come."""
        return bool(self._open) or self.waiting > 0

    async def feed(self, frame: bytes, connection: int = 0) -> None:
        """Take one frame, when those before it are there. Raises ProtocolViolation, PayloadCorrupt."""
        if self._failure is not None:
            raise self._failure
        message = decode_bulk(frame)
        if isinstance(message, TransferChunk):
            await self._take_chunk(message, connection)
            return
        if connection:
            raise ProtocolViolation(f"a {type(message).__name__} on connection {connection}")
        match message:
            case TransferBegin() as begin:
                self._begin(begin)
            case TransferEnd(transfer, chunks):
                await self._end(self._expect(transfer), chunks)
            case TransferAbort(transfer, chunks):
                await self._abort(self._expect(transfer), chunks)

    def _begin(self, begin: TransferBegin) -> None:
        lane = BULK_LANES[type(begin.header)]
        if lane in self._open:
            open_transfer = self._open[lane].transfer
            raise ProtocolViolation(f"transfer {begin.transfer} begins before {open_transfer} of its lane has ended")
        if begin.transfer <= self._transfer_last:
            raise ProtocolViolation(f"transfer {begin.transfer} begins after {self._transfer_last}")
        buffer = self._handler.transfer_opened(self._peer, begin.header, begin.raw_bytes)
        if buffer is not None and (buffer.nbytes != begin.raw_bytes or buffer.readonly):
            raise ValueError(f"a buffer of {buffer.nbytes} bytes for a transfer of {begin.raw_bytes}")
        reassembly = Reassembly(begin.raw_bytes)
        self._open[lane] = _Open(begin.transfer, lane, begin.header, begin.raw_bytes, buffer, reassembly)
        self._transfer_last = begin.transfer
        self._changed.set()

    def _expect(self, transfer: int) -> _Open:
        current = next((stream for stream in self._open.values() if stream.transfer == transfer), None)
        if current is None:
            raise ProtocolViolation(f"a frame of transfer {transfer}, which is not open")
        return current

    async def _take_chunk(self, chunk: TransferChunk, connection: int) -> None:
        if connection and chunk.transfer > self._transfer_last:
            await self._until(lambda: chunk.transfer <= self._transfer_last, is_waiting_for_peer=True)
        current = self._expect(chunk.transfer)
        current.parts.take(connection, chunk.offset, chunk.raw_bytes)
        self._changed.set()
        if current.buffer is None:
            return
        target = current.buffer[chunk.offset : chunk.offset + chunk.raw_bytes]
        if not chunk.is_compressed:
            target[:] = chunk.data  # 0.1 ms for 1 MiB: less than the way to a thread and back
        elif chunk.raw_bytes <= INLINE_BYTES_MAX:
            decompress_chunk(chunk.data, target)
        else:
            await self._decode(current, chunk.data, target)

    async def _decode(self, current: _Open, data: memoryview, target: memoryview) -> None:
        current.unwritten += 1
        await self._slots.acquire()
        if current.buffer is None:  # it was aborted while we waited
            self._written(current)
            return
        future = asyncio.get_running_loop().run_in_executor(self._executor, decompress_chunk, data, target)
        current.decoding.add(future)
        future.add_done_callback(partial(self._on_decoded, current))

    def _on_decoded(self, current: _Open, future: asyncio.Future[None]) -> None:
        current.decoding.discard(future)
        self._failure = self._failure or future.exception()  # the next frame of any connection, or the end, raises it
        self._written(current)

    def _written(self, current: _Open) -> None:
        current.unwritten -= 1
        self._slots.release()
        self._changed.set()

    async def _end(self, current: _Open, chunks: tuple[int, ...]) -> None:
        current.parts.end(chunks)
        await self._until(lambda: current.parts.is_over, is_waiting_for_peer=True)
        if not current.parts.is_whole:
            arrival_bytes = current.parts.arrived_bytes
            raise ProtocolViolation(f"a transfer of {current.raw_bytes} bytes ended after {arrival_bytes}")
        await self._until(lambda: not current.unwritten, is_waiting_for_peer=False)
        del self._open[current.lane]
        if current.buffer is not None:
            self._handler.transfer_closed(self._peer, current.header, current.buffer, is_whole=True)

    async def _abort(self, current: _Open, chunks: tuple[int, ...]) -> None:
        current.parts.end(chunks)
        await self._give_back(current)
        await self._until(lambda: current.parts.is_over, is_waiting_for_peer=True)
        del self._open[current.lane]

    async def _until(self, is_so: Callable[[], bool], *, is_waiting_for_peer: bool) -> None:
        """Wait for what another connection or a thread has to do first. Raises what a thread failed with."""
        self.waiting += is_waiting_for_peer
        try:
            while self._failure is None and not is_so():
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.waiting -= is_waiting_for_peer
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Give back the buffers of transfers that did not end. Threads that still write into them are waited for."""
        for current in list(self._open.values()):
            await self._give_back(current)
        self._open.clear()

    async def _give_back(self, current: _Open) -> None:
        buffer, current.buffer = current.buffer, None  # from here on nothing more is written into it
        if current.decoding:
            await asyncio.wait(current.decoding)
        if buffer is not None:
            self._handler.transfer_closed(self._peer, current.header, buffer, is_whole=False)
