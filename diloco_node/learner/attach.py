"""`diloco_node.attach`: makes any PyTorch training loop the learner of a region.

::

    with diloco_node.attach(model, optimizer) as diloco:          # finds the daemon by DILOCO_SOCKET
        for batch in loader(diloco.region_index, diloco.regions):
            loss = train_step(batch)
            diloco.step(tokens=batch.numel(), loss=loss)          # never waits for the network
            if diloco.should_stop:
                break

Without DILOCO_SOCKET it warns once and does nothing. With several ranks (torchrun) each calls it; rank 0 talks to the
daemon and all ranks apply the same values at the same boundary. FSDP and tensor parallelism are refused for now.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from diloco_node.core.merge.fragments import Manifest, build_manifest
from diloco_node.core.types import MergeRule
from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.auto_step import AutoStep
from diloco_node.learner.checkpoint import Checkpointing, Stateful, TrainingProgress
from diloco_node.learner.layouts.whole import ModelTensors, host_values
from diloco_node.learner.loss import LateLoss, finite
from diloco_node.learner.process import TerminateFlag, die_with_supervisor
from diloco_node.learner.ranks import Ranks
from diloco_node.learner.session import LearnerSession
from diloco_node.learner.spikes import IN_A_ROW, SpikeWatch
from diloco_node.wire.learner_link import TO_LEARNER, Done, Failed, Report, RunAdvanced, Welcome, merge_rules

log = logging.getLogger("diloco_node.learner")

CHECKPOINT_EVERY_S: Final = 60.0
ON_SPIKE_VARIABLE: Final = "DILOCO_ON_SPIKE"
REPORT_EVERY_NS: Final = 20_000_000
"""Steps shorter than this are reported when a round may wait for them, else not all: each report costs this process and
the daemon a tenth of a millisecond."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    masters: Mapping[str, Tensor] | None = None,
    merge: Mapping[str, MergeRule] | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    step: Literal["call", "auto"] = "call",
) -> Diloco:
    """Join the run of this region's daemon. Returns when the model holds the run's parameters, before the first step.

    Args:
        model: its trainable parameters are overwritten now, and changed in place at step boundaries later.
            DistributedDataParallel and torch.compile wrappers are fine.
        optimizer: its moments are kept in the learner's checkpoint and come back after a restart.
        masters: name of a parameter -> float32 master of it, for optimizers that keep their own.
        merge: name of a parameter -> rule, where the guess (embeddings and head are averaged) is wrong.
        stateful: parts of the loop that a restart continues (data loader, schedule); their states are nested values.
        checkpoint_every_s: seconds between checkpoints of optimizer and `stateful`; 0 for none.
        step: "call": the loop calls `Diloco.step`. "auto": each step of the optimizer is one. Tokens are counted by the
            shapes that the model is given (`learner.forward_watch.count_tokens`); its output's `loss` is taken.

    Raises:
        LearnerError: the model can't be merged, the run's model is another one, or the daemon refuses this learner.
        ConfigError: the run's number of fragments does not fit this model.
    """
    if step not in ("call", "auto"):
        raise LearnerError(f'attach(step={step!r}): give "call", or "auto" to follow the optimizer')
    return Diloco(
        optimizer,
        tensors=ModelTensors(model, masters=masters, merge=merge),
        stateful=stateful or {},
        checkpoint_every_s=checkpoint_every_s,
        auto_step=AutoStep(model, optimizer) if step == "auto" else None,
    )


