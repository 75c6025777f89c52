"""What the kernel counted of one peer's connections, and what follows from it: rates, the limit for delay, how many
connections there should be, and how the kernel is to hold them back.

No clock and no timer: `pacing` says when something was counted.
"""

from __future__ import annotations

from typing import Final

from diloco_node.core.delay import LONG_RTT_NS, DelayCut
from diloco_node.core.oneway import RECENT_NS, OneWayQueue, hasty_ns
from diloco_node.transport.connections import connections_wanted
from diloco_node.transport.kernel.tcp_info import TcpCounters, buffer_bytes
from diloco_node.transport.kernel.wire_meter import LinkCounters, WireMeter
from diloco_node.transport.pacing.budget import NS_PER_S

SAMPLE_NS_MIN: Final = 10_000_000
"""Over a shorter time no rate is measured."""

PACE_PPM: Final = 950_000
"""The kernel paces payload; with headers, and with acknowledgements and control beside it, that is the limit."""

START_OVER_NS: Final = 8 * NS_PER_S
"""Ten seconds after BBR has seen the least round trip it nearly stops for 0.2 s and a round trip, to see it again. A
link that is held to a limit for delay has no queue that would hide it: BBR starts over before."""

START_ROUNDS: Final = 5
"""It ends its start-up after three round trips without growth. So long nothing is sent faster than was carried."""

LOSS_BYTES_MIN: Final = 4 * 2**20
"""Before so many bytes were sent nothing is known of a link's loss."""


