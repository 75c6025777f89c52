"""Wire bytes per peer, from the kernel's counters of this process's own TCP sockets.

gRPC does not show its sockets, but they are file descriptors of ours: `/proc/self/fd` lists them and `TCP_INFO` tells
what each sent (with retransmissions) and received, in payload bytes and in segments. Headers are added per segment, so
that the sum is what the interface carries. Nothing is opened, duplicated or closed here: a second descriptor of a
socket would outlive gRPC's own in its epoll set. All that is ever set is how fast one sends (`WireMeter.pace`), and
by which congestion control on a far link.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from diloco_node.ports import PeerTraffic

HEADER_BYTES_V4: Final = 52
"""IPv4 (20) and TCP with timestamps (32), per segment. The link layer's own header is not counted."""

HEADER_BYTES_V6: Final = 72

LINK_HEADER_BYTES: Final = 14
"""Ethernet's, per segment: an interface counts it, so a budget does."""

ESTIMATED_OVERHEAD: Final = 1.06
"""Wire bytes per byte handed to gRPC, where the kernel does not tell."""

FORGET_AFTER_SAMPLES: Final = 2

Address = tuple[str, int]

_Framed = tuple[int, int, int, int]
_NOTHING: Final[_Framed] = (0, 0, 0, 0)
"""First and other bytes out, bytes in, carried bytes."""

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


def _pace_socket(fd: int, cookie: int, rate_bytes_per_s: int | None) -> bool:
    """Have the kernel send no faster on this socket; whether it was still the same one, and the kernel does it."""
    rate = _PACE_UNLIMITED if rate_bytes_per_s is None else rate_bytes_per_s
    return _set_option(fd, cookie, socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _PACE.pack(rate))


def _start_over(fd: int, cookie: int) -> bool:
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


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """What a budget needs to know of one peer's sockets; bytes as an interface counts them, since start.

    Attributes:
        first_bytes_out: payload sent for the first time, with headers.
        other_bytes_out: acknowledgements and retransmissions.
        bytes_in: all that came.
        carried_bytes: of what went out for the first time, acknowledgements included, all but what is still on its way.
        rtt_ns, rtt_min_ns: of the living socket that has sent most of late, which is one of the bulk lane's as soon as
            it matters; 0: not known.
    """

    first_bytes_out: int
    other_bytes_out: int
    bytes_in: int
    carried_bytes: int
    rtt_ns: int
    rtt_min_ns: int


