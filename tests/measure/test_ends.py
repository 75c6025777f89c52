"""measure/ends.py and measure/plain.py on loopback: ends without a core, links for a test, plain TCP beside them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import BindError, IdentityError, LinkLost, PeerError, PeersUnreachable
from diloco_node.measure import ends, plain
from diloco_node.measure.ends import Dialer, measuring_end, region_at
from diloco_node.measure.measurement import MeasureCommand
from diloco_node.measure.measuring import Measuring
from diloco_node.measure.plain import PlainListener, dialed, listening
from diloco_node.measure.probes import FlowTimes
from diloco_node.measure.responder import SERVING_MAX
from diloco_node.transport.certificates import Identity, init_run, load_identity
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import measure_messages as msg
from diloco_node.wire import message_tables as tables
from diloco_node.wire.measure_messages import NS_PER_S, PlainPort
from tests.kit.measure_kit import DEADLINE_S, LINKS, NAMES, RUN, STRIPE, a_flow, be_patient, wish
from tests.kit.transport_kit import Recorder, expect_no_orphans

FREE = ("127.0.0.1", 0)


class Run:
    """Certificates of two authorities, and the ends that were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_run(folder / "run", RUN, list(NAMES))
        init_run(folder / "stranger", RUN, list(NAMES))
        self.stack = contextlib.AsyncExitStack()
        self.addresses: dict[str, str] = {}

    def identity(self, region: str, run: str = "run") -> Identity:
        return load_identity(self.folder / run / region)

    async def serve(self, region: str = "b", **changes: Any) -> Measuring:
        """As `measure serve`."""
        identity = self.identity(region)
        given = {"listen": FREE, "dial": self.dialer(region), "plain_listen": FREE, "times": LINKS, **changes}
        peers = dict.fromkeys(name for name in NAMES if name != region)
        end = await self.stack.enter_async_context(measuring_end(identity, peers, **given))
        self.addresses[region] = f"127.0.0.1:{end.transport.port}"
        return end

    def dialer(self, region: str = "a", run: str = "run") -> Dialer:
        return Dialer(self.identity(region, run), self.addresses, times=LINKS)

    async def linked(self, connections: int = 1, region: str = "a") -> Measuring:
        return await self.stack.enter_async_context(self.dialer(region)(("b",), connections))


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    be_patient(monkeypatch)
    monkeypatch.setattr(ends, "LINK_S", DEADLINE_S)
    made = Run(tmp_path)
    async with made.stack:
        yield made
    await expect_no_orphans(DEADLINE_S)


async def idle(end: Measuring) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while end.describe():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)


# ---- links for a test ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("connections", [1, 8])
async def test_a_flow_over_as_many_connections_as_the_dialing_side_chose(
    run: Run, connections: int, is_sending: bool
) -> None:
    end = await run.serve()
    measuring = await run.linked(connections)
    assert measuring.connections("b") == connections
    found = await measuring.flow(a_flow(is_sending=is_sending))
    assert found.received.mean > 0
    assert found.sent.wire_bytes > 0, "it goes through the measurement lane"
    assert found.sent.sent_bytes >= found.sent.retransmitted_bytes >= 0
    assert end.transport.rejections == {}


async def test_each_test_of_a_series_has_a_link_of_its_own(run: Run) -> None:
    await run.serve()
    command = MeasureCommand("a", ("b",), run.dialer())
    request = {"what": "bandwidth", "peer": "b", "seconds": 0.2, "warm_up_seconds": 0.1, "plain": True}
    found = await command.run({**request, "connections": [2, 1]}, lambda _: None)
    kinds = [("transport", "random"), ("transport", "int4"), ("plain", "random")]
    assert [(one["path"], one["body"], one["connections"]) for one in found["tests"]] == [
        (*kind, count) for count in (1, 2) for kind in kinds
    ]
    assert (found["failures"], found["plain_error"]) == ([], None)
    assert "through" not in found
    for one in found["tests"]:
        assert one["bytes_per_second"] > 0
        assert one["sent_bytes"] >= one["retransmitted_bytes"] >= 0
        assert (one["wire_bytes"] is None) is (one["path"] == "plain")


