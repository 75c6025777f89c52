"""The admin port: health, status, metrics, and who may change what."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from diloco_node.daemon.admin import admin_server as admin
from diloco_node.daemon.admin import listening
from diloco_node.daemon.admin.admin_server import AdminServer
from diloco_node.errors import BindError, ConfigError, DiskRefused, PeersUnreachable
from diloco_node.state_names import ADMIN_SOCKET_NAME, ADMIN_TOKEN_NAME
from diloco_node.unix_sockets import socket_path
from tests.kit.page_kit import crowded


class Region:
    def __init__(self) -> None:
        self.reason = "waits for genesis"
        self.finished: list[str] = []
        self.budgets: list[dict] = []
        self.asked: list[dict] = []
        self.measured = asyncio.Event()
        self.gave_up = asyncio.Event()

    def set_budget(self, document: dict) -> dict:
        if "egress" not in document:
            raise ConfigError("nothing to set")
        if document["egress"] == "full":
            raise DiskRefused("no room")
        self.budgets.append(document)
        return {"egress": 5}

    def expel(self, peer: str) -> None:
        if peer != "b":
            raise ConfigError(f"{peer!r} is none of this region's peers")
        self.asked.append({"expel": peer})

    def revoke(self, region: str, pem: str) -> str:
        self.asked.append({"revoke": region, "pem": pem})
        return "ab12"

    def lift_quarantine(self, peer: str) -> bool:
        if peer not in ("b", "c"):
            raise ConfigError(f"{peer!r} is none of this region's peers")
        return peer == "b"

    async def measure(self, document: dict, say, keep) -> dict:
        """Measure as a daemon does: say what goes on, wait for `measured`, tell."""
        say(f"round trips to {document.get('peer')}")
        for count in (1, 2):
            keep({"rows": [0] * count})
        self.asked.append(document)
        try:
            await self.measured.wait()
        except asyncio.CancelledError:
            self.gave_up.set()
            raise
        if "peer" not in document:
            raise PeersUnreachable("a has no link to b")
        return {"rows": []}

    def start_learner(self) -> str:
        if self.reason:
            raise ConfigError("the learner runs already")
        return "stopped"

    def handlers(self) -> Any:
        node = SimpleNamespace(
            finish=self.finished.append,
            change_members=lambda document: self.asked.append(dict(document)),
            change_settings=lambda document: [str(word) for word in document["set"]],
        )
        return SimpleNamespace(
            running_node=lambda purpose: node,
            status=lambda: {"region": "us-east", "step": 3},
            snapshot=lambda: {"status": {"region": "us-east"}},
            not_ready_reason=lambda: self.reason,
            drain=lambda: self.finished.append("drained"),
            set_budget=self.set_budget,
            measure=self.measure,
            expel=self.expel,
            revoke=self.revoke,
            lift_quarantine=self.lift_quarantine,
            start_learner=self.start_learner,
        )


@pytest.fixture
async def site(tmp_path: Path):
    region = Region()
    registry = CollectorRegistry()
    Counter("diloco_rounds", "rounds", registry=registry).inc(7)
    server = AdminServer(region.handlers(), registry, port=0, state_dir=tmp_path)
    await server.start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        yield region, server, session
    await server.stop()


async def test_health_tells_apart_alive_and_ready(site) -> None:
    region, _, session = site
    assert (await session.get("/livez")).status == 200
    answer = await session.get("/readyz")
    assert answer.status == 503
    assert "waits for genesis" in await answer.text()
    region.reason = ""
    assert (await session.get("/readyz")).status == 200


async def test_status_and_metrics_are_read_only_documents(site) -> None:
    region, _, session = site
    assert (await (await session.get("/api/v1/status")).json()) == {"region": "us-east", "step": 3}
    assert "diloco_rounds_total 7.0" in await (await session.get("/metrics")).text()
    assert (await session.get("/api/v1/finish")).status == 405
    assert region.finished == []


async def test_a_command_needs_the_token_from_the_state_folder(site, tmp_path: Path) -> None:
    region, _, session = site
    assert (await session.post("/api/v1/finish")).status == 401
    assert (await session.post("/api/v1/finish", headers={"Authorization": "Bearer wrong"})).status == 401
    assert region.finished == []
    token = (tmp_path / ADMIN_TOKEN_NAME).read_text()
    assert (tmp_path / ADMIN_TOKEN_NAME).stat().st_mode & 0o077 == 0
    assert (await session.post("/api/v1/finish", headers={"Authorization": f"Bearer {token}"})).status == 202
    assert region.finished == ["asked by the operator"]


async def test_a_budget_is_set_with_the_token_and_refused_with_a_reason(site, tmp_path: Path) -> None:
    region, _, session = site
    assert (await session.post("/api/v1/budget", json={"egress": "1Gbit/s"})).status == 401
    headers = {"Authorization": f"Bearer {(tmp_path / ADMIN_TOKEN_NAME).read_text()}"}
    answer = await session.post("/api/v1/budget", json={"egress": "1Gbit/s"}, headers=headers)
    assert (answer.status, await answer.json()) == (200, {"budget": {"egress": 5}})
    for body, reason in (({"peer": "b"}, "nothing to set"), ([1], "JSON object")):
        answer = await session.post("/api/v1/budget", json=body, headers=headers)
        assert answer.status == 400
        assert reason in (await answer.json())["error"]
    answer = await session.post("/api/v1/budget", json={"egress": "full"}, headers=headers)
    assert (answer.status, await answer.json()) == (500, {"error": "no room", "exit_code": 6}), "no fault of who asks"
    answer = await session.post("/api/v1/budget", data=b"{", headers=headers)
    assert answer.status == 400
    assert (await session.get("/api/v1/budget")).status == 405
    assert region.budgets == [{"egress": "1Gbit/s"}]


async def test_a_foreign_host_header_is_refused(site) -> None:
    _, _, session = site
    answer = await session.get("/api/v1/status", headers={"Host": "evil.example"})
    assert answer.status == 403
    assert "ssh -L" in (await answer.json())["error"], "it says how to ask from elsewhere"
    assert (await session.get("/api/v1/status", headers={"Host": "localhost:1"})).status == 200


async def test_the_same_is_served_on_a_socket_in_the_state_folder(site, tmp_path: Path) -> None:
    region, _, _ = site
    path = tmp_path / ADMIN_SOCKET_NAME
    assert path.stat().st_mode & 0o077 == 0
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(path))) as session:
        assert (await (await session.get("/api/v1/status")).json())["region"] == "us-east"
        assert (await session.post("/api/v1/finish")).status == 401
        assert (await session.get("/livez", headers={"Host": "evil.example"})).status == 403
    assert region.finished == []


async def test_a_dead_daemon_s_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(tmp_path / ADMIN_SOCKET_NAME))
    server = AdminServer(Region().handlers(), CollectorRegistry(), port=0, state_dir=tmp_path)
    await server.start()
    await server.stop()


async def test_a_long_state_folder_has_its_socket_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    server = AdminServer(Region().handlers(), CollectorRegistry(), port=0, state_dir=folder)
    await server.start()
    path = socket_path(folder, ADMIN_SOCKET_NAME)
    assert path.parent != folder
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(path))) as session:
        assert (await session.get("/livez")).status == 200
    await server.stop()


async def test_a_taken_port_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = AdminServer(
            Region().handlers(), CollectorRegistry(), port=listener.getsockname()[1], state_dir=tmp_path
        )
        with pytest.raises(BindError, match="admin_port"):
            await server.start()


async def test_another_address_is_bound_beside_loopback_and_keeps_the_rules(tmp_path: Path) -> None:
    region = Region()
    server = AdminServer(region.handlers(), CollectorRegistry(), port=0, state_dir=tmp_path, host="127.0.0.2")
    await server.start()
    try:
        for host in ("127.0.0.1", "127.0.0.2"):
            async with aiohttp.ClientSession(f"http://{host}:{server.port}") as session:
                # A published port is asked for by a loopback name; the address itself is refused, as any other name.
                answer = await session.get("/livez", headers={"Host": "localhost:7401"})
                assert answer.status == 200
                assert (await session.get("/livez", headers={"Host": "127.0.0.2"})).status == 403
                assert (await session.post("/api/v1/finish", headers={"Host": "localhost"})).status == 401
        assert region.finished == []
    finally:
        await server.stop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was connected may still be on its way out
        sock.bind(("127.0.0.2", server.port))


async def test_an_address_that_is_not_this_machine_s_is_one_clear_error(tmp_path: Path) -> None:
    server = AdminServer(Region().handlers(), CollectorRegistry(), port=0, state_dir=tmp_path, host="192.0.2.1")
    with pytest.raises(BindError, match="admin_host"):
        await server.start()


def token(folder: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {(folder / ADMIN_TOKEN_NAME).read_text()}"}


async def test_a_measurement_tells_what_goes_on_and_then_its_document(site, tmp_path: Path, monkeypatch) -> None:
    region, _, session = site
    monkeypatch.setattr(admin, "PROGRESS_S", 0.01)
    async with session.post("/api/v1/measure", json={"peer": "b"}, headers=token(tmp_path)) as answer:
        assert answer.status == 200
        first = json.loads(await answer.content.readline())
        assert first == {"now": "round trips to b"}
        region.measured.set()
        lines = [json.loads(line) async for line in answer.content]
    later_lines = [line for line in lines if line != first]
    assert later_lines == [{"so_far": {"rows": [0, 0]}}, {"document": {"rows": []}}], "the newest, once"
    assert region.asked == [{"peer": "b"}]


async def test_a_measurement_that_fails_says_why_and_its_exit_code(site, tmp_path: Path) -> None:
    region, _, session = site
    region.measured.set()
    async with session.post("/api/v1/measure", json={}, headers=token(tmp_path)) as answer:
        lines = [json.loads(line) async for line in answer.content]
    assert lines == [{"error": "a has no link to b", "exit_code": 5}]


async def test_a_measurement_needs_the_token_and_an_object(site, tmp_path: Path) -> None:
    region, _, session = site
    assert (await session.post("/api/v1/measure", json={})).status == 401
    assert (await session.get("/api/v1/measure", headers=token(tmp_path))).status == 405
    for body in (b"{", b"[1]", b""):
        answer = await session.post("/api/v1/measure", data=body, headers=token(tmp_path))
        assert answer.status == 400
        assert "JSON object" in (await answer.json())["error"]
    answer = await session.post("/api/v1/measure", json={}, headers={**token(tmp_path), "Host": "evil.example"})
    assert answer.status == 403
    assert region.asked == []


async def test_who_goes_away_ends_its_measurement(site, tmp_path: Path, monkeypatch) -> None:
    region, _, session = site
    monkeypatch.setattr(admin, "PROGRESS_S", 0.01)
    answer = await session.post("/api/v1/measure", json={"peer": "b"}, headers=token(tmp_path))
    await answer.content.readline()
    answer.close()
    await asyncio.wait_for(region.gave_up.wait(), 120)


async def test_lifting_a_quarantine_needs_the_token_and_a_peer_that_there_is(site, tmp_path: Path) -> None:
    _, _, session = site
    assert (await session.post("/api/v1/quarantine/lift", json={"peer": "b"})).status == 401
    assert (await session.get("/api/v1/quarantine/lift", headers=token(tmp_path))).status == 405
    for peer, was in (("b", True), ("c", False)):
        answer = await session.post("/api/v1/quarantine/lift", json={"peer": peer}, headers=token(tmp_path))
        assert (answer.status, await answer.json()) == (200, {"lifted": was})
    for body, text in (
        ({"peer": "z"}, "none of this region's peers"),
        ({}, "name a peer"),
        ({"peer": 3}, "name a peer"),
    ):
        answer = await session.post("/api/v1/quarantine/lift", json=body, headers=token(tmp_path))
        assert answer.status == 400
        assert text in (await answer.json())["error"]


async def test_revoking_needs_the_token_and_texts(site, tmp_path: Path) -> None:
    region, _, session = site
    path = "/api/v1/certificates/revoke"
    assert (await session.post(path, json={"peer": "b"})).status == 401
    answer = await session.post(path, json={"peer": "b"}, headers=token(tmp_path))
    assert (answer.status, await answer.json()) == (202, {"revokes": "ab12"})
    for body in ({"peer": "b", "certificate": 3}, {"certificate": "x"}, {}):
        assert (await session.post(path, json=body, headers=token(tmp_path))).status == 400
    assert region.asked == [{"revoke": "b", "pem": ""}]


async def test_expelling_needs_the_token_and_a_peer_that_there_is(site, tmp_path: Path) -> None:
    region, _, session = site
    assert (await session.post("/api/v1/quarantine/add", json={"peer": "b"})).status == 401
    answer = await session.post("/api/v1/quarantine/add", json={"peer": "b"}, headers=token(tmp_path))
    assert (answer.status, region.asked) == (202, [{"expel": "b"}])
    for body in ({"peer": "\ud800"}, {"peer": ["b"]}, {}):
        answer = await session.post("/api/v1/quarantine/add", json=body, headers=token(tmp_path))
        assert answer.status == 400
    assert region.asked == [{"expel": "b"}]


ORDERS = ("finish", "budget", "measure", "quarantine/add", "quarantine/lift", "members")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 30_000,
        b'{"peer":' * 7_000,
        b'{"peer": ' + b"9" * 30_000 + b"}",
        b'{"peer": "\\ud800", "reason": "\\ud800", "part": "\\ud800", "level": "\\ud800", "egress": "\\ud800"}',
        b'{"peer": 1e999, "reason": NaN, "part": -Infinity, "level": {}, "egress": [[]]}',
        b"\xff\xfe\x00",
        b"null",
    ],
)
async def test_a_body_that_makes_no_sense_is_refused_and_never_a_fault(site, tmp_path: Path, body: bytes) -> None:
    region, _, session = site
    region.measured.set()
    for order in ORDERS:
        for kind in ("application/json", "text/plain; charset=klingon"):
            headers = {**token(tmp_path), "Content-Type": kind}
            answer = await session.post(f"/api/v1/{order}", data=body, headers=headers)
            assert answer.status in (200, 202, 400), (order, kind, await answer.text())
            if not body.startswith(b"{"):
                assert answer.status == 400
                assert "must be a JSON object" in (await answer.json())["error"]


async def test_starting_the_learner_needs_the_token_and_one_that_does_not_run(site, tmp_path: Path) -> None:
    region, _, session = site
    assert (await session.post("/api/v1/learner/start", json={})).status == 401
    assert (await session.get("/api/v1/learner/start", headers=token(tmp_path))).status == 405
    region.reason = ""
    answer = await session.post("/api/v1/learner/start", json={}, headers=token(tmp_path))
    assert (answer.status, await answer.json()) == (202, {"was": "stopped"})
    region.reason = "it trains"
    answer = await session.post("/api/v1/learner/start", json={}, headers=token(tmp_path))
    assert (answer.status, (await answer.json())["error"]) == (400, "the learner runs already")


LOOPBACK = "Host: localhost"
STRANGERS: dict[str, tuple[str, list[str], int]] = {
    "DNS rebinding": ("GET /api/v1/status HTTP/1.1", ["Host: evil.example"], 403),
    "a host in what looks like a port": ("GET /api/v1/status HTTP/1.1", ["Host: 127.0.0.1:1@evil"], 403),
    "a host behind a port": ("GET /api/v1/status HTTP/1.1", ["Host: localhost:80:evil"], 403),
    "userinfo": ("GET /api/v1/status HTTP/1.1", ["Host: localhost@evil.example"], 403),
    "a loopback name in front of another": ("GET /api/v1/status HTTP/1.1", ["Host: localhost.evil.example"], 403),
    "a trailing dot": ("GET /api/v1/status HTTP/1.1", ["Host: localhost."], 403),
    "another address of this machine": ("GET /api/v1/status HTTP/1.1", ["Host: 127.0.0.2"], 403),
    "any address": ("GET /api/v1/status HTTP/1.1", ["Host: 0.0.0.0"], 403),
    "an address as one number": ("GET /api/v1/status HTTP/1.1", ["Host: 2130706433"], 403),
    "IPv6 without brackets": ("GET /api/v1/status HTTP/1.1", ["Host: ::1"], 403),
    "IPv6 with a zone": ("GET /api/v1/status HTTP/1.1", ["Host: [::1%25evil]"], 403),
    "IPv4 in IPv6": ("GET /api/v1/status HTTP/1.1", ["Host: [::ffff:127.0.0.1]"], 403),
    "a port that is none": ("GET /api/v1/status HTTP/1.1", ["Host: localhost:http"], 403),
    "digits that are not ASCII": ("GET /api/v1/status HTTP/1.1", ["Host: localhost:\u0661"], 403),
    "no host": ("GET /api/v1/status HTTP/1.0", [], 403),
    "an empty host": ("GET /api/v1/status HTTP/1.1", ["Host:"], 403),
    "two hosts": ("GET /api/v1/status HTTP/1.1", [LOOPBACK, "Host: evil.example"], 403),
    "a whole URL": ("GET http://evil.example/api/v1/status HTTP/1.1", [LOOPBACK], 403),
    "CSRF by a form": (
        "POST /api/v1/finish HTTP/1.1",
        [LOOPBACK, "Origin: http://evil.example", "Content-Type: text/plain"],
        401,
    ),
    "no scheme": ("POST /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: {token}"], 401),
    "another scheme": ("POST /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: Basic {token}"], 401),
    "more than the token": ("POST /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: Bearer {token}x"], 401),
    "an empty token": ("POST /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: Bearer "], 401),
    "a token in UTF-8": ("POST /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: Bearer é"], 401),
    "a token of any bytes": ("POST /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: Bearer \udcff\udc80"], 401),
    "two tokens": (
        "POST /api/v1/finish HTTP/1.1",
        [LOOPBACK, "Authorization: Bearer {token}", "Authorization: Bearer x"],
        401,
    ),
    "a token in the query": ("POST /api/v1/finish?token={token} HTTP/1.1", [LOOPBACK], 401),
    "the token from elsewhere": (
        "POST /api/v1/finish HTTP/1.1",
        ["Host: evil.example", "Authorization: Bearer {token}"],
        403,
    ),
    "a method that reads": ("GET /api/v1/finish HTTP/1.1", [LOOPBACK, "Authorization: Bearer {token}"], 405),
    "a method that there is not": ("PUT /api/v1/finish HTTP/1.1", [LOOPBACK], 401),
    "a method in disguise": (
        "GET /api/v1/finish HTTP/1.1",
        [LOOPBACK, "X-HTTP-Method-Override: POST", "Authorization: Bearer {token}"],
        405,
    ),
}


async def answer_to(port: int, lines: list[str]) -> int:
    """The status of the answer to a request of these lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode("utf-8", "surrogateescape"))
    status = int((await asyncio.wait_for(reader.read(), 120)).split(b" ", 2)[1])
    writer.close()
    return status


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_request_that_no_operator_makes_is_refused(site, tmp_path: Path, name: str) -> None:
    region, server, _ = site
    secret = (tmp_path / ADMIN_TOKEN_NAME).read_text()
    request, headers, status = STRANGERS[name]
    lines = [line.replace("{token}", secret) for line in (request, *headers)]
    assert await answer_to(server.port, lines) in (status, 400), "400: what the parser itself refuses"
    assert region.finished == []


@pytest.mark.parametrize("host", ["localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:7401", "[::1]", "[::1]:65535"])
async def test_loopback_s_names_are_answered_with_any_port(site, host: str) -> None:
    _, server, _ = site
    assert await answer_to(server.port, ["GET /api/v1/status HTTP/1.1", f"Host: {host}"]) == 200


def test_a_token_that_a_full_disk_left_empty_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / ADMIN_TOKEN_NAME).touch(mode=0o600)
    token = admin.load_token(tmp_path)
    assert len(token) > 20
    assert admin.load_token(tmp_path) == token


async def test_connections_over_the_limit_are_closed_and_the_socket_still_answers(
    site, tmp_path: Path, monkeypatch
) -> None:
    _, server, _ = site
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 3)
    connector = aiohttp.UnixConnector(str(tmp_path / ADMIN_SOCKET_NAME))
    async with crowded(server.port, 3), aiohttp.ClientSession("http://localhost", connector=connector) as session:
        assert (await session.get("/livez")).status == 200
