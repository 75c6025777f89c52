"""Lightning's `Trainer` as the learner of a region::

    trainer = Trainer(max_epochs=-1, callbacks=[LightningDiloco()])
    trainer.fit(module, own_part)

The run's end stops the trainer. After a restart parameters come from the run. Optimizer, schedules, gradient scaler and
the number of the epoch come from the learner's checkpoint, the position in the data too where the loader has one
(torchdata's `StatefulDataLoader`, `EndlessLoader`). A warning says where it has none.
The trainer saves the merged parameters, in mid-run too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.attach import Diloco, attach
from diloco_node.learner.forward_watch import count_tokens
from diloco_node.learner.pauses import CallbackPause
from diloco_node.learner.token_check import TokenCheck, TokenCount

log = logging.getLogger("diloco_node.learner")

AVERAGES = (StochasticWeightAveraging, WeightAveraging)


class LightningDiloco(Callback):  # type: ignore[misc]
    """Callback by which Lightning's `Trainer` joins the run.

    Args:
        tokens: of a batch; by its shapes if None (`learner.forward_watch.count_tokens`).
        options: of `diloco_node.attach`, such as `checkpoint_every_s`.

    Attributes:
        diloco: the learner's place in the run; None before training begins.
        token_count: of the batches, to compare with what `tokens` says.
    """

    def __init__(self, tokens: Callable[[Any], int] | None = None, **options: Any) -> None:
        self.diloco: Diloco | None = None
        self._tokens_of = tokens or count_tokens
        self._options = options
        self.token_count = TokenCount()
        self._tokens = 0
        # The trainer's count, which does not have the steps of an optimizer that a module calls without its wrapper;
        # and those that the optimizer has made since the last batch.
        self._step = self._own_steps = 0
        self._unhook: Callable[[], None] = lambda: None
        self._pause = CallbackPause()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run: the model gets its parameters.

        Raises LearnerError: there are several optimizers; which one's steps count, nobody can tell.
        """
        if len(trainer.optimizers) != 1:
            raise LearnerError(
                f"{len(trainer.optimizers)} optimizers: with several, call diloco_node.attach and step() yourself"
            )
        for average in filter(lambda callback: isinstance(callback, AVERAGES), trainer.callbacks):
            log.warning(
                "%s averages this region's own weights. Once the run is over the module holds the run's final "
                "parameters, not that average. Files that WeightAveraging saves have the average as state_dict, and "
                "the merged weights as current_model_state",
                type(average).__name__,
            )
        self._tokens, self._step, self._own_steps = 0, trainer.global_step, 0
        self._unhook()
        self._unhook = trainer.optimizers[0].register_step_post_hook(self._note_step).remove
        stateful = self._stateful(trainer) | self._options.get("stateful", {})
        self.diloco = attach(pl_module, trainer.optimizers[0], **{**self._options, "stateful": stateful})
        self.diloco.save_merged(pl_module)
        fit = trainer.fit_loop
        is_made_later = trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting
        if "data" in stateful and not is_made_later:  # a position is good for one iterator
            iter(fit._data_fetcher)  # the one before was made, and may have read, at the old position
        self.diloco.token_check = TokenCheck([self])
        trainer.should_stop |= self.diloco.should_stop

    def _stateful(self, trainer: Trainer) -> dict[str, Any]:
        stateful: dict[str, Any] = {"epoch": _Epoch(trainer)}
        for number, config in enumerate(trainer.lr_scheduler_configs):
            stateful[f"schedule {number}"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            stateful["gradient scaler"] = scaler
        loader = trainer.train_dataloader
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            stateful["data"] = loader
        elif "data" not in self._options.get("stateful", {}):
            log.warning(
                "each start of this learner begins its data anew: a %s has no position. Give fit() torchdata's "
                "StatefulDataLoader",
                type(loader).__name__,
            )
        return stateful

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; when the optimizer has made a step, it is a step boundary."""
        if self.diloco is None:
            return
        self._tokens += self._tokens_of(batch)
        self.token_count.add(batch)
        # Several, where a module optimizes by hand.
        steps = trainer.global_step - self._step or self._own_steps
        self._step, self._own_steps = trainer.global_step, 0
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        for _ in range(steps):
            if not self.diloco.should_stop:
                self.diloco.step(tokens=self._tokens, loss=loss if isinstance(loss, Tensor) else None)
                self._tokens = 0
        trainer.should_stop |= self.diloco.should_stop

    def _note_step(self, *_: Any) -> None:
        self._own_steps += 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """No pause lasts until here."""
        self._pause.end()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce an evaluation."""
        self._pause.begin(self.diloco, "evaluation")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Announce a save; it is over when the next batch begins."""
        self._pause.begin(self.diloco, "saving")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the held-out loss, where the module logs one as `val_loss`."""
        loss = trainer.callback_metrics.get("val_loss")
        if self.diloco is not None and loss is not None:
            self.diloco.evaluated(val_loss=float(loss))
        self._pause.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run after all other callbacks: the run's result replaces what they write to the module now."""
        self._pause.end()
        if self.diloco is not None:
            trainer.callbacks.append(_Last(self.diloco))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run with the reason."""
        self._pause.end()
        if self.diloco is not None:
            self.diloco.__exit__(type(exception), exception, exception.__traceback__)


class _Last(Callback):  # type: ignore[misc]
    """A callback behind all others, once; Lightning calls those that are added meanwhile."""

    def __init__(self, diloco: Diloco) -> None:
        self._diloco = diloco

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callbacks.remove(self)
        self._diloco.close()


class _Epoch:
    """The number of the epoch, from which samplers draw their order."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._trainer.current_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        progress = self._trainer.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = state["epoch"]
