"""Facts of peers: who answers, how large packets may be, and who has connected to our port."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import socket
import struct
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True)
class PathMtu:
    """mtu: of the path as the kernel knows it, bytes. is_through: full packets were acknowledged."""

    mtu: int
    is_through: bool


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """answer: of what listens at the address, or why there is none. mtu: None where nothing takes a connection.

    hosts: IP addresses that its name stands for.
    """

    answer: PeerAnswer | PeerError
    mtu: PathMtu | None
    hosts: frozenset[str]


async def look_at_peers(identity: Identity, addresses: Mapping[str, str]) -> dict[str, PeerFacts]:
    """Ask all peers at once, each within some seconds. A resolver that hangs may take longer, once for all of them."""

    async def look_at(peer: str) -> PeerFacts:
        mtu = asyncio.create_task(asyncio.to_thread(probe_mtu, addresses[peer]))
        hosts = asyncio.create_task(asyncio.to_thread(hosts_of, addresses[peer]))
        try:
            answer: PeerAnswer | PeerError = await ask_peer(identity, peer, addresses[peer], timeout_s=TIMEOUT_S)
        except PeerError as error:
            answer = error
        return PeerFacts(answer, await mtu, await hosts)

    results = await asyncio.gather(*(look_at(peer) for peer in addresses))
    return dict(zip(addresses, results, strict=True))


def probe_mtu(address: str) -> PathMtu | None:
    """Send full packets that nobody may split; None: nothing takes a connection there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as sock:
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


def inbound_hosts(port: int) -> frozenset[str] | None:
    """IP addresses with a connection to a port of this machine; None: the kernel does not say."""
    hosts: set[str] = set()
    is_known = False
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        is_known = True
        for line in lines:
            local, remote, state = line.split()[1:4]
            if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                hosts.add(plain_host(remote.rpartition(":")[0]))
    return frozenset(hosts) if is_known else None


def plain_host(text: str) -> str:
    """An address of /proc/net/tcp: words of 32 bits in this machine's order."""
    data = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    address = ipaddress.ip_address(data)
    v4_address = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(v4_address or address)


def hosts_of(address: str) -> frozenset[str]:
    """IP addresses of a `HOST:PORT`; none when the name can't be resolved."""
    host, _, port = address.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return frozenset()
    return frozenset(str(where[0]) for *_, where in infos)
