"""The event loop in virtual time: asyncio's promises, threads that wait for the disk, stalls, and sudden death."""

import asyncio
from typing import Any

import pytest

from diloco_node.errors import StorageError
from diloco_node.lab.sim.fake_store import DiskTime
from diloco_node.lab.sim.loop import VirtualLoop, VirtualThreads
from diloco_node.lab.sim.world import MS, SECOND, Life, World


class Process:
    """One process on a loop of its own, and what it notes."""

    def __init__(self) -> None:
        self.world = World(1)
        self.life = Life()
        self.errors: list[BaseException] = []
        self.loop = VirtualLoop(self.world, self.life, self.errors.append)  # type: ignore[abstract]
        self.disk = DiskTime()
        self.seen: list[tuple[float, Any]] = []

    def threads(self, count: int, ns_max: int = 0) -> VirtualThreads:
        return VirtualThreads(self.world, self.life, self.loop, self.disk, count=count, ns_max=ns_max)

    def note(self, what: Any) -> None:
        self.seen.append((self.world.now_ns / SECOND, what))

    def run(self) -> None:
        while self.world.step():
            pass


@pytest.fixture
def process() -> Process:
    return Process()


def test_what_a_task_awaits_happens_in_virtual_time(process: Process) -> None:
    async def work() -> None:
        await asyncio.sleep(2.5)
        process.note("slept")
        try:
            async with asyncio.timeout(1.0):
                await asyncio.get_running_loop().create_future()
        except TimeoutError:
            process.note("timed out")
        lock = asyncio.Lock()
        async with lock:
            waits = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0)
            assert not waits.done()
        await waits
        process.note(await asyncio.gather(*(asyncio.sleep(delay, delay) for delay in (0.3, 0.1))))

    process.loop.enter(process.loop.create_task, work())
    process.run()
    assert process.seen == [(2.5, "slept"), (3.5, "timed out"), (3.8, [0.3, 0.1])]
    assert not process.errors


def test_a_timer_that_was_cancelled_does_not_fire(process: Process) -> None:
    def start() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, process.note, "cancelled").cancel()
        loop.call_later(1.0, process.note, "kept")

    process.loop.enter(start)
    process.run()
    assert process.seen == [(1.0, "kept")]


def test_a_call_is_answered_when_the_disk_has_taken_its_time_and_is_durable_then(process: Process) -> None:
    durable: list[str] = []

    def write(name: str) -> str:
        process.disk.add(3 * MS, lambda: durable.append(name))
        return name

    async def work() -> None:
        threads = process.threads(1)
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(threads, write, name) for name in ("a", "b")]
        for call in calls:
            assert not durable[len(process.seen) :]
            process.note(await call)

    process.loop.enter(process.loop.create_task, work())
    process.run()
    assert process.seen == [(0.003, "a"), (0.006, "b")], "one thread, one after the other"
    assert durable == ["a", "b"]


def test_what_a_call_raises_is_raised_where_it_is_awaited(process: Process) -> None:
    def refuse() -> None:
        process.disk.add(MS)
        raise StorageError("full")

    async def work() -> None:
        with pytest.raises(StorageError, match="full"):
            await asyncio.get_running_loop().run_in_executor(process.threads(1), refuse)
        process.note("raised")

    process.loop.enter(process.loop.create_task, work())
    process.run()
    assert process.seen == [(0.001, "raised")]


def test_nothing_runs_on_a_stalled_loop_and_all_of_it_in_order_afterwards(process: Process) -> None:
    process.loop.enter(process.loop.call_later, 1.0, process.note, "timer")
    process.loop.stall(4 * SECOND)
    process.world.after(2 * SECOND, process.life, process.loop.enter, process.note, "message")
    process.world.after(5 * SECOND, process.life, process.loop.enter, process.note, "later")
    process.run()
    assert process.seen == [(4.0, "timer"), (4.0, "message"), (5.0, "later")]


def test_of_a_dead_process_nothing_happens_and_its_tasks_are_closed_where_they_stand(process: Process) -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3.0)
            process.note("never")
        finally:
            closed.append("closed")
            asyncio.get_running_loop().call_soon(process.note, "nobody runs this")

    process.loop.enter(process.loop.create_task, work())
    process.loop.enter(process.loop.call_later, 1.0, process.note, "never")
    process.life.is_over = True
    process.loop.abandon()
    assert closed == ["closed"]
    process.run()
    assert not process.seen
    assert not process.errors


def test_what_a_callback_raises_is_told(process: Process) -> None:
    process.loop.enter(lambda: 1 // 0)
    assert [type(error) for error in process.errors] == [ZeroDivisionError]
