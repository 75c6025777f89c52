"""node/measuring.py over real links on loopback: round trips, goodput in the measurement lane, far links, refusals."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diloco_node.adapters.certs import init_run, load_identity
from diloco_node.adapters.flows import FlowTimes
from diloco_node.adapters.session import LinkTimes
from diloco_node.adapters.transport import GrpcTransport
from diloco_node.core import measuring as msg
from diloco_node.core.budget_plan import BudgetPlan, RateLimits
from diloco_node.core.measuring import NS_PER_S, MeasuringMessage, Probe
from diloco_node.core.messages import BulkHeader, MergedStripe, Message
from diloco_node.core.types import Ballot
from diloco_node.errors import ConfigError, DilocoError, LinkLost, PeerError, PeersUnreachable
from diloco_node.node import flow_ends, measuring
from diloco_node.node.measure_command import MeasureCommand, parse_asked
from diloco_node.node.measuring import FlowWanted, Measuring

RUN = "run1"
NAMES = ("a", "b", "c")
DEADLINE_S = 120.0
MB = 10**6
LINKS = LinkTimes(
    handshake_s=60.0,
    hello_s=60.0,
    fallback_s=0.3,
    backoff_min_s=0.02,
    backoff_max_s=0.2,
    violation_backoff_s=0.2,
    silent_s=60.0,
)
BURST_S = 0.25
"""So much of a budget may have been saved up when work begins, and gone before it is booked."""

ATTEMPTS = 5

QUICK = FlowTimes(100_000_000, 400_000_000)
STRIPE = MergedStripe(Ballot(1, 2), 0, 0, 1, b"", 0, 1)


class Region:
    """A transport with its Measuring, as `Node` joins them; rounds are kept in `rounds`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pool = ThreadPoolExecutor(3)
        self.up: set[str] = set()
        self.rounds: list[BulkHeader] = []
        self.heard: list[tuple[str, Message]] = []
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.transport: GrpcTransport
        self.measuring: Measuring

    async def start(self, folder: Path, peers: dict[str, str | None], budget: BudgetPlan) -> None:
        loop = asyncio.get_running_loop()
        self.transport = GrpcTransport(
            region=self.name,
            run_id=RUN,
            epoch=0,
            settings_digest="",
            manifest_digest="",
            identity=load_identity(folder / self.name),
            listen=("127.0.0.1", 0),
            peers=peers,
            handler=self,
            executor=self.pool,
            times=LINKS,
            budget=budget,
        )
        self.measuring = Measuring(
            region=self.name,
            peers=tuple(sorted(peers)),
            transport=self.transport,
            spawn=self.spawn,
            executor=self.pool,
            now_ns=lambda: int(loop.time() * 1e9),
        )
        await self.transport.start()

    def command(self) -> MeasureCommand:
        return MeasureCommand(self.measuring, lambda _: (None, ""))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        return task

    async def stop(self) -> None:
        await self.transport.stop()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.pool.shutdown()

    def control_arrived(self, peer: str, message: Message) -> None:
        self.heard.append((peer, message))
        if isinstance(message, MeasuringMessage):
            self.measuring.heard(peer, message)
        self.changed.set()

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        if is_up:
            self.up.add(peer)
        else:
            self.up.discard(peer)
            self.measuring.link_lost(peer)
        self.changed.set()

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        if isinstance(header, Probe):
            return self.measuring.transfer_opened(peer, header, raw_bytes)
        return memoryview(bytearray(raw_bytes))

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        if isinstance(header, Probe):
            self.measuring.transfer_closed(peer, header, buffer.nbytes, is_whole=is_whole)
        else:
            self.rounds.append(header)
        self.changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def lane(self, peer: str, lane: str = "measurement") -> int:
        return int(self.transport.budget_status()["peers"][peer]["lanes"][lane]["used_bytes"])


class Regions:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        init_run(folder, RUN, list(NAMES))
        self.all: dict[str, Region] = {}

    async def start(self, names: str = "ab", budget: dict[str, BudgetPlan] | None = None) -> list[Region]:
        """All linked with all: later ones dial earlier ones."""
        ports: dict[str, int] = {}
        for name in names:
            region = self.all[name] = Region(name)
            peers = {one: f"127.0.0.1:{ports[one]}" if one in ports else None for one in names if one != name}
            await region.start(self.folder, peers, (budget or {}).get(name, BudgetPlan()))
            ports[name] = region.transport.port
        for region in self.all.values():
            await region.until(lambda region=region: len(region.up) == len(names) - 1)
        return list(self.all.values())

    async def stop(self) -> None:
        for region in self.all.values():
            await region.stop()


