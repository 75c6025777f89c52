"""adapters/asides.py over real links on loopback: connections of measurements, as the transport's and plain TCP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_node.adapters import asides, plain_accept
from diloco_node.core import measuring as msg
from diloco_node.core.budget_plan import BudgetPlan
from diloco_node.core.measuring import NS_PER_S, Probe
from diloco_node.core.messages import IngressGranted
from diloco_node.core.types import RateLimits
from diloco_node.errors import LinkLost, PeerError
from diloco_node.measure import answering
from diloco_node.transport import link, outbound
from diloco_node.transport.kernel.sock_diag import read_sockets_to
from diloco_node.transport.kernel.wire_meter import WireMeter
from diloco_node.transport.pacing.budget import BudgetLane, LimitSource
from diloco_node.transport.pacing.link_stats import LinkWatch
from diloco_node.transport.pacing.pacer import Pacer
from diloco_node.transport.streams import DialedStream, dial
from diloco_node.wire.envelope import encode_begin
from diloco_node.wire.measurement import ASIDE_METHOD, encode_aside
from tests.measuring_kit import DEADLINE_S, MB, STRIPE, FlowTimes, Region, Regions, asked, be_patient, idle, wanted

BURST_S = 0.25
"""So much of a budget may have been saved up when work begins, and gone before it is booked."""

KINDS = pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "transport"])
RATE = 3 * MB
BUDGET = BudgetPlan(RateLimits(egress=RATE))


@pytest.fixture
async def regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Regions]:
    be_patient(monkeypatch)
    made = Regions(tmp_path)
    yield made
    await made.stop()


def open_things(region: Region) -> tuple[int, int, int]:
    """Doors, places taken, and marked sockets of a region."""
    found = region.transport.asides
    return len(found._doors), sum(found._places.values()), sum(map(len, region.transport._meter._asides.values()))


async def closed(region: Region) -> None:
    """Wait until nothing of a measurement is left."""
    await idle(region)
    async with asyncio.timeout(DEADLINE_S):
        while open_things(region) != (0, 0, 0):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


# ---- flows -----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("asker", ["a", "b"], ids=["asker-listens", "asker-dials"])
async def test_a_flow_over_connections_of_its_own(
    regions: Regions, asker: str, is_sending: bool, connections: int, is_plain: bool
) -> None:
    """Region b dials a: one dialable side of a pair is enough, whoever asks, and whoever sends."""
    a, b = await regions.start(budget={"a": BUDGET, "b": BUDGET})
    asking, peer = (a, b) if asker == "a" else (b, a)
    assert b.transport.dials("a")
    assert not a.transport.dials("b")
    sender, receiver = (asking, peer) if is_sending else (peer, asking)
    before = (sender.transport.traffic()[receiver.name].bytes_out, receiver.transport.traffic()[sender.name].bytes_in)
    found = await asking.measuring.flow(
        wanted(
            peer.name,
            is_sending=is_sending,
            connections=connections,
            is_plain=is_plain,
            times=FlowTimes(200_000_000, 600_000_000),
        )
    )
    assert found.received.mean > 0
    assert found.received.p10 <= found.received.median <= found.received.p90
    assert found.sent.wire_bytes > 0
    assert 0 <= found.sent.retransmitted_bytes <= found.sent.sent_bytes
    assert found.sent.sent_bytes > 0, "counted on these connections"
    booked = sender.lane(receiver.name)
    assert found.used_bytes > 0
    assert booked >= found.sent.wire_bytes
    assert receiver.lane(sender.name) == 0
    assert sender.lane(receiver.name, "rounds") == sender.lane(receiver.name, "recovery") == 0
    for one in (a, b):
        await closed(one)
        one.transport._meter.sample()
    arrived = found.received.mean * found.received.span_ns // NS_PER_S
    after = (sender.transport.traffic()[receiver.name].bytes_out, receiver.transport.traffic()[sender.name].bytes_in)
    assert after[0] - before[0] >= arrived, "counted at the sender"
    assert after[1] - before[1] >= arrived, "and at the receiver"
    assert asking.measuring.links.connections(peer.name) == 1, "the link's own are as they were"
    assert a.up == {"b"}
    assert a.transport.rejections == b.transport.rejections == {}


async def test_a_bulk_connection_that_joins_while_a_measurement_dials_is_the_links(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = await regions.start(budget={"a": BUDGET, "b": BUDGET})
    meter, marked, is_joining = b.transport._meter, set[int](), asyncio.Event()
    set_asides = meter.set_asides

    def record(peer: str, cookies: frozenset[int]) -> None:
        marked.update(cookies)
        set_asides(peer, cookies)

    async def slow(*given: Any, **how: Any) -> DialedStream:
        stream = await dial(*given, **how)
        is_joining.set()
        async with asyncio.timeout(DEADLINE_S):
            while not meter._dials["a"]._waiters:  # noqa: ASYNC110 - until the measurement would dial too
                await asyncio.sleep(0.01)
        return stream

    monkeypatch.setattr(meter, "set_asides", record)
    monkeypatch.setattr(link, "dial", slow)
    monkeypatch.setattr(LinkWatch, "connections_wanted", lambda *_, **__: 2)
    await asyncio.wait_for(is_joining.wait(), DEADLINE_S)
    await b.measuring.flow(wanted("a", connections=2))
    bulk = {one.cookie for one in meter._bulk("a")}
    assert len(bulk) == 2
    assert len(marked) == 2
    assert not bulk & marked


@KINDS
async def test_it_keeps_to_the_senders_budget(regions: Regions, is_plain: bool) -> None:
    a, _ = await regions.start(budget={"a": BUDGET})
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await a.measuring.flow(
        wanted(connections=2, is_plain=is_plain, times=FlowTimes(200_000_000, NS_PER_S)),
    )
    assert a.lane("b") <= RATE * (loop.time() - started_s + BURST_S)


@KINDS
async def test_it_keeps_to_the_receivers_grant(regions: Regions, is_plain: bool) -> None:
    a, b = await regions.start(budget={"b": BudgetPlan(RateLimits(ingress=RATE))})
    async with asyncio.timeout(DEADLINE_S):
        while a.transport.budget_status()["peers"]["b"]["limited_by"] != "grant":  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await a.measuring.flow(wanted(connections=2, is_plain=is_plain, times=FlowTimes(200_000_000, NS_PER_S)))
    assert a.lane("b") <= RATE * (loop.time() - started_s + BURST_S)
    assert b.transport.rejections == {}


@KINDS
async def test_who_does_not_keep_to_the_grant_is_not_read_faster(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    a, b = await regions.start(budget={"b": BudgetPlan(RateLimits(ingress=RATE))})
    a.transport._pacer._egress.set_limit("b", LimitSource.GRANT, None, now_ns=0)
    monkeypatch.setattr(a.transport._pacer, "heard", lambda _peer, message: isinstance(message, IngressGranted))
    times = FlowTimes(NS_PER_S // 2, 3 * NS_PER_S // 2)
    found = await a.measuring.flow(wanted(connections=2, is_plain=is_plain, times=times))
    assert found.received.mean < 1.5 * RATE, "half a second of it may have been saved up"
    assert b.transport.rejections == {}


@KINDS
async def test_it_ends_with_its_bytes(regions: Regions, is_plain: bool) -> None:
    a, _ = await regions.start(budget={"a": BUDGET})
    found = await a.measuring.flow(
        wanted(connections=2, is_plain=is_plain, bytes_max=2 * MB, times=FlowTimes(0, 60 * NS_PER_S))
    )
    assert found.used_bytes == 2 * MB
    assert 2 * MB <= a.lane("b") < 2.6 * MB


@KINDS
async def test_rounds_go_before_it(regions: Regions, is_plain: bool) -> None:
    rate = 2 * MB
    a, b = await regions.start(budget={"a": BudgetPlan(RateLimits(egress=rate))})
    times = FlowTimes(100_000_000, 60 * NS_PER_S)
    flow = asyncio.create_task(
        a.measuring.flow(wanted(connections=2, is_plain=is_plain, times=times, bytes_max=2 * MB))
    )
    async with asyncio.timeout(DEADLINE_S):
        while a.lane("b") < MB // 4:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    before = a.lane("b")
    await a.transport.transfer("b", STRIPE, memoryview(os.urandom(2 * MB)))
    meanwhile = a.lane("b") - before
    assert meanwhile < 0.25 * 2 * MB, f"{meanwhile} bytes of a measurement went in front of a round"
    assert (await flow).received.mean > 0
    assert b.rounds == [STRIPE]


@KINDS
async def test_each_piece_waits_while_the_link_has_something_to_send(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    """Also without a budget, where nothing else would put them in order."""
    a, _ = await regions.start()
    monkeypatch.setattr(outbound, "YIELD_S", DEADLINE_S)
    rounds = a.transport._link("b").outbound._queues[BudgetLane.ROUNDS]
    rounds.idle.clear()  # as while a round is on its way
    flow = asyncio.create_task(a.measuring.flow(wanted(connections=2, is_plain=is_plain)))
    async with asyncio.timeout(DEADLINE_S):
        while not a.transport._pacer._peers["b"].transfers:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    assert a.lane("b") == 0
    rounds.idle.set()
    assert (await flow).received.mean > 0


async def test_two_who_send_in_one_lane_take_turns() -> None:
    """What is left of a measurement over the link, and the next one beside it."""
    pacer = Pacer(["b"], meter=WireMeter(), send=lambda _peer, _message: None)
    pacer.set_plan(BudgetPlan(RateLimits(egress=100_000)))
    turns = [asyncio.create_task(pacer.turn("b", BudgetLane.MEASUREMENT, 5000, ())) for _ in range(3)]
    await asyncio.sleep(0)
    turns[1].cancel()
    async with asyncio.timeout(DEADLINE_S):
        found = await asyncio.gather(*turns, return_exceptions=True)
    assert [type(one) for one in found] == [type(None), asyncio.CancelledError, type(None)]
    assert pacer.status()["peers"]["b"]["lanes"]["measurement"]["used_bytes"] == 2 * 5300
    pacer.close()


@KINDS
async def test_when_the_link_goes_all_of_it_goes(regions: Regions, is_plain: bool) -> None:
    a, b = await regions.start(budget={"a": BUDGET})
    flow = asyncio.create_task(
        a.measuring.flow(wanted(connections=2, is_plain=is_plain, times=FlowTimes(0, 60 * NS_PER_S)))
    )
    async with asyncio.timeout(DEADLINE_S):
        while not a.lane("b"):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    a.transport.drop_link("b", "a test")
    with pytest.raises(LinkLost):
        await asyncio.wait_for(flow, DEADLINE_S)
    for one in (a, b):
        await closed(one)


@KINDS
async def test_an_operator_who_gives_up_ends_it_on_both_sides(regions: Regions, is_plain: bool) -> None:
    for asker in ("a", "b"):
        if not regions.all:
            await regions.start(budget={"a": BUDGET, "b": BUDGET})
        one, peer = regions.all[asker], regions.all["b" if asker == "a" else "a"]
        flow = asyncio.create_task(
            one.measuring.flow(wanted(peer.name, connections=2, is_plain=is_plain, times=FlowTimes(0, 60 * NS_PER_S)))
        )
        async with asyncio.timeout(DEADLINE_S):
            while not one.lane(peer.name):  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)
        await closed(one)
        await closed(peer)
        assert one.up == {peer.name}


# ---- the port --------------------------------------------------------------------------------------------------------


async def port_of_a_door(region: Region) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while not region.transport.asides._doors:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    (door,) = region.transport.asides._doors
    return door.open.port


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("asker", ["a", "b"], ids=["peer-cannot-reach", "asker-cannot-reach"])
async def test_a_port_that_cannot_be_reached_is_said_in_one_line_and_the_rest_is_measured(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, asker: str
) -> None:
    a, b = await regions.start(budget={"a": BUDGET, "b": BUDGET})
    free = socket.create_server(("127.0.0.1", 0))
    shut_port = free.getsockname()[1]
    free.close()
    made = asides.Door.__init__

    def behind_a_firewall(self: Any, *args: Any) -> None:
        made(self, *args)
        if self.asked.is_plain:
            self.open = replace(self.open, port=shut_port)

    monkeypatch.setattr(asides.Door, "__init__", behind_a_firewall)
    one, peer = (a, "b") if asker == "a" else (b, "a")
    document = await one.command().run(
        {
            "what": "bandwidth",
            "peer": peer,
            "seconds": 0.2,
            "warm_up_seconds": 0.1,
            "plain": True,
            "connections": [1, 2],
        },
        lambda _: None,
    )
    assert [(test["path"], test["connections"]) for test in document["tests"]] == [
        ("transport", n) for n in (1, 1, 2, 2)
    ]
    text = document["plain_error"]
    assert f"port {shut_port} of a at 127.0.0.1 can't be reached from b" in text
    assert "set measure_port in [regions.a], or measure with `measure serve`" in text
    assert "\n" not in text
    for region in (a, b):
        await closed(region)
        assert region.up
        assert region.transport.rejections == {}


async def test_a_port_that_is_taken_is_said(regions: Regions) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        regions.measure_ports["a"] = port
        _, b = await regions.start()
        with pytest.raises(
            PeerError, match=rf"port {port} for plain TCP can't be bound at 127.0.0.1 by a .*measure_port"
        ):
            await b.measuring.flow(wanted("a", connections=1, is_plain=True))


async def test_the_port_that_was_set_is_open_only_while_it_is_waited_for(regions: Regions) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
    regions.measure_ports["a"] = port
    a, b = await regions.start()
    assert not is_listening(port)
    for number in (1, 2):
        b.transport.send("a", asked(number, span_ns=NS_PER_S, connections=1, is_plain=True))
        assert await port_of_a_door(a) == port
        assert is_listening(port)
        b.transport.send("a", msg.MeasurementStopped(number))
        await closed(a)
        assert not is_listening(port)
    assert (await b.measuring.flow(wanted("a", connections=2, is_plain=True))).received.mean > 0


async def test_out_of_descriptors_a_door_stays_open_for_those_who_come_later(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, b = await regions.start()
    refused = [0]
    accepted = plain_accept._accepted

    async def accept(listener: socket.socket) -> Any:
        if refused[0] < 3:
            refused[0] += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await accepted(listener)

    monkeypatch.setattr(asides, "GREET_S", 0.01)
    monkeypatch.setattr(plain_accept, "_accepted", accept)
    assert (await b.measuring.flow(wanted("a", connections=2, is_plain=True))).received.mean > 0
    assert refused == [3]


async def test_one_connection_that_can_not_be_had_closes_the_others(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await regions.start()
    made: list[DialedStream] = []
    calls, others = [0], asyncio.Event()

    async def dials(*given: Any, **how: Any) -> DialedStream:
        calls[0] += 1
        if calls[0] == 3:
            await others.wait()
            raise LinkLost("a: no answer")
        stream = await dial(*given, **how)
        made.append(stream)
        if len(made) == 2:
            others.set()
        return stream

    monkeypatch.setattr(asides, "dial", dials)
    with pytest.raises(LinkLost, match="a: no answer"):
        await b.measuring.flow(wanted("a", connections=3))
    for stream in made:
        with pytest.raises(LinkLost):
            await stream.write(b"x")
    for one in (a, b):
        await closed(one)
        assert one.up
    monkeypatch.setattr(asides, "dial", dial)
    assert (await b.measuring.flow(wanted("a", connections=3))).received.mean > 0, "and it can be tried again"


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- what a hostile or broken peer may have us do --------------------------------------------------------------------


@KINDS
async def test_who_asks_and_does_not_come_leaves_nothing_open(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    a, b = await regions.start()
    monkeypatch.setattr(asides, "JOIN_S", 0.01)
    before = open_files()
    for number in range(30):
        b.transport.send("a", asked(number, connections=8, is_plain=is_plain))
        await b.until(
            lambda number=number: any(
                isinstance(one, msg.MeasurementDeclined) and one.measurement == number for _, one in b.heard
            )
        )
    assert b.heard[-1][1].reason.startswith("0 of 8 connections of a measurement came in from b")
    await closed(a)
    assert open_files() < before + 10


@KINDS
async def test_many_wishes_at_once_open_one_door(regions: Regions, is_plain: bool) -> None:
    a, b = await regions.start()
    for number in range(50):
        wish = asked(number, is_asker_sending=True, span_ns=60 * NS_PER_S, connections=8, is_plain=is_plain)
        b.transport.send("a", wish)
    await b.until(lambda: sum(isinstance(one, msg.MeasurementDeclined) for _, one in b.heard) == 49)
    assert open_things(a)[:2] == (1, 1)
    b.transport.send("a", msg.MeasurementStopped(0))
    await closed(a)


async def test_a_peer_has_so_many_connections_open_and_no_more(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lets go neither of the last measurement nor of the one before is told to wait."""
    a, b = await regions.start()
    monkeypatch.setattr(answering, "LINGER_S", DEADLINE_S)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(msg.ASIDES_MAX):
            b.transport.send("a", asked(number, is_asker_sending=True, span_ns=1, connections=1, is_plain=True))
            await b.until(
                lambda number=number: (
                    msg.MeasurementReady
                    in [type(one) for _, one in b.heard if getattr(one, "measurement", None) == number]
                )
            )
            (ready,) = [
                one for _, one in b.heard if isinstance(one, msg.MeasurementReady) and one.measurement == number
            ]
            connection = socket.create_connection(("127.0.0.1", ready.aside.port))
            stack.callback(connection.close)
            connection.sendall(encode_aside(ready.aside.token, 0) + b"x")
            await asyncio.sleep(0.01)
            with contextlib.suppress(OSError):
                connection.sendall(b"y")
            await b.until(
                lambda number=number: (
                    msg.MeasurementReceived
                    in [type(one) for _, one in b.heard if getattr(one, "measurement", None) == number]
                )
            )
        b.transport.send("a", asked(99, is_asker_sending=True, connections=1, is_plain=True))
        await b.until(lambda: isinstance(b.heard[-1][1], msg.MeasurementDeclined))
        assert "the connections of 3 measurements with b are still open" in b.heard[-1][1].reason
    await closed(a)


