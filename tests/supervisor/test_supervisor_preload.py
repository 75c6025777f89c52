"""The supervisor with a process that learners are forked from: real processes, modules that import at once."""

import gc
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_node.backoff import Backoff
from diloco_node.supervisor.child import Child
from diloco_node.supervisor.preload import ForkServer
from diloco_node.supervisor.supervisor import run_supervisor
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
from tests.kit.supervisor_kit import MAIN, NOTE, PATIENCE_S, is_gone, lives, python


def spec(state_dir: Path, daemon: str, learner: str, *, preload: tuple[str, ...] = ("json",)) -> SupervisorSpec:
    (state_dir / "train.py").write_text(NOTE + learner)
    return SupervisorSpec(
        region="us-east",
        state_dir=state_dir,
        daemon_command=python(NOTE + daemon),
        learner_command=[sys.executable, str(state_dir / "train.py"), "--lr", "0.1"],
        env={"PLACE": str(state_dir)},
        backoff_min_s=0.01,
        backoff_max_s=0.05,
        daemon_first_s=0.0,
        is_echoing=False,
        preload=preload,
    )


def log(state_dir: Path) -> str:
    return (state_dir / "logs" / "supervisor.log").read_text()


@pytest.mark.parametrize("preload", [(), ("json",)])
def test_nothing_of_the_learner_starts_before_the_daemon_is_up(tmp_path: Path, preload: tuple[str, ...]) -> None:
    # What preloads would be a child of the supervisor's thread. This one may have had children before: it runs tests.
    before = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    daemon = (
        "import time\n"
        "family = lambda: pathlib.Path(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read_text().split()\n"
        "alone = family()\n"
        "time.sleep(0.2)\n"
        f"(place / 'alone').write_text(str(alone == family() == [*{before}, str(os.getpid())]))\n"
        "(place / 'admin.port').write_text('1')\n"
        "wait_for('learner', 1)"
    )
    learner = "note('learner')\nimport time\ntime.sleep(600)"
    patient = replace(spec(tmp_path, daemon, learner, preload=preload), daemon_first_s=10 * PATIENCE_S, finish_s=0.0)
    assert run_supervisor(patient) == 0
    assert (tmp_path / "alone").read_text() == "True"
    assert len(lives(tmp_path, "learner")) == 1


def test_a_daemon_that_does_not_come_up_keeps_no_learner_waiting(tmp_path: Path) -> None:
    learner = "note('learner')\nimport time\ntime.sleep(600)"
    impatient = replace(spec(tmp_path, "wait_for('learner', 1)", learner), daemon_first_s=0.05, finish_s=0.0)
    assert run_supervisor(impatient) == 0


THREE_LIVES = "import json\nlife = note('learner')\nprint(life, *sys.argv[1:])\n"
THREE_LIVES += "if life == 1: os.kill(os.getpid(), 9)\nsys.exit(0 if life == 3 else 5)"


def test_each_start_of_the_learner_is_a_fork(tmp_path: Path) -> None:
    assert run_supervisor(spec(tmp_path, "wait_for('learner', 3)", THREE_LIVES)) == 0
    text = log(tmp_path)
    assert [f"learner started, start={start}, forked" in text for start in (1, 2, 3)] == [True] * 3
    assert "learner exited, code=-9" in text
    assert "learner exited, code=5" in text
    assert (tmp_path / "logs" / "learner.log").read_text() == "1 --lr 0.1\n2 --lr 0.1\n3 --lr 0.1\n"
    assert len(set(lives(tmp_path, "learner"))) == 3
    assert f"waiting for the learner (pid {lives(tmp_path, 'learner')[0]}: {sys.executable}" in text
    assert "importing torch" not in text


def test_a_module_that_is_not_there_leaves_fresh_starts(tmp_path: Path) -> None:
    wrong = spec(tmp_path, "wait_for('learner', 3)", THREE_LIVES, preload=("json", "torhc"))
    assert run_supervisor(wrong) == 0
    [line] = [line for line in log(tmp_path).splitlines() if "no preload" in line]
    assert "can't import 'torhc' (ModuleNotFoundError: No module named 'torhc')" in line
    assert "the learner starts afresh: correct `[learner] preload`" in line
    assert "forked" not in log(tmp_path)
    assert len(lives(tmp_path, "learner")) == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train.sh", "train.sh is not Python"),
        ("torchrun", "torchrun starts its ranks itself, each as a process of its own"),
    ],
)
def test_a_command_that_can_not_be_forked_is_said_once_and_starts_afresh(
    tmp_path: Path, name: str, reason: str
) -> None:
    launched = spec(tmp_path, "wait_for('learner', 3)", THREE_LIVES)
    assert launched.learner_command is not None
    launcher = tmp_path / name
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    launched = replace(launched, learner_command=[str(launcher), *launched.learner_command])
    assert run_supervisor(launched) == 0
    [line] = [line for line in log(tmp_path).splitlines() if "no preload" in line]
    assert f"no preload: {reason}" in line
    assert len(lives(tmp_path, "learner")) == 3


def test_who_asked_for_no_preload_hears_nothing_of_it(tmp_path: Path) -> None:
    assert run_supervisor(spec(tmp_path, "wait_for('learner', 1)", "note('learner')", preload=())) == 0
    assert "no preload" not in log(tmp_path)