@pytest.fixture
async def regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Regions]:
    # Patience with a machine that stands still: an echo or an end that comes late is none that stays away.
    for module, name in (
        (measuring, "UNANSWERED_AFTER_S"),
        (measuring, "ANSWER_S"),
        (measuring, "START_S"),
        (measuring, "LATE_S"),
        (flow_ends, "START_S"),
        (flow_ends, "LATE_S"),
    ):
        monkeypatch.setattr(module, name, DEADLINE_S / 2)
    made = Regions(tmp_path)
    yield made
    await made.stop()


def wanted(peer: str = "b", **changes: Any) -> FlowWanted:
    given = {"is_sending": True, "is_compressible": False, "times": QUICK, "bytes_max": 10**9, **changes}
    return FlowWanted(peer, **given)


async def idle(region: Region) -> None:
    """Wait until a region has done what peers asked for."""
    serving = list(region.measuring._serving.values())
    if serving:
        await asyncio.wait(serving, timeout=DEADLINE_S)
    assert region.measuring.describe() == ""


# ---- round trips -----------------------------------------------------------------------------------------------------


async def test_round_trips_go_through_the_control_lane(regions: Regions) -> None:
    a, _ = await regions.start()
    before = a.lane("b", "control")
    found = await a.measuring.latency("b", 0.3)
    one = found.latency
    assert (one.answered, one.unanswered) == (30, 0)
    assert 0 < one.min_ns <= one.p50_ns <= one.p99_ns <= one.max_ns
    assert a.lane("b", "control") - before >= 35 * 120, "echoes are booked where they travel"
    assert a.lane("b") == 0
    assert a.measuring.describe() == ""


async def test_round_trips_under_load_meet_the_load(regions: Regions) -> None:
    a, b = await regions.start()
    times = FlowTimes(100_000_000, 2 * NS_PER_S)
    for is_sending, sender, peer in ((True, a, "b"), (False, b, "a")):
        before = sender.lane(peer)
        found = await a.measuring.loaded_latency(wanted(is_sending=is_sending, times=times), 0.3)
        assert found.latency.answered > 0
        assert sender.lane(peer) - before > 64 * 1024, "at least a transfer"


async def test_echoes_are_rarer_within_a_small_budget(regions: Regions) -> None:
    budget = BudgetPlan(RateLimits(egress=72_000))
    a, _ = await regions.start(budget={"a": budget})
    one = (await a.measuring.latency("b", 0.5)).latency
    assert one.answered + one.unanswered == 10, "180 bytes each 50 ms: a twentieth of 72 kB/s"


