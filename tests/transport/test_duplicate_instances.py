"""Two processes with one certificate: the one started last stays, the other ends; a restart is no duplicate."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diloco_node.core.messages import BulkHeader, Message
from diloco_node.errors import SupersededError
from diloco_node.transport import transport as transport_module
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.peer_session import LinkTimes, Session
from diloco_node.transport.streams import DuplicateInstance
from diloco_node.transport.transport import GrpcTransport, new_instance_id
from tests.kit.waiting import Changing

RUN = "run1"
TIMES = LinkTimes(  # no peer looks dead because this machine stood still for a while
    handshake_s=60.0,
    hello_s=60.0,
    fallback_s=0.2,
    backoff_min_s=0.02,
    backoff_max_s=0.1,
    violation_backoff_s=0.1,
    ping_s=15.0,
    silent_s=60.0,
)


class Process(Changing):
    """One daemon's links."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)
        self.up: dict[str, bool] = {}
        self.ups = 0
        self.superseded: list[SupersededError] = []
        self.transport: GrpcTransport

    async def start(self, folder: Path, region: str, peers: dict[str, str | None], times: LinkTimes = TIMES) -> None:
        self.transport = GrpcTransport(
            region=region,
            run_id=RUN,
            epoch=0,
            settings_digest="",
            manifest_digest="",
            identity=load_identity(folder / region),
            listen=("127.0.0.1", 0),
            peers=peers,
            handler=self,
            executor=self.pool,
            times=times,
            on_superseded=self.ended,
        )
        await self.transport.start()

    def ended(self, error: SupersededError) -> None:
        self.superseded.append(error)
        self.changed.set()

    def control_arrived(self, peer: str, message: Message) -> None: ...

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        self.up[peer] = is_up
        self.ups += is_up
        self.changed.set()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        return None

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None: ...


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_run(folder, RUN, ["a", "b", "c"])
        self.processes: list[Process] = []

    async def start(self, region: str, peers: dict[str, str | None], times: LinkTimes = TIMES) -> Process:
        process = Process()
        await process.start(self.folder, region, peers, times)
        self.processes.append(process)
        return process

    async def stop(self) -> None:
        for process in self.processes:
            await process.transport.stop()
            process.pool.shutdown()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(tmp_path)
    yield made
    await made.stop()


def at(process: Process) -> str:
    return f"127.0.0.1:{process.transport.port}"


async def test_the_older_of_two_processes_ends_and_the_newer_stays(run: Run) -> None:
    a = await run.start("a", {"b": None, "c": None})
    c = await run.start("c", {"a": at(a), "b": None})
    impatient = dataclasses.replace(TIMES, silent_s=2.0)  # so long it wants to have been refused
    older = await run.start("b", {"a": at(a), "c": at(c)}, impatient)
    await older.until(lambda: older.up == {"a": True, "c": True})
    newer = await run.start("b", {"a": at(a), "c": at(c)})
    await newer.until(lambda: newer.up == {"a": True, "c": True})
    await older.until(lambda: older.superseded)
    (error,) = older.superseded
    assert error.exit_code == 7
    assert "a newer process of b runs, with the same certificate" in str(error)
    assert "superseded: a newer process of b is linked with" in str(error)
    assert newer.superseded == []
    assert newer.up == {"a": True, "c": True}
    assert newer.ups == 2, "its links do not flap"
    for peer in (a, c):
        assert peer.transport.rejections["b", "superseded"] > 0


async def test_a_process_that_starts_again_is_no_duplicate(run: Run) -> None:
    a = await run.start("a", {"b": None})
    first = await run.start("b", {"a": at(a)})
    await first.until(lambda: first.up == {"a": True})
    await first.transport.stop()
    second = await run.start("b", {"a": at(a)})
    await second.until(lambda: second.up == {"a": True})
    assert a.transport.rejections == {}
    assert second.superseded == []


async def test_a_process_that_started_earlier_by_its_clock_links_when_the_other_is_silent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await run.start("a", {"b": None})
    early = Process()
    await early.start(run.folder, "b", {"a": None})  # its clock read first, but it can't dial yet
    run.processes.append(early)
    late = await run.start("b", {"a": at(a)})
    await late.until(lambda: late.up == {"a": True})
    monkeypatch.setattr(Session, "is_alive", property(lambda _: False))
    early.transport.links["a"].address = at(a)
    dialing = asyncio.create_task(early.transport.links["a"].run_dialer())
    await early.until(lambda: early.up == {"a": True})
    assert a.transport.rejections == {}
    dialing.cancel()
    await asyncio.gather(dialing, return_exceptions=True)


@pytest.mark.parametrize("ahead_s", [3600, -3600, 86_400 * 365])
async def test_clocks_an_hour_apart_keep_no_link_down_and_make_no_restart_a_duplicate(
    run: Run, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    offset_ns = 0

    def instance_id(now_ns: int) -> bytes:
        return new_instance_id(now_ns + offset_ns)

    monkeypatch.setattr(transport_module, "new_instance_id", instance_id)
    a = await run.start("a", {"b": None, "c": None})
    offset_ns = ahead_s * 10**9
    b = await run.start("b", {"a": at(a), "c": None})
    offset_ns = 0
    c = await run.start("c", {"a": at(a), "b": at(b)})
    for process, peers in ((a, "bc"), (b, "ac"), (c, "ab")):
        await process.until(lambda process=process, peers=peers: process.up == dict.fromkeys(peers, True))
    await b.transport.stop()
    offset_ns = -ahead_s * 10**9  # as where it was set right meanwhile, or the region moved to another machine
    again = await run.start("b", {"a": at(a), "c": None})
    c.transport.links["b"].address = at(again)
    await again.until(lambda: again.up.get("a"))
    assert a.transport.rejections == {}
    assert again.superseded == []


async def test_one_peer_of_two_is_not_believed_and_both_are_once(tmp_path: Path) -> None:
    init_run(tmp_path, RUN, ["a", "b", "c"])
    process = Process()
    await process.start(tmp_path, "b", {"a": None, "c": None})
    try:
        refused = process.transport.link_superseded
        refused("a", DuplicateInstance("a: superseded"))
        refused("a", DuplicateInstance("a: superseded"))
        assert process.superseded == []
        refused("a", None)
        refused("c", DuplicateInstance("c: superseded"))
        assert process.superseded == [], "a is linked with us again"
        refused("a", DuplicateInstance("a: superseded"))
        refused("a", DuplicateInstance("a: superseded"))
        assert len(process.superseded) == 1
    finally:
        await process.transport.stop()
        process.pool.shutdown()


async def test_the_only_peer_there_is_ends_nobody(tmp_path: Path) -> None:
    init_run(tmp_path, RUN, ["a", "b"])
    process = Process()
    await process.start(tmp_path, "b", {"a": None})
    try:
        process.transport.link_superseded("a", DuplicateInstance("a: superseded"))
        assert process.superseded == [], "nobody can confirm it"
    finally:
        await process.transport.stop()
        process.pool.shutdown()


def test_a_process_that_starts_later_has_a_greater_number() -> None:
    numbers = [new_instance_id(1_700_000_000_000_000_000 + second * 10**9) for second in range(50)]
    assert numbers == sorted(numbers)
    assert len({new_instance_id(5) for _ in range(100)}) == 100
    assert {len(number) for number in numbers} == {16}
