"""The page about several regions: what is asked, and what stays of a region that is gone."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from diloco_node.cli import admin_client
from diloco_node.cli.admin_client import Target
from diloco_node.cli.page import merged
from diloco_node.cli.page.merged import MergedRegions, dashboard_server
from diloco_node.cli.places import targets_in
from diloco_node.daemon.admin import listening
from diloco_node.daemon.admin.live_events import json_text
from diloco_node.errors import BindError, ConfigError
from diloco_node.main import main
from tests.kit.page_kit import ShownRun, crowded, shown
from tests.kit.waiting import eventually


@contextlib.asynccontextmanager
async def region(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - of a test
    async with shown(ShownRun(), folder) as url:
        (folder / "admin.port").write_text(url.rpartition(":")[2])
        try:
            yield
        finally:
            (folder / "admin.port").unlink()


async def test_regions_are_asked_and_one_that_is_gone_stays_with_the_reason(tmp_path: Path) -> None:
    regions = MergedRegions(lambda: targets_in(str(tmp_path)))
    async with region(tmp_path / "a-folder"):
        first = await regions.snapshot()
        assert [entry["status"]["region"] for entry in first["regions"]] == ["us-east"]
        assert len(first["regions"][0]["history"]["rows"]) > 100
        assert [entry["region"] for entry in (await regions.status())["regions"]] == ["us-east"]
        assert first["health"]["failure_tolerance"] == 1
    document = await regions.status()
    assert [entry["region"] for entry in document["regions"]] == ["us-east"]
    assert "no status from 127.0.0.1" in document["regions"][0]["error"]
    assert (await regions.snapshot())["regions"][0]["status"]["error"]
    async with region(tmp_path / "a-folder"):  # with another port
        assert "error" not in (await regions.status())["regions"][0]


async def test_a_region_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "ANSWER_S", 0.2)
    monkeypatch.setattr(admin_client, "TIMEOUT_S", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        port = hangs.getsockname()[1]
        document = await MergedRegions(lambda: [Target("x", port)]).status()
    assert document["regions"] == [{"region": "x", "error": f"no answer from 127.0.0.1:{port} within 0 s"}]


async def test_a_region_whose_answer_never_ends_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "ANSWER_S", 0.05)
    requests, end, closing = 0, asyncio.Event(), asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not end.is_set():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        closing.set()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        regions = MergedRegions(lambda: [Target("x", server.sockets[0].getsockname()[1])])
        for _ in range(5):
            assert "no answer" in (await regions.status())["regions"][0]["error"]
        await eventually(lambda: requests > 0)
        assert requests == 1
        end.set()
        await closing.wait()


LIES = [
    {"status": 3},
    {"status": None},
    [],
    {"region": [], "state": 1},
    {"status": {"region": "x"}, "history": {"rows": [[], [None], ["9"], [[1]], 3, {}]}},
]


async def test_a_region_that_answers_nonsense_leaves_the_others(tmp_path: Path) -> None:
    words = [""]

    async def lie(_: web.Request) -> web.Response:
        return web.Response(text=words[0])

    app = web.Application()
    app.router.add_get("/{path:.*}", lie)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    lies = Target("lies", runner.addresses[0][1])
    async with region(tmp_path):
        regions = MergedRegions(lambda: [lies, *targets_in(str(tmp_path))])
        for words[0] in (*map(json.dumps, LIES), "[" * 100_000, '{"status":' * 100_000, "", "\x00"):
            whole, now = await regions.snapshot(), await regions.status()
            assert json_text([whole, now])
            assert whole["regions"][1]["status"]["region"] == now["regions"][1]["region"] == "us-east", words[0][:20]
    await runner.cleanup()


def test_two_regions_of_one_name_are_refused(tmp_path: Path) -> None:
    for port, folder in enumerate(("run-1/eu-west", "run-2/eu-west"), 7401):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "admin.port").write_text(str(port))
    with pytest.raises(ConfigError, match=r"called eu-west \(ports 7401 and 7402\)"):
        MergedRegions(lambda: targets_in(str(tmp_path))).find()
    MergedRegions(lambda: targets_in(str(tmp_path / "run-1")) * 2).find()


async def test_regions_of_two_runs_are_refused(tmp_path: Path) -> None:
    class OfAnotherRun(ShownRun):
        def status(self) -> dict[str, Any]:
            return super().status() | {"run_id": "other"}

    async with shown(ShownRun(), tmp_path) as first, shown(OfAnotherRun(region="eu-west"), tmp_path) as second:
        targets = [Target(url, int(url.rpartition(":")[2])) for url in (first, second)]
        await MergedRegions(lambda: targets[:1]).check_run()
        with pytest.raises(ConfigError, match="eu-west of run other, us-east of run shown"):
            await MergedRegions(lambda: targets).check_run()


async def test_connections_over_the_limit_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 3)
    regions = MergedRegions(lambda: targets_in(str(tmp_path)))
    async with dashboard_server(regions, 0) as url, crowded(int(url.rstrip("/").rpartition(":")[2]), 3):
        pass


async def test_the_page_is_served_on_loopback_to_loopback_names(tmp_path: Path) -> None:
    regions = MergedRegions(lambda: targets_in(str(tmp_path)))
    async with region(tmp_path / "a"), dashboard_server(regions, 0) as url, aiohttp.ClientSession(url) as session:
        assert "<title>diloco-node</title>" in await (await session.get("/")).text()
        assert (await session.get("/", headers={"Host": "evil.example"})).status == 403
        assert (await session.post("/api/v1/finish")).status in (404, 405)
        async with session.get("/api/v1/events") as answer:
            assert await answer.content.readline() == b"event: snapshot\n"


async def test_a_port_that_is_taken_is_an_error_with_a_way_out() -> None:
    regions = MergedRegions(lambda: [Target("x", 1)])
    async with dashboard_server(regions, 0) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(BindError, match="--port"):
            async with dashboard_server(regions, port):
                pass


def test_a_wrong_place_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path)]) == ConfigError.exit_code
    assert "is no region of run.toml that has run here, and no folder with admin.port" in capsys.readouterr().err
