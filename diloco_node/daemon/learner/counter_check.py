"""Check, in the own daemon, of the counters that its learner reports: they never go back or leap.

A learner is code of the user, and its counters go into the ledger. `core.rounds.claim_limits` is for those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from diloco_node.core.types import Contribution, FragmentPosition, LearnerStatus
from diloco_node.wire.learner_link import NEW_PROCESS, Attach, OfferApplied

STEPS_PER_S_MAX: Final = 1_000_000
"""No device makes a step in less than a microsecond."""

STEPS_FREE: Final = 1 << 20
"""Beyond that: a daemon that stood still, or has just begun to count, sees many steps at once."""

TOKENS_PER_STEP_MAX: Final = 1 << 32
"""A thousand times the largest batches."""

NS_PER_STEP_MIN: Final = 1_000_000_000 // STEPS_PER_S_MAX


def attach_fault(attach: Attach, *, last: LearnerStatus | None, run_id: str) -> str:
    """Why what a process says when it attaches can't be; empty if it can. last: of the learner that was here last."""
    if attach.run_id not in ("", run_id):
        return f"it is of run {attach.run_id}, this is {run_id}"
    if attach.incarnation == NEW_PROCESS and (attach.step or attach.tokens):
        return f"a new process with {attach.step} steps and {attach.tokens} tokens"
    if last is not None and attach.incarnation == last.incarnation:
        fault = counters_fault(last, attach.step, attach.tokens)
        if fault:
            return fault
    if attach.tokens > attach.step * TOKENS_PER_STEP_MAX:
        return f"{attach.tokens} tokens in {attach.step} steps"
    faults = (position_fault(position, attach.step, attach.tokens) for position in attach.positions)
    return next((fault for fault in faults if fault), "")


def counters_fault(status: LearnerStatus, step: int, tokens: int) -> str:
    """Why an incarnation's counters can't be these now; empty if they can. They never go back."""
    if step < status.step or tokens < status.tokens:
        return f"{step} steps and {tokens} tokens after {status.step} and {status.tokens}"
    return ""


def position_fault(position: FragmentPosition, step: int, tokens: int) -> str:
    """Why a learner that made so many steps can't stand there; empty if it can."""
    furthest = max(position.cycle_start_step, position.included_step)
    if furthest > step or position.included_tokens > tokens:
        return f"a position at step {furthest} and {position.included_tokens} tokens after {step} and {tokens}"
    return ""


class CounterCheck:
    """Limits on what the attached learner of a region can have done by now. pieces: per fragment."""

    def __init__(self, region: str, pieces: Sequence[int]) -> None:
        self._region = region
        self._pieces = tuple(pieces)
        self._step = 0
        self._attached_ns = 0

    def begin(self, step: int, *, now_ns: int) -> None:
        """It says that it has made so many steps."""
        self._step, self._attached_ns = step, now_ns

    def report_fault(self, status: LearnerStatus, step: int, tokens: int, *, now_ns: int) -> str:
        """Why its counters can't be these; empty if they can."""
        return counters_fault(status, step, tokens) or self._excess(step, tokens, now_ns)

    def applied_fault(self, message: OfferApplied, *, now_ns: int) -> str:
        """Why it can't stand there after an offer; empty if it can. A report of its last steps may still follow."""
        position = message.position
        if position.base_version != message.version:
            return f"version {message.version} leads to a base of {position.base_version}"
        step = max(position.cycle_start_step, position.included_step)
        return self._excess(step, position.included_tokens, now_ns)

    def contribution_fault(self, status: LearnerStatus, contribution: Contribution, *, now_ns: int) -> str:
        """Why it can't have made this contribution; empty if it can."""
        if (contribution.learner, contribution.incarnation) != (self._region, status.incarnation):
            return f"a contribution of {contribution.learner}, incarnation {contribution.incarnation}"
        if len(contribution.squared_norms) != self._pieces[contribution.fragment]:
            return f"{len(contribution.squared_norms)} norms for {self._pieces[contribution.fragment]} pieces"
        return self._excess(contribution.step_to, contribution.tokens, now_ns)

    def _excess(self, step: int, tokens: int, now_ns: int) -> str:
        possible = self._step + STEPS_FREE + max(0, now_ns - self._attached_ns) // NS_PER_STEP_MIN
        if step > possible:
            return f"step {step}; at most {possible} are possible by now"
        return f"{tokens} tokens in {step} steps" if tokens > step * TOKENS_PER_STEP_MAX else ""
