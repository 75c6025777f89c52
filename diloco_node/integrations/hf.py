"""Hugging Face `Trainer` as the learner of a region::

    trainer = Trainer(model=model, args=args, train_dataset=own_part, callbacks=[DilocoCallback()])
    trainer.train()

The run's end stops the trainer; `max_steps` or `num_train_epochs` must not come before it. After a restart parameters
come from the run. Optimizer and learning-rate schedule come from the learner's checkpoint.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco_node.learner.attach import Diloco, attach


class DilocoCallback(TrainerCallback):  # type: ignore[misc]
    """See the module. Tokens are counted by the shape of what the model is given, padding included.

    Args:
        options: of `diloco_node.attach`, such as `checkpoint_every_s`.

    Attributes:
        diloco: the learner's place in the run; None before training begins.
    """

    def __init__(self, **options: Any) -> None:
        self.diloco: Diloco | None = None
        self._options = options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Join the run: the model gets its parameters."""
        stateful = {"lr_scheduler": given["lr_scheduler"]} if given.get("lr_scheduler") is not None else {}
        stateful |= self._options.get("stateful", {})
        self.diloco = attach(given["model"], given["optimizer"], step="auto", **{**self._options, "stateful": stateful})
        self._stop(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The step was counted at the optimizer; stop when the run is over."""
        self._stop(control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Tell the held-out loss."""
        metrics = given.get("metrics") or {}
        if self.diloco is not None and "eval_loss" in metrics:
            self.diloco.evaluated(val_loss=float(metrics["eval_loss"]))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Leave the run."""
        if self.diloco is not None:
            self.diloco.close()

    def _stop(self, control: TrainerControl) -> None:
        if self.diloco is not None and self.diloco.should_stop:
            control.should_training_stop = True