async def test_echoes_that_stay_away_are_told(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await regions.start()
    answered = 0

    def may_echo(peer: str, *, now_ns: int) -> bool:
        nonlocal answered
        answered += 1
        return answered % 2 == 0

    monkeypatch.setattr(b.measuring._gate, "may_echo", may_echo)
    for patience_s in (0.5, 5.0, 50.0):
        monkeypatch.setattr(measuring, "UNANSWERED_AFTER_S", patience_s)
        answered = 0
        one = (await a.measuring.latency("b", 0.3)).latency
        assert one.answered + one.unanswered == 30
        assert one.unanswered >= 14
        if one.unanswered <= 16:
            break
    else:
        raise AssertionError(f"{one.unanswered} echoes of 30 stayed away; every second one was held back")
    monkeypatch.setattr(b.measuring._gate, "may_echo", lambda *_args, **_kwargs: False)
    monkeypatch.setattr(measuring, "UNANSWERED_AFTER_S", 0.2)
    with pytest.raises(LinkLost, match="none of 30 echoes came back"):
        await a.measuring.latency("b", 0.3)


# ---- goodput ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
async def test_goodput_within_the_senders_budget_is_booked_under_measurement(
    regions: Regions, is_sending: bool
) -> None:
    rate = 3 * MB
    budget = BudgetPlan(RateLimits(egress=rate))
    a, b = await regions.start(budget={"a": budget, "b": budget})
    sender, peer = (a, "b") if is_sending else (b, "a")
    times = FlowTimes(300_000_000, 1_000_000_000)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    found = await a.measuring.flow(wanted(is_sending=is_sending, times=times))
    assert sender.lane(peer) <= rate * (loop.time() - started_s + BURST_S)
    assert 0 < found.received.mean * times.span_ns / NS_PER_S < sender.lane(peer)
    assert found.received.p10 <= found.received.median <= found.received.p90
    assert found.received.span_ns == times.span_ns
    assert sender.lane(peer) >= found.sent.wire_bytes > 0
    assert sender.lane(peer, "rounds") == sender.lane(peer, "recovery") == 0
    assert found.sent.sent_bytes >= found.sent.retransmitted_bytes >= 0
    assert a.measuring.describe() == b.measuring.describe() == ""


async def test_compressible_bytes_count_before_zstd(regions: Regions) -> None:
    rate = 3 * MB
    a, _ = await regions.start(budget={"a": BudgetPlan(RateLimits(egress=rate))})
    times = FlowTimes(300_000_000, 1_000_000_000)
    gains = []
    for _ in range(ATTEMPTS):  # a second in which the machine stood still is not the same second at both ends
        random = await a.measuring.flow(wanted(times=times))
        encoded = await a.measuring.flow(wanted(times=times, is_compressible=True))
        by_received = encoded.received.mean / random.received.mean
        gains.append(by_received / (encoded.sent.wire_bytes / random.sent.wire_bytes))
        if 1.1 < gains[-1] < 1.4:
            return
    raise AssertionError(f"raw bytes for each on the wire, beside incompressible ones: {gains}")


async def test_a_flow_ends_with_its_bytes(regions: Regions) -> None:
    a, b = await regions.start(budget={"a": BudgetPlan(RateLimits(egress=4 * MB))})
    times = FlowTimes(200_000_000, 60 * NS_PER_S)
    for is_sending, sender, peer in ((True, a, "b"), (False, b, "a")):
        before = sender.lane(peer)
        found = await a.measuring.flow(wanted(times=times, bytes_max=2 * MB, is_sending=is_sending))
        assert found.used_bytes == 2 * MB
        assert 2 * MB < sender.lane(peer) - before < 2.6 * MB
        assert found.received.span_ns < times.span_ns // 2
        assert found.received.mean > 0


async def test_rounds_go_before_a_measurement(regions: Regions) -> None:
    rate = 2 * MB
    a, b = await regions.start(budget={"a": BudgetPlan(RateLimits(egress=rate))})
    times = FlowTimes(100_000_000, 60 * NS_PER_S)
    flow = asyncio.create_task(a.measuring.flow(wanted(times=times, bytes_max=2 * MB)))
    async with asyncio.timeout(DEADLINE_S):
        while a.lane("b") < MB // 4:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    loop = asyncio.get_running_loop()
    started_s, before = loop.time(), a.lane("b")
    await a.transport.transfer("b", STRIPE, memoryview(os.urandom(2 * MB)))
    took_s = loop.time() - started_s
    meanwhile = a.lane("b") - before
    assert meanwhile < 0.25 * 2 * MB, f"{meanwhile} bytes of a measurement went in front of a round ({took_s:.2f} s)"
    assert (await flow).received.mean > 0
    assert b.rounds == [STRIPE]


async def test_without_a_budget_a_measurement_waits_for_rounds_on_another_link(regions: Regions) -> None:
    a, _, c = await regions.start("abc")
    going = asyncio.create_task(a.transport.transfer("c", STRIPE, memoryview(bytearray(1))))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(a.transport.give_way())
    done, _ = await asyncio.wait([waiting], timeout=0)
    assert not done
    await going
    await asyncio.wait_for(waiting, DEADLINE_S)
    await c.until(lambda: c.rounds == [STRIPE])


# ---- far links -------------------------------------------------------------------------------------------------------


async def test_all_pairs_are_measured_by_those_that_send(regions: Regions) -> None:
    every = await regions.start("abc", {name: BudgetPlan(RateLimits(egress=4 * MB)) for name in NAMES})
    a = every[0]
    said: list[str] = []
    document = await a.command().run({"what": "mesh", "seconds": 0.4, "warm_up_seconds": 0.1}, said.append)
    pairs = [(row["from"], row["to"]) for row in document["pairs"]]
    assert pairs == [(x, y) for x in NAMES for y in NAMES if x != y]
    assert document["failures"] == []
    assert document["regions"] == list(NAMES)
    assert document["through"] == "daemon"
    assert len(said) == 6
    for row in document["pairs"]:
        assert 0 < row["rtt_seconds"] <= row["rtt_p99_seconds"]
        assert row["bytes_per_second"] > 0
        assert row["probes"] == 40
    for one in every:
        for peer in NAMES:
            if peer != one.name:
                assert one.lane(peer) > 0


async def test_a_mesh_tells_which_rows_could_not_be_reached(regions: Regions) -> None:
    every = await regions.start("abc")
    a, c = every[0], every[2]
    await c.stop()
    await a.until(lambda: "c" not in a.up)
    document = await a.command().run({"what": "mesh", "seconds": 0.2, "warm_up_seconds": 0.1}, lambda _: None)
    assert {(row["from"], row["to"]) for row in document["pairs"]} == {("a", "b"), ("b", "a")}
    failed = {(row["from"], row["to"]): row["error"] for row in document["failures"]}
    assert set(failed) == {("a", "c"), ("c", "a"), ("c", "b"), ("b", "c")}
    assert "a has no link to c" in failed["a", "c"]
    assert "a has no link to c" in failed["c", "b"]
    assert "can't be asked to measure" in failed["c", "b"]
    assert failed["b", "c"].startswith("b can't: b has no link to c")


# ---- refusals --------------------------------------------------------------------------------------------------------


async def test_a_peer_that_is_busy_says_with_what(regions: Regions) -> None:
    a, b, c = await regions.start("abc", {"c": BudgetPlan(RateLimits(egress=1 * MB))})
    flow = asyncio.create_task(c.measuring.flow(wanted("b", times=FlowTimes(0, 50 * NS_PER_S))))
    await b.until(lambda: b.measuring.describe())
    with pytest.raises(PeerError, match=r"b can't: b is busy with another measurement: bandwidth from c \(asked by c"):
        await a.measuring.flow(wanted("b"))
    with pytest.raises(PeerError, match=r"c is busy with another measurement: bandwidth to b \(since"):
        await c.measuring.latency("a", 0.1)
    flow.cancel()
    await asyncio.gather(flow, return_exceptions=True)
    await idle(b)
    assert (await a.measuring.flow(wanted("b"))).received.mean > 0


async def test_no_link_is_said_with_its_reason(regions: Regions) -> None:
    a, b = await regions.start()
    await b.stop()
    await a.until(lambda: not a.up)
    for work in (a.measuring.latency("b", 0.1), a.measuring.flow(wanted()), a.measuring.loaded_latency(wanted(), 0.1)):
        with pytest.raises(PeersUnreachable, match="a has no link to b"):
            await work
    assert a.measuring.describe() == ""


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
async def test_a_link_that_is_lost_ends_the_measurement_on_both_sides(regions: Regions, is_sending: bool) -> None:
    a, b = await regions.start(budget=dict.fromkeys("ab", BudgetPlan(RateLimits(egress=1 * MB))))
    flow = asyncio.create_task(a.measuring.flow(wanted(is_sending=is_sending, times=FlowTimes(0, 50 * NS_PER_S))))
    await b.until(lambda: b.measuring.describe())
    await asyncio.sleep(0.1)
    a.transport.drop_link("b", "a test")
    with pytest.raises(PeerError):
        await asyncio.wait_for(flow, DEADLINE_S)
    await idle(b)
    await a.until(lambda: a.up)
    assert a.measuring.describe() == ""
    assert (await a.measuring.latency("b", 0.1)).latency.answered == 10


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
async def test_who_goes_away_in_the_middle_stops_the_other_end(regions: Regions, is_sending: bool) -> None:
    a, b = await regions.start(budget=dict.fromkeys("ab", BudgetPlan(RateLimits(egress=1 * MB))))
    flow = asyncio.create_task(a.measuring.flow(wanted(is_sending=is_sending, times=FlowTimes(0, 50 * NS_PER_S))))
    await b.until(lambda: b.measuring.describe())
    await asyncio.sleep(0.1)
    flow.cancel()
    await asyncio.gather(flow, return_exceptions=True)
    assert a.measuring.describe() == ""
    await idle(b)
    assert a.up == {"b"}, "giving up is no reason to lose the link"
    assert (await a.measuring.flow(wanted(is_sending=is_sending))).received.mean > 0


async def test_nothing_that_arrives_is_an_error_and_not_a_rate(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await regions.start()
    monkeypatch.setattr(flow_ends, "START_S", 0.2)

    async def no_transfer(*_: object) -> None:
        await asyncio.sleep(DEADLINE_S)

    monkeypatch.setattr(b.transport, "transfer", no_transfer)
    with pytest.raises(LinkLost, match="nothing arrived in 0 s: rounds and recovery go before"):
        await a.measuring.flow(wanted(is_sending=False))
    assert a.measuring.describe() == ""


# ---- what a hostile peer may have us do ------------------------------------------------------------------------------


async def until_lost(region: Region, header: Probe) -> None:
    """Send probes until the other end has had enough of it."""
    for _ in range(1000):
        try:
            await region.transport.transfer("b", header, memoryview(bytes(200_000)))
        except LinkLost:
            return
    raise AssertionError("200 MB of probes, and the link is still there")


async def test_probes_nobody_agreed_to_cost_the_peer_its_link(regions: Regions) -> None:
    a, b = await regions.start()
    await until_lost(a, Probe(99, False))
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)


async def test_more_probes_than_agreed_cost_the_peer_its_link(regions: Regions) -> None:
    a, b = await regions.start()
    a.transport.send("b", msg.MeasurementAsked(5, True, False, 0, 10 * NS_PER_S, 300_000))
    await a.until(lambda: ("b", msg.MeasurementReady(5)) in a.heard)
    await until_lost(a, Probe(5, False))
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)


