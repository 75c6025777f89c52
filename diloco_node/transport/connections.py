"""How many TCP connections carry the bulk between two regions.

Bytes on their way stay in the socket's buffers at both ends until they are acknowledged. With a long round trip these
buffers bound a connection's rate, whatever the line has. So there are as many connections as the bandwidth-delay
product needs, one where the buffers are large enough. More than that don't help: they start up against each other, a
chunk on the slowest holds up all that follows, and the work is the same. Where congestion control goes by loss, a
connection's share of a lossy line is small whatever its buffers hold, and there are as many as there may be.
"""

from __future__ import annotations

from typing import Final

from diloco_node.numeric import NS_PER_S

BULK_CONNECTIONS_MAX: Final = 4
"""More would each cost a TLS handshake and some MiB of buffers, and take more of a shared line than is fair."""

LONG_RTT_NS: Final = 5_000_000
"""From this round trip on a link has a long one."""

USABLE: Final = 2
"""A buffer's limit counts what the kernel spends on packets, too: about so many times the payload that fits in."""

FREE_FACTOR: Final = 2
"""Without a ceiling the link is taken to deliver so many times what it delivers now."""

LOSSY_PPM: Final = 1_000
"""From this part of the bytes retransmitted a link is lossy: one connection by reno gets 9 Mbit/s out of 40 ms then."""


def target_connections(
    *, rtt_min_ns: int, ceiling_bytes_per_s: int | None, delivered_bytes_per_s: int, buffer_bytes: int, lost_ppm: int
) -> int:
    """How many, 1 to BULK_CONNECTIONS_MAX: bytes on their way at full rate over what one connection holds, rounded up.

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