class Diloco:
    """A training loop's place in the run; made by `attach`, used as a context manager.

    Attributes:
        region: name of this region, "" when alone. region_index: its place among `regions` regions.
        region_names: all of them, sorted.
        global_step: where the run is, in steps of its median learner. Never goes back. A learner that is slower than
            the median sees it grow by more than one a step, a faster one by one or none.
        progress: part of the way to the run's end, 0 to 1, by `[run] steps` or `tokens`, whichever is nearer; None
            when nothing says where the run ends, and when alone.
        should_stop: leave the loop now: the run is finished, or this process was asked to stop (SIGTERM).
        stop_reason: why, in words.
        steps, tokens: made by this process, over all ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        tensors: ModelTensors,
        stateful: Mapping[str, Stateful],
        checkpoint_every_s: float,
        auto_step: AutoStep | None = None,
    ) -> None:
        self.region = ""
        self.region_index = 0
        self.region_names: tuple[str, ...] = ()
        self.global_step = 0
        self.progress: float | None = None
        self.should_stop = False
        self.stop_reason = ""
        self.steps = 0
        self.tokens = 0
        self._tensors = tensors
        self._checkpoints = Checkpointing(optimizer, stateful, every_s=checkpoint_every_s)
        self._blocked_ns = 0
        self._reported_ns = 0
        self._loss = LateLoss()
        self._grad_norm = LateLoss()
        self._watched = ((self._loss, SpikeWatch("loss")), (self._grad_norm, SpikeWatch("gradient norm")))
        self._is_rolling_back = os.environ.get(ON_SPIKE_VARIABLE) == "rollback"
        self._val_loss: float | None = None
        self._val_loss_global: float | None = None
        self._session: LearnerSession | None = None
        self._is_closed = False
        self._terminate = TerminateFlag()
        self._ranks = Ranks()
        self._manifest: Manifest | None = None
        self._auto_step = auto_step
        try:
            self._join()
        except BaseException as error:
            self._close(Failed(_in_words(error)))
            raise
        if auto_step is not None:
            auto_step.begin(lambda tokens, loss: self.step(tokens=tokens, loss=loss))

    @property
    def regions(self) -> int:
        """How many regions the run has; 1 when alone."""
        return max(1, len(self.region_names))

    @property
    def is_attached(self) -> bool:
        """Whether there is a run; False without DILOCO_SOCKET."""
        return self._manifest is not None

    @property
    def blocked_seconds(self) -> float:
        """Time that the loop has spent in `step`, whatever it did there."""
        return self._blocked_ns / 1e9

    @property
    def versions(self) -> tuple[int, ...]:
        """The version last applied of each fragment, -1 for none; empty when alone, and on ranks other than 0."""
        if self._session is None:
            return ()
        return tuple(position.base_version for position in self._session.fragments.positions)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def step(self, *, tokens: int, loss: Tensor | float | None = None, grad_norm: Tensor | float | None = None) -> None:
        """One inner step (one `optimizer.step()`) was made: the step boundary. Never waits for the network.

        With gradient accumulation call it once per optimizer step, with the tokens of all micro-batches.

        Args:
            tokens: trained in this step by this rank; a number on the CPU, for one on a GPU would be waited for.
            loss: of this step; a tensor is read later, without waiting for the device. Of several values the mean.
            grad_norm: of this step, before clipping, such as `clip_grad_norm_` returns it; read later as well.

        Raises:
            LearnerError: parameters are not finite, the optimizer undid a version (see `masters`), a newer learner
                process has taken this one's place, or the tokens are no number or negative. Loss or gradient norm were
                not finite several times in a row, or far outside of their range and `on_spike` is `rollback`: the next
                start takes the merged parameters.
        """
        started_ns = time.perf_counter_ns()
        if self._auto_step is not None and not self._auto_step.is_stepping:
            raise LearnerError('attach(step="auto") counts each step of the optimizer by itself: do not call step()')
        tokens = _count(tokens)
        self.steps += 1
        if self._manifest is not None:
            self._attached_step(tokens, loss, grad_norm, started_ns)
        else:
            self.global_step += 1
            self.tokens += tokens
            self._stop_if(self._terminate.is_set, "the process was asked to stop")
        self._blocked_ns += time.perf_counter_ns() - started_ns

    def _attached_step(
        self, tokens: int, loss: Tensor | float | None, grad_norm: Tensor | float | None, started_ns: int
    ) -> None:
        assert self._manifest is not None
        if self._is_closed:
            raise LearnerError("step() after the end of the `with` block, or after close(): this learner has left")
        session = self._session
        if session is None:
            self._follow(tokens, len(self._manifest.fragments))
            return
        session.timer.stepped(started_ns)
        session.run_clock.stepped()
        self._loss.offer(loss)
        self._grad_norm.offer(grad_norm)
        self._check_values(session)
        applied = session.carry_out(lambda indices: self._lead(tokens, indices))
        if self._ranks.size > 1:
            for index in applied:
                self._ranks.share_vector(session.fragments.vector(index))
        if started_ns - self._reported_ns >= REPORT_EVERY_NS or session.is_news:
            self._reported_ns = started_ns
            self._report(session)
        if self._checkpoints.is_due:
            self._checkpoints.save(self._progress(session))

    def _check_values(self, session: LearnerSession) -> None:
        """Say what is wrong with loss or gradient norm; end before a diverged learner's work is merged."""
        step = session.run_clock.global_step
        for late, watch in self._watched:
            value = late.fresh()
            fault = "" if value is None else watch.seen(value)
            if not fault:
                continue
            count = max(watch.in_a_row, watch.not_finite)
            if count in (1, IN_A_ROW):
                log.warning("step %d: %s", step, fault)
                session.warn(f"step {step}: {fault}")
            if watch.not_finite >= IN_A_ROW or (self._is_rolling_back and watch.in_a_row >= IN_A_ROW):
                raise LearnerError(
                    f"step {step}: {fault}, {count} times in a row. The next start takes the merged "
                    "parameters; if it comes back, lower the learning rate or look at the data"
                )

    def _lead(self, tokens: int, applied: tuple[int, ...]) -> None:
        """Rank 0, when it knows what it is going to apply, and before it does."""
        session, manifest = self._session, self._manifest
        assert session is not None
        assert manifest is not None
        is_stopping = self._terminate.is_set or session.stop_reason is not None
        agreed = self._ranks.agree(
            tokens,
            is_stopping=is_stopping,
            applied=applied,
            fragments=len(manifest.fragments),
            global_step=session.run_clock.global_step,
            part=session.run_clock.part,
        )
        self.tokens += agreed.tokens
        self.global_step, self.progress = agreed.global_step, agreed.part
        session.stepped(agreed.tokens)
        self._stop_if(agreed.is_stopping, session.stop_reason or "the process was asked to stop")

    def _follow(self, tokens: int, fragments: int) -> None:
        """A rank other than 0."""
        agreed = self._ranks.agree(tokens, is_stopping=self._terminate.is_set, applied=(), fragments=fragments)
        self.tokens += agreed.tokens
        self.global_step, self.progress = agreed.global_step, agreed.part
        for index in agreed.applied:
            self._receive(index)
        self._stop_if(agreed.is_stopping, "rank 0, or another, was asked to stop")

    def _receive(self, index: int) -> None:
        assert self._manifest is not None
        fragment = self._manifest.fragments[index]
        values = host_values(fragment.size)
        self._ranks.share_vector(values)
        self._tensors.write(fragment, values)

    def _stop_if(self, is_wanted: bool, reason: str) -> None:
        if is_wanted and not self.should_stop:
            self.should_stop, self.stop_reason = True, reason
            log.info("stopping: %s", reason)

    def _report(self, session: LearnerSession) -> None:
        session.report(
            Report(
                step=session.fragments.step,
                tokens=session.fragments.tokens,
                loss=self._loss.newest(),
                step_time_ns=session.timer.average_ns,
                blocked_ns=self._blocked_ns,
                val_loss=self._val_loss,
                val_loss_global=self._val_loss_global,
                global_step=self.global_step,
            )
        )

    # ---- what a loop may also want -----------------------------------------------------------------------------------

    def evaluated(self, *, val_loss: float | None = None, val_loss_global: float | None = None) -> None:
        """Held-out losses were measured, of the own and of the global parameters; shown by `status`."""
        self._val_loss = finite(val_loss)
        self._val_loss_global = finite(val_loss_global)
        if self._session is not None and self.steps:
            self._report(self._session)

    def global_state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict()` with the global parameters as last applied: for evaluation. Copies.

        Names are those of the model below DistributedDataParallel and torch.compile; buffers are the own ones. When
        alone, the model's own parameters. On rank 0 only: the others keep no copy of the global parameters.

        Raises:
            LearnerError: on another rank.
        """
        if self._manifest is None:
            return {name: value.detach().clone() for name, value in self._tensors.model.state_dict().items()}
        if self._session is None:
            raise LearnerError("global_state_dict() is there on rank 0 only; broadcast it if other ranks need it")
        return self._tensors.full_state(self._manifest.fragments, self._session.fragments.global_vectors())

    def own_state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict()` with what this region came to by itself: to compare with the global parameters.

        They are the model's parameters, and once the run's last merges have begun those from just before: what the
        last rounds leave is the global parameters plus a few steps. Copies. On rank 0 only.

        Raises:
            LearnerError: on another rank.
        """
        if self._manifest is None:
            return self.global_state_dict()
        if self._session is None:
            raise LearnerError("own_state_dict() is there on rank 0 only")
        return self._tensors.full_state(self._manifest.fragments, self._session.fragments.own_vectors())

    def settle(self, seconds: float) -> None:
        """Go on applying versions for some time without stepping; after the loop, to end on the run's last versions.

        One rank only.
        """
        deadline_s = time.monotonic() + seconds
        session = self._session
        while session is not None and self._ranks.size == 1 and time.monotonic() < deadline_s:
            session.carry_out(lambda _indices: None)
            session.wait(max(0.0, min(0.05, deadline_s - time.monotonic())))

    def checkpoint(self) -> None:
        """Write a checkpoint of optimizer and `stateful` now, and wait until it is on disk. Rank 0 only."""
        if self._session is not None and not self._is_closed:
            self._checkpoints.save_now(self._progress(self._session))

    def _progress(self, session: LearnerSession) -> TrainingProgress:
        assert session.welcome is not None
        return TrainingProgress(
            manifest_digest=session.manifest.digest,
            incarnation=session.welcome.incarnation,
            global_step=self.global_step,
            step=session.fragments.step,
            tokens=session.fragments.tokens,
        )

    def __enter__(self) -> Diloco:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._close(Failed(_in_words(error)))
            return
        self.close()

    def close(self) -> None:
        """Say to the daemon that this learner has stopped, write a last checkpoint, let go of everything."""
        last: Done | None = None
        session = self._session
        if session is not None and not self._is_closed:
            try:
                self.checkpoint()
            except BaseException as error:
                self._close(Failed(_in_words(error)))
                raise
            fragments = session.fragments
            # A process that was asked to stop has not stopped for good: the next one goes on.
            is_interrupted = self._terminate.is_set and session.stop_reason is None
            last = (
                None
                if is_interrupted
                else Done(fragments.step, fragments.tokens, self._val_loss, self._val_loss_global, self._blocked_ns)
            )
        self._close(last)

    def _close(self, last: Done | Failed | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._terminate.restore()
        if self._auto_step is not None:
            self._auto_step.close()
        if self._session is not None:
            self._session.close(last)
        self._checkpoints.wait()
        self._ranks.close()

    # ---- joining -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        socket, memory = os.environ.get("DILOCO_SOCKET", ""), os.environ.get("DILOCO_SUPERVISOR", "")
        is_wanted = self._ranks.share_bytes(b"1" if socket else b"") == b"1"
        if not is_wanted:
            if self._ranks.is_first:
                warnings.warn(
                    "DILOCO_SOCKET is not set: training alone. Start this script with "
                    "`diloco-node start --region NAME -- COMMAND` to join a run",
                    stacklevel=4,
                )
            return
        die_with_supervisor()
        self._terminate.install()
        if self._ranks.is_first:
            if not memory:
                raise ConfigError("DILOCO_SOCKET is set, but DILOCO_SUPERVISOR is not: start through diloco-node start")
            self._session = LearnerSession(Path(socket), Path(memory), self._tensors)
        welcome = self._welcome()
        if welcome is None:
            self._stop_if(True, "asked to stop before the daemon answered")
            if self._session is not None:
                self._session.close(None)
                self._session = None
            return
        self.region, self.region_index, self.region_names = welcome.region, welcome.region_index, welcome.regions
        self.global_step = welcome.global_step
        self._manifest = build_manifest(merge_rules(self._tensors.specs, welcome.merge), welcome.fragments)
        resumed_step = self._checkpoints.resume(Path(welcome.state_dir), welcome.manifest_digest, self._ranks)
        # The run may be further than this region's learner was when it died, or its daemon may not know yet how far.
        self.global_step = max(self.global_step, resumed_step)
        if self._session is not None:
            self._session.run_clock.resume(self.global_step)
        self._place()

    def _welcome(self) -> Welcome | None:
        session = self._session
        found = session.join(lambda: self._terminate.is_set) if session is not None else None
        told = self._ranks.share_bytes(b"" if found is None else TO_LEARNER.encode(found))
        if not told:
            return None
        message = TO_LEARNER.decode(told)
        assert isinstance(message, Welcome)
        return message

    def _place(self) -> None:
        """Every rank's parameters become the run's."""
        session, manifest = self._session, self._manifest
        assert manifest is not None
        is_placed = session.place(lambda: self._terminate.is_set) if session is not None else True
        is_placed = self._ranks.share_bytes(b"1" if is_placed else b"") == b"1"
        self._stop_if(not is_placed, "asked to stop before the run began")
        self._share_position()
        if is_placed and self._ranks.size > 1:
            for fragment in manifest.fragments:
                if session is not None:
                    self._ranks.share_vector(session.fragments.vector(fragment.index))
                else:
                    self._receive(fragment.index)

    def _share_position(self) -> None:
        """Every rank learns where the run is before its first step."""
        clock = None if self._session is None else self._session.run_clock
        own = b"" if clock is None else TO_LEARNER.encode(RunAdvanced(clock.global_step, clock.part))
        told = TO_LEARNER.decode(self._ranks.share_bytes(own))
        assert isinstance(told, RunAdvanced)
        self.global_step, self.progress = told.global_step, told.run_part


def _count(tokens: Any) -> int:
    """What a loop counts, as the integer that everybody downstream expects.

    Raises:
        LearnerError: it is none.
    """
    try:
        count = int(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LearnerError(f"step(tokens={tokens!r:.80}): give a whole number, for instance batch.numel()") from error
    if count < 0:
        raise LearnerError(f"step(tokens={count}): a step can't train less than no token")
    return count


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
