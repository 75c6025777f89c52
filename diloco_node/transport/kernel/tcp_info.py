"""What the kernel counts of this process's own TCP sockets, and the few things that are set on them.

gRPC does not show its sockets, but they are file descriptors of ours: `/proc/self/fd` lists them and `TCP_INFO` tells
what each sent (with retransmissions) and received, in payload bytes and in segments. Headers are added per segment, so
that the sum is what the interface carries. Nothing is opened, duplicated or closed here: a second descriptor of a
socket would outlive gRPC's own in its epoll set. Set are how fast one sends, and by which congestion control on a far
link. Whose sockets they are `wire_meter` knows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HEADER_BYTES_V4: Final = 52
"""IPv4 (20) and TCP with timestamps (32), per segment. The link layer's own header is not counted."""

HEADER_BYTES_V6: Final = 72

LINK_HEADER_BYTES: Final = 14
"""Ethernet's, per segment: an interface counts it, so a budget does."""

Address = tuple[str, int]

_SO_MAX_PACING_RATE: Final = 47
_PACE: Final = struct.Struct("=Q")
_PACE_UNLIMITED: Final = 2**64 - 1

FAR_RTT_US: Final = 5_000
"""From this round trip on a socket goes by FAR_CONGESTION_CONTROL, where the kernel has it and allows it."""

FAR_CONGESTION_CONTROL: Final = b"bbr"
"""What goes by loss alone (cubic, the usual one) gets 1.4 Mbit/s out of 100 ms with 1 % loss, whatever the line has;
several connections would only get so many times as much, and the ceiling is the budget's business."""

_PLAIN_CONGESTION_CONTROL: Final = b"reno"
"""Every kernel has it, and lets everybody choose it."""

BUFFER_LIMITS: Final = tuple(Path(f"/proc/sys/net/ipv4/{name}") for name in ("tcp_wmem", "tcp_rmem"))
BUFFER_BYTES_USUAL: Final = 4 * 2**20
"""Where the kernel does not tell to what a socket's buffer may grow: Linux' own limit for sending."""

_SO_COOKIE: Final = 57
_COOKIE: Final = struct.Struct("=Q")

# struct tcp_info of linux/tcp.h, kernel 4.19 and later: snd_mss at 16, sacked (segments) at 28, rtt (us) at 68,
# bytes_acked at 120, bytes_received, segs_out, segs_in, min_rtt at 148, data_segs_in, data_segs_out; bytes_sent,
# bytes_retrans at 200.
# The kernel only ever appends.
_TCP_INFO_BYTES: Final = 216
_ACKED_RECEIVED_SEGMENTS: Final = struct.Struct("=QQII")
_SENT_RETRANSMITTED: Final = struct.Struct("=QQ")
_SEGMENT_SIZE: Final = struct.Struct("=I")
_SACKED: Final = struct.Struct("=I")
_RTT: Final = struct.Struct("=I")
_RTT_MIN_DATA: Final = struct.Struct("=III")
_RTT_UNKNOWN: Final = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SocketCounters:
    """One TCP socket of this process.

    Attributes:
        cookie: the kernel's number for it, never used again. fd: its descriptor when it was read.
        local, remote: IP address (IPv4 in its own form, also on a dual-stack socket) and port.
        bytes_sent: payload, retransmissions included. bytes_retransmitted: the part sent again.
        bytes_received: payload. segments_sent, segments_received: packets, acknowledgements included.
        rtt_us: smoothed round-trip time, microseconds. rtt_min_us: the least in the last minutes, 0: not known.
        data_segments_sent: those with payload, retransmissions included.
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
    rtt_us: int
    data_segments_sent: int = 0
    rtt_min_us: int = 0
    bytes_acked: int = 0

    @property
    def first_bytes_out(self) -> int:
        """Payload sent for the first time, with the headers of all segments that carried payload, Ethernet included."""
        return self.bytes_sent - self.bytes_retransmitted + self.data_segments_sent * _framed_bytes(self.remote)

    @property
    def other_bytes_out(self) -> int:
        """Retransmissions, and acknowledgements without payload, Ethernet included."""
        bare = self.segments_sent - self.data_segments_sent
        return self.bytes_retransmitted + bare * _framed_bytes(self.remote)

    @property
    def carried_bytes_out(self) -> int:
        """All that went out, less what was sent again and what the far end does not have yet, Ethernet included."""
        return self.bytes_acked + self.segments_sent * _framed_bytes(self.remote)

    @property
    def framed_bytes_in(self) -> int:
        """All that came, with headers, Ethernet included."""
        return self.bytes_received + self.segments_received * _framed_bytes(self.remote)

    @property
    def wire_bytes_out(self) -> int:
        """With IP and TCP headers."""
        return self.bytes_sent + self.segments_sent * _header_bytes(self.remote)

    @property
    def wire_bytes_in(self) -> int:
        """With IP and TCP headers."""
        return self.bytes_received + self.segments_received * _header_bytes(self.remote)


@dataclass(frozen=True, slots=True)
class TcpCounters:
    """What TCP did on a peer's living sockets, both lanes together.

    Attributes:
        sent_bytes: payload, retransmissions included. retransmitted_bytes: the part that was sent again.
        rtt_min_ns: the least round trip of any of them in the last minutes; 0: not known.
    """

    sent_bytes: int
    retransmitted_bytes: int
    rtt_min_ns: int


def tcp_of(found: Sequence[SocketCounters]) -> TcpCounters | None:
    """Sockets of one peer together; None when there are none."""
    if not found:
        return None
    return TcpCounters(
        sum(one.bytes_sent for one in found),
        sum(one.bytes_retransmitted for one in found),
        min((one.rtt_min_us for one in found if one.rtt_min_us), default=0) * 1000,
    )


def buffer_bytes() -> int:
    """To what a socket's buffers may grow here, the smaller of the two; the peer's are taken to be alike."""
    try:
        return max(1, min(int(file.read_text().split()[-1]) for file in BUFFER_LIMITS))
    except (OSError, ValueError, IndexError):
        return BUFFER_BYTES_USUAL


def read_sockets() -> list[SocketCounters]:
    """The connected TCP sockets of this process; empty where the kernel does not tell."""
    try:
        names = os.listdir("/proc/self/fd")  # noqa: PTH208 - only names are needed, and this runs often
    except OSError:
        return []
    return [found for name in names if (found := _read_socket(int(name))) is not None]


def _read_socket(fd: int) -> SocketCounters | None:
    # The descriptor is gRPC's and may be closed or reused at any moment: every call may fail, and nothing is changed.
    # One of something else fails at once, which is cheaper than to ask for its kind first.
    try:
        view = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None
    try:
        if view.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) not in (socket.AF_INET, socket.AF_INET6):
            return None
        info = view.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
        remote = _address(view.getpeername())
        (cookie,) = _COOKIE.unpack(view.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))
        return counters_from(info, cookie, fd, _address(view.getsockname()), remote)
    except OSError:
        return None
    finally:
        view.detach()


def counters_from(info: bytes, cookie: int, fd: int, local: Address, remote: Address) -> SocketCounters | None:
    """What a TCP_INFO says; None when it is an old kernel's, which says too little."""
    if len(info) < _TCP_INFO_BYTES:
        return None
    _, received, segments_out, segments_in = _ACKED_RECEIVED_SEGMENTS.unpack_from(info, 120)
    sent, again = _SENT_RETRANSMITTED.unpack_from(info, 200)
    (rtt_us,) = _RTT.unpack_from(info, 68)
    rtt_min_us, _, data_segments = _RTT_MIN_DATA.unpack_from(info, 148)
    least_us = 0 if rtt_min_us == _RTT_UNKNOWN else rtt_min_us
    return SocketCounters(
        cookie,
        fd,
        local,
        remote,
        sent,
        again,
        received,
        segments_out,
        segments_in,
        rtt_us,
        data_segments,
        least_us,
        arrived_bytes(info),
    )


