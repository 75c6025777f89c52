"""A learner's work in the background: one thread for what is carried or encoded, in the order in which it was asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

from diloco_node.errors import LearnerError

T = TypeVar("T")

STOP_S: Final = 10.0
THREAD_POLL_S: Final = 0.5
"""Between two looks at whether the thread still lives."""


class BackgroundWorker:
    """A thread that carries and encodes, in the order of the calls. disk: another one, for counters on the disk."""

    def __init__(self) -> None:
        self.disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="diloco-counters")
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="diloco-encoder", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Have a job done after those before it. The first one that fails is the last one."""
        self._jobs.put(job)

    def wait_for(self, job: Callable[[], T]) -> T:
        """Have a job done after those before it. Raises LearnerError: one of them failed, or the worker was closed."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
                raise

        self.put(run)
        while not future.done():
            is_over = not self._thread.is_alive()
            self.check()
            if is_over and not future.done():
                raise LearnerError("this learner has left: nothing is gathered from other ranks any more")
            wait((future,), timeout=THREAD_POLL_S)
        return future.result()

    def drain(self) -> None:
        """Wait until all that was asked for is done. Raises LearnerError: one of the jobs failed."""
        if self._thread.is_alive():
            self.wait_for(lambda: None)

    def check(self) -> None:
        """Raise, in the training thread, what ended the worker."""
        if isinstance(self._failure, LearnerError):
            raise LearnerError(str(self._failure)) from self._failure
        if self._failure is not None:
            raise LearnerError(f"the encoder thread ended: {self._failure!r}") from self._failure

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except Exception as error:  # noqa: BLE001 - a thread's last word; the training thread raises it
            self._failure = error

    def close(self) -> None:
        """Do what was asked for, then stop."""
        self._jobs.put(None)
        self._thread.join(STOP_S)
        self.disk.shutdown(wait=False)
