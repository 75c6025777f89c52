"""Callbacks in the trainers that they are for, under a fake daemon. tests/e2e/test_frameworks.py has several ranks."""

import copy
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from diloco_node.wire.learner_link import Done, Failed, Leaving, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.lightning_kit import quiet_trainer

pytestmark = [
    pytest.mark.e2e,  # importing the libraries takes longer than the tests
    pytest.mark.filterwarnings("default"),  # theirs
]

ROWS, BATCH, LENGTH = 64, 2, 5
BAD_ROW = 7


class Language(nn.Module):
    """As models of transformers: takes ids by name, returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.embedding(input_ids) - 1).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Of which one may be spoiled."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.bad:
            raise ValueError(f"row {index} is spoiled")
        return {"input_ids": torch.full((LENGTH,), index % 8)}


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


class Seen:
    """What a Hugging Face trainer tells its callbacks, in order, with where the learner was."""

    def __init__(self, diloco_callback: Any) -> None:
        from transformers import TrainerCallback

        seen = self
        self.events: list[tuple[str, int]] = []
        self.first: dict[str, Any] = {}

        class Spy(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                if not seen.first:
                    optimizer, weight = given["optimizer"], given["model"].embedding.weight
                    moments = [one["exp_avg"].clone() for one in optimizer.state.values()]
                    seen.first = {"step": state.global_step, "weight": weight.detach().clone(), "moments": moments}
                    seen.first["schedule"] = given["lr_scheduler"].last_epoch

            def on_step_end(self, *_: Any, **__: Any) -> None:
                seen.events.append(("step", diloco_callback.diloco.steps))

            def on_save(self, *_: Any, **__: Any) -> None:
                seen.events.append(("save", diloco_callback.diloco.steps))

            def on_train_end(self, *_: Any, **__: Any) -> None:
                seen.events.append(("end", diloco_callback.diloco.steps))

        self.callback = Spy()


def hf_trainer(folder: Path, *, bad: int = -1, **arguments: Any) -> tuple[Any, Any, Seen]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from diloco_node.integrations.hf import DilocoCallback

    callback = DilocoCallback()
    seen = Seen(callback)
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=BATCH,
        learning_rate=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"save_strategy": "no", "max_steps": 4} | arguments,
    )
    trainer = transformers.Trainer(
        model=Language(),
        args=settings,
        train_dataset=Rows(bad),
        eval_dataset=Rows(),
        callbacks=[callback, seen.callback],
    )
    return trainer, callback, seen


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_trainers_steps_are_counted_before_it_saves_and_the_end_is_said(folder: Path, micro_batches: int) -> None:
    trainer, _, seen = hf_trainer(
        folder, gradient_accumulation_steps=micro_batches, save_strategy="steps", save_steps=2
    )
    hook = sys.excepthook
    with FakeDaemon(folder) as daemon:
        trainer.train()
        done = daemon.wait_for(Done)
    steps = [("step", 1), ("step", 2), ("save", 2), ("step", 3), ("step", 4), ("save", 4), ("end", 4)]
    assert seen.events == steps
    assert (done.step, done.tokens) == (4, 4 * micro_batches * BATCH * LENGTH)
    assert sys.excepthook is hook


def test_a_trainer_that_goes_on_from_its_checkpoint_takes_the_runs_parameters(folder: Path) -> None:
    trainer, _, _ = hf_trainer(folder, save_strategy="steps", save_steps=2)
    with FakeDaemon(folder) as daemon:
        trainer.train()
        theta = [np.full_like(part, 0.25) for part in daemon.theta]
    (folder / "learner").rename(folder / "of another learner")
    trainer, callback, seen = hf_trainer(folder)
    with FakeDaemon(folder, theta=theta, versions=[3, 3]):
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2"))
    assert seen.first["step"] == 2, "the Trainer's own count"
    assert torch.equal(seen.first["weight"], torch.full((8, 4), 0.25)), "not the checkpoint's"
    assert all(bool(one.any()) for one in seen.first["moments"]), "the checkpoint's: the learner had none"
    assert seen.first["moments"]
    assert seen.first["schedule"] == 2
    assert callback.diloco.steps == 2


def test_a_trainer_that_is_started_again_has_moments_and_schedule(folder: Path) -> None:
    trainer, _, _ = hf_trainer(folder)
    with FakeDaemon(folder) as daemon:
        trainer.train()
        theta = [np.full_like(part, 0.25) for part in daemon.theta]
    trainer, _, seen = hf_trainer(folder)
    with FakeDaemon(folder, theta=theta, versions=[3, 3]):
        trainer.train()
    assert (seen.first["step"], seen.first["schedule"]) == (0, 4)
    assert torch.equal(seen.first["weight"], torch.full((8, 4), 0.25))
    assert all(bool(one.any()) for one in seen.first["moments"])
    assert seen.first["moments"]


def test_an_exception_that_ends_the_process_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _traceback: said.append(str(error)))
    before = sys.excepthook
    trainer, _, _ = hf_trainer(folder, bad=BAD_ROW, max_steps=ROWS)
    with FakeDaemon(folder) as daemon:
        with pytest.raises(ValueError, match="spoiled") as raised:
            trainer.train()
        assert not [one for one in daemon.said if isinstance(one, Failed | Done)], "it may be caught"
        sys.excepthook(raised.type, raised.value, raised.tb)  # as Python does
        assert daemon.wait_for(Failed).reason == f"ValueError: row {BAD_ROW} is spoiled"
    assert said == [f"row {BAD_ROW} is spoiled"], "who else wanted to know"
    assert sys.excepthook is before


def test_training_that_was_caught_and_begins_again_is_one_learner(folder: Path) -> None:
    trainer, callback, _ = hf_trainer(folder, bad=BAD_ROW)
    trainer.args.max_steps = ROWS
    with FakeDaemon(folder) as daemon:
        with pytest.raises(ValueError, match="spoiled"):
            trainer.train()
        first, steps = callback.diloco, callback.diloco.steps
        trainer.train_dataset.bad = -1
        trainer.args.max_steps = 3
        trainer.train()
        assert daemon.wait_for(Done).step == 3
        assert "train() was called again" in daemon.wait_for(Failed).reason
    assert first is not callback.diloco
    assert first.steps == steps, "it has left the optimizer"


def test_ranks_that_the_trainer_does_not_bring_together_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, _ = hf_trainer(folder)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LearnerError, match=r"WORLD_SIZE is 2, but the Trainer is not_parallel.*use_cpu=True"):
        trainer.train()


class Watched(Rows):
    """Rows that note what the learner says it does while they are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.activities = folder, list[str]()

    def look(self) -> None:
        mark = PlaceMark.decode(request_area(self.folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        self.activities.append(mark.activity)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.look()
        return super().__getitem__(index)


def test_a_trainers_evaluations_and_saves_are_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, _ = hf_trainer(
        folder, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, eval_on_start=False
    )
    trainer.train_dataset, trainer.eval_dataset = Watched(folder), Watched(folder)
    saves, save = Watched(folder), trainer._save
    monkeypatch.setattr(trainer, "_save", lambda *words, **options: (saves.look(), save(*words, **options)))
    with FakeDaemon(folder):
        trainer.train()
    assert set(trainer.train_dataset.activities) == {""}
    assert set(trainer.eval_dataset.activities) == {"evaluation"}
    assert saves.activities == ["saving"] * 2
    trainer.evaluate()
    saves.look()
    assert saves.activities[-1] == "", "it has left, and announces nothing more"


def test_a_trainer_whose_machine_is_taken_away_evaluates_nothing_more(folder: Path) -> None:
    trainer, callback, seen = hf_trainer(folder, eval_strategy="epoch", max_steps=50)
    trainer.eval_dataset = Watched(folder)

    def take_away(*_: Any, **__: Any) -> None:
        callback.diloco._terminate.is_set = callback.diloco.steps == 2

    seen.callback.on_pre_optimizer_step = take_away
    with FakeDaemon(folder):
        trainer.train()
    assert trainer.state.global_step == 3
    assert trainer.eval_dataset.activities == []


def merged_weight(daemon: FakeDaemon) -> Tensor:
    """The embedding as the run has it."""
    assert daemon.manifest is not None
    values = torch.zeros(32)
    for fragment, theta in zip(daemon.manifest.fragments, daemon.theta, strict=True):
        for piece in fragment.pieces:
            values[piece.value_start : piece.value_stop] = torch.from_numpy(
                theta[piece.offset : piece.offset + piece.size]
            )
    return values.view(8, 4)


def test_a_trainer_saves_the_merged_weights_in_mid_run_and_at_the_end(folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, save_strategy="steps", save_steps=3, max_steps=ROWS)
    own: list[Tensor] = []
    with FakeDaemon(folder) as daemon:

        class Ending(TrainerCallback):  # type: ignore[misc]
            def on_save(self, *_: Any, **context: Any) -> None:
                own.append(context["model"].embedding.weight.detach().clone())
                trainer.save_model(str(folder / "asked"))
                daemon.stop_learner("enough", (0, 0))

        trainer.add_callback(Ending())
        trainer.train()
        trainer.save_model(str(folder / "end"))
        merged = merged_weight(daemon)
    assert not torch.equal(own[0], merged), "it had trained on"
    for place in ("out/checkpoint-3", "asked", "end"):
        assert torch.equal(load_file(folder / place / "model.safetensors")["embedding.weight"], merged), place
    assert torch.equal(trainer.model.embedding.weight, merged), "the run's result, without own steps"


def test_a_callback_before_ours_saves_the_result_at_the_end(folder: Path) -> None:
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, max_steps=ROWS)
    saves: list[Tensor] = []
    with FakeDaemon(folder, codec=Codec.FP32) as daemon:

        class Saver(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
                if state.global_step == 3:
                    end_with_versions(daemon)

            def on_train_end(self, *_: Any, **context: Any) -> None:
                saves.append(context["model"].embedding.weight.detach().clone())

        trainer.callback_handler.callbacks.insert(0, Saver())
        trainer.train()
        assert torch.equal(saves[0], merged_weight(daemon))


def test_a_copy_of_a_trainers_model_is_the_regions_and_that_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, max_steps=4)

    class Copier(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **context: Any) -> None:
            own = context["model"].embedding.weight
            assert torch.equal(copy.deepcopy(context["model"]).state_dict()["embedding.weight"], own)

    trainer.add_callback(Copier())
    with FakeDaemon(folder):
        trainer.train()
    assert caplog.text.count("state_dict() of a copy of the model: unless global_state_dict() was loaded into it") == 1


def end_with_versions(daemon: FakeDaemon) -> None:
    """The run ends with a last version of each fragment."""
    daemon.stop_learner("enough", (1, 1))
    for fragment in range(2):
        daemon.commit(fragment, daemon.theta[fragment] + 1, -1)


def test_the_best_checkpoint_is_not_what_a_trainer_ends_with(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    trainer, _, _ = hf_trainer(folder, load_best_model_at_end=True, metric_for_best_model="runtime", **options)
    with FakeDaemon(folder):
        trainer.train()
    assert "load_best_model_at_end: once the run is over the model holds" in caplog.text


def test_a_trainer_that_stops_early_says_that_it_holds_the_best_checkpoint(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load_file
    from transformers import EarlyStoppingCallback

    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_steps": 2,
        "max_steps": 50,
    }
    options |= {"label_names": ["input_ids"], "prediction_loss_only": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer, _, _ = hf_trainer(folder, **options, **best)
    trainer.add_callback(EarlyStoppingCallback(1))
    with FakeDaemon(folder) as daemon:
        trainer.train()
        assert daemon.wait_for(Done).step == 4
        told = " ".join(message.text for message in daemon.said if isinstance(message, Warned))
    assert "was written to after the last step, such as by a load of the best weights: that is not merged" in told
    weight = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")["embedding.weight"]
    assert torch.equal(trainer.model.embedding.weight, weight)
    assert "It holds the best checkpoint only where this trainer ends before the run" in caplog.text
    assert "load_state_dict() in mid-run" not in caplog.text


# ---- Lightning -------------------------------------------------------------------------------------------------------


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
def test_each_step_of_a_module_that_optimizes_by_hand_is_counted(folder: Path, is_wrapped: bool) -> None:
    trainer, callback, module = lightning_trainer(folder, max_steps=-1, max_epochs=1)
    module.automatic_optimization = False

    def train(batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer = module.optimizers(use_pl_optimizer=is_wrapped)
        for _ in range(3):
            optimizer.zero_grad()
            module.manual_backward(module.inner(**batch)["loss"])
            optimizer.step()

    module.training_step = train
    with FakeDaemon(folder) as daemon:
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=BATCH))
        done = daemon.wait_for(Done)
    assert (done.step, done.tokens) == (3 * ROWS // BATCH, ROWS * LENGTH)
    assert callback.diloco.steps == done.step


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
