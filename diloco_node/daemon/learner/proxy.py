"""The daemon's end of its learner: who is attached, where it stands, its snapshots and the versions offered to it.

Layout and writers of the memory that both share are in `wire.learner_link`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, assert_never

import numpy as np

from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core import events as ev
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import CarryMode, LearnerStatus, RunSettings
from diloco_node.daemon.learner.counter_check import CounterCheck, attach_fault
from diloco_node.daemon.learner.version_area import VersionArea
from diloco_node.daemon.parameters import Parameters
from diloco_node.daemon.work import Spawn
from diloco_node.escaping import escaped
from diloco_node.health.alerts import learner_silence
from diloco_node.health.rate import SlidingRate
from diloco_node.numeric import NS_PER_S, U8
from diloco_node.shared_memory import COUNTERS_AREA, PLACE_AREA, PLACE_BYTES, PlaceMark
from diloco_node.storage.trained import AREA_BYTES
from diloco_node.wire import learner_link

WARNING_CHARS_MAX: Final = 300
RATE_WINDOW_S: Final = 30.0
"""Window of the current rate of tokens."""


@dataclass(slots=True)
class LearnerFacts:
    """Facts about the learner for status and report; the core does not need them.

    Attributes:
        val_loss: held-out loss of the learner's own parameters, val_loss_global: of the global ones; at these steps.
        blocked_ns: time the training loops of all learners so far spent inside `step()`.
        attached_step: of its incarnation, where the present process began, or was when this daemon came.
        first_report_ns, last_report_ns: monotonic, of the present learner; tokens_at_first_report: of its incarnation.
        resumed_ns: monotonic, the first report after its last pause without steps; 0: there was none.
        ready_ns: monotonic, since when it has its parameters and no report of it came; 0: it lacks some, or has come.
        warnings: of losses and norms. last_warning, last_warning_ns: the newest, or why it failed (`has_failed`).
        discounted_versions: applied with part of the own steps thrown away, since they were too many.
        base_difference: how its frozen tensors differ from the run's; or empty. tokens: how fast they are made now.
    """

    loss_first: float | None = None
    loss_last: float | None = None
    val_loss: float | None = None
    val_loss_global: float | None = None
    val_loss_step: int | None = None
    val_loss_global_step: int | None = None
    blocked_ns: int = 0
    attached_step: int = 0
    first_report_ns: int = 0
    last_report_ns: int = 0
    resumed_ns: int = 0
    ready_ns: int = 0
    tokens_at_first_report: int = 0
    discounted_versions: int = 0
    warnings: int = 0
    last_warning: str = ""
    last_warning_ns: int = 0
    has_failed: bool = False
    base_difference: str = ""
    tokens: SlidingRate = field(default_factory=lambda: SlidingRate(RATE_WINDOW_S))


class LearnerProxy:
    """The region's learner as the daemon sees it. All methods run on the event loop.

    memory: maps the area of this name and size in bytes, as `shared_memory.request_area`. send: False if it is gone.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        settings: RunSettings,
        parameters: Parameters,
        memory: Callable[[str, int], mmap.mmap],
        send: Callable[[learner_link.ToLearner], bool],
        post: Callable[[ev.Event], None],
        spawn: Spawn,
        now_ns: Callable[[], int],
        save_counters: Callable[[int], Awaitable[None]],
        store_initial_state: Callable[[VersionArea, int], Coroutine[Any, Any, None]],
        region: str,
        note: Callable[[ev.Note], None],
    ) -> None:
        self._send = send
        self._post = post
        self._note = note
        self._now_ns = now_ns
        self._spawn = spawn
        self._save_counters = save_counters
        self._store_initial_state = store_initial_state

        # For the status alone: nothing is decided by it.
        self.facts = LearnerFacts()

        # The process and the incarnation that were welcomed last; 0 before the first. They stay when it detaches.
        self.pid = 0
        self.incarnation = 0
        # Where the attached learner stands; None exactly while none is attached.
        self.status: LearnerStatus | None = None
        # The newest status of any learner that this daemon has seen: what a process claims may not lie behind it.
        self._newest: LearnerStatus | None = None
        # The last word of the present incarnation; None while it steps.
        self.done: learner_link.Done | None = None
        self._has_failed = False
        # The status of a learner that was done when it detached, for the last report.
        self._last_status: LearnerStatus | None = None
        self._counter_check = CounterCheck(region, [len(fragment.pieces) for fragment in manifest.fragments])

        # Of all incarnations so far; always `_before` plus what the present one counts.
        self.steps_total = 0
        self.tokens_total = 0
        self._steps_before = 0
        self._tokens_before = 0
        # Of all processes before this one; `facts.blocked_ns` is this plus what the present one reports.
        self._blocked_before_ns = 0

        # Orders not yet answered, by fragment: an answer takes its order out, so none counts twice.
        self._requested: dict[int, ev.TakeSnapshot] = {}
        self._is_overwriting = settings.carry is CarryMode.OVERWRITE

        # Contribution f lies at `_offsets[f]`.
        self.blocks = [FragmentBlocks(fragment.piece_sizes, settings.codec_up) for fragment in manifest.fragments]
        self._offsets = list(accumulate((blocks.encoded_bytes for blocks in self.blocks), initial=0))
        slots = learner_link.version_slots(manifest)
        # Memory of the supervisor, which outlives daemon and learner.
        self._version_area = memory(learner_link.VERSION_AREA, 4 * slots[0] * slots[1])
        self._contribution_area = memory(learner_link.CONTRIBUTION_AREA, self._offsets[-1])
        # The bytes of `_contribution_area`; the learner writes them, this process only reads.
        self._contributions = np.frombuffer(self._contribution_area, np.uint8)
        # Steps and tokens as the learner counts them itself; they outlive its process.
        self.counters = memory(COUNTERS_AREA, AREA_BYTES)
        # Where it stands and why it pauses, as it writes it.
        self._place_area = memory(PLACE_AREA, PLACE_BYTES)
        self.version_area = VersionArea(
            np.frombuffer(self._version_area, np.float32).reshape(slots),
            [fragment.size for fragment in manifest.fragments],
            parameters=parameters,
            send=send,
            spawn=spawn,
            now_ns=now_ns,
        )

    @property
    def shown_status(self) -> LearnerStatus | None:
        """Where the learner stands, or stood when it was done: it may be gone before the last report is written."""
        if self.status is None and self.done is not None:
            return self._last_status
        return self.status

    def on_attach(
        self,
        attach: learner_link.Attach,
        incarnation: int,
        trained_before: tuple[tuple[int, int, int], ...],
        *,
        writes_initial: bool = False,
    ) -> None:
        """A learner was welcomed: what was requested from the one before is void.

        trained_before: (incarnation, steps, tokens) of those before. writes_initial: Theta_0, into the version area.
        """
        self._refuse_requested("the learner restarted")
        bases = tuple(position.base_version for position in attach.positions)
        self.version_area.begin_learner(writes_initial=writes_initial, base_slots=attach.slots, base_versions=bases)
        self.done, self._has_failed = None, False
        if (attach.pid, incarnation) != (self.pid, self.incarnation):
            # Another process: it has blocked for no time yet.
            self.pid = attach.pid
            self._blocked_before_ns = self.facts.blocked_ns
        self.facts.attached_step = attach.step
        if incarnation != self.incarnation:
            # Its counters begin at zero; so does what is measured by them.
            self.incarnation = incarnation
            self.facts.first_report_ns = self.facts.last_report_ns = 0
            self.facts.tokens.reset()
        self.status = LearnerStatus(
            incarnation=incarnation,
            step=attach.step,
            tokens=attach.tokens,
            step_time_ns=attach.step_time_ns,
            positions=attach.positions,
        )
        self._newest = self.status
        self._note_ready()
        self._counter_check.begin(attach.step, now_ns=self._now_ns())
        self._steps_before = sum(steps for _, steps, _ in trained_before)
        self._tokens_before = sum(tokens for _, _, tokens in trained_before)
        self._note_totals()
        self._post(ev.LearnerAttached(self.status, trained_before, attach.listing))

    def attach_fault(self, attach: learner_link.Attach, *, run_id: str) -> str:
        """Why what a process says of itself can't be; empty if it can."""
        return attach_fault(attach, last=self._newest, run_id=run_id)

    def on_message(self, message: learner_link.ToDaemon) -> None:
        """Take a message of the learner that was welcomed. It reports as seldom as the core may get that."""
        match message:
            case learner_link.Report():
                self._on_report(message)
            case learner_link.SnapshotReady():
                self._on_snapshot_ready(message)
            case learner_link.SnapshotDenied():
                self._on_snapshot_denied(message)
            case learner_link.OfferApplied():
                self._on_version_applied(message)
            case learner_link.InitialState():
                self._on_initial_state()
            case learner_link.Done():
                self._on_done(message)
            case learner_link.Failed():
                self._on_failure(message.reason)
            case learner_link.Warned():
                self._on_warning(message.text)
            case learner_link.Leaving():
                self._on_leaving()
            case learner_link.EndWanted():
                self._post(ev.FinishOrdered(message.reason, is_order=False))
            case learner_link.Attach():
                raise AssertionError("an Attach is the reception's")
            case _:
                assert_never(message)

    def on_detach(self) -> None:
        """Its connection is gone."""
        self._refuse_requested("the learner is gone")
        self.version_area.end_learner()
        if self.done is not None:
            self._last_status = self.status
        self.status = None
        self._post(ev.LearnerDetached())

    def _on_report(self, report: learner_link.Report) -> None:
        """Take the report of an inner step."""
        if self.status is None:
            return
        now_ns = self._now_ns()
        fault = self._counter_check.report_fault(self.status, report.step, report.tokens, now_ns=now_ns)
        if fault:
            self._ignore("a report", fault)
            return
        facts = self.facts
        if not facts.first_report_ns:
            facts.first_report_ns, facts.tokens_at_first_report = now_ns, report.tokens
        elif learner_silence((now_ns - facts.last_report_ns) / NS_PER_S, self.status.step_time_ns / NS_PER_S):
            facts.resumed_ns = now_ns
        facts.last_report_ns, facts.ready_ns = now_ns, 0
        facts.tokens.add(report.tokens, now_ns=now_ns)
        if report.loss is not None:
            facts.loss_last = report.loss
            if facts.loss_first is None:
                facts.loss_first = report.loss
        self._note_figures(report)
        self.status = replace(self.status, step=report.step, tokens=report.tokens, step_time_ns=report.step_time_ns)
        self._newest = self.status
        self._note_totals()
        self._post(ev.LearnerReported(self.status))

    def _note_figures(self, message: learner_link.Report | learner_link.Done) -> None:
        if message.val_loss is not None:
            self.facts.val_loss, self.facts.val_loss_step = message.val_loss, message.val_step
        if message.val_loss_global is not None:
            self.facts.val_loss_global, self.facts.val_loss_global_step = message.val_loss_global, message.val_step
        self.facts.blocked_ns = self._blocked_before_ns + message.blocked_ns

    def _on_snapshot_ready(self, message: learner_link.SnapshotReady) -> None:
        """The answer to SnapshotRequested: its bytes lie in the contribution area."""
        contribution = message.contribution
        order = self._requested.get(contribution.fragment)
        if self.status is None or order is None or order.base_version != contribution.base_version:
            return
        del self._requested[contribution.fragment]
        fault = self._counter_check.contribution_fault(self.status, contribution, now_ns=self._now_ns())
        if fault:
            self._ignore("a snapshot", fault)
            self._post(ev.SnapshotRefused(order.fragment, order.version, "the learner's answer makes no sense"))
        else:
            self._post(ev.SnapshotTaken(contribution))

    def _on_snapshot_denied(self, message: learner_link.SnapshotDenied) -> None:
        """The answer to SnapshotRequested when it could not."""
        order = self._requested.get(message.fragment)
        if order is not None and order.version == message.version:
            del self._requested[message.fragment]
            self._post(ev.SnapshotRefused(message.fragment, message.version, message.reason))

    def _on_version_applied(self, message: learner_link.OfferApplied) -> None:
        """It took a version. Steps that it threw away are told to the others: their counters must be durable first."""
        if self.status is None:
            return
        if not self.version_area.is_offered(message.fragment, message.version):
            fault = f"version {message.version} of fragment {message.fragment} was not offered"
            # A learner that stands beyond the offer has done with it: the next one may follow.
            self.version_area.release(message.fragment, message.version, message.slot)
        else:
            fault = self._counter_check.applied_fault(message, now_ns=self._now_ns())
        if fault:
            self._ignore("an applied version", fault)
            return
        is_over = message.position.included_step > self.status.positions[message.fragment].included_step
        if is_over and (self._is_overwriting or message.carry_factor <= 0.0):
            self._spawn(self._advance_when_durable(message), f"applied {message.fragment}")
        else:
            self._advance(message)

    async def _advance_when_durable(self, message: learner_link.OfferApplied) -> None:
        generation = self.version_area.generation
        await self._save_counters(self.incarnation)
        if generation == self.version_area.generation:  # else it has said anew where it stands
            self._advance(message)

    def _advance(self, message: learner_link.OfferApplied) -> None:
        if self.status is None:
            return
        positions, position = list(self.status.positions), message.position
        positions[message.fragment] = position
        # The last steps before it may have had no report: who stands there has made them.
        step = max(self.status.step, position.included_step, position.cycle_start_step)
        tokens = max(self.status.tokens, position.included_tokens)
        self.status = self._newest = replace(self.status, step=step, tokens=tokens, positions=tuple(positions))
        self._note_totals()
        self._note_ready()
        if message.carry_factor < 1.0:
            self.facts.discounted_versions += 1
        self._post(ev.LearnerReported(self.status))
        self.version_area.release(message.fragment, message.version, message.slot)

    def _on_done(self, message: learner_link.Done) -> None:
        """It has stopped stepping."""
        self.done = message
        self._note_figures(message)
        if self.status is not None:
            step, tokens = message.step, message.tokens
            fault = self._counter_check.report_fault(self.status, step, tokens, now_ns=self._now_ns())
            if fault:
                self._ignore("the end of its counters", fault)
                step, tokens = self.status.step, self.status.tokens
            self.status = self._newest = replace(self.status, step=step, tokens=tokens, finished=True)
            self._note_totals()
            self._post(ev.LearnerReported(self.status))

    def _on_leaving(self) -> None:
        """It makes no more steps, and waits for a merge of the last ones."""
        if self.status is not None and not self.status.leaving:
            self.status = self._newest = replace(self.status, leaving=True)
            self._post(ev.LearnerReported(self.status))

    def _on_initial_state(self) -> None:
        """Theta_0 lies in the version area."""
        area = self.version_area
        if area.is_lent:
            self._spawn(self._store_initial_state(area, area.generation), "initial state")
        else:  # what it wrote over is no Theta_0, and the run has one
            self._note(ev.Note("learner", "Theta_0 that nobody asked for: ignored", is_alarm=True))

    def take_snapshot(self, order: ev.TakeSnapshot) -> None:
        """Ask for a snapshot at the next step boundary."""
        if self.status is None:
            self._post(ev.SnapshotRefused(order.fragment, order.version, "no learner is attached"))
            return
        self._requested[order.fragment] = order
        self._send(learner_link.SnapshotRequested(order.fragment, order.version, order.base_version))

    def stop(self, reason: str, versions: tuple[int, ...]) -> None:
        """The run is over, at these versions; a peer may have chosen the words. One without its welcome is refused."""
        if self.status is None:
            return
        self._send(learner_link.Stop(escaped(reason), versions))

    def has_restarted_since(self, incarnation: int) -> bool:
        """Whether another incarnation of the learner has begun, which may write over the contributions."""
        return self.incarnation != incarnation

    def contribution_bytes(self, fragment: int, block_start: int, block_stop: int) -> U8:
        """The encoded blocks of the newest contribution of a fragment; a view into the contribution area."""
        blocks = self.blocks[fragment]
        start = self._offsets[fragment] + blocks.span_bytes(0, block_start)
        return self._contributions[start : start + blocks.span_bytes(block_start, block_stop)]

    def close(self) -> None:
        """Let go of the shared memory. The learner may still be refused, and the status be read, after this."""
        self.version_area.close()
        self._contributions = np.zeros(0, np.uint8)
        for area in (self._version_area, self._contribution_area):
            # A transfer may still read a slice of it; then it goes with the process.
            with contextlib.suppress(BufferError):
                area.close()

    def _on_warning(self, text: str) -> None:
        """A loss or a norm is out of its range."""
        if self.facts.first_report_ns:  # what it says before its first step is of the model
            self.facts.warnings += 1
            self._note_trouble(text, has_failed=False)
        self._note(ev.Note("learner", f"the learner warns: {text}", is_alarm=True))

    def _on_failure(self, reason: str) -> None:
        """It ends with an error."""
        self._has_failed = True
        text = f"the learner failed: {reason}"
        self._note_trouble(text, has_failed=True)
        self._note(ev.Note("learner", text, is_alarm=True))

    def _note_trouble(self, text: str, *, has_failed: bool) -> None:
        facts = self.facts
        facts.has_failed = has_failed
        facts.last_warning, facts.last_warning_ns = escaped(text)[:WARNING_CHARS_MAX], self._now_ns()

    @property
    def place(self) -> PlaceMark | None:
        """Where the attached learner stands; None before it wrote that."""
        place = PlaceMark.decode(self._place_area[:])
        return place if self.status is not None and place is not None and place.pid == self.pid else None

    @property
    def has_left(self) -> bool:
        """Whether the last word of the attached learner, or its place, says that nothing more comes from it."""
        if self.done is not None or self._has_failed:
            return True
        place = self.place
        is_merged = place is not None and place.is_interrupted and place.included_step >= place.step
        return is_merged or (place is not None and place.is_over)

    @property
    def pause(self) -> PlaceMark | None:
        """The pause that the attached learner has announced; None while it makes steps."""
        place = self.place
        return place if place is not None and place.activity else None

    def silence(self) -> str:
        """Why an attached learner counts as silent; empty if it does not."""
        status, facts, now_ns = self.status, self.facts, self._now_ns()
        if status is None or status.finished or self.pause is not None:
            return ""
        age_s = (now_ns - facts.last_report_ns) / NS_PER_S if facts.last_report_ns else None
        wait_s = (now_ns - facts.ready_ns) / NS_PER_S if facts.ready_ns else None
        return learner_silence(age_s, status.step_time_ns / NS_PER_S, wait_s)

    def _ignore(self, subject: str, fault: str) -> None:
        self._note(ev.Note("learner", f"process {self.pid}: {subject} is ignored: {fault}", is_alarm=True))

    def _note_ready(self) -> None:
        """Begin the wait for the first report anew: it may make a step now."""
        is_placed = self.status is not None and all(item.base_version >= 0 for item in self.status.positions)
        self.facts.ready_ns = self._now_ns() if is_placed and not self.facts.first_report_ns else 0

    def _note_totals(self) -> None:
        if self.status is not None:
            self.steps_total = self._steps_before + self.status.step
            self.tokens_total = self._tokens_before + self.status.tokens

    def _refuse_requested(self, reason: str) -> None:
        for fragment in sorted(self._requested):
            order = self._requested.pop(fragment)
            self._post(ev.SnapshotRefused(fragment, order.version, reason))
