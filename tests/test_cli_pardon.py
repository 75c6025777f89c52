"""`diloco-node pardon` against a real admin socket."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from diloco_node.cli.main import main
from diloco_node.daemon.admin.server import TOKEN_FILE, AdminHandlers, AdminServer
from diloco_node.errors import ConfigError


def pardoned(peer: str) -> bool:
    if peer not in ("asia", "us"):
        raise ConfigError(f"{peer!r} is none of this region's peers: asia, us")
    return peer == "us"


@pytest.fixture
def eu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state folder of a region that runs here."""
    for name in list(os.environ):
        if name.startswith("DILOCO_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    regions = "".join(f'[regions.{name}]\naddress = "{name}.example:7400"\n' for name in ("asia", "eu", "us"))
    (tmp_path / "run.toml").write_text(f'[run]\nid = "try"\n{regions}')
    folder = tmp_path / "state" / "eu"
    folder.mkdir(parents=True)
    handlers = AdminHandlers(dict, str, print, dict, measure=None, pardon=pardoned)  # type: ignore[arg-type]
    server = AdminServer(handlers, CollectorRegistry(), port=0, state_dir=folder)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(120)
    (folder / "admin.port").write_text(f"{server.port}\n")
    yield folder
    asyncio.run_coroutine_threadsafe(server.stop(), loop).result(120)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(120)
    loop.close()


@pytest.mark.usefixtures("eu")
def test_a_pardon_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pardon", "us"]) == 0
    assert "eu pardons us: its strikes are forgotten" in capsys.readouterr().out
    assert main(["pardon", "asia", "--region", "eu"]) == 0
    assert "eu had nothing against asia" in capsys.readouterr().out
    assert main(["pardon", "us", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"region": "eu", "peer": "us", "pardoned": True}


def test_what_is_wrong_is_said(eu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pardon", "mars"]) == 2
    assert "eu refuses: 'mars' is none of this region's peers: asia, us" in capsys.readouterr().err
    assert main(["pardon", "eu", "--region", "us"]) == 5
    assert "no region of this run answers on this machine" in capsys.readouterr().err
    (eu / TOKEN_FILE).write_text("another")
    assert main(["pardon", "us"]) == 2
    assert "missing or wrong bearer token" in capsys.readouterr().err
