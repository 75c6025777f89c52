"""Results of measurements as JSON, and the tests of one `measure bandwidth`, one after the other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_node.errors import DilocoError, PeersUnreachable
from diloco_node.measure.requester import FlowMeasured
from diloco_node.measure.samples import Latency, seconds_per_gb
from diloco_node.numeric import NS_PER_S
from diloco_node.wire.measure_messages import LinkMeasured

Pair = tuple[str, str]

OnPartial = Callable[[dict[str, Any]], None]
"""Takes a document as it would be if the measurement ended here: shown when it is cut short."""


def forget(_: dict[str, Any]) -> None:
    """A `OnPartial` for those who want the end only."""


@dataclass(frozen=True, slots=True)
class FlowCase:
    """A test of `measure bandwidth`.

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


def flow_document(case: FlowCase, flow: FlowMeasured) -> dict[str, Any]:
    """A test; rates are payload bytes per second at the receiver."""
    arrival, sending = flow.received, flow.sent
    is_known = sending.sent_bytes >= 0
    cpu = {"sender": (sending.cpu_ns, sending.cpu_span_ns), "receiver": (arrival.cpu_ns, arrival.cpu_span_ns)}
    return {
        **_case_document(case),
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


def failure_document(case: FlowCase, error: DilocoError) -> dict[str, Any]:
    """A test that could not be carried out, and why."""
    return {**_case_document(case), "error": str(error)}


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
    failures: list[tuple[FlowCase, DilocoError]] = []

    def results() -> dict[str, Any]:
        return {"tests": list(tests), "failures": [failure_document(case, error) for case, error in failures]}

    for number, case in enumerate(cases, start=1):
        if failures and isinstance(failures[-1][1], PeersUnreachable):
            failures.append((case, failures[-1][1]))
            continue
        last = f"; the last one {8e-6 * tests[-1]['bytes_per_second']:.0f} Mbit/s" if tests else ""
        over = f", connections: {case.connections}" if case.connections else ""
        on_progress(f"test {number} of {len(cases)}: {case.title}{over}{last}")
        try:
            tests.append(await test(case))
        except DilocoError as error:
            if not tests:
                raise
            failures.append((case, error))
        on_partial(results())
    return results()
