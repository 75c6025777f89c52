"""The supervisor once the daemon is done: what the learner's script may do then, and the exit code."""

import dataclasses
from pathlib import Path

import pytest

from diloco_node.state_names import FINAL_NAME
from diloco_node.supervisor.supervisor import run_supervisor
from diloco_node.supervisor.supervisor_spec import SCRIPT_CODE
from tests.kit.supervisor_kit import LEAVE, NOTE, WAIT, is_gone, lives, spec


def test_a_script_that_has_left_a_finished_run_may_go_on_for_as_long_as_it_takes(tmp_path: Path) -> None:
    """It evaluates, and writes its own files: the daemon is gone, no step is made, and nothing ends it."""
    learner = LEAVE + "mark(has_left=True)\nnote('learner')\ntime.sleep(3)\n(place / 'own').write_text('saved')"
    short = dataclasses.replace(spec(tmp_path, NOTE + "wait_for('learner', 1)", learner), finish_s=0.0, hang_s=0.5)
    assert run_supervisor(short) == 0
    assert (tmp_path / "own").read_text() == "saved"
    assert "the region ends with its learner (pid " in (tmp_path / "logs" / "supervisor.log").read_text()


def test_a_script_that_fails_after_the_run_is_no_success(tmp_path: Path) -> None:
    learner = LEAVE + "mark(has_left=True)\nnote('learner')\ntime.sleep(1)\nraise RuntimeError('the disk is full')"
    daemon = NOTE + "wait_for('learner', 1)"
    assert run_supervisor(spec(tmp_path, daemon, learner)) == SCRIPT_CODE
    assert len(lives(tmp_path, "learner")) == 1, "there is no run to start it again for"


@pytest.mark.parametrize("end", ["raise OSError('no room')", "os.kill(os.getpid(), 9)", "pass"])
@pytest.mark.parametrize("is_first", [False, True], ids=["the daemon ends first", "the learner ends first"])
def test_a_script_that_fails_in_its_with_block_after_the_run_is_no_success(
    tmp_path: Path, end: str, is_first: bool
) -> None:
    """It saves its model there: it has not left the run, but the run is over. In mid-run it is another matter."""
    learner = LEAVE + f"life = note('learner')\nif life > 1: {WAIT.replace(chr(10), ';')}\nmark()\n"
    learner += f"(place / '{FINAL_NAME}').touch()\nnote('saves')\ntime.sleep({0 if is_first else 1})\n{end}"
    daemon = NOTE + ("wait_for('learner', 2)" if is_first and end != "pass" else "wait_for('saves', 1)")
    short = dataclasses.replace(spec(tmp_path, daemon, learner), finish_s=0.0)
    assert run_supervisor(short) == (0 if end == "pass" else SCRIPT_CODE)


def test_a_script_that_fails_in_mid_run_is_none_that_fails_after_it(tmp_path: Path) -> None:
    learner = LEAVE + f"if note('learner') > 1: {WAIT.replace(chr(10), ';')}\nmark()\nraise OSError('no room')"
    daemon = NOTE + "wait_for('learner', 2)"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, learner), finish_s=0.0)) == 0


@pytest.mark.parametrize(("lives_failed", "code"), [(1, 0), (9, SCRIPT_CODE)])
def test_a_script_that_fails_before_the_daemon_ends_is_tried_again_and_its_last_life_counts(
    tmp_path: Path, lives_failed: int, code: int
) -> None:
    learner = LEAVE + (
        "life = note('learner')\nmark(has_left=True)\n"
        f"if life <= {lives_failed}: raise RuntimeError('the path is wrong')\nnote('good')"
    )
    daemon = NOTE + f"wait_for({'good' if code == 0 else 'learner'!r}, {1 if code == 0 else 3})"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, learner), finish_s=0.0)) == code


def test_a_script_that_has_failed_and_waits_for_its_next_life_is_no_success(tmp_path: Path) -> None:
    learner = LEAVE + "mark(has_left=True)\nnote('learner')\nraise RuntimeError('full')"
    daemon = NOTE + "wait_for('learner', 1)\nwait_until('waiting')"
    slow = dataclasses.replace(spec(tmp_path, daemon, learner), backoff_min_s=60.0, backoff_max_s=60.0)
    assert run_supervisor(slow) == SCRIPT_CODE


def test_a_next_life_that_has_not_attached_makes_no_success_of_the_failure_before(tmp_path: Path) -> None:
    learner = LEAVE + (
        "if note('learner') > 1:\n    import signal\n    signal.pause()\nmark(has_left=True)\nraise OSError('full')"
    )
    daemon = NOTE + "wait_for('learner', 2)"
    assert run_supervisor(dataclasses.replace(spec(tmp_path, daemon, learner), finish_s=0.0)) == SCRIPT_CODE


def test_a_start_after_the_run_that_fails_before_it_attaches_changes_nothing(tmp_path: Path) -> None:
    learner = NOTE + "import time\nnote('learner')\ntime.sleep(1)\nraise RuntimeError('no data here')"
    assert run_supervisor(spec(tmp_path, NOTE + "wait_for('learner', 1)", learner)) == 0


@pytest.mark.parametrize(("text", "state"), [("mark()\n", "has not left the run"), ("", "has not attached")])
def test_a_learner_that_does_not_leave_a_finished_run_is_stopped(tmp_path: Path, text: str, state: str) -> None:
    (tmp_path / FINAL_NAME).touch()
    learner = LEAVE + f"{text}note('learner')\n{WAIT}"
    short = dataclasses.replace(spec(tmp_path, NOTE + "wait_for('learner', 1)", learner), finish_s=0.0, hang_s=0.5)
    assert run_supervisor(short) == 0
    log = (tmp_path / "logs" / "supervisor.log").read_text()
    assert f"the learner {state} {0.5 if text else 0.0:.0f} s after the daemon's end: it is stopped" in log


def test_a_pause_that_was_announced_has_its_own_limit_and_another_end_of_the_daemon_is_no_end_of_the_run(
    tmp_path: Path,
) -> None:
    """A learner in an evaluation leaves when that is over. Where the run goes on nobody comes: it is stopped soon."""
    pause = "mark(since_s=time.monotonic(), limit_s=60.0, activity='evaluation')\n"
    learner = LEAVE + f"{pause}note('learner')\ntime.sleep(2)\n(place / 'own').write_text('saved')"
    short = dataclasses.replace(spec(tmp_path, NOTE + "wait_for('learner', 1)", learner), finish_s=0.0, hang_s=0.5)
    assert run_supervisor(short) == 0
    assert not (tmp_path / "own").exists()
    (tmp_path / FINAL_NAME).touch()
    (tmp_path / "learner.pids").unlink()
    assert run_supervisor(short) == 0
    assert (tmp_path / "own").read_text() == "saved"


def test_a_signal_ends_the_wait_for_a_script_that_has_left(tmp_path: Path) -> None:
    stop = "os.kill(os.getppid(), 15)"
    learner = LEAVE + f"mark(has_left=True)\nnote('learner')\ntime.sleep(1)\n{stop}\n{WAIT}"
    assert run_supervisor(spec(tmp_path, NOTE + "wait_for('learner', 1)", learner)) == 0
    assert is_gone(lives(tmp_path, "learner")[0])
