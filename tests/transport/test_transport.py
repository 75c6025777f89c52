"""transport/transport.py over real gRPC with TLS on loopback: links come up, carry bytes, refuse, die and come back."""

import asyncio
import contextlib
import dataclasses
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from diloco_node.core.messages import Payload, PayloadRequested, RequestVoteReply
from diloco_node.errors import BindError, ConfigError, IdentityError, LinkLost
from diloco_node.lab.demo.region_processes import free_ports
from diloco_node.transport import outbound, streams
from diloco_node.transport import transport as transport_module
from diloco_node.transport.link_status import LinkState
from diloco_node.transport.streams import dial
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import envelope as e
from diloco_node.wire.envelope import encode_control
from tests.kit.ports import free_port
from tests.kit.transport_kit import (
    DEADLINE_S,
    FAST,
    Mesh,
    Recorder,
    address,
    connect_as,
    expect_no_orphans,
    hello_of,
    read_on,
    rogue,
    status_of,
)
from tests.kit.waiting import eventually

# ---- links come up ---------------------------------------------------------------------------------------------------


async def test_control_messages_go_both_ways_in_order(mesh: Mesh) -> None:
    a, at_a, b, at_b = await mesh.pair()
    for term in range(300):
        a.send("b", RequestVoteReply(term, True, False, b""))
        b.send("a", RequestVoteReply(300 - term, False, True, b""))
    await at_b.until(lambda: len(at_b.messages) == 300)
    await at_a.until(lambda: len(at_a.messages) == 300)
    assert at_b.messages == [("a", RequestVoteReply(term, True, False, b"")) for term in range(300)]
    assert at_a.messages == [("b", RequestVoteReply(300 - term, False, True, b"")) for term in range(300)]
    assert a.peer_status()["b"].state is LinkState.UP


async def test_the_side_with_the_larger_name_dials_when_only_it_knows_an_address(mesh: Mesh) -> None:
    _, at_a = await mesh.start("a", {"b": None})
    _, at_b = await mesh.start("b", {"a": address(mesh.running[0])})
    await at_a.until(lambda: at_a.is_up.get("b"))
    await at_b.until(lambda: at_b.is_up.get("a"))


async def test_a_node_that_nobody_can_dial_dials_at_once(mesh: Mesh) -> None:
    slow = dataclasses.replace(FAST, fallback_s=1000.0)
    _, at_a = await mesh.start("a", {"b": None}, times=slow)
    _, at_b = await mesh.start("b", {"a": address(mesh.running[0])}, times=slow, is_advertised=False)
    await at_b.until(lambda: at_b.is_up.get("a"))
    await at_a.until(lambda: at_a.is_up.get("b"))


async def test_a_process_that_has_just_started_dials_once_though_it_is_the_others_turn(mesh: Mesh) -> None:
    slow = dataclasses.replace(FAST, fallback_s=1000.0, backoff_min_s=1000.0, backoff_max_s=1000.0)
    port = free_port()
    # The port is closed: the first dial fails, and the next one is for never.
    a, at_a = await mesh.start("a", {"b": f"127.0.0.1:{port}"}, times=slow)
    async with asyncio.timeout(DEADLINE_S):
        while not a.peer_status()["b"].error:  # noqa: ASYNC110 - nobody is told of a dial that failed
            await asyncio.sleep(0.01)
    _, at_b = await mesh.start("b", {"a": address(a)}, listen=("127.0.0.1", port), times=slow)
    await at_b.until(lambda: at_b.is_up.get("a"))
    await at_a.until(lambda: at_a.is_up.get("b"))


async def test_the_other_side_tries_when_the_dialers_address_is_wrong(mesh: Mesh) -> None:
    a, at_a = await mesh.start("a", {"b": "127.0.0.1:1"})
    _, at_b = await mesh.start("b", {"a": address(a)})
    await at_a.until(lambda: at_a.is_up.get("b"))
    await at_b.until(lambda: at_b.is_up.get("a"))


