"""The bulk connections of one link as one way out: each takes the next frame as soon as its last write has returned.

So a connection that is held up takes less, and nobody decides which one a chunk goes over. Where all of them are free
they take turns: each is paced to its share of the link's rate.

Or one leads and the others are spare. BBR holds a connection to four packets for a fifth of a second and a round trip
every ten seconds, to see the least round trip, except where it has just been idle. So the lead goes round: each is
idle before its ten seconds are over, and what stands still all the same is passed by. Where the leader is known to
carry the load a spare is not used for less than that: BBR forgets within ten round trips how fast it was on one that
carries a little. One that has just been opened is not known to, and what it does not take at once the others get.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from diloco_node.adapters.streams import Stream
from diloco_node.errors import LinkLost

RATE_FLOOR_BYTES_PER_S: Final = 50_000
"""A peer that takes less than this for a whole chunk is too slow: 1 MiB in 21 s."""

STALL_MIN_S: Final = 5.0

LEAD_S: Final = 8.5
"""For so long one leads: more than half of BBR's ten seconds, so that these end while another one does."""

FIT_WINDOW_FRAMES: Final = 32
FIT_FRAMES: Final = 27
"""A leader that took so many of the last frames, though it was not waited for, carries the load."""

FIT_FOR_FRAMES: Final = 256
"""Then that is asked again: what was all of the load while the limit was low may be a part of it now."""

PASSED_BY_S: Final = 0.05
"""A leader that has not taken a chunk in so long stands still: at full rate that takes a hundredth of a second."""


