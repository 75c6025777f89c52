"""Results of measurements as JSON, and the tests of one `measure bandwidth`, one after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_node.errors import DilocoError, PeersUnreachable
from diloco_node.measure.echoes import LatencyMeasured
from diloco_node.measure.requester import FlowMeasured
from diloco_node.measure.samples import seconds_per_gb
from diloco_node.numeric import NS_PER_S
from diloco_node.wire.measure_messages import LinkMeasured

Pair = tuple[str, str]

OnPartial = Callable[[dict[str, Any]], None]
"""Takes a document as it would be if the measurement ended here: shown when it is cut short."""


def forget(_: dict[str, Any]) -> None:
    """A `OnPartial` for those who want the end only."""


@dataclass(frozen=True, slots=True)
class FlowCase:
    """One test of `measure bandwidth`.

    Attributes:
        source, target: regions. body: "random" or "int4".
        connections: 0: as many as the link is worth.
    """

    source: str
    target: str
    body: str
    connections: int

    @property
    def title(self) -> str:
        """For people."""
        return {"random": "TLS, random", "int4": "TLS, int4+zstd"}[self.body]


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
    received, sent = measured.received, measured.sent
    is_known = sent.sent_bytes >= 0
    cpu = {"sender": (sent.cpu_ns, sent.cpu_span_ns), "receiver": (received.cpu_ns, received.cpu_span_ns)}
    return {
        **_case_document(case),
        "bytes_per_second": received.mean,
        "bytes_per_second_median": received.median,
        "bytes_per_second_p10": received.p10,
        "bytes_per_second_p90": received.p90,
        "cpu_seconds_per_gb": {end: round(seconds_per_gb(*used, received.mean), 4) for end, used in cpu.items()},
        "sent_bytes": sent.sent_bytes if is_known else None,
        "retransmitted_bytes": sent.retransmitted_bytes if is_known else None,
        "counted_seconds": received.span_ns / NS_PER_S,
        "wire_bytes": sent.wire_bytes,
        "wire_bytes_per_second": sent.wire_bytes * NS_PER_S // max(1, sent.cpu_span_ns),
    }


def failure_document(case: FlowCase, error: DilocoError) -> dict[str, Any]:
    """A test that could not be carried out, and why."""
    return {**_case_document(case), "error": str(error)}


def pair_document(pair: Pair, measured: LinkMeasured) -> dict[str, Any]:
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
        "retransmitted_share": measured.retransmitted_bytes / measured.sent_bytes if is_known else None,
    }


def _case_document(case: FlowCase) -> dict[str, Any]:
    return {
        "from": case.source,
        "to": case.target,
        "body": case.body,
        "connections": case.connections,
    }


async def run_series(
    cases: Sequence[FlowCase],
    test: Callable[[FlowCase], Awaitable[dict[str, Any]]],
    on_progress: Callable[[str], None],
    on_partial: OnPartial = forget,
) -> dict[str, Any]:
    """Carry out each case, and keep the results when a later case fails.

    When the peer can't be reached any more, the cases that are left fail for the same reason.

    Args:
        test: measures one case and returns its document. on_progress: called with the current case, for people.
        on_partial: called after each test with the results so far.

    Returns:
        A part of the document: "tests" and "failures".

    Raises:
        DilocoError: the first one failed; so would the others.
    """
    tests: list[dict[str, Any]] = []
    failed: list[tuple[FlowCase, DilocoError]] = []

    def results() -> dict[str, Any]:
        return {"tests": list(tests), "failures": [failure_document(case, error) for case, error in failed]}

    for number, case in enumerate(cases, start=1):
        if failed and isinstance(failed[-1][1], PeersUnreachable):
            failed.append((case, failed[-1][1]))
            continue
        last = f"; the last one {8e-6 * tests[-1]['bytes_per_second']:.0f} Mbit/s" if tests else ""
        over = f", connections: {case.connections}" if case.connections else ""
        on_progress(f"test {number} of {len(cases)}: {case.title}{over}{last}")
        try:
            tests.append(await test(case))
        except DilocoError as error:
            if not tests:
                raise
            failed.append((case, error))
        on_partial(results())
    return results()
