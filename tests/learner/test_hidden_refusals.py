"""Refusals that a script catches, before it ends with exit code 0: the supervisor reads of them all the same."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.leaving import note_refusal_of_rank
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon
from tests.kit.waiting import until
from tests.kit.watched_model import load, make, net, train


def mark_of(folder: Path) -> PlaceMark | None:
    """What the supervisor reads."""
    return PlaceMark.decode(request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])


def hide_in_the_loop(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: diloco_node.Diloco) -> None:
    for _ in range(3):
        with contextlib.suppress(Exception):
            train(model, optimizer, diloco)
    diloco.close()


def hide_outside_of_the_block(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: diloco_node.Diloco) -> None:
    with contextlib.suppress(Exception), diloco:
        train(model, optimizer, diloco)


def hide_and_never_close(model: nn.Module, optimizer: torch.optim.Optimizer, diloco: diloco_node.Diloco) -> None:
    with contextlib.suppress(Exception):
        train(model, optimizer, diloco)
    with contextlib.suppress(Exception):
        diloco.busy("evaluation").__enter__()


@pytest.mark.parametrize("hide", [hide_in_the_loop, hide_outside_of_the_block, hide_and_never_close])
def test_a_refusal_that_a_script_hides_is_in_its_last_mark(folder: Path, hide: Callable[..., None]) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder):
        diloco = diloco_node.attach(model, optimizer)
        train(model, optimizer, diloco, 3)
        assert (before := mark_of(folder)) is not None
        assert not before.fault
        load(model)
        hide(model, optimizer, diloco)
        mark = mark_of(folder)
        diloco.close()
        assert mark is not None
        assert mark.fault.startswith("LearnerError: '0.weight', and others, were changed between two steps")
        assert not mark.has_left
        optimizer = make(model := net())
        with diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco)
        assert (last := mark_of(folder)) is not None
        assert (last.fault, last.has_left) == ("", True), "another attach() is another beginning"


SCRIPT = """
import sys, contextlib, multiprocessing
import diloco_node
from tests.kit.watched_model import make, net, train
def attached():
    diloco = diloco_node.attach(model := net(), optimizer := make(model))
    train(model, optimizer, diloco)
    return diloco
def below(work):
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
def fail(): attached(), 1 / 0
def leave(): attached(), sys.exit(0)
def hide():
    with contextlib.suppress(ValueError), attached():
        raise ValueError("no space")
def retry():
    try:
        raise MemoryError
    except MemoryError:
        below(attached)
def hide_at_last():
    with attached():
        pass
    hide()
"""


@pytest.mark.parametrize(
    ("end", "has_ended"),
    [
        ("attached()", True),
        ("below(leave)", True),
        ("retry()", True),
        ("fail()", False),
        ("below(fail)", False),
        ("hide()", False),
        ("hide_at_last()", False),
    ],
)
def test_a_script_that_never_closes_has_ended_unless_something_ends_it(folder: Path, end: str, has_ended: bool) -> None:
    """A shell above it may hide the exit code: the mark does not."""
    with FakeDaemon(folder):
        subprocess.run([sys.executable, "-c", SCRIPT + end], timeout=PATIENCE_S, check=False)
        assert (mark := mark_of(folder)) is not None
        assert mark.step == 1
        assert (mark.has_ended, mark.is_over, mark.fault) == (has_ended, has_ended, "")


def test_an_exception_of_the_scripts_own_that_it_catches_is_its_own_affair(folder: Path) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder):
        with contextlib.suppress(ValueError), diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco)
            raise ValueError("the loss is flat")
        assert (mark := mark_of(folder)) is not None
        assert not mark.fault


def test_a_refusal_by_attach_is_noted_and_that_of_a_second_learner_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with contextlib.suppress(Exception):
        diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    assert (mark := mark_of(folder)) is not None
    assert mark.fault.startswith("LearnerError: LBFGS can't train in a run")
    assert "attach() refuses this script: LBFGS can't train in a run" in caplog.text
    optimizer = make(model)
    with FakeDaemon(folder), diloco_node.attach(model, optimizer) as diloco:
        train(model, optimizer, diloco)
        with pytest.raises(LearnerError, match="a second time"):
            diloco_node.attach(net(), None)
        assert (mark := mark_of(folder)) is not None
        assert not mark.fault
    with pytest.raises(LearnerError, match="LBFGS"):
        diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    assert (mark := mark_of(folder)) is not None
    assert (mark.fault, mark.has_left) == ("", True), "it has had its part, and may do what it wants"
    monkeypatch.setenv("DILOCO_SUPERVISOR", "")
    with pytest.raises(ConfigError, match="start through"):
        diloco_node.attach(model)


def test_what_a_closed_learner_refuses_is_no_crash_of_the_one_that_has_left(folder: Path) -> None:
    optimizer = make(model := net())
    with FakeDaemon(folder):
        with contextlib.suppress(LearnerError), diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco)
            diloco.close()
            diloco.step(tokens=1)
        assert (mark := mark_of(folder)) is not None
        assert (mark.fault, mark.has_left) == ("", True)


def test_a_step_that_can_not_be_counted_is_a_refusal_though_a_script_hides_it(folder: Path) -> None:
    optimizer = make(model := net())
    with FakeDaemon(folder):
        diloco = diloco_node.attach(model, optimizer, step="auto")
        model.eval()
        model(torch.randn(4, 6)).square().mean().backward()
        with contextlib.suppress(LearnerError):
            optimizer.step()
        assert diloco.should_stop
        diloco.close()
        assert (mark := mark_of(folder)) is not None
        assert "was not called in training mode" in mark.fault


def test_a_step_with_tokens_that_are_no_number_is_a_refusal_though_a_script_hides_it(folder: Path) -> None:
    """Nobody would hear of its steps, and no merge would have them."""
    optimizer = make(model := net())
    with FakeDaemon(folder):
        diloco = diloco_node.attach(model, optimizer)
        train(model, optimizer, diloco, 3)
        for _ in range(2):
            with pytest.raises(LearnerError, match="give a whole number"):
                diloco.step(tokens=2.5)  # type: ignore[arg-type]
        assert diloco.should_stop
        with contextlib.suppress(LearnerError):
            diloco.close()
        assert (mark := mark_of(folder)) is not None
        assert mark.fault.startswith("LearnerError: step(tokens=2.5): give a whole number")


@pytest.mark.parametrize("options", [{"checkpoint_every": 60}, {"buffers": 5}])
def test_an_attach_that_fails_by_any_exception_is_noted(folder: Path, options: dict[str, Any]) -> None:
    """A script that catches it trains alone, whether the call was wrong or the device had no memory."""
    optimizer = make(model := net())
    with FakeDaemon(folder):
        with pytest.raises(TypeError) as error:
            diloco_node.attach(model, optimizer, **options)
        assert (mark := mark_of(folder)) is not None
        assert mark.fault == f"{type(error.value).__name__}: {error.value}"


def test_an_attach_after_a_refusal_takes_its_word_back_before_the_daemon_answers(folder: Path) -> None:
    """The other regions may take their time, and the supervisor ends who was refused."""
    optimizer = make(model := net())
    with pytest.raises(LearnerError, match="LBFGS"):
        diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    waits = threading.Thread(target=lambda: diloco_node.attach(model, optimizer).close())
    waits.start()
    try:
        until(lambda: (mark := mark_of(folder)) is not None and not mark.fault)
    finally:
        with FakeDaemon(folder):
            waits.join()


def test_a_refusal_on_another_rank_is_in_the_mark_of_rank_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for it, and its counters stand still: the supervisor would speak of a hang."""
    area = request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)
    error = LearnerError("step(tokens=0.5): give a whole number")
    note_refusal_of_rank(error)
    assert mark_of(folder) is None, "nobody has begun"
    mark = PlaceMark(os.getppid(), step=9)
    area[:] = mark.encode()
    note_refusal_of_rank(error)
    assert mark_of(folder) == replace(mark, fault=f"LearnerError: {error}")
    area[:] = (left := replace(mark, has_left=True)).encode()
    note_refusal_of_rank(error)
    assert mark_of(folder) == left
    monkeypatch.delenv("DILOCO_SUPERVISOR")
    note_refusal_of_rank(error)  # a rank on a machine without a supervisor


