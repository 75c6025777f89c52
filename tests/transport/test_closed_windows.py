"""A peer that takes nothing of what we send does not hold a call, or a link, for ever."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from diloco_node.errors import LinkLost, PeerError
from diloco_node.transport.intake import Intake
from diloco_node.transport.session import Session
from diloco_node.transport.streams import Metadata
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import DEADLINE_S, FAST, Mesh, hello_of, meshed


class Closed:
    """A stream whose window is closed: it says that it lives, and takes nothing."""

    async def read(self) -> bytes:
        await asyncio.sleep(0.01)
        return e.PING_FRAME

    async def write(self, frame: bytes) -> None:
        await asyncio.Event().wait()

    async def send_metadata(self, metadata: Metadata) -> None:
        """Metadata have no window."""

    def peer_metadata(self, key: str) -> str:
        return ""

    def close(self, error: PeerError | None = None) -> None:
        """Nothing to close."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with meshed(tmp_path) as made:
        yield made


@pytest.mark.parametrize("lane", list(e.Lane))
async def test_a_hello_that_is_not_taken_ends_the_call(mesh: Mesh, lane: e.Lane) -> None:
    b, _ = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, hello_s=0.05))
    hello = e.decode_hello(hello_of("a", lane))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LinkLost, match="a: does not take our hello: its window is closed"):
            await b._links["a"].accept(hello, Closed())  # type: ignore[arg-type]
    assert b._links["a"]._accepted == {}


async def test_a_control_lane_that_takes_nothing_ends_the_link(mesh: Mesh) -> None:
    """Its pings come all the time, so it is not silent."""
    b, _ = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, silent_s=1.0, ping_s=0.05))
    session = Session("a", Closed(), _Quiet(), b._links["a"]._env, intake=Intake(1000, now_ns=0))
    async with asyncio.timeout(DEADLINE_S):
        ended = await session.run()
    assert "a: takes nothing any more: its window is closed" in str(ended)


class _Quiet(Closed):
    async def read(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError
