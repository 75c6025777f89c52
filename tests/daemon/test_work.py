"""Where the daemon's work runs: short calls at once, long ones in threads, and what both raise."""

import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from diloco_node.daemon.work import AT_ONCE_BYTES_MAX, beside_loop


def broken() -> None:
    raise ValueError("as it is")


class Simulated(Executor):
    """Threads of another kind, which count what they are given."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, call: Any, /, *args: Any, **_: Any) -> Future[Any]:
        self.calls += 1
        future: Future[Any] = Future()
        future.set_result(call(*args))
        return future


async def test_a_call_on_few_bytes_is_made_at_once_and_one_on_many_in_a_thread() -> None:
    here = threading.get_ident()
    with ThreadPoolExecutor(1) as pool:
        outcome = beside_loop(pool, AT_ONCE_BYTES_MAX, threading.get_ident)
        assert outcome.done()
        assert await outcome == here
        assert await beside_loop(pool, AT_ONCE_BYTES_MAX + 1, threading.get_ident) != here


@pytest.mark.parametrize("size_bytes", [0, AT_ONCE_BYTES_MAX + 1])
async def test_what_a_call_raises_comes_where_its_outcome_is_awaited(size_bytes: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        outcome = beside_loop(pool, size_bytes, broken)
        with pytest.raises(ValueError, match="as it is"):
            await outcome


async def test_simulated_threads_get_all_calls() -> None:
    threads = Simulated()
    assert await beside_loop(threads, 1, max, 1, 2) == 2
    assert threads.calls == 1
