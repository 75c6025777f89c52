"""`diloco_node.attach`: makes any PyTorch training loop the learner of a region (docs/training-loop.md).

::

    with diloco_node.attach(model, optimizer) as diloco:          # finds the daemon by DILOCO_SOCKET
        for batch in loader:                                      # of diloco.shards: `integrations.shards`
            loss = train_step(batch)
            diloco.step(tokens=batch.numel(), loss=loss)          # never waits for the network
            if diloco.should_stop:
                break

Without DILOCO_SOCKET it warns once and does nothing. With several ranks (torchrun) each calls it, after the model was
sharded (docs/sharding.md): rank 0 talks to the daemon, and all take the same versions at the same boundary.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from diloco_node.core.types import MergeRule
from diloco_node.errors import ConfigError, DilocoError, LearnerError
from diloco_node.learner.auto_step import AutoStep
from diloco_node.learner.boundary import StepBoundaries
from diloco_node.learner.checkpoint import Stateful, TrainingProgress
from diloco_node.learner.checkpointing import Checkpointing
from diloco_node.learner.daemon_session import LearnerSession, fragments_of, join, manifest_of
from diloco_node.learner.first_parameters import FirstParameters
from diloco_node.learner.frozen_tensors import frozen_listing
from diloco_node.learner.layouts.module_group import ModuleGroup
from diloco_node.learner.layouts.names import unwrap
from diloco_node.learner.layouts.shard_map import agreed, describe
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.leaving import EndWish, end_on_final, failure, is_at_end, note_refusal_of_rank, refusals_noted
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.loop_view import LoopView
from diloco_node.learner.loss import NOT_EVALUATED, HeldOutLoss, held_out_losses
from diloco_node.learner.loss_watch import LossWatch
from diloco_node.learner.model_state import SavedStates, model_state
from diloco_node.learner.model_watch import ModelWatch
from diloco_node.learner.omissions import attach_warnings
from diloco_node.learner.pauses import announce_pause
from diloco_node.learner.process_signals import LearnerPlace, TerminateFlag
from diloco_node.learner.ranks import Boundary, Ranks
from diloco_node.learner.region_shards import HERE
from diloco_node.learner.several_optimizers import OptimizerArgument, as_one, parameters_of
from diloco_node.learner.tensor_forms import check_apart
from diloco_node.learner.token_check import TokenCheck, whole_tokens
from diloco_node.shared_memory import BUSY_MAX_S
from diloco_node.wire.learner_link import Done, Failed

log = logging.getLogger("diloco_node.learner")

CHECKPOINT_EVERY_S: Final = 60.0
ON_SPIKE_VARIABLE: Final = "DILOCO_SPIKES"
USABLE: Final = torch.inference_mode(mode=False)
"""Tensors that are made in a loop's `inference_mode` could never be written to outside of it."""


@USABLE
@refusals_noted()
def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: OptimizerArgument = None,
    *,
    masters: Mapping[str, Tensor] | None = None,
    merge: Mapping[str, MergeRule] | None = None,
    buffers: Sequence[str] = (),
    untied: Sequence[str] = (),
    stateful: Mapping[str, Stateful] | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    step: Literal["call", "auto"] = "call",
) -> Diloco:
    """Join the run of this region's daemon. Returns when the model holds the run's parameters, before the first step.

    Args:
        model: its trainable parameters are overwritten now, and changed in place at step boundaries later.
            DistributedDataParallel, torch.compile and DTensors are fine. Several modules, such as a model and a loss
            with weights, are one model.
        optimizer: what it holds is merged, what no optimizer holds is not. Moments are kept in the learner's checkpoint
            and come back after a restart, with the settings of the script. A list of several is kept as one.
        masters: name of a parameter -> float32 master of it, for optimizers that keep their own.
        merge: name of a parameter -> rule, where the guess (embeddings and head are averaged) is wrong.
        buffers: patterns of the names of buffers that train, such as "*.expert_bias": they are merged by their mean.
        untied: names of embeddings and heads that begin as copies of another rank's weight, but are trained apart.
        stateful: parts of the loop that a restart continues: data loader, schedule, random generator, frozen module.
        checkpoint_every_s: seconds between checkpoints of optimizer and `stateful`, at most; 0 for none. There are more
            as long as they take less than a hundredth of the time.
        step: "call": the loop calls `Diloco.step`. "auto": each step of the optimizer is one. Tokens are counted by the
            shapes that the model is given (`learner.forward_watch.count_tokens`); its output's `loss` is taken.

    Raises:
        LearnerError: the model can't be merged, the run's model is another one, the optimizer's state can't be kept,
            or the daemon refuses this learner.
        ConfigError: the run's number of fragments does not fit this model.
    """
    if step not in ("call", "auto"):
        raise LearnerError(f'attach(step={step!r}): give "call", or "auto" to follow the optimizer')
    modules = [model] if isinstance(model, nn.Module) else list(model)
    whole = ModuleGroup([unwrap(module) for module in modules]) if len(modules) != 1 else modules[0]
    joint = as_one(optimizer)
    holdings = None if joint is None else parameters_of(joint)
    tensors = ModelTensors(
        whole, masters=masters, merge=merge, buffers=buffers, untied=untied, optimizer_tensors=holdings
    )
    check_apart(tensors.followed)
    return Diloco(
        joint,
        tensors=tensors,
        stateful=stateful or {},
        checkpoint_every_s=checkpoint_every_s,
        auto_step=AutoStep(modules[0], joint) if step == "auto" else None,
    )


