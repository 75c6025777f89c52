"""The callback of Lightning's trainer, under a fake daemon. tests/e2e/test_frameworks.py has several ranks."""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco_node.core.types import Codec
from diloco_node.learner.attach import Diloco
from diloco_node.learner.leaving import LATE_STEP
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from diloco_node.wire.learner_link import Done, Failed, Leaving, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.lightning_kit import quiet_trainer
from tests.kit.trainer_kit import (
    BAD_ROW,
    BATCH,
    LENGTH,
    ROWS,
    Language,
    Rows,
    Watched,
    end_with_versions,
    merged_weight,
)

pytestmark = [
    pytest.mark.e2e,  # importing the library takes longer than the tests
    pytest.mark.filterwarnings("default"),  # its own
]


def lightning_trainer(folder: Path, **arguments: Any) -> tuple[Any, Any, Any]:
    lightning = pytest.importorskip("lightning.pytorch")
    from diloco_node.integrations.lightning import LightningDiloco

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Language()

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    callback = LightningDiloco()
    return quiet_trainer(folder, callback, **{"max_steps": 4} | arguments), callback, Module()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_lightnings_steps_are_counted_and_the_end_is_said(folder: Path, micro_batches: int) -> None:
    trainer, _, module = lightning_trainer(folder, accumulate_grad_batches=micro_batches)
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        done = daemon.wait_for(Done)
    assert (done.step, done.tokens) == (4, 4 * micro_batches * BATCH * LENGTH)


def test_lightning_goes_on_from_its_checkpoint_with_the_runs_parameters(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder, max_steps=2)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, loader)
        trainer.save_checkpoint(folder / "two.ckpt")
        theta = [np.full_like(part, 0.25) for part in daemon.theta]
    trainer, callback, module = lightning_trainer(folder, max_steps=3)
    seen: list[Tensor] = []
    module.on_train_batch_start = lambda *_: seen.append(module.inner.embedding.weight.detach().clone())
    with FakeDaemon(folder, theta=theta, versions=[3, 3]) as daemon:
        trainer.fit(module, loader, ckpt_path=folder / "two.ckpt")
        assert daemon.wait_for(Done).step == callback.diloco.steps == 1
    assert torch.equal(seen[0], torch.full((8, 4), 0.25)), "not the checkpoint's"


def test_lightning_that_is_started_again_has_its_moments(folder: Path) -> None:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    trainer, _, module = lightning_trainer(folder)
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, loader)
        theta = [np.full_like(part, 0.25) for part in daemon.theta]
    trainer, _, module = lightning_trainer(folder)
    seen: list[tuple[bool, Tensor]] = []

    def look(*_: Any) -> None:
        (optimizer,) = trainer.optimizers
        has_moments = any(bool(state["exp_avg"].any()) for state in optimizer.state.values())
        seen.append((has_moments, module.inner.embedding.weight.detach().clone()))

    module.on_train_batch_start = look
    with FakeDaemon(folder, theta=theta, versions=[3, 3]):
        trainer.fit(module, loader)
    assert seen[0][0]
    assert torch.equal(seen[0][1], torch.full((8, 4), 0.25))


def test_lightning_saves_the_merged_weights_in_mid_run_and_at_the_end(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder, max_steps=ROWS)
    own: list[Tensor] = []
    with FakeDaemon(folder) as daemon:

        def look(_outputs: Any, _batch: Any, index: int) -> None:
            if index == 2:
                own.append(module.inner.embedding.weight.detach().clone())
                trainer.save_checkpoint(folder / "mid.ckpt")
                daemon.stop_learner("enough", (0, 0))

        module.on_train_batch_end = look
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        trainer.save_checkpoint(folder / "end.ckpt")
        merged = merged_weight(daemon)
    assert not torch.equal(own[0], merged), "it had trained on"
    for name in ("mid.ckpt", "end.ckpt"):
        state = torch.load(folder / name, weights_only=False)["state_dict"]
        assert torch.equal(state["inner.embedding.weight"], merged), name
    assert torch.equal(module.inner.embedding.weight, merged)


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_reader_of_lightnings_state_gets_is_told_once_and_no_writer_of_files(
    folder: Path, caplog: pytest.LogCaptureFixture, *, is_read: bool
) -> None:
    trainer, _, module = lightning_trainer(folder)

    def look(*_: Any) -> None:
        trainer.save_checkpoint(folder / "mid.ckpt")
        if is_read:
            module.state_dict()

    module.on_train_batch_end = look
    with FakeDaemon(folder):
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
    assert caplog.text.count("state_dict() in mid-run holds the run's merged weights") == is_read


