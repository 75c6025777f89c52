"""The sending half of the two lanes: a bounded queue of control frames, and transfers cut into chunks.

Transfers to one peer are in lanes by what they are for (`BULK_LANES`): rounds go before recovery, chunk by chunk. In a
lane they go one after the other: rounds by their ballot, else in the order of the requests. A chunk waits for the
budget, and goes over the next connection that is free (`bundle`); what begins and ends a transfer goes over the first
one, in the order in which all of it was handed over. While gRPC takes one chunk, a thread compresses the next. Flow
control is gRPC's write, which waits for the peer's window.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Final

from diloco_node.codec.payload import CompressionPolicy, compress_chunk
from diloco_node.core.messages import ContributionStripe, MergedStripe
from diloco_node.errors import LinkLost
from diloco_node.transport.bundle import Bundle
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.streams import Stream
from diloco_node.wire.envelope import encode_abort, encode_begin, encode_chunk, encode_end
from diloco_node.wire.message_tables import BULK_LANES, BudgetLane, TransferHeader

CONTROL_FRAMES_MAX: Final = 1024
CONTROL_BYTES_MAX: Final = 16 * 2**20
"""Frames that wait for a peer that does not read; further control frames are dropped."""

TRANSFERS_WAITING_MAX: Final = 64
"""Transfers of one lane; the caller of one more waits for a place."""

INLINE_BYTES_MAX: Final = 64 * 2**10
"""Chunks up to this size are compressed on the loop: under 0.1 ms."""

TURN_S: Final = 60.0
"""A piece that the budget, or the share that the peer grants, does not let go for so long: the link is of no use."""

YIELD_S: Final = 2.0
"""A lane that has waited for those before it for so long sends one chunk: its transfer must not look dead."""

_LANES: Final[tuple[BudgetLane, ...]] = tuple(lane for lane in BudgetLane if lane is not BudgetLane.CONTROL)


def _urgency_of(header: TransferHeader) -> tuple[int, ...]:
    """Its order within the lane: ballots are numbered as they are opened, and their deadlines come in that order."""
    if isinstance(header, (ContributionStripe, MergedStripe)):
        return (header.ballot.term, header.ballot.number)
    return ()


class ControlQueue:
    """Frames of the control lane that wait for the stream. Never blocks: what does not fit is dropped."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()

    def put(self, frame: bytes) -> bool:
        """Queue a frame; False if it was dropped because the queue is full."""
        if len(self._frames) >= CONTROL_FRAMES_MAX or self._bytes + len(frame) > CONTROL_BYTES_MAX:
            return False
        self._frames.append(frame)
        self._bytes += len(frame)
        self._filled.set()
        return True

    async def get(self) -> bytes:
        """The oldest frame; waits for one."""
        while not self._frames:
            self._filled.clear()
            await self._filled.wait()
        frame = self._frames.popleft()
        self._bytes -= len(frame)
        return frame


class _LaneQueue:
    """Transfers of one lane: those with the earliest deadline first. `idle` is set while it has nothing to send."""

    def __init__(self) -> None:
        self.waiting: asyncio.PriorityQueue[tuple[tuple[tuple[int, ...], int], _Transfer]] = asyncio.PriorityQueue(
            TRANSFERS_WAITING_MAX
        )
        self.current: _Transfer | None = None
        self.idle = asyncio.Event()
        self.idle.set()


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer that was requested. `encoding` is the thread's work on the body, while there is some."""

    header: TransferHeader
    body: memoryview
    done: asyncio.Future[None]
    is_cancelled: bool = False
    encoding: asyncio.Future[bytes] | None = None


