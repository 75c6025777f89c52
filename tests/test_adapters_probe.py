"""adapters/probe.py, probe_server.py, flows.py, pairs.py: real gRPC with TLS and real TCP on loopback, in moments.

How fast loopback is on this machine is not asserted anywhere: only that bytes are counted once, at the right end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node_world import VirtualLoop

from diloco_node.adapters import flows, probe, probe_server
from diloco_node.adapters.flows import BODY_BYTES_MAX, FlowTimes, SocketsOf, make_body, receive_transport
from diloco_node.adapters.pairs import measure_out
from diloco_node.adapters.probe import FlowMeasured, ProbeSession, open_session, region_at, warm_up_ns
from diloco_node.adapters.probe_server import ProbeServer
from diloco_node.codec.payload import compress_chunk
from diloco_node.core.messages import Payload
from diloco_node.errors import (
    BindError,
    IdentityError,
    LinkLost,
    PeerError,
    PeerIncompatible,
    PeersUnreachable,
    ProtocolViolation,
)
from diloco_node.transport.certs import Identity, init_run, load_identity
from diloco_node.transport.streams import dial, make_server
from diloco_node.wire import measurement as w
from diloco_node.wire.envelope import encode_begin, encode_chunk
from diloco_node.wire.measurement import FlowBody, FlowPath

DEADLINE_S = 120.0
SHORT = FlowTimes(50_000_000, 100_000_000)
MS = 1_000_000


class Run:
    """Identities of a run, and measuring ends that are stopped with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers: list[ProbeServer] = []
        init_run(folder / "run", "run1", ["a", "b", "c"])
        init_run(folder / "stranger", "run1", ["a", "b"])

    def identity(self, region: str, run: str = "run") -> Identity:
        return load_identity(self.folder / run / region)

    async def serve(self, region: str = "b", **options: object) -> str:
        server = ProbeServer(self.identity(region), ("127.0.0.1", 0), **options)  # type: ignore[arg-type]
        await server.start()
        self.servers.append(server)
        return f"127.0.0.1:{server.port}"


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    # Patience with a machine that stands still: of a probe that comes back late, and of ends that come late.
    for module, name in (
        (probe, "DIAL_S"),
        (probe, "ANSWER_S"),
        (probe, "UNANSWERED_AFTER_S"),
        (probe_server, "HANDSHAKE_S"),
        (flows, "START_S"),
    ):
        monkeypatch.setattr(module, name, DEADLINE_S / 2)
    made = Run(tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        yield made
    for server in made.servers:
        await server.stop()


async def short_flow(
    session: ProbeSession,
    *,
    path: FlowPath = FlowPath.TRANSPORT,
    body: FlowBody = FlowBody.RANDOM,
    connections: int = 1,
    is_sending: bool = True,
) -> FlowMeasured:
    return await session.flow(SHORT, is_sending=is_sending, path=path, body=body, connections=connections)


async def endless_flow(session: ProbeSession) -> FlowMeasured:
    """As long as one may be: whoever starts it ends it."""
    return await session.flow(
        FlowTimes(0, 60_000_000_000),
        is_sending=False,
        path=FlowPath.TRANSPORT,
        body=FlowBody.RANDOM,
        connections=2,
    )


# ---- round trips -----------------------------------------------------------------------------------------------------


async def test_round_trips_are_counted_and_timed(run: Run) -> None:
    async with open_session(run.identity("a"), "b", await run.serve()) as session:
        started_ns = time.monotonic_ns()
        found = await session.latency(0.1, gap_s=0.005)
        took_ns = time.monotonic_ns() - started_ns
    one = found.latency
    assert one.answered == 20
    assert one.unanswered == 0
    assert 0 < one.min_ns <= one.p50_ns <= one.p99_ns <= one.max_ns < took_ns
    assert found.retransmitted is not None
    assert 0 <= found.retransmitted < 1
    assert found.tcp_rtt_min_ns is not None
    assert 0 < found.tcp_rtt_min_ns < took_ns


async def test_a_peer_that_answers_no_echo_is_told_apart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    true_encode = w.encode_echo

    def every_other(kind: int, sequence: int) -> bytes:
        # The far end is in this process: what it sends back for odd sequences is lost.
        asked.append(sequence)
        return true_encode(kind, 0 if kind == w.KIND_ECHOED and sequence % 2 else sequence)

    monkeypatch.setattr(w, "encode_echo", every_other)
    address = await run.serve()
    for patience_s in (0.05, 0.5, 5.0, 50.0):
        monkeypatch.setattr(probe, "UNANSWERED_AFTER_S", patience_s)
        async with open_session(run.identity("a"), "b", address) as session:
            found = await session.latency(0.04, gap_s=0.005)
        assert found.latency.answered + found.latency.unanswered == 8
        if found.latency.unanswered == 4:
            return
        assert found.latency.unanswered > 4, "some that come are late: this machine needs more patience"
    raise AssertionError(f"{found.latency.unanswered} unanswered of 4 that were")


async def test_round_trips_beside_a_flow(run: Run) -> None:
    async with open_session(run.identity("a"), "b", await run.serve()) as session:
        filling = asyncio.create_task(short_flow(session))
        found = await session.latency(0.05)
        flow = await filling
    assert found.latency.answered >= 1
    assert flow.received.goodput.mean > 0


# ---- flows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sending", [True, False])
@pytest.mark.parametrize("path", list(FlowPath))
async def test_flows_both_ways(run: Run, path: FlowPath, is_sending: bool) -> None:
    async with open_session(run.identity("a"), "b", await run.serve()) as session:
        for connections, body in ((1, FlowBody.RANDOM), (3, FlowBody.INT4)):
            flow = await short_flow(session, path=path, body=body, connections=connections, is_sending=is_sending)
            rates, sent = flow.received.goodput, flow.sent
            assert rates.mean > 0
            assert rates.p10 <= rates.median <= rates.p90
            assert flow.received.cpu.span_ns > 0
            assert flow.received.cpu.cpu_ns > 0
            assert sent.cpu.cpu_ns > 0
            assert sent.sent_bytes is not None
            assert sent.retransmitted_bytes is not None
            assert 0 <= sent.retransmitted_bytes <= sent.sent_bytes


def test_bodies_are_what_they_say() -> None:
    random, int4 = make_body(FlowBody.RANDOM), make_body(FlowBody.INT4)
    assert random.nbytes == int4.nbytes == BODY_BYTES_MAX
    assert compress_chunk(random[: 2**20])[0] is False
    pays, frame = compress_chunk(int4[: 2**20])
    assert pays
    assert 0.75 < len(frame) / 2**20 < 0.9  # as of a learner's contributions: x1.21
    block = np.frombuffer(int4[:132], dtype=np.uint8)
    scale = float(block[:4].view(np.float32)[0])
    low = (block[4:] & 15).astype(np.int8)
    values = np.where(low > 7, low - 16, low) * scale
    assert 0.3 < scale < 0.8  # the largest of 256 normal values is near 3, over 7
    assert abs(values.mean()) < 0.5
    assert not np.array_equal(np.frombuffer(int4[: 2**20], np.uint8), np.frombuffer(int4[2**20 : 2**21], np.uint8))


async def test_flows_of_two_dialers_take_turns(run: Run) -> None:
    address = await run.serve()
    async with (
        open_session(run.identity("a"), "b", address) as first,
        open_session(run.identity("c"), "b", address) as second,
    ):
        started_ns = time.monotonic_ns()
        await asyncio.gather(short_flow(first), short_flow(second))
        assert time.monotonic_ns() - started_ns >= 2 * (SHORT.warm_up_ns + SHORT.span_ns)


async def test_who_waits_too_long_for_its_turn_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_server, "BUSY_S", 0.01)
    address = await run.serve()
    async with (
        open_session(run.identity("a"), "b", address) as first,
        open_session(run.identity("c"), "b", address) as second,
    ):
        filling = asyncio.create_task(endless_flow(first))
        await first_is_on(run)
        with pytest.raises(PeerError, match="b can't: b is busy measuring with a"):
            await short_flow(second)
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


