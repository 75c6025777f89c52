"""The page about all regions that answer on this machine. Each daemon serves the same page about its own region."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import typer
from aiohttp import web

from diloco_node.cli.admin_client import STATUS_PATH, Target, ask
from diloco_node.daemon.admin.admin_server import names_loopback
from diloco_node.daemon.admin.listening import LOOPBACK, listen, port_of
from diloco_node.daemon.admin.live_events import LiveEvents
from diloco_node.daemon.admin.page_files import page_routes
from diloco_node.daemon.work import in_thread
from diloco_node.errors import BindError, ConfigError, DilocoError
from diloco_node.health.health_summary import joint_health

REGIONS_MAX: Final = 64
THREADS: Final = 2 * REGIONS_MAX + 1
"""Both requests to each region may hang, and one thread looks for regions."""

ANSWER_S: Final = 4.0
"""A region that hangs holds up the others no longer."""

SNAPSHOT_PATH: Final = "/api/v1/snapshot"


def serve_dashboard(regions: MergedRegions, port: int) -> None:
    """Serve the page until Ctrl-C. Raises ConfigError, PeersUnreachable, BindError."""
    regions.find()  # a wrong place is said at once
    asyncio.run(_serve(regions, port))


async def _serve(regions: MergedRegions, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await regions.check_run()
    async with dashboard_server(regions, port) as url:
        typer.echo(f"dashboard {url}  (Ctrl-C ends it; it changes nothing)")
        await stop.wait()


class MergedRegions:
    """All regions together. A region that was there once stays, as one that does not answer. `find` is called again and
    again: one that starts again may have another port."""

    def __init__(self, find: Callable[[], Sequence[Target]]) -> None:
        self._find = find
        self._targets: dict[str, Target] = {}
        self._names: dict[str, str] = {}
        # Each may wait for a region that hangs, and the others' answers must not.
        self._threads = ThreadPoolExecutor(THREADS, "ask")
        self._asking: dict[tuple[Target, str], asyncio.Future[dict[str, Any]]] = {}

    def find(self) -> None:
        """Look for regions. Raises DilocoError: there are none, a place is none, or two regions have one name."""
        targets: dict[str, Target] = {}
        for target in self._find():
            first = targets.setdefault(target.name, target)
            if first.port != target.port:
                ports = f"ports {first.port} and {target.port}"
                raise ConfigError(f"two regions are called {target.name} ({ports}): give the places of one run")
        for name, target in targets.items():
            if name in self._targets or len(self._targets) < REGIONS_MAX:
                self._targets[name] = target

    async def check_run(self) -> None:
        """Raise ConfigError if the regions that answer are of several runs."""
        runs = {
            str(status["run_id"]): str(status["region"])
            for status in await self._ask_all(STATUS_PATH)
            if "run_id" in status
        }
        if len(runs) > 1:
            names = ", ".join(f"{region} of run {run}" for run, region in sorted(runs.items()))
            raise ConfigError(f"one page shows one run, and these are {len(runs)} ({names}): give the places of one")

    async def snapshot(self) -> dict[str, Any]:
        """Collect status, history and settings of each (see `LiveEvents`), and the health of all together."""
        answers = await self._ask_all(SNAPSHOT_PATH)
        regions = [{"status": answer} if "error" in answer else answer for answer in answers]
        return {"regions": regions, "health": joint_health([region["status"] for region in regions])}

    async def status(self) -> dict[str, Any]:
        """Collect the status of each, and the health of all together."""
        documents = await self._ask_all(STATUS_PATH)
        return {"regions": documents, "health": joint_health(documents)}

    async def _ask_all(self, path: str) -> list[dict[str, Any]]:
        with contextlib.suppress(DilocoError, OSError, ValueError):
            await in_thread(self._threads, self.find)
        return await asyncio.gather(*(self._ask(target, path) for target in list(self._targets.values())))

    async def _ask(self, target: Target, path: str) -> dict[str, Any]:
        document = await self._answer(target, path)
        status = document if path == STATUS_PATH else document.get("status")
        if "error" in document or not isinstance(status, dict):
            error = document.get("error", f"what 127.0.0.1:{target.port} answers is no status: has it another version?")
            return {"region": self._names.get(target.name, target.name), "error": error}
        if isinstance(status.get("region"), str):
            self._names[target.name] = status["region"]
        return document

    async def _answer(self, target: Target, path: str) -> dict[str, Any]:
        """Ask a region. It is not asked again before it has answered, or has let the connection go."""
        asking = self._asking.get((target, path))
        if asking is None:
            asking = self._asking[target, path] = in_thread(self._threads, ask, target, path)
            asking.add_done_callback(lambda _: self._asking.pop((target, path)))
        try:
            return await asyncio.wait_for(asyncio.shield(asking), ANSWER_S)
        except TimeoutError:
            return {"error": f"no answer from 127.0.0.1:{target.port} within {ANSWER_S:.0f} s"}
        except RecursionError:
            return {"error": f"what 127.0.0.1:{target.port} answers is nested too deeply"}


@contextlib.asynccontextmanager
async def dashboard_server(regions: MergedRegions, port: int) -> AsyncIterator[str]:
    """Serve the page for these regions on loopback, and yield its URL. Raises BindError."""
    live = LiveEvents(regions.snapshot, regions.status)
    app = web.Application(middlewares=[_loopback_only])
    app.add_routes([*page_routes(), web.get("/api/v1/events", live.serve, allow_head=False)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            server = await listen(runner, LOOPBACK, port)
        except OSError as error:
            raise BindError(
                f"{LOOPBACK}:{port} can't be bound ({error.strerror}); give another port with --port, 0 for any"
            ) from error
        with contextlib.closing(server):
            yield f"http://{LOOPBACK}:{port_of(server)}/"
    finally:
        await live.stop()
        await runner.cleanup()


@web.middleware
async def _loopback_only(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
    if not names_loopback(request):
        return web.Response(status=403, text=json.dumps({"error": "this port answers to loopback names only"}))
    response: web.StreamResponse = await handler(request)
    return response
