"""Messages that the transport itself sends and handles: shares of the ingress ceiling (`transport.pacing.grants`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IngressGranted:
    """Receiver to sender: so many wire bytes a second are your share of what I may receive; 0: no limit."""

    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class IngressDemand:
    """Sender to receiver: so much I could send you now; 0: nothing waits. Only to a peer that has granted a share."""

    bytes_per_s: int


LinkMessage = IngressGranted | IngressDemand
