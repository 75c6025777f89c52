"""The links that can be measured: what measuring needs of the transport, and why there is no link to a peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from diloco_node.errors import PeerError, PeersUnreachable
from diloco_node.measure.opening import Opens
from diloco_node.measure.probes import Bulk
from diloco_node.transport.kernel.congestion import own_congestion_controls
from diloco_node.transport.kernel.tcp_info import TcpCounters


class MeasuringTransport(Bulk, Opens, Protocol):
    """What measuring needs of `GrpcTransport`."""

    def dials(self, peer: str) -> bool:
        """Whether the link is of our own dial. Raises LinkLost."""
        ...

    def reject(self, peer: str, error: PeerError) -> None:
        """Count what a peer did wrong."""
        ...

    def tcp(self, peer: str) -> TcpCounters | None:
        """What TCP did on the link, as of late."""
        ...

    def budget_status(self) -> dict[str, Any]:
        """Ceilings, and what each lane used."""
        ...

    def peer_status(self) -> Mapping[str, Any]:
        """What each link is doing."""
        ...


class MeasuredLinks:
    """The links of one region, as measuring sees them."""

    def __init__(self, region: str, transport: MeasuringTransport) -> None:
        self.region = region
        self._transport = transport

    def address(self, peer: str) -> str | None:
        """Where we would dial a peer; None if only it can dial us."""
        found: str | None = self._transport.peer_status()[peer].address
        return found

    def connections(self, peer: str) -> int:
        """How many connections the link to a peer has for bulk now."""
        return int(self._transport.peer_status()[peer].connections)

    def congestion_control(self, peer: str) -> dict[str, str | None]:
        """By what the sockets of a link go at its round trip, "here" and "there"; None where nobody tells."""
        counted = self._transport.tcp(peer)
        rtt_min_ns = counted.rtt_min_ns if counted is not None else 0
        ends = {"here": own_congestion_controls(), "there": self._transport.peer_status()[peer].congestion}
        return {end: one.at(rtt_min_ns) if one is not None else None for end, one in ends.items()}

    def error(self, peer: str) -> str:
        """Why there is no link to a peer, for people; empty when there is one."""
        status = self._transport.peer_status()[peer]
        if status.state.value == "up":
            return ""
        where = f" at {status.address}" if status.address else ""
        return f"{self.region} has no link to {peer}{where}: {status.error or status.state.value}"

    def check(self, peer: str) -> None:
        """That there is a link. Raises PeersUnreachable."""
        error = self.error(peer)
        if error:
            raise PeersUnreachable(error)
