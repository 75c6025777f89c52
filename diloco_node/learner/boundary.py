"""A step boundary: all ranks of a region agree on what is to be done, and do it.

Rank 0 hears of it from the daemon. Every rank then does the same in the same order, for their workers meet in what it
asks for (`learner.rank_exchange`). A version that is offered is carried to its holders in the background. It is applied
at the first boundary by which all of them have it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from diloco_node.errors import LearnerError
from diloco_node.learner.checkpoint import TrainingProgress
from diloco_node.learner.checkpointing import Checkpointing
from diloco_node.learner.daemon_session import NOTE_EVERY_S, WAIT_SLICE_S, LearnerSession
from diloco_node.learner.leaving import EndWish, undo_late_step
from diloco_node.learner.local_fragments import Answer, LearnerFragments
from diloco_node.learner.pauses import announce_pause
from diloco_node.learner.process_signals import TerminateFlag
from diloco_node.learner.ranks import Boundary, Orders, Ranks
from diloco_node.learner.region_shards import HERE
from diloco_node.wire.learner_link import (
    InitialState,
    Leaving,
    SettingsChanged,
    ShardsGiven,
    SnapshotRequested,
    VersionOffered,
    Welcome,
)

COMING_WAIT_S: Final = 0.002
"""Between two boundaries without a step, while a version is on its way to other ranks."""

SETTLE_SLICE_S: Final = 0.05

HOLD_MAX_S: Final = 1e9
"""Whoever is alone past the end may wait for ever."""

LEAVE_PATIENCE_S: Final = 4.0
"""A learner that leaves goes when nobody has asked for its last steps for so long."""

LEAVING_EVERY_S: Final = 1.0
"""A daemon that was restarted meanwhile does not know yet that its learner leaves."""

AWAITED_DATA: Final = "waiting for shards of the data that their owners give up"

Look = Callable[[bool], None]
"""A look at the model; told whether something of it may be sent or changed."""

log = logging.getLogger("diloco_node.learner")


@dataclass(frozen=True, slots=True)
class StepBoundaries:
    """The parts that one rank needs at each boundary; rank 0 alone has a session.

    Attributes:
        is_crossing: set from where a step's boundary begins to its end, and for ever where it had none.
    """

    ranks: Ranks
    fragments: LearnerFragments
    session: LearnerSession | None
    checkpoints: Checkpointing
    terminate: TerminateFlag
    wish: EndWish
    warn: Callable[[str], None]
    is_crossing: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Run the block to its end. Raises LearnerError: the one before did not come to its end."""
        if self.is_crossing.is_set():
            raise LearnerError(
                "the step() before this one did not come to its end: it raised, was interrupted, or is in another "
                "thread. The model may hold a part of a merge: call close(), and attach() again"
            )
        self.is_crossing.set()
        with self.terminate.held():
            yield
            self.is_crossing.clear()

    def cross(self, tokens: int, look: Look | None = None) -> Boundary:
        """Carry out what the ranks agree on, and return it. Without `look` no step was made: versions are taken.

        Args:
            look: called before anything of the model is sent or changed, with whether something may be. Later orders of
                the daemon wait for the next boundary: nothing is merged that was not looked at.

        Raises LearnerError: parameters are not finite, the optimizer undid a version, or the daemon refuses this
        learner.
        """
        fragments, session, count = self.fragments, self.session, len(self.fragments.positions)
        has_orders = session is not None and session.hear()
        # Without the link's lock: another rank may take its time, and the daemon may be a new one then.
        boundary = self.ranks.agree(self._brought(tokens, has_orders=has_orders), fragments=count)
        if boundary.wants_end:
            self.wish.pass_on(self.ranks, session)
        if look is not None:
            look(boundary.has_orders or bool(fragments.incoming))
            self.checkpoints.stepped()
            fragments.replicas.check(fragments.step + 1, self.ranks.greatest)
        fragments.revert.verify()
        if warning := fragments.revert.take_warning():
            self.warn(warning)
        with session.boundary() if session is not None else contextlib.nullcontext():
            orders = session.orders() if session is not None and boundary.has_orders else ()
            if boundary.has_orders:
                orders = self.ranks.share_orders(orders)
            if look is not None:
                fragments.step += 1
                fragments.tokens += boundary.tokens
            answers = self._carry_out(boundary, orders)
            if session is not None:
                # The daemon hears of this boundary, also from the encoder, only after its step was counted.
                if look is not None:
                    session.count()
                for answer in answers:
                    session.reply(answer)
            fragments.encode_taken()
        if boundary.wants_checkpoint and boundary.is_idle:
            self.checkpoints.choose_keepers()
        self.checkpoints.all_wrote(boundary.written_step)
        if session is not None:
            session.stand(boundary.written_step)
        return boundary

    def cross_step(self, tokens: int, look: Look) -> Boundary:
        """Cross the boundary of a step, and wait there as long as further steps are of no use. Raises as `cross`."""
        own, is_late = HERE.own, self.wish.has_result
        boundary = last = self.cross(tokens, look)
        if HERE.own is not own and not boundary.is_stopping and self._is_without_data():
            with announce_pause(self.session, AWAITED_DATA, HOLD_MAX_S, before=lambda: None):
                last = self.place()
        if boundary.is_held and not boundary.is_stopping:
            if self.session is not None:
                log.warning("no further step for now: %s", self.session.hold_reason)
            with announce_pause(self.session, "waiting past the run's end", HOLD_MAX_S, before=lambda: None):
                while last.is_held and not last.is_stopping:
                    self._wait(WAIT_SLICE_S)
                    last = self.cross(0)
        if is_late:
            undo_late_step(self)
        return boundary if last is boundary else replace(last, tokens=boundary.tokens)

    def are_asked_to_stop(self) -> bool:
        """Whether some rank's process was asked to stop, maybe since its last step. All ranks call it."""
        return any(self.ranks.all_bytes(b"1" if self.terminate.is_asked() else b""))

    def are_leaving(self, is_stopping: bool) -> bool:
        """Whether the ranks stop, for good or because some process was asked to, and can meet. All call it."""
        if self.ranks.can_meet:
            self.checkpoints.choose_keepers()  # for the last one
            return is_stopping or self.are_asked_to_stop()
        is_stopping |= self.terminate.is_asked()
        if is_stopping and self.session is not None and self.session.has_unmerged_steps:
            self.warn(
                "the last steps of this learner are in no merge: torch.distributed.destroy_process_group() was called "
                "before the end of the `with` block, or before close()"
            )
        return False

    def are_idle(self) -> bool:
        """Whether all ranks could write a checkpoint now. All call it."""
        return all(self.ranks.all_bytes(b"1" if self.checkpoints.is_idle else b""))

    def tell_written(self) -> None:
        """Write which checkpoint is on disk, where no boundary follows. All ranks call it."""
        step = self.checkpoints.written_step
        if {*self.ranks.all_bytes(str(step).encode())} == {str(step).encode()}:
            self.checkpoints.all_wrote(step)
            if self.session is not None:
                self.session.stand(step)

    def agree_on_exit(self) -> None:
        """Have all ranks exit if a handler of some script wants to, or none: they may meet later. All call it, last."""
        if not self.ranks.can_meet:
            return
        wants_exit = self.terminate.has_exit and not self.terminate.is_failing()
        self.terminate.are_exiting = any(self.ranks.all_bytes(b"1" if wants_exit else b""))

    def progress(self, global_step: int) -> TrainingProgress:
        """Where a checkpoint that is written now belongs."""
        fragments = self.fragments
        return TrainingProgress(
            manifest_digest=fragments.manifest.digest,
            incarnation=fragments.settings.incarnation,
            global_step=global_step,
            step=fragments.step,
            tokens=fragments.tokens,
        )

    def _brought(self, tokens: int, *, has_orders: bool) -> Boundary:
        """Return what this rank brings to the agreement."""
        fragments, session, checkpoints = self.fragments, self.session, self.checkpoints
        return Boundary(
            tokens,
            self.terminate.is_asked() or (session is not None and session.stop_reason is not None),
            has_orders,
            session is not None and checkpoints.is_due and fragments.is_placed,
            fragments.arrived(),
            0 if session is None else session.run_clock.global_step,
            None if session is None else session.run_clock.part,
            checkpoints.is_idle,
            checkpoints.written_step,
            bool(self.wish.reason),
            session is not None and bool(session.hold_reason),
            self.terminate.has_exit,
        )

    def _carry_out(self, boundary: Boundary, orders: Orders) -> list[Answer]:
        """Do it; returns what to tell the daemon."""
        fragments, session = self.fragments, self.session
        answers: list[Answer] = []
        for order in orders:
            match order:
                case ShardsGiven():
                    HERE.follow(order)
                case SettingsChanged():
                    fragments.settings = replace(fragments.settings, carry_steps_limit=order.carry_steps_limit)
                case Welcome():
                    fragments.settings = replace(fragments.settings, carry_steps_limit=order.carry_steps_limit)
                    if order.wants_initial_state and not fragments.is_placed:
                        fragments.write_initial_state()
                        if session is not None:
                            session.link.send(InitialState())
                case VersionOffered():
                    fragments.take(order)
                case SnapshotRequested():
                    answer = fragments.snapshot(order)
                    if answer is not None:
                        answers.append(answer)
        # One rank alone, on a CPU, has what it is offered; others say so at a later boundary.
        for index in boundary.arrived if self.ranks.size > 1 else fragments.arrived():
            answers.append(fragments.finish(index))
        return answers

    def place(self) -> Boundary:
        """Boundaries until all fragments have a version, and the loader rows, or some rank stops; return the last."""
        noted_s = time.monotonic()
        self.terminate.is_holding |= self.ranks.size > 1
        while True:
            boundary = self.cross(0)
            is_waiting = self._is_without_data()
            if boundary.is_stopping or (self.fragments.is_placed and not is_waiting):
                if self.fragments.is_placed:
                    self.fragments.replicas.begin()
                return boundary
            self._wait(WAIT_SLICE_S)
            if self.ranks.is_first and time.monotonic() - noted_s > NOTE_EVERY_S:
                noted_s = time.monotonic()
                log.info("%s", AWAITED_DATA if is_waiting else "waiting for versions of all fragments")

    def _is_without_data(self) -> bool:
        """Whether rank 0's loader has no row that it may train yet. All ranks call it."""
        return bool(self.ranks.share_bytes(b"1" if HERE.is_waiting else b""))

    def settle(
        self, seconds: float, *, until: Callable[[], bool] = lambda: False, is_in_step: bool = False
    ) -> Iterator[Boundary]:
        """Boundaries for some time, by rank 0's clock, or `until` it says so there. All ranks are in it.

        is_in_step: a step is whole only with these. Raises LearnerError: ranks are missing, or the step before is torn.
        """
        self.ranks.meet("settle()")
        deadline_s = time.monotonic() + seconds
        while True:
            left_s = deadline_s - time.monotonic()
            if self.ranks.share_bytes(b"1" if left_s > 0 and not until() else b"") != b"1":
                return
            with contextlib.nullcontext() if is_in_step else self.whole():
                boundary = self.cross(0)
            yield boundary
            self._wait(min(SETTLE_SLICE_S, max(0.0, left_s)))

    def leave(self, deadline_s: float) -> Iterator[Boundary]:
        """Boundaries until a merge includes every step, or time or daemon is gone, by rank 0's clock. All call it."""
        session, notice_s, hope_s = self.session, -math.inf, time.monotonic()
        while True:
            now_s = time.monotonic()
            if session is not None and session.has_snapshot_out:
                hope_s = now_s
            # Where nobody asks for a snapshot there is no leader, or no majority.
            is_hopeful = now_s < deadline_s and now_s - hope_s < LEAVE_PATIENCE_S
            is_waiting = session is not None and session.has_unmerged_steps and is_hopeful
            if self.ranks.share_bytes(b"1" if is_waiting else b"") != b"1":
                if deadline_s and session is not None and session.has_unmerged_steps:
                    cause = "the time to stop is up" if now_s >= deadline_s else "no leader asks for them"
                    log.warning("the last steps of this learner are in no merge: %s", cause)
                return
            if session is not None and now_s - notice_s >= LEAVING_EVERY_S:
                notice_s = now_s
                session.link.send(Leaving())
            yield self.cross(0)
            self._wait(SETTLE_SLICE_S)

    def _wait(self, at_most_s: float) -> None:
        """For an order, where no step is under way; less while a version is on its way, or orders wait for room."""
        if self.session is not None:
            is_soon = self.fragments.incoming or self.session.link.waiting_commands
            self.session.link.wait(min(at_most_s, COMING_WAIT_S) if is_soon else at_most_s)
