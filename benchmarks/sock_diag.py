"""TCP counters of another process from the kernel's socket table (NETLINK_SOCK_DIAG, as `ss -ti` reads it).

The table names each socket by its addresses, cookie and inode, and `/proc/<pid>/fd` says whose inode it is. Of its own
sockets a process learns the same by `diloco_node.transport.kernel.tcp_info`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from diloco_node.transport.kernel.tcp_info import Address, SocketCounters, counters_from, plain_ip

NETLINK_SOCK_DIAG: Final = 4
TIMEOUT_S: Final = 2.0
RECEIVE_BYTES: Final = 2**18
ANSWERS_MAX: Final = 10_000
"""Datagrams of one dump; the kernel puts some dozens of sockets into each."""

_BY_FAMILY: Final = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_INFO: Final = 2  # INET_DIAG_INFO: struct tcp_info
_INFO_WANTED: Final = 1 << (_INFO - 1)
_CONNECTED: Final = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
"""ESTABLISHED, FIN_WAIT1 and 2, CLOSE_WAIT, LAST_ACK, CLOSING: those that have sent and may send again."""

_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_PORTS: Final = struct.Struct("!HH")
_ID_REST: Final = bytes(32) + struct.pack("=I", 0) + b"\xff" * 8
"""Any address, any interface, no cookie."""

# struct inet_diag_msg: family, state, timer, retransmissions; ports at 4, addresses at 8 and 24, interface at 40,
# cookie at 44, expires, two queues, user, inode at 68. Attributes follow.
_COOKIE: Final = struct.Struct("=Q")
_INODE: Final = struct.Struct("=I")
_MESSAGE_BYTES: Final = 72
_ATTRIBUTE: Final = struct.Struct("=HH")


def read_sockets_to(remotes: Collection[Address], *, pid: int) -> list[SocketCounters]:
    """The TCP sockets of a process that are connected to some addresses.

    Args:
        remotes: IP address and port of the far ends. pid: whose sockets.

    Returns:
        Their counters; `fd` is the descriptor in that process. Empty where the kernel does not tell.
    """
    wanted = frozenset((plain_ip(host), port) for host, port in remotes)
    try:
        descriptors = _descriptors(pid)
        found = [one for port in sorted({port for _, port in wanted}) for one in _dump(port, descriptors)]
    except OSError:
        return []
    return [one for one in found if one.remote in wanted]


def _descriptors(pid: int) -> dict[int, int]:
    """inode -> descriptor, of a process's sockets. Raises OSError: it is gone, or somebody else's."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = int(link.name)
    return found


def _dump(remote_port: int, descriptors: dict[int, int]) -> Iterator[SocketCounters]:
    """All connected sockets to a port that a process has. Raises OSError: there is no such netlink here."""
    for family in (socket.AF_INET, socket.AF_INET6):
        for message in _ask(family, remote_port):
            (inode,) = _INODE.unpack_from(message, 68)
            if inode in descriptors:
                counters = parse(message, descriptors[inode])
                if counters is not None:
                    yield counters


def _ask(family: int, remote_port: int) -> list[bytes]:
    """Every `inet_diag_msg` that the kernel answers with, attributes included. Raises OSError."""
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _INFO_WANTED, _CONNECTED)
    request += _PORTS.pack(0, remote_port) + _ID_REST
    found: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(TIMEOUT_S)
        sock.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        for _ in range(ANSWERS_MAX):
            messages, is_last = split(sock.recv(RECEIVE_BYTES))
            found += messages
            if is_last:
                return found
    raise OSError(f"a dump of sockets of more than {ANSWERS_MAX} datagrams")


def split(datagram: bytes) -> tuple[list[bytes], bool]:
    """The messages in a netlink datagram, and whether it is the last one.

    Raises:
        OSError: the kernel refuses, or it is no netlink.
    """
    found: list[bytes] = []
    at = 0
    while at < len(datagram):
        if len(datagram) - at < _HEADER.size:
            raise OSError("a netlink message without a header")
        length, kind, *_ = _HEADER.unpack_from(datagram, at)
        if not _HEADER.size <= length <= len(datagram) - at:
            raise OSError(f"a netlink message of {length} bytes in {len(datagram) - at}")
        if kind == _DONE:
            return found, True
        if kind == _ERROR:
            raise OSError("the kernel does not tell about sockets")
        body = datagram[at + _HEADER.size : at + length]
        if kind == _BY_FAMILY and len(body) >= _MESSAGE_BYTES:
            found.append(body)
        at += -(-length // 4) * 4
    return found, False


def parse(message: bytes, fd: int) -> SocketCounters | None:
    """What an `inet_diag_msg` with its attributes says; None without a TCP_INFO of 4.19 or later."""
    family = message[0]
    local_port, remote_port = _PORTS.unpack_from(message, 4)
    size = 4 if family == socket.AF_INET else 16
    hosts = [plain_ip(socket.inet_ntop(family, message[at : at + size])) for at in (8, 24)]
    (cookie,) = _COOKIE.unpack_from(message, 44)
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            return None
        if kind == _INFO:
            info = message[at + _ATTRIBUTE.size : at + length]
            return counters_from(info, cookie, fd, (hosts[0], local_port), (hosts[1], remote_port))
        at += -(-length // 4) * 4
    return None