async def first_is_on(run: Run) -> None:
    """Wait until some session of the first server has a flow whose streams are there."""
    sessions = run.servers[0]._sessions
    while not any(one.flow and one.flow.joined.is_set() for one in sessions.values()):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)


async def test_a_dialer_that_goes_away_leaves_nothing(run: Run) -> None:
    address = await run.serve()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2), open_session(run.identity("a"), "b", address) as session:
            await endless_flow(session)
    async with open_session(run.identity("a"), "b", address) as session:
        assert (await short_flow(session)).received.goodput.mean > 0
    while run.servers[0]._sessions:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)


async def test_streams_that_do_not_come_end_the_flow_not_the_session(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "START_S", 0.05)
    address = await run.serve()
    async with open_session(run.identity("a"), "b", address) as session:
        with monkeypatch.context() as patch:
            patch.setattr(ProbeSession, "_transport", _never_joins)
            with pytest.raises(PeerError, match="b can't: 0 of 1 connections of the flow came"):
                await short_flow(session)
        assert (await session.latency(0.02)).latency.answered > 0


async def _never_joins(self: ProbeSession, *_: object) -> FlowMeasured:
    await self._answer(w.FlowReceived, DEADLINE_S)
    raise AssertionError("a flow without streams was measured")


async def test_the_plain_port_may_be_missing(run: Run) -> None:
    async with open_session(run.identity("a"), "b", await run.serve(plain_port=None)) as session:
        assert session.opened.plain_port == 0


