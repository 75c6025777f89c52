"""Facts of peers: who answers, and how large packets may be."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from diloco_node.config.urls import host_and_port
from diloco_node.errors import PeerError
from diloco_node.transport.asking import PeerAnswer, ask_peer
from diloco_node.transport.certificates import Identity

TIMEOUT_S: Final = 5.0
SENT_BYTES: Final = 16_000
"""More than a packet of any usual network holds, so that full ones are sent; less than a record of TLS may have."""

_IP_MTU_DISCOVER: Final = 10
_IP_PMTUDISC_DO: Final = 2
_IP_MTU: Final = 14
_IPV6_MTU_DISCOVER: Final = 23
_IPV6_MTU: Final = 24
_RECORD: Final = b"\x16\x03\x01\x40\x00"
"""Head of a TLS record of 16384 bytes. A TLS server waits for all of it, and closes when it does not come."""


@dataclass(frozen=True, slots=True)
class PathMtu:
    """mtu: of the path as the kernel knows it, bytes. is_through: full packets were acknowledged."""

    mtu: int
    is_through: bool


PeerFacts = tuple[PeerAnswer | PeerError, PathMtu | None]
"""The answer of what listens at an address, or why there is none; None where nothing takes a connection."""


async def look_at_peers(identity: Identity, addresses: Mapping[str, str]) -> dict[str, PeerFacts]:
    """Ask all peers at once, each within some seconds."""

    async def look_at(peer: str) -> PeerFacts:
        mtu = asyncio.create_task(asyncio.to_thread(probe_mtu, addresses[peer]))
        try:
            answer: PeerAnswer | PeerError = await ask_peer(identity, peer, addresses[peer], timeout_s=TIMEOUT_S)
        except PeerError as error:
            answer = error
        return answer, await mtu

    results = await asyncio.gather(*(look_at(peer) for peer in addresses))
    return dict(zip(addresses, results, strict=True))


def probe_mtu(address: str) -> PathMtu | None:
    """Send full packets that nobody may split; None: nothing takes a connection there."""
    try:
        with socket.create_connection(host_and_port(address), TIMEOUT_S) as sock:
            is_six = sock.family is socket.AF_INET6
            level = socket.IPPROTO_IPV6 if is_six else socket.IPPROTO_IP
            sock.setsockopt(level, _IPV6_MTU_DISCOVER if is_six else _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            sock.sendall(_RECORD + bytes(SENT_BYTES))
            is_through = _is_acknowledged(sock)
            return PathMtu(sock.getsockopt(level, _IPV6_MTU if is_six else _IP_MTU), is_through)
    except (OSError, ValueError):
        return None


def _is_acknowledged(sock: socket.socket) -> bool:
    """Whether the peer's kernel has acknowledged all that was sent, in time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if not struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]:
            return True
        time.sleep(0.01)
    return False
