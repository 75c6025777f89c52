"""Wire bytes per peer: the kernel's counters of all sockets that lead to it, and what the kernel is to do with them.

All that is ever set is how fast a socket sends (`WireMeter.pace`), and by which congestion control on a far link.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from diloco_node.transport.kernel import tcp_info
from diloco_node.transport.kernel.tcp_info import Address, SocketCounters, TcpCounters, plain_ip, tcp_of

ESTIMATED_OVERHEAD: Final = 1.06
"""Wire bytes per byte handed to gRPC, where the kernel does not tell."""

FORGET_AFTER_SAMPLES: Final = 2

_Framed = tuple[int, int, int, int]
_NOTHING: Final[_Framed] = (0, 0, 0, 0)
"""First and other bytes out, bytes in, carried bytes."""


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Wire bytes exchanged with one peer since start, headers included; measured by the kernel where it tells."""

    bytes_out: int
    bytes_in: int
    is_measured: bool


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
            self._take(tcp_info.read_sockets())

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
                if counters.rtt_min_us >= tcp_info.FAR_RTT_US and cookie not in self._far:
                    self._far.add(cookie)
                    self.goes_by_loss = not tcp_info.go_far(counters.fd, cookie)
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
                if counters.cookie in self._far and not tcp_info.start_over(counters.fd, counters.cookie):
                    self.goes_by_loss = True

    def _pace(self, counters: SocketCounters, rate_bytes_per_s: int | None) -> None:
        if self._paced.get(counters.cookie) != rate_bytes_per_s and tcp_info.pace_socket(
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
