"""lab/demo/faulty_region.py: `diloco-node start` with another program as its daemon."""

import sys
from types import SimpleNamespace

import pytest
import typer

from diloco_node.cli import application as commands
from diloco_node.cli import start
from diloco_node.lab.demo import faulty_region as region


@pytest.mark.parametrize(
    "program", [("-m", "diloco_node.lab.demo.faulty_region", "daemon"), ("/b/gray_region.py", "daemon")]
)
def test_only_what_runs_as_the_daemon_is_another(monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...]) -> None:
    spec = SimpleNamespace(daemon_command=[sys.executable, "-m", "diloco_node.daemon", "node.json"])

    def run_command(_: typer.Typer, arguments: list[str]) -> int:
        assert arguments == ["start", "--region", "a"]
        assert start.prepare(None, "a", ()) is spec  # type: ignore[arg-type, comparison-overlap]
        return 7

    monkeypatch.setattr(start, "prepare", lambda *_: spec)
    monkeypatch.setattr(commands, "run", run_command)
    assert region.run_start(["start", "--region", "a"], program) == 7
    assert spec.daemon_command == [sys.executable, *program, "node.json"]
