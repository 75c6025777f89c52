"""Hugging Face `Trainer` as the learner of a region::

    trainer = Trainer(model=model, args=args, train_dataset=own_part, callbacks=[DilocoCallback()])
    trainer.train()

The run's end stops the trainer; `max_steps` or `num_train_epochs` must not come before it. After a restart parameters
come from the run. Optimizer, schedule, gradient scaler and the position in the data come from the learner's checkpoint;
where that position can't be kept, a warning says so. The trainer saves the merged parameters, in
mid-run too. The held-out loss is the metric `eval_loss`; of several data sets the mean of their `eval_NAME_loss`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from statistics import fmean
from types import TracebackType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from transformers.training_args import ParallelMode

from diloco_node.errors import LearnerError
from diloco_node.integrations.prepared_loader import PreparedLoader
from diloco_node.learner.attach import Diloco, attach
from diloco_node.learner.pauses import CallbackPause

log = logging.getLogger("diloco_node.learner")


class DilocoCallback(TrainerCallback):  # type: ignore[misc]
    """Callback by which Hugging Face's `Trainer` joins the run.

    Tokens are counted by the shape of what the model is given, padding included.

    Args:
        options: of `diloco_node.attach`, such as `checkpoint_every_s`.

    Attributes:
        diloco: the learner's place in the run; None before training begins.
    """

    def __init__(self, **options: Any) -> None:
        self.diloco: Diloco | None = None
        self._options = options
        self._pause = CallbackPause()
        # Whether the pause is one for an evaluation.
        self._is_evaluating = False
        self._hook_before: Any = None
        # Where the data are; None if something else keeps that, or nothing can.
        self._data: PreparedLoader | None = None
        # Begun since on_train_begin.
        self._epochs = 0
        # Of the data sets of an evaluation, by the prefix of their metrics, until it is over.
        self._val_losses: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **context: Any
    ) -> None:
        """Join the run: the model gets its parameters.

        Raises LearnerError: a launcher has started several ranks, and the trainer trains each of them by itself; or it
            would spread a batch over several GPUs.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and args.parallel_mode != ParallelMode.DISTRIBUTED:
            raise LearnerError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the Trainer is {args.parallel_mode.value}: each rank "
                "would train a model of its own. On a CPU, give TrainingArguments(use_cpu=True)"
            )
        is_quantized = any(getattr(context["model"], f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        if args.n_gpu > 1 and not is_quantized:  # as the Trainer decides
            raise LearnerError(
                f"the Trainer has {args.n_gpu} GPUs in one process, and their tokens can't be counted: start it by "
                "torchrun, with a process for each GPU, or give it one GPU by CUDA_VISIBLE_DEVICES"
            )
        if args.load_best_model_at_end:
            log.warning(
                "load_best_model_at_end: once the run is over the model holds the run's final parameters, not those of "
                "the best checkpoint, which stays in output_dir. It holds the best checkpoint only where this trainer "
                "ends before the run, such as by early stopping"
            )
        # Training that was ended by an exception tells no callback; the loop may have caught it, to train again.
        self._leave(LearnerError("train() was called again"))
        stateful = {"lr_scheduler": context["lr_scheduler"]} if context.get("lr_scheduler") is not None else {}
        stateful |= self._options.get("stateful", {})
        self._data, self._epochs = self._position(args, state, context.get("train_dataloader"), stateful), 0
        self.diloco = attach(
            context["model"], context["optimizer"], step="auto", **{**self._options, "stateful": stateful}
        )
        self.diloco.save_merged(context["model"], is_asked=False)
        self._hook_before, sys.excepthook = sys.excepthook, self._failed
        # After that of executors: they are called in reverse, and what is left to do needs them.
        threading._register_atexit(_leave_at_exit, os.getpid(), weakref.ref(self))  # type: ignore[attr-defined]
        self._stop(control)

    def _position(
        self, args: TrainingArguments, state: TrainerState, loader: Any, stateful: dict[str, Any]
    ) -> PreparedLoader | None:
        """Add to `stateful` what knows the position in the data, unless it has that already."""
        if "data" in stateful or any(component is loader for component in stateful.values()):
            return None
        if args.ignore_data_skip:
            log.warning("each start of this learner begins its data anew: ignore_data_skip=True asks for that")
            return None
        if not hasattr(loader, "skip_batches") and hasattr(loader, "load_state_dict"):
            stateful["data"] = loader
            return None
        try:
            data = stateful["data"] = PreparedLoader(loader)
        except LearnerError as error:
            log.warning("each start of this learner begins its data anew: %s", error)
            return None
        if state.global_step and not has_length(loader):
            data.place(0, state.global_step * args.gradient_accumulation_steps)
        elif state.global_step:  # from the Trainer's own checkpoint, with which it goes on by itself
            share = (state.epoch or 0.0) % 1
            data.place(int(state.epoch or 0), round(share * len(loader)) if share else 0)
        return data

    def on_epoch_begin(self, *_: Any, **context: Any) -> None:
        """Count the epoch before it, if there was one."""
        if self._data is not None and self._epochs:
            self._data.next_epoch()
        self._epochs += 1

    def on_substep_end(self, *_: Any, **context: Any) -> None:
        """Count a batch after which no step was made."""
        if self._data is not None:
            self._data.batch += 1

    on_pre_optimizer_step = on_substep_end  # of the last batch of a step, before that is counted

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **context: Any) -> None:
        """The step was counted at the optimizer; stop when the run is over, or announce what the trainer does next."""
        self._stop(control)
        self._pause_for(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **context: Any) -> None:
        """Do the same; and go on where the data were restored at their end: no batch in an epoch stops the Trainer."""
        if self._epochs == 1 and self.diloco is not None and not self.diloco.steps:
            control.should_training_stop = False
        self._stop(control)
        self._pause_for(control, "the end of an epoch")  # or of all training, with what callbacks do before ours

    def on_prediction_step(self, *_: Any, **context: Any) -> None:
        """Announce an evaluation that another callback, or the program, has begun."""
        if not self._is_evaluating:
            self._is_evaluating = True
            self._pause.begin(self.diloco, "evaluation")

    def on_step_begin(self, *_: Any, **context: Any) -> None:
        """No pause lasts until here. Before, callbacks after ours may upload what was saved, or evaluate more."""
        self._go_on()

    def _pause_for(self, control: TrainerControl, otherwise: str = "") -> None:
        """Announce what the trainer does next: it evaluates first, then it saves."""
        activity = "evaluation" if control.should_evaluate else "saving" if control.should_save else otherwise
        if activity:
            self._is_evaluating = bool(control.should_evaluate)
            self._pause.begin(self.diloco, activity, is_saving=activity != otherwise)

    def _go_on(self) -> None:
        self._is_evaluating = False
        self._pause.end()
        diloco = self.diloco
        # What was told since the step stands: the loss of `eval_dataset`, or what the script has measured.
        if self._val_losses and diloco is not None and diloco._held_out["val_step"] != diloco.global_step:
            diloco.evaluated(val_loss=fmean(self._val_losses.values()))
        self._val_losses.clear()

    def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **context: Any) -> None:
        """Tell the held-out loss; of several data sets, each of which comes here, the mean before the next step."""
        metrics = context.get("metrics") or {}
        # A metric of the script's may end so, too.
        prefixes = ["eval", *(key.removesuffix("_runtime") for key in metrics if key.endswith("_runtime"))]
        prefix = next((prefix for prefix in prefixes if f"{prefix}_loss" in metrics), "eval")
        loss = metrics.get(f"{prefix}_loss")
        if self.diloco is not None and loss is not None:
            if prefix == "eval":
                self.diloco.evaluated(val_loss=float(loss))
            elif prefix.startswith("eval_"):
                self._val_losses[prefix] = float(loss)
        self._is_evaluating = False  # the next data set has a pause of its own
        self._pause_for(TrainerControl(should_save=control.should_save))

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **context: Any) -> None:
        """Tell the logged loss where the model gives none: with `compute_loss_func` or label smoothing."""
        if self.diloco is not None and logs and "loss" in logs:
            self.diloco._losses.note_logged(float(logs["loss"]))

    def on_train_end(self, *_: Any, **context: Any) -> None:
        """Leave the run."""
        self._leave(None)

    def fail(self, error: BaseException) -> None:
        """Leave the run with the reason, for a program that catches the trainer's exceptions itself."""
        self._leave(error)

    def _failed(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """The process ends by an exception, of which the trainer told nobody: say the reason."""
        hook = self._hook_before
        self._leave(error)
        hook(kind, error, traceback)

    def _leave(self, error: BaseException | None) -> None:
        self._go_on()
        if self._hook_before is None or self.diloco is None:
            return
        if sys.excepthook == self._failed:
            sys.excepthook = self._hook_before
        self._hook_before = None
        if error is None:
            self.diloco.close()
        else:
            self.diloco.__exit__(type(error), error, error.__traceback__)

    def _stop(self, control: TrainerControl) -> None:
        if self.diloco is not None and self.diloco.should_stop:
            control.should_training_stop = True
            if self.diloco.is_interrupted:  # the machine may be gone before an evaluation is over
                control.should_evaluate = False


def _leave_at_exit(pid: int, reference: weakref.ref[DilocoCallback]) -> None:
    """Leave in order where a handler of a stop signal has ended the process: `sys.exit` calls no `sys.excepthook`."""
    callback = reference()
    if callback is None or callback.diloco is None or os.getpid() != pid:  # a loader's process is a fork
        return
    if (
        callback.diloco._terminate.has_stop and callback.diloco._ranks.size == 1
    ):  # others may be in the middle of a step
        try:
            callback.fail(SystemExit())
        except (SystemExit, KeyboardInterrupt):  # the stop came once more, and waited
            pass
        except BaseException as error:  # noqa: BLE001 - threads that others are to end would be waited for
            log.error("the last steps may be in no checkpoint and no merge: %s", error)