@pytest.mark.parametrize(
    "asked",
    [
        msg.MeasurementAsked(5, False, False, 0, msg.SPAN_NS_MAX + 1, 1000),
        msg.MeasurementAsked(5, False, False, 0, 1000, msg.BYTES_MAX + 1),
        msg.LinkAsked(5, "c", 0, 0, 1000, 1000),
    ],
    ids=["seconds", "bytes", "probes"],
)
async def test_a_request_over_the_limits_costs_the_peer_its_link(regions: Regions, asked: MeasuringMessage) -> None:
    a, b = await regions.start()
    a.transport.send("b", asked)
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)
    assert b.lane("a") == 0


async def test_a_peer_that_asks_again_and_again_is_told_no(regions: Regions) -> None:
    a, b = await regions.start()
    a.measuring._expected["b"].expect(0, 10**6)
    for number in range(50):
        a.transport.send("b", msg.MeasurementAsked(number, False, False, 0, 60 * NS_PER_S, 10**6))
    await a.until(lambda: sum(isinstance(one, msg.MeasurementDeclined) for _, one in a.heard) == 49)
    assert sum(isinstance(one, msg.MeasurementReady) for _, one in a.heard) <= 1
    assert len(b.measuring._serving) == 1
    a.transport.send("b", msg.MeasurementStopped(0))
    await idle(b)


