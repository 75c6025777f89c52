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
    """A link, for people.

    Attributes:
        address: where we would dial, None if only the peer can. since_s: seconds in this state.
        error: why there is no session, or why the last one ended; empty when nothing went wrong yet.
        control_dropped: control messages that found no link, or a full queue.
        connections: that carry bulk now; 0 while there is no session.
        congestion: by what the peer's sockets go, if it has sent that.
        certificate: by which the peer is linked now; None while it is not.
        is_renewed: whether our side of the link is by the newest certificate that we have.
    """

    state: LinkState
    address: str | None
    since_s: float
    error: str
    control_dropped: int
    connections: int
    congestion: CongestionControls | None = None
    certificate: Certificate | None = None
    is_renewed: bool = True
