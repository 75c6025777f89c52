import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from diloco_node.errors import StorageError
from diloco_node.shared_memory import request_area
from diloco_node.state_names import LEDGER_NAME
from diloco_node.supervisor import child
from diloco_node.supervisor import learner_watch as watch
from diloco_node.supervisor.preload import LEARNER_NICENESS, LOWEST_NICENESS
from diloco_node.supervisor.process_file import read_process, write_process
from diloco_node.supervisor.supervisor import DISK_CODE, logfmt, run_supervisor
from diloco_node.supervisor.supervisor_spec import SupervisorSpec

PATIENCE_S = 180.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


# Waits in the style of a real child: until a signal says otherwise.
WAIT = "import signal\nsignal.sigwait([signal.SIGTERM])"


def spec(state_dir: Path, daemon: str, learner: str | None) -> SupervisorSpec:
    return SupervisorSpec(
        region="us-east",
        state_dir=state_dir,
        daemon_command=python(daemon),
        learner_command=None if learner is None else python(learner),
        env={"PLACE": str(state_dir)},
        backoff_min_s=0.01,
        backoff_max_s=0.05,
        daemon_first_s=0.0,
        is_echoing=False,
    )


def lives(state_dir: Path, name: str) -> list[int]:
    """Process ids of a child's lives, as the children noted them."""
    path = state_dir / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


NOTE = """
import os, pathlib, sys
place = pathlib.Path(os.environ["PLACE"])
def note(name):
    with (place / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return len((place / f"{name}.pids").read_text().split())
def wait_for(name, count):
    import time
    path = place / f"{name}.pids"
    while not path.exists() or len(path.read_text().split()) < count:
        time.sleep(0.01)
def wait_until(state):
    import json, time
    path = place / "learner.json"
    while not path.exists() or json.loads(path.read_text())["state"] != state:
        time.sleep(0.01)
"""


def test_daemon_that_finishes_ends_the_region_with_zero(tmp_path: Path) -> None:
    assert run_supervisor(spec(tmp_path, "import sys; print('merged', file=sys.stderr)", "print('trained')")) == 0
    assert (tmp_path / "logs" / "daemon.log").read_text() == "merged\n"
    assert (tmp_path / "logs" / "learner.log").read_text() == "trained\n"


def test_it_says_which_learner_it_waits_for(tmp_path: Path) -> None:
    long = dataclasses.replace(
        spec(tmp_path, NOTE + "wait_for('learner', 1)", None),
        learner_command=[*python(NOTE + "note('learner')"), "--data", "a file"],
    )
    assert run_supervisor(long) == 0
    [line] = [line for line in (tmp_path / "logs" / "supervisor.log").read_text().splitlines() if "waiting" in line]
    assert f"waiting for the learner (pid {lives(tmp_path, 'learner')[0]}: {sys.executable} " in line
    assert "... " in line
    assert "--data 'a file') to attach; importing torch and building the model takes 15 to 40 s" in line


def test_the_learner_and_what_it_starts_give_way_to_the_daemon(tmp_path: Path) -> None:
    say = "print(os.getpriority(os.PRIO_PROCESS, 0))"
    daemon = NOTE + "wait_for('learner', 1)\nsys.stderr.write(str(os.getpriority(os.PRIO_PROCESS, 0)))"
    learner = (
        NOTE + f"{say}\nsys.stdout.flush()\nos.system(f'{{sys.executable}} -c \"import os; {say}\"')\nnote('learner')"
    )
    assert run_supervisor(spec(tmp_path, daemon, learner)) == 0
    own = os.getpriority(os.PRIO_PROCESS, 0)
    lower = min(own + LEARNER_NICENESS, LOWEST_NICENESS)
    assert (tmp_path / "logs" / "daemon.log").read_text() == str(own)
    assert (tmp_path / "logs" / "learner.log").read_text() == f"{lower}\n{lower}\n"


