"""An asyncio event loop in virtual time: what the daemon awaits happens when the world says so.

A loop stands for a process, and ends with its life. It has no selector and no thread. A call that the daemon hands a
thread is made after a drawn while, and its outcome comes back later still if the call waited for the disk. A loop can
be stalled: what should run on it waits, while threads, links and disks go on.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVarTuple

from diloco_node.lab.sim.fake_store import DiskTime
from diloco_node.lab.sim.world import SECOND, Life, World

Ts = TypeVarTuple("Ts")

TURNS_MAX = 100_000
"""Callbacks in a row at one and the same time; a loop that makes more of them spins."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one process.

    Args:
        life: of the process; nothing runs once it is over.
        on_error: gets what a callback raises, and what no task was asked for.
    """

    def __init__(self, world: World, life: Life, on_error: Callable[[BaseException], None]) -> None:
        self._world = world
        self._life = life
        self._on_error = on_error
        self._ready: deque[asyncio.Handle] = deque()
        self._is_running = False
        self._is_scheduled = False
        self._stalled_until_ns = 0
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def enter(self, call: Callable[..., object], *args: Any) -> None:
        """Something reaches the process from outside: make the call on the loop, now unless it is stalled."""
        self.call_soon(call, *args)
        if not self._is_running and self._stalled_until_ns <= self._world.now_ns:
            self._turn()

    def stall(self, for_ns: int) -> None:
        """Run nothing for so long."""
        self._stalled_until_ns = max(self._stalled_until_ns, self._world.now_ns + for_ns)

    def abandon(self) -> None:
        """The process is dead: its tasks are closed where they stand, and nobody hears of them."""
        self._ready.clear()
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            for task in list(self._tasks):
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                work = task.get_coro()
                assert isinstance(work, Coroutine)
                work.close()
        finally:
            events._set_running_loop(before)
        self._tasks.clear()

    def _turn(self) -> None:
        before = events._get_running_loop()
        events._set_running_loop(self)
        self._is_running = True
        try:
            turns = 0
            while self._ready and not self._life.is_over:
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()
                turns += 1
                assert turns < TURNS_MAX, f"the loop spins: {handle}"
        finally:
            self._is_running = False
            events._set_running_loop(before)

    def _wake(self) -> None:
        self._is_scheduled = False
        late_ns = self._stalled_until_ns - self._world.now_ns
        if late_ns > 0:
            self._schedule(late_ns)
        elif not self._is_running:
            self._turn()

    def _schedule(self, delay_ns: int) -> None:
        self._is_scheduled = True
        self._world.after(delay_ns, self._life, self._wake)

    def time(self) -> float:
        """Virtual seconds."""
        return self._world.now_ns / SECOND

    def is_running(self) -> bool:
        """Whether a callback runs."""
        return self._is_running

    def is_closed(self) -> bool:
        """Whether the process is dead."""
        return self._life.is_over

    def get_debug(self) -> bool:
        """Never."""
        return False

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As soon as what is before it has run."""
        handle = asyncio.Handle(callback, args, self, context)
        if not self._life.is_over:
            self._ready.append(handle)
            if not self._is_running and not self._is_scheduled:
                self._schedule(0)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """The same: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """In `delay` seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """At a time of `time`."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.after(round(when * SECOND) - self._world.now_ns, self._life, self._due, handle)
        return handle

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if handle.cancelled():
            return
        self._ready.append(handle)
        if self._is_scheduled:
            return
        if self._stalled_until_ns > self._world.now_ns:
            self._schedule(self._stalled_until_ns - self._world.now_ns)
        elif not self._is_running:
            self._turn()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is still in the world's heap, and does nothing when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """A task of this loop."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """By one of the executor's threads."""
        assert isinstance(executor, VirtualThreads), executor
        return executor.begin(func, args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback raised, or a task broke and nobody asked."""
        if not self._life.is_over:
            self._on_error(context.get("exception") or RuntimeError(context["message"]))


class VirtualThreads(Executor):
    """Threads of a process. A call takes a while of its own, and its time at the disk.

    A call is made at the end of its while, so it reads the state of that moment. Its writes are durable when the disk
    has taken its time, and only then the loop hears of them.

    Args:
        disk: what the call has to wait for. ns_max: what a call takes at most, apart from that.
    """

    def __init__(self, world: World, life: Life, loop: VirtualLoop, disk: DiskTime, *, count: int, ns_max: int) -> None:
        self._world = world
        self._life = life
        self._loop = loop
        self._disk = disk
        self._free = count
        self._ns_max = ns_max
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()

    def begin(self, call: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Make the call when a thread is free."""
        future = self._loop.create_future()
        if self._life.is_over:
            return future
        if not self._free:
            self._waiting.append((future, call, args))
            return future
        self._free -= 1
        self._start(future, call, args)
        return future

    def _start(self, future: asyncio.Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._world.after(self._world.draw_ns(0, self._ns_max), self._life, self._run, future, call, args)

    def _run(self, future: asyncio.Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        result, error = None, None
        self._disk.begin()
        try:
            result = call(*args)
        except Exception as failure:  # noqa: BLE001 - as a thread does
            error = failure
        if self._disk.ns:
            self._world.after(self._disk.ns, self._life, self._written, future, result, error, self._disk.writes)
        else:
            self._done(future, result, error)

    def _written(
        self, future: asyncio.Future[Any], result: Any, error: Exception | None, writes: list[Callable[[], None]]
    ) -> None:
        for write in writes:
            write()
        self._done(future, result, error)

    def _done(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if self._waiting:
            self._start(*self._waiting.popleft())
        else:
            self._free += 1
        self._loop.enter(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return  # it was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
