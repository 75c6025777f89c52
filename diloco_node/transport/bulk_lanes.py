"""Which lane of the budget a transfer belongs to, and its order there."""

from __future__ import annotations

from diloco_node.core.measuring import Probe
from diloco_node.core.messages import BulkHeader, ContributionStripe, MergedStripe
from diloco_node.transport.pacing.budget import BudgetLane


def lane_of(header: BulkHeader) -> BudgetLane:
    """What a transfer is for."""
    if isinstance(header, Probe):
        return BudgetLane.MEASUREMENT
    return BudgetLane.ROUNDS if isinstance(header, (ContributionStripe, MergedStripe)) else BudgetLane.RECOVERY


def urgency_of(header: BulkHeader) -> tuple[int, ...]:
    """Its order within the lane: ballots are numbered as they are opened, and their deadlines come in that order."""
    if isinstance(header, (ContributionStripe, MergedStripe)):
        return (header.ballot.term, header.ballot.number)
    return ()
