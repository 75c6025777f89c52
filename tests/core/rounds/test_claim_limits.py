"""Limits of a learner's claims about itself: honest regions of any size pass, one wrong number does not."""

from dataclasses import replace

import pytest

from diloco_node.core.rounds.claim_limits import (
    INCARNATIONS_AHEAD_MAX,
    STEPS_AHEAD_MAX,
    STEPS_MAX,
    TOKENS_RATIO_MAX,
    claim_fault,
)
from diloco_node.core.types import Contribution, LearnerStatus
from tests.kit.rounds_kit import contribution, status

OTHERS = [status(10)] * 3


def fault(
    claim: Contribution,
    *,
    reported: LearnerStatus | None = None,
    others: list[LearnerStatus] | None = None,
    known: int = 1,
) -> str:
    report = reported or status(10)
    return claim_fault(claim, report=report, reports=OTHERS if others is None else others, incarnation_known=known)


@pytest.mark.parametrize("batch", [1, 8, TOKENS_RATIO_MAX])
@pytest.mark.parametrize("speed", [1, 4, 16])
def test_larger_batches_and_faster_hardware_are_fine(batch: int, speed: int) -> None:
    own = replace(status(10 * speed), tokens=64 * batch * 10 * speed)
    claim = replace(contribution("b", steps=(0, 10 * speed)), tokens=64 * batch * 10 * speed)
    assert fault(claim, reported=own, others=[*OTHERS[:2], own]) == ""


@pytest.mark.parametrize("batch", [8, TOKENS_RATIO_MAX])
def test_a_small_region_among_large_ones_is_fine(batch: int) -> None:
    large = replace(status(10), tokens=640 * batch)
    assert fault(contribution("b"), others=[status(10), large, large]) == ""


def test_tokens_beyond_all_others_are_refused() -> None:
    claim = replace(contribution("b"), tokens=2**50)
    assert "tokens in 10 steps" in fault(claim)
    boast = replace(status(10), tokens=2**50)
    assert fault(claim, reported=boast, others=[*OTHERS[:2], boast]), "its own report does not make it true"
    assert fault(claim, others=[boast, boast, *OTHERS]), "nor two of five"
    assert fault(claim, others=OTHERS[:2]) == "", "of two nobody knows who is wrong"


def test_steps_follow_the_report() -> None:
    assert fault(contribution("b", steps=(0, 10 + STEPS_AHEAD_MAX))) == ""
    assert fault(contribution("b", steps=(0, 11 + STEPS_AHEAD_MAX))).startswith("covers steps up to")
    late = contribution("b", steps=(0, 5), incarnation=2)
    assert fault(late, reported=status(900_000)) == "", "the report is of the incarnation before"
    boast = status(2**62)
    assert fault(contribution("b", steps=(0, STEPS_MAX + 1)), reported=boast).startswith("covers steps up to")


def test_incarnations_grow_by_bounded_steps() -> None:
    ahead = INCARNATIONS_AHEAD_MAX
    for known, incarnation, is_fine in ((-1, ahead, True), (-1, ahead + 1, False), (7, 7 + ahead, True)):
        claim = contribution("b", incarnation=incarnation)
        assert (fault(claim, reported=status(10, incarnation=incarnation), known=known) == "") is is_fine
    assert fault(contribution("b", incarnation=2**63 - 1))
    assert fault(contribution("b", incarnation=-1))
