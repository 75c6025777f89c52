"""What a client can do to the data port below our messages: TLS and HTTP/2, with and without a certificate of the run.

The listener is a process of its own. While an attack goes on, another region's messages and transfers go both ways;
afterwards tasks and descriptors are back at what they were, and memory is within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from http2_attacks import ATTACKS, Attack, Progress, attacking

from diloco_node.core.messages import Payload, RequestVoteReply
from diloco_node.transport.certs import init_run
from diloco_node.transport.streams import dial
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import DEADLINE_S, RUN, Mesh, Recorder, eventually, hello_of, meshed
from tests.kit.victim import WHOLE, Facts, Victim, victim

MEMORY_BYTES_MAX = 256 * 2**20
"""What one peer's attack may cost: windows, frames and queues of its connections, and what the C library keeps."""

UNDER_WAY_BYTES = 2**20
UNDER_WAY_CONNECTIONS = 16
EXCHANGES = 20
BODY = os.urandom(2**20)
BY_NAME = {attack.name: attack for attack in ATTACKS}


@dataclass
class Exchange:
    """Region a, which is linked with the victim."""

    transport: GrpcTransport
    seen: Recorder
    turns: int = 0

    async def turn(self) -> None:
        """A message there and back, and a transfer that arrives whole."""
        self.turns += 1
        question = RequestVoteReply(self.turns, True, False, b"")
        before = sum(message == WHOLE for _, message in self.seen.messages)
        assert self.transport.send("b", question)
        await self.transport.transfer("b", Payload(0, self.turns, bytes(32)), memoryview(BODY))
        await self.seen.until(lambda: ("b", question) in self.seen.messages)
        await self.seen.until(lambda: sum(message == WHOLE for _, message in self.seen.messages) > before)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with meshed(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def linked(mesh: Mesh) -> AsyncIterator[tuple[Victim, Exchange]]:
    async with victim(mesh.folder) as listener:
        transport, seen = await mesh.start("a", {"b": f"127.0.0.1:{listener.port}"})
        await seen.until(lambda: seen.is_up.get("b"))
        exchange = Exchange(transport, seen)
        for _ in range(3):
            await exchange.turn()
        yield listener, exchange
        assert seen.changes == [("b", True)], "the other region's link never went down"
        await transport.stop()


async def until_under_way(attack: Attack, progress: Progress) -> None:
    """Until it has sent a lot, or has made as many connections as it makes at once, or several times."""
    wanted = min(attack.connections, UNDER_WAY_CONNECTIONS)
    start = progress.connected, progress.sent_bytes
    await eventually(
        lambda: progress.sent_bytes - start[1] >= UNDER_WAY_BYTES or progress.connected + progress.closed >= wanted
    )


async def under(attack: Attack, listener: Victim, exchange: Exchange, identity: Path | None) -> Facts:
    """The exchange goes on under an attack, and then everything is as before. What the victim knows in the end."""
    before = await listener.facts()
    memory_bytes = before.memory_bytes
    async with attacking(attack, listener.port, identity) as progress:
        await until_under_way(attack, progress)
        for _ in range(EXCHANGES):
            await exchange.turn()
            memory_bytes = max(memory_bytes, (await listener.facts()).memory_bytes)
    assert memory_bytes - before.memory_bytes < MEMORY_BYTES_MAX
    async with asyncio.timeout(DEADLINE_S):
        while True:
            after = await listener.facts()
            if after.tasks <= before.tasks and after.descriptors <= before.descriptors:
                break
            await asyncio.sleep(0.1)
    assert after.up == ["a"]
    assert after.faults == 0, "an exception of ours that nobody caught"
    return after


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(", ", "_").replace(" ", "_"))
async def test_the_others_exchange_goes_on_under_an_attack_of_a_member(mesh: Mesh, attack: Attack) -> None:
    async with linked(mesh) as (listener, exchange):
        await under(attack, listener, exchange, mesh.folder / "run" / "c")
