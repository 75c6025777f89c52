"""The thread beside the loop: jobs in their order, and a failure said in the words that it has."""

import threading
from collections.abc import Iterator

import pytest

from diloco_node.errors import LearnerError
from diloco_node.learner.worker import BackgroundWorker
from tests.kit.fake_daemon import PATIENCE_S


@pytest.fixture
def worker() -> Iterator[BackgroundWorker]:
    made = BackgroundWorker()
    yield made
    made.close()


def test_jobs_are_done_in_the_order_in_which_they_were_asked_for(worker: BackgroundWorker) -> None:
    done: list[int] = []
    for number in range(3):
        worker.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert worker.wait_for(lambda: tuple(done)) == (0, 1, 2)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LearnerError("another rank has ended"), "another rank has ended"),
        (ZeroDivisionError("by 0"), "the encoder thread ended: ZeroDivisionError('by 0')"),
    ],
)
def test_what_ended_it_is_raised_where_the_loop_is(worker: BackgroundWorker, error: Exception, said: str) -> None:
    def fail() -> None:
        raise error

    worker.put(fail)
    with pytest.raises(LearnerError) as caught:
        worker.wait_for(lambda: None)
    assert str(caught.value) == said


def test_a_closed_worker_says_so_to_who_would_wait_for_ever(worker: BackgroundWorker) -> None:
    worker.close()
    said: list[str] = []

    def wait() -> None:
        try:
            worker.wait_for(lambda: None)
        except LearnerError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(PATIENCE_S)
    assert said == ["this learner has left: nothing is gathered from other ranks any more"]
