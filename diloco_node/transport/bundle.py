"""The bulk connections of one link as one way out: each takes the next frame as soon as its last write has returned.

So one that is held up takes less; free ones take turns. A message that can go at once takes no future and no task, and
one timer watches all deadlines: all this is done some thousand times per GB.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

from diloco_node.errors import LinkLost
from diloco_node.transport.streams import Stream

WRITE_S: Final = 30.0
"""A peer that does not take a frame in this time is too slow, a small frame too. Before it may lie what a socket and
the peer's window held when a budget was lowered: 4 MiB at 0.14 MB/s."""

LOOK_S: Final = 1.0
"""Between two looks at the deadlines. A look that is later than this was held up with the whole loop."""


class Bundle:
    """Connections to one peer, the first given, with one write at a time on each. `add` at any time, `close` once."""

    def __init__(self, peer: str, first: Stream) -> None:
        self._peer = peer
        self._streams = [first]
        self._free: deque[int] = deque([0])
        self._freed = asyncio.Event()
        self._waiters = asyncio.Lock()  # those who wait for a free connection, in the order in which they came
        self._first: deque[tuple[bytes, asyncio.Future[None]]] = deque()  # what waits for the first connection
        self._writes: set[asyncio.Task[None]] = set()
        self._due_s: dict[int, tuple[float, int]] = {}  # connection -> when its write must have returned, its bytes
        self._timer: asyncio.TimerHandle | None = None
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> int:
        """Use one more from now on. Returns its index."""
        self._streams.append(stream)
        self._release(len(self._streams) - 1)
        return len(self._streams) - 1

    async def until_free(self) -> None:
        """Wait until a frame could go at once, behind those who wait already; another may be faster then."""
        if self._free and not self._waiters.locked():
            return
        async with self._waiters:
            while not self._free:
                self._freed.clear()
                await self._freed.wait()

    async def write(self, frame: bytes, counts: list[int]) -> None:
        """Hand a frame to the next free connection; where there are several, without waiting for the write.

        counts: frames by connection; one is added. Raises LinkLost: the write failed. One not taken in time:
        `until_failed`.
        """
        while not self._free:
            await self.until_free()
        connection = self._free.popleft()
        counts += [0] * (connection + 1 - len(counts))
        counts[connection] += 1
        if len(self._streams) > 1:
            self._spawn(self._write(connection, frame))
        else:  # a task would be a detour
            await self._write(connection, frame)

    def write_first(self, frame: bytes) -> asyncio.Future[None]:
        """Have a frame written over the first connection, after what was handed to it before; done when gRPC has it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first.append((frame, future))
        if 0 in self._free:
            self._free.remove(0)
            self._release(0)
        return future

    async def until_failed(self) -> None:
        """Wait until a write fails for which nobody waited, or is not taken in time, and raise that."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        """Give up the writes that have not returned."""
        if self._timer is not None:
            self._timer.cancel()
        writes = list(self._writes)
        for task in writes:
            task.cancel()
        await asyncio.gather(*writes, return_exceptions=True)

    def _release(self, connection: int) -> None:
        if connection == 0 and self._first:
            self._spawn(self._write(0, *self._first.popleft()))
        else:
            self._free.append(connection)
            self._freed.set()

    def _spawn(self, write: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(write, name=f"bulk write {self._peer}")
        self._writes.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _write(self, connection: int, frame: bytes, future: asyncio.Future[None] | None = None) -> None:
        """Write over a connection that is ours, and release it; not after a failure, which ends the link."""
        loop = asyncio.get_running_loop()
        self._due_s[connection] = (loop.time() + WRITE_S, len(frame))
        if self._timer is None:
            self._look_later(loop)
        try:
            await self._streams[connection].write(frame)
        finally:
            del self._due_s[connection]
        self._release(connection)
        if future is not None:
            future.set_result(None)

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(min(LOOK_S, WRITE_S), self._check)

    def _check(self) -> None:
        """A write may be overdue. One timer looks at all: one for each would cost more than the frame does."""
        assert self._timer is not None
        look_s, self._timer = self._timer.when(), None
        if not self._due_s:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s - look_s > LOOK_S:  # gRPC may have returned writes meanwhile, and their tasks have not run yet
            self._due_s = {connection: (now_s + WRITE_S, size) for connection, (_, size) in self._due_s.items()}
        due_s, size = min(self._due_s.values())
        if due_s > now_s:
            self._look_later(loop)
            return
        self._fail(
            LinkLost(
                f"{self._peer}: too slow: it did not take {size} bytes in {WRITE_S:.0f} s: look at the line, and at "
                f"what holds up {self._peer}"
            )
        )

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._failed.set()
