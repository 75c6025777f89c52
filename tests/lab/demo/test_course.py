"""lab/demo/course.py: what a sample says of a region whose daemon or learner is dead, or stands still."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_node.lab.chaos.story import LifeState, RegionSample, life
from diloco_node.lab.demo.course import ANSWER_S, CourseRecorder
from diloco_node.lab.demo.region_processes import RegionProcess
from tests.kit.chaos_kit import SLEEP
from tests.kit.waiting import until


class MadeUpCourse:
    """A region whose status is set, and whose learner is a process that sleeps."""

    def __init__(self) -> None:
        self.child = subprocess.Popen(SLEEP)
        self.region = RegionProcess("a", 0, Path())
        self.recorder = CourseRecorder()
        self.answer({"incarnation": 1, "step": 7, "attached_step": 2})

    def answer(self, learner: dict[str, Any] | None) -> None:
        pids = {"learner": self.child.pid if learner is not None else None}
        self.region.status = {"learner": learner, "pids": pids, "rounds_committed": 3, "tokens_merged": 90}
        self.region.answered_s = time.monotonic()

    def take(self) -> RegionSample:
        self.recorder.take([self.region])
        return self.recorder.samples[-1].regions["a"]

    def state(self) -> LifeState:
        """Of the last sample alone."""
        return life("a", self.recorder.samples[-1:], [], end_ns=self.recorder.samples[-1].at_ns + 1)[0].state


@pytest.fixture
def course() -> Iterator[MadeUpCourse]:
    made = MadeUpCourse()
    try:
        yield made
    finally:
        made.child.kill()
        made.child.wait()


def test_what_a_region_answers_is_in_the_sample(course: MadeUpCourse) -> None:
    assert course.take() == RegionSample(True, True, incarnation=1, step=7, attached_step=2, rounds=3, tokens_merged=90)
    assert course.state() is LifeState.TRAINING


@pytest.mark.parametrize("age_s", [math.inf, ANSWER_S + 0.01])
def test_a_daemon_that_does_not_answer_any_more_leaves_its_learner_alone(course: MadeUpCourse, age_s: float) -> None:
    """A daemon that stands still lets the question wait for seconds; one that is dead refuses it at once."""
    assert course.take().has_daemon
    course.region.answered_s = time.monotonic() - age_s
    sample = course.take()
    assert (sample.has_daemon, sample.has_learner, sample.step) == (False, True, 7)
    assert course.state() is LifeState.ALONE


def test_a_learner_whose_daemon_is_another_one_by_now_lives_on(course: MadeUpCourse) -> None:
    """The new daemon answers, and knows no learner until that has attached again."""
    course.take()
    course.answer(None)
    sample = course.take()
    assert (sample.has_learner, sample.incarnation, sample.step) == (True, 1, 7)
    assert course.state() is LifeState.ALONE
    course.child.kill()
    course.child.wait()
    assert not course.take().has_learner
    assert course.state() is LifeState.DEAD


def test_a_learner_that_stands_still_does_not_train(course: MadeUpCourse) -> None:
    course.take()
    os.kill(course.child.pid, signal.SIGSTOP)
    until(lambda: course.take().is_stopped)
    assert course.state() is LifeState.STOPPED
    os.kill(course.child.pid, signal.SIGCONT)
    until(lambda: not course.take().is_stopped)
    assert course.state() is LifeState.TRAINING


def test_the_clock_begins_when_all_train(course: MadeUpCourse) -> None:
    course.take()
    course.recorder.begin()
    course.take()
    before, after = (one.at_ns for one in course.recorder.samples)
    assert before < 0 <= after <= course.recorder.now_ns()


def test_a_region_that_joins_is_in_the_samples_from_its_first_learner_on(course: MadeUpCourse) -> None:
    course.region.config = Path("a.toml")
    course.region.status = {}
    course.recorder.take([course.region])
    assert course.recorder.samples[-1].regions == {}
    assert (
        life("a", course.recorder.samples, [], end_ns=course.recorder.samples[-1].at_ns + 1)[0].state
        is LifeState.OUTSIDE
    )
    course.answer({"incarnation": 1, "step": 7, "attached_step": 2})
    assert course.take().step == 7
