"""The page's one stream: server-sent events, made once a second for all viewers, and only while there are viewers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

PERIOD_S: Final = 1.0
KEEP_ALIVE_S: Final = 15.0
"""A proxy between viewer and daemon may close a connection that stays silent for longer."""

VIEWERS_MAX: Final = 16
QUEUE_MAX: Final = 4
"""Events that wait for one viewer. Each has everything in it, so the oldest is dropped when another comes."""

WRITE_S: Final = 30.0
"""A viewer that takes nothing for so long is gone."""

Document = dict[str, Any]


class LiveEvents:
    """A `snapshot`, then a `status` every `PERIOD_S`, of all regions; they raise nothing. viewers: a queue for each."""

    def __init__(self, snapshot: Callable[[], Awaitable[Document]], status: Callable[[], Awaitable[Document]]) -> None:
        self._snapshot = snapshot
        self._status = status
        self.viewers: set[asyncio.Queue[bytes | None]] = set()
        self._making: asyncio.Task[None] | None = None

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer one viewer until it goes, or `stop`."""
        if len(self.viewers) >= VIEWERS_MAX:
            return web.Response(status=503, text=f"{VIEWERS_MAX} pages look on already: close one\n")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_MAX)
        self.viewers.add(queue)
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make(), name="live events")
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        answer = web.StreamResponse(headers=headers)
        try:
            await answer.prepare(request)
            chunk: bytes | None = event_chunk("snapshot", await self._snapshot())
            while chunk is not None:
                await asyncio.wait_for(answer.write(chunk), WRITE_S)
                chunk = await _next(queue)
        except ConnectionError:
            pass
        except TimeoutError:
            if request.transport is not None:  # closing would wait for what is not read
                request.transport.abort()
        finally:
            self.viewers.discard(queue)
        return answer

    async def stop(self) -> None:
        """End all streams, and make no more events."""
        for queue in self.viewers:
            put_newest(queue, None)
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _make(self) -> None:
        try:
            while self.viewers:
                await asyncio.sleep(PERIOD_S)
                chunk = event_chunk("status", await self._status())
                for queue in self.viewers:
                    put_newest(queue, chunk)
        finally:
            for queue in self.viewers:  # whatever went wrong: they come again, and do not wait for nothing
                put_newest(queue, None)


def event_chunk(kind: str, document: Document) -> bytes:
    """Return one event as the stream has it."""
    return f"event: {kind}\ndata: {json_text(document)}\n\n".encode()


async def _next(queue: asyncio.Queue[bytes | None]) -> bytes | None:
    try:
        return await asyncio.wait_for(queue.get(), KEEP_ALIVE_S)
    except TimeoutError:
        return b": keep-alive\n\n"


def put_newest(queue: asyncio.Queue[bytes | None], chunk: bytes | None) -> None:
    """Queue a document; where the queue is full, the oldest one goes."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(chunk)


def json_text(document: Any) -> str:
    """JSON on one line that browsers read: what is not finite, such as a loss that blew up, becomes a text."""
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
