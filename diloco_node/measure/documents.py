"""Results of measurements as JSON."""

from __future__ import annotations

from typing import Any

from diloco_node.measure.requester import FlowMeasured
from diloco_node.measure.samples import Latency, seconds_per_gb
from diloco_node.numeric import NS_PER_S
from diloco_node.wire.measure_messages import LinkMeasured

Pair = tuple[str, str]


def latency_document(load: str, latency: Latency) -> dict[str, Any]:
    """A row of the table: `load` is "none", "out" or "in"."""
    least = latency.tcp_rtt_min_ns
    return {
        "load": load,
        "answered": latency.answered,
        "unanswered": latency.unanswered,
        "min_seconds": latency.min_ns / NS_PER_S,
        "p50_seconds": latency.p50_ns / NS_PER_S,
        "p99_seconds": latency.p99_ns / NS_PER_S,
        "max_seconds": latency.max_ns / NS_PER_S,
        "jitter_seconds": latency.jitter_ns / NS_PER_S,
        "retransmitted_share": latency.retransmitted,
        "tcp_rtt_min_seconds": None if least is None else least / NS_PER_S,
    }


def flow_document(flow: FlowMeasured, connections: int) -> dict[str, Any]:
    """A test over so many connections for bulk; rates are payload bytes per second at the receiver."""
    arrival, sending = flow.received, flow.sent
    is_known = sending.sent_bytes >= 0
    cpu = {"sender": (sending.cpu_ns, sending.cpu_span_ns), "receiver": (arrival.cpu_ns, arrival.cpu_span_ns)}
    return {
        "connections": connections,
        "bytes_per_second": arrival.mean,
        "bytes_per_second_median": arrival.median,
        "bytes_per_second_p10": arrival.p10,
        "bytes_per_second_p90": arrival.p90,
        "cpu_seconds_per_gb": {end: round(seconds_per_gb(*cpu_use, arrival.mean), 4) for end, cpu_use in cpu.items()},
        "sent_bytes": sending.sent_bytes if is_known else None,
        "retransmitted_bytes": sending.retransmitted_bytes if is_known else None,
        "counted_seconds": arrival.span_ns / NS_PER_S,
        "wire_bytes": sending.wire_bytes,
        "wire_bytes_per_second": sending.wire_bytes * NS_PER_S // max(1, sending.cpu_span_ns),
    }


def pair_document(pair: Pair, link: LinkMeasured) -> dict[str, Any]:
    """A way between two regions, as `plan --mesh` reads it, with further numbers."""
    is_known = link.sent_bytes > 0
    return {
        "from": pair[0],
        "to": pair[1],
        "rtt_seconds": link.p50_ns / NS_PER_S,
        "bytes_per_second": link.bytes_per_s,
        "rtt_p99_seconds": link.p99_ns / NS_PER_S,
        "jitter_seconds": link.jitter_ns / NS_PER_S,
        "probes": link.answered + link.unanswered,
        "unanswered": link.unanswered,
        "bytes_per_second_p10": link.p10,
        "bytes_per_second_p90": link.p90,
        "retransmitted_share": link.retransmitted_bytes / link.sent_bytes if is_known else None,
    }