class LinkWatch:
    """One peer. Call `taken` for each sample while there is a session, then `hold`; `lost` at its end.

    Args:
        peer: its name. meter: the kernel's counters.

    Attributes:
        delay: the limit for delay. one_way: the queue in our own direction.
        sampled_ns: when the last sample was taken; 0: never.
        rate_bytes_per_s: what is sent, fading. busiest_bytes_per_s: what the busier direction carried, fading.
        rtt_min_ns: the least round trip; 0: not known.
    """

    def __init__(self, peer: str, meter: WireMeter) -> None:
        self._peer = peer
        self._meter = meter
        self._sent_bytes = self._carried_bytes = self._received_bytes = 0
        self._received_ns = 0
        self._connections = 1
        self._is_paced = False
        self._started_over_ns = 0
        self.delay = DelayCut()
        self.one_way = OneWayQueue()
        self.sampled_ns = 0
        self.rate_bytes_per_s = 0
        self.busiest_bytes_per_s = 0
        self.rtt_min_ns = 0

    def lost(self) -> None:
        """The session has ended; the next one may take another way."""
        self._connections = 1
        self._is_paced = False
        self.busiest_bytes_per_s = self.rtt_min_ns = 0
        self.delay.reset()
        self.one_way.reset()

    # ---- connections -------------------------------------------------------------------------------------------------

    def connections_wanted(self, *, ceiling_bytes_per_s: int | None) -> int:
        """How many bulk connections the link is worth, by what is known of it now.

        Args:
            ceiling_bytes_per_s: the most that may go in either direction; None: no limit in one of them.
        """
        return connections_wanted(
            rtt_min_ns=self.rtt_min_ns,
            ceiling_bytes_per_s=ceiling_bytes_per_s,
            carried_bytes_per_s=self.busiest_bytes_per_s,
            buffer_bytes=buffer_bytes(),
            lost_ppm=self._lost_ppm() if self._meter.goes_by_loss else 0,
        )

    def has_connections(self, count: int) -> None:
        """So many carry bulk now."""
        self._connections = count

    def _lost_ppm(self) -> int:
        """Of the bytes sent, those sent again; 0 before so much was sent that a share says something."""
        tcp: TcpCounters | None = self._meter.tcp(self._peer)
        if tcp is None or tcp.sent_bytes < LOSS_BYTES_MIN:
            return 0
        return tcp.retransmitted_bytes * 1_000_000 // tcp.sent_bytes

    # ---- rates and the queue -----------------------------------------------------------------------------------------

    def taken(
        self, link: LinkCounters, *, is_busy: bool, held_bytes_per_s: int | None, at_ns: int, now_ns: int
    ) -> bool:
        """Take what was counted.

        Args:
            is_busy: something is on its way.
            held_bytes_per_s: what budget and grant let through to the peer; None: no limit.
            at_ns: until when it was counted; now_ns may be later.

        Returns:
            Whether the limit for delay may have changed.
        """
        elapsed_ns = at_ns - self.sampled_ns
        if elapsed_ns < SAMPLE_NS_MIN:
            return False  # work began while the counters were read
        is_known = self.sampled_ns > 0
        sent = max(0, link.first_bytes_out - self._sent_bytes) * NS_PER_S // elapsed_ns if is_known else 0
        carried = max(0, link.carried_bytes - self._carried_bytes) * NS_PER_S // elapsed_ns if is_known else 0
        self._sent_bytes, self._carried_bytes, self.sampled_ns = link.first_bytes_out, link.carried_bytes, at_ns
        received = max(0, link.bytes_in - self._received_bytes) * NS_PER_S
        received //= max(elapsed_ns, at_ns - self._received_ns)
        self.busiest_bytes_per_s = max(carried, received, self.busiest_bytes_per_s * 7 // 8)
        self._received_bytes, self._received_ns = link.bytes_in, at_ns
        is_first = not self.rtt_min_ns
        self.rtt_min_ns = link.rtt_min_ns
        if not is_busy:
            return False
        if is_first:
            self.delay.begin(rtt_min_ns=self.rtt_min_ns, now_ns=at_ns)
        self.rate_bytes_per_s = max(sent, self.rate_bytes_per_s - self.rate_bytes_per_s // 8)
        if not link.rtt_min_ns:
            return False
        self._measured(link, sent, carried, held_bytes_per_s, at_ns=at_ns, now_ns=now_ns)
        return True

    def _measured(
        self, link: LinkCounters, sent: int, carried: int, held: int | None, *, at_ns: int, now_ns: int
    ) -> None:
        recent_ns = hasty_ns(link.rtt_min_ns) if self.delay.is_hasty else RECENT_NS
        self.delay.measured(
            rtt_ns=link.rtt_ns,
            rtt_min_ns=link.rtt_min_ns,
            queue_ns=self.one_way.queue_ns(now_ns=now_ns, recent_ns=recent_ns),
            sent_bytes_per_s=sent,
            carried_bytes_per_s=carried,
            held_bytes_per_s=held,
            now_ns=at_ns,
        )
        if self.delay.is_in_vain:
            # The way has become longer, or others fill the line: what we measure from is no longer true.
            self.one_way.reset()
            self.delay.begin_again()

    # ---- the kernel --------------------------------------------------------------------------------------------------

    @property
    def is_spread(self) -> bool:
        """Whether the kernel spreads out what it is handed at once: it waits in a socket, and not on the link. Of
        several connections, each held to its part, one that got less would run dry before the others.
        """
        return self._is_paced and self._connections == 1

    def hold(self, egress_bytes_per_s: int | None) -> None:
        """Have the kernel hold the bulk connections to the limit for delay, and to what may be sent at most."""
        # While no rate is known to be too much, pieces alone keep to it: BBR, held back for three round trips, takes
        # that for the line's rate, leaves its start-up, and from then on grows by a quarter in eight round trips.
        rate = None if self.delay.is_searching else self.delay.rate_bytes_per_s
        is_due = self._is_start_over_due(egress_bytes_per_s)
        if is_due:
            self._started_over_ns = self.sampled_ns
        if rate is not None and self.sampled_ns - self._started_over_ns < START_ROUNDS * self.rtt_min_ns:
            rate = self.delay.seen_bytes_per_s
        pace = rate * self._pace_ppm() // 1_000_000 if rate is not None else None
        if self.rtt_min_ns >= LONG_RTT_NS and egress_bytes_per_s is not None:
            # What the socket held back while BBR looked for the least round trip must not leave at the line's rate. As
            # payload that is a little more than the ceiling: what was held back gets away.
            pace = min(pace or egress_bytes_per_s, egress_bytes_per_s)
        if pace is not None or self._is_paced:
            self._meter.pace(self._peer, pace, connections=self._connections)
            self._is_paced = pace is not None
        if is_due:
            self._meter.start_over(self._peer)

    def _is_start_over_due(self, egress_bytes_per_s: int | None) -> bool:
        """Whether BBR must start over: the limit for delay holds the link, and it has been so long.

        What a ceiling holds makes up for BBR's pauses: the line is faster than that.
        """
        rate = self.delay.rate_bytes_per_s
        if rate is None or self.delay.is_searching or not self.delay.is_steady or self.rtt_min_ns < LONG_RTT_NS:
            return False
        is_ours = egress_bytes_per_s is None or rate < egress_bytes_per_s
        return is_ours and self.sampled_ns - self._started_over_ns >= START_OVER_NS

    def _pace_ppm(self) -> int:
        """Of the limit; what is sent again is in the kernel's rate as well, and no part of ours."""
        return PACE_PPM + self._lost_ppm()
