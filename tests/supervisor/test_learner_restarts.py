"""Learners that crash, hang or leave early: started again, apart, and stopped in a crash loop."""

import dataclasses
import signal
from pathlib import Path

import pytest

from diloco_node.supervisor import child
from diloco_node.supervisor import learner_watch as watch
from diloco_node.supervisor.process_file import read_process
from diloco_node.supervisor.supervisor import run_supervisor
from tests.kit.supervisor_kit import NOTE, WAIT, lives, spec

# A learner that counts its steps where the supervisor looks, as many as it is told, and then does as it is told.
STEPS = """
import time
from diloco_node.shared_memory import request_area
from diloco_node.storage import ledger_files
area = request_area(pathlib.Path(os.environ["DILOCO_SUPERVISOR"]), "counters", 384)
def step(count):
    for number in range(count):
        area[0] = (area[0] + 1) % 256
        time.sleep(0.02)
"""


def word(state_dir: Path) -> dict[str, object]:
    return read_process(state_dir)


def test_a_learner_that_hangs_shows_where_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds Python's lock: no thread of it could say anything. It gets longer to write its stacks than in a
    run: this machine may have other things to do."""
    monkeypatch.setattr(watch, "ABORT_S", 60.0)
    daemon = NOTE + "wait_for('learner', 2)"
    hold = "import ctypes\nctypes.PyDLL(None).sleep(1000)"
    learner = (
        NOTE + STEPS + f"life = note('learner')\nstep(20)\nif life == 1:\n    {hold.replace(chr(10), chr(10) + '    ')}"
    )
    hangs = dataclasses.replace(spec(tmp_path, daemon, learner), hang_s=0.5)
    assert run_supervisor(hangs) == 0
    assert len(lives(tmp_path, "learner")) == 2
    assert "learner hung: no step for" in (tmp_path / "logs" / "supervisor.log").read_text()
    assert "Fatal Python error: Aborted" in (tmp_path / "logs" / "learner.log").read_text()
    assert word(tmp_path)["hangs"] == 1


def test_a_hung_learner_that_ignores_everything_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ABORT_S", 0.2)
    daemon = NOTE + "wait_for('learner', 2)"
    learner = (
        NOTE
        + STEPS
        + (
            "life = note('learner')\n"
            "signal = __import__('signal')\n"
            "__import__('faulthandler').disable()\n"
            "signal.signal(signal.SIGABRT, signal.SIG_IGN)\n"
            "step(20)\n"
            "if life == 1: time.sleep(1000)\n"
        )
    )
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, learner), hang_s=0.5)) == 0
    assert len(lives(tmp_path, "learner")) == 2


def test_a_crash_loop_stops_the_learner_and_not_its_daemon_until_it_is_asked_for(tmp_path: Path) -> None:
    """The daemon of this test sends the signal as the real one does, when it sees that the learner is stopped."""
    daemon = NOTE + (
        "import signal\n"
        "note('daemon')\n"
        "wait_until('stopped')\n"
        f"wait_for('learner', {watch.CRASHES_MAX})\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        f"wait_for('learner', {watch.CRASHES_MAX + 1})\n"
        "wait_until('done')\n"
    )
    learner = NOTE + f"sys.exit(1 if note('learner') <= {watch.CRASHES_MAX} else 0)"
    assert run_supervisor(spec(tmp_path, daemon, learner)) == 0
    assert len(lives(tmp_path, "learner")) == watch.CRASHES_MAX + 1
    assert len(lives(tmp_path, "daemon")) == 1
    said = (tmp_path / "logs" / "supervisor.log").read_text()
    assert f"crashed {watch.CRASHES_MAX} times in 1 min, the last time: exit code 1 after" in said
    assert "SIGUSR1: the learner is started again" in said


def test_a_learner_whose_script_left_early_comes_back_when_it_is_asked_for(tmp_path: Path) -> None:
    daemon = NOTE + (
        "import signal\n"
        "note('daemon')\n"
        "wait_until('done')\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "wait_for('learner', 2)\n"
    )
    assert run_supervisor(spec(tmp_path, daemon, NOTE + "note('learner')")) == 0
    assert (len(lives(tmp_path, "learner")), len(lives(tmp_path, "daemon"))) == (2, 1)


def test_sigusr1_changes_nothing_while_the_learner_runs(tmp_path: Path) -> None:
    daemon = NOTE + (
        "import signal, time\nwait_for('learner', 1)\nos.kill(os.getppid(), signal.SIGUSR1)\n"
        "log = place / 'logs' / 'supervisor.log'\n"
        "while 'no learner to be started' not in log.read_text(): time.sleep(0.01)\n"
    )
    waits = dataclasses.replace(spec(tmp_path, daemon, NOTE + "note('learner')\n" + WAIT), finish_s=0.0)
    assert run_supervisor(waits) == 0
    assert len(lives(tmp_path, "learner")) == 1


def test_starts_are_the_backoff_apart_and_a_good_life_resets_it(tmp_path: Path) -> None:
    one = child.Child(
        "learner",
        ["true"],
        signal.SIGTERM,
        dataclasses.replace(spec(tmp_path, WAIT, WAIT), backoff_min_s=1, backoff_max_s=5),
    )
    assert [one.schedule_restart(0.0) for _ in range(4)] == [1, 2, 4, 5]
    assert one.schedule_restart(3.0) == 2
    assert one.schedule_restart(7.0) == 0
    assert one.schedule_restart(0.25, ran_well=True) == 0.75
    assert one.schedule_restart(0.0) == 2
    one.log.close()


def test_a_learner_that_was_killed_after_steps_ran_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    schedule_restart = child.Child.schedule_restart

    def noted(one: child.Child, lived_s: float, *, ran_well: bool = False) -> float:
        seen.append(ran_well)
        return schedule_restart(one, lived_s, ran_well=ran_well)

    monkeypatch.setattr(child.Child, "schedule_restart", noted)
    learner = NOTE + (
        "from diloco_node.shared_memory import request_area\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), 'counters', 64)\n"
        "life = note('learner')\n"
        "if life in (2, 3): area[0] = life\n"
        "if life <= 2: os.kill(os.getpid(), 9)\n"
        "sys.exit(1 if life == 3 else 0)\n"
    )
    assert run_supervisor(spec(tmp_path, NOTE + "wait_for('learner', 4)", learner)) == 0
    # Killed before a step, killed after one, ended by itself after one, done.
    assert seen == [False, True, False]
