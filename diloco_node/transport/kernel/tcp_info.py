"""The kernel's counters of this process's own TCP sockets, and the one way to set something on them.

gRPC does not show its sockets, but they are file descriptors of ours: `/proc/self/fd` lists them and `TCP_INFO` tells
what each sent (with retransmissions) and received, in payload bytes and in segments. Headers are added per segment, so
that the sum is what the interface carries. Nothing is opened, duplicated or closed here: a second descriptor of a
socket would outlive gRPC's own in its epoll set. `wire_meter` knows the peers of the sockets.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HEADER_BYTES_V4: Final = 52
"""IPv4 (20) and TCP with timestamps (32), per segment."""

HEADER_BYTES_V6: Final = 72

LINK_HEADER_BYTES: Final = 14
"""Ethernet's, per segment: an interface counts it, so a budget does."""

Address = tuple[str, int]

SO_MAX_PACING_RATE: Final = 47
PACE: Final = struct.Struct("=Q")
_PACE_UNLIMITED: Final = 2**64 - 1

BUFFER_LIMITS: Final = tuple(Path(f"/proc/sys/net/ipv4/{name}") for name in ("tcp_wmem", "tcp_rmem"))
BUFFER_BYTES_USUAL: Final = 4 * 2**20
"""Where the kernel does not tell to what a socket's buffer may grow: Linux' own limit for sending."""

_SO_COOKIE: Final = 57
_COOKIE: Final = struct.Struct("=Q")

# struct tcp_info of linux/tcp.h, kernel 4.19 and later. The kernel only ever appends.
_TCP_INFO_BYTES: Final = 216
_SEGMENT_SIZE: Final = struct.Struct("=I")  # at 16
_SACKED: Final = struct.Struct("=I")  # segments, at 28
_ACKED: Final = struct.Struct("=QQIIIIII")  # bytes acked, bytes and segments received, and between them more: at 120
_SENT: Final = struct.Struct("=QQ")  # bytes sent, bytes sent again: at 200
_RTT_UNKNOWN: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SocketCounters:
    """A TCP socket of this process.

    Attributes:
        cookie: the kernel's number for it, never used again. fd: its descriptor when it was read.
        local, remote: IP address (IPv4 in its own form, also on a dual-stack socket) and port.
        bytes_sent: payload, with bytes_retransmitted. segments_sent, segments_received: acknowledgements included.
        data_segments_sent: those with payload, retransmissions included.
        rtt_min_us: the least round trip of the last minutes, microseconds; 0: not known.
        bytes_acked: payload that the far end has, also behind a lost segment (then to within a segment).
    """

    cookie: int
    fd: int
    local: Address
    remote: Address
    bytes_sent: int
    bytes_retransmitted: int
    bytes_received: int
    segments_sent: int
    segments_received: int
    data_segments_sent: int = 0
    rtt_min_us: int = 0
    bytes_acked: int = 0

    @property
    def framed_bytes(self) -> int:
        """Headers of one segment, Ethernet's included."""
        return (HEADER_BYTES_V6 if ":" in self.remote[0] else HEADER_BYTES_V4) + LINK_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class TcpCounters:
    """TCP's counters of a peer's living sockets, both lanes together.

    retransmitted_bytes: part of sent_bytes. rtt_min_ns: the least of any of them in the last minutes; 0: not known.
    """

    sent_bytes: int
    retransmitted_bytes: int
    rtt_min_ns: int


def tcp_of(sockets: Sequence[SocketCounters]) -> TcpCounters | None:
    """Sockets of one peer together; None when there are none."""
    if not sockets:
        return None
    return TcpCounters(
        sum(counters.bytes_sent for counters in sockets),
        sum(counters.bytes_retransmitted for counters in sockets),
        min((counters.rtt_min_us for counters in sockets if counters.rtt_min_us), default=0) * 1000,
    )


def buffer_bytes() -> int:
    """To what a socket's buffers may grow here, the smaller of the two; the peer's are taken to be alike."""
    try:
        return max(1, min(int(file.read_text().split()[-1]) for file in BUFFER_LIMITS))
    except (OSError, ValueError, IndexError):
        return BUFFER_BYTES_USUAL


