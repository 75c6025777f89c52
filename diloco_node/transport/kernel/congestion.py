"""By which congestion control the sockets of a daemon go: what the kernel is set to, and what the peers report.

A socket with a long round trip goes by BBR, where the kernel has it and allows it. Peers are told in the metadata of
the call of a link's control lane, in both directions, and not in a message: messages have exactly the fields of their
version. A peer that does not know the key passes over it, and of one that does not send it nothing is known.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Final

from diloco_node.transport.kernel.tcp_info import set_option

LONG_RTT_NS: Final = 5_000_000
"""From this round trip on a link has a long one."""

LONG_RTT_CONGESTION_CONTROL: Final = b"bbr"
"""A control that goes by loss alone (cubic, the usual one) gets 1.4 Mbit/s out of 100 ms with 1 % loss, whatever the
line has. Several connections would only get so many times as much. The ceiling is the budget's business."""

METADATA_KEY: Final = "diloco-congestion-control"

_TEXT: Final = re.compile(r"([a-z0-9_]{1,15}) ([a-z0-9_]{1,15})")
"""Names of the kernel's have at most 15 characters."""

_NAME_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class CongestionControls:
    """Names of the kernel's: `usual` of the host's sockets, `long_rtt` of a daemon's own at a long round trip."""

    usual: str
    long_rtt: str

    def at(self, rtt_min_ns: int) -> str:
        """Return the control of a daemon's socket at such a round trip."""
        return self.long_rtt if rtt_min_ns >= LONG_RTT_NS else self.usual

    def encode(self) -> str:
        """As it is sent to a peer."""
        return f"{self.usual} {self.long_rtt}"


def decode_congestion_controls(text: str) -> CongestionControls | None:
    """Decode what a peer sent; None when it is nothing of the kind."""
    match = _TEXT.fullmatch(text)
    return CongestionControls(match[1], match[2]) if match else None


def own_congestion_controls() -> CongestionControls | None:
    """Return the control that the kernel gives a socket of ours, and the one that it may change to; None: unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            usual = _name_of(sock)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, LONG_RTT_CONGESTION_CONTROL)
            except OSError:  # the kernel lacks it, or does not allow it: those sockets stay as they are
                return CongestionControls(usual, usual)
            return CongestionControls(usual, _name_of(sock))
    except OSError:
        return None


def _name_of(sock: socket.socket) -> str:
    return (
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES).rstrip(b"\0").decode("ascii", "replace")
    )


def use_bbr(fd: int, cookie: int) -> bool:
    """Have a socket go by LONG_RTT_CONGESTION_CONTROL; whether it does now."""
    return set_option(fd, cookie, socket.IPPROTO_TCP, socket.TCP_CONGESTION, LONG_RTT_CONGESTION_CONTROL)