async def test_a_flood_of_echoes_is_answered_up_to_a_limit(regions: Regions) -> None:
    a, b = await regions.start()
    now_ns = b.measuring._now_ns()
    b.measuring._now_ns = lambda: now_ns
    for number in range(900):
        a.transport.send("b", msg.EchoWanted(number))
    await b.until(lambda: len(b.heard) == 900)
    a.transport.send("b", msg.LinkAsked(7, "nobody", 1, 0, 1, 1))  # its answer comes after all echoes
    await a.until(lambda: any(isinstance(one, msg.MeasurementDeclined) for _, one in a.heard))
    answered = sum(isinstance(one, msg.EchoAnswered) for _, one in a.heard)
    assert answered == msg.ECHOES_SAVED_MAX


async def test_late_and_foreign_answers_are_nothing(regions: Regions) -> None:
    a, b = await regions.start()
    for message in (
        msg.MeasurementReady(1),
        msg.MeasurementDeclined(1, "no"),
        msg.MeasurementStopped(1),
        msg.EchoAnswered(1, 0, 0),
        msg.MeasurementSent(1, 0, 0, 0, 0, 0),
    ):
        a.transport.send("b", message)
    assert (await a.measuring.latency("b", 0.1)).latency.answered == 10
    assert b.transport.rejections == {}