def test_a_refusal_is_no_word_about_a_learner_in_another_process(folder: Path) -> None:
    """Another rank, or the process that has started this one."""
    area = request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)
    mark = PlaceMark(os.getppid(), step=9, has_left=True)
    area[:] = mark.encode()
    model = net()
    with pytest.raises(LearnerError, match="LBFGS"):
        diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    assert mark_of(folder) == mark
    area[:] = PlaceMark(2**22 + 1, step=9, has_left=True).encode()
    with pytest.raises(LearnerError, match="LBFGS"):
        diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    assert (last := mark_of(folder)) is not None
    assert (last.pid, last.has_left, bool(last.fault)) == (2**22 + 1, True, True), "of which life the supervisor knows"
    area[:] = PlaceMark(2**22 + 1, step=9).encode()
    with pytest.raises(LearnerError, match="LBFGS"):
        diloco_node.attach(model, torch.optim.LBFGS(model.parameters()))
    assert (last := mark_of(folder)) is not None
    assert (last.pid, bool(last.fault)) == (os.getpid(), True), "that process is of a life before"


def test_a_second_attach_that_the_daemon_refuses_is_no_crash_of_the_learner_that_has_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make(model := net())
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer) as diloco:
            train(model, optimizer, diloco)
        monkeypatch.setattr(daemon, "rejection_reason", lambda *_: "this is not the run's model")
        for _ in range(2):
            with pytest.raises(LearnerError, match="refused this learner: this is not the run's model"):
                diloco_node.attach(nn.Linear(2, 2))
            assert (mark := mark_of(folder)) is not None
            assert (mark.fault, mark.has_left) == ("", True), "it has had its part, and may do what it wants"
        monkeypatch.setattr(daemon, "rejection_reason", lambda *_: "")
        with diloco_node.attach(model, optimizer) as diloco:
            assert (mark := mark_of(folder)) is not None
            assert (mark.fault, mark.has_left) == ("", False)
            train(model, optimizer, diloco)


@pytest.mark.parametrize("has_life_before", [False, True])
def test_an_attach_that_the_daemon_refuses_at_first_is_a_crash(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_life_before: bool
) -> None:
    """In a container of its own the learner has the same number in each life, also that of the mark before."""
    if has_life_before:
        with request_area(Path(os.environ["DILOCO_SUPERVISOR"]), PLACE_AREA, PLACE_BYTES) as area:
            area[:] = PlaceMark(os.getpid(), step=9, has_left=True).encode()
        monkeypatch.setattr("diloco_node.learner.leaving._leavers", set())
    with FakeDaemon(folder) as daemon:
        monkeypatch.setattr(daemon, "rejection_reason", lambda *_: "this is not the run's model")
        with pytest.raises(LearnerError, match="refused this learner"):
            diloco_node.attach(nn.Linear(2, 2))
    assert (mark := mark_of(folder)) is not None
    assert "this is not the run's model" in mark.fault
    assert not mark.has_left