def arrived_bytes(info: bytes) -> int:
    """Payload that the far end has, from a socket's TCP_INFO.

    On a line with loss the acknowledged bytes stand still behind every gap, while what follows it arrives: over a few
    tenths of a second they tell a fraction of what the line carries.
    """
    acked, *_ = _ACKED_RECEIVED_SEGMENTS.unpack_from(info, 120)
    sent, again = _SENT_RETRANSMITTED.unpack_from(info, 200)
    (segment_bytes,), (behind_gaps,) = _SEGMENT_SIZE.unpack_from(info, 16), _SACKED.unpack_from(info, 28)
    return int(min(acked + behind_gaps * segment_bytes, max(acked, sent - again)))


def pace_socket(fd: int, cookie: int, rate_bytes_per_s: int | None) -> bool:
    """Have the kernel send no faster on this socket; whether it was still the same one, and the kernel does it."""
    rate = _PACE_UNLIMITED if rate_bytes_per_s is None else rate_bytes_per_s
    return _set_option(fd, cookie, socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _PACE.pack(rate))


def go_far(fd: int, cookie: int) -> bool:
    """Have a socket go by FAR_CONGESTION_CONTROL; whether it does now."""
    return _set_option(fd, cookie, socket.IPPROTO_TCP, socket.TCP_CONGESTION, FAR_CONGESTION_CONTROL)


def start_over(fd: int, cookie: int) -> bool:
    """Have a socket that goes by FAR_CONGESTION_CONTROL begin with it anew; False: it could not go back to it."""
    is_plain = False
    try:
        with _viewed(fd, cookie) as view:
            if view.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == FAR_CONGESTION_CONTROL:
                view.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _PLAIN_CONGESTION_CONTROL)
                is_plain = True
                view.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, FAR_CONGESTION_CONTROL)
    except OSError:
        return not is_plain
    return True


def _set_option(fd: int, cookie: int, level: int, option: int, value: bytes) -> bool:
    try:
        with _viewed(fd, cookie) as view:
            view.setsockopt(level, option, value)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _viewed(fd: int, cookie: int) -> Iterator[socket.socket]:
    """One of gRPC's sockets, by its descriptor. OSError: that is another one's by now."""
    view = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        if _COOKIE.unpack(view.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)) != (cookie,):
            raise OSError(errno.EBADF, "another socket has this descriptor")
        yield view
    finally:
        view.detach()


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return (plain_ip(name[0]), name[1])


def plain_ip(host: str) -> str:
    """An address as text, IPv4 without the prefix that a dual-stack socket shows."""
    return host.removeprefix("::ffff:") if "." in host else host


def _header_bytes(remote: Address) -> int:
    return HEADER_BYTES_V6 if ":" in remote[0] else HEADER_BYTES_V4


def _framed_bytes(remote: Address) -> int:
    return _header_bytes(remote) + LINK_HEADER_BYTES