async def test_strangers_at_the_port_are_shut_out_and_the_peer_gets_in(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await regions.start()
    monkeypatch.setattr(asides, "GREET_S", 0.2)
    b.transport.send("a", asked(5, is_asker_sending=True, span_ns=1, connections=1, is_plain=True))
    port = await port_of_a_door(a)
    loop = asyncio.get_running_loop()
    strangers = []
    for first in (b"", b"GET / HTTP/1.1\r\n\r\n", encode_aside(secrets.token_bytes(32), 0), bytes(200)) * 6:
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, first)
        strangers.append(connection)
    await b.until(lambda: any(isinstance(one, msg.MeasurementReady) for _, one in b.heard))
    (ready,) = [one for _, one in b.heard if isinstance(one, msg.MeasurementReady)]
    # Without the loop in between: what it says is there before it can be too late with it.
    friend = socket.create_connection(("127.0.0.1", port))
    friend.sendall(encode_aside(ready.aside.token, 0) + b"x" * 1000)
    await b.until(lambda: any(isinstance(one, msg.MeasurementReceived) for _, one in b.heard))
    for connection in strangers:
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(connection, 1) == b""
        connection.close()
    friend.close()
    await closed(a)
    assert not is_listening(port)


async def ready_of(b: Region, number: int) -> msg.AsideOpen:
    """What a told b of the door."""

    def found() -> list[msg.MeasurementReady]:
        return [one for _, one in b.heard if isinstance(one, msg.MeasurementReady) and one.measurement == number]

    await b.until(found)
    aside = found()[0].aside
    assert aside is not None
    return aside


