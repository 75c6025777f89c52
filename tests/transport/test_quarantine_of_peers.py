"""A peer that breaks the protocol three times is shut out, the others are not; an operator lets it in again."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diloco_node.core.messages import BulkHeader, Payload, RequestVoteReply
from diloco_node.errors import LinkLost, PayloadCorrupt, PeerIncompatible, ProtocolViolation
from diloco_node.transport.streams import DuplicateInstance
from diloco_node.transport.transport import GrpcTransport
from tests.kit.transport_kit import FAST, Recorder, address, meshed
from tests.kit.waiting import PATIENCE_S

TIMES = dataclasses.replace(FAST, violation_backoff_s=0.05, farewell_s=0.1)


class Process(Recorder):
    """One daemon's links; it takes no bulk from peers in `strict_with`."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_with: set[str] = set()
        self.transport: GrpcTransport

    @property
    def up(self) -> set[str]:
        return {peer for peer, is_up in self.is_up.items() if is_up}

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        if peer in self.strict_with:
            raise ProtocolViolation("a transfer that nobody agreed to")
        return super().transfer_opened(peer, header, raw_bytes)


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[list[Process]]:
    """a, b and c, all linked; c dials a and b, b dials a."""
    processes: list[Process] = []
    async with meshed(tmp_path) as mesh:
        for region in "abc":
            peers: dict[str, str | None] = dict.fromkeys(set("abc") - {region})
            peers |= {name: address(one.transport) for name, one in zip("abc", processes, strict=False)}
            process = Process()
            process.transport, _ = await mesh.start(region, peers, handler=process, times=TIMES)
            processes.append(process)
        for process in processes:
            await process.until(lambda process=process: len(process.up) == 2)
        yield processes


async def refused_with(process: Process, peer: str, text: str) -> str:
    """The error of a link, once it has a text in it: nothing tells when a dial was refused."""
    async with asyncio.timeout(PATIENCE_S):
        while text not in (error := process.transport.peer_status()[peer].error):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return error


async def break_protocol(hostile: Process, victim: Process, name: str, peer: str) -> None:
    """Send what the victim does not take, until that is found once more."""
    count = victim.transport.rejections[name, "protocol"]
    async with asyncio.timeout(PATIENCE_S):
        while victim.transport.rejections[name, "protocol"] == count:
            with contextlib.suppress(LinkLost):
                await hostile.transport.transfer(peer, Payload(0, 0, bytes(32)), memoryview(bytes(10_000)))
            await asyncio.sleep(0.01)  # the link is down, or has not been dropped yet


async def test_three_violations_shut_a_peer_out_and_nobody_else(run: list[Process]) -> None:
    a, b, c = run
    a.strict_with = {"c"}
    for number in range(3):
        assert a.transport.quarantine_reason("c") == "", number
        await break_protocol(c, a, "c", "a")
    assert "for 10 min more, after 3 strikes; a transfer that nobody agreed to" in a.transport.quarantine_reason("c")
    await c.until(lambda: "a" not in c.up)
    error = await refused_with(c, "a", "in quarantine")
    assert "c is in quarantine for" in error
    assert "by a; its operator can lift that" in error
    assert "c" not in a.up
    assert {
        a.transport.quarantine_reason("b"),
        b.transport.quarantine_reason("c"),
        b.transport.quarantine_reason("a"),
    } == {""}
    assert a.transport.send("b", RequestVoteReply(1, False, True, b""))
    await b.until(lambda: "a" in dict(b.messages))
    assert c.up == {"b"}

    a.strict_with = set()
    assert a.transport.lift_quarantine("c")
    assert not a.transport.lift_quarantine("c")
    await a.until(lambda: "c" in a.up)
    assert a.transport.quarantine_reason("c") == ""


async def test_a_peer_that_is_shut_out_is_not_dialed_either(run: list[Process]) -> None:
    _, b, c = run
    for _ in range(3):
        c.transport.reject("b", PayloadCorrupt("checksum"))
    await c.until(lambda: "b" not in c.up)
    await b.until(lambda: "c" not in b.up)
    await refused_with(c, "b", "b is in quarantine")
    assert "c" not in b.up
    assert c.transport.lift_quarantine("b")
    await c.until(lambda: "b" in c.up)


@pytest.mark.parametrize("error", [PeerIncompatible("run_id"), DuplicateInstance("superseded"), LinkLost("silent")])
async def test_a_mistake_of_people_or_a_bad_line_is_no_strike(run: list[Process], error: Exception) -> None:
    a, *_ = run
    for _ in range(10):
        a.transport.reject("b", error)  # type: ignore[arg-type]
    assert a.transport.quarantine_reason("b") == ""
    assert "b" in a.up


async def test_links_of_an_expelled_region_are_closed_and_refused_until_it_is_readmitted(run: list[Process]) -> None:
    a, b, c = run
    for process in (a, b):
        process.transport.expel(frozenset({"c"}))
        process.transport.expel(frozenset({"c"}))  # told again with each event
    await c.until(lambda: not c.up)
    assert "c is expelled" in await refused_with(c, "a", "expelled")
    assert "expelled" in a.transport.quarantine_reason("c")
    assert (a.up, b.up) == ({"b"}, {"a"})
    for process in (a, b):
        process.transport.expel(frozenset())
    await c.until(lambda: c.up == {"a", "b"})
    assert a.transport.quarantine_reason("c") == ""


async def test_a_removed_region_is_let_in_to_be_told_so_and_its_link_ends(run: list[Process]) -> None:
    a, b, c = run
    a.transport.follow(a.transport.addresses, {"c"})
    for is_up in (False, True, False):
        await c.until(lambda is_up=is_up: ("a" in c.up) is is_up)
    assert a.transport.quarantine_reason("c") == "", "it has broken nothing"
    assert ("b" in a.up, "b" in c.up) == (True, True)
    addresses = b.transport.addresses
    b.transport.follow(addresses, {"a"})
    await b.until(lambda: "a" not in b.up)
    b.transport.follow(addresses)
    await b.until(lambda: "a" in b.up)
