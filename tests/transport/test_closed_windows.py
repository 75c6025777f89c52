"""A peer that takes nothing of what we send, and a gRPC that forgets a cancellation, hold nothing for ever."""

import asyncio
import dataclasses
import time

import pytest

from diloco_node.errors import LinkLost, PeerError
from diloco_node.transport.intake import Intake
from diloco_node.transport.link import PeerLink
from diloco_node.transport.peer_session import More, Session
from diloco_node.transport.streams import DialedStream, Metadata
from diloco_node.wire import envelope as e
from tests.kit.stacks import to_its_end
from tests.kit.transport_kit import DEADLINE_S, FAST, Mesh, hello_of


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


@pytest.mark.parametrize("lane", list(e.Lane))
async def test_a_hello_that_is_not_taken_ends_the_call(mesh: Mesh, lane: e.Lane) -> None:
    b, _ = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, hello_s=0.05))
    hello = e.decode_hello(hello_of("a", lane))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LinkLost, match="a: does not take our hello: its window is closed"):
            await b.links["a"].accept(hello, Closed())  # type: ignore[arg-type]
    assert b.links["a"].accepted == {}


async def test_a_control_lane_that_takes_nothing_ends_the_link(mesh: Mesh) -> None:
    """Its pings come all the time, so it is not silent."""
    b, _ = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, silent_s=1.0, ping_s=0.05))
    session = session_over(b.links["a"], Closed())
    async with asyncio.timeout(DEADLINE_S):
        ended = await session.run()
    assert "a: takes nothing any more: its window is closed" in str(ended)


async def test_a_process_that_stood_still_gives_the_peer_its_time_again(mesh: Mesh) -> None:
    b, _ = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, silent_s=1.5, ping_s=0.05))
    session = session_over(b.links["a"], Closed())
    task = asyncio.ensure_future(session.run())
    await asyncio.sleep(0.3)
    time.sleep(2.0)  # noqa: ASYNC251 - as a suspended process
    await asyncio.sleep(0.3)
    assert not task.done()
    async with asyncio.timeout(DEADLINE_S):
        assert "a: takes nothing any more: its window is closed" in str(await task)


async def forgets_its_cancellation(is_waited_for: asyncio.Event) -> None:
    """What gRPC does to a task that waits for a call's start, when that fails at the moment of the cancellation.

    Only the first time: a test that fails must end.
    """
    is_first = not is_waited_for.is_set()
    is_waited_for.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if is_first:
            raise LinkLost("Socket closed") from None
        raise


async def test_a_session_that_ends_dials_no_more_connections(mesh: Mesh) -> None:
    times = dataclasses.replace(FAST, ping_s=0.001, backoff_max_s=0.001)
    b, _ = await mesh.start("b", {"a": None}, times=times, connections=2)
    is_dialing = asyncio.Event()

    async def more(_: int) -> DialedStream:
        await forgets_its_cancellation(is_dialing)
        raise AssertionError

    session = session_over(b.links["a"], _Quiet(), more)

    async def ends() -> None:
        assert "the test wants it" in str(await session.run())

    running = asyncio.create_task(to_its_end(ends(), "the session", limit_s=DEADLINE_S))
    await is_dialing.wait()
    session.drop("the test wants it")
    await running


async def test_a_transport_that_stops_dials_nobody_any_more(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    is_dialing = asyncio.Event()
    monkeypatch.setattr(PeerLink, "_connect", lambda *_: forgets_its_cancellation(is_dialing))
    a, _ = await mesh.start("a", {"b": "127.0.0.1:1"})
    await is_dialing.wait()
    await to_its_end(a.stop(), "the transport", limit_s=DEADLINE_S)


def session_over(link: PeerLink, control: Closed, more: More | None = None) -> Session:
    """Bulk is quiet."""
    own, intake = link.env.credentials.identity.certificate, Intake(1000, now_ns=0)
    streams = {e.Lane.CONTROL: control, e.Lane.BULK: _Quiet()}
    return Session("a", streams, link.env, own, intake, instance=b"", more=more)  # type: ignore[arg-type]


class _Quiet(Closed):
    async def read(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError
