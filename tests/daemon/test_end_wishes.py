"""Wishes for the run's end outlive a daemon, and nothing else."""

from pathlib import Path

import pytest

from diloco_node.core.events import FinalWritten, FinishOrdered, LearnerAttached
from diloco_node.core.types import LearnerStatus
from diloco_node.daemon.end_wishes import WISHES_NAME, EndWishes

VOTE = FinishOrdered("flat", is_order=False)
ORDER = FinishOrdered("\x01" * 1024)


def attached(incarnation: int) -> LearnerAttached:
    return LearnerAttached(LearnerStatus(incarnation, 0, 0, 0, ()), (), ())


def test_a_vote_lasts_until_the_next_life_of_the_learner_and_an_order_until_the_end(tmp_path: Path) -> None:
    wishes = EndWishes(tmp_path)
    assert wishes.of_last_life() == []
    for event in (attached(3), VOTE, attached(3)):
        wishes.note(event)
    assert EndWishes(tmp_path).of_last_life() == [VOTE], "its learner may have left for good"
    later = EndWishes(tmp_path)
    for event in (*later.of_last_life(), ORDER):
        later.note(event)
    assert EndWishes(tmp_path).of_last_life() == [ORDER, VOTE]
    later.note(attached(4))
    assert EndWishes(tmp_path).of_last_life() == [ORDER]
    later.note(FinalWritten())
    assert EndWishes(tmp_path).of_last_life() == []


@pytest.mark.parametrize("text", ["", "[]", '{"order": 5, "vote": null}', '{"order": "%s"}' % ("x" * 1025), "[" * 9999])
def test_a_file_of_somebody_else_is_no_wish(tmp_path: Path, text: str) -> None:
    (tmp_path / WISHES_NAME).write_text(text)
    assert EndWishes(tmp_path).of_last_life() == []


def test_a_disk_that_refuses_costs_the_memory_of_it_alone(tmp_path: Path) -> None:
    wishes = EndWishes(tmp_path / "gone")
    wishes.note(ORDER)
    assert wishes.of_last_life() == [ORDER]