class Bundle:
    """Connections to one peer, with one write at a time on each. `add` at any time, `close` once.

    Args:
        peer: its name. first: the connection that has always been there.
        has_spares: whether one leads and the others are spare, at this moment; else all share the load.
    """

    def __init__(self, peer: str, first: Stream, *, has_spares: Callable[[], bool] = lambda: False) -> None:
        self._peer = peer
        self._has_spares = has_spares
        self._leader = 0
        self._leads_since_s = 0.0
        self._is_fit = False  # the leader carries the load
        self._fit_frames = 0  # since it was found to
        self._led: deque[bool] = deque(maxlen=FIT_WINDOW_FRAMES)  # which of the last frames it took
        self._busy_since_s: dict[int, float] = {}
        self._passing: asyncio.TimerHandle | None = None
        self._streams = [first]
        self._free: deque[int] = deque([0])
        self._waiting: deque[tuple[bool, asyncio.Future[int]]] = deque()  # (only the first will do, which it gets)
        self._writes: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> int:
        """Use one more from now on. Returns its index."""
        self._streams.append(stream)
        connection = len(self._streams) - 1
        # Where one leads this is the one: it has to learn how fast it can be.
        self._lead(connection)
        self._release(connection)
        return connection

    async def until_free(self) -> None:
        """Wait until a frame could be handed over at once; somebody else may be faster."""
        if self._choice() is None:
            self._release(await self._held(self._ask()), is_next=True)

    async def write(self, frame: bytes, counts: list[int]) -> None:
        """Hand a frame to the next connection that is free; where there are several, without waiting for the write.

        Args:
            counts: how many frames went over each connection; this one is added.

        Raises:
            LinkLost: the write failed, where this waits for it.
        """
        connection = await self._held(self._ask())
        self._took(connection)
        counts += [0] * (connection + 1 - len(counts))
        counts[connection] += 1
        if len(self._streams) > 1:
            self._spawn(self._write(connection, frame))
        else:  # a task would be a detour
            await self._write(connection, frame)

    def write_first(self, frame: bytes) -> asyncio.Task[None]:
        """Have a frame written over the first connection, after all that were handed to it before.

        Returns:
            A task that ends when gRPC has the frame, and raises LinkLost; nobody has to wait for it.
        """
        return self._spawn(self._write_held(self._ask(is_first=True), frame))

    async def until_failed(self) -> None:
        """Wait until a write fails for which nobody waited, and raise that."""
        await self._failed.wait()
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        """Give up the writes that have not returned."""
        if self._passing is not None:
            self._passing.cancel()
        writes = list(self._writes)
        for task in writes:
            task.cancel()
        await asyncio.gather(*writes, return_exceptions=True)

    # ---- whose turn it is --------------------------------------------------------------------------------------------

    def _ask(self, *, is_first: bool = False) -> asyncio.Future[int]:
        """A place in the line for the next connection that is free, or for the first one."""
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        choice = 0 if is_first and 0 in self._free else None if is_first else self._choice()
        if choice is not None:
            self._give(choice, place)
        else:
            self._waiting.append((is_first, place))
            self._watch_leader()
        return place

    async def _held(self, place: asyncio.Future[int]) -> int:
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled():  # it was given in the same moment
                self._release(place.result())
            raise

    def _release(self, connection: int, *, is_next: bool = False) -> None:
        self._busy_since_s.pop(connection, None)
        if is_next:
            self._free.appendleft(connection)
        else:
            self._free.append(connection)
        self._serve()

    def _serve(self) -> None:
        """Give what is free to those who wait for it, in the order in which they came."""
        left: deque[tuple[bool, asyncio.Future[int]]] = deque()
        while self._waiting and self._free:
            is_first, place = self._waiting.popleft()
            if place.done():
                continue
            choice = (0 if 0 in self._free else None) if is_first else self._choice()
            if choice is None:
                left.append((is_first, place))
            else:
                self._give(choice, place)
        self._waiting.extendleft(reversed(left))
        if any(not is_first for is_first, _ in left):
            self._watch_leader()

    def _give(self, connection: int, place: asyncio.Future[int]) -> None:
        self._free.remove(connection)
        self._busy_since_s[connection] = asyncio.get_running_loop().time()
        place.set_result(connection)

    def _choice(self) -> int | None:
        """The free connection that a chunk should go over; None: it should wait."""
        if len(self._streams) == 1 or not self._has_spares():
            return self._free[0] if self._free else None
        now_s = asyncio.get_running_loop().time()
        if now_s - self._leads_since_s >= LEAD_S:
            self._lead((self._leader + 1) % len(self._streams))
        if self._leader in self._free:
            return self._leader
        if now_s - self._busy_since_s.get(self._leader, now_s) >= PASSED_BY_S:
            self._unfit()
        if self._is_fit:
            return None
        return min(self._free, key=lambda one: (one - self._leader) % len(self._streams), default=None)

    def _lead(self, connection: int) -> None:
        self._leader, self._leads_since_s = connection, asyncio.get_running_loop().time()
        self._unfit()

    def _unfit(self) -> None:
        self._is_fit = False
        self._fit_frames = 0
        self._led.clear()

    def _took(self, connection: int) -> None:
        """A connection got a frame: see whether the leader gets nearly all."""
        if self._is_fit:
            self._fit_frames += 1
            if self._fit_frames >= FIT_FOR_FRAMES:
                self._unfit()
        self._led.append(connection == self._leader)
        if len(self._led) == FIT_WINDOW_FRAMES and sum(self._led) >= FIT_FRAMES:
            self._is_fit = True

    def _watch_leader(self) -> None:
        """A chunk waits for the leader, though others are free: look again when it counts as standing still."""
        if self._passing is None and self._free:
            self._passing = asyncio.get_running_loop().call_later(PASSED_BY_S, self._pass_by)

    def _pass_by(self) -> None:
        self._passing = None
        self._serve()

    # ---- writes ------------------------------------------------------------------------------------------------------

    def _spawn(self, write: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(write, name=f"bulk write {self._peer}")
        self._writes.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._failed.set()

    async def _write_held(self, place: asyncio.Future[int], frame: bytes) -> None:
        await self._write(await self._held(place), frame)

    async def _write(self, connection: int, frame: bytes) -> None:
        """Write over a connection that is ours, and release it."""
        limit_s = max(STALL_MIN_S, len(frame) / RATE_FLOOR_BYTES_PER_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._streams[connection].write(frame)
        except TimeoutError:
            raise LinkLost(
                f"{self._peer}: too slow: it did not take {len(frame)} bytes in {limit_s:.0f} s "
                f"(the floor is {RATE_FLOOR_BYTES_PER_S} bytes/s)"
            ) from None
        finally:
            self._release(connection)
