"""measure/ends.py on loopback: ends without a core, and links for a test."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import BindError, IdentityError, LinkLost, PeersUnreachable
from diloco_node.measure import ends
from diloco_node.measure.ends import Dialer, measuring_end
from diloco_node.measure.measurement import MeasureCommand
from diloco_node.measure.measuring import Measuring
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import Identity, load_identity
from diloco_node.transport.transport import GrpcTransport
from diloco_node.wire import message_tables as tables
from tests.kit.measure_kit import DEADLINE_S, LINKS, NAMES, RUN, STRIPE, FlowTimes, a_flow, be_patient
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
        given = {"listen": FREE, "dial": self.dialer(region), "times": LINKS, **changes}
        peers = dict.fromkeys(name for name in NAMES if name != region)
        end = await self.stack.enter_async_context(measuring_end(identity, peers, **given))
        self.addresses[region] = f"127.0.0.1:{end.transport.port}"
        return end

    def dialer(self, region: str = "a", run: str = "run") -> Dialer:
        return Dialer(self.identity(region, run), self.addresses, times=LINKS)

    async def linked(self, region: str = "a") -> Measuring:
        return await self.stack.enter_async_context(self.dialer(region)(("b",)))


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
async def test_a_flow_goes_either_way(run: Run, is_sending: bool) -> None:
    end = await run.serve()
    measuring = await run.linked()
    found = await measuring.flow(*a_flow(is_sending=is_sending))
    assert found.received.mean > 0
    assert found.sent.wire_bytes > 0, "it goes through the measurement lane"
    assert found.sent.sent_bytes >= found.sent.retransmitted_bytes >= 0
    assert end.transport.rejections == {}


async def test_bandwidth_is_that_of_a_link_of_its_own(run: Run) -> None:
    await run.serve()
    command = MeasureCommand("a", ("b",), run.dialer())
    request = {"what": "bandwidth", "peer": "b", "seconds": 0.2, "warm_up_seconds": 0.1}
    document = await command.run(request, lambda _: None)
    assert (document["from"], document["to"], document["connections"]) == ("a", "b", 1)
    assert "through" not in document
    assert document["bytes_per_second"] > 0
    assert document["sent_bytes"] >= document["retransmitted_bytes"] >= 0
    assert document["wire_bytes"] > 0


async def test_all_pairs_of_regions_that_serve(run: Run) -> None:
    await run.serve("b")
    await run.serve("c")
    command = MeasureCommand("a", ("b", "c"), run.dialer())
    found = await command.run({"what": "mesh", "seconds": 0.2, "warm_up_seconds": 0.1}, lambda _: None)
    assert found["failures"] == []
    assert [(one["from"], one["to"]) for one in found["pairs"]] == [(x, y) for x in NAMES for y in NAMES if x != y]
    assert all(one["bytes_per_second"] > 0 for one in found["pairs"])


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
    async with run.dialer()(("b",)) as measuring:
        flow = asyncio.create_task(measuring.flow(*a_flow(times=FlowTimes(0, 50 * NS_PER_S))))
        async with asyncio.timeout(DEADLINE_S):
            while not end.describe():  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)
        await idle(end)
        assert (await measuring.latency("b", 0.1)).answered > 0, "the link is still there"


# ---- who is there ----------------------------------------------------------------------------------------------------


async def test_nobody_there(run: Run) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        run.addresses["b"] = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(PeersUnreachable, match=r"connection refused.*is `diloco-node measure serve` running there"):
            await run.linked()


async def test_certificates_of_another_authority_are_refused(run: Run) -> None:
    await run.serve()
    with pytest.raises(IdentityError, match=r"another run's authority.*same `diloco-node certs init`"):
        async with run.dialer("a", "stranger")(("b",)):
            pass


async def test_another_region_at_the_address_is_noticed(run: Run) -> None:
    await run.serve("c")
    run.addresses["b"] = run.addresses["c"]
    with pytest.raises(IdentityError, match="belongs to another region"):
        await run.linked()


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
            assert daemon.quarantine_reason("a") == "", "a mistake of people is no attack"
        finally:
            await daemon.stop()


async def test_what_is_not_for_measuring_costs_the_peer_its_link(run: Run) -> None:
    end = await run.serve()
    async with measuring_end(run.identity("a"), {"b": run.addresses["b"]}, times=LINKS) as other:
        assert await ends.link_up(other, "b") == ""
        with contextlib.suppress(LinkLost):
            for _ in range(1000):
                await other.transport.transfer("b", STRIPE, memoryview(bytes(200_000)))
        assert end.transport.rejections["a", "protocol"] == 1