async def test_more_bytes_than_agreed_over_plain_tcp_are_a_strike(regions: Regions) -> None:
    a, b = await regions.start()
    wish = asked(5, is_asker_sending=True, span_ns=60 * NS_PER_S, bytes_max=300_000, connections=2, is_plain=True)
    b.transport.send("a", wish)
    door = await ready_of(b, 5)
    loop = asyncio.get_running_loop()
    connections = []
    for index in range(2):
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", door.port))
        await loop.sock_sendall(connection, encode_aside(door.token, index))
        connections.append(connection)
    with contextlib.suppress(OSError):
        for _ in range(20):
            await loop.sock_sendall(connections[0], bytes(200_000))
    await b.until(lambda: any(isinstance(one, msg.MeasurementDeclined) for _, one in b.heard))
    assert a.transport.rejections == {("b", "protocol"): 1}
    for connection in connections:
        connection.close()
    await closed(a)


async def test_the_same_connection_twice_and_one_too_many_are_shut_out(regions: Regions) -> None:
    a, b = await regions.start()
    b.transport.send("a", asked(5, is_asker_sending=True, span_ns=1, connections=2, is_plain=True))
    door = await ready_of(b, 5)
    loop = asyncio.get_running_loop()

    async def come(index: int) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", door.port))
        await loop.sock_sendall(connection, encode_aside(door.token, index))
        return connection

    first, again, over = await come(0), await come(0), await come(2)
    async with asyncio.timeout(DEADLINE_S):
        for connection in (again, over):
            assert await loop.sock_recv(connection, 1) == b""
    second = await come(1)
    await loop.sock_sendall(second, b"x")
    await b.until(lambda: any(isinstance(one, msg.MeasurementReceived) for _, one in b.heard))
    for connection in (first, second, again, over):
        connection.close()
    await closed(a)


