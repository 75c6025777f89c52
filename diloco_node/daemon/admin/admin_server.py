"""The operator's HTTP port: the page, health, metrics, status, and the few commands that change something.

Bound to loopback, and to a Unix socket in the state folder (mode 0600): that one is reached by path also from another
network namespace, where this loopback is not. A container adds the one address (`host`) at which a port published on
its machine's loopback arrives. Exactly one Host header must name loopback (DNS rebinding). Commands are POST with the
bearer token from `admin.token` in the state folder (CSRF). GET never changes anything.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from diloco_node.daemon.admin.listening import LOOPBACK, listen, port_of
from diloco_node.daemon.admin.live_events import LiveEvents
from diloco_node.daemon.admin.page_files import page_routes
from diloco_node.daemon.stopping import ADMIN_SHARE, limit_to_kill_s
from diloco_node.errors import BindError, ConfigError, DilocoError
from diloco_node.escaping import escaped, escaped_document
from diloco_node.state_names import ADMIN_SOCKET_NAME, ADMIN_TOKEN_NAME
from diloco_node.unix_sockets import socket_path

if TYPE_CHECKING:  # whose port this is
    from diloco_node.daemon.daemon import Daemon

BODY_BYTES_MAX: Final = 64 * 1024
FINISH_REASON: Final = "asked by the operator"
FINISH_REASON_BYTES_MAX: Final = 512
"""It travels in messages that have room for twice that."""

PROGRESS_S: Final = 0.5
"""Between two lines of a measurement that goes on: so soon it is seen, too, that who asked is gone."""

HOST_ALLOWED: Final = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
"""The whole of a Host header: a name and a port, and no place to hide another name."""

LOOPBACK_ONLY: Final = (
    "this port answers to loopback names only. From another machine forward it: ssh -L 7401:127.0.0.1:7401 HOST, then "
    "ask localhost:7401. Or run the scraper on this machine, or a proxy that sends 'Host: localhost' (docs/operate.md)"
)


class AdminServer:
    """Serves the daemon on 127.0.0.1 and on the Unix socket. port: on loopback; 0: a free one. host: bound as well, at
    the same port."""

    def __init__(
        self, daemon: Daemon, registry: CollectorRegistry, *, port: int, state_dir: Path, host: str = LOOPBACK
    ) -> None:
        self._daemon = daemon
        self._registry = registry
        self._host = host
        self.port = port
        self._state_dir = state_dir
        self._token = ""
        self._runner: web.AppRunner | None = None
        self._listening: list[asyncio.Server] = []
        self._live = LiveEvents(self._region_snapshot, self._region_status)

    async def start(self) -> None:
        """Bind and serve. Raises BindError: the port is taken, or the socket can't be made."""
        self._token = load_token(self._state_dir)
        app = web.Application(middlewares=[self._check], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                *page_routes(),
                web.get("/api/v1/events", self._live.serve, allow_head=False),
                web.get("/api/v1/snapshot", self._snapshot),
                web.get("/livez", self._livez),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/api/v1/status", self._status),
                web.post("/api/v1/finish", self._finish),
                web.post("/api/v1/drain", self._drain),
                web.post("/api/v1/budget", self._set_budget),
                web.post("/api/v1/measure", self._measure),
                web.post("/api/v1/quarantine/add", self._expel),
                web.post("/api/v1/quarantine/lift", self._lift_quarantine),
                web.post("/api/v1/certificates/revoke", self._revoke),
                web.post("/api/v1/members", self._change_members),
                web.post("/api/v1/settings", self._change_settings),
                web.post("/api/v1/learner/start", self._start_learner),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=ADMIN_SHARE * limit_to_kill_s())
        await self._runner.setup()
        # In this order: with port 0 loopback chooses, and the other address takes the same.
        for host in dict.fromkeys((LOOPBACK, self._host)):
            await self._bind(self._runner, host)
        path = socket_path(self._state_dir, ADMIN_SOCKET_NAME)
        try:
            # The state folder has one daemon at a time (its lock), so a socket that lies there is a dead one's.
            path.unlink(missing_ok=True)
            await web.UnixSite(self._runner, str(path)).start()
            path.chmod(0o600)
        except OSError as error:
            await self.stop()
            raise BindError(f"{path} can't be bound ({error.strerror}); is the state folder writable?") from error

    async def _bind(self, runner: web.AppRunner, host: str) -> None:
        try:
            server = await listen(runner, host, self.port)
        except OSError as error:
            await self.stop()
            raise BindError(
                f"admin port {host}:{self.port} can't be bound ({error.strerror}). "
                f"Free it, or set another: [regions.NAME] admin_port (and admin_host) in run.toml, or --admin-port."
            ) from error
        self._listening.append(server)
        self.port = port_of(server)

    async def stop(self) -> None:
        """Close the port."""
        for server in self._listening:
            server.close()
        self._listening.clear()
        await self._live.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = self._daemon.not_ready_reason()
        if reason:
            return web.Response(status=503, text=f"not ready: {reason}\n")
        return web.Response(text="ok\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(dict(self._daemon.status()))

    async def _snapshot(self, request: web.Request) -> web.Response:
        return web.json_response(dict(self._daemon.snapshot()))

    async def _region_snapshot(self) -> dict[str, Any]:
        return {"regions": [dict(self._daemon.snapshot())]}

    async def _region_status(self) -> dict[str, Any]:
        return {"regions": [dict(self._daemon.status())]}

    async def _finish(self, request: web.Request) -> web.Response:
        document = await _document(request) if request.can_read_body else {}
        reason = document.get("reason", FINISH_REASON)
        if not isinstance(reason, str) or not 0 < len(escaped(reason).encode()) <= FINISH_REASON_BYTES_MAX:
            raise ConfigError(f"reason must be a text of 1 to {FINISH_REASON_BYTES_MAX} bytes")
        self._daemon.running_node("finish").finish(escaped(reason))
        return web.json_response({"accepted": True}, status=202)

    async def _drain(self, _: web.Request) -> web.Response:
        self._daemon.drain()
        return web.json_response({"accepted": True}, status=202)

    async def _set_budget(self, request: web.Request) -> web.Response:
        document = await _order(request)
        return web.json_response({"budget": dict(self._daemon.set_budget(document))})

    async def _expel(self, request: web.Request) -> web.Response:
        self._daemon.expel(await _peer(request))
        return web.json_response({"accepted": True}, status=202)

    async def _revoke(self, request: web.Request) -> web.Response:
        region, pem = await _peer(request), (await _document(request)).get("certificate", "")
        if not isinstance(pem, str):
            raise ConfigError("the certificate must be a text in PEM form")
        return web.json_response({"revokes": self._daemon.revoke(region, pem)}, status=202)

    async def _change_members(self, request: web.Request) -> web.Response:
        self._daemon.running_node("change").change_members(await _order(request))
        return web.json_response({"accepted": True}, status=202)

    async def _change_settings(self, request: web.Request) -> web.Response:
        node = self._daemon.running_node("change")
        return web.json_response({"changes": node.change_settings(await _order(request))}, status=202)

    async def _lift_quarantine(self, request: web.Request) -> web.Response:
        return web.json_response({"lifted": self._daemon.lift_quarantine(await _peer(request))})

    async def _start_learner(self, request: web.Request) -> web.Response:
        return web.json_response({"was": self._daemon.start_learner()}, status=202)

    async def _measure(self, request: web.Request) -> web.StreamResponse:
        """Lines of JSON while it lasts: {"now": ...} at least every second, {"so_far": ...} when there is more of the
        document, at the end {"document"} or {"error"}."""
        document = await _document(request)
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        now, so_far = [""], deque[dict[str, Any]](maxlen=1)
        measuring = asyncio.ensure_future(
            self._daemon.measure(document, lambda text: now.__setitem__(0, text), so_far.append)
        )
        try:
            while not (await asyncio.wait([measuring], timeout=PROGRESS_S))[0]:
                await _write_line(answer, {"now": now[0]})
                if so_far:
                    await _write_line(answer, {"so_far": so_far.pop()})
            await _write_line(answer, _outcome(measuring))
            await answer.write_eof()  # who has read the last line may be gone before it
        except ConnectionError:
            return answer  # who asked is gone, and so is the reason to measure
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
        return answer

    @web.middleware
    async def _check(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Whether to answer at all; a request that makes no sense gets the reason."""
        if not names_loopback(request):
            return web.json_response({"error": LOOPBACK_ONLY}, status=403)
        if request.method not in ("GET", "HEAD") and not self._has_token(request):
            reason = f"missing or wrong bearer token; it is in {self._state_dir / ADMIN_TOKEN_NAME}"
            return web.json_response({"error": reason}, status=401)
        try:
            response: web.StreamResponse = await handler(request)
        except DilocoError as error:
            return web.json_response(_refusal(error), status=400 if isinstance(error, ConfigError) else 500)
        return response

    def _has_token(self, request: web.Request) -> bool:
        # aiohttp makes surrogates of bytes that are no UTF-8.
        headers = [header.encode("utf-8", "surrogateescape") for header in request.headers.getall("Authorization", [])]
        return len(headers) == 1 and hmac.compare_digest(headers[0], f"Bearer {self._token}".encode())


def names_loopback(request: web.Request) -> bool:
    """Whether who asks meant this machine: not a page of another site whose name now leads here."""
    hosts = request.headers.getall("Host", [])  # none at all in HTTP/1.0: then nobody has named this machine
    # A whole URL as the target names its host itself, whatever the header says.
    return len(hosts) == 1 and bool(HOST_ALLOWED.fullmatch(hosts[0])) and request.raw_path.startswith("/")


async def _document(request: web.Request) -> dict[str, Any]:
    """The body, which must be a JSON object. Raises ConfigError."""
    try:
        document = json.loads(await request.read())  # whatever encoding its header names
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body must be a JSON object ({error})") from None
    if not isinstance(document, dict):
        raise ConfigError("the body must be a JSON object (it is no object)")
    return document


async def _order(request: web.Request) -> dict[str, Any]:
    """The body of an order that is checked as run.toml is: what that needs comes in a thread, and heartbeats go on."""
    await asyncio.to_thread(import_module, "diloco_node.config.ledger_settings")
    return await _document(request)


async def _peer(request: web.Request) -> str:
    peer = (await _document(request)).get("peer")
    if not isinstance(peer, str):
        raise ConfigError("the body must name a peer, as text")
    return peer


async def _write_line(answer: web.StreamResponse, line: Mapping[str, Any]) -> None:
    await answer.write(json.dumps(escaped_document(line)).encode() + b"\n")


def _outcome(task: asyncio.Future[Mapping[str, Any]]) -> dict[str, Any]:
    """The last line: what came of it, or what went wrong and the exit code that says so."""
    try:
        return {"document": dict(task.result())}
    except DilocoError as error:
        return _refusal(error)


def _refusal(error: DilocoError) -> dict[str, Any]:
    return {"error": str(error), "exit_code": error.exit_code}


def load_token(state_dir: Path) -> str:
    """The bearer token of a region, made on first use (mode 0600)."""
    path = state_dir / ADMIN_TOKEN_NAME
    path.touch(mode=0o600)
    token = path.read_text().strip()
    if not token:  # also after a crash, or a full disk, between the file and what is in it
        token = secrets.token_urlsafe(32)
        path.write_text(token)
    return token
