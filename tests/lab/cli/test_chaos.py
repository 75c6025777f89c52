"""`diloco-node chaos`: what it strikes, what it says, and what it refuses."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_node.errors import INTERRUPTED_CODE
from diloco_node.lab.chaos.demo_processes import DemoFile
from diloco_node.main import main
from tests.kit.chaos_kit import MadeUpDemo
from tests.kit.commands import COMMAND
from tests.kit.waiting import until


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[MadeUpDemo]:
    made = MadeUpDemo(tmp_path / "runs" / "demo-1")
    try:
        yield made
    finally:
        made.clear()


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGTERM)])
def test_it_strikes_and_says_whom(demo: MadeUpDemo, capsys: pytest.CaptureFixture[str], kind: str, number: int) -> None:
    assert main(["chaos", "strike", kind, "a.learner", "--folder", str(demo.folder)]) == 0
    assert capsys.readouterr().out == f"{kind} a.learner: process {demo.pid('a.learner')}\n"
    demo.until_ended("a.learner")
    assert demo.ended() == {"a.learner": number}


@pytest.mark.parametrize("kind", ["pause", "slow", "partition", "disk"])
def test_what_lasts_is_over_when_it_returns(demo: MadeUpDemo, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert main(["chaos", "strike", kind, "b.daemon", "--for", "50ms", "--folder", str(demo.folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["do"], shown["target"], shown["seconds"]) == (kind, "b.daemon", 0.05)
    assert shown["pids"] == [demo.pid("b.daemon")]
    assert not list((demo.folder / "faults").glob("*"))
    until(lambda: demo.state("b.daemon") not in "Tt")
    assert demo.ended() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_is_ended_lets_a_paused_process_go_on(demo: MadeUpDemo, number: int) -> None:
    words = ("chaos", "strike", "pause", "b.daemon", "--for", "10min", "--folder", str(demo.folder))
    command = subprocess.Popen([*COMMAND, *words])
    try:
        until(lambda: demo.state("b.daemon") in "Tt")
        command.send_signal(number)
        assert command.wait(60) == INTERRUPTED_CODE
    finally:
        command.kill()
        command.wait()
    until(lambda: demo.state("b.daemon") not in "Tt")


def test_who_is_not_there_can_not_be_struck(demo: MadeUpDemo, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", "strike", "kill", "a.daemon", "--folder", str(demo.folder)]
    assert main(words) == 0
    demo.until_ended("a.daemon")
    assert main(words) == 5
    assert "no such process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["kill", "c"], "no region 'c'"),
        (["kill", "a.leader"], "no 'leader'"),
        (["partition", "a.learner"], "strikes a daemon"),
        (["disk", "a.supervisor"], "strikes a daemon"),
        (["pause", "a", "--for", "2h"], "must last"),
        (["pause", "a", "--for", "soon"], "--for"),
        (["kill", "a", "--for", "5s"], "over at once"),
        (["starve", "a"], "no fault 'starve'"),
        (["wipe", "a"], "wipe is an order of a script"),
    ],
)
def test_what_can_not_be_done_is_refused(
    demo: MadeUpDemo, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["chaos", "strike", *words, "--folder", str(demo.folder)]) == 2
    assert reason in capsys.readouterr().err
    assert demo.ended() == {}


def test_a_demo_that_has_ended_is_refused(demo: MadeUpDemo, capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers may be those of other processes by now."""
    file = DemoFile.load(demo.folder)
    replace(file, demo=replace(file.demo, start_ticks=file.demo.start_ticks - 1)).save()
    assert main(["chaos", "strike", "kill", "a", "--folder", str(demo.folder)]) == 2
    assert "has ended" in capsys.readouterr().err
    assert main(["chaos", "strike", "kill", "a", "--folder", str(demo.folder / "a")]) == 2
    assert "name the folder of a running demo" in capsys.readouterr().err
    assert demo.ended() == {}
    assert os.getpid() == file.demo.pid
