"""`diloco_node.attach` when something ends: the daemon, the learner's process, the loop."""

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import diloco_node
from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.learner.boundary import StepBoundaries
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.process_signals import LearnerPlace
from diloco_node.shared_memory import MemoryStore
from diloco_node.storage.trained import read_trained
from diloco_node.wire.learner_link import (
    Attach,
    Done,
    EndWanted,
    Failed,
    OfferApplied,
    Refuse,
    Report,
    SnapshotReady,
    Warned,
)
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon, in_background
from tests.kit.learner_kit import Toy, session_of
from tests.kit.waiting import until

# ---- the daemon dies -------------------------------------------------------------------------------------------------


def test_learner_goes_on_without_a_daemon_and_tells_the_next_one_where_it_is(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as first:
        attached = in_background(lambda: diloco_node.attach(toy.model, toy.optimizer))
        diloco = attached.result(PATIENCE_S)
        toy.step(diloco)
        first.want(0)
        toy.steps_until(diloco, first, SnapshotReady, 1)
        ready = first.wait_for(SnapshotReady)
        bytes_before = first.encoded(0)
        theta, versions = first.theta, first.versions
    with diloco:
        for _ in range(20):
            toy.step(diloco)  # nobody is there
        steps = diloco.steps
        with FakeDaemon(folder, codec=Codec.FP32, theta=theta, versions=versions) as second:
            attach = second.wait_attached()
            assert (attach.incarnation, attach.run_id, attach.step, attach.tokens) == (1, "run-1", steps, 7 * steps)
            assert [position.base_version for position in attach.positions] == [0, 0]
            assert attach.snapshots == (ready.contribution.snapshot, -1)
            # The new daemon opens the round again: the same snapshot, the same bytes.
            second.want(0)
            toy.steps_until(diloco, second, SnapshotReady, 1)
            assert second.wait_for(SnapshotReady) == ready
            assert second.encoded(0) == bytes_before
            second.commit(0, theta[0] - second.decoded(0), ready.contribution.snapshot)
            toy.steps_until(diloco, second, OfferApplied, 1)
            assert second.wait_for(OfferApplied).position.included_step == ready.contribution.step_to
            diloco.close()
            assert read_trained(folder)[-1].steps == diloco.steps


def test_offer_of_a_dead_daemon_is_void(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        link = session_of(diloco).link
        first.commit(0, first.theta[0] + 1, -1)
        until(lambda: link.waiting_commands)
        theta = [part.copy() for part in first.theta]
    with diloco, FakeDaemon(folder, theta=[theta[0] + 2, theta[1]], versions=[3, 0]) as second:
        second.wait_attached()
        toy.steps_until(diloco, second, OfferApplied, 1)
        applied = [message for message in second.said if isinstance(message, OfferApplied)]
        assert [(message.fragment, message.version) for message in applied] == [(0, 3)]


def test_daemon_of_another_run_stops_the_learner(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        theta = first.theta

    class OtherRun(FakeDaemon):
        def learner_attached(self, attach: Attach) -> None:
            super().learner_attached(Attach(**{**_fields(attach), "incarnation": 77}))

    with diloco, OtherRun(folder, theta=theta) as second:
        second.wait_attached()
        with pytest.raises(LearnerError, match="restart the learner"):
            toy.steps_until(diloco, second, Done, 1)


def test_a_learner_attaches_to_no_daemon_that_shares_another_memory(folder: Path) -> None:
    """It has outlived its supervisor: what it writes is not what that daemon would merge."""
    toy = Toy()
    with FakeDaemon(folder) as first:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        theta = first.theta
    with diloco, MemoryStore(folder / "memory.sock"), FakeDaemon(folder, theta=theta) as second:
        with pytest.raises(LearnerError, match="shares the memory of another"):
            toy.steps_until(diloco, second, Done, 1)
        assert second.attaches == []


def _fields(attach: Attach) -> dict[str, object]:
    return {name: getattr(attach, name) for name in Attach.__slots__}


def test_refused_learner_raises_with_the_reason(folder: Path) -> None:
    class Refusing(FakeDaemon):
        def learner_attached(self, attach: Attach) -> None:
            self._server.send(Refuse("this is not the run's model", True))

    toy = Toy()
    with Refusing(folder), pytest.raises(LearnerError, match="refused this learner: this is not the run's model"):
        diloco_node.attach(toy.model)


def test_newer_process_ends_the_older_one(folder: Path) -> None:
    older, newer = Toy(1), Toy(2)
    with FakeDaemon(folder) as daemon:
        first = diloco_node.attach(older.model, older.optimizer)
        LearnerPlace.pid = None  # as if the newer one were in another process
        with diloco_node.attach(newer.model, newer.optimizer) as second:
            with pytest.raises(LearnerError, match="a newer learner process"), first:
                older.steps_until(first, daemon, Done, 1)
            newer.step(second)
        assert daemon.incarnation == 2


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_stop_ends_the_loop_and_done_is_said(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            daemon.stop_learner("the run is finished")
            deadline_s = time.monotonic() + PATIENCE_S
            while not diloco.should_stop:
                assert time.monotonic() < deadline_s
                toy.step(diloco)
            assert diloco.stop_reason == "the run is finished"
            assert not diloco.is_interrupted
            diloco.evaluated(val_loss=1.25, val_loss_global=1.0)
        done = daemon.wait_for(Done)
        assert (done.step, done.tokens) == (diloco.steps, 7 * diloco.steps)
        assert (done.val_loss, done.val_loss_global, done.val_step) == (1.25, 1.0, diloco.global_step)


def test_an_evaluation_is_told_at_once_with_its_step_and_what_is_not_finite_is_a_warning(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        diloco.evaluated(val_loss=torch.tensor([2.0, 3.0], requires_grad=True), val_loss_global=np.float32(1.5))
        evaluation = (2.5, 1.5, diloco.global_step)

        def evaluations() -> set[tuple[float | None, float | None, int | None]]:
            reports = [message for message in daemon.said if isinstance(message, Report)]
            return {(report.val_loss, report.val_loss_global, report.val_step) for report in reports}

        until(lambda: evaluation in evaluations())
        for _ in range(3):
            toy.step(diloco)
        diloco.evaluated(val_loss_global=math.nan)
        until(lambda: (None, None, diloco.global_step) in evaluations())
        text = f"evaluated(val_loss_global=nan) at step {diloco.global_step}: not finite, so the last one that was is"
        until(lambda: any(isinstance(message, Warned) and text in message.text for message in daemon.said))
        for wrong in ("low", [1.0, 2.0], 10**400):
            with pytest.raises(LearnerError, match=r"evaluated\(val_loss=.*is no number: give a float or a tensor"):
                diloco.evaluated(val_loss=wrong)  # type: ignore[arg-type]
    diloco.evaluated(val_loss=1.0)


def test_exception_in_the_loop_is_told(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(ZeroDivisionError), diloco_node.attach(toy.model, toy.optimizer):
            raise ZeroDivisionError("out of data")
        assert daemon.wait_for(Failed).reason == "ZeroDivisionError: out of data"


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("caf\udce9"), "RuntimeError: caf?"),
        (Textless(), "Textless, whose text fails with a ValueError"),
        (RuntimeError("\N{GRINNING FACE}" * 5000), "RuntimeError: \N{GRINNING FACE}"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (SystemExit("no data"), "SystemExit: no data"),
    ],
)
def test_an_exception_of_any_text_is_told_and_stays_itself(folder: Path, error: BaseException, told: str) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(type(error)) as caught, diloco_node.attach(toy.model, toy.optimizer):
            raise error
        assert caught.value is error
        assert daemon.wait_for(Failed).reason.startswith(told)


@pytest.mark.parametrize("code", [None, 0])
def test_a_script_that_exits_without_a_fault_has_left_in_order(folder: Path, code: int | None) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with pytest.raises(SystemExit), diloco_node.attach(toy.model, toy.optimizer):
            sys.exit(code)
        assert daemon.wait_for(Done).step == 0


def test_a_generator_that_nobody_asks_any_more_has_left_in_order(folder: Path) -> None:
    toy = Toy()

    def losses() -> Iterator[int]:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            while True:
                toy.step(diloco)
                yield diloco.steps

    with FakeDaemon(folder) as daemon:
        training = losses()
        assert next(training) == 1
        training.close()  # type: ignore[attr-defined]
        assert daemon.wait_for(Done).step == 1


def test_a_wish_for_the_end_is_told_though_an_exception_follows(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        diloco.finish("flat")
        diloco.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        daemon.wait_for(Failed)
        assert daemon.wait_for(EndWanted).reason == "flat"


def test_what_a_loop_does_while_it_evaluates_in_inference_mode_is_usable_outside(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with torch.inference_mode():
            diloco = diloco_node.attach(toy.model, torch.optim.AdamW(toy.model.parameters()))
        for _ in range(2):
            toy.step(diloco)
            with torch.inference_mode(), diloco.busy("evaluation"):
                daemon.commit(0, daemon.theta[0] + 1, -1)
                diloco.settle(0.1)
                diloco.checkpoint()
            daemon.commit(0, daemon.theta[0] + 1, -1)
            diloco.settle(0.1)
            diloco.checkpoint()
        with torch.inference_mode():
            diloco.close()
    assert not any(parameter.is_inference() for parameter in toy.model.parameters())


@pytest.mark.no_device("there another thread writes versions")
@pytest.mark.parametrize("way", ["step", "settle"])
def test_a_step_that_ctrl_c_has_cut_short_is_the_last_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """As in a notebook, whose next cell goes on with the same object."""
    toy = Toy()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        toy.step(diloco)
        with monkeypatch.context() as patch:
            patch.setattr(ModelTensors, "shift", interrupt)
            daemon.commit(0, daemon.theta[0] + 1, -1)
            with pytest.raises(KeyboardInterrupt):
                diloco.settle(PATIENCE_S) if way == "settle" else toy.steps_until(diloco, daemon, OfferApplied, 3)
        with pytest.raises(
            LearnerError, match=r"the step\(\) before this one did not come to its end.*attach\(\) again"
        ):
            toy.step(diloco)
        diloco.close()
        daemon.wait_for(Failed)  # no result, with half a merge in it
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco)
            assert diloco.versions == (1, 0)


def test_a_settling_that_ctrl_c_ends_between_two_boundaries_harms_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            with monkeypatch.context() as patch:
                patch.setattr(StepBoundaries, "_wait", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    diloco.settle(PATIENCE_S)
            toy.step(diloco)
        assert daemon.wait_for(Done).step == 1


def test_what_is_refused_while_it_settles_ends_a_loop_that_catches_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy()

    def refuse(*_: object) -> None:
        raise LearnerError("planted")

    with FakeDaemon(folder) as daemon:
        diloco = diloco_node.attach(toy.model, toy.optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(StepBoundaries, "cross", refuse)
            with pytest.raises(LearnerError, match="planted"):
                diloco.settle(PATIENCE_S)
        assert diloco.should_stop
        assert "planted" in session_of(diloco).place.fault
        with pytest.raises(LearnerError, match=r"step\(\) after an error that the loop has caught: planted"):
            toy.step(diloco)
        diloco.close()
        daemon.wait_for(Failed)
