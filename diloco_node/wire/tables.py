"""The numeric tag of every message. A tag is never reused; a change here is a new `PROTOCOL_VERSION`."""

from __future__ import annotations

from typing import Final

from diloco_node.core import measuring, messages, types
from diloco_node.wire.schema import Limits, Schema

PROTOCOL_VERSION: Final = 5

CONTROL_BYTES_MAX: Final = 4 * 2**20
HEADER_BYTES_MAX: Final = 64 * 2**10

ENTRY_BODIES: Final[dict[int, type]] = {
    101: types.GenesisBody,
    102: types.LeaderBody,
    103: types.RoundBody,
    104: types.DiscardedBody,
    105: types.FinishedBody,
}

MESSAGES: Final[dict[int, type]] = {
    1: messages.VoteAsked,
    2: messages.VoteAnswered,
    3: messages.AppendAsked,
    4: messages.AppendAnswered,
    5: messages.Heartbeat,
    6: messages.BallotOpened,
    7: messages.Contributed,
    8: messages.Declined,
    9: messages.StripeHeld,
    10: messages.MergeDecided,
    11: messages.StripeMerged,
    12: messages.PayloadHeld,
    13: messages.PayloadWanted,
    14: messages.StateWanted,
    15: messages.Refused,
    16: messages.LeadershipOffered,
    17: messages.FinishWanted,
    18: messages.DiscardReported,
    19: messages.IngressGranted,
    20: messages.IngressWanted,
    21: measuring.EchoWanted,
    22: measuring.EchoAnswered,
    23: measuring.MeasurementAsked,
    24: measuring.MeasurementReady,
    25: measuring.MeasurementDeclined,
    26: measuring.MeasurementReceived,
    27: measuring.MeasurementStopped,
    28: measuring.MeasurementSent,
    29: measuring.LinkAsked,
    30: measuring.LinkTold,
}

BULK_HEADERS: Final[dict[int, type]] = {
    1: messages.ContributionStripe,
    2: messages.MergedStripe,
    3: messages.Payload,
    4: messages.State,
    5: measuring.Probe,
}

CONTROL: Final[Schema[messages.Message]] = Schema(
    MESSAGES, parts=ENTRY_BODIES, limits=Limits(message_bytes_max=CONTROL_BYTES_MAX)
)
"""Messages of the control lane."""

HEADERS: Final[Schema[messages.BulkHeader]] = Schema(BULK_HEADERS, limits=Limits(message_bytes_max=HEADER_BYTES_MAX))
"""Headers of bulk transfers."""

ENTRIES: Final[Schema[types.Entry]] = Schema(
    {1: types.Entry}, parts=ENTRY_BODIES, limits=Limits(message_bytes_max=CONTROL_BYTES_MAX)
)
"""Entries of the ledger by themselves, for who keeps them on disk."""
