"""The page's files: small, from nowhere else, with a policy; and the same page as one file."""

import re
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from diloco_node.daemon.admin import page_files
from diloco_node.daemon.admin.page_files import FOLDER, MODULES, STYLES, page_with
from tests.kit.page_kit import HOSTILE, ShownRun, shown, snapshot

BYTES_MAX = 200_000


def test_the_page_is_small_and_every_file_of_it_is_used() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) < BYTES_MAX
    names = {*MODULES, *STYLES, page_files.LIBRARY, page_files.ICON, page_files.INDEX}
    assert set(files) == names | {"uplot.LICENSE"}


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    paths = [FOLDER / name for name in (*MODULES, "page.css", page_files.INDEX)]
    addresses = {address for path in paths for address in re.findall(r"https?://[^\s\"')]+", path.read_text())}
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, and never asked for"
    index = (FOLDER / page_files.INDEX).read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index)


def test_scripts_write_no_html() -> None:
    text = "".join((FOLDER / name).read_text() for name in MODULES)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


def test_no_name_stands_at_the_top_of_two_modules() -> None:
    """In the one file they share a scope."""
    pattern = r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)"
    names = Counter(name for file in MODULES for name in re.findall(pattern, (FOLDER / file).read_text(), re.MULTILINE))
    assert len(names) > 80
    assert [name for name, times in names.items() if times > 1] == []


def test_modules_import_only_from_those_before_them() -> None:
    for at, name in enumerate(MODULES):
        imports = set(re.findall(r'from "\./([\w.]+)"', (FOLDER / name).read_text()))
        assert imports <= set(MODULES[:at])


async def test_every_file_is_served_with_a_policy_and_nothing_else_is(tmp_path: Path) -> None:
    async with shown(ShownRun(), tmp_path) as url, aiohttp.ClientSession(url) as session:
        for path, kind in {
            "/": "text/html",
            "/page/main.js": "text/javascript",
            "/page/page.css": "text/css",
            "/page/icon.svg": "image/svg+xml",
        }.items():
            answer = await session.get(path)
            assert (answer.status, answer.content_type) == (200, kind)
            policy = answer.headers["Content-Security-Policy"].split("; ")
            assert policy == ["default-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        for path in (
            "/page/",
            "/page/index.html",
            "/page/uplot.LICENSE",
            "/page/../server.py",
            "/page/%2e%2e/server.py",
        ):
            assert (await session.get(path)).status == 404
        assert (await session.get("/", headers={"Host": "evil.example"})).status == 403
        assert (await session.get("/api/v1/events", headers={"Host": "evil.example"})).status == 403
        assert (await session.head("/api/v1/events")).status == 405


async def test_the_snapshot_is_a_document_of_its_own(tmp_path: Path) -> None:
    async with shown(ShownRun(), tmp_path) as url, aiohttp.ClientSession(url) as session:
        document = await (await session.get("/api/v1/snapshot")).json()
    assert set(document) == {"status", "history", "settings"}


def test_the_one_file_holds_everything_and_asks_for_nothing() -> None:
    text = page_with({"regions": [snapshot(7200, has_lost=True)]})
    assert not re.search(r"<link|<script[^>]*\ssrc=|^import |^export ", text, re.MULTILINE)
    assert "default-src 'none'" in text
    assert text.count("<script") == text.count("</script>") == 3
    assert HOSTILE not in text, "what peers say ends no script"
    assert len(text) < 1_000_000


@pytest.mark.parametrize("name", MODULES)
def test_no_module_ends_a_script(name: str) -> None:
    assert "</script" not in (FOLDER / name).read_text()
