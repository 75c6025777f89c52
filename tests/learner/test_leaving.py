"""`Diloco.finish`, and the parameters that are in the model after the `with` block."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diloco_node
from diloco_node.core.bounds import REASON_BYTES
from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.learner import boundary as boundary_module
from diloco_node.learner import checkpoint as checkpoint_module
from diloco_node.learner import leaving
from diloco_node.learner.attach import Diloco
from diloco_node.learner.boundary import StepBoundaries
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.process_signals import STOP_VARIABLE
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    Done,
    EndWanted,
    Leaving,
    OfferApplied,
    RunAdvanced,
    SnapshotReady,
    Warned,
)
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon, in_background
from tests.kit.learner_kit import Toy, session_of


def model_values(toy: Toy, daemon: FakeDaemon) -> list[np.ndarray]:
    """Per fragment what the model holds."""
    return in_fragments(
        daemon, {name: parameter.detach().cpu().numpy().ravel() for name, parameter in toy.model.named_parameters()}
    )


def holds_result(toy: Toy, daemon: FakeDaemon) -> bool:
    return bytes_of(model_values(toy, daemon)) == bytes_of(daemon.theta)


def bytes_of(vectors: list[np.ndarray]) -> bytes:
    return b"".join(vector.tobytes() for vector in vectors)


def in_fragments(daemon: FakeDaemon, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Values by name, put together as the run cuts them."""
    assert daemon.manifest is not None
    return [
        np.concatenate([values[piece.name][piece.value_start : piece.value_stop] for piece in fragment.pieces])
        for fragment in daemon.manifest.fragments
    ]