async def test_dials_that_cross_end_in_one_link(mesh: Mesh) -> None:
    both = dataclasses.replace(FAST, fallback_s=0.0)
    ports = free_ports(2)
    for _ in range(5):
        a, at_a = await mesh.start(
            "a", {"b": f"127.0.0.1:{ports[1]}"}, listen=("127.0.0.1", ports[0]), times=both, is_advertised=False
        )
        b, at_b = await mesh.start(
            "b", {"a": f"127.0.0.1:{ports[0]}"}, listen=("127.0.0.1", ports[1]), times=both, is_advertised=False
        )
        await at_a.until(lambda at_a=at_a: at_a.is_up.get("b"))
        await at_b.until(lambda at_b=at_b: at_b.is_up.get("a"))

        async def exchange(a: GrpcTransport = a, at_b: Recorder = at_b) -> None:
            while not at_b.messages:
                a.send("b", RequestVoteReply(1, True, True, b""))
                await asyncio.sleep(0.01)

        await asyncio.wait_for(exchange(), DEADLINE_S)
        await a.stop()
        await b.stop()


@contextlib.asynccontextmanager
async def mute(mesh: Mesh, region: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A listener with a region's certificate that never answers a hello: its address, and whether it got one."""
    greeted = asyncio.Event()

    async def serve(_: e.Lane, context: Any) -> None:
        await context.read()
        greeted.set()
        await asyncio.Event().wait()

    identity = mesh.identity(region)
    server, port = streams.make_server(lambda: identity, "127.0.0.1:0", serve, handshake_s=DEADLINE_S)
    await server.start()
    yield f"127.0.0.1:{port}", greeted
    await server.stop(None)


async def test_of_two_crossing_dials_the_smaller_names_wins_on_its_side(mesh: Mesh) -> None:
    async with mute(mesh, "b") as (where, greeted):
        a, at_a = await mesh.start("a", {"b": where})
        await asyncio.wait_for(greeted.wait(), DEADLINE_S)
        stream = await dial(mesh.identity("b"), "a", address(a), e.Lane.CONTROL, timeout_s=DEADLINE_S)
        await stream.write(hello_of("b", e.Lane.CONTROL))
        with pytest.raises(streams.RedundantDial, match="a is dialing b itself"):
            await stream.read()
        await stream.aclose()
        assert a.rejections == {}
        assert at_a.changes == []
        await a.stop()


async def test_of_two_crossing_dials_the_smaller_names_wins_on_the_other_side(mesh: Mesh) -> None:
    async with mute(mesh, "a") as (where, greeted):
        b, at_b = await mesh.start("b", {"a": where}, is_advertised=False)
        await asyncio.wait_for(greeted.wait(), DEADLINE_S)
        made = await rogue(mesh, b)
        await at_b.until(lambda: at_b.is_up.get("a"))
        for stream in made.values():
            await stream.aclose()
        await b.stop()


async def test_three_nodes_have_a_link_for_each_pair(mesh: Mesh) -> None:
    ports = dict(zip("abc", free_ports(3), strict=True))
    made = {}
    for region in "abc":
        peers: dict[str, str | None] = {other: f"127.0.0.1:{ports[other]}" for other in "abc" if other != region}
        made[region] = await mesh.start(region, peers, listen=("127.0.0.1", ports[region]))
    for region, (transport, handler) in made.items():
        others = [other for other in "abc" if other != region]
        await handler.until(lambda handler=handler, others=others: all(handler.is_up.get(other) for other in others))
        for other in others:
            transport.send(other, PayloadRequested(ord(region), ord(other), bytes(32)))
    for region, (_, handler) in made.items():
        await handler.until(lambda handler=handler: len(handler.messages) == 2)
        expected = [(other, PayloadRequested(ord(other), ord(region), bytes(32))) for other in "abc" if other != region]
        assert sorted(handler.messages) == expected


# ---- transfers -------------------------------------------------------------------------------------------------------


async def test_control_messages_beyond_the_queue_are_dropped(mesh: Mesh) -> None:
    a, at_a, _, at_b = await mesh.pair()
    count = outbound.CONTROL_FRAMES_MAX + 100
    # No await: nothing leaves meanwhile.
    queued = sum(a.send("b", RequestVoteReply(term, True, True, b"")) for term in range(count))
    assert queued <= count - 99
    await at_b.until(lambda: len(at_b.messages) == queued)
    assert at_a.is_up["b"]


async def test_what_goes_to_all_is_encoded_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    a, _, _, at_b = await mesh.pair()
    encoded = []

    def note(message: Any) -> bytes:
        encoded.append(message)
        return encode_control(message)

    monkeypatch.setattr(transport_module, "encode_control", note)
    first, second = RequestVoteReply(1, True, True, b""), RequestVoteReply(2, True, True, b"")
    for message in (first, first, second, first):
        a.send("b", message)
    await at_b.until(lambda: len(at_b.messages) == 4)
    assert [message for _, message in at_b.messages] == [first, first, second, first]
    assert encoded == [first, second, first]


async def test_messages_without_a_link_are_dropped(mesh: Mesh) -> None:
    a, _ = await mesh.start("a", {"b": None})
    assert not a.send("b", RequestVoteReply(1, True, True, b""))
    with pytest.raises(LinkLost, match="down"):
        await a.transfer("b", Payload(0, 0, bytes(32)), memoryview(b"x"))
    with pytest.raises(ValueError, match="not a peer"):
        a.send("z", RequestVoteReply(1, True, True, b""))


# ---- links end and come back -----------------------------------------------------------------------------------------


async def test_the_link_comes_back_when_the_listening_side_restarts(mesh: Mesh) -> None:
    a, at_a, b, _ = await mesh.pair()
    port = b.port
    await b.stop()
    await at_a.until(lambda: not at_a.is_up["b"])
    again, at_again = await mesh.start("b", {"a": None}, listen=("127.0.0.1", port))
    await at_a.until(lambda: at_a.is_up["b"])
    await at_again.until(lambda: at_again.is_up.get("a"))
    a.send("b", RequestVoteReply(5, True, True, b""))
    again.send("a", RequestVoteReply(6, True, True, b""))
    await at_again.until(lambda: at_again.messages)
    await at_a.until(lambda: at_a.messages)


async def test_the_link_comes_back_when_the_dialing_side_restarts(mesh: Mesh) -> None:
    a, _, b, at_b = await mesh.pair()
    await a.stop()
    await at_b.until(lambda: not at_b.is_up["a"])
    _, at_a = await mesh.start("a", {"b": address(b)})
    await at_a.until(lambda: at_a.is_up.get("b"))
    await at_b.until(lambda: at_b.is_up["a"])
    assert at_b.changes == [("a", True), ("a", False), ("a", True)]


async def test_a_dropped_link_is_made_again(mesh: Mesh) -> None:
    a, at_a, b, at_b = await mesh.pair()
    b.links["a"].drop("a test wants it")
    await at_a.until(lambda: len(at_a.changes) == 3)
    await at_b.until(lambda: len(at_b.changes) == 3)
    assert at_a.changes == [("b", True), ("b", False), ("b", True)]
    assert a.rejections == b.rejections == {}


async def test_a_new_session_of_the_peer_replaces_the_one_it_forgot(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, silent_s=1000.0))
    first = await rogue(mesh, b)
    await at_b.until(lambda: at_b.is_up.get("a"))
    second = {lane: await connect_as(mesh, mesh.identity("a"), b, lane) for lane in e.Lane}
    for lane, stream in second.items():
        await stream.write(hello_of("a", lane, dial=2))
        e.decode_hello(await stream.read())
    await at_b.until(lambda: len(at_b.changes) == 3)
    assert at_b.changes == [("a", True), ("a", False), ("a", True)]
    with pytest.raises(LinkLost):
        await read_on(first[e.Lane.CONTROL])
    await second[e.Lane.CONTROL].write(e.encode_control(RequestVoteReply(1, True, True, b"")))
    await at_b.until(lambda: at_b.messages)
    for stream in [*first.values(), *second.values()]:
        await stream.aclose()