async def test_another_region_that_knows_the_token_is_not_let_in(regions: Regions) -> None:
    a, b, c = await regions.start("abc")
    b.transport.send("a", asked(5, is_asker_sending=True, connections=1))
    door = await ready_of(b, 5)
    stream = await dial(c.transport._identity, "a", f"127.0.0.1:{a.transport.port}", ASIDE_METHOD, timeout_s=DEADLINE_S)
    await stream.write(encode_aside(door.token, 0))
    with pytest.raises(LinkLost, match="not there"):
        await stream.read()
    await stream.aclose()
    assert [len(one._joined) for one in a.transport.asides._doors] == [0]
    b.transport.send("a", msg.MeasurementStopped(5))
    await closed(a)


async def test_rounds_over_a_connection_of_a_measurement_are_a_strike(regions: Regions) -> None:
    a, b = await regions.start()
    b.transport.send("a", asked(5, is_asker_sending=True, span_ns=60 * NS_PER_S, connections=1))
    door = await ready_of(b, 5)
    stream = await dial(b.transport._identity, "a", f"127.0.0.1:{a.transport.port}", ASIDE_METHOD, timeout_s=DEADLINE_S)
    await stream.write(encode_aside(door.token, 0))
    await stream.write(encode_begin(0, STRIPE, 1000))
    await b.until(lambda: any(isinstance(one, msg.MeasurementDeclined) for _, one in b.heard))
    assert a.transport.rejections == {("b", "protocol"): 1}
    assert a.rounds == []
    await stream.aclose()
    await closed(a)


