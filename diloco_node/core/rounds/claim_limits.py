"""Limits, in every region, on the claims of any region's learner: tokens, steps, the number of its incarnation.

`daemon.learner.counter_check` is for the own learner's counters, beside its process.

The limits are far beyond what regions of different size do. They keep one wrong number from weighing more than all
others together, and from being booked for good.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from diloco_node.core.merge.outliers import MEMBERS_MIN
from diloco_node.core.types import Contribution, DiscardedBody, LearnerStatus

TOKENS_RATIO_MAX: Final = 64
"""Tokens of a step, beside what the median learner trains in one: a node with one GPU beside one with 64."""

STEPS_AHEAD_MAX: Final = 1 << 16
"""Steps of a contribution beyond those in the last report: nobody makes more in the second that it may be old."""

STEPS_MAX: Final = 1 << 40
"""Of one incarnation: a step each millisecond for 34 years."""

INCARNATIONS_AHEAD_MAX: Final = 1 << 20
"""Incarnations that the ledger does not know: a learner that dies each second for twelve days without a merge."""


def is_plausible_incarnation(incarnation: int, known: int) -> bool:
    """Whether the number can be that of the next learners; `known` is the newest in the ledger, -1 if there is none."""
    return 0 <= incarnation <= max(0, known) + INCARNATIONS_AHEAD_MAX


def claim_fault(
    offered: Contribution,
    *,
    reported: LearnerStatus | None,
    others: Iterable[LearnerStatus],
    incarnation_known: int,
) -> str:
    """Why the numbers of another region's contribution can't be true; empty if they can.

    Args:
        offered: of another region; its steps are at least one.
        reported: the last report of its learner.
        others: the last reports of the live learners, that one too or not.
        incarnation_known: the newest in the ledger, -1 if there is none.
    """
    if not is_plausible_incarnation(offered.incarnation, incarnation_known):
        return f"incarnation {offered.incarnation}, the ledger knows {incarnation_known}"
    step_max = STEPS_MAX
    if reported is not None:
        is_same = reported.incarnation == offered.incarnation
        step_max = min(step_max, (reported.step if is_same else 0) + STEPS_AHEAD_MAX)
    if offered.step_to > step_max:
        return f"covers steps up to {offered.step_to}, its report allows {step_max}"
    usual = _usual_tokens(others)
    if usual is not None and offered.tokens > TOKENS_RATIO_MAX * usual * offered.steps:
        return f"counts {offered.tokens} tokens in {offered.steps} steps, usual are {usual:.4g} in one"
    return ""


def discard_claim_fault(body: DiscardedBody, *, incarnation_known: int) -> str:
    """Why an interval that a region reports as lost can't be true; empty if it can."""
    if not is_plausible_incarnation(body.incarnation, incarnation_known):
        return f"incarnation {body.incarnation}, the ledger knows {incarnation_known}"
    return f"steps up to {body.step_to}" if body.step_to > STEPS_MAX else ""


def _usual_tokens(learners: Iterable[LearnerStatus]) -> float | None:
    """Tokens that the median learner trains in a step; None if fewer than three say it: nobody knows who is wrong."""
    rates = sorted(one.tokens / one.step for one in learners if one.step > 0 and one.tokens > 0)
    return rates[(len(rates) - 1) // 2] if len(rates) >= MEMBERS_MIN else None