class WireMeter:
    """Adds up the sockets of each peer, dead ones included. `sample` from a thread or the loop; the rest anywhere.

    A socket that closes between two samples loses what it carried since the last one; `sample` is called before we
    close one ourselves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sampling = threading.Lock()
        self._peers: dict[Address, str] = {}
        self._passing: dict[Address, int] = {}
        self._live: dict[int, tuple[str, SocketCounters]] = {}
        self._ended: dict[str, tuple[int, int]] = {}
        self._ended_framed: dict[str, _Framed] = {}
        self._estimated: dict[str, tuple[int, int]] = {}
        self._dials: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._lanes: dict[int, bool] = {}  # cookie -> whether it is one of the bulk lane's
        self._bulk_remotes: set[Address] = set()  # of incoming calls
        self._lately: dict[int, int] = {}  # bytes sent between the last two samples
        self._paced: dict[int, int | None] = {}
        self._asides: dict[str, frozenset[int]] = {}
        self._far: set[int] = set()
        self._is_measured = False
        self.goes_by_loss = False
        """A far socket stayed with the host's congestion control: it is taken for one that goes by loss."""

    def assign(self, peer: str, remote: Address, *, is_lasting: bool = True, is_bulk: bool = False) -> None:
        """Sockets to this remote address belong to the peer.

        Args:
            peer: its name. remote: IP address and port.
            is_lasting: an address that we dial. Not lasting is the far end of an incoming call: its port will be used
                for something else, so it is forgotten some samples after its socket is gone.
            is_bulk: that call is of the bulk lane; for an address that we dial see `opening`.
        """
        address = (plain_ip(remote[0]), remote[1])
        with self._lock:
            self._peers[address] = peer
            if not is_lasting:
                self._passing[address] = 0
                if is_bulk:
                    self._bulk_remotes.add(address)

    @contextlib.asynccontextmanager
    async def opening(self, peer: str, *, is_bulk: bool) -> AsyncIterator[None]:
        """Open a connection to a peer in this block, or several of one lane; others wait for its end.

        gRPC does not show its sockets. But a peer's are opened one after the other, so the one to an address that we
        dial, and that was not there at the last call, is this one.
        """
        async with self._dials[peer]:
            yield
            self.opened(peer, is_bulk=is_bulk)

    def opened(self, peer: str, *, is_bulk: bool) -> None:
        """Connections that were opened to a peer since the last call are of this lane; see `opening`."""
        self.sample()
        with self._lock:
            for cookie, (owner, counters) in self._live.items():
                if owner == peer and counters.remote not in self._passing:
                    self._lanes.setdefault(cookie, is_bulk)

    def count(self, peer: str, *, bytes_out: int = 0, bytes_in: int = 0) -> None:
        """What was handed to or came from gRPC, for the estimate where the kernel does not tell."""
        if self._is_measured:
            return
        with self._lock:
            out, into = self._estimated.get(peer, (0, 0))
            self._estimated[peer] = (out + bytes_out, into + bytes_in)

    def sample(self) -> None:
        """Read the counters of all sockets."""
        with self._sampling:  # what was read first is taken first: else a socket that is closed would come back
            self._take(read_sockets())

    def _take(self, found: list[SocketCounters]) -> None:
        with self._lock:
            seen: dict[int, tuple[str, SocketCounters]] = {}
            for counters in found:
                peer = self._peers.get(counters.remote)
                if peer is not None:
                    seen[counters.cookie] = (peer, counters)
            for cookie in sorted(self._live.keys() - seen.keys()):
                self._end(*self._live[cookie])
            before = {cookie: counters.bytes_sent for cookie, (_, counters) in self._live.items()}
            self._lately = {cookie: one.bytes_sent - before.get(cookie, 0) for cookie, (_, one) in seen.items()}
            self._live = seen
            self._lanes = {cookie: is_bulk for cookie, is_bulk in self._lanes.items() if cookie in seen}
            self._paced = {cookie: rate for cookie, rate in self._paced.items() if cookie in seen}
            self._far &= seen.keys()
            for cookie, (_, counters) in sorted(seen.items()):
                if counters.rtt_min_us >= FAR_RTT_US and cookie not in self._far:
                    self._far.add(cookie)
                    self.goes_by_loss = not _set_option(
                        counters.fd, cookie, socket.IPPROTO_TCP, socket.TCP_CONGESTION, FAR_CONGESTION_CONTROL
                    )
            self._forget({counters.remote for counters in found})
            self._is_measured = self._is_measured or bool(seen)

    def _end(self, peer: str, last: SocketCounters) -> None:
        out, into = self._ended.get(peer, (0, 0))
        self._ended[peer] = (out + last.wire_bytes_out, into + last.wire_bytes_in)
        self._ended_framed[peer] = _add(self._ended_framed.get(peer, _NOTHING), last)

    def _forget(self, remotes: set[Address]) -> None:
        for address, misses in list(self._passing.items()):
            self._passing[address] = 0 if address in remotes else misses + 1
            if self._passing[address] > FORGET_AFTER_SAMPLES:
                del self._passing[address], self._peers[address]
                self._bulk_remotes.discard(address)

    def traffic(self, peer: str) -> PeerTraffic:
        """Wire bytes with a peer as of the last sample, or the estimate if the kernel never told anything."""
        with self._lock:
            if not self._is_measured:
                out, into = self._estimated.get(peer, (0, 0))
                return PeerTraffic(int(out * ESTIMATED_OVERHEAD), int(into * ESTIMATED_OVERHEAD), is_measured=False)
            out, into = self._ended.get(peer, (0, 0))
            for owner, counters in self._live.values():
                if owner == peer:
                    out += counters.wire_bytes_out
                    into += counters.wire_bytes_in
            return PeerTraffic(out, into, is_measured=True)

    def tcp(self, peer: str) -> TcpCounters | None:
        """What TCP did on a peer's living sockets, as of the last sample; None when it has none, or nobody tells."""
        with self._lock:
            return tcp_of([counters for owner, counters in self._live.values() if owner == peer])

    def remotes(self, peer: str) -> list[Address]:
        """The addresses that belong to a peer."""
        with self._lock:
            return sorted(address for address, owner in self._peers.items() if owner == peer)

    def set_asides(self, peer: str, cookies: frozenset[int]) -> None:
        """These sockets of a peer carry a measurement only: they are counted, and paced apart from the others."""
        with self._lock:
            self._asides[peer] = cookies

    def pace(self, peer: str, rate_bytes_per_s: int | None, *, connections: int = 1) -> None:
        """Have the kernel send no faster on the peer's bulk connections than this; None: no limit.

        What the sockets hold already obeys as well, and pieces are spread out over time instead of leaving at once.
        Those of a measurement together get the same: whatever they hold, the budget lets no more go than the limit.

        Args:
            connections: how many share the load: each of all there are gets such a part of the rate.
        """
        rate = None if rate_bytes_per_s is None else max(1, rate_bytes_per_s // connections)
        with self._lock:
            for counters in self._bulk(peer):
                self._pace(counters, rate)
            asides = [one for one in self._of(peer) if one.cookie in self._asides.get(peer, ())]
            for counters in asides:
                part = None if rate_bytes_per_s is None else max(1, rate_bytes_per_s // len(asides))
                self._pace(counters, part)

    def start_over(self, peer: str) -> None:
        """Let BBR forget what it knows of the peer's bulk connections, and when it last saw the least round trip.

        Ten seconds after that it would stop for 0.2 s and a round trip to see it again. It starts with its start-up:
        what `pace` allows must be no more than the link carries then.
        """
        with self._lock:
            for counters in self._bulk(peer):
                if counters.cookie in self._far and not _start_over(counters.fd, counters.cookie):
                    self.goes_by_loss = True

    def _pace(self, counters: SocketCounters, rate_bytes_per_s: int | None) -> None:
        if self._paced.get(counters.cookie) != rate_bytes_per_s and _pace_socket(
            counters.fd, counters.cookie, rate_bytes_per_s
        ):
            self._paced[counters.cookie] = rate_bytes_per_s

    def _bulk(self, peer: str) -> list[SocketCounters]:
        """A peer's sockets of the bulk lane: control and measurements must not keep a limit for bulk."""
        return [one for one in self._of(peer) if self._lanes.get(one.cookie, False) or one.remote in self._bulk_remotes]

    def _of(self, peer: str) -> list[SocketCounters]:
        return [counters for _, (owner, counters) in sorted(self._live.items()) if owner == peer]

    def _by_use(self, peer: str) -> list[SocketCounters]:
        """A peer's sockets, those of a measurement as well: those that have sent most of late first."""

        def use(counters: SocketCounters) -> tuple[int, int, int]:
            return self._lately[counters.cookie], counters.bytes_sent, counters.cookie

        return sorted(self._of(peer), key=use, reverse=True)

    def link(self, peer: str) -> LinkCounters | None:
        """A peer's counters as of the last sample; None if the kernel never told anything."""
        with self._lock:
            if not self._is_measured:
                return None
            by_use = self._by_use(peer)
            total = self._ended_framed.get(peer, _NOTHING)
        for counters in by_use:
            total = _add(total, counters)
        if not by_use:
            return LinkCounters(*total, 0, 0)
        busiest = by_use[0]
        return LinkCounters(*total, busiest.rtt_us * 1000, busiest.rtt_min_us * 1000)


def _add(total: _Framed, counters: SocketCounters) -> _Framed:
    first, other, into, carried = total
    return (
        first + counters.first_bytes_out,
        other + counters.other_bytes_out,
        into + counters.framed_bytes_in,
        carried + counters.carried_bytes_out,
    )