async def test_probes_of_another_measurement_are_a_strike(regions: Regions) -> None:
    a, b = await regions.start()
    a.measuring.ends._expected["b"].expect(6, 10**6)  # one before, whose last probes may still come over the link
    b.transport.send("a", asked(5, is_asker_sending=True, span_ns=60 * NS_PER_S, connections=1))
    door = await ready_of(b, 5)
    stream = await dial(b.transport._identity, "a", f"127.0.0.1:{a.transport.port}", ASIDE_METHOD, timeout_s=DEADLINE_S)
    await stream.write(encode_aside(door.token, 0))
    await stream.write(encode_begin(0, Probe(6, False), 1000))
    await b.until(lambda: any(isinstance(one, msg.MeasurementDeclined) for _, one in b.heard))
    assert a.transport.rejections == {("b", "protocol"): 1}
    await stream.aclose()
    await closed(a)


async def test_what_is_no_token_is_refused(regions: Regions) -> None:
    a, b = await regions.start()
    for first in (b"", encode_aside(bytes(32), 0) + b"x"):
        stream = await dial(
            b.transport._identity, "a", f"127.0.0.1:{a.transport.port}", ASIDE_METHOD, timeout_s=DEADLINE_S
        )
        await stream.write(first)
        with pytest.raises(LinkLost, match="began with"):
            await stream.read()
        await stream.aclose()
    assert a.transport.rejections == {("b", "protocol"): 2}, "two strikes; at the third a peer is shut out"
    assert a.up == {"b"}