def read_sockets() -> list[SocketCounters]:
    """The connected TCP sockets of this process; empty where the kernel does not tell."""
    return [counters for fd in _descriptors() if (counters := read_socket(fd)) is not None]


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - only names, and this runs often
    except OSError:
        return []


class _View(socket.socket):
    """A descriptor of gRPC's as a socket, while a block lasts. It may be closed or reused, so every call may fail."""

    def __init__(self, fd: int) -> None:
        super().__init__(socket.AF_INET6, socket.SOCK_STREAM, 0, fd)

    def __exit__(self, *_: object) -> None:
        self.detach()

    def is_ip(self) -> bool:
        """Whether it speaks IP. Raises OSError."""
        return self.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) in (socket.AF_INET, socket.AF_INET6)

    def cookie(self) -> int:
        """The kernel's number for it. Raises OSError."""
        return int(_COOKIE.unpack(self.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0])


def listening_sockets(port: int) -> tuple[tuple[int, int], ...]:
    """(descriptor, cookie) of our sockets that listen on a port; empty where the kernel does not tell."""
    cookies = {fd: _listening_cookie(fd, port) for fd in _descriptors()}
    return tuple(sorted((fd, cookie) for fd, cookie in cookies.items() if cookie is not None))


def is_listening(fd: int, cookie: int) -> bool:
    """Whether a descriptor is still this socket, and it listens."""
    return _listening_cookie(fd, None) == cookie


def _listening_cookie(fd: int, port: int | None) -> int | None:
    """The cookie of a TCP socket that listens, on this port if one is given; else None."""
    try:
        with _View(fd) as view:
            is_open = view.is_ip() and view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return view.cookie() if is_open and port in (None, view.getsockname()[1]) else None
    except OSError:
        return None


def read_socket(fd: int) -> SocketCounters | None:
    """Return the counters of a TCP socket; None where the descriptor is none any more."""
    try:
        with _View(fd) as view:
            if not view.is_ip():
                return None
            info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
            (host, port, *_), (own_host, own_port, *_) = view.getpeername(), view.getsockname()
            local, remote = (plain_ip(own_host), own_port), (plain_ip(host), port)
            return counters_from(info, view.cookie(), fd, local, remote)
    except OSError:
        return None


def counters_from(info: bytes, cookie: int, fd: int, local: Address, remote: Address) -> SocketCounters | None:
    """Decode a TCP_INFO; None when it is an old kernel's, which says too little."""
    if len(info) < _TCP_INFO_BYTES:
        return None
    acked_bytes, received_bytes, segments_out, segments_in, _, rtt_min_us, _, data_segments = _ACKED.unpack_from(
        info, 120
    )
    sent_bytes, again = _SENT.unpack_from(info, 200)
    # Behind a gap the acknowledged bytes stand still while what follows arrives: with loss they tell, over a few tenths
    # of a second, a fraction of what the line carries.
    (segment_bytes,), (behind_gaps,) = _SEGMENT_SIZE.unpack_from(info, 16), _SACKED.unpack_from(info, 28)
    arrival_bytes = min(acked_bytes + behind_gaps * segment_bytes, max(acked_bytes, sent_bytes - again))
    rtt_min_us = 0 if rtt_min_us == _RTT_UNKNOWN else rtt_min_us
    counts = sent_bytes, again, received_bytes, segments_out, segments_in, data_segments
    return SocketCounters(cookie, fd, local, remote, *counts, rtt_min_us, arrival_bytes)


def pace_socket(fd: int, cookie: int, rate_bytes_per_s: int | None) -> bool:
    """Have the kernel send no faster on this socket; whether it was still the same one, and the kernel does it."""
    rate = _PACE_UNLIMITED if rate_bytes_per_s is None else rate_bytes_per_s
    return set_option(fd, cookie, socket.SOL_SOCKET, SO_MAX_PACING_RATE, PACE.pack(rate))


def set_option(fd: int, cookie: int, level: int, option: int, value: bytes) -> bool:
    """Set an option of one of gRPC's sockets, if its descriptor is still this socket's; whether that was done."""
    try:
        with _View(fd) as view:
            if view.cookie() != cookie:
                return False
            view.setsockopt(level, option, value)
            return True
    except OSError:
        return False


def plain_ip(host: str) -> str:
    """An address as text, IPv4 without the prefix that a dual-stack socket shows."""
    return host.removeprefix("::ffff:") if "." in host else host
