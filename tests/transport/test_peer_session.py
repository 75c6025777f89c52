"""Why a session ended, when gRPC itself gives no reason."""

import asyncio

import pytest

from diloco_node.errors import LinkLost, ProtocolViolation
from diloco_node.transport.peer_session import reason_of_end, to_the_end


async def ended(*outcomes: BaseException | None) -> list[asyncio.Task[None]]:
    """Tasks that have ended with these outcomes; asyncio.CancelledError stands for one that was cancelled."""

    async def end(outcome: BaseException | None) -> None:
        if outcome is not None:
            raise outcome

    tasks = [asyncio.create_task(end(outcome)) for outcome in outcomes]
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


async def test_a_task_that_was_cancelled_under_us_is_a_lost_link_and_not_a_fault_of_ours() -> None:
    why = reason_of_end("us-west", await ended(asyncio.CancelledError()), None)
    assert isinstance(why, LinkLost)
    assert "us-west" in str(why)


async def test_a_violation_says_more_than_the_lost_stream_that_follows_it() -> None:
    violation = ProtocolViolation("us-west: field 3")
    tasks = await ended(LinkLost("gone"), violation, None)
    assert reason_of_end("us-west", tasks, None) is violation


async def test_what_must_not_be_given_up_half_way_is_done_before_its_cancellation_goes_on() -> None:
    may_end, done = asyncio.Event(), []

    async def close() -> None:
        await may_end.wait()
        done.append("closed")

    task = asyncio.create_task(to_the_end(close()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["closed"]