async def test_a_peer_that_answers_nonsense_fails_the_measurement_only(regions: Regions) -> None:
    a, b = await regions.start()
    talks = a.measuring._talks
    flow = asyncio.create_task(a.measuring.flow(wanted()))
    await b.until(lambda: b.measuring.describe())
    (number,) = (key[1] for key in talks)
    b.transport.send("a", msg.MeasurementSent(number, 0, 0, 0, 0, 0))
    with pytest.raises(PeerError, match="said MeasurementSent"):
        await asyncio.wait_for(flow, DEADLINE_S)
    assert a.up == {"b"}


# ---- what an operator asks for ---------------------------------------------------------------------------------------


async def test_latency_and_bandwidth_as_documents(regions: Regions) -> None:
    a, _ = await regions.start(budget=dict.fromkeys("ab", BudgetPlan(RateLimits(egress=4 * MB))))
    command = a.command()
    quick = {"peer": "b", "seconds": 0.3, "warm_up_seconds": 0.1}
    latency = await command.run({"what": "latency", "load": True, **quick}, lambda _: None)
    assert [row["load"] for row in latency["rows"]] == ["none", "out", "in"]
    assert (latency["from"], latency["to"], latency["through"]) == ("a", "b", "daemon")
    for reverse, ends in ((False, ("a", "b")), (True, ("b", "a"))):
        found = await command.run({"what": "bandwidth", "reverse": reverse, **quick}, lambda _: None)
        assert (found["from"], found["to"], found["through"]) == (*ends, "daemon")
        assert [(one["path"], one["body"], one["connections"]) for one in found["tests"]] == [
            ("transport", "random", 1),
            ("transport", "int4", 1),
        ]
        one = found["tests"][0]
        assert one["bytes_per_second"] > 0
        assert one["wire_bytes"] > 0
        assert one["sent_bytes"] > 0
        assert one["cpu_seconds_per_gb"].keys() == {"sender", "receiver"}


async def test_one_command_at_a_time(regions: Regions) -> None:
    a, _ = await regions.start()
    command = a.command()
    document = {"what": "latency", "peer": "b", "seconds": 20}
    first = asyncio.create_task(command.run(document, lambda _: None))
    await asyncio.sleep(0)
    with pytest.raises(DilocoError, match="carries out another `measure` command"):
        await command.run(document, lambda _: None)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert a.measuring.describe() == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"what": "weather"}, "latency, bandwidth or mesh"),
        ({"peer": "z"}, "'z' is no region that a knows: name one of b, c"),
        ({"peer": "a"}, "a is this region"),
        ({"peer": ""}, "name one of b, c"),
        ({"seconds": 0}, "seconds is 0: 0.1 to 60"),
        ({"seconds": 61}, "seconds is 61"),
        ({"seconds": True}, "seconds is True"),
        ({"seconds": "5"}, "seconds is '5'"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"warm_up_seconds": 31}, "warm_up_seconds is 31"),
        ({"bytes_max": 5}, "bytes_max is 5"),
        ({"bytes_max": msg.BYTES_MAX + 1}, "bytes_max is"),
        ({"load": 1}, "load is 1: true or false"),
        ({"speed": 1}, "'speed' is no part of a measurement"),
    ],
)
def test_what_an_operator_asks_for_is_checked(change: dict[str, Any], text: str) -> None:
    document = {"what": "latency", "peer": "b", "seconds": 5, **change}
    with pytest.raises(ConfigError) as caught:
        parse_asked(document, region="a", peers=("b", "c"))
    assert text in str(caught.value)


async def test_tiny_probes_leave_few_marks_and_count_all_the_same() -> None:
    at_ns = [0]
    asked = msg.MeasurementAsked(1, True, False, 0, 10**9, 10**9)
    end = flow_ends.ReceivingEnd(asked, now_ns=lambda: at_ns[0])
    for _ in range(10_000):
        end.opened(1)
        at_ns[0] += flow_ends.MARK_NS // 100
        end.closed(1)
    assert end.used_bytes == 10_000
    assert len(end._marks) <= 10_000 // 100 + 2
