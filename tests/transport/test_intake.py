"""What one peer sends is taken no faster than any honest peer sends; an honest one never waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.messages import AppendEntries, BallotOpened, Heartbeat, Payload, StateRequested, StripesReceived
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.intake import BURST_S, BYTES_PER_S, KINDS, MESSAGES_PER_S_MIN, Intake, messages_per_s
from diloco_node.wire import envelope as e
from tests.kit.transport_kit import Mesh, rogue

HEARTBEAT_NS = 200_000_000


@pytest.mark.parametrize("regions", [2, 4, 64])
def test_an_honest_region_of_a_large_run_never_waits(regions: int) -> None:
    """All answers to a ballot that is repeated each heartbeat, and rounds as fast as heartbeats on top of it."""
    rounds = 2
    intake = Intake(messages_per_s(regions, rounds_in_flight=rounds, heartbeat_ns=HEARTBEAT_NS), now_ns=0)
    for beat in range(300):
        now_ns = beat * HEARTBEAT_NS
        waits = [intake.take(Heartbeat, 2000, now_ns=now_ns) for _ in range(11)]  # nine of them because of news
        waits += [intake.take(AppendEntries, 4000, now_ns=now_ns) for _ in range(1 + 2 * rounds)]
        waits += [intake.take(BallotOpened, 3000, now_ns=now_ns) for _ in range(2 * rounds)]
        waits += [intake.take(StripesReceived, 100, now_ns=now_ns) for _ in range(2 * rounds * regions)]
        assert not any(waits)


def test_what_has_piled_up_during_a_stall_is_taken_at_once() -> None:
    """A new leader, or a region that is back after a second without a network, finds the bucket full."""
    per_s = messages_per_s(64, rounds_in_flight=2, heartbeat_ns=HEARTBEAT_NS)
    intake = Intake(per_s, now_ns=0)
    for _ in range(5):  # five heartbeats' worth at the same moment
        assert not any(intake.take(StripesReceived, 100, now_ns=0) for _ in range(2 * 64))
    small = Intake(messages_per_s(2, rounds_in_flight=1, heartbeat_ns=HEARTBEAT_NS), now_ns=0)
    assert not any(small.take(StateRequested, 20, now_ns=0) for _ in range(64)), "it lacks every fragment"


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=600))
def test_a_peer_that_obeys_is_never_over_its_rate_and_one_kind_leaves_room_for_another(pauses_ns: list[int]) -> None:
    """However it sends: what is taken within a time is at most the rate and the burst."""
    intake, now_ns = Intake(MESSAGES_PER_S_MIN, now_ns=0), 0
    for taken, pause_ns in enumerate(pauses_ns, start=1):
        now_ns += pause_ns % 10**6 + intake.take(StateRequested, 20, now_ns=now_ns)
        assert taken <= MESSAGES_PER_S_MIN * (now_ns / NS_PER_S + BURST_S) + 1
    assert intake.take(Heartbeat, 20, now_ns=now_ns) == 0


def test_all_kinds_together_and_all_bytes_together_have_a_limit() -> None:
    per_s = 100
    intake = Intake(per_s, now_ns=0)
    kinds = [type(f"Kind{number}", (), {}) for number in range(50)]
    at_once = 0
    for number in range(10_000):
        if intake.take(kinds[number % 50], 1, now_ns=0):
            break
        at_once += 1
    assert at_once == KINDS * BURST_S * per_s
    large = Intake(per_s, now_ns=0)
    waits = [large.take(AppendEntries, BYTES_PER_S, now_ns=0) for _ in range(BURST_S + 1)]
    assert waits == [0] * BURST_S + [NS_PER_S]


async def test_a_flood_is_slowed_down_and_counted_and_nothing_of_it_is_lost(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None}, messages_per_s=40)
    flood = await rogue(mesh, b, "a")
    try:
        await at_b.until(lambda: at_b.is_up.get("a"))
        for sequence in range(1000):
            await flood[e.Lane.CONTROL].write(e.encode_control(AppendEntries(1, sequence, 0, bytes(32), (), 0)))
            if b.rejections["a", "rate"]:
                break
        count = sequence + 1
        await at_b.until(lambda: len(at_b.messages) == count)
        assert [message.sequence for _, message in at_b.messages] == list(range(count))
        assert b.rejections["a", "rate"] > 0
        assert b.quarantine_reason("a") == "", "slow is enough"
        assert at_b.is_up["a"]
    finally:
        for stream in flood.values():
            await stream.aclose()


async def test_the_limit_stays_when_the_link_is_made_anew(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None})
    found = set()
    for _ in range(2):
        one = await rogue(mesh, b, "a")
        await at_b.until(lambda: at_b.is_up.get("a"))
        session = b.links["a"].session
        assert session is not None
        found.add(id(session.intake))
        for stream in one.values():
            await stream.aclose()
        await at_b.until(lambda: not at_b.is_up.get("a"))
    assert len(found) == 1


async def test_transfers_that_begin_and_end_in_a_flood_are_slowed_down_too(mesh: Mesh) -> None:
    b, at_b = await mesh.start("b", {"a": None, "c": None}, messages_per_s=40)
    at_b.refuses = {Payload}
    flood = await rogue(mesh, b, "a")
    try:
        await at_b.until(lambda: at_b.is_up.get("a"))
        for transfer in range(1000):
            await flood[e.Lane.BULK].write(e.encode_begin(transfer, Payload(0, 1, bytes(32)), 10))
            await flood[e.Lane.BULK].write(e.encode_abort(transfer, "never mind"))
            if b.rejections["a", "rate"]:
                break
        await at_b.until(lambda: len(at_b.opened) == transfer + 1)
        assert b.rejections["a", "rate"] > 0
        assert at_b.is_up["a"]
    finally:
        for stream in flood.values():
            await stream.aclose()
