"""Announced pauses, and the last boundaries of a learner that was told to stop, under a fake daemon."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner.attach import Diloco
from diloco_node.learner.boundary import StepBoundaries
from diloco_node.learner.model_state import MERGED_WORK
from diloco_node.learner.pauses import CallbackPause
from diloco_node.shared_memory import BUSY_MAX_S, PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from diloco_node.wire.learner_link import Done, Leaving, OfferApplied, Report, SnapshotReady, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.learner_kit import Toy


def place(folder: Path) -> PlaceMark:
    mark = PlaceMark.decode(request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
    assert mark is not None
    return mark


# ---- pauses ----------------------------------------------------------------------------------------------------------


def test_a_pause_is_there_for_as_long_as_it_lasts_and_the_inner_one_counts(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        before_s = time.monotonic()
        with diloco.busy("evaluation"):
            mark = place(folder)
            assert (mark.pid, mark.activity, mark.limit_s) == (os.getpid(), "evaluation", BUSY_MAX_S)
            assert before_s <= mark.since_s <= time.monotonic()
            with contextlib.suppress(ZeroDivisionError), diloco.busy("saving", at_most_s=7.0):
                assert (place(folder).activity, place(folder).limit_s) == ("saving", 7.0)
                raise ZeroDivisionError
            assert place(folder) == mark
        assert place(folder).activity == ""
        toy.step(diloco)
        assert (place(folder).step, place(folder).activity) == (2, "")


def test_a_pause_begins_with_a_checkpoint_of_the_step_before_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_node.learner.checkpointing.PAUSE_COST_PART", float("inf"))
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=3600.0) as diloco:
        for _ in range(3):
            toy.step(diloco)
        diloco.checkpoint()
        assert place(folder).losses["unsaved_steps"] == 0, "before any further step"
        for _ in range(4):
            toy.step(diloco)
        assert place(folder).checkpoint_step == 3
        with diloco.busy("evaluation"):
            diloco._checkpoints.wait()
        names = sorted(path.name for path in (folder / "learner" / "checkpoints").glob("*.safetensors"))
        assert names[-1] == "learner-00000001-000000000007.safetensors"
        monkeypatch.setattr(diloco._checkpoints._writer, "written", None)
        toy.step(diloco)
        assert place(folder).checkpoint_step >= 3, "while the next one is written the last one counts"


def test_a_name_of_any_length_fits(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco, diloco.busy("ä" * 1000):
        assert place(folder).activity.startswith("ä" * 20)


@pytest.mark.parametrize("is_merging", [False, True])
def test_work_with_the_merged_model_is_a_pause_until_the_next_step(folder: Path, *, is_merging: bool) -> None:
    """A loop may save and upload it, or evaluate it, for as long as it likes."""
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        if is_merging:
            diloco.save_merged(toy.model)
        for _ in range(2):
            toy.step(diloco)
            assert place(folder).activity == ""
            _ = toy.model.state_dict() if is_merging else diloco.global_state_dict()
            assert (place(folder).activity, place(folder).limit_s) == (MERGED_WORK, BUSY_MAX_S)
        with diloco.busy("evaluation"):
            toy.step(diloco)
            assert place(folder).activity == "evaluation"
        toy.step(diloco)
        assert place(folder).activity == ""
        toy.model.state_dict() if is_merging else diloco.global_state_dict()
    assert place(folder).activity == "", "it leaves"


@pytest.mark.parametrize("leave", [lambda diloco: diloco.settle(0.1), lambda diloco: diloco.close()])
def test_a_pause_that_no_step_ends_is_over_before_the_learner_waits_for_merges(
    folder: Path, monkeypatch: pytest.MonkeyPatch, leave: Callable[[Diloco], None]
) -> None:
    toy, activities = Toy(), []
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        diloco.global_state_dict()
        assert place(folder).activity == MERGED_WORK
        for name in ("settle", "are_leaving"):
            method = getattr(StepBoundaries, name)

            def look(*values: Any, method: Any = method) -> Any:
                activities.append(place(folder).activity)
                return method(*values)

            monkeypatch.setattr(StepBoundaries, name, look)
        leave(diloco)
        assert activities == [""]


def test_only_the_loop_announces_its_work_with_the_merged_model_once_it_makes_steps(folder: Path) -> None:
    """Before, the limit would begin to count; and a thread, or a child, may work beside the steps."""
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        diloco.save_merged(toy.model)
        diloco.global_state_dict()
        assert place(folder).activity == "", "no step was made yet"
        toy.step(diloco)
        for work in (toy.model.state_dict, diloco.global_state_dict):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert place(folder).activity == ""
        if (child := os.fork()) == 0:
            try:
                diloco._saves.announce()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert place(folder).activity == ""
        diloco.global_state_dict()
        assert place(folder).activity == MERGED_WORK


def test_the_end_of_an_epoch_saves_no_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs may be short, and a save before each would take a tenth of the time."""
    saved: list[Any] = []
    toy, pause = Toy(), CallbackPause()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer, checkpoint_every_s=3600.0) as diloco:
        monkeypatch.setattr(diloco._checkpoints, "save_before_pause", saved.append)
        toy.step(diloco)
        pause.begin(diloco, "the end of an epoch", is_saving=False)
        assert (place(folder).activity, saved) == ("the end of an epoch", [])
        pause.begin(diloco, "evaluation")
        assert (place(folder).activity, len(saved)) == ("evaluation", 1)
        pause.end()
    pause.begin(diloco, "the end of an epoch", is_saving=False)  # it has left
    pause.end()