@pytest.mark.parametrize("code", [2, 3, 4, DISK_CODE, 6, 7])
def test_code_that_a_restart_does_not_cure_is_the_result(tmp_path: Path, code: int) -> None:
    daemon = NOTE + f"note('daemon')\nsys.exit({code})"
    assert run_supervisor(spec(tmp_path, daemon, WAIT)) == (6 if code == DISK_CODE else code)
    assert len(lives(tmp_path, "daemon")) == 1


@pytest.mark.parametrize("codes", [(1, 3), (DISK_CODE, DISK_CODE)])
def test_daemon_that_crashes_is_started_again_while_the_learner_goes_on(tmp_path: Path, codes: tuple[int, int]) -> None:
    """After a SIGKILL: by an error and with a taken port, or a disk that refuses; these are final at a first start."""
    daemon = NOTE + (
        "life = note('daemon')\n"
        "wait_for('learner', 1)\n"
        "if life == 1: os.kill(os.getpid(), 9)\n"
        f"if life < 4: sys.exit({codes}[life - 2])\n"
    )
    learner = NOTE + "note('learner')\nwait_for('daemon', 4)"
    assert run_supervisor(spec(tmp_path, daemon, learner)) == 0
    assert len(lives(tmp_path, "daemon")) == 4
    assert len(lives(tmp_path, "learner")) == 1


def test_a_disk_that_refuses_after_a_long_first_life_is_tried_again(tmp_path: Path) -> None:
    daemon = NOTE + f"sys.exit({DISK_CODE} if note('daemon') == 1 else 0)"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, WAIT), healthy_s=0.0, finish_s=0.0)) == 0
    assert len(lives(tmp_path, "daemon")) == 2


def test_a_disk_that_refuses_at_the_start_of_a_region_that_has_run_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / LEDGER_NAME).touch()
    daemon = NOTE + f"sys.exit({DISK_CODE} if note('daemon') < 3 else 0)"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, WAIT), finish_s=0.0)) == 0
    assert len(lives(tmp_path, "daemon")) == 3


def test_what_the_supervisor_before_said_of_the_learner_is_forgotten_at_once(tmp_path: Path) -> None:
    write_process(tmp_path, {"state": "stopped", "reason": "crashed", "crashes": 10, "hangs": 0})
    daemon = NOTE + "(place / 'seen').write_text((place / 'learner.json').read_text())"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, WAIT), finish_s=0.0)) == 0
    assert json.loads((tmp_path / "seen").read_text())["state"] in ("waiting", "running")


def test_learner_that_crashes_is_started_again_while_the_daemon_goes_on(tmp_path: Path) -> None:
    daemon = NOTE + "note('daemon')\nwait_for('learner', 3)"
    learner = NOTE + "life = note('learner')\nsys.exit(0 if life == 3 else 1)"
    assert run_supervisor(spec(tmp_path, daemon, learner)) == 0
    assert len(lives(tmp_path, "daemon")) == 1
    assert len(lives(tmp_path, "learner")) == 3


def test_learner_that_is_done_is_not_started_again(tmp_path: Path) -> None:
    daemon = NOTE + "wait_until('done')"
    assert run_supervisor(spec(tmp_path, daemon, NOTE + "note('learner')")) == 0
    assert len(lives(tmp_path, "learner")) == 1


def test_learner_with_wrong_settings_ends_the_region(tmp_path: Path) -> None:
    assert run_supervisor(spec(tmp_path, WAIT, "import sys; sys.exit(2)")) == 2


