"""measure/measuring.py over real links on loopback: round trips, goodput in its lane, far links, refusals."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.types import RateLimits
from diloco_node.errors import ConfigError, DilocoError, LinkLost, PeerError, PeersUnreachable
from diloco_node.measure import echoes, probes
from diloco_node.measure.gate import ECHOES_SAVED_MAX
from diloco_node.measure.measurement import parse_request
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.kernel.congestion import own_congestion_controls
from diloco_node.wire import measure_messages as msg
from diloco_node.wire.measure_messages import MeasureMessage, Probe
from tests.kit.measure_kit import (
    DEADLINE_S,
    MB,
    NAMES,
    STRIPE,
    FlowTimes,
    Region,
    Regions,
    a_flow,
    be_patient,
    idle,
    wish,
)

BURST_S = 0.25
"""So much of a budget may have been saved up when work begins, and gone before it is booked."""

ATTEMPTS = 5


@pytest.fixture
async def regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Regions]:
    be_patient(monkeypatch)
    made = Regions(tmp_path)
    yield made
    await made.stop()


# ---- round trips -----------------------------------------------------------------------------------------------------


async def test_round_trips_go_through_the_control_lane(regions: Regions) -> None:
    a, _ = await regions.start()
    before = a.lane("b", "control")
    one = await a.measuring.latency("b", 0.3)
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
        found = await a.measuring.loaded_latency(*a_flow(is_sending=is_sending, times=times), 0.3)
        assert found.answered > 0
        assert sender.lane(peer) - before > 64 * 1024, "at least a transfer"


async def test_a_load_that_is_over_before_the_link_is_full_is_none(regions: Regions) -> None:
    a, _ = await regions.start()
    short = a_flow(times=FlowTimes(30 * NS_PER_S, 60 * NS_PER_S), bytes_max=10**5)
    with pytest.raises(LinkLost, match="100000 bytes were used up before the link was full: allow more with --most"):
        await a.measuring.loaded_latency(*short, 0.1)
    assert a.measuring.describe() == ""


async def test_echoes_are_rarer_within_a_small_budget(regions: Regions) -> None:
    budget = BudgetPlan(RateLimits(egress=72_000))
    a, _ = await regions.start(budget={"a": budget})
    one = await a.measuring.latency("b", 0.5)
    assert one.answered + one.unanswered == 10, "180 bytes each 50 ms: a twentieth of 72 kB/s"


async def test_echoes_that_stay_away_are_counted(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await regions.start()
    answered = 0

    def may_echo(peer: str, *, now_ns: int) -> bool:
        nonlocal answered
        answered += 1
        return answered % 2 == 0

    monkeypatch.setattr(b.measuring.gate, "may_echo", may_echo)
    for patience_s in (0.5, 5.0, 50.0):
        monkeypatch.setattr(echoes, "UNANSWERED_AFTER_S", patience_s)
        answered = 0
        one = await a.measuring.latency("b", 0.3)
        assert one.answered + one.unanswered == 30
        assert one.unanswered >= 14
        if one.unanswered <= 16:
            break
    else:
        raise AssertionError(f"{one.unanswered} echoes of 30 stayed away; every second one was held back")
    monkeypatch.setattr(b.measuring.gate, "may_echo", lambda *_args, **_kwargs: False)
    monkeypatch.setattr(echoes, "UNANSWERED_AFTER_S", 0.2)
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
    found = await a.measuring.flow(*a_flow(is_sending=is_sending, times=times))
    assert sender.lane(peer) <= rate * (loop.time() - started_s + BURST_S)
    assert 0 < found.received.mean * times.span_ns / NS_PER_S < sender.lane(peer)
    assert found.received.p10 <= found.received.median <= found.received.p90
    assert found.received.span_ns == times.span_ns
    assert sender.lane(peer) >= found.sent.wire_bytes > 0
    assert sender.lane(peer, "rounds") == sender.lane(peer, "recovery") == 0
    assert found.sent.sent_bytes >= found.sent.retransmitted_bytes >= 0
    assert a.measuring.describe() == b.measuring.describe() == ""


async def test_a_flow_ends_with_its_bytes(regions: Regions) -> None:
    a, b = await regions.start(budget={"a": BudgetPlan(RateLimits(egress=4 * MB))})
    times = FlowTimes(200_000_000, 60 * NS_PER_S)
    for is_sending, sender, peer in ((True, a, "b"), (False, b, "a")):
        before = sender.lane(peer)
        found = await a.measuring.flow(*a_flow(times=times, bytes_max=2 * MB, is_sending=is_sending))
        assert found.used_bytes == 2 * MB
        assert 2 * MB < sender.lane(peer) - before < 2.6 * MB
        assert found.received.span_ns < times.span_ns // 2
        assert found.received.mean > 0


async def test_rounds_go_before_a_measurement(regions: Regions) -> None:
    rate = 2 * MB
    a, b = await regions.start(budget={"a": BudgetPlan(RateLimits(egress=rate))})
    times = FlowTimes(100_000_000, 60 * NS_PER_S)
    flow = asyncio.create_task(a.measuring.flow(*a_flow(times=times, bytes_max=2 * MB)))
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
    progress: list[str] = []
    document = await a.command().run({"what": "mesh", "seconds": 0.4, "warm_up_seconds": 0.1}, progress.append)
    pairs = [(row["from"], row["to"]) for row in document["pairs"]]
    assert pairs == [(x, y) for x in NAMES for y in NAMES if x != y]
    assert document["failures"] == []
    assert document["regions"] == list(NAMES)
    assert document["through"] == "daemon"
    assert len(progress) == 6
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
    flow = asyncio.create_task(c.measuring.flow(*a_flow("b", times=FlowTimes(0, 50 * NS_PER_S))))
    await b.until(lambda: b.measuring.describe())
    with pytest.raises(PeerError, match=r"b can't: busy with another measurement: bandwidth from c \(asked by c"):
        await a.measuring.flow(*a_flow("b"))
    with pytest.raises(PeerError, match=r"c is busy with another measurement: bandwidth to b \(since"):
        await c.measuring.latency("a", 0.1)
    flow.cancel()
    await asyncio.gather(flow, return_exceptions=True)
    await idle(b)
    assert (await a.measuring.flow(*a_flow("b"))).received.mean > 0


async def test_no_link_is_said_with_its_reason(regions: Regions) -> None:
    a, b = await regions.start()
    await b.stop()
    await a.until(lambda: not a.up)
    for work in (
        a.measuring.latency("b", 0.1),
        a.measuring.flow(*a_flow()),
        a.measuring.loaded_latency(*a_flow(), 0.1),
    ):
        with pytest.raises(PeersUnreachable, match="a has no link to b"):
            await work
    assert a.measuring.describe() == ""


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
async def test_a_link_that_is_lost_ends_the_measurement_on_both_sides(regions: Regions, is_sending: bool) -> None:
    a, b = await regions.start(budget=dict.fromkeys("ab", BudgetPlan(RateLimits(egress=1 * MB))))
    flow = asyncio.create_task(a.measuring.flow(*a_flow(is_sending=is_sending, times=FlowTimes(0, 50 * NS_PER_S))))
    await b.until(lambda: b.measuring.describe())
    await asyncio.sleep(0.1)
    a.transport.links["b"].drop("a test")
    with pytest.raises(PeerError):
        await asyncio.wait_for(flow, DEADLINE_S)
    await idle(b)
    await a.until(lambda: a.up)
    assert a.measuring.describe() == ""
    assert (await a.measuring.latency("b", 0.1)).answered == 10


@pytest.mark.parametrize("is_sending", [True, False], ids=["out", "in"])
async def test_who_goes_away_in_the_middle_stops_the_other_end(regions: Regions, is_sending: bool) -> None:
    a, b = await regions.start(budget=dict.fromkeys("ab", BudgetPlan(RateLimits(egress=1 * MB))))
    flow = asyncio.create_task(a.measuring.flow(*a_flow(is_sending=is_sending, times=FlowTimes(0, 50 * NS_PER_S))))
    await b.until(lambda: b.measuring.describe())
    await asyncio.sleep(0.1)
    flow.cancel()
    await asyncio.gather(flow, return_exceptions=True)
    assert a.measuring.describe() == ""
    await idle(b)
    assert a.up == {"b"}, "giving up is no reason to lose the link"
    assert (await a.measuring.flow(*a_flow(is_sending=is_sending))).received.mean > 0


async def test_nothing_that_arrives_is_an_error_and_not_a_rate(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await regions.start()
    monkeypatch.setattr(probes, "START_S", 0.2)

    async def no_transfer(*_: object) -> None:
        await asyncio.sleep(DEADLINE_S)

    monkeypatch.setattr(b.transport, "transfer", no_transfer)
    with pytest.raises(LinkLost, match="nothing arrived in 0 s: rounds and recovery go before"):
        await a.measuring.flow(*a_flow(is_sending=False))
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
    await until_lost(a, Probe(99))
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)


async def test_more_probes_than_agreed_cost_the_peer_its_link(regions: Regions) -> None:
    a, b = await regions.start()
    a.transport.send("b", wish(5, is_requester_sending=True, span_ns=10 * NS_PER_S, bytes_max=300_000))
    await a.until(lambda: ("b", msg.MeasurementReady(5)) in a.received)
    await until_lost(a, Probe(5))
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)


@pytest.mark.parametrize(
    "message",
    [
        wish(5, span_ns=msg.SPAN_NS_MAX + 1),
        wish(5, bytes_max=msg.DAEMON_BYTES_MAX + 1),
        msg.LinkTestRequested(5, "c", 0, 0, 1000, 1000),
    ],
    ids=["seconds", "bytes", "probes"],
)
async def test_a_request_over_the_limits_costs_the_peer_its_link(regions: Regions, message: MeasureMessage) -> None:
    a, b = await regions.start()
    a.transport.send("b", message)
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)
    assert b.lane("a") == 0


async def test_a_peer_that_requests_again_and_again_is_refused(regions: Regions) -> None:
    a, b = await regions.start()
    a.measuring.receivers.expected["b"].expect(0, 10**6)
    for number in range(50):
        a.transport.send("b", wish(number, span_ns=60 * NS_PER_S, bytes_max=10**6))
    await a.until(lambda: sum(isinstance(one, msg.MeasurementDeclined) for _, one in a.received) == 49)
    assert sum(isinstance(one, msg.MeasurementReady) for _, one in a.received) <= 1
    assert len(b.measuring.responder.serving) == 1
    a.transport.send("b", msg.MeasurementStopped(0))
    await idle(b)


async def test_who_asks_twice_for_the_same_breaks_the_protocol(regions: Regions) -> None:
    a, b = await regions.start()
    for _ in range(2):
        a.transport.send("b", wish(5, span_ns=60 * NS_PER_S, bytes_max=10**9))
    await b.until(lambda: ("a", "protocol") in b.transport.rejections)
    await idle(b)


@pytest.mark.parametrize("end", ["stopped", "link lost"])
async def test_a_request_that_is_over_before_it_has_begun_leaves_the_end_free(regions: Regions, end: str) -> None:
    _, b = await regions.start()
    for number in range(2):
        b.measuring.control_arrived("a", wish(number))
        assert b.measuring.describe().startswith("bandwidth to a"), number
        if end == "stopped":
            b.measuring.control_arrived("a", msg.MeasurementStopped(number))
        else:
            b.measuring.link_changed("a", is_up=False)
        await idle(b)


async def test_a_transfer_of_a_measurement_before_is_no_error_in_one_of_the_same_number(regions: Regions) -> None:
    _, b = await regions.start()
    asked = wish(7, is_requester_sending=True, span_ns=60 * NS_PER_S, bytes_max=10**6)
    with b.measuring.receivers.receiver("a", asked):
        buffer = b.measuring.transfer_opened("a", Probe(7), 1000)
    assert buffer is not None
    with b.measuring.receivers.receiver("a", asked) as again:
        b.measuring.transfer_closed("a", Probe(7), buffer, is_whole=True)
        assert again.used_bytes == 1000


async def test_a_flood_of_echoes_is_answered_up_to_a_limit(regions: Regions) -> None:
    a, b = await regions.start()
    now_ns = b.measuring.echoes.now_ns()
    b.measuring.echoes.now_ns = lambda: now_ns
    for number in range(900):
        a.transport.send("b", msg.EchoRequest(number))
    await b.until(lambda: len(b.received) == 900)
    a.transport.send("b", msg.LinkTestRequested(7, "nobody", 1, 0, 1, 1))  # its answer comes after all echoes
    await a.until(lambda: any(isinstance(one, msg.MeasurementDeclined) for _, one in a.received))
    answered = sum(isinstance(one, msg.EchoReply) for _, one in a.received)
    assert answered == ECHOES_SAVED_MAX


async def test_late_and_foreign_answers_are_nothing(regions: Regions) -> None:
    a, b = await regions.start()
    for message in (
        msg.MeasurementReady(1),
        msg.MeasurementDeclined(1, "no"),
        msg.MeasurementStopped(1),
        msg.EchoReply(1, 0, 0),
        msg.MeasurementSent(1, 0, 0, 0, 0, 0),
    ):
        a.transport.send("b", message)
    assert (await a.measuring.latency("b", 0.1)).answered == 10
    assert b.transport.rejections == {}


async def test_a_peer_that_answers_nonsense_fails_the_measurement_only(regions: Regions) -> None:
    a, b = await regions.start()
    exchanges = a.measuring.requester.exchanges
    flow = asyncio.create_task(a.measuring.flow(*a_flow()))
    await b.until(lambda: b.measuring.describe())
    (number,) = (key[1] for key in exchanges)
    b.transport.send("a", msg.MeasurementSent(number, 0, 0, 0, 0, 0))
    with pytest.raises(PeerError, match="said MeasurementSent"):
        await asyncio.wait_for(flow, DEADLINE_S)
    assert a.up == {"b"}


async def test_what_a_peer_says_in_its_own_words_is_no_command_to_a_terminal(regions: Regions) -> None:
    a, b = await regions.start()
    flow = asyncio.create_task(a.measuring.flow(*a_flow()))
    await b.until(lambda: b.measuring.describe())
    (number,) = (key[1] for key in a.measuring.requester.exchanges)
    b.transport.send("a", msg.MeasurementDeclined(number, "no\x1b[2J\nné"))
    with pytest.raises(PeerError, match=r"b can't: no\\x1b\[2J\\nné"):
        await asyncio.wait_for(flow, DEADLINE_S)


# ---- what an operator asks for ---------------------------------------------------------------------------------------


async def test_latency_and_bandwidth_as_documents(regions: Regions) -> None:
    a, _ = await regions.start(budget=dict.fromkeys("ab", BudgetPlan(RateLimits(egress=4 * MB))))
    command = a.command()
    ours = own_congestion_controls()
    usual = ours.usual if ours is not None else None
    quick = {"peer": "b", "seconds": 0.3, "warm_up_seconds": 0.1}
    latency = await command.run({"what": "latency", "load": True, **quick}, lambda _: None)
    assert [row["load"] for row in latency["rows"]] == ["none", "out", "in"]
    assert (latency["from"], latency["to"], latency["through"]) == ("a", "b", "daemon")
    for reverse, ends in ((False, ("a", "b")), (True, ("b", "a"))):
        found = await command.run({"what": "bandwidth", "reverse": reverse, **quick}, lambda _: None)
        assert (found["from"], found["to"], found["through"]) == (*ends, "daemon")
        assert found["congestion_control"] == dict.fromkeys(("here", "there"), usual)
        assert found["connections"] == 1
        assert found["bytes_per_second"] > 0
        assert found["wire_bytes"] > 0
        assert found["sent_bytes"] > 0
        assert found["cpu_seconds_per_gb"].keys() == {"sender", "receiver"}


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
        ({"seconds": 0}, "seconds is 0: 0.1 to 120"),
        ({"seconds": 121}, "seconds is 121"),
        ({"seconds": True}, "seconds is True"),
        ({"seconds": "5"}, "seconds is '5'"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"warm_up_seconds": 31}, "warm_up_seconds is 31"),
        ({"bytes_max": 5}, "bytes_max is 5"),
        ({"bytes_max": msg.DAEMON_BYTES_MAX + 1}, "bytes_max is"),
        ({"load": 1}, "load is 1: true or false"),
        ({"speed": 1}, "'speed' is no part of a measurement"),
        ({"plain": True}, "'plain' is no part of a measurement"),
    ],
)
def test_what_an_operator_asks_for_is_checked(change: dict[str, Any], text: str) -> None:
    document = {"what": "latency", "peer": "b", "seconds": 5, **change}
    with pytest.raises(ConfigError) as caught:
        parse_request(document, region="a", peers=("b", "c"), is_daemon=True)
    assert text in str(caught.value)


def test_without_a_daemon_more_can_be_asked_for() -> None:
    document = {"what": "bandwidth", "peer": "b", "seconds": 5, "bytes_max": msg.BYTES_MAX}
    request = parse_request(document, region="a", peers=("b",), is_daemon=False)
    assert request.bytes_max == msg.BYTES_MAX
