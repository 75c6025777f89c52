"""One page for all regions that answer on this machine; each daemon serves the same for its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import typer
from aiohttp import web

from diloco_node.cli.status import Target, ask
from diloco_node.daemon.admin.live_events import LiveEvents
from diloco_node.daemon.admin.page_files import page_routes
from diloco_node.daemon.admin.server import LOOPBACK, names_loopback
from diloco_node.errors import BindError, DilocoError

REGIONS_MAX: Final = 64
SNAPSHOT_PATH: Final = "/api/v1/snapshot"


def serve_dashboard(regions: MergedRegions, port: int) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError, PeersUnreachable, BindError."""
    regions.find()  # a wrong place is said at once
    asyncio.run(_serve(regions, port))


async def _serve(regions: MergedRegions, port: int) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with dashboard_server(regions, port) as url:
        typer.echo(f"dashboard {url}  (Ctrl-C ends it; it changes nothing)")
        await ended.wait()


class MergedRegions:
    """What all regions show, put together; a region that was there once stays, as one that does not answer.

    Args:
        find: the regions to ask. It is called again and again: one that starts again may have another port.
    """

    def __init__(self, find: Callable[[], Sequence[Target]]) -> None:
        self._find = find
        self._targets: dict[str, Target] = {}
        self._names: dict[str, str] = {}

    def find(self) -> None:
        """Look for regions. Raises DilocoError: there are none, or a place is none."""
        for target in self._find():
            if target.name in self._targets or len(self._targets) < REGIONS_MAX:
                self._targets[target.name] = target

    async def snapshot(self, since_unix: float | None) -> dict[str, Any]:
        """Status, history and settings of each (see `LiveEvents`)."""
        answers = await self._ask_all(SNAPSHOT_PATH)
        return {"regions": [_since(one, since_unix) if "status" in one else {"status": one} for one in answers]}

    async def status(self) -> dict[str, Any]:
        """The status of each."""
        return {"regions": await self._ask_all("/api/v1/status")}

    async def _ask_all(self, path: str) -> list[dict[str, Any]]:
        with contextlib.suppress(DilocoError, OSError):
            await asyncio.to_thread(self.find)
        return await asyncio.gather(*(self._ask(target, path) for target in list(self._targets.values())))

    async def _ask(self, target: Target, path: str) -> dict[str, Any]:
        document = await asyncio.to_thread(ask, target, path)
        if "error" in document:
            return {"region": self._names.get(target.name, target.name), "error": document["error"]}
        status = document.get("status", document)
        if isinstance(status, dict) and isinstance(status.get("region"), str):
            self._names[target.name] = status["region"]
        return document


def _since(answer: dict[str, Any], since_unix: float | None) -> dict[str, Any]:
    """A region's snapshot with no more of its history than is asked for."""
    history = answer.get("history")
    if since_unix is None or not isinstance(history, dict) or not isinstance(history.get("rows"), list):
        return answer
    rows = [row for row in history["rows"] if isinstance(row, list) and row and row[0] > since_unix]
    return answer | {"history": history | {"rows": rows}}


@contextlib.asynccontextmanager
async def dashboard_server(regions: MergedRegions, port: int) -> AsyncIterator[str]:
    """Serve the page for these regions on loopback; its URL. Raises BindError."""
    live = LiveEvents(regions.snapshot, regions.status)
    app = web.Application(middlewares=[_loopback_only])
    app.add_routes([*page_routes(), web.get("/api/v1/events", live.serve, allow_head=False)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            raise BindError(
                f"{LOOPBACK}:{port} can't be bound ({error.strerror}); give another port with --port, 0 for any"
            ) from error
        yield f"http://{LOOPBACK}:{runner.addresses[0][1]}/"
    finally:
        await live.stop()
        await runner.cleanup()


@web.middleware
async def _loopback_only(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    if not names_loopback(request):
        return web.Response(status=403, text=json.dumps({"error": "this port answers to loopback names only"}))
    response: web.StreamResponse = await handler(request)
    return response