async def test_all_pairs_with_plain_tcp_of_regions_that_serve(run: Run) -> None:
    await run.serve("b")
    await run.serve("c")
    command = MeasureCommand("a", ("b", "c"), run.dialer())
    found = await command.run({"what": "mesh", "seconds": 0.2, "warm_up_seconds": 0.1, "plain": True}, lambda _: None)
    assert (found["failures"], found["plain_errors"]) == ([], [])
    assert [(one["from"], one["to"]) for one in found["pairs"]] == [(x, y) for x in NAMES for y in NAMES if x != y]
    assert all(one["bytes_per_second"] > 0 and one["plain_bytes_per_second"] > 0 for one in found["pairs"])


async def test_a_mesh_says_which_pairs_it_lacks(run: Run) -> None:
    end = await run.serve("b")
    command = MeasureCommand("a", ("b", "c"), run.dialer())
    found = await command.run({"what": "mesh", "seconds": 0.2, "warm_up_seconds": 0.1}, lambda _: None)
    assert {(one["from"], one["to"]) for one in found["pairs"]} == {("a", "b"), ("b", "a")}
    failed = {(one["from"], one["to"]): one["error"] for one in found["failures"]}
    assert set(failed) == {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}
    assert "a has no link to c, which has no address to dial" in failed["a", "c"]
    assert failed["b", "c"] == "b can't: b has no address of c in run.toml"
    await idle(end)


async def test_who_goes_away_in_the_middle_leaves_the_other_end_free(run: Run) -> None:
    end = await run.serve()
    for plain_connections in (0, 2):
        async with run.dialer()(("b",), 1) as measuring:
            long = a_flow(times=FlowTimes(0, 50 * NS_PER_S), plain_connections=plain_connections)
            flow = asyncio.create_task(measuring.flow(long))
            async with asyncio.timeout(DEADLINE_S):
                while not end.describe():  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            flow.cancel()
            await asyncio.gather(flow, return_exceptions=True)
            await idle(end)
            assert (await measuring.latency("b", 0.1)).latency.answered > 0, "the link is still there"


# ---- who is there ----------------------------------------------------------------------------------------------------


async def test_nobody_there(run: Run) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        run.addresses["b"] = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(PeersUnreachable, match=r"connection refused.*is `diloco-node measure serve` running there"):
            await run.linked()
        with pytest.raises(PeersUnreachable, match="nobody speaks TLS"):
            await region_at(run.addresses["b"], run.folder / "run" / "a")


async def test_certificates_of_another_authority_are_refused(run: Run) -> None:
    await run.serve()
    with pytest.raises(IdentityError, match=r"another run's authority.*same `diloco-node certs init`"):
        async with run.dialer("a", "stranger")(("b",), 1):
            pass
    with pytest.raises(IdentityError, match="not of this run"):
        await region_at(run.addresses["b"], run.folder / "stranger" / "a")


async def test_another_region_at_the_address_is_noticed(run: Run) -> None:
    await run.serve("c")
    run.addresses["b"] = run.addresses["c"]
    with pytest.raises(IdentityError, match="belongs to another region"):
        await run.linked()
    assert await region_at(run.addresses["b"], run.folder / "run" / "a") == "c"


async def test_another_version_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await run.serve()
    monkeypatch.setattr("diloco_node.transport.transport.PROTOCOL_VERSION", tables.PROTOCOL_VERSION + 1)
    ours, theirs = tables.PROTOCOL_VERSION + 1, tables.PROTOCOL_VERSION
    with pytest.raises(PeersUnreachable, match=f"protocol_version: ours {ours}, theirs {theirs}") as caught:
        await run.linked()
    assert "measure serve" not in str(caught.value), "it is running"


async def test_a_port_that_is_taken_is_named(run: Run) -> None:
    end = await run.serve()
    with pytest.raises(BindError, match="the port is taken"):
        await run.serve("c", listen=("127.0.0.1", end.transport.port))