@pytest.mark.parametrize("activity", ["", "\0", "  ", None, 7, Path("eval"), "caf\udce9"])
def test_a_pause_without_a_word_for_it_is_a_pause(folder: Path, activity: Any) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        with diloco.busy(activity):
            assert place(folder).activity
        assert place(folder).activity == ""


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(limit_s: float) -> None:
    toy = Toy()
    with pytest.warns(UserWarning, match="training alone"):
        diloco = diloco_node.attach(toy.model, toy.optimizer)
    with (
        pytest.raises(LearnerError, match="give the seconds after which it hangs"),
        diloco.busy("x", at_most_s=limit_s),
    ):
        pass
    with diloco.busy("evaluation"):  # alone there is nobody to tell
        toy.step(diloco)


def test_a_trainers_pauses_end_with_its_next_word(folder: Path) -> None:
    toy, pause = Toy(), CallbackPause()
    pause.begin(None, "evaluation")  # before training
    pause.end()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        for activity in ("evaluation", "saving"):
            pause.begin(diloco, activity)
            assert place(folder).activity == activity
        pause.end()
        pause.end()
        assert place(folder).activity == ""


@pytest.mark.parametrize("raw", [None, b"", bytes(PLACE_BYTES), b"\xff" * PLACE_BYTES, bytes(PLACE_BYTES - 1)])
def test_what_no_learner_wrote_is_no_place(raw: bytes | None) -> None:
    assert PlaceMark.decode(raw) is None


def test_a_place_comes_back_as_it_was_and_says_what_is_lost() -> None:
    mark = PlaceMark(7, step=30, included_step=21, checkpoint_step=12, since_s=3.5, limit_s=60.0, activity="saving")
    assert PlaceMark.decode(replace(mark, is_interrupted=True).encode()) == replace(mark, is_interrupted=True)
    assert PlaceMark.decode(mark.encode()) == mark
    assert mark.losses == {"unsaved_steps": 18, "unmerged_steps": 9}
    assert PlaceMark(7, step=30).losses == {"unsaved_steps": 30, "unmerged_steps": 30}


# ---- leaving ---------------------------------------------------------------------------------------------------------


def asked_to_stop(diloco: Diloco, toy: Toy) -> None:
    diloco._terminate.is_set = True
    toy.step(diloco)
    assert diloco.should_stop


