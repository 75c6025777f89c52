"""One page for several regions: what is asked, and what stays of a region that is gone."""

import contextlib
from pathlib import Path

import aiohttp
import pytest

from diloco_node.cli.main import main
from diloco_node.cli.page.merged import MergedRegions, dashboard_server
from diloco_node.cli.status import Target, find_targets
from diloco_node.errors import BindError, ConfigError
from tests.kit.page_kit import UNIX, ShownRun, shown


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
    regions = MergedRegions(lambda: find_targets(str(tmp_path)))
    async with region(tmp_path / "a-folder"):
        first = await regions.snapshot(None)
        assert [one["status"]["region"] for one in first["regions"]] == ["us-east"]
        assert len(first["regions"][0]["history"]["rows"]) > 100
        assert [one["region"] for one in (await regions.status())["regions"]] == ["us-east"]
        since = await regions.snapshot(UNIX + 1_000)
        assert min(row[0] for row in since["regions"][0]["history"]["rows"]) > UNIX + 1_000
    gone = await regions.status()
    assert [one["region"] for one in gone["regions"]] == ["us-east"]
    assert "no status from 127.0.0.1" in gone["regions"][0]["error"]
    assert (await regions.snapshot(None))["regions"][0]["status"]["error"]
    async with region(tmp_path / "a-folder"):  # with another port
        assert "error" not in (await regions.status())["regions"][0]


async def test_the_page_is_served_on_loopback_to_loopback_names(tmp_path: Path) -> None:
    regions = MergedRegions(lambda: find_targets(str(tmp_path)))
    async with region(tmp_path / "a"), dashboard_server(regions, 0) as url, aiohttp.ClientSession(url) as session:
        assert "<title>diloco-node</title>" in await (await session.get("/")).text()
        assert (await session.get("/", headers={"Host": "evil.example"})).status == 403
        assert (await session.post("/api/v1/finish")).status in (404, 405)
        async with session.get("/api/v1/events") as answer:
            assert (await answer.content.readline()).startswith(b"id: ")
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
    assert "neither a port nor a folder" in capsys.readouterr().err
