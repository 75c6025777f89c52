"""Two processes with one certificate: the one started last stays, the other ends; a restart is no duplicate."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diloco_node.errors import SupersededError
from diloco_node.transport import transport as transport_module
from diloco_node.transport.peer_session import LinkTimes, Session
from diloco_node.transport.streams import DuplicateInstance
from diloco_node.transport.transport import GrpcTransport, new_instance_id
from tests.kit.transport_kit import FAST, Mesh, Recorder, address, meshed


class Process(Recorder):
    """One daemon's links."""

    def __init__(self) -> None:
        super().__init__()
        self.superseded: list[SupersededError] = []
        self.transport: GrpcTransport

    def ended(self, error: SupersededError) -> None:
        self.superseded.append(error)
        self.changed.set()


class Run:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    async def start(self, region: str, peers: dict[str, str | None], times: LinkTimes = FAST) -> Process:
        process = Process()
        changes = {"handler": process, "on_superseded": process.ended, "times": times}
        process.transport, _ = await self.mesh.start(region, peers, **changes)
        return process


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with meshed(tmp_path) as mesh:
        yield Run(mesh)


def at(process: Process) -> str:
    return address(process.transport)


async def test_the_older_of_two_processes_ends_and_the_newer_stays(run: Run) -> None:
    a = await run.start("a", {"b": None, "c": None})
    c = await run.start("c", {"a": at(a), "b": None})
    impatient = dataclasses.replace(FAST, silent_s=2.0)  # so long it wants to have been refused
    older = await run.start("b", {"a": at(a), "c": at(c)}, impatient)
    await older.until(lambda: older.is_up == {"a": True, "c": True})
    newer = await run.start("b", {"a": at(a), "c": at(c)})
    await newer.until(lambda: newer.is_up == {"a": True, "c": True})
    await older.until(lambda: older.superseded)
    (error,) = older.superseded
    assert error.exit_code == 7
    assert "a newer process of b runs, with the same certificate" in str(error)
    assert "superseded: a newer process of b is linked with" in str(error)
    assert newer.superseded == []
    assert newer.is_up == {"a": True, "c": True}
    assert newer.changes == [(peer, True) for peer, _ in newer.changes], "its links do not flap"
    for peer in (a, c):
        assert peer.transport.rejections["b", "superseded"] > 0


async def test_a_process_that_starts_again_is_no_duplicate(run: Run) -> None:
    a = await run.start("a", {"b": None})
    first = await run.start("b", {"a": at(a)})
    await first.until(lambda: first.is_up == {"a": True})
    await first.transport.stop()
    second = await run.start("b", {"a": at(a)})
    await second.until(lambda: second.is_up == {"a": True})
    assert a.transport.rejections == {}
    assert second.superseded == []


async def test_a_process_that_started_earlier_by_its_clock_links_when_the_other_is_silent(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await run.start("a", {"b": None})
    early = await run.start("b", {"a": None})  # its clock read first, but it can't dial yet
    late = await run.start("b", {"a": at(a)})
    await late.until(lambda: late.is_up == {"a": True})
    monkeypatch.setattr(Session, "is_alive", property(lambda _: False))
    early.transport.links["a"].address = at(a)
    dialing = asyncio.create_task(early.transport.links["a"].run_dialer())
    await early.until(lambda: early.is_up == {"a": True})
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
        await process.until(lambda process=process, peers=peers: process.is_up == dict.fromkeys(peers, True))
    await b.transport.stop()
    offset_ns = -ahead_s * 10**9  # as where it was set right meanwhile, or the region moved to another machine
    again = await run.start("b", {"a": at(a), "c": None})
    c.transport.links["b"].address = at(again)
    await again.until(lambda: again.is_up.get("a"))
    assert a.transport.rejections == {}
    assert again.superseded == []


async def test_one_peer_of_two_is_not_believed_and_both_are_once(run: Run) -> None:
    process = await run.start("b", {"a": None, "c": None})
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


async def test_the_only_peer_there_is_ends_nobody(run: Run) -> None:
    process = await run.start("b", {"a": None})
    process.transport.link_superseded("a", DuplicateInstance("a: superseded"))
    assert process.superseded == [], "nobody can confirm it"


def test_a_process_that_starts_later_has_a_greater_number() -> None:
    numbers = [new_instance_id(1_700_000_000_000_000_000 + second * 10**9) for second in range(50)]
    assert numbers == sorted(numbers)
    assert len({new_instance_id(5) for _ in range(100)}) == 100
    assert {len(number) for number in numbers} == {16}
