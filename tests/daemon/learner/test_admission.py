"""The newest learner process stays, whoever attaches last, and whichever daemon it finds."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.daemon.learner.admission import HOLDER_NAME, Admission
from diloco_node.storage.trained import allot_incarnation
from diloco_node.unix_sockets import Process, process_of
from diloco_node.wire.learner_link import LINK_PROTOCOL, Attach
from tests.kit.node_kit import InlineExecutor

ATTACH = Attach(LINK_PROTOCOL, 17, (TensorSpec("w", (3,)),), 0, "", 0, 0, 0, (), ())


def of_incarnation(number: int) -> Attach:
    return replace(ATTACH, incarnation=number)


@pytest.fixture
def later() -> Iterator[Process]:
    """A process that was started after this one, and lives."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = process_of(child.pid)
        assert process is not None
        yield process
        child.communicate()


@pytest.fixture
def own_process() -> Process:
    process = process_of(os.getpid())
    assert process is not None
    return process


def test_the_kernel_says_who_was_started_first(own_process: Process, later: Process) -> None:
    assert process_of(os.getpid()) == own_process
    assert own_process.is_older_than(replace(own_process, start_ticks=own_process.start_ticks + 1))
    assert not own_process.is_older_than(own_process)
    assert not own_process.is_older_than(replace(own_process, start_ticks=own_process.start_ticks + 1, boot="another"))
    assert not later.is_older_than(own_process)
    assert process_of(2**22 + 1) is None


@pytest.mark.parametrize("is_same_daemon", [True, False])
def test_an_incarnation_that_is_over_does_not_come_back(
    tmp_path: Path, own_process: Process, *, is_same_daemon: bool
) -> None:
    order = Admission(tmp_path, InlineExecutor())
    first, second = allot_incarnation(tmp_path), allot_incarnation(tmp_path)
    order.let_in(own_process)
    if not is_same_daemon:
        order = Admission(tmp_path, InlineExecutor())
    assert "over when incarnation 2 began" in order.rejection_reason(of_incarnation(first), own_process)
    assert order.rejection_reason(of_incarnation(second), own_process) == ""
    assert order.rejection_reason(ATTACH, own_process) == "", "a new one is newer than all"
    assert "incarnation 7" in order.rejection_reason(of_incarnation(second), own_process, known_incarnation=7), (
        "the disk was lost, the ledger knows"
    )


@pytest.mark.parametrize("is_same_daemon", [True, False])
def test_a_process_that_was_started_earlier_and_attaches_later_is_refused(
    tmp_path: Path, own_process: Process, later: Process, *, is_same_daemon: bool
) -> None:
    order = Admission(tmp_path, InlineExecutor())
    earlier = replace(own_process, start_ticks=later.start_ticks - 1)
    assert order.rejection_reason(ATTACH, later) == ""
    order.let_in(later)
    if not is_same_daemon:
        order = Admission(tmp_path, InlineExecutor())
    assert f"process {later.pid} was started later" in order.rejection_reason(ATTACH, earlier)
    assert order.rejection_reason(ATTACH, later) == ""
    assert order.rejection_reason(ATTACH, None) == "", "of a process that can't be seen nothing is known"


def test_who_was_started_later_and_is_gone_holds_nobody_off(tmp_path: Path, own_process: Process) -> None:
    order = Admission(tmp_path, InlineExecutor())
    order.let_in(replace(own_process, start_ticks=own_process.start_ticks + 1))  # its number is another process's now
    assert order.rejection_reason(ATTACH, own_process) == ""


def test_a_child_of_the_learner_at_work_is_refused_whatever_its_environment(
    tmp_path: Path, own_process: Process, later: Process
) -> None:
    order = Admission(tmp_path, InlineExecutor())
    order.let_in(own_process)
    text = f"it is a child of process {own_process.pid}, this region's learner, which is at work"
    assert order.rejection_reason(ATTACH, later, is_attached=True).startswith(text)
    assert order.rejection_reason(ATTACH, later) == "", "the learner has left, and its program starts the next one"
    assert order.rejection_reason(ATTACH, own_process, is_attached=True) == ""
    order.let_in(later)
    assert "was started later" in order.rejection_reason(ATTACH, own_process, is_attached=True)


def test_without_its_file_the_lives_decide(tmp_path: Path, own_process: Process, later: Process) -> None:
    order = Admission(tmp_path, InlineExecutor())
    (tmp_path / HOLDER_NAME).write_text("not a process")
    assert order.rejection_reason(ATTACH, own_process) == ""
    (tmp_path / HOLDER_NAME).unlink()
    (tmp_path / HOLDER_NAME).mkdir()
    order.let_in(later)  # the disk refuses: that is said, and no reason to refuse a learner
    assert "started later" in order.rejection_reason(ATTACH, own_process), "this daemon knows all the same"
    order = Admission(tmp_path, InlineExecutor())
    assert order.rejection_reason(ATTACH, own_process) == ""


def test_an_incarnation_that_was_never_allotted_does_not_come_in(tmp_path: Path, own_process: Process) -> None:
    order = Admission(tmp_path, InlineExecutor())
    newest = allot_incarnation(tmp_path)
    assert order.rejection_reason(of_incarnation(newest), own_process) == ""
    for number in (newest + 1, 2**40):
        assert "was never allotted here, the newest is 1" in order.rejection_reason(of_incarnation(number), own_process)
    assert order.rejection_reason(of_incarnation(newest + 1), own_process, known_incarnation=newest + 1) == ""


def test_a_folder_that_knows_nothing_takes_what_its_learner_says(tmp_path: Path, own_process: Process) -> None:
    assert Admission(tmp_path, InlineExecutor()).rejection_reason(of_incarnation(3), own_process) == ""