def test_a_callback_before_lightnings_saves_the_result_at_the_end(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder, max_steps=ROWS)
    saves: list[Tensor] = []
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:
        module.on_train_batch_end = lambda _outputs, _batch, index: end_with_versions(daemon) if index == 2 else None
        callback = pytest.importorskip("lightning.pytorch").Callback()
        trainer.callbacks.insert(0, callback)
        callback.on_train_end = lambda *_: saves.append(module.inner.embedding.weight.detach().clone())
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        assert torch.equal(saves[0], merged_weight(daemon))


@pytest.mark.parametrize("is_first", [True, False])
def test_an_average_in_lightning_does_not_replace_the_runs_result(
    folder: Path, caplog: pytest.LogCaptureFixture, is_first: bool
) -> None:
    trainer, _, module = lightning_trainer(folder, max_steps=ROWS)
    average = pytest.importorskip("lightning.pytorch.callbacks").EMAWeightAveraging()
    trainer.callbacks.insert(0 if is_first else len(trainer.callbacks), average)
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:
        module.on_train_batch_end = lambda _outputs, _batch, index: end_with_versions(daemon) if index == 2 else None
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        assert torch.equal(module.inner.embedding.weight, merged_weight(daemon))
        daemon.wait_for(Done)
    assert len(trainer.callbacks) == 2
    assert "EMAWeightAveraging averages this region's own weights" in caplog.text
    assert "was written to after the last step, such as by a load of the best weights: the run's final" in caplog.text


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_each_step_of_a_module_that_optimizes_by_hand_is_counted(
    folder: Path, is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, callback, module = lightning_trainer(folder, max_steps=-1, max_epochs=1)
    module.automatic_optimization = False
    losses: list[bool] = []

    def train(batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer = module.optimizers(use_pl_optimizer=is_wrapped)
        for _ in range(3):
            optimizer.zero_grad()
            module.manual_backward(module.inner(**batch)["loss"])
            optimizer.step()
        return torch.tensor(float("nan") if batch_idx == 1 else 1.0)  # once is no reason to end

    def step(diloco: Any, *, loss: Any, **options: Any) -> None:
        losses.append(loss is not None)
        take_step(diloco, loss=loss, **options)

    take_step = Diloco.step
    monkeypatch.setattr(Diloco, "step", step)
    module.training_step = train
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        done = daemon.wait_for(Done)
    assert (done.step, done.tokens) == (3 * ROWS // BATCH, ROWS * LENGTH)
    assert callback.diloco.steps == done.step
    assert losses == [True, False, False] * (ROWS // BATCH)


def test_an_exception_in_lightning_is_said(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder, max_steps=ROWS)
    with FakeDaemon(folder) as daemon:
        with pytest.raises(ValueError, match="spoiled"):
            trainer.fit(module, torch.utils.data.DataLoader(Rows(BAD_ROW), batch_size=BATCH))
        assert daemon.wait_for(Failed).reason == f"ValueError: row {BAD_ROW} is spoiled"


@pytest.mark.parametrize("place", ["training", "evaluation"])
def test_sigterm_in_lightning_is_an_interruption_and_no_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Lightning takes the signal before the callback attaches, and ends `fit` as if all were trained."""
    monkeypatch.setenv("DILOCO_STOP_S", "100")
    monkeypatch.setattr("diloco_node.learner.boundary.LEAVE_PATIENCE_S", 0.2)
    trainer, callback, module = lightning_trainer(folder, max_steps=ROWS, val_check_interval=2, num_sanity_val_steps=0)
    before = signal.getsignal(signal.SIGTERM)

    def ask(_batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            signal.raise_signal(signal.SIGTERM)

    if place == "training":
        module.on_train_batch_start = ask
        module.validation_step = lambda *_: None
    else:
        module.validation_step = ask
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    with FakeDaemon(folder) as daemon:
        with pytest.raises(SystemExit):
            trainer.fit(module, loader, loader)
        daemon.wait_detached()
        told = [message for message in daemon.said if isinstance(message, Done | Failed)]
        assert told == [], "the next process goes on"
        assert any(isinstance(message, Leaving) for message in daemon.said), "its last steps were offered"
    assert callback.diloco.steps == 2
    assert signal.getsignal(signal.SIGTERM) == before


def test_lightnings_evaluations_are_pauses_and_it_goes_on_after_a_save(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder, val_check_interval=2, num_sanity_val_steps=0)
    module.validation_step = lambda *_: None
    trained, evaluated = Watched(folder), Watched(folder)
    module.on_validation_epoch_end = lambda: trainer.save_checkpoint(folder / "now.ckpt")
    with FakeDaemon(folder):
        trainer.fit(
            module,
            torch.utils.data.DataLoader(trained, batch_size=BATCH),
            torch.utils.data.DataLoader(evaluated, batch_size=BATCH),
        )
    assert set(evaluated.activities) == {"evaluation"}
    assert trained.activities[-1] == ""


def test_what_other_callbacks_do_after_an_evaluation_and_at_the_end_is_in_a_pause(folder: Path) -> None:
    """An upload may take longer than a learner may be without a step."""
    trainer, _, module = lightning_trainer(folder, val_check_interval=2, num_sanity_val_steps=0)
    module.validation_step = lambda *_: None
    names = ("before_optimizer_step", "validation_end", "train_epoch_end", "train_end")
    places = {name: Watched(folder) for name in names}
    first, last = (pytest.importorskip("lightning.pytorch").Callback() for _ in range(2))
    for name in names:
        for callback in (first, last):
            setattr(callback, f"on_{name}", lambda *_, name=name: places[name].look())
    trainer.callbacks[:] = [first, *trainer.callbacks, last]
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    with FakeDaemon(folder):
        trainer.fit(module, loader, loader)
    assert places["before_optimizer_step"].activities == [""] * 8
    assert places["validation_end"].activities == ["evaluation"] * 4
    assert places["train_epoch_end"].activities == ["evaluation", "the end of an epoch"]
    assert places["train_end"].activities == ["the end of an epoch"] * 2


def test_of_several_loaders_the_mean_is_the_held_out_loss(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder, val_check_interval=2, num_sanity_val_steps=0)
    module.validation_step = lambda _batch, _index, dataloader_idx: module.log("val_loss", 1.0 + 2 * dataloader_idx)
    loaders = [torch.utils.data.DataLoader(Rows(), batch_size=BATCH) for _ in range(3)]
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, loaders[0], loaders[1:])
        done = daemon.wait_for(Done)
    assert (done.val_loss, done.val_step) == (2.0, 4)


def test_steps_after_the_runs_end_are_undone_and_that_is_told(folder: Path) -> None:
    """A trainer with a least number of steps goes on."""
    trainer, _, module = lightning_trainer(folder, max_steps=ROWS, min_steps=8)
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:

        def end(_outputs: object, _batch: object, index: int) -> None:
            if index == 2:
                end_with_versions(daemon)
                time.sleep(1.0)  # else the steps may be over before the word of the end is here

        module.on_train_batch_end = end
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        assert torch.equal(module.inner.embedding.weight, merged_weight(daemon))
        daemon.wait_for(Done)
        told = [message.text for message in daemon.said if isinstance(message, Warned)]
    assert trainer.global_step >= 8
    assert sum(LATE_STEP in text for text in told) == 1


def test_a_save_at_the_end_does_not_last_until_the_next_fit(folder: Path) -> None:
    trainer, _, module = lightning_trainer(folder)
    saver = pytest.importorskip("lightning.pytorch").Callback()
    saver.on_train_end = lambda *_: trainer.save_checkpoint(folder / "end.ckpt")
    marks: list[PlaceMark] = []

    def look(*_: Any) -> None:
        mark = PlaceMark.decode(request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        marks.append(mark)

    saver.on_train_batch_start = look
    trainer.callbacks.append(saver)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    for steps in (4, 8):
        trainer.fit_loop.epoch_loop.max_steps = steps
        with FakeDaemon(folder) as daemon:
            trainer.fit(module, loader)
            daemon.wait_for(Done)
    assert len(marks) == 8
    assert not any(mark.has_left or mark.activity for mark in marks), "the second learner is there from its start"


def test_a_learner_leaves_also_after_a_fit_whose_end_has_failed(folder: Path) -> None:
    trainer, callback, module = lightning_trainer(folder)
    failing = pytest.importorskip("lightning.pytorch").Callback()
    trainer.callbacks.append(failing)

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    failing.on_train_end = fail
    loader = torch.utils.data.DataLoader(Rows(), batch_size=BATCH)
    with FakeDaemon(folder) as daemon:
        with pytest.raises(OSError, match="the disk is full"):
            trainer.fit(module, loader)
        daemon.wait_for(Failed)
    assert trainer.callbacks == [callback, failing]
    del failing.on_train_end
    trainer.fit_loop.epoch_loop.max_steps = 8
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, loader)
        daemon.wait_for(Done)
