"""The kernel's counts of one peer's connections, and what follows from them: rates, how many bulk connections the
link is worth, and the pace at which the kernel lets them send.

No clock and no timer: `pacing` says when something was counted.
"""

from __future__ import annotations

from typing import Final

from diloco_node.numeric import NS_PER_S
from diloco_node.transport.kernel.congestion import LONG_RTT_NS
from diloco_node.transport.kernel.tcp_info import buffer_bytes
from diloco_node.transport.kernel.wire_meter import LinkCounters, WireMeter

SAMPLE_NS_MIN: Final = 10_000_000
"""Over a shorter time no rate is measured."""

LOSS_BYTES_MIN: Final = 4 * 2**20
"""Before so many bytes were sent nothing is known of a link's loss."""

BULK_CONNECTIONS_MAX: Final = 4
"""More would each cost a TLS handshake and some MiB of buffers, and take more of a shared line than is fair."""

USABLE: Final = 2
"""A buffer's limit counts what the kernel spends on packets, too: about so many times the payload that fits in."""

FREE_FACTOR: Final = 2
"""Without a ceiling the link is taken to deliver so many times what it delivers now."""

LOSSY_PPM: Final = 1_000
"""From this part of the bytes retransmitted a link is lossy: one connection by reno gets 9 Mbit/s out of 40 ms then."""


class LinkWatch:
    """The counters of one peer. Call `take` for each sample, then `pace`; `reset` at the end of a session.

    Attributes:
        rate_bytes_per_s: what is sent while something is on its way, fading.
        busiest_bytes_per_s: what the busier direction carried, fading.
        rtt_min_ns: the least round trip; 0: not known. connections: that carry bulk now.
    """

    def __init__(self, peer: str, meter: WireMeter) -> None:
        self._peer = peer
        self._meter = meter
        self._before: LinkCounters | None = None
        self._sampled_ns = 0
        self._is_paced = False
        self.connections = 1
        self.rate_bytes_per_s = 0
        self.busiest_bytes_per_s = 0
        self.rtt_min_ns = 0

    def reset(self) -> None:
        """The session has ended; the next one may take another way."""
        self.connections = 1
        self._is_paced = False
        self.busiest_bytes_per_s = self.rtt_min_ns = 0

    def take(self, link: LinkCounters, *, is_busy: bool, now_ns: int) -> None:
        """Take what was counted until now; `is_busy`: something is on its way."""
        self.rtt_min_ns = link.rtt_min_ns
        before, elapsed_ns = self._before, now_ns - self._sampled_ns
        if before is not None and elapsed_ns < SAMPLE_NS_MIN:
            return
        self._before, self._sampled_ns = link, now_ns
        if before is None:
            return
        sent_bytes, delivered_bytes, received_bytes = (
            max(0, new - old) * NS_PER_S // elapsed_ns
            for new, old in (
                (link.first_bytes_out, before.first_bytes_out),
                (link.delivered_bytes, before.delivered_bytes),
                (link.bytes_in, before.bytes_in),
            )
        )
        self.busiest_bytes_per_s = max(delivered_bytes, received_bytes, self.busiest_bytes_per_s * 7 // 8)
        if is_busy:
            self.rate_bytes_per_s = max(sent_bytes, self.rate_bytes_per_s * 7 // 8)

    def target_connections(self, *, ceiling_bytes_per_s: int | None) -> int:
        """How many bulk connections the link is worth now. ceiling_bytes_per_s: in the wider direction; None: no limit
        in one of them."""
        tcp = self._meter.tcp(self._peer) if self._meter.goes_by_loss else None
        is_known = tcp is not None and tcp.sent_bytes >= LOSS_BYTES_MIN
        return target_connections(
            rtt_min_ns=self.rtt_min_ns,
            ceiling_bytes_per_s=ceiling_bytes_per_s,
            delivered_bytes_per_s=self.busiest_bytes_per_s,
            buffer_bytes=buffer_bytes(),
            lost_ppm=tcp.retransmitted_bytes * 1_000_000 // tcp.sent_bytes if tcp is not None and is_known else 0,
        )

    @property
    def is_spread(self) -> bool:
        """Whether the kernel spreads out what it is handed at once, so that it waits in a socket and not on the line.

        Not with several connections: one that got less than its share would run dry before the others.
        """
        return self._is_paced and self.connections == 1

    def pace(self, ceiling_bytes_per_s: int | None) -> None:
        """Have the kernel pace the bulk connections at what may be sent at most, on a long round trip; None: no limit.

        BBR nearly stops for 0.2 s every ten seconds to measure the least round trip. The socket would send at the
        line's rate what it held back meanwhile. The kernel counts payload, so the pace is a little above the ceiling,
        and what was held back gets away.
        """
        rate = ceiling_bytes_per_s if self.rtt_min_ns >= LONG_RTT_NS else None
        if rate is not None or self._is_paced:
            self._meter.pace(self._peer, rate, connections=self.connections)
            self._is_paced = rate is not None


def target_connections(
    *, rtt_min_ns: int, ceiling_bytes_per_s: int | None, delivered_bytes_per_s: int, buffer_bytes: int, lost_ppm: int
) -> int:
    """How many, 1 to BULK_CONNECTIONS_MAX: bytes on their way at full rate over what one connection holds, rounded up.

    With a long round trip a socket's buffers bound its rate. More connections than that start up against each other. On
    a lossy line a connection's share is small whatever its buffers hold, where congestion control goes by loss.

    Args:
        rtt_min_ns: the link's least round trip; 0: not known yet.
        ceiling_bytes_per_s: the most that may go in either direction; None: no limit in one of them.
        delivered_bytes_per_s: what the link was last seen to deliver, in the busier direction.
        buffer_bytes: to which a socket's buffers may grow, the smaller of the two; at least 1.
        lost_ppm: of the bytes sent, those that were retransmitted; 0 where congestion control does not go by loss.
    """
    if rtt_min_ns < LONG_RTT_NS:
        return 1
    if lost_ppm >= LOSSY_PPM:
        return BULK_CONNECTIONS_MAX
    rate = FREE_FACTOR * delivered_bytes_per_s if ceiling_bytes_per_s is None else ceiling_bytes_per_s
    return min(max(1, -(-USABLE * rate * rtt_min_ns // (buffer_bytes * NS_PER_S))), BULK_CONNECTIONS_MAX)
