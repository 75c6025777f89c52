"""The parent of a region's daemon and learner, with real processes: who is started again, and what ends the region."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco_node.daemon.stopping import STOP_VARIABLE
from diloco_node.errors import StorageError
from diloco_node.shared_memory import request_area
from diloco_node.state_names import ADMIN_PORT_NAME, LEDGER_NAME
from diloco_node.supervisor import child, learner_watch
from diloco_node.supervisor.preload import LEARNER_NICENESS, LOWEST_NICENESS, autogroup_niceness, give_way
from diloco_node.supervisor.process_file import read_process, write_process
from diloco_node.supervisor.supervisor import DISK_CODE, run_supervisor
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
from tests.kit.supervisor_kit import LEAVE, MAIN, NOTE, PATIENCE_S, WAIT, is_gone, lives, python, spec
from tests.kit.waiting import until


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
    """Within a session by niceness; Linux gives sessions equal shares, unless their niceness says otherwise."""
    autogroup = Path("/proc/self/autogroup")
    look = "import os, sys, pathlib\ngroup = pathlib.Path('/proc/self/autogroup')\n"
    look += "words = [os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0)]\n"
    look += "words += group.read_text().split()[-1:] if group.exists() else []\n"
    look += "sys.stderr.write(' '.join(map(str, words)) + '\\n')\n"
    (tmp_path / "look.py").write_text(look)
    daemon = NOTE + f"wait_for('learner', 1)\n{look}"
    learner = NOTE + f"{look}\nos.system(f'{{sys.executable}} {tmp_path}/look.py')\nnote('learner')"
    levels = [os.getpriority(os.PRIO_PROCESS, 0)]
    levels += [autogroup_niceness(autogroup.read_text())] if autogroup.exists() else []
    has_level = autogroup.exists() and bool(autogroup.read_text())  # a session of the kernel's first has none
    assert run_supervisor(spec(tmp_path, daemon, learner)) == 0
    lower = [min(level + LEARNER_NICENESS, LOWEST_NICENESS) for level in levels]
    session = lives(tmp_path, "learner")[0]
    assert (tmp_path / "logs" / "daemon.log").read_text() == words_of(os.getsid(0), *levels[: 1 + has_level])
    assert (tmp_path / "logs" / "learner.log").read_text() == words_of(session, *lower) * 2


@pytest.mark.parametrize(("text", "niceness"), [("", 0), ("/autogroup-12 nice 5\n", 5), ("/autogroup-7 nice -3\n", -3)])
def test_a_session_has_a_niceness_also_where_the_kernel_tells_none(text: str, niceness: int) -> None:
    assert autogroup_niceness(text) == niceness


@pytest.mark.parametrize("text", ["", "\n", "another kernel's words\n", "/autogroup-12 nice much\n"])
def test_a_learner_starts_whatever_the_kernel_tells_of_sessions(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text
    autogroup = Path("/proc/self/autogroup")
    monkeypatch.setattr(Path, "read_text", lambda path, *words: text if path == autogroup else read_text(path, *words))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        give_way(process.pid)
        levels = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, process.pid)]
        assert levels[1] == min(levels[0] + LEARNER_NICENESS, LOWEST_NICENESS)
        process.kill()


def words_of(*numbers: int) -> str:
    return " ".join(map(str, numbers)) + "\n"


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
    learner = "import argparse; argparse.ArgumentParser(prog='train.py').parse_args(['--rate'])"
    assert run_supervisor(spec(tmp_path, WAIT, learner)) == 2
    reason = r"code=2 after \d+\.\d s: train.py: error: unrecognized arguments: --rate: the region ends with 2"
    assert re.search(reason, (tmp_path / "logs" / "supervisor.log").read_text())


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


@pytest.mark.parametrize(("handler", "code"), [("SIG_IGN", -9), ("SIG_DFL", -15)])
def test_log_and_status_say_what_a_learner_that_was_killed_has_lost(tmp_path: Path, handler: str, code: int) -> None:
    mark = (
        "import os, pathlib, signal\nfrom diloco_node.shared_memory import *\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), PLACE_AREA, PLACE_BYTES)\n"
        "area[:] = PlaceMark(os.getpid(), step=100, included_step=88, checkpoint_step=1).encode()\n"
        f"signal.signal(signal.SIGTERM, signal.{handler})\nnote('learner')\nsignal.pause()"
    )
    process = start(tmp_path, ordered("daemon"), NOTE + mark, stop_s=0.1 if handler == "SIG_IGN" else 30.0)
    os.kill(lives(tmp_path, "learner")[0], signal.SIGKILL)
    until(lambda: len(lives(tmp_path, "learner")) > 1)
    until(lambda: read_process(tmp_path).get("lost") == {"unsaved_steps": 99, "unmerged_steps": 12})
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert ("learner did not stop within 0 s: killed" in log) == (handler == "SIG_IGN")
    lines = [line for line in log.splitlines() if "that no merge includes" in line]
    assert len(lines) == 2, "by the test, and as the region stops"
    assert f"learner exited, code={code} after " in lines[1]
    assert "s; lost: 99 steps since its checkpoint, 12 that no merge includes" in lines[1]


def test_a_learner_that_left_after_a_signal_from_outside_is_started_again(tmp_path: Path) -> None:
    learner = NOTE + (
        "from diloco_node.shared_memory import *\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), PLACE_AREA, PLACE_BYTES)\n"
        "life = note('learner')\n"
        "area[:] = PlaceMark(os.getpid(), step=9, is_interrupted=life == 1, has_left=life == 2).encode()\n"
    )
    assert run_supervisor(spec(tmp_path, NOTE + "wait_until('done')", learner)) == 0
    assert len(lives(tmp_path, "learner")) == 2
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert (
        "; lost: 9 steps since its checkpoint, 9 that no merge includes: a signal from outside asked it to stop, and "
        "the run goes on: starting again in " in log
    )
    assert log.count(": it is done") == 1


def test_a_learner_whose_script_hides_a_refusal_is_started_again(tmp_path: Path) -> None:
    learner = NOTE + (
        "from diloco_node.shared_memory import *\n"
        "area = request_area(pathlib.Path(os.environ['DILOCO_SUPERVISOR']), PLACE_AREA, PLACE_BYTES)\n"
        "life = note('learner')\n"
        "fault = 'LearnerError: weights were loaded' * (life == 1)\n"
        "area[:] = PlaceMark(os.getpid(), step=9, fault=fault, has_left=life == 3, has_ended=not fault).encode()\n"
    )
    assert run_supervisor(spec(tmp_path, NOTE + "wait_until('done')", learner)) == 0
    assert len(lives(tmp_path, "learner")) == 2
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert "; lost: 9 steps since its checkpoint, 9 that no merge includes: exit code 0 after " in log
    assert ": its script hides an error: LearnerError: weights were loaded: starting again in " in log
    # The second one exits with 0 as well, but in mid-run.
    assert log.count("9 that no merge includes: it ended without close() or a `with` block: its last steps") == 1


@pytest.mark.parametrize("hang_s", [300.0, 0.0])
def test_a_learner_whose_script_hides_a_refusal_and_trains_on_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_s: float
) -> None:
    monkeypatch.setattr(learner_watch, "REFUSED_S", 0.5)
    learner = (
        LEAVE + "if note('learner') == 1:\n    mark(fault='LearnerError: no')\n    time.sleep(600)\nmark(has_left=True)"
    )
    regular = dataclasses.replace(spec(tmp_path, NOTE + "wait_until('done')", learner), hang_s=hang_s)
    assert run_supervisor(regular) == 0
    assert len(lives(tmp_path, "learner")) == 2
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert "learner goes on outside of the run: its script hides an error: LearnerError: no: it is stopped, and" in log


def test_no_child_survives_the_supervisor(tmp_path: Path) -> None:
    wait = "import signal\nnote('{}')\nsignal.pause()"
    process = start(tmp_path, NOTE + wait.format("daemon"), NOTE + wait.format("learner"))
    process.kill()
    process.wait(PATIENCE_S)
    assert is_gone(lives(tmp_path, "daemon")[0])
    assert is_gone(lives(tmp_path, "learner")[0])


def test_what_a_killed_supervisor_left_behind_is_ended_before_the_next_one_starts_anything(tmp_path: Path) -> None:
    """A learner below a shell, which dies with the supervisor alone; its memory is none that the next daemon shares."""
    (tmp_path / "train.py").write_text(ordered("orphan"))
    below = NOTE + "note('learner')\nos.execvp('bash', ['bash', '-c', f'{sys.executable} {place}/train.py; true'])"
    process = start(tmp_path, NOTE + "note('daemon')\n" + WAIT, below)
    until(lambda: lives(tmp_path, "orphan"))
    [orphan] = lives(tmp_path, "orphan")
    process.kill()
    process.wait(PATIENCE_S)
    assert is_gone(lives(tmp_path, "learner")[0])
    assert Path(f"/proc/{orphan}").exists()
    by_hand = {**os.environ, "DILOCO_SUPERVISOR": str(tmp_path / "memory.sock"), "PLACE": str(tmp_path)}
    stranger = subprocess.Popen([sys.executable, "-c", WAIT], env=by_hand)
    daemon = NOTE + "assert not pathlib.Path('/proc/ORPHAN').exists()\nassert note('daemon') == 2"
    assert run_supervisor(spec(tmp_path, daemon.replace("ORPHAN", str(orphan)), None)) == 0
    assert f"left behind, with its memory: pid {orphan}" in (tmp_path / "logs" / "supervisor.log").read_text()
    assert stranger.poll() is None, "somebody has started it by hand"
    assert (tmp_path / "order").read_text() == "orphan ", "it had the time to write its checkpoint"
    stranger.kill()
    stranger.wait(PATIENCE_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may leave the file system: another container's is NOT TRIED")
def test_a_learner_of_another_container_with_the_same_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "apart").mkdir()
    marks = {"DILOCO_SUPERVISOR": str(tmp_path / "memory.sock"), "DILOCO_CHILD": "learner-1"}
    script = "import os, signal, sys\nos.chroot(sys.argv[1])\nsignal.pause()"
    stranger = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "apart")], env={**os.environ, **marks})
    until(lambda: Path(f"/proc/{stranger.pid}/root").readlink() == tmp_path / "apart")
    assert run_supervisor(spec(tmp_path, NOTE + "note('daemon')", None)) == 0
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait(PATIENCE_S)


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
            f"print(round(float(os.environ[{STOP_VARIABLE!r}]), 3), file=sys.stderr)\n"
        )
    )
    assert run_supervisor(spec(tmp_path, daemon, None)) == 0
    assert (tmp_path / "logs" / "daemon.log").read_text() == "here True\n5.0\n"
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


RANK = "Traceback (most recent call last):\n[rank0]: ValueError: no such expert\n"


LOST_RANK = "[rank1]: RuntimeError: [pair.cc:525] Connection closed by peer [127.0.0.1]:4711\n"


DUMP = (
    'Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n  File "pool.py", line 81 in run\n\n'
    'Current thread 0x02 (most recent call first):\n  File "train.py", line 7 in <module>\n\nExtension modules: numpy\n'
)


IGNORED = (
    "Exception ignored in: <function Loader.__del__ at 0x7f>\nTraceback (most recent call last):\n"
    '  File "loader.py", line 9, in __del__\nAssertionError: can only test a child process\n'
)


GROUP = (
    "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: in a TaskGroup (1 sub-exception)\n"
    "  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    | ValueError: no row\n"
    "    +------------------------------------\n"
)


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
        (RANK + LOST_RANK + LAUNCHER, "[rank0]: ValueError: no such expert"),
        (LOST_RANK, "[rank1]: RuntimeError: [pair.cc:525] Connection closed by peer [127.0.0.1]:4711"),
        ("ChildFailedError: \nSegmentation fault (core dumped)\n\n", "Segmentation fault (core dumped)"),
        ("step 7\n" + DUMP, 'Fatal Python error: Aborted, at File "train.py", line 7 in <module>'),
        (
            "  what():  CUDA error: bad\nframe #0\n" + DUMP,
            'what():  CUDA error: bad, at File "train.py", line 7 in <module>',
        ),
        (DUMP + "RuntimeError: sizes differ\n", "RuntimeError: sizes differ"),
        ("KeyError: 'text'\n" + IGNORED + IGNORED, "KeyError: 'text'"),
        (IGNORED, "AssertionError: can only test a child process"),
        (
            "KeyError: 'text'\nException ignored in: <_io.TextIOWrapper name='<stdout>'>\nBrokenPipeError: broken\n",
            "KeyError: 'text'",
        ),
        ("[rank0]:   | ValueError: no row\n", "[rank0]:   | ValueError: no row"),
        ("ray.exceptions.RayTaskError(ValueError): no row\nlate\n", "ray.exceptions.RayTaskError(ValueError): no row"),
        ("no such file: rows.txt\n" + IGNORED.replace("ignored in", "ignored while calling"), "no such file: rows.txt"),
        ("KeyError: 'text'\n" + IGNORED.replace("Exception ignored in", "Error in atexit"), "KeyError: 'text'"),
        ("Error loading the cache: it is made anew\ngive --data\n", "give --data"),
        (GROUP, "ValueError: no row"),
        (
            "RuntimeError: Error(s) in loading state_dict for Net:\n\tsize mismatch for head.weight\n[W] late\n",
            "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for head.weight",
        ),
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


@pytest.mark.parametrize("order", ["late", "early", "down"])
def test_sighup_reaches_the_daemon_once_it_is_up_and_nothing_ends(tmp_path: Path, order: str) -> None:
    """Before that it would die of it; one that is down has no process that the signal could be sent to. Of a life that
    was killed the port is left behind."""
    daemon = NOTE + (
        "import signal, time\n"
        "life = note('daemon')\n"
        f"if {order == 'early'}: os.kill(os.getppid(), signal.SIGHUP); time.sleep(1)\n"
        f"if {order == 'down'} and life == 1:\n"
        f"    (place / '{ADMIN_PORT_NAME}').touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        f"if {order == 'down'} and life == 2: time.sleep(1)\n"
        f"if (place / '{ADMIN_PORT_NAME}').exists() or life > 2: sys.exit(7)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])\n"
        f"(place / '{ADMIN_PORT_NAME}').touch()\n"
        f"if {order == 'late'}: os.kill(os.getppid(), signal.SIGHUP)\n"
        "if signal.sigtimedwait([signal.SIGHUP], 60) is None: sys.exit(7)\n"
        "note('reloaded')\n"
    )
    learner = NOTE + (
        "import signal, time\n"
        "wait_for('daemon', 1)\n"
        "pid = (place / 'daemon.pids').read_text().split()[0]\n"
        f"while {order == 'down'} and pathlib.Path('/proc', pid).exists(): time.sleep(0.01)\n"
        f"if {order == 'down'}: os.kill(os.getppid(), signal.SIGHUP)\n"
    )
    slow = dataclasses.replace(spec(tmp_path, daemon, learner), backoff_min_s=0.5, backoff_max_s=0.5)
    assert run_supervisor(slow) == 0
    assert len(lives(tmp_path, "daemon")) == 1 + (order == "down")
    assert len(lives(tmp_path, "reloaded")) == 1


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
