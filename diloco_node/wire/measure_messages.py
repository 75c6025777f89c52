"""Messages between two measuring ends, and the limits of what may be requested. Pure.

Echoes travel in the control lane, probes are bulk transfers in the measurement lane: both use the link that a run uses.
The end that requests is the *requester*, the other one the *responder*. The requester draws the measurement's number at
random, so that two requesters' numbers never meet.

- `MeasurementRequested` -> `MeasurementReady` or `MeasurementDeclined`; the latter also later, when it fails there
- the requester sends: probes -> the other end says `MeasurementReceived` when it has enough
- the requester receives: <- probes; it says `MeasurementStopped` when it has enough, the answer is `MeasurementSent`
- `LinkTestRequested`: measure from where you are to a third region -> `LinkMeasured` or `MeasurementDeclined`
- `MeasurementStopped` at any time: the requester wants no more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.errors import ProtocolViolation
from diloco_node.numeric import NS_PER_S

SPAN_NS_MAX: Final = 120 * NS_PER_S
WARM_UP_NS_MAX: Final = 30 * NS_PER_S
PROBES_NS_MAX: Final = 60 * NS_PER_S
BYTES_MAX: Final = 2**38
"""Bound of one test, warm-up included: 150 s of 14 Gbit/s."""

DAEMON_BYTES_MAX: Final = 4 * 2**30
"""Bound of one test of training daemons, warm-up included: 6.9 s of 5 Gbit/s. Rounds use the same links."""

BODY_BYTES_MAX: Final = 16 * 2**20
"""Bound of one transfer of probes."""

PROBE_BYTES_MIN: Final = 1
"""Without a least size, any number of empty transfers would be within what was agreed to."""


@dataclass(frozen=True, slots=True)
class EchoRequest:
    """Send this back at once."""

    sequence: int


@dataclass(frozen=True, slots=True)
class EchoReply:
    """The echo, with the answering end's counters of this link: TCP payload sent, and retransmitted; -1: unknown."""

    sequence: int
    sent_bytes: int
    retransmitted_bytes: int


@dataclass(frozen=True, slots=True)
class MeasurementRequested:
    """The requester wants probes to flow between it and the receiver of this message.

    Attributes:
        is_requester_sending: who sends.
        warm_up_ns: is not counted, from the first byte that arrives. span_ns: is counted after it.
        bytes_max: not more are sent, the warm-up included.
    """

    measurement: int
    is_requester_sending: bool
    warm_up_ns: int
    span_ns: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class MeasurementReady:
    """Yes, now."""

    measurement: int


@dataclass(frozen=True, slots=True)
class MeasurementDeclined:
    """No, or no more; and why."""

    measurement: int
    reason: str


@dataclass(frozen=True, slots=True)
class MeasurementReceived:
    """Counts of the receiving end: raw bytes per second over `span_ns`, and its process' CPU time in `cpu_span_ns`.

    Attributes:
        mean: of the whole span. median, p10, p90: of windows in it.
        span_ns: shorter than asked when the bytes were used up before.
    """

    measurement: int
    mean: int
    median: int
    p10: int
    p90: int
    span_ns: int
    cpu_ns: int
    cpu_span_ns: int


@dataclass(frozen=True, slots=True)
class MeasurementStopped:
    """The requester has enough, or gives up."""

    measurement: int


@dataclass(frozen=True, slots=True)
class MeasurementSent:
    """Counts of the sending end after the warm-up; -1 where the kernel does not tell.

    Attributes:
        wire_bytes: that the budget booked in the measurement lane.
        sent_bytes: TCP payload on this link, retransmissions and other lanes included.
        retransmitted_bytes: the part that was retransmitted.
    """

    measurement: int
    cpu_ns: int
    cpu_span_ns: int
    wire_bytes: int
    sent_bytes: int
    retransmitted_bytes: int


@dataclass(frozen=True, slots=True)
class LinkTestRequested:
    """Measure from where you are to another region, and report it.

    Attributes:
        probes_ns: how long to send echoes. warm_up_ns: 0: by the round trip. span_ns, bytes_max: of each flow from you.
    """

    measurement: int
    region: str
    probes_ns: int
    warm_up_ns: int
    span_ns: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """A way between two regions.

    Attributes:
        p50_ns, p99_ns, jitter_ns: of round trips. answered, unanswered: echoes.
        bytes_per_s, p10, p90: of random bytes. sent_bytes, retransmitted_bytes: as in MeasurementSent.
    """

    measurement: int
    p50_ns: int
    p99_ns: int
    jitter_ns: int
    answered: int
    unanswered: int
    bytes_per_s: int
    p10: int
    p90: int
    sent_bytes: int
    retransmitted_bytes: int


MeasureMessage = (
    EchoRequest
    | EchoReply
    | MeasurementRequested
    | MeasurementReady
    | MeasurementDeclined
    | MeasurementReceived
    | MeasurementStopped
    | MeasurementSent
    | LinkTestRequested
    | LinkMeasured
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Header: random bytes of a measurement. They are counted and thrown away."""

    measurement: int


def check_request(request: MeasurementRequested | LinkTestRequested, *, is_daemon: bool) -> None:
    """Refuse what is over the limits, of a training daemon lower ones. Raises ProtocolViolation: which."""
    bytes_max = DAEMON_BYTES_MAX if is_daemon else BYTES_MAX
    limits = [("warm_up_ns", 0, WARM_UP_NS_MAX), ("span_ns", 1, SPAN_NS_MAX), ("bytes_max", 1, bytes_max)]
    if isinstance(request, LinkTestRequested):
        limits.append(("probes_ns", 1, PROBES_NS_MAX))
    for name, lower, upper in limits:
        if not lower <= getattr(request, name) <= upper:
            raise ProtocolViolation(
                f"a measurement with {name} {getattr(request, name)}; {lower} to {upper} are allowed"
            )
