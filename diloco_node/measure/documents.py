"""What was measured, as JSON: the same objects from `measure serve` and from a running daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_node.measure.samples import NS_PER_S, seconds_per_gb

if TYPE_CHECKING:
    from diloco_node.adapters.probe import FlowMeasured, LatencyMeasured
    from diloco_node.errors import DilocoError
    from diloco_node.wire.measurement import PairMeasured

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class FlowCase:
    """One test of `measure bandwidth`.

    Attributes:
        source, target: regions. path: "transport" or "plain". body: "random" or "int4".
    """

    source: str
    target: str
    path: str
    body: str
    connections: int

    @property
    def title(self) -> str:
        """For people."""
        what = {"random": "TLS, random", "int4": "TLS, int4+zstd"}[self.body]
        return what if self.path == "transport" else "plain TCP"


def latency_document(load: str, measured: LatencyMeasured) -> dict[str, Any]:
    """One row: `load` is "none", "out" or "in"."""
    one = measured.latency
    least = measured.tcp_rtt_min_ns
    return {
        "load": load,
        "answered": one.answered,
        "unanswered": one.unanswered,
        "min_seconds": one.min_ns / NS_PER_S,
        "p50_seconds": one.p50_ns / NS_PER_S,
        "p99_seconds": one.p99_ns / NS_PER_S,
        "max_seconds": one.max_ns / NS_PER_S,
        "jitter_seconds": one.jitter_ns / NS_PER_S,
        "retransmitted_share": measured.retransmitted,
        "tcp_rtt_min_seconds": None if least is None else least / NS_PER_S,
    }


def flow_document(case: FlowCase, measured: FlowMeasured) -> dict[str, Any]:
    """One test; rates are payload bytes per second at the receiver."""
    rates, sent = measured.received.goodput, measured.sent
    cpus = {"sender": sent.cpu, "receiver": measured.received.cpu}
    return {
        **_case_document(case),
        "bytes_per_second": rates.mean,
        "bytes_per_second_median": rates.median,
        "bytes_per_second_p10": rates.p10,
        "bytes_per_second_p90": rates.p90,
        "cpu_seconds_per_gb": {
            end: round(seconds_per_gb(cpu.cpu_ns, cpu.span_ns, rates.mean), 4) for end, cpu in cpus.items()
        },
        "sent_bytes": sent.sent_bytes,
        "retransmitted_bytes": sent.retransmitted_bytes,
    }


def failure_document(case: FlowCase, error: DilocoError) -> dict[str, Any]:
    """A test that could not be carried out, and why; 0 connections: over those of the link."""
    return {
        **_case_document(case),
        "error": str(error),
    }


def pair_document(pair: Pair, measured: PairMeasured) -> dict[str, Any]:
    """One way between two regions, as `plan --mesh` reads it, and what else is known."""
    is_known = measured.sent_bytes > 0
    return {
        "from": pair[0],
        "to": pair[1],
        "rtt_seconds": measured.p50_ns / NS_PER_S,
        "bytes_per_second": measured.bytes_per_s,
        "rtt_p99_seconds": measured.p99_ns / NS_PER_S,
        "jitter_seconds": measured.jitter_ns / NS_PER_S,
        "probes": measured.answered + measured.unanswered,
        "unanswered": measured.unanswered,
        "bytes_per_second_p10": measured.p10,
        "bytes_per_second_p90": measured.p90,
        "plain_bytes_per_second": measured.plain_bytes_per_s or None,
        "retransmitted_share": measured.retransmitted_bytes / measured.sent_bytes if is_known else None,
    }


def _case_document(case: FlowCase) -> dict[str, Any]:
    """Which test it is."""
    return {
        "from": case.source,
        "to": case.target,
        "path": case.path,
        "body": case.body,
        "connections": case.connections,
    }
