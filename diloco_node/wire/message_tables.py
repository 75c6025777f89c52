"""All messages of the wire: the core's, the transport's own, and those of measuring; each with its numeric tag.

A tag is never reused; a change here is a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, get_args

from diloco_node.core import messages
from diloco_node.core.ledger.entries import BODY_TYPES
from diloco_node.wire import link_messages, measure_messages
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_schema import Schema

PROTOCOL_VERSION: Final = 13

ControlMessage = messages.Message | link_messages.LinkMessage | measure_messages.MeasureMessage
"""The messages of the control lane."""

TransferHeader = messages.BulkHeader | measure_messages.Probe
"""The headers of bulk transfers."""

CONTROL_BYTES_MAX: Final = 4 * 2**20
HEADER_BYTES_MAX: Final = 64 * 2**10

ENTRY_BODIES: Final[dict[int, type]] = dict(enumerate(BODY_TYPES.values(), 101))

MESSAGES: Final[dict[int, type]] = {
    1: messages.RequestVote,
    2: messages.RequestVoteReply,
    3: messages.AppendEntries,
    4: messages.AppendEntriesReply,
    5: messages.Heartbeat,
    6: messages.BallotOpened,
    7: messages.Contributed,
    8: messages.Declined,
    9: messages.StripesReceived,
    10: messages.MergeDecided,
    11: messages.ReductionReported,
    12: messages.PayloadDurable,
    13: messages.PayloadRequested,
    14: messages.StateRequested,
    15: messages.Refused,
    16: messages.TimeoutNow,
    17: messages.FinishRequested,
    18: messages.DiscardReported,
    **dict(enumerate(get_args(link_messages.LinkMessage | measure_messages.MeasureMessage), 19)),
    31: messages.BaseSent,
    32: messages.MergedReceived,
    33: messages.AuditDrawn,
    34: messages.ContributionProjected,
    35: messages.RosterShown,
}

BULK_HEADERS: Final[dict[int, type]] = {
    1: messages.ContributionStripe,
    2: messages.MergedStripe,
    3: messages.Payload,
    4: messages.State,
    5: measure_messages.Probe,
}


class BudgetLane(IntEnum):
    """The purpose of traffic; a smaller number goes first."""

    CONTROL = 0
    ROUNDS = 1
    RECOVERY = 2
    MEASUREMENT = 3


BULK_LANES: Final[dict[type, BudgetLane]] = {
    messages.ContributionStripe: BudgetLane.ROUNDS,
    messages.MergedStripe: BudgetLane.ROUNDS,
    messages.Payload: BudgetLane.RECOVERY,
    messages.State: BudgetLane.RECOVERY,
    measure_messages.Probe: BudgetLane.MEASUREMENT,
}
"""The lane of the budget in which a transfer travels."""

CONTROL: Final[Schema[ControlMessage]] = Schema(
    MESSAGES, bounds=BOUNDS, inner=ENTRY_BODIES, bytes_max=CONTROL_BYTES_MAX
)
"""Messages of the control lane."""

HEADERS: Final[Schema[TransferHeader]] = Schema(BULK_HEADERS, bounds=BOUNDS, bytes_max=HEADER_BYTES_MAX)
"""Headers of bulk transfers."""
