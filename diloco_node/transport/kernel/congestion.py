"""By which congestion control the sockets of a daemon go, and how its peers learn of it.

It is told in the metadata of the call of a link's control lane, in both directions, and not in a message: messages have
exactly the fields of their version. A peer that does not know the key passes over it, and of one that does not tell
nothing is known.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Final

from diloco_node.transport.kernel.tcp_info import FAR_CONGESTION_CONTROL, FAR_RTT_US

METADATA_KEY: Final = "diloco-congestion-control"

_TEXT: Final = re.compile(r"([a-z0-9_]{1,15}) ([a-z0-9_]{1,15})")
"""Names of the kernel's have at most 15 characters."""

_NAME_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CongestionControls:
    """Names of the kernel's: `usual` of the host's sockets, `far` of a daemon's own to a far peer."""

    usual: str
    far: str

    def at(self, rtt_min_ns: int) -> str:
        """What a daemon's socket of such a round trip goes by; see `sockets.FAR_RTT_US`."""
        return self.far if rtt_min_ns >= FAR_RTT_US * 1000 else self.usual

    def encode(self) -> str:
        """As a peer is told."""
        return f"{self.usual} {self.far}"


def decode_congestion_controls(text: str) -> CongestionControls | None:
    """What a peer told; None when it is nothing of the kind."""
    found = _TEXT.fullmatch(text)
    return CongestionControls(found[1], found[2]) if found else None


def own_congestion_controls() -> CongestionControls | None:
    """What the kernel gives a socket of ours, and lets it change to; None where it does not tell."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            usual = _name_of(one)
            try:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FAR_CONGESTION_CONTROL)
            except OSError:  # the kernel lacks it, or does not allow it: far sockets stay as they are
                return CongestionControls(usual, usual)
            return CongestionControls(usual, _name_of(one))
    except OSError:
        return None


def _name_of(one: socket.socket) -> str:
    return (
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode("ascii", "replace")
    )
