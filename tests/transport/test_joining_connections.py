"""Who may join a session of several connections, and what a broken peer on them costs."""

import contextlib
import dataclasses
from typing import Any

import pytest

from diloco_node.core.messages import RequestVoteReply
from diloco_node.errors import LinkLost
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from tests.kit.connections_kit import HEADER, chunk, joining
from tests.kit.transport_kit import FAST, Mesh, address, connect_as, hello_of, read_on, rogue
from tests.kit.waiting import eventually


async def refused(mesh: Mesh, b: GrpcTransport, **changes: Any) -> None:
    """Try to join, and read until the stream ends, which raises LinkLost."""
    await read_on(await joining(mesh, b, **changes))


@pytest.mark.parametrize(
    ("changes", "error", "strikes"),
    [
        ({"dial": 2}, "not up", {}),
        ({"instance_id": b"j" * 16}, "not up", {}),
        ({"connection": 2}, "not the next one", {}),
        ({"region": "c"}, "identity_mismatch", {("a", "identity_mismatch"): 1}),
        ({"run_id": "run2"}, "run_id", {("a", "incompatible"): 1}),
    ],
)
async def test_what_does_not_belong_to_the_session_is_refused_and_the_session_goes_on(
    mesh: Mesh, changes: dict[str, Any], error: str, strikes: dict[tuple[str, str], int]
) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    with pytest.raises(LinkLost, match=error):
        await refused(mesh, b, **{"connection": 1, **changes})
    assert b.rejections == strikes
    assert b.peer_status()["a"].connections == 1
    await made[e.Lane.CONTROL].write(e.encode_control(RequestVoteReply(1, True, True, b"")))
    await at_b.until(lambda: at_b.messages)
    assert at_b.changes == [("a", True)]
    for stream in made.values():
        await stream.aclose()


async def test_another_region_can_not_join_a_session_that_is_not_its_own(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    stream = await connect_as(mesh, mesh.identity("c"), b, e.Lane.BULK)
    await stream.write(hello_of("c", e.Lane.BULK, connection=1))
    with pytest.raises(LinkLost, match="not up"):
        await stream.read()
    assert b.peer_status()["a"].connections == 1
    for one in [*made.values(), stream]:
        await one.aclose()


async def test_an_index_is_taken_once(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    first = await joining(mesh, b, 1)
    with pytest.raises(LinkLost, match="not the next one"):  # while the first is being greeted
        await joining(mesh, b, 1)
    await first.write(e.JOINED_FRAME)
    await eventually(lambda: b.peer_status()["a"].connections == 2)
    with pytest.raises(LinkLost, match="not the next one"):
        await joining(mesh, b, 1)
    assert at_b.changes == [("a", True)]
    for stream in [*made.values(), first]:
        await stream.aclose()


async def test_a_connection_that_is_not_used_is_forgotten(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    # From here on: the link itself may take as long as this machine needs.
    link = b.links["a"]
    link.env = dataclasses.replace(link.env, times=dataclasses.replace(FAST, hello_s=0.2))
    stream = await joining(mesh, b, 1)
    with pytest.raises(LinkLost, match="was not used"):
        await read_on(stream)
    assert b.peer_status()["a"].connections == 1
    assert at_b.changes == [("a", True)]
    for one in [*made.values(), stream]:
        await one.aclose()


async def test_the_dialing_side_notices_another_process_at_the_address(mesh: Mesh) -> None:
    a, _, b, _ = await mesh.pair()
    session = b.links["a"].session
    assert session is not None
    with pytest.raises(LinkLost, match="another process answers"):
        await a.links["b"].dial_more(address(b), b"j" * 16, a.links["b"].dials, 1)
    await eventually(lambda: not session.is_joining)
    assert a.peer_status()["b"].connections == b.peer_status()["a"].connections == 1


# ---- broken peers ----------------------------------------------------------------------------------------------------

BEGIN = e.encode_begin(0, HEADER, 100)


@pytest.mark.parametrize(
    "frames",
    [
        [(1, BEGIN)],
        [(1, e.encode_end(0))],
        [(1, e.encode_abort(0, ""))],
        [(1, e.JOINED_FRAME)],
        [(0, chunk(0, 0, 3)), (0, BEGIN)],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (1, chunk(0, 40, 60))],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (1, chunk(0, 0, 50))],
        [(0, BEGIN), (1, chunk(0, 50, 51))],
        [(0, BEGIN), (1, chunk(0, 50, 50)), (1, chunk(0, 0, 50))],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (1, chunk(0, 51, 49)), (0, e.encode_end(0, [1, 1]))],
        [(0, BEGIN), (1, chunk(0, 0, 50)), (1, chunk(0, 50, 25)), (0, e.encode_end(0, [0, 1]))],
        [(0, BEGIN), (0, e.encode_end(0, [0, 1])), (1, chunk(0, 0, 99))],
        [(1, chunk(1, 0, 50)), (0, e.encode_begin(2, HEADER, 100))],
    ],
)
async def test_a_broken_peer_costs_its_link_and_is_counted(mesh: Mesh, frames: list[tuple[int, bytes]]) -> None:
    b, at_b = await mesh.start("b", {"a": None})
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    more = await joining(mesh, b, 1)
    await more.write(e.JOINED_FRAME)
    with contextlib.suppress(LinkLost):  # the first frame may cost the link before the last one is written
        for connection, frame in frames:
            await (more if connection else made[e.Lane.BULK]).write(frame)
    await at_b.until(lambda: not at_b.is_up["a"])
    assert b.rejections == {("a", "protocol"): 1}
    assert len(at_b.closed) == len(at_b.opened)
    assert not any(whole for *_, whole in at_b.closed)
    for stream in [*made.values(), more]:
        await stream.aclose()


@pytest.mark.parametrize(
    "frames",
    [
        [(1, chunk(0, 0, 100)), (1, chunk(0, 100, 100))],
        [(0, BEGIN), (0, chunk(0, 0, 50)), (0, e.encode_end(0, [1, 1]))],
        [(0, BEGIN), (0, e.encode_abort(0, "", [0, 1]))],
    ],
    ids=["a chunk whose transfer never begins", "an end without its chunks", "an abort without its chunks"],
)
async def test_what_never_comes_on_another_connection_is_waited_for_until_a_deadline(
    mesh: Mesh, frames: list[tuple[int, bytes]]
) -> None:
    b, at_b = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, transfer_silent_s=0.5, silent_s=1e9))
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    more = await joining(mesh, b, 1)
    await more.write(e.JOINED_FRAME)
    for connection, frame in frames:
        await (more if connection else made[e.Lane.BULK]).write(frame)
    await at_b.until(lambda: not at_b.is_up["a"])
    assert "too slow: nothing of an open transfer" in b.peer_status()["a"].error
    assert b.rejections == {}
    assert len(at_b.closed) == len(at_b.opened)
    for stream in [*made.values(), more]:
        await stream.aclose()