class Diloco(LoopView):
    """A training loop's place in the run; made by `attach`, used as a context manager.

    token_check: compares the tokens of `step` with those of a loader in `stateful`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        tensors: ModelTensors,
        stateful: Mapping[str, Stateful],
        checkpoint_every_s: float,
        auto_step: AutoStep | None,
    ) -> None:
        super().__init__()
        self.token_check = TokenCheck(stateful.values())
        self._tensors = tensors
        self._checkpoints = Checkpointing(optimizer, stateful, every_s=checkpoint_every_s, warn=self._warn)
        self._blocked_ns, self._has_left = 0, False  # in `step` so far; whether nothing is told or written any more
        self._losses = LossWatch(is_rolling_back=os.environ.get(ON_SPIKE_VARIABLE) == "rollback")
        self._session: LearnerSession | None = None  # on rank 0 of a region with a daemon
        # On every rank of a run from `_join` on, the watch from its end on; None alone.
        self._fragments: LearnerFragments | None = None
        self._boundaries: StepBoundaries | None = None
        self._watch: ModelWatch | None = None
        self._refusal: LearnerError | None = None  # it ends with that, also where the loop has caught it
        self._terminate, self._place, self._wish = TerminateFlag(), LearnerPlace(), EndWish()
        self._ranks, self._auto_step, self._held_out = Ranks(), auto_step, NOT_EVALUATED
        self._saves = SavedStates(tensors, self._ranks, self._checkpoints.hold)
        try:
            self._join()
        except BaseException as error:
            self._fail(error)
            raise
        if auto_step is not None:
            auto_step.begin(lambda tokens, loss: self.step(tokens=tokens, loss=loss), self._refuse)

    @property
    def _is_closed(self) -> bool:
        """Whether this is over: after `close`, and in a process that the loop has forked."""
        return self._has_left or self._place.is_forked

    @property
    def is_attached(self) -> bool:
        """Whether there is a run; False without DILOCO_SOCKET."""
        return self._fragments is not None

    @property
    def blocked_seconds(self) -> float:
        """Time that the loop has spent in `step`, whatever it did there."""
        return self._blocked_ns / 1e9

    @property
    def versions(self) -> tuple[int, ...]:
        """The version last applied of each fragment, -1 for none; empty when alone, and on ranks other than 0."""
        positions = () if self._session is None else self._session.fragments.positions
        return tuple(position.base_version for position in positions)

    @USABLE
    def step(self, *, tokens: int, loss: Tensor | float | None = None, grad_norm: Tensor | float | None = None) -> None:
        """Mark a step boundary: one inner step (one `optimizer.step()`) was made. Waits for nobody, but past the end.

        With gradient accumulation call it once per optimizer step, with the tokens of all micro-batches.

        Args:
            tokens: trained in this step by this rank; a number on the CPU, for one on a GPU would be waited for.
            loss: of this step; a tensor is read later, without waiting for the device. Several values are averaged.
            grad_norm: of this step, before clipping, such as `clip_grad_norm_` returns it; read later as well.

        Raises:
            LearnerError: parameters are not finite, the optimizer undid a version (see `masters`), a newer learner
                process has taken this one's place, tokens are no whole number, or loss or norm no number. Loss or norm
                were not finite several times in a row, or far outside of their range and `on_spike` is `rollback`: the
                next start takes the merged parameters.
        """
        started_ns = time.perf_counter_ns()
        if self._auto_step is not None and not self._auto_step.is_stepping:
            raise LearnerError('attach(step="auto") counts each step of the optimizer by itself: do not call step()')
        try:
            tokens = whole_tokens(tokens)
            self.steps += 1
            if self._fragments is not None:
                self._attached_step(tokens, loss, grad_norm, started_ns)
            else:
                self.global_step, self.tokens = self.global_step + 1, self.tokens + tokens
                self._stop_if(self._terminate.is_set, "the process was asked to stop")
        except LearnerError as error:
            if self.should_stop and self._refusal is None and isinstance(error.__cause__, RuntimeError):
                self._terminate.exit_late()  # a rank that was told as well has exited already
            self._refuse(error)
            raise
        self.token_check.step(tokens, total=self.tokens, ranks=self._ranks.size, warn=self._warn)
        self._blocked_ns += time.perf_counter_ns() - started_ns

    def _refuse(self, error: LearnerError) -> None:
        """End with this error, whatever the loop makes of it: one that catches all exceptions would go on with it."""
        if self._refusal is None and not self._is_closed:
            self._refusal = LearnerError(str(error))  # a traceback would keep the loop's tensors alive
            self._stop_if(True, f"this learner has failed, and ends with that: {error}", logging.ERROR)
            if self._session is not None:
                self._session.fail(failure(error).reason)
            elif self.is_attached:
                note_refusal_of_rank(error)

    def _attached_step(
        self, tokens: int, loss: Tensor | float | None, grad_norm: Tensor | float | None, started_ns: int
    ) -> None:
        self._check_open("step()")
        self._saves.step()
        session = self._session
        is_told = self.should_stop and self.steps > 1
        if session is not None:
            session.timer.stepped(started_ns)
            session.run_clock.stepped()
            self._losses.offer(loss, grad_norm)
            self._losses.check(session.run_clock.global_step, self._warn)
        assert self._boundaries is not None and self._watch is not None  # noqa: PT018 - no test
        with self._boundaries.whole():
            boundary = self._crossed(self._boundaries.cross_step(tokens, self._watch.check))
            self.tokens += boundary.tokens
            self._watch.note_writes(self._boundaries.fragments.applied)
        if session is not None and session.is_report_due(started_ns):
            self._report(session)
        if is_told and boundary.has_exit:  # the loop does not look at should_stop: all ranks leave here
            self.close()
            raise SystemExit

    def _crossed(self, boundary: Boundary) -> Boundary:
        """Show the loop what the ranks agreed on."""
        self.global_step, self.progress = boundary.global_step, boundary.part
        if boundary.is_stopping and not self.should_stop:
            reason = self._ranks.share_bytes(((self._session and self._session.stop_reason) or "").encode()).decode()
            self.is_interrupted = not reason
            asked = "the process" if self._terminate.is_set else "rank 0, or another,"
            self._stop_if(True, reason or f"{asked} was asked to stop")
            if reason and self._boundaries is not None:
                self._saves.is_over = end_on_final(self._boundaries)  # for what the block saves, too
        if boundary.wants_checkpoint and boundary.is_idle and self._boundaries is not None:
            self._checkpoints.save(self._boundaries.progress(self.global_step))
        return boundary

    def _check_open(self, call: str) -> None:
        if self._refusal is not None:
            raise LearnerError(f"{call} after an error that the loop has caught: {self._refusal}")
        if self._is_closed and self.is_attached:
            raise LearnerError(f"{call} after the `with` block, after close(), or in a child: no learner is here")

    def _report(self, session: LearnerSession) -> None:
        session.report(self._losses.loss.newest(), self._blocked_ns, self.global_step, **self._held_out)

    def busy(self, activity: str, *, at_most_s: float = BUSY_MAX_S) -> contextlib.AbstractContextManager[None]:
        """Announce a pause without steps: `with diloco.busy("evaluation"):`. Before `at_most_s` it is no hang.

        A checkpoint is begun first, so that a process that is ended in the pause loses no steps before it.
        """
        save = partial(self._save, self._checkpoints.save_before_pause)
        return announce_pause(None if self._is_closed else self._session, activity, at_most_s, before=save)

    def evaluated(self, *, val_loss: HeldOutLoss = None, val_loss_global: HeldOutLoss = None) -> None:
        """Tell held-out losses, of the own and of the global parameters; waits for tensors. Raises LearnerError."""
        self._held_out = held_out_losses(self.global_step, val_loss, val_loss_global, warn=self._warn)
        if self._session is not None and self.steps and not self._is_closed:
            self._report(self._session)

    def global_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict()` with the global parameters as last applied: for evaluation. Copies on the CPU.

        Names are those of the model without DistributedDataParallel, torch.compile and activation checkpointing,
        shapes those of whole tensors; buffers are the own ones. When alone, the model's own parameters.
        Where ranks hold parts of the model, all call this, and those but rank 0 get {}. Else only rank 0 may.

        Raises LearnerError: on another rank, or not called by all that have to.
        """
        state = model_state(self._tensors, self._ranks, self._fragments, LearnerFragments.global_vectors, self._session)
        self._checkpoints.give(state)
        self._saves.announce()
        return state

    def own_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict()` with what this region came to by itself: to compare with the global parameters.

        Once the run's last merges have begun, those from just before: what they leave is the global parameters plus a
        few steps. Callers and errors: see `global_state_dict`.
        """
        return model_state(self._tensors, self._ranks, self._fragments, LearnerFragments.own_vectors)

    def save_merged(self, module: nn.Module, *, is_asked: bool = True) -> None:
        """Have the module's `state_dict()` hold the merged parameters until this learner leaves: trainers save them.

        is_asked: by the script. Else who first reads such a state, and saves nothing, is told what it holds.
        """
        self._saves.merge(module, is_asked=is_asked)

    def finish(self, reason: str) -> None:
        """Vote for the run's end. When most regions do, or when alone, `should_stop` is set. One rank is enough."""
        self._check_open("finish()")
        self._wish.make(reason)
        self._stop_if(not self.is_attached, reason)

    @USABLE
    def settle(self, seconds: float) -> None:
        """Go on taking versions for some time without stepping. All ranks call it, or LearnerError is raised."""
        if self._boundaries is not None and self._watch is not None and not self._is_closed:
            self._check_open("settle()")
            self._saves.end_pause()
            self._watch.check_writes()
            try:
                for boundary in self._boundaries.settle(seconds):
                    self._crossed(boundary)
            except LearnerError as error:
                if self._ranks.can_meet:  # else nothing was begun
                    self._refuse(error)
                raise
            self._watch.note_writes(self._boundaries.fragments.applied)

    def checkpoint(self) -> None:
        """Write a checkpoint of optimizer and `stateful` now, and wait until it is on disk. All ranks call it."""
        self._save(self._checkpoints.save_now)

    @USABLE
    def _save(self, save: Callable[[TrainingProgress], None]) -> None:
        if self._boundaries is not None and not self._is_closed and self._refusal is None:
            save(self._boundaries.progress(self.global_step))
            if self._session is not None and self._ranks.size == 1:  # others may have failed to write: a boundary tells
                self._session.stand(self._checkpoints.written_step)

    def __enter__(self) -> Diloco:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, GeneratorExit) and self._ranks.size > 1:
            if not self._saves.is_over:
                self._warn("the loop ended in a generator: the last steps of several ranks are merged nowhere")
            try:
                return self.checkpoint()  # of this rank; it counts if all come here
            finally:
                self._close(None)
        if error is None or self._terminate.is_orderly(error, is_alone=self._ranks.size == 1):
            return self.close()
        if self._session is not None and self._wish.reason and not self._is_closed:
            self._session.want_end(self._wish.reason)
        self._fail(error)

    @USABLE
    def close(self) -> None:
        """Leave: all ranks. A finished run's parameters come into the model, the last checkpoint is written. An exit by
        a handler of the script's that came meanwhile, or had to wait, is raised at the end, on all ranks."""
        session, boundaries = self._session, self._boundaries
        with self._terminate.leaving(is_alone=self._ranks.size == 1 or not self._ranks.can_meet):
            if boundaries is None or self._is_closed:
                return self._close(None)
            self._saves.end_pause()
            if boundaries.is_crossing.is_set() or self._refusal is not None:  # half a merge is no result
                return self._fail(self._refusal or LearnerError("a step() did not come to its end"))
            try:
                foreign = self._watch.foreign_write() if self._watch is not None else ""
                has_result = end_on_final(boundaries, foreign)
                if is_leaving := boundaries.are_leaving(self.should_stop):
                    self._save(partial(self._checkpoints.begin, are_idle=boundaries.are_idle()))  # written meanwhile
                    if session is not None:
                        self._report(session)  # rounds are opened for the steps that were reported
                        if foreign and session.has_unmerged_steps:
                            self._warn(foreign)
                    for boundary in boundaries.leave(0.0 if foreign else self._terminate.deadline_s):
                        self._crossed(boundary)
                self._save(self._checkpoints.finish if is_leaving else self._checkpoints.save_now)
                if is_leaving:
                    boundaries.tell_written()
                    was_over = self.should_stop and not self.is_interrupted
                    self.is_interrupted = not is_at_end(boundaries, was_over, has_result)
                elif session is not None:
                    if foreign and not has_result:
                        self._warn(foreign)
                    self.is_interrupted = session.stop_reason is None and (self.should_stop or self._terminate.is_set)
                boundaries.agree_on_exit()
            except BaseException as error:
                self._fail(error)
                raise
            if session is None or self._is_closed or self.is_interrupted:
                return self._close(None)
            counts = session.fragments.step, session.fragments.tokens
            self._close(Done(*counts, blocked_ns=self._blocked_ns, **self._held_out))

    def _fail(self, error: BaseException) -> None:
        last = failure(error)
        # Whoever has left, or is a copy that the learner has forked, fails for itself alone.
        if not self._is_closed and self._session is not None and isinstance(error, DilocoError):
            self._session.fail(last.reason)
        self._close(last)

    def _close(self, last: Done | Failed | None) -> None:
        if self._is_closed:
            return
        self._has_left = True
        self._terminate.restore()
        self._saves.leave()
        self._place.leave()
        if self._watch is not None:
            self._watch.close()
        if self._auto_step is not None:
            self._auto_step.close()
        if self._session is not None:
            self._session.close(last, has_stop=self.is_interrupted or self._terminate.has_stop)
        elif self._fragments is not None:
            self._fragments.close()
        self._checkpoints.wait()
        self._ranks.close()

    def _join(self) -> None:
        self._tensors.check_known(self._ranks.all_bytes)
        socket, memory = os.environ.get("DILOCO_SOCKET", ""), os.environ.get("DILOCO_SUPERVISOR", "")
        if not self._ranks.have_daemon(socket):
            if self._ranks.is_first:
                warnings.warn(
                    "DILOCO_SOCKET is not set: training alone. Start this script with "
                    "`diloco-node start --region NAME -- COMMAND` to join a run",
                    stacklevel=6,
                )
            return
        self._place.take()
        HERE.clear(self._checkpoints.stateful.values())
        self._terminate.install()
        description = describe(self._tensors.specs, self._tensors.boxes, self._tensors.marks)
        specs, shards = agreed(self._ranks.all_bytes(description))
        listing = frozen_listing(self._tensors, self._ranks)
        if self._ranks.is_first:
            if not memory:
                raise ConfigError("DILOCO_SOCKET is set, but DILOCO_SUPERVISOR is not: start through diloco-node start")
            self._session = LearnerSession(
                Path(socket), Path(memory), self._tensors, listing, specs=specs, shards=shards, ranks=self._ranks
            )
            self._session.follow_stop(self._terminate)
        welcome = join(self._session, self._ranks, self._terminate.is_asked)
        if welcome is None:
            self.is_interrupted = self._terminate.is_set
            self._stop_if(True, "asked to stop before the daemon answered")
            HERE.keep_all()
            if self._session is not None:
                self._session.close(None, has_stop=self.is_interrupted)
                self._session = None
            return
        self.region, self.region_index, self.region_names = welcome.region, welcome.region_index, welcome.regions
        self.global_step = welcome.global_step
        if self._session is not None:
            self._fragments = self._session.fragments
            for text in attach_warnings(self._tensors, [spec.name for spec in specs]):
                self._warn(text)
        else:
            HERE.begin(welcome, is_first=False)
            manifest = manifest_of(specs, welcome)
            self._fragments = fragments_of(welcome, self._tensors, manifest, shards=shards, ranks=self._ranks)
        progress = self._checkpoints.resume(
            Path(welcome.state_dir), welcome.manifest_digest, self._ranks, tensors=self._tensors, shards=shards
        )
        first = FirstParameters(self._tensors, self._fragments, shards, self._ranks, welcome)
        # The run may be further than this region's learner was when it died, or its daemon may not know yet how far.
        self.global_step = max(self.global_step, progress.global_step)
        if self._session is not None:
            self._session.run_clock.resume(self.global_step)
        self._boundaries = StepBoundaries(
            self._ranks, self._fragments, self._session, self._checkpoints, self._terminate, self._wish, self._warn
        )
        self._crossed(self._boundaries.place())
        if text := first.difference(self._fragments.positions):
            self._warn(text)
        parts = self._checkpoints.optimizer, self._checkpoints.stateful.values()
        self._watch = ModelWatch(self._tensors, self._warn, *parts, is_auto=bool(self._auto_step), refuse=self._refuse)
        self._fragments.pending_looks = self._watch.pending_looks
        self._saves.begin(self._fragments, self._session)

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        if self._session is not None and not self._is_closed:  # a child that was forked has neither link nor its lock
            self._session.warn(text)