def in_other_thread(call: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(PATIENCE_S)


def steps_until_stop(toy: Toy, diloco: Diloco) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not diloco.should_stop:
        assert time.monotonic() < deadline_s
        toy.step(diloco)
        time.sleep(0.001)


@pytest.mark.timeout(60)
def test_a_handler_may_save_the_model_in_the_middle_of_a_boundary(folder: Path) -> None:
    """As SLURM's does before it requeues: the thread that it interrupts holds the lock."""
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        with session_of(diloco).link.lock:
            assert diloco.global_state_dict()


@pytest.mark.parametrize(("stop_s", "versions_after_s"), [(20.0, 0.0), (20.0, 0.5), (1.0, 3.0)])
def test_a_run_that_ends_while_a_process_waits_to_leave_leaves_its_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stop_s: float, versions_after_s: float
) -> None:
    """Its last versions are waited for as long as the process may stay."""
    monkeypatch.setenv(STOP_VARIABLE, str(stop_s))
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.want(0)
            toy.steps_until(diloco, daemon, SnapshotReady, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            toy.step(diloco)
            assert diloco.should_stop
            assert diloco.is_interrupted

            def end() -> None:
                time.sleep(0.3)  # the block is left meanwhile, and waits for the merge
                daemon.stop_learner("run.steps is reached", tuple(version + 1 for version in daemon.versions))
                time.sleep(versions_after_s)
                for fragment, theta in enumerate(daemon.theta):
                    daemon.commit(fragment, theta + 1, 1 if fragment == 0 else NO_SNAPSHOT)

            thread = threading.Thread(target=end)
            thread.start()
        thread.join(PATIENCE_S)
        is_late = versions_after_s > stop_s  # else a script would save this model as the result
        assert (diloco.is_interrupted, holds_result(toy, daemon)) == (is_late, not is_late)
        assert isinstance(daemon.said[-1], Done) is not is_late


@pytest.mark.timeout(60)
def test_a_process_that_must_go_before_the_last_versions_came_is_not_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits for them; `done` would leave the region without a result."""
    monkeypatch.setenv(STOP_VARIABLE, "1")
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            daemon.stop_learner("run.steps is reached", tuple(version + 1 for version in daemon.versions))
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            steps_until_stop(toy, diloco)
            assert not diloco.is_interrupted
        timer.join()
        assert diloco.is_interrupted
        assert not any(isinstance(message, Done) for message in daemon.said)


@pytest.mark.parametrize("is_before_busy", [False, True])
def test_the_last_steps_are_merged_while_the_last_checkpoint_is_being_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_before_busy: bool
) -> None:
    """That of a large model takes all the time that a stop leaves, and the one before it may be under way."""
    monkeypatch.setenv(STOP_VARIABLE, "10")
    toy, is_merged, write = Toy(), threading.Event(), checkpoint_module.write_checkpoint

    def write_slowly(*given: Any, **how: Any) -> None:
        is_merged.wait(12.0)
        write(*given, **how)

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", write_slowly)
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:

        def merge() -> None:
            daemon.wait_for(Leaving)
            for fragment in range(2):
                daemon.want(fragment)
            for number in (1, 2):
                contribution = daemon.wait_for(SnapshotReady, number).contribution
                theta = daemon.theta[contribution.fragment]
                daemon.commit(contribution.fragment, theta + 1, contribution.snapshot)
            daemon.wait_for(OfferApplied, 2 + 2)
            is_merged.set()

        in_background(merge)
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            if is_before_busy:
                diloco._save(diloco._checkpoints.save)
            toy.step(diloco)
            os.kill(os.getpid(), signal.SIGTERM)
            toy.step(diloco)
        assert is_merged.is_set()
        place = session_of(diloco).place
        assert (place.included_step, place.checkpoint_step) == (3, 3)
        assert diloco.is_interrupted


def test_last_steps_that_nobody_asks_for_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy()
    monkeypatch.setattr(boundary_module, "LEAVE_PATIENCE_S", 0.1)
    monkeypatch.setenv(STOP_VARIABLE, "100")
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        os.kill(os.getpid(), signal.SIGTERM)
        toy.step(diloco)
    assert "the last steps of this learner are in no merge: no leader asks for them" in caplog.text
    assert session_of(diloco).place.checkpoint_step == 1


def test_a_learner_of_a_removed_region_has_no_result_to_wait_for(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            daemon.stop_learner("the region was removed")
            steps_until_stop(toy, diloco)
            os.kill(os.getpid(), signal.SIGTERM)
        assert not diloco.is_interrupted
        assert isinstance(daemon.wait_for(Done), Done)


# ---- the result ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stop_first", [False, True])
def test_the_model_holds_the_final_parameters_without_own_steps(folder: Path, is_stop_first: bool) -> None:
    """The daemon's stop may overtake its last versions, whose copies take a moment."""
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        for _ in range(3):
            toy.step(diloco)
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        if is_stop_first:
            daemon.stop_learner(versions=(1, 1))
        stepping = in_background(lambda: steps_until_stop(toy, diloco))
        daemon.commit(0, daemon.theta[0] + 1, 1)
        daemon.commit(1, daemon.theta[1] - 1, -1)
        if not is_stop_first:
            daemon.wait_for(OfferApplied, 2 + 2)
            daemon.stop_learner(versions=(1, 1))
        stepping.result(PATIENCE_S)
        assert holds_result(toy, daemon), "also for a script that never leaves a `with` block, or saves within it"
        for _ in range(5):
            toy.step(diloco)
            assert holds_result(toy, daemon), "also for a loop that goes on to its epoch's end, and saves there"
        diloco.close()
        assert holds_result(toy, daemon)
        assert daemon.wait_for(Done).step == diloco.steps
        assert [message.text for message in daemon.said if isinstance(message, Warned)] == [leaving.LATE_STEP]


def test_what_is_loaded_at_the_end_is_replaced_by_the_result_and_that_is_told(folder: Path) -> None:
    toy = Toy()
    best = {name: 3 * value for name, value in toy.model.state_dict().items()}
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            for _ in range(5):
                toy.step(diloco)
            daemon.stop_learner(versions=(0, 0))
            steps_until_stop(toy, diloco)
            toy.model.load_state_dict(best)
        assert holds_result(toy, daemon)
        (told,) = [message.text for message in daemon.said if isinstance(message, Warned)]
        assert "was written to after the last step, such as by a load of the best weights: the run's final" in told


def test_weights_that_are_loaded_before_a_loop_leaves_early_are_told(folder: Path) -> None:
    toy = Toy()
    best = {name: value.clone() for name, value in toy.model.state_dict().items()}
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            toy.model.load_state_dict(best)
        daemon.wait_for(Done)
        told = " ".join(message.text for message in daemon.said if isinstance(message, Warned))
        assert "was written to after the last step, such as by a load of the best weights: that is not merged" in told


@pytest.mark.parametrize("error", [None, KeyError("rows")])
def test_a_learner_that_leaves_early_says_whose_weights_are_left(
    folder: Path, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    toy = Toy()
    with FakeDaemon(folder), contextlib.suppress(KeyError), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        if error is not None:
            raise error
    assert "the run goes on: the model does not hold its merged parameters. `export` has them" in caplog.text


def test_what_other_threads_save_in_mid_run_is_one_state_of_the_run(folder: Path) -> None:
    """A version that is applied meanwhile would be in it by half, and its memory is the daemon's next one."""
    toy, states, is_over = Toy(), list[dict[str, torch.Tensor]](), threading.Event()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            diloco.save_merged(toy.model)

            def save() -> None:
                while not is_over.is_set():
                    states.append({name: value.clone() for name, value in toy.model.state_dict().items()})
                    states.append(diloco.global_state_dict())

            savers = [in_background(save) for _ in range(2)]
            known = [bytes_of(daemon.theta)]
            for number in range(20):
                daemon.commit(number % 2, daemon.theta[number % 2] + 1, -1)
                toy.steps_until(diloco, daemon, OfferApplied, 3 + number)
                known.append(bytes_of(daemon.theta))
            is_over.set()
            for saver in savers:
                saver.result(PATIENCE_S)
        assert states
        for state in states:
            values = {name: value.numpy().ravel() for name, value in state.items()}
            assert bytes_of(in_fragments(daemon, values)) in known


def test_the_link_does_not_describe_the_learner_while_it_takes_the_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, seen = Toy(), list[bool]()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.stop_learner(versions=(0, 0))
            steps_until_stop(toy, diloco)
            session, apply = diloco._session, LearnerFragments.apply
            assert session is not None

            def looked_at(self: LearnerFragments, *args: Any) -> OfferApplied:
                # Another thread, for this one would get it again.
                seen.append(not in_other_thread(lambda: session.link.lock.acquire(blocking=False)))
                return apply(self, *args)

            monkeypatch.setattr(LearnerFragments, "apply", looked_at)
        assert seen == [True, True]


def test_a_learner_that_comes_after_the_end_takes_the_result_and_leaves(folder: Path) -> None:
    toy, first = Toy(), Toy(seed=5)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(first.model):
            pass
        theta = [np.full_like(part, 0.125) for part in daemon.theta]
    with FakeDaemon(folder, theta=theta, versions=[4, 4]) as daemon:
        attached = in_background(lambda: diloco_node.attach(toy.model, toy.optimizer))
        daemon.wait_attached()
        daemon.stop_learner(versions=(4, 4))
        with attached.result(PATIENCE_S) as diloco:
            steps_until_stop(toy, diloco)
        assert [values.tobytes() for values in model_values(toy, daemon)] == [part.tobytes() for part in theta]


def test_a_model_in_another_type_holds_the_rounded_result(folder: Path) -> None:
    toy = Toy()
    toy.model.to(torch.bfloat16)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.commit(0, daemon.theta[0] + np.float32(0.1), -1)
            daemon.stop_learner(versions=(1, 0))
            steps_until_stop(toy, diloco)
        values = torch.cat([parameter.detach().float().ravel() for parameter in toy.model.parameters()])
        result = torch.from_numpy(np.concatenate(daemon.theta)).to(torch.bfloat16).float()
        assert sorted(values.tolist()) == sorted(result.tolist())


def test_versions_that_do_not_come_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "FINAL_WAIT_S", 0.05)
    waits: list[float] = []
    settle = StepBoundaries.settle

    def note(boundaries: StepBoundaries, seconds: float, **options: Any) -> Any:
        waits.append(seconds)
        return settle(boundaries, seconds, **options)

    monkeypatch.setattr(StepBoundaries, "settle", note)
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.stop_learner(versions=(7, 7))
            steps_until_stop(toy, diloco)
            before = toy.flat()
        assert toy.flat() == before
        assert len(waits) > 1
        assert [seconds > 0 for seconds in waits] == [True] + [False] * (len(waits) - 1), "once, over all that wait"
        assert "its last versions did not come here: take final.safetensors" in daemon.wait_for(Warned).text


def test_a_run_that_goes_on_leaves_the_own_parameters(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            before = toy.flat()
        assert toy.flat() == before
        assert daemon.wait_for(Done).step == 1


def test_a_learner_alone_past_the_end_waits_with_its_steps_until_somebody_is_there(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        daemon.send(RunAdvanced(200, 1.0, "the run is at its end here"))
        stepping = in_background(lambda: steps_until_stop(toy, diloco))
        daemon.want(0)
        daemon.want(1)
        daemon.wait_for(SnapshotReady, 2)
        deadline_s = time.monotonic() + PATIENCE_S
        while "no further step for now: the run is at its end here" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        steps = diloco.steps
        daemon.commit(0, daemon.theta[0] + 1, 1)
        daemon.wait_for(OfferApplied, 3)
        assert diloco.steps == steps, "it waits, and its last steps are merged all the same"
        daemon.send(RunAdvanced(200, 1.0))
        while diloco.steps == steps:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        daemon.send(RunAdvanced(200, 1.0, "the run is at its end here"))
        daemon.stop_learner("the run is finished")
        stepping.result(PATIENCE_S)
    assert diloco.stop_reason == "the run is finished"


# ---- the wish --------------------------------------------------------------------------------------------------------


def test_a_script_says_once_why_the_run_should_end_and_trains_until_it_does(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        diloco.finish("the loss is flat")
        diloco.finish("again")
        toy.step(diloco)
        assert daemon.wait_for(EndWanted).reason == "the loss is flat"
        assert not diloco.should_stop, "the others may want to go on"
        daemon.stop_learner("the loss is flat", (0, 0))
        steps_until_stop(toy, diloco)
        assert diloco.stop_reason == "the loss is flat"
        assert sum(isinstance(message, EndWanted) for message in daemon.said) == 1


def test_each_daemon_is_told(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        diloco.finish("enough")
        toy.step(diloco)
        first.wait_for(EndWanted)
        theta = first.theta
    with diloco, FakeDaemon(folder, theta=theta) as second:
        second.wait_attached()
        toy.steps_until(diloco, second, EndWanted, 1)
        assert second.wait_for(EndWanted).reason == "enough"


def test_a_wish_just_before_leaving_is_told_too(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            diloco.finish("the data is used up")
        daemon.wait_for(Done)
        assert daemon.wait_for(EndWanted).reason == "the data is used up"
    with pytest.raises(LearnerError, match=r"finish\(\) after the `with` block"):
        diloco.finish("too late")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("", "the training script wants it"),
        ("  ", "the training script wants it"),
        ("ä" * 4000, "ä" * (REASON_BYTES // 2)),
        ("half \ud800 a letter", "half ? a letter"),
        (0.25, "0.25"),
    ],
    ids=range(5),
)
def test_any_reason_is_told_as_far_as_it_goes(folder: Path, reason: str, told: str) -> None:
    with FakeDaemon(folder) as daemon, diloco_node.attach(Toy().model) as diloco:
        diloco.finish(reason)
        diloco.step(tokens=1)
        assert daemon.wait_for(EndWanted).reason == told


def test_without_a_daemon_it_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    with pytest.warns(UserWarning, match="training alone"):
        diloco = diloco_node.attach(Toy().model)
    with diloco:
        diloco.finish("enough")
        diloco.finish("more than enough")
        assert (diloco.should_stop, diloco.stop_reason) == (True, "enough")


# ---- the run's step --------------------------------------------------------------------------------------------------


def test_the_runs_step_goes_neither_back_nor_beyond_the_runs_end(folder: Path) -> None:
    toy, steps = Toy(), []
    daemon = FakeDaemon(folder, global_step=30, steps_max=40)
    with daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        for told in (30, 35, 12, 39, 400):
            daemon.send(RunAdvanced(told, min(1.0, told / 40)))
            for _ in range(6):
                toy.step(diloco)
                time.sleep(0.002)
                steps.append(diloco.global_step)
        assert steps == sorted(steps)
        assert (steps[0] >= 30, max(steps)) == (True, 40)
        assert diloco.steps == 30, "its own"
