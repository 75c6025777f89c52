"""Where the daemon's work runs: named tasks on the event loop, and calls in threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
"""Starts a named task of the daemon. When it breaks, the daemon ends with it."""

POOL_THREADS: Final = 6
"""For what a round waits for: sums, digests, compression."""

FILE_THREADS: Final = 6
"""For payloads and states: two rounds in flight, their checkpoints and some fetches at once. They are apart from the
pool: a disk that takes seconds for a sync must hold up no sums and transfers."""

AT_ONCE_BYTES_MAX: Final = 64 * 2**10
"""The kernels take some 50 microseconds for it, the way to a thread and back several times as long."""

BACKGROUND_NICENESS: Final = 10
"""Added to the niceness of the thread for digests and the like: rounds and the learner go first."""


def in_thread(executor: Executor, call: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
    """The outcome of a call that a thread of the executor makes."""
    return asyncio.get_running_loop().run_in_executor(executor, call, *args)


def beside_loop(executor: Executor, size_bytes: int, call: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
    """The outcome of a call that looks at so many bytes: at once if they are few, else from a thread of the executor.
    Calls for other executors than threads, as in the simulator, are all theirs."""
    if size_bytes > AT_ONCE_BYTES_MAX or not isinstance(executor, ThreadPoolExecutor):
        return in_thread(executor, call, *args)
    outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        outcome.set_result(call(*args))
    except Exception as error:  # noqa: BLE001 - raised where the outcome is awaited, as from a thread
        outcome.set_exception(error)
    return outcome


@dataclass(frozen=True, slots=True)
class Threads:
    """The daemon's threads.

    Attributes:
        pool: for what a round waits for; never for a file. files: for payloads and states, which wait for the disk.
        background: for what nobody waits for; behind everything else.
        disk: one, for the ledger: its writes stay in order.
    """

    pool: Executor
    files: Executor
    background: Executor
    disk: Executor

    @classmethod
    def start(cls) -> Threads:
        """Executors that start their threads when they are first used."""
        return cls(
            ThreadPoolExecutor(POOL_THREADS, "work"),
            ThreadPoolExecutor(FILE_THREADS, "files"),
            ThreadPoolExecutor(1, "background", _lower_priority),
            ThreadPoolExecutor(1, "disk"),
        )

    def stop(self) -> None:
        """Wait for the calls that are being made, and drop those that have not begun."""
        for executor in (self.pool, self.files, self.background, self.disk):
            executor.shutdown(wait=True, cancel_futures=True)


def _lower_priority() -> None:
    """For the calling thread: Linux keeps the niceness per thread."""
    thread = threading.get_native_id()
    niceness = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, niceness + BACKGROUND_NICENESS)