async def test_a_peer_that_does_not_say_where_fails_the_measurement_only(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await regions.start()
    said: list[msg.AsideOpen | None] = []

    def heard(_: str, message: msg.MeasuringMessage) -> None:
        if isinstance(message, msg.MeasurementAsked):
            a.transport.send("b", msg.MeasurementReady(message.measurement, said[-1]))

    monkeypatch.setattr(a.measuring, "heard", heard)
    for aside, text in (
        (None, "does not say where"),
        (msg.AsideOpen(b"short", 80), "a token of 5 bytes"),
        (msg.AsideOpen(bytes(32), 0), "port 0"),
        (msg.AsideOpen(bytes(32), 70_000), "port 70000"),
    ):
        said.append(aside)
        with pytest.raises(PeerError, match=text):
            await b.measuring.flow(wanted("a", connections=1, is_plain=True))
    await closed(b)


async def test_a_region_that_nobody_can_dial_does_not_dial_itself(regions: Regions) -> None:
    """Region a has no address of b: a wish to dial it is refused, and costs nothing."""
    a, b = await regions.start()
    b.transport.send("a", asked(5, connections=1, is_plain=True, aside=msg.AsideOpen(bytes(32), 22)))
    await b.until(lambda: any(isinstance(one, msg.MeasurementDeclined) for _, one in b.heard))
    assert "b has no address that we could dial" in b.heard[-1][1].reason
    assert read_sockets_to([("127.0.0.1", 22)]) == []
    await closed(a)
