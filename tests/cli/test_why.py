"""`why` in words and as JSON, by a port and by a region's name."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from diloco_node.main import main
from tests.health.test_explanation import LEADER, OTHER


class DocumentServer(BaseHTTPRequestHandler):
    """Every path is the status document."""

    def do_GET(self) -> None:
        body = json.dumps(LEADER).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), DocumentServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_why_says_what_is_slow_in_eighty_columns(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(port)]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    words = " ".join(output.split())
    assert words.startswith("healthy: 3 of 3 regions")
    assert "rounds: 2 of 3 rounds waited for ap in gather" in words
    assert "(saves 1.3 s of a round)" in words


def test_why_of_one_region_as_json(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regions = "".join(f'[regions.{name}]\naddress = "{name}:1"\n' for name in ("us", "eu"))
    (tmp_path / "run.toml").write_text(f'run.id = "try"\n{regions}')
    (tmp_path / "state/us").mkdir(parents=True)
    (tmp_path / "state/us/admin.port").write_text(f"{port}\n")
    assert main(["why", "ap", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["region"] == "ap"
    assert any("40 ledger entries" in finding["text"] for finding in answer["findings"])
    assert OTHER["region"] == "ap"
    assert main(["why", "mars"]) == 2
    assert "'mars' is no region of this run, which has ap, eu, us: give a region of run.toml" in capsys.readouterr().err


def test_nobody_answers_is_exit_code_5(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "admin.port").write_text("1\n")
    assert main(["why", str(tmp_path)]) == 5
    assert "none of 1 regions answers" in capsys.readouterr().err
