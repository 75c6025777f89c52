"""`diloco-node chaos --compose`: which container and process it strikes, and what it refuses.

A program `docker` of the test's own notes what it is asked; its `exec` runs here, on the processes of a made-up demo.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_node.errors import INTERRUPTED_CODE, DilocoError
from diloco_node.lab.chaos import containers
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault
from diloco_node.lab.cli.chaos_inside import FAULTY_DAEMON
from diloco_node.main import main
from diloco_node.numeric import NS_PER_S
from tests.kit.chaos_kit import MadeUpDemo, until
from tests.kit.fake_docker import FakeDocker

SETTINGS = """
[run]
id = "t"
state_dir = "{state}"
[regions.a]
address = "10.211.77.11:7400"
[regions.b]
address = "10.211.77.12:7400"
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    (tmp_path / "run.toml").write_text(SETTINGS.format(state=tmp_path / "state"))
    made = FakeDocker(tmp_path / "docker", {"WAN_CONFIG": str(tmp_path / "run.toml")})
    monkeypatch.setenv("PATH", f"{made.bin}:{os.environ['PATH']}")
    made.add("a")
    made.add("b")
    made.add("certs", status="exited", region=False)
    return made


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[MadeUpDemo]:
    made = MadeUpDemo(tmp_path / "state")
    try:
        yield made
    finally:
        made.clear()


def inside(user: str, *words: str) -> list[str]:
    return [
        "exec",
        "--interactive",
        "--user",
        user,
        "id-run-a",
        "python",
        "-m",
        "diloco_node.lab.cli.chaos_inside",
        *words,
    ]


@pytest.mark.parametrize(("kind", "target"), [("kill", "a"), ("stop", "a.supervisor")])
def test_a_region_that_is_ended_is_started_again(
    docker: FakeDocker, capsys: pytest.CaptureFixture[str], kind: str, target: str
) -> None:
    assert main(["chaos", kind, target, "--compose"]) == 0
    assert docker.calls() == [[kind, "id-run-a"], ["start", "id-run-a"]]
    assert capsys.readouterr().out == f"{kind} {target}: process 1 in diloco-a\n"
    docker.refuse(kind)
    assert main(["chaos", kind, target, "--compose"]) == 1
    assert f"docker {kind}: on strike (E-RUNTIME" in capsys.readouterr().err
    # Who could not be ended, as one that has just finished the run, is not started.
    assert docker.calls()[2:] == [[kind, "id-run-a"]]


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_undoes_a_fault_is_done_however_often_one_is_told_to_stop(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow_docker(*words: str) -> str:
        begun.set()
        await may_end.wait()
        if refuses:
            raise DilocoError("on strike")
        return ""

    monkeypatch.setattr(containers, "docker", slow_docker)
    task = asyncio.create_task(containers._surely("start", "id"))
    await begun.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(DilocoError if refuses else asyncio.CancelledError):
        await task


@pytest.mark.parametrize(("refused", "is_told"), [("", False), ("unpause", True)])
async def test_a_pause_that_is_cancelled_is_ended_or_the_reason_is_told(
    docker: FakeDocker, refused: str, is_told: bool
) -> None:
    run = await containers.find_run("run")
    docker.refuse(refused)

    async def cancelled(_: float) -> None:
        raise asyncio.CancelledError

    fault = PlannedFault(0, "pause", FaultTarget("a", "region"), NS_PER_S)
    with pytest.raises(DilocoError if is_told else asyncio.CancelledError):
        await run.strike(fault, sleep=cancelled)
    assert docker.status("a") == ("paused" if is_told else "running")


async def test_before_the_pause_there_is_nothing_to_end(docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await containers.find_run("run")
    asked = containers.docker

    async def docker_then(*words: str) -> str:
        if words[0] == "pause":
            raise asyncio.CancelledError
        return await asked(*words)

    monkeypatch.setattr(containers, "docker", docker_then)
    with pytest.raises(asyncio.CancelledError):
        await run.strike(PlannedFault(0, "pause", FaultTarget("a", "region"), NS_PER_S))


async def test_of_two_containers_of_a_region_the_one_that_runs_is_meant(docker: FakeDocker) -> None:
    for key in ("a-old", "0-old"):
        docker.add_duplicate("a", key, status="exited")
    run = await containers.find_run("run")
    assert run.regions["a"].key == "id-run-a"


def test_a_region_is_paused_for_a_time(docker: FakeDocker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "pause", "a", "--project", "run", "--for", "10ms", "--json"]) == 0
    assert docker.calls() == [["pause", "id-run-a"], ["unpause", "id-run-a"]]
    shown = json.loads(capsys.readouterr().out)
    assert shown == {**shown, "do": "pause", "target": "a", "seconds": 0.01, "pids": [1], "missed": False}


def test_a_process_of_a_region_is_killed_inside(
    docker: FakeDocker, demo: MadeUpDemo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "kill", "a.daemon", "--compose"]) == 0
    assert docker.calls() == [inside("diloco", "kill", "a.daemon", "0")]
    assert capsys.readouterr().out == f"kill a.daemon: process {demo.pid('a.daemon')} in diloco-a\n"
    demo.until_ended("a.daemon")
    assert demo.ended() == {"a.daemon": signal.SIGKILL}
    assert main(["chaos", "kill", "a.daemon", "--compose"]) == 5
    assert "no such process just now" in capsys.readouterr().err


def test_a_slow_region_is_slowed_inside(
    docker: FakeDocker, demo: MadeUpDemo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "slow", "a", "--compose", "--for", "50ms"]) == 0
    assert docker.calls() == [inside("diloco", "slow", "a", "50000000")]
    pids = ", ".join(str(demo.pid(f"a.{part}")) for part in ("supervisor", "daemon", "learner"))
    assert capsys.readouterr().out == f"slow a: process {pids} in diloco-a, over after 50ms\n"
    assert demo.ended() == {}