async def test_a_plain_port_that_is_shut_is_named(run: Run) -> None:
    address = await run.serve()
    async with open_session(run.identity("a"), "b", address) as session:
        run.servers[0]._listener.close()  # type: ignore[union-attr]
        with pytest.raises(PeersUnreachable, match=r"plain TCP, \d+ at 127.0.0.1, can't be reached .*--no-plain"):
            await short_flow(session, path=FlowPath.PLAIN)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(30), bytes(w.PREAMBLE_BYTES)])
async def test_strangers_at_the_plain_port_are_shown_out(run: Run, said: bytes) -> None:
    await run.serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", run.servers[0].plain_port)
    writer.write(said)
    writer.write_eof()
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_nothing_that_arrives_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "START_S", 0.05)

    class Silent:
        async def read(self) -> bytes:
            await asyncio.Event().wait()
            raise AssertionError

        async def write(self, frame: bytes) -> None: ...

        def close(self, error: PeerError | None = None) -> None: ...

    with pytest.raises(LinkLost, match="nothing arrived"):
        await receive_transport([Silent()], "b", SHORT)


def test_bytes_count_when_they_arrive_and_before_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual clock, two streams that give 1,000 raw bytes each 10 ms: 200 kB/s, however few bytes frames have."""
    pays, frame = compress_chunk(memoryview(bytes(1000)))
    assert pays
    assert len(frame) < 100

    class Paced:
        def __init__(self) -> None:
            self.sent = 0

        async def read(self) -> bytes:
            self.sent += 1
            if self.sent == 1:
                return encode_begin(0, Payload(0, 0, bytes(32)), 10**6)
            await asyncio.sleep(0.01)
            return encode_chunk(0, 1000 * (self.sent - 2), 1000, frame, is_compressed=True)

        async def write(self, frame: bytes) -> None: ...

        def close(self, error: PeerError | None = None) -> None: ...

    async def receive() -> flows.Received:
        loop = asyncio.get_running_loop()
        clock = SimpleNamespace(monotonic_ns=lambda: int(loop.time() * 1e9), process_time_ns=time.process_time_ns)
        monkeypatch.setattr(flows, "time", clock)
        return await receive_transport([Paced(), Paced()], "b", FlowTimes(100 * MS, 500 * MS))

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found = runner.run(receive())
    assert found.goodput.mean == pytest.approx(200_000, rel=0.001)


async def test_a_transfer_too_long_for_the_scratch_is_refused(run: Run) -> None:
    class Huge:
        async def read(self) -> bytes:
            return encode_begin(0, Payload(0, 0, bytes(32)), BODY_BYTES_MAX + 1)

        async def write(self, frame: bytes) -> None: ...

        def close(self, error: PeerError | None = None) -> None: ...

    with pytest.raises(ProtocolViolation, match="a transfer of 16777217 bytes"):
        await receive_transport([Huge()], "b", SHORT)


# ---- who may, and who is there ---------------------------------------------------------------------------------------


async def test_nobody_there(run: Run) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(PeersUnreachable, match=r"connection refused.*measure serve"):
            async with open_session(run.identity("a"), "b", address):
                pass
        with pytest.raises(PeersUnreachable, match="nobody speaks TLS"):
            await region_at(address, run.folder / "run" / "a")


async def test_a_running_daemon_says_so(run: Run) -> None:
    async def serve(_lane: str, _context: object) -> None:
        raise AssertionError("a daemon does not take this call")

    server, port = make_server(run.identity("b"), "127.0.0.1:0", serve, handshake_s=DEADLINE_S)
    await server.start()
    try:
        with pytest.raises(PeersUnreachable, match="is a running daemon"):
            async with open_session(run.identity("a"), "b", f"127.0.0.1:{port}"):
                pass
    finally:
        await server.stop(None)


async def test_certificates_of_another_authority_are_refused(run: Run) -> None:
    address = await run.serve()
    with pytest.raises(IdentityError, match="signed by another run's authority"):
        async with open_session(run.identity("a", "stranger"), "b", address):
            pass
    with pytest.raises(IdentityError, match="not of this run"):
        await region_at(address, run.folder / "stranger" / "a")


async def test_another_region_at_the_address_is_noticed(run: Run) -> None:
    address = await run.serve("c")
    with pytest.raises(IdentityError, match="belongs to another region"):
        async with open_session(run.identity("a"), "b", address):
            pass
    assert await region_at(address, run.folder / "run" / "a") == "c"


async def test_another_version_is_named(run: Run) -> None:
    async def serve(_lane: str, context: Any) -> None:
        await context.read()
        await context.write(w.encode_message(w.SessionOpened(2, bytes(16), 0, "")))
        await context.read()

    server, port = make_server(run.identity("b"), "127.0.0.1:0", serve, handshake_s=DEADLINE_S, lanes=(w.METHOD,))
    await server.start()
    try:
        with pytest.raises(PeerIncompatible, match="by version 2, this program by 1"):
            async with open_session(run.identity("a"), "b", f"127.0.0.1:{port}"):
                pass
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"garbage",
        w.encode_echo(w.KIND_ECHO, 1),
        w.encode_message(w.StreamJoined(bytes(16), 1, 0)),
        w.encode_message(w.FlowReady(1)),
    ],
)
async def test_calls_that_begin_wrong_are_ended(run: Run, first: bytes) -> None:
    stream = await dial(run.identity("a"), "b", await run.serve(), w.METHOD, timeout_s=DEADLINE_S)
    await stream.write(first)
    with pytest.raises(LinkLost):
        await stream.read()
    await stream.aclose()


async def test_a_flow_over_the_limits_ends_the_session(run: Run) -> None:
    stream = await dial(run.identity("a"), "b", await run.serve(), w.METHOD, timeout_s=DEADLINE_S)
    await stream.write(w.encode_message(w.SessionAsked(1)))
    assert isinstance(w.decode_session(await stream.read()), w.SessionOpened)
    await stream.write(w.encode_message(w.FlowAsked(1, True, FlowPath.PLAIN, FlowBody.RANDOM, 17, 0, 1)))
    with pytest.raises(LinkLost, match="connections 17"):
        await stream.read()
    await stream.aclose()


async def test_a_taken_port_is_named(run: Run) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        for server in (
            ProbeServer(run.identity("b"), ("127.0.0.1", taken)),
            ProbeServer(run.identity("b"), ("127.0.0.1", 0), plain_port=taken),
        ):
            with pytest.raises(BindError, match=str(taken)):
                await server.start()
            await server.stop()


# ---- pairs -----------------------------------------------------------------------------------------------------------


async def test_a_region_measures_to_another_one_when_asked(run: Run) -> None:
    target = await run.serve("c")
    address = await run.serve("b", addresses={"c": target})
    asked = w.PairAsked("c", "127.0.0.1:1", 50 * MS, 50 * MS, 100 * MS, True)
    async with open_session(run.identity("a"), "b", address) as session:
        found = await session.pair(asked)
        with pytest.raises(PeerError, match=r"b can't: .*connection refused"):
            await session.pair(w.PairAsked("a", "127.0.0.1:1", 50 * MS, 50 * MS, 100 * MS, True))
    assert found.answered == 5
    assert 0 < found.p50_ns <= found.p99_ns
    assert found.bytes_per_s > 0
    assert found.plain_bytes_per_s > 0
    assert found.sent_bytes > 0


async def test_a_pair_without_plain_tcp(run: Run) -> None:
    asked = w.PairAsked("b", "", 20 * MS, 50 * MS, 100 * MS, True)
    async with open_session(run.identity("a"), "b", await run.serve(plain_port=None)) as session:
        found = await measure_out(session, asked, is_sending=False)
    assert found.plain_bytes_per_s == 0
    assert found.bytes_per_s > 0


def test_the_warm_up_follows_the_round_trip() -> None:
    assert warm_up_ns(1_000) == 1_000_000_000
    assert warm_up_ns(100 * MS) == 2_500_000_000
    assert warm_up_ns(900 * MS) == 5_000_000_000


async def test_sockets_opened_before_are_not_counted(run: Run) -> None:
    address = await run.serve()
    port = run.servers[0].port
    _, before = await asyncio.open_connection("127.0.0.1", port)
    later = SocketsOf.to([("127.0.0.1", port)])
    assert later.read() == []
    _, after = await asyncio.open_connection("127.0.0.1", port)
    found = [one.local for one in later.read()]
    assert found == [after.get_extra_info("sockname")]
    fixed = later.fixed()
    _, last = await asyncio.open_connection("127.0.0.1", port)
    assert [one.local for one in fixed.read()] == found
    for writer in (before, after, last):
        writer.close()
        await writer.wait_closed()
    del address