async def test_a_silent_peer_is_dropped(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None}, times=dataclasses.replace(FAST, silent_s=0.6, ping_s=0.1))
    made = await rogue(mesh, b)
    await at_b.until(lambda: at_b.changes == [("a", True), ("a", False)])
    assert "silent" in b.peer_status()["a"].error
    for stream in made.values():
        await stream.aclose()


async def test_pings_keep_an_idle_link_up(mesh: Mesh) -> None:
    times = dataclasses.replace(FAST, silent_s=4.0, ping_s=0.1)
    b, at_b = await mesh.start("b", {"a": None}, times=times)
    _, at_a = await mesh.start("a", {"b": address(b)}, times=times)
    await at_a.until(lambda: at_a.is_up.get("b"))
    await asyncio.sleep(5.0)
    assert at_a.changes == [("b", True)]
    assert at_b.changes == [("a", True)]


async def test_stop_is_clean_while_everything_moves(mesh: Mesh) -> None:
    a, _, b, at_b = await mesh.pair()
    body = memoryview(os.urandom(2**20) * 64)
    tasks = [asyncio.create_task(a.transfer("b", Payload(i, 0, bytes(32)), body)) for i in range(4)]
    tasks += [asyncio.create_task(b.transfer("a", Payload(i, 0, bytes(32)), body)) for i in range(4)]
    await at_b.until(lambda: at_b.opened)
    await asyncio.wait_for(asyncio.gather(a.stop(), b.stop()), DEADLINE_S)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, LinkLost) for result in results)
    assert any(isinstance(result, LinkLost) for result in results)
    await a.stop()  # twice is fine


