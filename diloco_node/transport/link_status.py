"""The state of a link, for people: what `status` shows of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco_node.transport.certificates import Certificate
from diloco_node.transport.kernel.congestion import CongestionControls


class LinkState(StrEnum):
    """The state of a link, for `status`."""

    WAITING = "waiting"
    DIALING = "dialing"
    UP = "up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A link, for people. address: where we would dial, None if only the peer can.

    error: why there is no session, or why the last one ended. connections: that carry bulk now.
    congestion, certificate: the peer's, as far as it has sent them. is_renewed: our side has our newest certificate.
    """

    state: LinkState
    address: str | None
    error: str
    connections: int
    congestion: CongestionControls | None = None
    certificate: Certificate | None = None
    is_renewed: bool = True
