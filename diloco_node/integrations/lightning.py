"""Lightning's `Trainer` as the learner of a region::

    trainer = Trainer(max_epochs=-1, callbacks=[LightningDiloco()])
    trainer.fit(module, own_part)

The run's end stops the trainer. After a restart parameters come from the run. Optimizer, schedules, gradient scaler and
the number of the epoch come from the learner's checkpoint, the position in the data too where the loader has one
(torchdata's `StatefulDataLoader`, `EndlessLoader`). A warning says where it has none. The epoch then ends at the batch
at which it would have; an evaluation at its end that was cut off is not made again. Lightning reads a batch ahead of
a loader without a length, which a restart passes over.
The trainer saves the merged parameters, in mid-run too.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from statistics import fmean
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
        self._epoch: _Epoch | None = None

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
        stateful = self._stateful(trainer) | self._options.get("stateful", {})
        self._epoch = _Epoch(trainer, has_data="data" in stateful)
        stateful = {"epoch": self._epoch} | stateful
        handlers: list[Any] = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
        self.diloco = attach(pl_module, trainer.optimizers[0], **{**self._options, "stateful": stateful})
        if trainer.world_size > 1 and self.diloco.is_attached:
            # It calls a collective of all ranks wherever each one is. Ours has them leave at one boundary.
            handlers[:] = [item for item in handlers if item != trainer._signal_connector._sigterm_notifier_fn]
        self._unhook = trainer.optimizers[0].register_step_post_hook(self._note_step).remove
        self.diloco.save_merged(pl_module, is_asked=False)
        fit = trainer.fit_loop
        is_made_later = trainer.current_epoch > 0 and not fit.is_resuming and not fit.epoch_loop.restarting
        # A position is good for one iterator: that of before was made, and may have read, at the old position, and one
        # at the end of an epoch would make an epoch without batches. Where there was none, a stream has read ahead.
        is_stream = fit._data_fetcher.length is None and not self._epoch.is_behind
        for _ in range(self._epoch.is_at_end + (not is_made_later) if "data" in stateful and not is_stream else 0):
            iter(fit._data_fetcher)
        self.diloco.token_check = TokenCheck([self])
        trainer.should_stop |= self.diloco.should_stop

    def _stateful(self, trainer: Trainer) -> dict[str, Any]:
        stateful: dict[str, Any] = {}
        for number, config in enumerate(trainer.lr_scheduler_configs):
            stateful[f"schedule {number}"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            stateful["gradient scaler"] = scaler
        loader = trainer.train_dataloader
        is_replaced = trainer.reload_dataloaders_every_n_epochs > 0  # the position would be that of the first loader
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict") and not is_replaced:
            stateful["data"] = loader
        elif "data" not in self._options.get("stateful", {}):
            log.warning(
                "each start of this learner begins its data anew: %s",
                "with reload_dataloaders_every_n_epochs no position is kept: leave it out"
                if is_replaced
                else f"a {type(loader).__name__} has no position. Give fit() torchdata's StatefulDataLoader",
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
        if self.diloco is None or self._epoch is None:
            return
        self._epoch.note()
        self._tokens += self._tokens_of(batch)
        self.token_count.add(batch)
        # Several, where a module optimizes by hand.
        steps = trainer.global_step - self._step or self._own_steps
        self._step, self._own_steps = trainer.global_step, 0
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        for number in range(steps):
            if number and self.diloco.should_stop:
                break  # the trainer leaves after the batch
            # The batch has one loss.
            self.diloco.step(tokens=self._tokens, loss=loss if isinstance(loss, Tensor) and not number else None)
            self._tokens = 0
        trainer.should_stop |= self.diloco.should_stop
        # Then it ends after this batch, and validates nothing more.
        trainer._signal_connector.received_sigterm |= self.diloco.is_interrupted

    def _note_step(self, *_: Any) -> None:
        self._own_steps += 1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the batches that lives before had of this epoch. No pause lasts until here."""
        self._pause.end()
        if self._epoch is not None:
            self._epoch.catch_up()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce an evaluation."""
        self._pause.begin(self.diloco, "evaluation")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Announce a save; like all pauses it is over when the next batch begins."""
        self._pause.begin(self.diloco, "saving")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the held-out loss, where the module logs one as `val_loss`; of several loaders the mean."""
        metrics = trainer.callback_metrics.items()
        losses = [float(loss) for key, loss in metrics if key.partition("/dataloader_idx_")[0] == "val_loss"]
        if self.diloco is not None and losses:
            self.diloco.evaluated(val_loss=fmean(losses))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Announce what other callbacks do now, and at the end of all training: an upload, say."""
        self._pause.begin(self.diloco, "the end of an epoch", is_saving=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run after all other callbacks: the run's result replaces what they write to the module now."""
        if self.diloco is not None:
            trainer.callbacks.append(_Last(self._pause, self.diloco))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the run with the reason."""
        self._pause.end()
        # One that did not come to its turn would go from the list at the next end, and have another one skipped.
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, _Last)]
        if self.diloco is not None:
            self.diloco.__exit__(type(exception), exception, exception.__traceback__)


class _Last(Callback):  # type: ignore[misc]
    """A callback behind all others, once; Lightning calls those that are added meanwhile."""

    def __init__(self, pause: CallbackPause, diloco: Diloco) -> None:
        self._pause, self._diloco = pause, diloco

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.callbacks.remove(self)
        self._pause.end()
        self._diloco.close()


class _Epoch:
    """The number of the epoch, from which samplers draw their order, and of its batches, by which the trainer ends it.

    has_data: the data go on where they were, too.

    Attributes:
        is_at_end: the data go on at the end of an epoch, and the trainer in the next one. is_behind: batches of
            lives before are still to be counted.
    """

    def __init__(self, trainer: Trainer, *, has_data: bool) -> None:
        self._trainer, self._has_data = trainer, has_data
        self._loop = trainer.fit_loop.epoch_loop
        self.is_at_end = self.is_behind = False
        self._state = {"epoch": trainer.current_epoch}

    def note(self) -> None:
        """Keep where a batch has ended: until the next one does, the trainer's numbers may be of either epoch."""
        progress = self._loop.batch_progress
        self._state = {
            "epoch": self._trainer.current_epoch,
            "batches": progress.current.ready if self._has_data else 0,
            "all_batches": progress.total.ready,
            "is_last": self._loop._num_ready_batches_reached(),
        }

    def catch_up(self) -> None:
        """Count the batches of lives before, when the first one of this life begins."""
        if not self.is_behind:
            return
        self.is_behind = False
        progress, fetcher = self._loop.batch_progress, self._trainer.fit_loop._data_fetcher
        progress.total.increment_by(self._state["all_batches"] + 1 - progress.total.ready)
        if self._trainer.current_epoch != self._state["epoch"]:
            return  # the data had no more of it
        count = self._state["batches"] + 1 - progress.current.ready
        progress.current.increment_by(count)
        fetcher.fetched += count
        if fetcher.length is not None:
            progress.is_last_batch = fetcher.done = fetcher.fetched >= fetcher.length

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, batches = self._trainer, state.get("batches", 0) if self._has_data else 0
        is_over = state.get("is_last", False) or batches >= trainer.num_training_batches
        self.is_at_end = is_over and trainer.fit_loop._data_fetcher.length is not None
        epoch = state["epoch"] + is_over
        progress = trainer.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = epoch
        all_batches = state.get("all_batches", 0)
        self._state = {"epoch": epoch, "batches": 0 if is_over else batches, "all_batches": all_batches}
        self.is_behind = True
