"""The receiving half of a bulk lane: frames in, filled buffers out.

At most one transfer of each lane (rounds, recovery, measurement) is open at a time. Its chunks come in order without
gaps; those of other lanes may come between them. Each chunk is checked and decoded into the handler's buffer: small
ones at once, larger ones in a thread, a few at a time. Nothing but the bulk stream waits for that, so a slow decode
never holds up the control lane.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from diloco_node.adapters.pacing import lane_of
from diloco_node.codec.payload import decompress_chunk
from diloco_node.core.budget import BudgetLane
from diloco_node.core.messages import BulkHeader
from diloco_node.errors import ProtocolViolation
from diloco_node.ports import TransportHandler
from diloco_node.wire.envelope import (
    TransferAbort,
    TransferBegin,
    TransferChunk,
    TransferEnd,
    decode_bulk,
)

INLINE_BYTES_MAX: Final = 64 * 2**10
"""Compressed chunks up to this many raw bytes are decoded on the loop: it takes under 0.1 ms."""

DECODING_MAX: Final = 3
"""Chunks of one peer being decoded at once; the next one is not read before one of them is done."""


@dataclass(slots=True)
class _Open:
    """A transfer that is coming in. `buffer` is None when the handler does not want it."""

    transfer: int
    lane: BudgetLane
    header: BulkHeader
    raw_bytes: int
    buffer: memoryview | None
    arrived_bytes: int = 0
    decoding: deque[asyncio.Future[None]] = field(default_factory=deque)


class BulkInbound:
    """Takes the frames of one peer's bulk stream. Call `feed` for each frame in order, `close` once at the end."""

    def __init__(self, peer: str, handler: TransportHandler, executor: Executor) -> None:
        self._peer = peer
        self._handler = handler
        self._executor = executor
        self._open: dict[BudgetLane, _Open] = {}
        self._transfer_last = -1

    @property
    def is_open(self) -> bool:
        """Whether a transfer has begun and not ended."""
        return bool(self._open)

    async def feed(self, frame: bytes) -> None:
        """Take one frame; waits only while `DECODING_MAX` chunks are being decoded, or for the last of a transfer.

        Raises:
            ProtocolViolation, PayloadCorrupt: the link must be dropped.
        """
        match decode_bulk(frame):
            case TransferChunk() as chunk:
                await self._take_chunk(chunk)
            case TransferBegin() as begin:
                self._begin(begin)
            case TransferEnd(transfer):
                await self._end(transfer)
            case TransferAbort(transfer):
                await self._give_back(self._expect(transfer))

    def _begin(self, begin: TransferBegin) -> None:
        lane = lane_of(begin.header)
        if lane in self._open:
            other = self._open[lane].transfer
            raise ProtocolViolation(f"transfer {begin.transfer} begins before {other} of its lane has ended")
        if begin.transfer <= self._transfer_last:
            raise ProtocolViolation(f"transfer {begin.transfer} begins after {self._transfer_last}")
        self._transfer_last = begin.transfer
        buffer = self._handler.transfer_opened(self._peer, begin.header, begin.raw_bytes)
        if buffer is not None and (buffer.nbytes != begin.raw_bytes or buffer.readonly):
            raise ValueError(f"a buffer of {buffer.nbytes} bytes for a transfer of {begin.raw_bytes}")
        self._open[lane] = _Open(begin.transfer, lane, begin.header, begin.raw_bytes, buffer)

    def _expect(self, transfer: int) -> _Open:
        current = next((one for one in self._open.values() if one.transfer == transfer), None)
        if current is None:
            raise ProtocolViolation(f"a frame of transfer {transfer}, which is not open")
        return current

    async def _take_chunk(self, chunk: TransferChunk) -> None:
        current = self._expect(chunk.transfer)
        if chunk.offset != current.arrived_bytes:
            raise ProtocolViolation(f"a chunk at offset {chunk.offset}; expected {current.arrived_bytes}")
        current.arrived_bytes += chunk.raw_bytes
        if current.arrived_bytes > current.raw_bytes:
            raise ProtocolViolation(f"{current.arrived_bytes} bytes in a transfer of {current.raw_bytes}")
        if current.buffer is None:
            return
        target = current.buffer[chunk.offset : chunk.offset + chunk.raw_bytes]
        if not chunk.is_compressed:
            target[:] = chunk.data  # 0.1 ms for 1 MiB: less than the way to a thread and back
            return
        if chunk.raw_bytes <= INLINE_BYTES_MAX:
            decompress_chunk(chunk.data, target)
            return
        while len(current.decoding) >= DECODING_MAX:
            await _finish(current.decoding)
        loop = asyncio.get_running_loop()
        current.decoding.append(loop.run_in_executor(self._executor, decompress_chunk, chunk.data, target))

    async def _end(self, transfer: int) -> None:
        current = self._expect(transfer)
        if current.arrived_bytes != current.raw_bytes:
            raise ProtocolViolation(f"a transfer of {current.raw_bytes} bytes ended after {current.arrived_bytes}")
        while current.decoding:
            await _finish(current.decoding)
        del self._open[current.lane]
        if current.buffer is not None:
            self._handler.transfer_closed(self._peer, current.header, current.buffer, is_whole=True)

    async def close(self) -> None:
        """Give back the buffers of transfers that did not end. Threads that still write into them are waited for."""
        for current in list(self._open.values()):
            await self._give_back(current)

    async def _give_back(self, current: _Open) -> None:
        del self._open[current.lane]
        if current.decoding:
            await asyncio.wait(current.decoding)
            for future in current.decoding:
                future.exception()  # looked at: what was wrong with the transfer is known already
        if current.buffer is not None:
            self._handler.transfer_closed(self._peer, current.header, current.buffer, is_whole=False)


async def _finish(decoding: deque[asyncio.Future[None]]) -> None:
    """Wait for the oldest chunk. It is queued until it is done: a cancelled wait must not forget the thread."""
    await asyncio.wait((decoding[0],))
    decoding.popleft().result()