@pytest.mark.parametrize(
    ("target", "number", "code"),
    [("a", signal.SIGTERM, INTERRUPTED_CODE), ("a.learner", signal.SIGKILL, -signal.SIGKILL)],
)
def test_what_is_paused_goes_on_when_who_asked_for_it_ends(
    docker: FakeDocker, demo: MadeUpDemo, target: str, number: int, code: int
) -> None:
    """Inside a container also when it had no chance to say so: its end of `docker exec` is gone."""
    words = (sys.executable, "-m", "diloco_node.main", "chaos", "pause", target, "--compose", "--for", "10min")
    command = subprocess.Popen(words)

    def is_paused() -> bool:
        return docker.status("a") == "paused" or demo.state("a.learner") in "Tt"

    try:
        until(is_paused)
        command.send_signal(number)
        assert command.wait(60) == code
        until(lambda: not is_paused())
    finally:
        command.kill()
        command.wait()


def test_a_disk_fails_only_where_the_daemon_looks_for_faults(
    docker: FakeDocker, demo: MadeUpDemo, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "disk", "a", "--compose", "--for", "10ms"]) == 2
    refused = capsys.readouterr().err
    assert "the daemon of a looks for no faults: docker compose --file" in refused
    assert refused.count("\n") == 1
    assert not (demo.folder / "faults").exists()
    old = demo.children.pop("a.daemon")
    old.kill()
    old.wait()
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)", FAULTY_DAEMON]
    demo.start_child("a", "daemon", demo.pid("a.supervisor"), sleeps)
    until(lambda: FAULTY_DAEMON.encode() in Path(f"/proc/{demo.pid('a.daemon')}/cmdline").read_bytes())
    assert main(["chaos", "disk", "a", "--compose", "--for", "10ms"]) == 0
    assert capsys.readouterr().out == f"disk a: process {demo.pid('a.daemon')} in diloco-a, over after 10ms\n"
    # It was switched on, and off again.
    assert list((demo.folder / "faults").iterdir()) == []


def test_a_partition_is_root_s_for_it_changes_the_link(docker: FakeDocker, capsys: pytest.CaptureFixture[str]) -> None:
    """What it does there: tests/lab/wan/test_container.py."""
    docker.fail_exec("ip: on strike")
    assert main(["chaos", "partition", "a.daemon", "--compose", "--for", "1s"]) == 1
    assert docker.calls() == [inside("root", "partition", "a.daemon", "1000000000")]
    assert capsys.readouterr().err == "diloco-node: ip: on strike (E-RUNTIME; diloco-node help E-RUNTIME)\n"


@pytest.mark.parametrize("answer", [127, 126, "/usr/bin/python: No module named diloco_node.lab.cli.chaos_inside"])
def test_an_image_that_is_too_old_is_named(
    docker: FakeDocker, capsys: pytest.CaptureFixture[str], answer: int | str
) -> None:
    docker.fail_exec(answer)
    assert main(["chaos", "kill", "a.learner", "--compose"]) == 2
    assert "image of diloco-a can't do that: docker compose build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["kill", "c"], "no region 'c'; there are a, b"),
        (["kill", "certs"], "no region 'certs'"),
        (["kill", "a.leader"], "no 'leader'"),
        (["partition", "a.learner"], "strikes a daemon"),
        (["pause", "a", "--for", "2h"], "must last"),
        (["kill", "a", "--folder", "runs"], "leave one of them out"),
        (["kill", "a", "--project", "other"], "no compose project 'other' with regions on this engine; there are run"),
    ],
)
def test_what_can_not_be_done_is_refused(
    docker: FakeDocker, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["chaos", *words, "--compose"]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
    assert docker.calls() == []


@pytest.mark.parametrize(
    ("status", "what_to_do"),
    [("exited", "docker start diloco-a"), ("paused", "docker unpause diloco-a"), ("restarting", "wait until it is up")],
)
def test_a_region_that_is_not_up_is_not_struck(
    docker: FakeDocker, capsys: pytest.CaptureFixture[str], status: str, what_to_do: str
) -> None:
    docker.add("a", status=status)
    assert main(["chaos", "kill", "a", "--compose"]) == 5
    assert what_to_do in capsys.readouterr().err
    assert docker.calls() == []


def test_the_only_run_that_is_up_is_meant(docker: FakeDocker, capsys: pytest.CaptureFixture[str]) -> None:
    docker.add("b", project="old", status="exited")
    docker.add("a", project="run", status="running", **{"com.docker.compose.service": "a"})
    docker.add("c", project="other", **{"com.docker.compose.oneoff": "True"})
    assert main(["chaos", "kill", "a", "--compose"]) == 0
    docker.add("a", project="other")
    assert main(["chaos", "kill", "a", "--compose"]) == 2
    assert "2 compose projects are up (other, run): name one with --project" in capsys.readouterr().err
    assert main(["chaos", "kill", "a", "--project", "other"]) == 0
    assert docker.calls()[2:] == [["kill", "id-other-a"], ["start", "id-other-a"]]


def test_without_containers_or_an_engine_or_docker_it_says_what_is_missing(
    docker: FakeDocker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str) -> str:
        assert main(["chaos", "kill", "a", "--compose", *more]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    for name in "ab":
        docker.add(name, status="exited")
    assert "no compose run is up on this engine: docker compose up" in refused()
    docker.refuse("ps")
    assert "the container engine does not answer: docker ps: on strike (" in refused()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "docker can't be run (" in refused()
