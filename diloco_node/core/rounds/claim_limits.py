"""Limits, in every region, on the claims of any region's learner: tokens, steps, the number of its incarnation.

They are far beyond the differences between regions, and keep one wrong number from outweighing all others, and from
being booked for good. `daemon.learner.counter_check` is for the own learner's counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diloco_node.core.merge.opposition import MEMBERS_MIN
from diloco_node.core.types import Contribution, DiscardedBody, LearnerStatus

TOKENS_RATIO_MAX: Final = 64
"""Tokens of a step, compared with the median learner: a node with one GPU beside one with 64."""

STEPS_AHEAD_MAX: Final = 1 << 16
"""Steps of a contribution beyond those in the last report: nobody makes more in the second that it may be old."""

STEP_NS_MIN: Final = 1_000_000
"""Nobody steps faster."""

STEPS_MAX: Final = 1 << 40
"""Steps of one incarnation: such a step for 34 years."""

INCARNATIONS_AHEAD_MAX: Final = 1 << 20
"""Incarnations in a row that left no trace in the ledger: a learner that dies each second for twelve days
without a merge. A larger number would bar the learner, which can't count any further."""


def is_plausible_incarnation(incarnation: int, newest: int) -> bool:
    """Whether a learner may have this incarnation. newest: the newest one in the ledger, -1 if there is none."""
    return 0 <= incarnation <= max(0, newest) + INCARNATIONS_AHEAD_MAX


def claim_fault(
    contribution: Contribution,
    *,
    report: LearnerStatus | None,
    reports: Iterable[LearnerStatus],
    incarnation_known: int,
) -> str:
    """Return why the numbers in another region's contribution can't be true; empty if they can.

    report: the last one of its learner. reports: those of all live learners, with or without that one.
    incarnation_known: the newest in the ledger, -1 if there is none.
    """
    if not is_plausible_incarnation(contribution.incarnation, incarnation_known):
        return f"incarnation {contribution.incarnation}, the ledger knows {incarnation_known}"
    step_max = STEPS_MAX
    if report is not None:
        is_same = report.incarnation == contribution.incarnation
        step_max = min(step_max, (report.step if is_same else 0) + STEPS_AHEAD_MAX)
    if contribution.step_to > step_max:
        return f"covers steps up to {contribution.step_to}, its report allows {step_max}"
    usual = _usual_tokens(reports)
    if usual is not None and contribution.tokens > TOKENS_RATIO_MAX * usual * contribution.steps:
        return f"counts {contribution.tokens} tokens in {contribution.steps} steps, usual are {usual:.4g} in one"
    return ""


def discard_contradiction(body: DiscardedBody, report: LearnerStatus | None, *, silent_ns: int | None = None) -> str:
    """Return what a learner's last report, if there is one, says against its steps being lost; empty if nothing.

    silent_ns: for so long its region is away, and may have gone on, or begun anew; None: it is heard.
    Nobody knows here how far earlier lives came.
    """
    if report is None or body.incarnation < report.incarnation:
        return ""
    if body.incarnation > report.incarnation:
        return "" if silent_ns is not None else f"its incarnation is {report.incarnation}, not {body.incarnation}"
    step_max = report.step
    if silent_ns is not None:
        step_max += STEPS_AHEAD_MAX + silent_ns // STEP_NS_MIN
    return f"it has made {report.step} steps" if body.step_to > step_max else ""


def _usual_tokens(learners: Iterable[LearnerStatus]) -> float | None:
    """Return the median learner's tokens per step; None if fewer than three report: nobody knows who is wrong."""
    rates = sorted(report.tokens / report.step for report in learners if report.step > 0 and report.tokens > 0)
    return rates[(len(rates) - 1) // 2] if len(rates) >= MEMBERS_MIN else None