def merges(daemon: FakeDaemon) -> None:
    """What a leader does when it hears that a learner leaves: a merge of each fragment."""
    daemon.wait_for(Leaving)
    for fragment in range(daemon.fragments):
        daemon.want(fragment)
        ready = daemon.wait_for(SnapshotReady, 1 + fragment)
        daemon.commit(fragment, daemon.theta[fragment], ready.contribution.snapshot)


def test_the_last_steps_are_merged_before_the_learner_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", "100")
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        leader = threading.Thread(target=merges, args=(daemon,))
        leader.start()
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            for _ in range(3):
                toy.step(diloco)
            asked_to_stop(diloco, toy)
        leader.join()
        assert max(message.step for message in daemon.said if isinstance(message, Report)) == 4
        applied = {message.fragment: message.position for message in daemon.said if isinstance(message, OfferApplied)}
        assert [applied[fragment].included_step for fragment in range(2)] == [4, 4]
        assert not [message for message in daemon.said if isinstance(message, Done)], "the next process goes on"
        mark = place(folder)
        assert (mark.step, mark.included_step, mark.checkpoint_step) == (4, 4, 4)


def test_who_is_asked_in_an_evaluation_after_the_last_step_leaves_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows that would tell it."""
    monkeypatch.setenv("DILOCO_STOP_S", "100")
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        leader = threading.Thread(target=merges, args=(daemon,))
        leader.start()
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            for _ in range(3):
                toy.step(diloco)
            with diloco.busy("evaluation"):
                signal.raise_signal(signal.SIGTERM)
        leader.join()
        applied = {message.fragment: message.position for message in daemon.said if isinstance(message, OfferApplied)}
        assert [applied[fragment].included_step for fragment in range(2)] == [3, 3]
        assert not [message for message in daemon.said if isinstance(message, Done)], "the next process goes on"


def test_weights_that_are_loaded_after_the_last_step_are_not_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", "100")
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            best = {name: value.clone() for name, value in toy.model.state_dict().items()}
            for _ in range(3):
                toy.step(diloco)
            asked_to_stop(diloco, toy)
            toy.model.load_state_dict(best)
            with pytest.raises(LearnerError, match="weights were loaded"):
                diloco.settle(0.1)
            for fragment in range(daemon.fragments):
                daemon.want(fragment)
        daemon.wait_for(Warned)
        told = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert any("load of the best weights: that is not merged" in text for text in told)
        assert not [message for message in daemon.said if isinstance(message, SnapshotReady)]


def test_a_constraint_after_each_step_takes_nothing_from_the_last_merge(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in what was sent already: no load of other weights after the last step."""
    monkeypatch.setenv("DILOCO_STOP_S", "100")
    monkeypatch.setattr("diloco_node.learner.boundary.LEAVE_PATIENCE_S", 0.5)
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            for _ in range(3):
                with torch.no_grad():
                    for parameter in toy.model.parameters():
                        parameter.mul_(0.999)
                toy.step(diloco)
            asked_to_stop(diloco, toy)
            with torch.no_grad():
                for parameter in toy.model.parameters():
                    parameter.mul_(0.999)
        daemon.wait_for(Leaving)
        assert not [
            message for message in daemon.said if isinstance(message, Warned) and "best weights" in message.text
        ]


@pytest.mark.parametrize(("stop_s", "patience_s"), [("100", 0.2), ("0.25", 100.0)])
def test_a_learner_goes_where_nobody_merges(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stop_s: str, patience_s: float
) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", stop_s)
    monkeypatch.setattr("diloco_node.learner.boundary.LEAVE_PATIENCE_S", patience_s)
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            asked_to_stop(diloco, toy)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 60
        daemon.wait_for(Leaving)


def test_a_learner_of_a_run_that_is_over_does_not_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", "10000")
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.stop_learner()
            while not diloco.should_stop:
                toy.step(diloco)
        daemon.wait_for(Done)
        assert not [message for message in daemon.said if isinstance(message, Leaving)]