@pytest.mark.parametrize("is_daemon_dialing", [False, True])
async def test_a_training_daemon_and_a_measuring_end_do_not_link(run: Run, is_daemon_dialing: bool) -> None:
    """Each says what the other one is, and neither takes it for its kind."""
    with ThreadPoolExecutor(1) as executor:
        handler = Recorder()
        peers: dict[str, str | None] = {"a": None}
        if is_daemon_dialing:
            await run.serve("a")
            peers = {"a": run.addresses["a"]}
        daemon = GrpcTransport(
            region="b",
            run_id=RUN,
            epoch=0,
            settings_digest="",
            manifest_digest="",
            identity=run.identity("b"),
            listen=FREE,
            peers=peers,
            handler=handler,
            executor=executor,
            is_advertised=False,
            times=LINKS,
        )
        await daemon.start()
        try:
            if is_daemon_dialing:
                async with asyncio.timeout(DEADLINE_S):
                    while not daemon.peer_status()["a"].error:  # noqa: ASYNC110 - nothing tells
                        await asyncio.sleep(0.01)
                assert "is no training daemon, but `diloco-node measure` of a" in daemon.peer_status()["a"].error
            else:
                run.addresses["b"] = f"127.0.0.1:{daemon.port}"
                with pytest.raises(PeersUnreachable, match=r"is the training daemon of b.*on a port of its own"):
                    await run.linked()
            assert handler.changes == []
            assert daemon.quarantined("a") == "", "a mistake of people is no attack"
        finally:
            await daemon.stop()


async def test_what_is_not_for_measuring_costs_the_peer_its_link(run: Run) -> None:
    end = await run.serve()
    async with measuring_end(run.identity("a"), {"b": run.addresses["b"]}, times=LINKS) as other:
        assert await ends._link_up(other, "b", 1) == ""
        with contextlib.suppress(LinkLost):
            for _ in range(1000):
                await other.transport.transfer("b", STRIPE, memoryview(bytes(200_000)))
        assert end.transport.rejections["a", "protocol"] == 1


# ---- plain TCP -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("connections", [1, 8])
async def test_a_flow_over_plain_connections(run: Run, connections: int, is_sending: bool) -> None:
    end = await run.serve()
    measuring = await run.linked()
    found = await measuring.flow(a_flow(is_sending=is_sending, plain_connections=connections))
    assert found.received.mean > 0
    assert found.sent.sent_bytes > 0, "counted on these connections"
    assert found.used_bytes > 0
    assert end.transport.rejections == {}
    assert measuring.connections("b") == 1
    await idle(end)


async def test_an_end_that_takes_no_plain_tcp_says_so_and_the_rest_is_measured(run: Run) -> None:
    await run.serve(plain_listen=None)
    command = MeasureCommand("a", ("b",), run.dialer())
    request = {"what": "bandwidth", "peer": "b", "seconds": 0.2, "warm_up_seconds": 0.1, "plain": True}
    found = await command.run({**request, "connections": [1]}, lambda _: None)
    assert [one["path"] for one in found["tests"]] == ["transport", "transport"]
    assert "no plain TCP beside it: b can't: it takes no plain TCP: only `measure serve` does" in found["plain_error"]


async def test_a_plain_port_that_is_taken_is_said_to_who_asks(run: Run) -> None:
    with socket.create_server(FREE) as taken:
        await run.serve(plain_listen=("127.0.0.1", taken.getsockname()[1]))
        measuring = await run.linked()
        with pytest.raises(PeerError, match=r"b can't: port \d+ for plain TCP can't be bound .*another --plain-port"):
            await measuring.flow(a_flow(plain_connections=1))


async def test_a_plain_port_that_is_shut_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    end = await run.serve()
    measuring = await run.linked()

    def shut(self: PlainListener) -> PlainPort:
        self.close()
        return PlainPort(self._token, self._port)

    monkeypatch.setattr(PlainListener, "where", property(shut))
    with pytest.raises(PeersUnreachable, match=r"its port for plain TCP, \d+ at 127.0.0.1, can't be reached"):
        await measuring.flow(a_flow(plain_connections=2))
    await idle(end)


async def test_who_requests_plain_tcp_and_does_not_come_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "JOIN_S", 0.3)

    @contextlib.asynccontextmanager
    async def nobody(*_: object) -> AsyncIterator[Any]:
        await asyncio.sleep(DEADLINE_S)
        yield

    monkeypatch.setattr("diloco_node.measure.requester.dialed", nobody)
    end = await run.serve()
    measuring = await run.linked()
    flow = asyncio.create_task(measuring.flow(a_flow(plain_connections=2)))
    async with asyncio.timeout(DEADLINE_S):
        while not end.describe():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    await idle(end)
    flow.cancel()
    await asyncio.gather(flow, return_exceptions=True)
    assert end.describe() == ""


