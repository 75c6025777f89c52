"""measure/requester.py, measure/echoes.py: what a peer may answer in a measurement; silence and nonsense."""

import asyncio

import pytest

from diloco_node.errors import LinkLost, PeerError, ProtocolViolation
from diloco_node.measure.echoes import Echoes, share_retransmitted
from diloco_node.measure.probes import ending
from diloco_node.measure.requester import ANSWERS_MAX, Exchange
from diloco_node.transport.kernel.tcp_info import TcpCounters
from diloco_node.wire import measure_messages as msg

READY = msg.MeasurementReady(1)


async def test_answers_come_in_their_order() -> None:
    exchange = Exchange("b", 1)
    exchange.take(READY)
    exchange.take(msg.MeasurementSent(1, 2, 3, 4, 5, 6))
    assert await exchange.answer(msg.MeasurementReady, 60) is READY
    assert (await exchange.answer(msg.MeasurementSent, 60)).wire_bytes == 4


async def test_who_says_more_than_it_was_asked_breaks_the_protocol() -> None:
    exchange = Exchange("b", 1)
    for _ in range(ANSWERS_MAX):
        exchange.take(READY)
    with pytest.raises(ProtocolViolation, match="b says more than it was asked"):
        exchange.take(READY)


async def test_a_link_that_is_lost_is_the_answer_whatever_was_said_before() -> None:
    exchange = Exchange("b", 1)
    for _ in range(ANSWERS_MAX):
        exchange.take(READY)
    exchange.fail(LinkLost("the link to b went down"))
    with pytest.raises(LinkLost, match="went down"):
        await exchange.answer(msg.MeasurementReady, 60)


async def test_silence_and_another_answer_are_told_apart() -> None:
    exchange = Exchange("b", 1)
    with pytest.raises(LinkLost, match=r"b said nothing for 0 s \(MeasurementReady was due\)"):
        await exchange.answer(msg.MeasurementReady, 0.0)
    exchange.take(READY)
    with pytest.raises(PeerError, match="b said MeasurementReady; expected MeasurementSent"):
        await exchange.answer(msg.MeasurementSent, 60)


async def test_an_echo_counts_once_and_only_if_it_was_sent() -> None:
    echoes = Echoes("b")
    echoes.sent_ns = {1: 10, 2: 20}
    for sequence, now_ns in ((1, 15), (1, 99), (7, 99)):
        echoes.take(msg.EchoReply(sequence, 0, 0), now_ns=now_ns)
    assert echoes.back_ns == {1: 15}
    await echoes.until_all_back(0.0)  # not longer
    echoes.take(msg.EchoReply(2, 5, 6), now_ns=30)
    await echoes.until_all_back(60)
    assert [one.sequence for one in echoes.answers] == [1, 2]


async def test_tasks_end_with_their_block_whatever_they_raise() -> None:
    async def breaks() -> None:
        raise LinkLost("b is gone")

    forever = asyncio.create_task(asyncio.Event().wait())
    broken = asyncio.create_task(breaks())
    async with ending(forever, broken):
        await asyncio.sleep(0)
    assert forever.cancelled()
    assert isinstance(broken.exception(), LinkLost)


def answers(*pairs: tuple[int, int]) -> list[msg.EchoReply]:
    return [msg.EchoReply(number, *pair) for number, pair in enumerate(pairs)]


def test_what_was_retransmitted_is_that_of_both_ends() -> None:
    before, after = TcpCounters(100, 10, 0), TcpCounters(500, 20, 0)
    assert share_retransmitted(before, after, answers((1000, 0), (1600, 90))) == 0.1
    assert share_retransmitted(None, after, answers((0, 0), (1, 0))) is None
    assert share_retransmitted(before, None, answers((0, 0), (1, 0))) is None
    assert share_retransmitted(before, after, answers((0, 0))) is None, "one answer is no time"
    assert share_retransmitted(before, after, answers((0, 0), (-1, -1))) is None, "the peer's kernel does not tell"
    assert share_retransmitted(before, before, answers((5, 0), (5, 0))) is None, "nothing was sent"
    assert share_retransmitted(before, after, answers((0, 50), (10, 0))) is None, "another connection than before"
