"""The callback of Hugging Face's trainer, under a fake daemon. tests/e2e/test_frameworks.py has several ranks."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
from diloco_node.wire.learner_link import Done, Failed, Leaving, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.repository import ROOT
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
    pytest.mark.e2e,  # importing the libraries takes longer than the tests
    pytest.mark.filterwarnings("default"),  # theirs
]


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


def hf_trainer(
    folder: Path, *, bad: int = -1, model: torch.nn.Module | None = None, **arguments: Any
) -> tuple[Any, Any, Seen]:
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
        model=model or Language(),
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


def test_a_trainer_goes_on_from_its_checkpoint_with_a_stream_that_has_no_length(folder: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter([Rows()[at] for at in range(ROWS)])

    for resume in (False, str(folder / "out" / "checkpoint-2")):
        trainer, callback, _ = hf_trainer(folder, save_strategy="steps", save_steps=2, gradient_accumulation_steps=3)
        trainer.train_dataset = Stream()
        with FakeDaemon(folder):
            trainer.train(resume_from_checkpoint=resume)
        assert callback._data.state_dict()["batch"] == 4 * 3


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


STOPPED = """
import pathlib, signal, sys
from tests.integrations.test_hf_callback import hf_trainer
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
trainer, callback, seen = hf_trainer(pathlib.Path(sys.argv[1]), max_steps=50)
def stop(*_, **__):
    if callback.diloco.steps == 2:
        signal.raise_signal(signal.SIGUSR1)
seen.callback.on_pre_optimizer_step = stop
trainer.train()
"""
"""A script that has a handler of its own for a stop signal."""


def test_a_trainer_that_a_handler_of_a_signal_ends_leaves_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_STOP_S", "5")
    with FakeDaemon(folder) as daemon:
        script = subprocess.run([sys.executable, "-c", STOPPED, str(folder)], cwd=ROOT, check=False)
        assert script.returncode == 3
        assert any(isinstance(message, Leaving) for message in daemon.said), "its last steps were offered"
        assert not [message for message in daemon.said if isinstance(message, Done | Failed)], "the next one goes on"
    mark = PlaceMark.decode(request_area(folder / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
    assert mark is not None
    assert (mark.step, mark.checkpoint_step, mark.is_interrupted, mark.has_ended) == (2, 2, True, True)


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


def test_a_trainer_that_spreads_a_batch_over_gpus_is_refused(folder: Path) -> None:
    trainer, callback, _ = hf_trainer(folder)
    trainer.args._n_gpu = 2
    context = {"model": trainer.model, "optimizer": trainer.create_optimizer()}
    with pytest.raises(LearnerError, match=r"the Trainer has 2 GPUs in one process.*torchrun"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, **context)
    trainer.model.is_loaded_in_4bit = True  # the Trainer leaves such a model whole
    with FakeDaemon(folder):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, **context)
        callback.on_train_end(trainer.args, trainer.state, trainer.control)


def test_a_trainers_evaluations_and_saves_are_pauses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, seen = hf_trainer(
        folder, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, eval_on_start=False
    )
    trainer.eval_dataset = Watched(folder)
    saves, steps, save = Watched(folder), Watched(folder), trainer._save
    monkeypatch.setattr(trainer, "_save", lambda *words, **options: (saves.look(), save(*words, **options)))
    seen.callback.on_pre_optimizer_step = lambda *_, **__: steps.look()
    with FakeDaemon(folder):
        trainer.train()
    assert steps.activities == [""] * 4
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


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_reader_of_a_trainers_state_gets_is_told_once_and_no_writer_of_files(
    folder: Path, caplog: pytest.LogCaptureFixture, *, is_read: bool
) -> None:
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, save_strategy="steps", save_steps=1, max_steps=4)

    class Reader(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **context: Any) -> None:
            trainer.save_model(str(folder / "asked"))
            if is_read:
                context["model"].state_dict()

    trainer.add_callback(Reader())
    with FakeDaemon(folder):
        trainer.train()
    assert caplog.text.count("state_dict() in mid-run holds the run's merged weights") == is_read


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
