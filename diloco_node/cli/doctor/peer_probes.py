"""Look at peers: who answers, how large packets may be, and who has connected to our port."""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import socket
import ssl
import struct
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.errors import PeerError
from diloco_node.transport.asking import PeerAnswer, ask_peer
from diloco_node.transport.certs import Identity, tls_name

TIMEOUT_S: Final = 5.0
SENT_BYTES: Final = 16_000
"""More than a packet of any usual network holds, so that full ones are sent; less than a frame of HTTP/2 may have."""

_IP_MTU_DISCOVER: Final = 10
_IP_PMTUDISC_DO: Final = 2
_IP_MTU: Final = 14
_IPV6_MTU_DISCOVER: Final = 23
_IPV6_MTU: Final = 24
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"
_UNKNOWN_FRAME: Final = 0xBE
"""RFC 9113, 4.1: who does not know a type passes over the frame."""

_ESTABLISHED: Final = "01"


@dataclass(frozen=True, slots=True)
class MtuFound:
    """mtu: of the path as the kernel knows it, bytes. is_through: full packets were acknowledged."""

    mtu: int
    is_through: bool


async def ask_all_peers(identity: Identity, addresses: dict[str, str]) -> dict[str, PeerAnswer | PeerError]:
    """Of each peer its answer, or why there is none; all at once."""

    async def ask(peer: str) -> PeerAnswer | PeerError:
        try:
            return await ask_peer(identity, peer, addresses[peer], timeout_s=TIMEOUT_S)
        except PeerError as error:
            return error

    answers = await asyncio.gather(*(ask(peer) for peer in addresses))
    return dict(zip(addresses, answers, strict=True))


def probe_mtu(identity: Identity, peer: str, address: str) -> MtuFound | None:
    """Send full packets that nobody may split over a TLS connection to a peer; None: there is no connection."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as plain,
            _context(identity).wrap_socket(plain, server_hostname=tls_name(peer, identity.run_id)) as secure,
        ):
            is_six = secure.family is socket.AF_INET6 and not _is_mapped(secure.getpeername()[0])
            level = socket.IPPROTO_IPV6 if is_six else socket.IPPROTO_IP
            secure.setsockopt(level, _IPV6_MTU_DISCOVER if is_six else _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            secure.sendall(_PREFACE + _SETTINGS + _frame(SENT_BYTES))
            is_through = _is_acknowledged(secure)
            return MtuFound(secure.getsockopt(level, _IPV6_MTU if is_six else _IP_MTU), is_through)
    except (OSError, ValueError):
        return None


def _is_mapped(host: str) -> bool:
    return ipaddress.IPv6Address(host.partition("%")[0]).ipv4_mapped is not None


def _frame(size_bytes: int) -> bytes:
    return struct.pack(">I", size_bytes)[1:] + bytes([_UNKNOWN_FRAME, 0, 0, 0, 0, 0]) + bytes(size_bytes)


def _context(identity: Identity) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=identity.ca_pem.decode())
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # the ssl module takes keys from files only; mode 0600
        file.write(identity.cert_pem + identity.key_pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


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
    found: set[str] = set()
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
                found.add(_plain_host(remote.rpartition(":")[0]))
    return frozenset(found) if is_known else None


def _plain_host(text: str) -> str:
    """An address of /proc/net/tcp: words of 32 bits in this machine's order."""
    packed = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def hosts_of(address: str) -> frozenset[str]:
    """IP addresses of a `HOST:PORT`; none when the name can't be resolved."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return frozenset()
    return frozenset(str(where[0]) for *_, where in found)