# ---- settings --------------------------------------------------------------------------------------------------------


async def test_a_taken_port_says_what_to_do(mesh: Mesh) -> None:
    a, _ = await mesh.start("a", {"b": None})
    with pytest.raises(BindError, match=rf"127\.0\.0\.1:{a.port}: the port is taken.*set another port"):
        await mesh.start("c", {"b": None}, listen=("127.0.0.1", a.port))


async def test_an_unreachable_peer_is_named_with_address_and_stage(mesh: Mesh) -> None:
    port = free_port()
    a, _ = await mesh.start("a", {"b": f"127.0.0.1:{port}"})
    text = await status_of(a, "b", "refused")
    assert f"b at 127.0.0.1:{port}" in text
    assert "connecting, after" in text


async def test_a_peer_that_never_answers_is_given_up_after_the_handshake_time(mesh: Mesh) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        a, _ = await mesh.start("a", {"b": where}, times=dataclasses.replace(FAST, handshake_s=0.3))
        assert "no answer to connect or TLS handshake" in await status_of(a, "b", where)


async def test_wrong_identities_are_refused_before_anything_starts(mesh: Mesh) -> None:
    with pytest.raises(IdentityError, match="this node is b"):
        await mesh.start("b", {"a": None}, identity=mesh.identity("a"))
    with pytest.raises(IdentityError, match=r"this node is a\.run2"):
        await mesh.start("a", {"b": None}, run_id="run2")
    with pytest.raises(ConfigError, match="own peers"):
        await mesh.start("a", {"a": None})
    torn = dataclasses.replace(mesh.identity("a"), key_pem=b"no key")
    with pytest.raises((IdentityError, BindError)):
        await mesh.start("a", {"b": None}, identity=torn)


async def test_traffic_is_measured_by_the_kernel_and_agrees_on_both_sides(mesh: Mesh) -> None:
    a, _, b, at_b = await mesh.pair()
    body = os.urandom(8 * 2**20)
    await a.transfer("b", Payload(0, 0, bytes(32)), memoryview(body))
    await at_b.until(lambda: at_b.closed)
    await eventually(lambda: a.traffic()["b"].is_measured and a.traffic()["b"].bytes_out > len(body))
    await eventually(lambda: b.traffic()["a"].is_measured and b.traffic()["a"].bytes_in > len(body))
    out, into = a.traffic()["b"], b.traffic()["a"]
    assert out.is_measured
    assert into.is_measured
    assert len(body) < out.bytes_out < 1.05 * len(body)
    assert len(body) < into.bytes_in < 1.05 * len(body)


class Waiting(grpc.GenericRpcHandler):
    """A call that ends when the test lets it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    def service(self, _: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, _request: bytes, _context: Any) -> bytes:
        self.begun.set()
        await self.may_end.wait()
        return b""


async def test_the_look_for_orphans_waits_for_grpc_s_tasks_and_finds_those_that_stay() -> None:
    waiting = Waiting()
    server = grpc.aio.server(handlers=[waiting])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/a/b")(b"")
        await waiting.begun.wait()
        stopping = asyncio.create_task(server.stop(DEADLINE_S))
        with pytest.raises(AssertionError, match="orphan tasks"):
            await expect_no_orphans(0.01)
        asyncio.get_running_loop().call_later(0.05, waiting.may_end.set)
        await expect_no_orphans(DEADLINE_S)
        assert stopping.done()
        assert await call == b""
    ours = asyncio.create_task(asyncio.Event().wait())
    with pytest.raises(AssertionError, match="orphan tasks"):
        await expect_no_orphans(DEADLINE_S)
    ours.cancel()