@pytest.mark.parametrize("has_session", [False, True])
def test_ranks_that_a_dead_launcher_left_behind_are_killed(tmp_path: Path, has_session: bool) -> None:
    learner = NOTE + (
        "import subprocess, signal\n"
        "if note('learner') == 1:\n"
        "    wait = [sys.executable, '-c', 'import signal; signal.pause()']\n"
        f"    rank = subprocess.Popen(wait, start_new_session={has_session})\n"
        "    (place / 'rank.pid').write_text(str(rank.pid))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    daemon = NOTE + "wait_for('learner', 2)"
    assert run_supervisor(spec(tmp_path, daemon, learner)) == 0
    assert is_gone(int((tmp_path / "rank.pid").read_text()))


def is_gone(pid: int) -> bool:
    """Dead, or a zombie that nobody of ours has to reap; waits for it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


MAIN = """
import pathlib, sys
from diloco_node.supervisor.supervisor import run_supervisor
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
place = pathlib.Path(sys.argv[1])
sys.exit(run_supervisor(SupervisorSpec(
    region="us-east", state_dir=place, env={"PLACE": str(place)}, is_echoing=False,
    stop_s=float(sys.argv[4]), daemon_first_s=0.0,
    daemon_command=[sys.executable, "-c", sys.argv[2]], learner_command=[sys.executable, "-c", sys.argv[3]])))
"""


def start(tmp_path: Path, daemon: str, learner: str, stop_s: float = 30.0) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", MAIN, str(tmp_path), daemon, learner, str(stop_s)])
    deadline_s = time.monotonic() + PATIENCE_S
    while not (lives(tmp_path, "daemon") and lives(tmp_path, "learner")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return process


def ordered(name: str) -> str:
    """A child that writes its name into `order` when it is told to stop."""
    return NOTE + (
        f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\nnote('{name}')\n"
        f"signal.sigwait([signal.SIGTERM])\nwith (place / 'order').open('a') as file: file.write('{name} ')\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_learner_then_daemon_and_exits_zero(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, ordered("daemon"), ordered("learner"))
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 0
    assert (tmp_path / "order").read_text() == "learner daemon "


def test_child_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    stubborn = NOTE + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('learner')\nsignal.pause()"
    process = start(tmp_path, ordered("daemon"), stubborn, stop_s=0.1)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert is_gone(lives(tmp_path, "learner")[0])


def test_the_log_says_what_a_learner_that_was_killed_has_lost(tmp_path: Path) -> None:
    mark = (
        "import os, pathlib, signal\nfrom diloco_node.shared_memory import *\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), PLACE_AREA, PLACE_BYTES)\n"
        "area[:] = PlaceMark(os.getpid(), step=100, included_step=88, checkpoint_step=1).encode()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('learner')\nsignal.pause()"
    )
    process = start(tmp_path, ordered("daemon"), NOTE + mark, stop_s=0.1)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert (
        "learner did not stop within 0 s: killed; lost: 99 steps since its checkpoint, 12 that no merge includes" in log
    )


def test_a_learner_that_left_after_a_signal_from_outside_is_started_again(tmp_path: Path) -> None:
    learner = NOTE + (
        "from diloco_node.shared_memory import *\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), PLACE_AREA, PLACE_BYTES)\n"
        "life = note('learner')\n"
        "area[:] = PlaceMark(os.getpid(), step=9, is_interrupted=life == 1).encode()\n"
    )
    assert run_supervisor(spec(tmp_path, NOTE + "wait_until('done')", learner)) == 0
    assert len(lives(tmp_path, "learner")) == 2
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert ": a signal from outside asked it to stop, and the run goes on: starting again in " in log
    assert log.count(": it is done") == 1


def test_no_child_survives_the_supervisor(tmp_path: Path) -> None:
    wait = "import signal\nnote('{}')\nsignal.pause()"
    process = start(tmp_path, NOTE + wait.format("daemon"), NOTE + wait.format("learner"))
    process.kill()
    process.wait(PATIENCE_S)
    assert is_gone(lives(tmp_path, "daemon")[0])
    assert is_gone(lives(tmp_path, "learner")[0])


def test_second_supervisor_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path, ordered("daemon"), ordered("learner"))
    try:
        with pytest.raises(StorageError, match="already runs on"):
            run_supervisor(spec(tmp_path, WAIT, None))
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_memory_outlives_both_children(tmp_path: Path) -> None:
    area = (
        "from diloco_node.shared_memory import request_area\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), 'inbox', 4096)\n"
    )
    daemon = (
        NOTE
        + area
        + (
            "if note('daemon') == 1:\n"
            "    area[7:11] = b'here'\n"
            "    os.kill(os.getpid(), 9)\n"
            "print(bytes(area[7:11]).decode(), os.environ['DILOCO_STATE'] == str(place.resolve()), file=sys.stderr)\n"
        )
    )
    assert run_supervisor(spec(tmp_path, daemon, None)) == 0
    assert (tmp_path / "logs" / "daemon.log").read_text() == "here True\n"
    with pytest.raises(Exception, match="is the supervisor alive"):
        request_area(tmp_path / "memory.sock", "inbox", 4096)


def test_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    daemon = NOTE + (
        "import time\n"
        "log = place / 'logs' / 'learner.log'\n"
        "while not log.exists() or 'No such file' not in log.read_text(): time.sleep(0.01)\n"
    )
    wrong = spec(tmp_path, daemon, None)
    wrong = SupervisorSpec(
        region=wrong.region,
        state_dir=tmp_path,
        daemon_command=wrong.daemon_command,
        env=wrong.env,
        learner_command=["/no/such/trainer"],
        daemon_first_s=0.0,
        is_echoing=False,
    )
    assert run_supervisor(wrong) == 0
    assert "/no/such/trainer: No such file" in (tmp_path / "logs" / "learner.log").read_text()
    assert not os.path.lexists(tmp_path / "memory.sock")


RANK = "Traceback (most recent call last):\n[rank0]: ValueError: no such expert\n"
LAUNCHER = "\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED\n====\n"


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("step 1\n  raise RuntimeError('x')\nRuntimeError: sizes differ\n", "RuntimeError: sizes differ"),
        (
            "torch.OutOfMemoryError: CUDA out of memory\n[W] ProcessGroupNCCL.cpp: Warning\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (RANK + LAUNCHER, "[rank0]: ValueError: no such expert"),
        ("ChildFailedError: \nSegmentation fault (core dumped)\n\n", "Segmentation fault (core dumped)"),
        ("step 7 loss 2.1\n", "step 7 loss 2.1"),
        ("", ""),
    ],
)
def test_the_last_line_of_a_crash_is_that_of_its_cause(tmp_path: Path, output: str, line: str) -> None:
    log = child.ChildLog(tmp_path / "learner.log", is_echoing=False)
    log.write(b"x" * child.TAIL_BYTES + b"\n")
    log.tail = b""
    for byte in output.encode():
        log.write(bytes([byte]))
    assert log.last_line() == line
    log.close()


def test_a_crash_is_told_with_its_last_line(tmp_path: Path) -> None:
    daemon = NOTE + "wait_for('learner', 2)\n(place / 'seen').write_text((place / 'learner.json').read_text())"
    learner = NOTE + "if note('learner') == 1: raise RuntimeError('sizes differ')\nimport signal\nsignal.pause()"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, learner), stop_s=0.2, finish_s=0.0)) == 0
    reason = json.loads((tmp_path / "seen").read_text())["reason"]
    assert re.fullmatch(r"exit code 1 after \d+\.\d s: RuntimeError: sizes differ", reason)


def test_sighup_goes_to_the_daemon_and_nothing_ends(tmp_path: Path) -> None:
    daemon = f"""
    {textwrap.indent(NOTE, "    ").strip()}
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    note("daemon")
    os.kill(os.getppid(), signal.SIGHUP)
    assert signal.sigwait([signal.SIGHUP]) == signal.SIGHUP
    note("reloaded")
    """
    assert run_supervisor(spec(tmp_path, daemon, None)) == 0
    assert len(lives(tmp_path, "daemon")) == len(lives(tmp_path, "reloaded")) == 1


def test_a_log_that_can_not_be_rotated_goes_on_in_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the child's output must never stop: a full pipe stops the child."""
    monkeypatch.setattr(child, "LOG_BYTES_MAX", 5)
    log = child.ChildLog(tmp_path / "daemon.log", is_echoing=False)
    log.write(b"123456")
    with monkeypatch.context() as full:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        full.setattr(Path, "open", refuse)
        log.write(b"-still")
        log.write(b"-there")
    assert (tmp_path / "daemon.log.1").read_bytes() == b"123456-still-there"
    log.write(b"new")
    log.close()
    assert (tmp_path / "daemon.log").read_bytes() == b"new"
    assert (tmp_path / "daemon.log.1").read_bytes() == b"123456-still-there"


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


def test_what_the_daemon_says_to_people_is_shown_and_its_log_only_when_asked_for(tmp_path: Path) -> None:
    # Whole lines in one write, as the daemon does: `print` writes the end of a line apart.
    daemon = python("import os; os.write(1, b'for people\\n'); os.write(2, b'a fact\\n')")
    learner = python("import os; os.write(1, b'steps\\n')")
    for is_verbose, shown in ((False, {"for people", "steps"}), (True, {"for people", "steps", "a fact"})):
        place = tmp_path / str(is_verbose)
        program = (
            "import sys\nfrom pathlib import Path\n"
            "from diloco_node.supervisor.supervisor import SupervisorSpec, run_supervisor\n"
            f"spec = SupervisorSpec('us', Path({str(place)!r}), {daemon}, {learner}, is_verbose={is_verbose}, "
            "log_format='json', daemon_first_s=0.0)\n"
            "sys.exit(run_supervisor(spec))\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
        lines = done.stderr.splitlines()
        assert {line for line in lines if "us: " not in line} == shown
        assert any(line.endswith("Z us: daemon started, start=1") for line in lines)
        assert (place / "logs" / "daemon.log").read_text() == "a fact\n"
        said = [json.loads(line) for line in (place / "logs" / "supervisor.log").read_text().splitlines()]
        assert "daemon started, start=1" in [fact["event"] for fact in said]


def test_the_supervisor_s_log_is_key_value_whatever_stands_in_it() -> None:
    fact = {"level": "info", "event": 'say "x"\nand a=b', "region": "us"}
    assert logfmt(fact) == r'level=info event="say \"x\"\nand a=b" region=us'


def test_the_service_manager_is_told_when_the_region_is_up_lives_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "20000")
        state = tmp_path / "us"
        state.mkdir()
        (state / "admin.port").write_text("of a daemon that was killed")
        daemon = (
            "import os, time, pathlib\nplace = pathlib.Path(os.environ['PLACE'])\n"
            "assert not (place / 'admin.port').exists()\nassert 'NOTIFY_SOCKET' not in os.environ\n"
            "time.sleep(0.1)\n(place / 'admin.port').write_text('7401')\n"
            "while not (place / 'go').exists(): time.sleep(0.01)\n"
        )
        thread = threading.Thread(target=lambda: (heard_ready.wait(PATIENCE_S), (state / "go").touch()))
        heard_ready = threading.Event()
        told: list[str] = []

        def listen() -> None:
            while "STOPPING=1" not in told:
                told.append(manager.recv(4096).decode())
                if "READY=1" in told and told.count("WATCHDOG=1") >= 3:
                    heard_ready.set()

        listener = threading.Thread(target=listen)
        thread.start()
        listener.start()
        assert run_supervisor(spec(state, daemon, None)) == 0
        listener.join(PATIENCE_S)
        thread.join(PATIENCE_S)
    assert told.index("STATUS=daemon started, start=1") < told.index("READY=1") < told.index("STOPPING=1")
    assert told.count("READY=1") == 1


def test_a_signal_to_all_that_a_learner_is_reaches_each_process_once(tmp_path: Path) -> None:
    """Python writes its stacks at SIGABRT, and a second one ends it meanwhile. Real-time signals are counted."""
    count = """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    print("ready", flush=True)
    signal.sigwait([signal.SIGRTMIN])
    again = signal.sigtimedwait([signal.SIGRTMIN], 0.3)
    print("once" if again is None else "twice", flush=True)
    """
    ended = threading.Event()
    one = child.Child("learner", python(count), signal.SIGKILL, spec(tmp_path, "", None))
    one.start({**os.environ, "DILOCO_SUPERVISOR": str(tmp_path)}, lambda _: ended.set())
    log = tmp_path / "logs" / "learner.log"
    until_s = time.monotonic() + PATIENCE_S
    while "ready" not in log.read_text() and time.monotonic() < until_s:
        time.sleep(0.01)
    one.kill(signal.SIGRTMIN)
    assert ended.wait(PATIENCE_S)
    one.ended()
    one.log.close()
    assert log.read_text().split() == ["ready", "once"]