class BulkOutbound:
    """Transfers to one peer over one link. `transfer` from any task; `run` in one; `close` when the link is gone."""

    def __init__(self, peer: str, stream: Stream, executor: Executor, pacer: Pacer) -> None:
        self._peer = peer
        self._bundle = Bundle(peer, stream)
        self._executor = executor
        self._pacer = pacer
        # Whether zstd pays depends on the codec, which goes with the kind of transfer; a measurement's says its own.
        self._policies: defaultdict[object, CompressionPolicy] = defaultdict(CompressionPolicy)
        self.queues = {lane: _LaneQueue() for lane in _LANES}
        self._ahead = {lane: [queue.idle for rival, queue in self.queues.items() if rival < lane] for lane in _LANES}
        self._ending: set[_Transfer] = set()
        self._next_transfer = 0
        self._requests = 0
        self._lost: LinkLost | None = None

    @property
    def connections(self) -> int:
        """How many carry chunks."""
        return len(self._bundle)

    def add(self, stream: Stream) -> int:
        """Use one more connection from the next chunk on. Returns its index."""
        return self._bundle.add(stream)

    async def transfer(self, header: TransferHeader, body: memoryview) -> None:
        """Send a body of bytes, not read any more when this ends; returns when gRPC has its end. Raises LinkLost."""
        self._raise_if_lost()
        lane = BULK_LANES[type(header)]
        item = _Transfer(header, body, asyncio.get_running_loop().create_future())
        self._requests += 1
        order = (_urgency_of(header), self._requests)
        size = body.nbytes
        self._pacer.transfer_started(self._peer, lane, size)
        try:
            waiting = self.queues[lane].waiting
            await waiting.put((order, item))
            try:
                self._raise_if_lost()
            except LinkLost:  # while we waited for a place: then the next who waits must hear of it, too
                waiting.get_nowait()
                raise
            await item.done
        finally:
            self._pacer.transfer_ended(self._peer, size)
            item.is_cancelled = True
            if item.encoding is not None:
                await asyncio.wait((item.encoding,))

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def run(self) -> None:
        """Send transfers until a connection fails. Raises LinkLost."""
        tasks = [asyncio.create_task(self._run_lane(lane), name=f"{lane.name} {self._peer}") for lane in _LANES]
        tasks.append(asyncio.create_task(self._bundle.until_failed(), name=f"bulk writes {self._peer}"))
        try:
            done_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done_tasks:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._bundle.close()

    def close(self, reason: str) -> None:
        """Fail every transfer that waits or is on its way with LinkLost, and each one that is requested later."""
        self._lost = LinkLost(f"{self._peer}: {reason}")
        transfers = list(self._ending)
        for queue in self.queues.values():
            transfers += [queue.current] if queue.current else []
            while not queue.waiting.empty():  # get_nowait also wakes who waits for a place; `transfer` sees _lost then
                transfers.append(queue.waiting.get_nowait()[1])
        for item in transfers:
            if not item.done.done():
                item.done.set_exception(LinkLost(f"{self._peer}: {reason}"))

    async def _run_lane(self, lane: BudgetLane) -> None:
        queue = self.queues[lane]
        while True:
            _, queue.current = await queue.waiting.get()
            queue.idle.clear()
            if not queue.current.is_cancelled:
                await self._send(lane, queue.current)  # when it fails, `close` must find it as current
            queue.current = None
            if queue.waiting.empty():
                queue.idle.set()

    async def _send(self, lane: BudgetLane, item: _Transfer) -> None:
        await self._lead(lane)
        if item.is_cancelled:  # meanwhile: its body is not ours any more
            return
        transfer = self._next_transfer  # numbers are in the order of the frames that begin with them
        self._next_transfer += 1
        self._bundle.write_first(encode_begin(transfer, item.header, item.body.nbytes))
        counts: list[int] = []
        if await self._send_chunks(lane, item, transfer, counts):
            self._ending.add(item)
            self._bundle.write_first(encode_end(transfer, counts)).add_done_callback(partial(self._on_end, item))
        else:
            self._bundle.write_first(encode_abort(transfer, "the sender no longer wants it", counts))

    def _on_end(self, item: _Transfer, _: asyncio.Future[None]) -> None:
        """The end of a transfer was written. If it is not, `close` tells who waits."""
        self._ending.discard(item)
        if not item.done.done():
            item.done.set_result(None)

    async def _send_chunks(self, lane: BudgetLane, item: _Transfer, transfer: int, counts: list[int]) -> bool:
        """Hand all chunks to connections; False if the transfer was cancelled before."""
        size, urgency = item.body.nbytes, _urgency_of(item.header)
        offset, raw_bytes = 0, self._pacer.piece_bytes(self._peer)
        following = self._start_encode(item, transfer, 0, raw_bytes) if size else None
        while following is not None:
            if isinstance(following, bytes):
                frame = following
            else:
                if not following.done():
                    # wait() does not cancel the future with us: `transfer` must still be able to wait for the thread.
                    await asyncio.wait((following,))
                item.encoding, frame = None, following.result()
            offset += raw_bytes
            if item.is_cancelled:
                return False
            raw_bytes = self._pacer.piece_bytes(self._peer)
            following = self._start_encode(item, transfer, offset, raw_bytes) if offset < size else None
            await self._lead(lane)
            await self._bundle.until_free()  # a turn is taken for what can go at once
            if not self._pacer.try_acquire(self._peer, lane, len(frame)):
                await self._acquire(lane, len(frame), urgency)
            await self._bundle.write(frame, counts)
        return True

    async def _lead(self, lane: BudgetLane) -> None:
        """Wait while a lane before this one has something to send to the peer, but not for ever."""
        before = [idle for idle in self._ahead[lane] if not idle.is_set()]
        if before:
            try:
                async with asyncio.timeout(YIELD_S):
                    for idle in before:
                        await idle.wait()
            except TimeoutError:
                return

    async def _acquire(self, lane: BudgetLane, frame_bytes: int, urgency: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(TURN_S):
                await self._pacer.acquire(self._peer, lane, frame_bytes, urgency)
        except TimeoutError:
            raise LinkLost(
                f"{self._peer}: too slow: {frame_bytes} bytes had no turn within the budget in {TURN_S:.0f} s"
            ) from None

    def _start_encode(
        self, item: _Transfer, transfer: int, offset: int, raw_bytes: int
    ) -> bytes | asyncio.Future[bytes]:
        """The frame of one chunk: at once if there is little to do, else from a thread."""
        raw = item.body[offset : offset + raw_bytes]
        policy = self._policies[type(item.header)]
        if self._pacer.is_fast(self._peer) or not policy.is_worth(raw):
            # A copy of 1 MiB takes 0.1 ms, which is less than the way to a thread and back.
            return encode_chunk(transfer, offset, raw.nbytes, raw, is_compressed=False)
        if raw.nbytes <= INLINE_BYTES_MAX:
            return _compress(policy, transfer, offset, raw)
        loop = asyncio.get_running_loop()
        item.encoding = loop.run_in_executor(self._executor, _compress, policy, transfer, offset, raw)
        return item.encoding


def _compress(policy: CompressionPolicy, transfer: int, offset: int, raw: memoryview) -> bytes:
    # One chunk of a link is encoded at a time, so only one thread at a time tells the policy what came of it.
    is_compressed, data = compress_chunk(raw)
    policy.record(paid=is_compressed)
    return encode_chunk(transfer, offset, raw.nbytes, data, is_compressed=is_compressed)
