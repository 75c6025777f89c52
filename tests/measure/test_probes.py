"""measure/probes.py over a fake link: what is sent, what is counted, and what silence is called."""

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diloco_node.errors import LinkLost
from diloco_node.measure import probes
from diloco_node.measure.probes import BODY_BYTES_MIN, MARK_NS, ProbeReceiver, ProbeSender, make_body, warm_up_ns
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.wire.measure_messages import BODY_BYTES_MAX, Probe
from tests.kit.measure_kit import DEADLINE_S, wish

BODY = memoryview(bytes(BODY_BYTES_MAX))
MB = 10**6


class Link:
    """Carries at once whatever it gets; the receiver has enough after `enough` bytes."""

    def __init__(self, enough: int | None = None) -> None:
        self.sizes: list[int] = []
        self.headers: set[Probe] = set()
        self.enough = enough
        self.end: ProbeSender
        self.error: LinkLost | None = None
        self.counters: list[TcpCounters | None] = [None, None, None]
        self.ways = 0

    async def transfer(self, peer: str, header: Probe, body: memoryview) -> None:
        assert peer == "b"
        if self.error is not None:
            raise self.error
        self.sizes.append(body.nbytes)
        self.headers.add(header)
        if self.enough is not None and sum(self.sizes) >= self.enough:
            self.end.stop()
        await asyncio.sleep(0)

    async def give_way(self) -> None:
        self.ways += 1

    def tcp(self, peer: str, *, is_now: bool) -> TcpCounters | None:
        return self.counters.pop(0)

    def sends(self, bytes_max: int, span_ns: int = 60 * NS_PER_S) -> ProbeSender:
        request = wish(7, span_ns=span_ns, bytes_max=bytes_max)
        self.end = ProbeSender(self, "b", request, BODY)
        return self.end

    def budget_status(self) -> dict[str, Any]:
        return {"peers": {"b": {"lanes": {"measurement": {"used_bytes": 10 * sum(self.sizes)}}}}}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_S", "LATE_S", "SENDER_GRACE_S"):
        monkeypatch.setattr(probes, name, 0.0)


async def test_no_more_is_sent_than_was_agreed_to_in_pieces_that_double_at_most() -> None:
    link = Link(enough=5 * MB + 1)
    end = link.sends(5 * MB + 1)
    found = await end.run()
    assert sum(link.sizes) == end.used_bytes == 5 * MB + 1
    assert link.sizes[0] == BODY_BYTES_MIN
    assert all(after <= 2 * max(link.sizes[: at + 1]) for at, after in enumerate(link.sizes[1:]))
    assert link.headers == {Probe(7)}
    assert link.ways >= len(link.sizes), "rounds go before each of them"
    assert found.wire_bytes == 10 * sum(link.sizes), "nothing was sent before the warm-up, which was none"
    assert found.sent_bytes == -1, "the kernel does not tell"


async def test_it_ends_when_enough_has_arrived_and_tells_what_tcp_did_after_the_warm_up() -> None:
    link = Link(enough=3 * MB)
    link.counters = [TcpCounters(5, 1, 0), TcpCounters(100, 10, 0), TcpCounters(700, 30, 0)]
    found = await link.sends(100 * MB).run()
    assert 3 * MB <= sum(link.sizes) < 100 * MB
    # No warm-up: the first count is of before it, the second of its end.
    assert (found.sent_bytes, found.retransmitted_bytes) == (600, 20)


@pytest.mark.usefixtures("impatient")
async def test_a_receiver_that_says_nothing_is_a_lost_link() -> None:
    link = Link()
    with pytest.raises(LinkLost, match="b: it does not say what it received of a measurement"):
        await link.sends(MB, span_ns=1).run()


async def test_a_link_that_breaks_ends_it_with_its_reason() -> None:
    link = Link()
    link.error = LinkLost("b: the link is down")
    with pytest.raises(LinkLost, match="the link is down"):
        await link.sends(MB).run()
    assert {task for task in asyncio.all_tasks() if "probes" in task.get_name()} == set()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("is_begun", "reason"), [(False, "nothing arrived in 0 s"), (True, "nothing arrived whole")])
async def test_nothing_that_arrives_is_told_apart_from_nothing_whole(is_begun: bool, reason: str) -> None:
    end = ProbeReceiver(wish(7, span_ns=1), now_ns=lambda: 0)
    if is_begun:
        end.open_transfer(1000)
    with pytest.raises(LinkLost, match=f"{reason}.*rounds and recovery go before a measurement"):
        await end.run()


async def test_bytes_that_are_used_up_early_count_in_the_second_half_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probes, "LATE_S", 1e6)  # nothing more is waited for
    at_ns = [0]
    end = ProbeReceiver(wish(7, warm_up_ns=NS_PER_S, span_ns=NS_PER_S, bytes_max=1000), now_ns=lambda: at_ns[0])
    for arrived_ns in (0, 200_000_000, 400_000_000):  # 250 bytes, 250, 500: over long before the warm-up
        at_ns[0] = arrived_ns
        end.close_transfer(500 if arrived_ns == 400_000_000 else 250)
    found = await asyncio.wait_for(end.run(), DEADLINE_S)
    assert end.used_bytes == 1000
    assert found.span_ns == 200_000_000
    assert found.mean == 500 * 5, "those of the second half, in a second"


async def test_the_same_memory_takes_all_transfers() -> None:
    end = ProbeReceiver(wish(7), now_ns=lambda: 0)
    first = end.open_transfer(1000)
    assert end.open_transfer(400).obj is first.obj
    assert end.open_transfer(4000).nbytes == 4000


async def test_tiny_probes_leave_few_marks_and_count_all_the_same() -> None:
    at_ns = [0]
    end = ProbeReceiver(wish(1, is_requester_sending=True, span_ns=10**9, bytes_max=10**9), now_ns=lambda: at_ns[0])
    for _ in range(10_000):
        end.open_transfer(1)
        at_ns[0] += MARK_NS // 100
        end.close_transfer(1)
    assert end.used_bytes == 10_000
    assert len(end._marks) <= 10_000 // 100 + 2


async def test_a_body_is_random() -> None:
    with ThreadPoolExecutor(1) as executor:
        body = await make_body(executor)
    assert body.nbytes == BODY_BYTES_MAX
    assert len(zlib.compress(body[: 2**20])) > 2**20


def test_the_warm_up_follows_the_round_trip() -> None:
    assert warm_up_ns(1_000) == NS_PER_S
    assert warm_up_ns(100_000_000) == 2_500_000_000
    assert warm_up_ns(900_000_000) == 5 * NS_PER_S
