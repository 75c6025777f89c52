"""What the callback of Hugging Face's trainer says of evaluations, and in which pauses others work."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco_node.learner.model_state import MERGED_WORK
from diloco_node.wire.learner_link import Done, Report
from tests.integrations.test_hf_callback import hf_trainer
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.trainer_kit import ROWS, Language, Rows, Watched

pytestmark = [
    pytest.mark.e2e,  # importing the libraries takes longer than the tests
    pytest.mark.filterwarnings("default"),  # theirs
]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_other_callbacks_do_at_a_save_and_at_the_end_is_in_a_pause(folder: Path, *, is_first: bool) -> None:
    """An upload may take longer than a learner may be without a step."""
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, save_strategy="steps", save_steps=2)
    places = {name: Watched(folder) for name in ("step_begin", "save", "epoch_end", "train_end")}

    class Uploader(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            places["save"].look()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            places["epoch_end"].look()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            places["train_end"].look()

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            places["step_begin"].look()

        on_pre_optimizer_step = on_substep_end

    trainer.callback_handler.callbacks.insert(0 if is_first else len(trainer.callback_handler.callbacks), Uploader())
    with FakeDaemon(folder):
        trainer.train()
    assert places["step_begin"].activities == [""] * 4
    assert places["save"].activities == ["saving"] * 2
    assert places["epoch_end"].activities == ["saving" if is_first else "the end of an epoch"]
    assert places["train_end"].activities == ["the end of an epoch" if is_first else ""], "it has left then"


def test_a_save_that_a_callback_makes_by_itself_is_a_pause_until_the_next_step(folder: Path) -> None:
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder)
    uploads, steps = Watched(folder), Watched(folder)

    class Uploader(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % 2:
                trainer.save_model(str(folder / "asked"))
            uploads.look()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            steps.look()

    trainer.add_callback(Uploader())
    with FakeDaemon(folder):
        trainer.train()
    assert uploads.activities == [MERGED_WORK, "", MERGED_WORK, ""]
    assert steps.activities == [""] * 4


def told_losses(daemon: FakeDaemon) -> list[Any]:
    """Held-out losses and their steps, without repetitions."""
    reports = [message for message in daemon.said if isinstance(message, Report | Done)]
    return list(dict.fromkeys((item.val_loss, item.val_step) for item in reports if item.val_loss is not None))


EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "label_names": ["input_ids"],
    "prediction_loss_only": True,
}


@pytest.mark.parametrize("is_saving", [True, False])
def test_of_several_data_sets_the_mean_is_the_held_out_loss(folder: Path, *, is_saving: bool) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2} if is_saving else {}
    trainer, _, _ = hf_trainer(folder, eval_on_start=True, **EVALUATED, **saving)
    halves = [torch.utils.data.Subset(Rows(), range(start, ROWS, 8)) for start in (1, 5)]
    trainer.eval_dataset = dict(zip(("wiki", "code"), halves, strict=True))
    with FakeDaemon(folder) as daemon:
        trainer.train()
        daemon.wait_for(Done)
        told = told_losses(daemon)
    logs = trainer.state.log_history
    pairs = [[log[f"eval_{name}_loss"] for log in logs if f"eval_{name}_loss" in log] for name in ("wiki", "code")]
    means = [sum(pair) / 2 for pair in zip(*pairs, strict=True)]
    assert told == [(pytest.approx(mean), step) for mean, step in zip(means, (0, 2, 4), strict=True)]


def test_the_loss_of_a_test_set_is_no_held_out_loss(folder: Path) -> None:
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, **EVALUATED)
    tests = torch.utils.data.Subset(Rows(), [3])

    class Tester(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % 2:  # else the Trainer would make no evaluation of its own
                trainer.evaluate(tests, metric_key_prefix="test")
                trainer.predict(tests)

    trainer.add_callback(Tester())
    trainer.evaluate()  # before the run nobody hears of it
    with FakeDaemon(folder) as daemon:
        trainer.train()
        daemon.wait_for(Done)
        told = told_losses(daemon)
    trainer.evaluate()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert told == [(pytest.approx(loss), step) for loss, step in zip(losses[:2], (2, 4), strict=True)]


class Scores(Language):
    """Leaves its loss to the trainer."""

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.embedding(input_ids)}


class Labelled(Rows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"labels": torch.tensor(1.0)}


def test_a_loss_that_the_trainer_computes_is_told_as_it_logs_it(folder: Path) -> None:
    trainer, _, _ = hf_trainer(folder, model=Scores(), logging_steps=1, eval_strategy="steps", eval_steps=2)
    trainer.compute_loss_func = lambda output, labels, **_: (output["logits"] - labels.view(-1, 1, 1)).square().mean()
    trainer.train_dataset = trainer.eval_dataset = Labelled()
    trainer.label_names = ["labels"]
    with FakeDaemon(folder) as daemon:
        trainer.train()
        daemon.wait_for(Done)
        losses = [message.loss for message in daemon.said if isinstance(message, Report)]
        told = told_losses(daemon)
    logged = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[0] is None, "the first comes behind its step"
    assert all(loss == pytest.approx(logged[at]) for at, loss in enumerate(losses[1:3]))
    assert [step for _, step in told] == [2, 4]


@pytest.mark.parametrize("is_after", [True, False])
def test_an_evaluation_of_other_data_does_not_replace_the_held_out_loss(folder: Path, *, is_after: bool) -> None:
    from transformers import TrainerCallback

    trainer, _, _ = hf_trainer(folder, **EVALUATED)
    others = torch.utils.data.Subset(Rows(), [3])

    class Other(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, _: Any, __: Any, ___: Any, metrics: dict[str, float], **____: Any) -> None:
            if is_after and "eval_loss" in metrics:
                trainer.evaluate(others, metric_key_prefix="eval_train")

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if not is_after and state.global_step % 2 == 0:
                trainer.evaluate(others, metric_key_prefix="eval_train")
                trainer.control.should_evaluate = True

    trainer.add_callback(Other())
    with FakeDaemon(folder) as daemon:
        trainer.train()
        daemon.wait_for(Done)
        told = told_losses(daemon)
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len([log for log in trainer.state.log_history if "eval_train_loss" in log]) == 2
    assert told == [(pytest.approx(loss), step) for loss, step in zip(losses, (2, 4), strict=True)]


def test_what_the_script_tells_of_several_data_sets_stands(folder: Path) -> None:
    from transformers import TrainerCallback

    trainer, callback, _ = hf_trainer(folder, **EVALUATED)
    trainer.eval_dataset = {name: torch.utils.data.Subset(Rows(), [row]) for row, name in enumerate(("wiki", "code"))}

    class Own(TrainerCallback):  # type: ignore[misc]
        def on_evaluate(self, _: Any, state: Any, *__: Any, metrics: dict[str, float], **___: Any) -> None:
            if "eval_code_loss" in metrics:
                callback.diloco.evaluated(val_loss=float(state.global_step), val_loss_global=7.0)

    trainer.add_callback(Own())
    with FakeDaemon(folder) as daemon:
        trainer.train()
        done = daemon.wait_for(Done)
        assert told_losses(daemon) == [(2.0, 2), (4.0, 4)]
    assert done.val_loss_global == 7.0


@pytest.mark.parametrize("prefix", ["eval", "eval_wiki"])
def test_a_metric_of_the_scripts_with_the_name_of_a_time_hides_no_loss(folder: Path, prefix: str) -> None:
    trainer, callback, _ = hf_trainer(folder)
    told: list[dict[str, float]] = []
    held_out = {"val_step": None}
    callback.diloco = SimpleNamespace(evaluated=lambda **losses: told.append(losses), _held_out=held_out, global_step=3)
    metrics = {f"{prefix}_model_runtime": 3.0, f"{prefix}_loss": 0.5, f"{prefix}_runtime": 1.0}
    callback.on_evaluate(trainer.args, trainer.state, trainer.control, metrics=metrics)
    callback._go_on()
    assert told == [{"val_loss": 0.5}]


def test_each_data_set_of_an_evaluation_has_a_pause_of_its_own() -> None:
    """Together they may take longer than one pause may last."""
    from transformers import TrainerControl

    from diloco_node.integrations.hf import DilocoCallback

    callback, begun = DilocoCallback(), []
    callback._pause = SimpleNamespace(begin=lambda _, activity, **__: begun.append(activity), end=lambda: None)
    for name in ("en", "de"):
        callback.on_prediction_step()
        callback.on_prediction_step()
        callback.on_evaluate(None, None, TrainerControl(), metrics={f"eval_{name}_loss": 1.0})
    assert begun == ["evaluation"] * 2
