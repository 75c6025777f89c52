"""All messages of the wire: the core's, the transport's own, and those of measuring; each with its numeric tag.

A tag is never reused; a change here is a new `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from diloco_node.core import messages, types
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.wire import link_messages, measure_messages
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.message_schema import Limits, Schema

PROTOCOL_VERSION: Final = 12

ControlMessage = messages.Message | link_messages.LinkMessage | measure_messages.MeasureMessage
"""The messages of the control lane."""

TransferHeader = messages.BulkHeader | measure_messages.Probe
"""The headers of bulk transfers."""

CONTROL_BYTES_MAX: Final = 4 * 2**20
HEADER_BYTES_MAX: Final = 64 * 2**10

ENTRY_BODIES: Final[dict[int, type]] = {
    101: types.GenesisBody,
    102: types.LeaderBody,
    103: types.RoundBody,
    104: types.DiscardedBody,
    105: types.FinishedBody,
    106: types.DiskNamedBody,
    107: types.SnapshotBody,
    108: types.SummaryBody,
    109: types.ExtendedBody,
    110: types.RevokedBody,
    111: MembershipBody,
    112: SettingsBody,
}

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
    19: link_messages.IngressGranted,
    20: link_messages.IngressDemand,
    21: measure_messages.EchoRequest,
    22: measure_messages.EchoReply,
    23: measure_messages.MeasurementRequested,
    24: measure_messages.MeasurementReady,
    25: measure_messages.MeasurementDeclined,
    26: measure_messages.MeasurementReceived,
    27: measure_messages.MeasurementStopped,
    28: measure_messages.MeasurementSent,
    29: measure_messages.LinkTestRequested,
    30: measure_messages.LinkMeasured,
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
    MESSAGES, bounds=BOUNDS, inner=ENTRY_BODIES, limits=Limits(message_bytes_max=CONTROL_BYTES_MAX)
)
"""Messages of the control lane."""

HEADERS: Final[Schema[TransferHeader]] = Schema(
    BULK_HEADERS, bounds=BOUNDS, limits=Limits(message_bytes_max=HEADER_BYTES_MAX)
)
"""Headers of bulk transfers."""
