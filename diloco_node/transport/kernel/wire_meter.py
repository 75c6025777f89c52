"""Wire bytes per peer: the kernel's counters of all sockets that lead to it, and what the kernel is to do with them.

All that is ever set is how fast a socket sends (`WireMeter.pace`), and its congestion control on a long round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from diloco_node.transport.kernel.congestion import LONG_RTT_NS, use_bbr
from diloco_node.transport.kernel.tcp_info import (
    LINK_HEADER_BYTES,
    Address,
    SocketCounters,
    TcpCounters,
    pace_socket,
    plain_ip,
    read_sockets,
    tcp_of,
)

FORGET_AFTER_SAMPLES: Final = 2
"""The address of an incoming call is kept for so long without a socket: that may not be listed yet."""


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Wire bytes exchanged with one peer since start, headers included; measured by the kernel where it tells."""

    bytes_out: int
    bytes_in: int
    is_measured: bool


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """Sums over one peer's sockets, dead ones included; bytes as an interface counts them, since start.

    Attributes:
        first_bytes_out: payload sent for the first time, with headers.
        other_bytes_out: acknowledgements and retransmissions.
        delivered_bytes: of what went out for the first time, acknowledgements included, what has arrived.
        segments_out, segments_in: packets. rtt_min_ns: the least round trip of a living socket; 0: not known.
    """

    first_bytes_out: int = 0
    other_bytes_out: int = 0
    bytes_in: int = 0
    delivered_bytes: int = 0
    segments_out: int = 0
    segments_in: int = 0
    rtt_min_ns: int = 0

    def with_socket(self, sock: SocketCounters) -> LinkCounters:
        """With the bytes of one more socket."""
        header, bare = sock.framed_bytes, sock.segments_sent - sock.data_segments_sent
        first = sock.bytes_sent - sock.bytes_retransmitted + sock.data_segments_sent * header
        return LinkCounters(
            self.first_bytes_out + first,
            self.other_bytes_out + sock.bytes_retransmitted + bare * header,
            self.bytes_in + sock.bytes_received + sock.segments_received * header,
            self.delivered_bytes + sock.bytes_acked + sock.segments_sent * header,
            self.segments_out + sock.segments_sent,
            self.segments_in + sock.segments_received,
        )


