"""Arithmetic of measurements: percentiles, jitter, and rates from arrivals. Integers of nanoseconds and bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

from diloco_node.numeric import NS_PER_S

N = TypeVar("N", int, float)

JITTER_SHIFT: Final = 4
"""RFC 3550 keeps its estimate times 16."""

WINDOWS: Final = 20
WINDOW_NS_MIN: Final = 50_000_000

Mark = tuple[int, int]
"""When (monotonic ns), and how many bytes had arrived by then."""


def percentile(values: Sequence[N], per_cent: int) -> N:
    """The nearest-rank percentile: the smallest of some values that `per_cent` (1 to 100) of all do not exceed."""
    rank = -(-len(values) * per_cent // 100)
    return sorted(values)[rank - 1]


def jitter_ns(rtts_ns: Sequence[int]) -> int:
    """Interarrival jitter after the last of round trips in the order of their sending, as RFC 3550 (6.4.1 and A.8) and
    mtr smooth it.

    The difference of two neighbouring round trips stands for the difference of transit times; it enters with a
    sixteenth. 0 for fewer than two samples.
    """
    estimate = 0
    for before, now in pairwise(rtts_ns):
        estimate += abs(now - before) - ((estimate + (1 << JITTER_SHIFT - 1)) >> JITTER_SHIFT)
    return estimate >> JITTER_SHIFT


@dataclass(frozen=True, slots=True)
class Latency:
    """Round trips of probes through the whole path: both processes, TLS, HTTP/2. In nanoseconds.

    Attributes:
        answered, unanswered: probes. The times are of those answered; jitter_ns: see the function.
        retransmitted: part of the bytes of both ends, on the link, that was retransmitted, 0 to 1; None where a kernel
            does not tell. TCP hides loss: this is what it had to repair, rightly or not.
        tcp_rtt_min_ns: the kernel's least round trip of the link; None where it does not tell.
    """

    answered: int
    unanswered: int
    min_ns: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    jitter_ns: int
    retransmitted: float | None = None
    tcp_rtt_min_ns: int | None = None


def summarise_rtts(rtts_ns: Sequence[int], *, lost_count: int) -> Latency:
    """Summarise round trips. rtts_ns: of those answered, in the order they were sent; at least one."""
    return Latency(
        answered=len(rtts_ns),
        unanswered=lost_count,
        min_ns=min(rtts_ns),
        p50_ns=percentile(rtts_ns, 50),
        p99_ns=percentile(rtts_ns, 99),
        max_ns=max(rtts_ns),
        jitter_ns=jitter_ns(rtts_ns),
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Bytes per second. mean: all bytes through all time, as iperf3 prints it. median, p10, p90: of the windows."""

    mean: int
    median: int
    p10: int
    p90: int


def window_length_ns(span_ns: int) -> int:
    """How long each window of a stretch is: a twentieth, and not under 50 ms unless the whole stretch is."""
    return min(span_ns, max(WINDOW_NS_MIN, -(-span_ns // WINDOWS)))


def goodput(marks: Sequence[Mark], *, start_ns: int, span_ns: int) -> Goodput:
    """The rate from `start_ns` on for `span_ns`.

    Bytes come in chunks, on a slow link with long pauses between them; those of a chunk are taken to have arrived
    evenly since the mark before it. So neither windows nor edges see the grain of the chunks.

    marks: times not falling, bytes counted from the start. span_ns: positive.
    """
    window_ns = window_length_ns(span_ns)
    edges = list(range(start_ns, start_ns + span_ns - window_ns + 1, window_ns))
    rates = [(_arrived_by(marks, at + window_ns) - _arrived_by(marks, at)) * NS_PER_S // window_ns for at in edges]
    total = _arrived_by(marks, start_ns + span_ns) - _arrived_by(marks, start_ns)
    return Goodput(total * NS_PER_S // span_ns, percentile(rates, 50), percentile(rates, 10), percentile(rates, 90))


def _arrived_by(marks: Sequence[Mark], at_ns: int) -> int:
    """Bytes that had arrived by a moment; none before the first mark, no more after the last."""
    after = bisect_right(marks, at_ns, key=lambda mark: mark[0])
    if after == 0:
        return 0
    from_ns, have = marks[after - 1]
    if after == len(marks):
        return have
    to_ns, will_have = marks[after]
    return have + (will_have - have) * (at_ns - from_ns) // (to_ns - from_ns)


def seconds_per_gb(cpu_ns: int, span_ns: int, bytes_per_s: int) -> float:
    """Processor seconds for each 10^9 bytes: the share of a processor used, over the rate; 0 where nothing moved."""
    return cpu_ns / span_ns / bytes_per_s * 1e9 if span_ns and bytes_per_s else 0.0
