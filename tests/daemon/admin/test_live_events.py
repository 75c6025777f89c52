"""The event stream: one document for all viewers, and only while there are any; bounded in every direction."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from diloco_node.daemon.admin import live_events
from diloco_node.daemon.admin.live_events import LiveEvents, json_text
from tests.kit.waiting import eventually


class Source:
    def __init__(self) -> None:
        self.made = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def snapshot(self) -> dict[str, Any]:
        return {"kind": "all"}

    async def status(self) -> dict[str, Any]:
        await self.hold.wait()
        self.made += 1
        return {"made": self.made}


@contextlib.asynccontextmanager
async def serving(source: Source) -> AsyncIterator[tuple[LiveEvents, str]]:
    live = LiveEvents(source.snapshot, source.status)
    app = web.Application()
    app.router.add_get("/events", live.serve, allow_head=False)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield live, f"http://127.0.0.1:{runner.addresses[0][1]}/events"
    finally:
        await live.stop()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "PERIOD_S", 0.02)


async def event_stream(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, str]]:
    """The fields of each event; of a comment, its text as `comment`."""
    fields: dict[str, str] = {}
    async for line in answer.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if line != b"\n":
            fields[name or "comment"] = value
        elif fields:
            yield fields
            fields = {}


async def test_a_snapshot_comes_first_and_then_one_status_after_the_other() -> None:
    source = Source()
    async with serving(source) as (_, url), aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.content_type == "text/event-stream"
        assert answer.headers["Cache-Control"] == "no-store"
        events = []
        async for event in event_stream(answer):
            events.append(event)
            if len(events) == 4:
                break
    assert [event["event"] for event in events] == ["snapshot", "status", "status", "status"]
    assert [json.loads(event["data"]).get("made") for event in events] == [None, 1, 2, 3]


async def test_ten_viewers_cost_one_document_each_time() -> None:
    source = Source()

    async def watch(session: aiohttp.ClientSession, url: str) -> list[int]:
        async with session.get(url) as answer:
            events: list[int] = []
            async for event in event_stream(answer):
                events += [json.loads(event["data"])["made"]] if event["event"] == "status" else []
                if len(events) == 10:
                    break
            return events

    async with serving(source) as (live, url), aiohttp.ClientSession() as session:
        rows = await asyncio.gather(*(watch(session, url) for _ in range(10)))
        for events in rows:
            assert events == sorted(set(events)), "each document at most once, and in order"
        assert source.made < 10 * 10, "not one for each viewer"
        await eventually(lambda: not live.viewers)
        await asyncio.sleep(0.1)
        documents = source.made
        await asyncio.sleep(0.2)
        assert source.made == documents, "nobody looks on, nothing is made"
        async with session.get(url) as answer:
            events = [event["event"] async for event in _first(answer, 2)]
        assert events == ["snapshot", "status"], "it begins again"


async def _first(answer: aiohttp.ClientResponse, number: int) -> AsyncIterator[dict[str, str]]:
    async for event in event_stream(answer):
        yield event
        number -= 1
        if not number:
            return


async def test_one_viewer_too_many_is_refused_and_a_place_gets_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "VIEWERS_MAX", 2)
    async with serving(Source()) as (live, url), aiohttp.ClientSession() as session:
        async with session.get(url) as first, session.get(url) as second:
            assert first.status == second.status == 200
            async with session.get(url) as third:
                assert third.status == 503
                assert "close one" in await third.text()
        await eventually(lambda: not live.viewers)
        async with session.get(url) as answer:
            assert answer.status == 200


async def test_a_stream_on_which_nothing_comes_is_kept_open_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "KEEP_ALIVE_S", 0.02)
    source = Source()
    source.hold.clear()
    async with serving(source) as (_, url), aiohttp.ClientSession() as session, session.get(url) as answer:
        events = [event async for event in _first(answer, 3)]
    assert events[1:] == [{"comment": "keep-alive"}] * 2


async def test_who_reads_slowly_misses_documents_and_holds_up_nobody() -> None:
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(live_events.QUEUE_MAX)
    for number in range(100):
        live_events.put_newest(queue, b"%d" % number)
    documents = [queue.get_nowait() for _ in range(queue.qsize())]
    assert documents == [b"96", b"97", b"98", b"99"]


async def test_who_takes_nothing_for_long_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "WRITE_S", 0.1)

    class Large(Source):
        async def status(self) -> dict[str, Any]:
            return {"much": "x" * 10**6}

    live = LiveEvents(Large().snapshot, Large().status)
    app = web.Application()
    app.router.add_get("/events", live.serve, allow_head=False)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.create_connection(runner.addresses[0][:2]) as viewer:
        viewer.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await eventually(lambda: len(live.viewers) == 1)
        await eventually(lambda: len(live.viewers) == 0)
        await eventually(lambda: runner.server is not None and not runner.server.connections)
    await live.stop()
    await runner.cleanup()


async def test_a_status_that_can_not_be_made_ends_the_streams() -> None:
    class Broken(Source):
        async def status(self) -> dict[str, Any]:
            raise ValueError("planted")

    async with serving(Broken()) as (_, url), aiohttp.ClientSession() as session, session.get(url) as answer:
        async with asyncio.timeout(60):
            await answer.content.read()


async def test_the_end_of_the_daemon_ends_the_streams() -> None:
    async with serving(Source()) as (live, url), aiohttp.ClientSession() as session, session.get(url) as answer:
        await live.stop()
        async with asyncio.timeout(60):
            await answer.content.read()
        await eventually(lambda: not live.viewers)


def test_numbers_that_json_has_not_become_texts() -> None:
    document = {"loss": float("nan"), "rows": [1.5, float("inf"), (float("-inf"), None)], "step": 3}
    assert json.loads(json_text(document)) == {"loss": "nan", "rows": [1.5, "inf", ["-inf", None]], "step": 3}