class WireMeter:
    """Adds up the sockets of each peer, dead ones included. All methods run on the transport's event loop.

    A socket that closes between two samples loses what it carried since: `sample` before closing one ourselves.
    """

    def __init__(self) -> None:
        self._peers: dict[Address, str] = {}
        self._passing: dict[Address, int] = {}  # of incoming calls -> samples in which it was missing
        self._bulk_remotes: set[Address] = set()  # of incoming calls
        self._live: dict[int, tuple[str, SocketCounters]] = {}  # by cookie, as all that follows
        self._lanes: dict[int, bool] = {}  # whether it is one of the bulk lane's
        self._paced: dict[int, int | None] = {}
        self._long_rtt: set[int] = set()
        self._ended: defaultdict[str, LinkCounters] = defaultdict(LinkCounters)
        self._dials: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._is_measured = False
        self.goes_by_loss = False
        """A socket with a long round trip kept the host's congestion control: it is taken to go by loss."""

    def assign(self, peer: str, remote: Address, *, is_lasting: bool = True, is_bulk: bool = False) -> None:
        """Sockets to this remote address, IP and port, belong to the peer.

        is_lasting: an address that we dial; else the remote end of an incoming call, which is forgotten soon after its
        socket is gone. is_bulk: of that call; for an address that we dial see `opening`.
        """
        address = (plain_ip(remote[0]), remote[1])
        self._peers[address] = peer
        if not is_lasting:
            self._passing[address] = 0
            if is_bulk:
                self._bulk_remotes.add(address)

    @contextlib.asynccontextmanager
    async def opening(self, peer: str, *, is_bulk: bool) -> AsyncIterator[None]:
        """Open a connection to a peer in this block, or several of one lane; others wait for its end. gRPC shows no
        sockets, but the one to a dialed address that is new since the last call is this one."""
        async with self._dials[peer]:
            yield
            self.assign_lane(peer, is_bulk=is_bulk)

    def assign_lane(self, peer: str, *, is_bulk: bool) -> None:
        """Connections that were opened to a peer since the last call are of this lane; see `opening`."""
        self.sample()
        for cookie, (owner, counters) in self._live.items():
            if owner == peer and counters.remote not in self._passing:
                self._lanes.setdefault(cookie, is_bulk)

    def sample(self) -> None:
        """Read the counters of all sockets."""
        sockets = read_sockets()
        # One of known lane keeps its peer: another one behind the same address may have been dialed since.
        owners = {cookie: owner for cookie, (owner, _) in self._live.items() if cookie in self._lanes}
        live = {
            sock.cookie: (owners.get(sock.cookie) or self._peers[sock.remote], sock)
            for sock in sockets
            if sock.remote in self._peers
        }
        for cookie in sorted(self._live.keys() - live.keys()):
            peer, last = self._live[cookie]
            self._ended[peer] = self._ended[peer].with_socket(last)
        self._live = live
        self._lanes = {cookie: is_bulk for cookie, is_bulk in self._lanes.items() if cookie in live}
        self._paced = {cookie: rate for cookie, rate in self._paced.items() if cookie in live}
        self._long_rtt &= live.keys()
        for cookie, (_, sock) in sorted(live.items()):
            if sock.rtt_min_us * 1000 >= LONG_RTT_NS and cookie not in self._long_rtt:
                self._long_rtt.add(cookie)
                self.goes_by_loss = not use_bbr(sock.fd, cookie)
        self._is_measured = self._is_measured or bool(live)
        remotes = {sock.remote for sock in sockets}
        for address, misses in list(self._passing.items()):
            self._passing[address] = 0 if address in remotes else misses + 1
            if self._passing[address] > FORGET_AFTER_SAMPLES:
                del self._passing[address], self._peers[address]
                self._bulk_remotes.discard(address)

    def link(self, peer: str) -> LinkCounters | None:
        """A peer's counters as of the last sample; None if the kernel never told anything."""
        if not self._is_measured:
            return None
        total, living = self._ended[peer], self._of(peer)
        for counters in living:
            total = total.with_socket(counters)
        tcp = tcp_of(living)
        return replace(total, rtt_min_ns=tcp.rtt_min_ns) if tcp is not None else total

    def traffic(self, peer: str) -> PeerTraffic | None:
        """Wire bytes with a peer as of the last sample, without Ethernet's headers; None as in `link`."""
        total = self.link(peer)
        if total is None:
            return None
        out = total.first_bytes_out + total.other_bytes_out - total.segments_out * LINK_HEADER_BYTES
        return PeerTraffic(out, total.bytes_in - total.segments_in * LINK_HEADER_BYTES, is_measured=True)

    def tcp(self, peer: str) -> TcpCounters | None:
        """Return TCP's counters of a peer's living sockets, as of the last sample; None when there are none."""
        return tcp_of(self._of(peer))

    def pace(self, peer: str, rate_bytes_per_s: int | None, *, connections: int = 1) -> None:
        """Have the kernel send no faster on the peer's bulk connections than this, shared by so many; None: no limit.

        Bytes that the sockets hold already obey as well. Pieces are spread out over time instead of leaving at once.
        """
        rate = None if rate_bytes_per_s is None else max(1, rate_bytes_per_s // connections)
        for sock in self._of(peer):
            if not self._lanes.get(sock.cookie, False) and sock.remote not in self._bulk_remotes:
                continue  # control must not keep a limit for bulk
            if self._paced.get(sock.cookie) != rate and pace_socket(sock.fd, sock.cookie, rate):
                self._paced[sock.cookie] = rate

    def _of(self, peer: str) -> list[SocketCounters]:
        return [sock for _, (owner, sock) in sorted(self._live.items()) if owner == peer]
