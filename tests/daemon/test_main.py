"""`python -m diloco_node.daemon`: what its exit codes tell the supervisor."""

import dataclasses
import fcntl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_node.daemon import program
from diloco_node.daemon.spec import NodeSpec
from diloco_node.daemon.stopping import StopDeadline
from diloco_node.errors import DiskRefused
from diloco_node.supervisor.supervisor import DISK_CODE
from tests.daemon.test_spec import SPEC


def ends_with(state_dir: Path) -> tuple[int, str]:
    """Exit code and output of a daemon with this state folder."""
    path = state_dir.with_suffix(".json")
    dataclasses.replace(SPEC, state_dir=state_dir).save(path)
    process = subprocess.run(
        [sys.executable, "-m", "diloco_node.daemon", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def test_a_disk_that_refuses_is_worth_another_try(tmp_path: Path) -> None:
    (tmp_path / "us").write_text("a file, where the folder should be")
    code, text = ends_with(tmp_path / "us")
    assert (code, "can't use" in text) == (DISK_CODE, True), text


def test_a_state_that_is_not_ours_to_use_is_not(tmp_path: Path) -> None:
    (tmp_path / "us").mkdir()
    with (tmp_path / "us" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, text = ends_with(tmp_path / "us")
    assert (code, "is in use by another daemon" in text) == (6, True), text


def test_threads_that_hang_do_not_keep_a_daemon_that_was_refused_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[StopDeadline] = []

    class Refused:
        def __init__(self, _: NodeSpec, on_stop: Callable[[int, float], None]) -> None:
            deadlines.append(on_stop.__self__)  # type: ignore[attr-defined]

        async def run(self) -> int:
            raise DiskRefused("no room")

    monkeypatch.setattr(program, "Daemon", Refused)
    path = tmp_path / "us.json"
    SPEC.save(path)
    assert program.run_daemon([str(path)]) == DISK_CODE
    assert [deadline.code for deadline in deadlines] == [DISK_CODE]


def test_it_imports_nothing_that_only_commands_and_learners_need() -> None:
    program = "import sys, diloco_node.daemon.program; print(*({'pydantic', 'torch', 'typer'} & sys.modules.keys()))"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert process.stdout == "\n"