async def test_strangers_at_the_plain_port_are_shut_out_and_the_peer_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "GREET_S", 0.2)
    async with listening("b", "127.0.0.1", 0, 2) as listener:
        where = listener.where
        strangers = []
        for first in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(32), where.token[:31]) * 6:
            reader, writer = await asyncio.open_connection("127.0.0.1", where.port)
            writer.write(first)
            strangers.append((reader, writer))
        for reader, writer in strangers:
            async with asyncio.timeout(DEADLINE_S):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read(1) == b"", "it is closed"
            writer.close()
        arrived: list[int] = []
        async with dialed("b", "127.0.0.1", where, 2) as sender:
            joined = await listener.joined()
            reading = asyncio.create_task(joined.receive(arrived.append))
            for _ in range(4):
                await sender.transfer("b", msg.Probe(1), memoryview(bytes(100_000)))
            async with asyncio.timeout(DEADLINE_S):
                while sum(arrived) < 400_000:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
        with pytest.raises(LinkLost, match="b: a plain connection"):
            await asyncio.wait_for(reading, DEADLINE_S)
        with pytest.raises(PeersUnreachable, match="can't be reached"):
            async with dialed("b", "127.0.0.1", where, 1):
                raise AssertionError("nobody else is let in")


@pytest.mark.parametrize("turns", [0, 1, 3, 4, 5, 6])  # after two asyncio loses it itself, until garbage is collected
async def test_a_plain_connection_that_comes_in_while_its_listener_closes_is_closed(turns: int) -> None:
    with socket.socket() as late:
        async with listening("b", "127.0.0.1", 0, 1) as listener:
            late.connect(("127.0.0.1", listener.where.port))
            for _ in range(turns):
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            late.sendall(listener.where.token)
        late.setblocking(False)
        async with asyncio.timeout(5.0):
            with contextlib.suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(late, 1) == b"", "it is closed"
        assert listener._joined == []


async def test_more_bytes_than_agreed_over_plain_tcp_are_a_strike(run: Run) -> None:
    end = await run.serve()
    async with measuring_end(run.identity("a"), {"b": run.addresses["b"]}, times=LINKS) as other:
        assert await ends._link_up(other, "b", 1) == ""
        received: asyncio.Queue[Any] = asyncio.Queue()
        other.transport.register(Received(received), frozenset({msg.MeasurementReady, msg.MeasurementDeclined}))
        other.transport.send("b", msg.MeasurementRequested(5, True, False, 0, 60 * NS_PER_S, 300_000, 1))
        ready = await asyncio.wait_for(received.get(), DEADLINE_S)
        async with dialed("b", "127.0.0.1", ready.plain, 1) as sender:
            with contextlib.suppress(LinkLost):
                for _ in range(1000):
                    await sender.transfer("b", msg.Probe(5), memoryview(bytes(200_000)))
            declined = await asyncio.wait_for(received.get(), DEADLINE_S)
        assert "are left of the measurement" in declined.reason
        assert end.transport.rejections["a", "protocol"] == 1
    await idle(end)


class Received:
    """Keeps the messages of a peer."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self.queue = queue

    def control_arrived(self, peer: str, message: Any) -> None:
        self.queue.put_nowait(message)

    def link_changed(self, peer: str, *, is_up: bool) -> None: ...


async def test_who_keeps_the_connections_of_earlier_tests_open_is_told_to_let_them_go(run: Run) -> None:
    end = await run.serve()
    async with contextlib.AsyncExitStack() as kept:
        measuring = await run.linked()
        stack = await kept.enter_async_context(contextlib.AsyncExitStack())

        async def keep_open(number: int) -> None:
            asked = wish(number, is_requester_sending=True, span_ns=1, bytes_max=1, plain_connections=1)
            exchange = await stack.enter_async_context(measuring._requester._exchange("b", number))
            measuring.transport.send("b", asked)
            ready = await exchange.answer(msg.MeasurementReady, DEADLINE_S)
            assert ready.plain is not None
            connections = await stack.enter_async_context(dialed("b", "127.0.0.1", ready.plain, 1))
            await connections.transfer("b", msg.Probe(number), memoryview(b"x"))
            await exchange.answer(msg.MeasurementReceived, DEADLINE_S)

        for number in range(SERVING_MAX):
            await keep_open(number)
        with pytest.raises(PeerError, match=f"connections of {SERVING_MAX} measurements of a are open"):
            await keep_open(SERVING_MAX)
    async with asyncio.timeout(DEADLINE_S):
        while end._responder._serving:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    found = await (await run.linked()).flow(a_flow(plain_connections=1))
    assert found.received.mean > 0