def test_a_killed_fork_server_costs_the_learner_nothing_and_there_is_another(tmp_path: Path) -> None:
    # The learner of the first life kills the server, and ends when a new one has imported everything.
    (tmp_path / "noted.py").write_text("import os, pathlib\nplace = pathlib.Path(os.environ['PLACE'])\n")
    with (tmp_path / "noted.py").open("a") as file:
        file.write("(place / 'server.pids').open('a').write(f'{os.getpid()}\\n')\n")
    learner = (
        "import time\n"
        "if note('learner') == 1:\n"
        "    os.kill(int((place / 'server.pids').read_text()), 9)\n"
        "    while (place / 'logs/supervisor.log').read_text().count('preloaded in') < 2: time.sleep(0.01)\n"
        "    sys.exit(1)\n"
    )
    assert run_supervisor(spec(tmp_path, "wait_for('learner', 2)", learner, preload=("noted",))) == 0
    text = log(tmp_path)
    assert "the preloading process ended, code=-9: another in 0.0 s; until that is ready the learner starts afr" in text
    assert len(lives(tmp_path, "server")) == 2
    assert len(lives(tmp_path, "learner")) == 2
    assert "learner started, start=2, forked" in text


def test_a_learner_that_dies_with_the_fork_server_starts_afresh(tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(
        "import os, pathlib, time\nplace = pathlib.Path(os.environ['PLACE'])\n"
        "(place / 'server.pids').open('a').write(f'{os.getpid()}\\n')\n"
        # The second server never gets ready.
        "while len((place / 'server.pids').read_text().split()) > 1: time.sleep(0.01)\n"
    )
    learner = (
        "import time\n"
        "if note('learner') == 1:\n"
        "    os.kill(int((place / 'server.pids').read_text()), 9)\n"
        "    wait_for('server', 2)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert run_supervisor(spec(tmp_path, "wait_for('learner', 2)", learner, preload=("noted",))) == 0
    assert '"learner started, start=2" region' in log(tmp_path)
    assert all(is_gone(pid) for pid in lives(tmp_path, "server"))


def test_what_a_forked_learner_left_behind_is_killed_and_the_server_is_not(tmp_path: Path) -> None:
    learner = (
        "import subprocess, time\n"
        "if note('learner') == 1:\n"
        "    wait = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        "    rank = subprocess.Popen(wait, start_new_session=True)\n"
        "    (place / 'rank.pid').write_text(str(rank.pid))\n"
        "    worker = os.fork()\n"
        "    if worker == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(1000)\n"
        "    (place / 'worker.pid').write_text(str(worker))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert run_supervisor(spec(tmp_path, "wait_for('learner', 2)", learner)) == 0
    assert is_gone(int((tmp_path / "rank.pid").read_text()))
    assert is_gone(int((tmp_path / "worker.pid").read_text()))
    assert "learner started, start=2, forked" in log(tmp_path)


def test_a_stop_while_it_imports_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "(pathlib.Path(os.environ['PLACE']) / 'server.pids').write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    daemon = (
        "import signal\nnote('daemon')\nwait_for('server', 1)\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()"
    )
    assert run_supervisor(spec(tmp_path, daemon, "note('learner')", preload=("slow",))) == 0
    assert lives(tmp_path, "learner") == []
    assert is_gone(lives(tmp_path, "server")[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_learner_ends_with_its_supervisor(tmp_path: Path, number: int) -> None:
    (tmp_path / "train.py").write_text(
        NOTE + "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nnote('learner')\n"
        "signal.sigwait([signal.SIGTERM])\n(place / 'told').touch()"
    )
    text = MAIN.replace('[sys.executable, "-c", sys.argv[3]]', '[sys.executable, sys.argv[3]], preload=("json",)')
    command = [sys.executable, "-c", text, str(tmp_path), NOTE + "import signal\nsignal.pause()"]
    process = subprocess.Popen([*command, str(tmp_path / "train.py"), "30"])
    watch = python(NOTE + "wait_for('learner', 1)")
    subprocess.run(watch, env={**os.environ, "PLACE": str(tmp_path)}, check=True, timeout=PATIENCE_S)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == (0 if number == signal.SIGTERM else -9)
    assert is_gone(lives(tmp_path, "learner")[0])
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_restart_leaves_neither_objects_nor_threads_behind(tmp_path: Path, is_forked: bool) -> None:
    """Counted without the garbage collector, which comes by seldom in a process that holds as much as a supervisor."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    restarted = spec(tmp_path, "", "print('here')")
    assert restarted.learner_command is not None
    child = Child("learner", restarted.learner_command, signal.SIGTERM, restarted)
    server = ForkServer(
        ["json"], restarted.learner_command, 1, write=child.log.write, report=events.put, say=lambda _: None,
        backoff=Backoff(0.01, 0.01),
    )  # fmt: skip
    env = {**os.environ, **restarted.env, "DILOCO_SUPERVISOR": "here"}

    def live(lives: int) -> None:
        for _ in range(lives):
            child.start(env, events.put)
            assert child.is_forked == is_forked
            assert events.get(timeout=PATIENCE_S).code == 0
            child.ended()

    try:
        if is_forked:
            server.start(child.marked(env))
            server.note(events.get(timeout=PATIENCE_S))
            child.forks = server
        live(3)
        gc.collect()
        gc.disable()
        counts = [held()]
        for _ in range(2):
            live(LIVES)
            counts.append(held())
        # What comes once, as a cache or an import does, comes in one half of the lives; what a life leaves, in both.
        grown = [after - before for before, after in itertools.pairwise(counts)]
        assert {name: count for name, count in (grown[0] & grown[1]).items() if count >= LIVES} == {}
        assert (tmp_path / "logs" / "learner.log").read_text() == "here\n" * (3 + 2 * LIVES)
    finally:
        gc.enable()
        server.close()
        child.log.close()


LIVES = 8


def held() -> Counter[str]:
    """The objects that there are, by type, and the threads."""
    found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    return found + Counter({"running threads": threading.active_count()})
