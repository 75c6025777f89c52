"""Measurements between running regions: what they say to each other, and what a region agrees to. Pure.

Echoes go through the control lane, `Probe` transfers through the measurement lane of the bulk connection: both are what
a run uses. A flow can have connections of its own instead, opened for it and closed after it, of the transport's kind
or plain TCP (`AsideOpen`); they are in the measurement lane, too. The region that asks is the *asker*; it chooses the
measurement's number, which is random, so that numbers of two askers do not meet. The conversation:

- `MeasurementAsked` -> `MeasurementReady` or `MeasurementDeclined` (also later, when it fails there)
- connections of its own: the side that accepted the link waits for them and says how to join, the asker in
  `MeasurementAsked`, the other one in `MeasurementReady`; whoever dialed the link dials them. The asker's peer is ready
  when it has dialed all
- the asker sends: probes -> the other end says `MeasurementReceived` when it has enough; both are done
- the asker receives: <- probes; the asker says `MeasurementStopped` when it has enough, the answer is `MeasurementSent`
- `LinkAsked`: measure from where you are to a third region -> `LinkTold` or `MeasurementDeclined`
- `MeasurementStopped` at any time: the asker wants no more

What bounds it is decided here: one measurement at a time in a region, seconds and bytes of each, and for those that
peers ask for, bytes over time (`MeasuringGate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.errors import ProtocolViolation
from diloco_node.transport.connections import TRANSFER_CONNECTIONS_MAX
from diloco_node.transport.pacing.token_bucket import TokenBucket

NS_PER_S: Final = 1_000_000_000

SPAN_NS_MAX: Final = 60 * NS_PER_S
WARM_UP_NS_MAX: Final = 30 * NS_PER_S
PROBES_NS_MAX: Final = 60 * NS_PER_S
BYTES_MAX: Final = 4 * 2**30
"""Of one test, warm-up included: 6.9 s of 5 Gbit/s."""

BODY_BYTES_MAX: Final = 16 * 2**20
PROBE_BYTES_MIN: Final = 1
"""Of nothing at all any number would be within what was agreed to."""
"""Of one transfer of probes."""

CONNECTIONS_MAX: Final = TRANSFER_CONNECTIONS_MAX
"""Of one test, beside those that the link has."""

TOKEN_BYTES: Final = 32
PORT_MAX: Final = 65_535

ASIDES_MAX: Final = 3
"""Tests whose own connections a region has with one peer at once: one that is on, and those whose end is under way."""

ASKED_BYTES_SAVED_MAX: Final = 24 * BYTES_MAX
ASKED_BYTES_PER_S: Final = 16 * 2**20
"""What one peer may have us measure: at once twice all of `--connections 1,2,4,8`, 134 Mbit/s in the long run."""

ECHOES_SAVED_MAX: Final = 400
ECHOES_PER_S: Final = 200
"""Echoes that one peer has answered; twice what a measurement sends."""

PROBED_MAX: Final = 8
"""Measurements whose probes are still taken after their end: those that were on their way."""


# ---- messages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EchoWanted:
    """Send this back at once."""

    sequence: int


@dataclass(frozen=True, slots=True)
class EchoAnswered:
    """The echo, with what the kernel counted at its end of this link: TCP payload sent, and sent again; -1: unknown."""

    sequence: int
    sent_bytes: int
    retransmitted_bytes: int


@dataclass(frozen=True, slots=True)
class AsideOpen:
    """How to join a measurement with connections of its own: once, and soon.

    Attributes:
        token: TOKEN_BYTES random bytes that each connection names. port: takes plain connections; 0: where the link is.
    """

    token: bytes
    port: int


@dataclass(frozen=True, slots=True)
class MeasurementAsked:
    """The asker wants probes to flow between it and the receiver of this message.

    Attributes:
        connections: opened for this flow; 0: over the link's own. is_plain: they are TCP without TLS.
        aside: where the asker waits for them; None: the receiver of this message is to say where.
        is_asker_sending: who sends. is_compressible: encoded int4 values instead of random bytes.
        warm_up_ns: is not counted, from the first byte that arrives. span_ns: is counted after it.
        bytes_max: not more are sent, the warm-up included.
    """

    measurement: int
    is_asker_sending: bool
    is_compressible: bool
    warm_up_ns: int
    span_ns: int
    bytes_max: int
    connections: int
    is_plain: bool
    aside: AsideOpen | None


@dataclass(frozen=True, slots=True)
class MeasurementReady:
    """Yes, now. `aside`: where the flow's own connections are waited for, if that is here."""

    measurement: int
    aside: AsideOpen | None


@dataclass(frozen=True, slots=True)
class MeasurementDeclined:
    """No, or no more; and why."""

    measurement: int
    reason: str


@dataclass(frozen=True, slots=True)
class MeasurementReceived:
    """What the receiving end counted: raw bytes per second over `span_ns`, and its process' CPU time in `cpu_span_ns`.

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
    """The asker has enough, or gives up."""

    measurement: int


@dataclass(frozen=True, slots=True)
class MeasurementSent:
    """What the sending end counted after the warm-up; -1 where the kernel does not tell.

    Attributes:
        wire_bytes: that the budget booked in the measurement lane.
        sent_bytes: TCP payload on this link, retransmissions and other lanes included.
        retransmitted_bytes: the part that was sent again.
    """

    measurement: int
    cpu_ns: int
    cpu_span_ns: int
    wire_bytes: int
    sent_bytes: int
    retransmitted_bytes: int


@dataclass(frozen=True, slots=True)
class LinkAsked:
    """Measure from where you are to another region of the run, and tell me.

    Attributes:
        probes_ns: how long to send echoes. warm_up_ns: 0: by the round trip. span_ns, bytes_max: of each flow from you.
        is_plain_too: one over plain TCP as well.
    """

    measurement: int
    region: str
    probes_ns: int
    warm_up_ns: int
    span_ns: int
    bytes_max: int
    is_plain_too: bool


@dataclass(frozen=True, slots=True)
class LinkTold:
    """One way between two regions.

    Attributes:
        p50_ns, p99_ns, jitter_ns: of round trips. answered, unanswered: echoes.
        bytes_per_s, p10, p90: of random bytes. sent_bytes, retransmitted_bytes: as in MeasurementSent.
        plain_bytes_per_s: over plain TCP; 0: not measured. plain_error: why not, if it was asked for.
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
    plain_bytes_per_s: int
    plain_error: str


MeasuringMessage = (
    EchoWanted
    | EchoAnswered
    | MeasurementAsked
    | MeasurementReady
    | MeasurementDeclined
    | MeasurementReceived
    | MeasurementStopped
    | MeasurementSent
    | LinkAsked
    | LinkTold
)


@dataclass(frozen=True, slots=True)
class Probe:
    """Header: bytes of a measurement. They are counted and thrown away."""

    measurement: int
    is_compressible: bool


# ---- limits ----------------------------------------------------------------------------------------------------------


def check_asked(asked: MeasurementAsked | LinkAsked) -> None:
    """Refuse what is over the limits.

    Raises:
        ProtocolViolation: names the field, the value and the range.
    """
    limits = [("warm_up_ns", 0, WARM_UP_NS_MAX), ("span_ns", 1, SPAN_NS_MAX), ("bytes_max", 1, BYTES_MAX)]
    if isinstance(asked, LinkAsked):
        limits.append(("probes_ns", 1, PROBES_NS_MAX))
    else:
        limits.append(("connections", 1 if asked.is_plain else 0, CONNECTIONS_MAX))
    for name, least, most in limits:
        if not least <= getattr(asked, name) <= most:
            raise ProtocolViolation(f"a measurement with {name} {getattr(asked, name)}; {least} to {most} are allowed")
    if isinstance(asked, MeasurementAsked) and asked.aside is not None:
        check_aside(asked.aside, asked)


def check_aside(aside: AsideOpen, asked: MeasurementAsked) -> None:
    """Refuse what can't be joined, or joins what nobody wanted.

    Raises:
        ProtocolViolation: says what is wrong with it.
    """
    if not asked.connections:
        raise ProtocolViolation("connections of its own for a measurement over the link")
    if len(aside.token) != TOKEN_BYTES:
        raise ProtocolViolation(f"a token of {len(aside.token)} bytes for a measurement; it has {TOKEN_BYTES}")
    least, most = (1, PORT_MAX) if asked.is_plain else (0, 0)
    if not least <= aside.port <= most:
        raise ProtocolViolation(f"port {aside.port} for a measurement; {least} to {most} are allowed")


def all_bytes_max(asked: MeasurementAsked | LinkAsked) -> int:
    """The most that may flow for what was asked."""
    return asked.bytes_max * (2 if isinstance(asked, LinkAsked) and asked.is_plain_too else 1)


@dataclass(frozen=True, slots=True)
class _Running:
    """The measurement that is going on: with whom, who asked (None: an operator here), since when, bytes taken."""

    what: str
    asker: str | None
    since_ns: int
    bytes_max: int


class MeasuringGate:
    """What a region agrees to: one measurement at a time, and for peers that ask, only so many bytes over time.

    Args:
        peers: their names.
    """

    def __init__(self, peers: tuple[str, ...], *, now_ns: int) -> None:
        self._bytes = {
            peer: TokenBucket(ASKED_BYTES_PER_S, burst=ASKED_BYTES_SAVED_MAX, now_ns=now_ns) for peer in sorted(peers)
        }
        self._echoes = {
            peer: TokenBucket(ECHOES_PER_S, burst=ECHOES_SAVED_MAX, now_ns=now_ns) for peer in sorted(peers)
        }
        self._running: _Running | None = None

    def begin(self, what: str, *, asker: str | None, bytes_max: int, now_ns: int) -> str:
        """Begin a measurement; the reason why not, or empty when it has begun and `end` must follow.

        Args:
            what: for people, as "bandwidth to eu". asker: the peer that asks; None: the operator of this region.
            bytes_max: that may flow.
        """
        if self._running is not None:
            return f"busy with another measurement: {self.describe(now_ns=now_ns)}; try again"
        if asker is not None and not self._bytes[asker].try_spend(bytes_max, now_ns=now_ns):
            return (
                f"{asker} has asked for too many bytes lately: a peer may have {ASKED_BYTES_SAVED_MAX} bytes measured "
                f"at once, and {ASKED_BYTES_PER_S} bytes/s in the long run; wait, or measure for a shorter time"
            )
        self._running = _Running(what, asker, now_ns, bytes_max)
        return ""

    def end(self, *, used_bytes: int) -> None:
        """It is over; of its bytes so many were used."""
        assert self._running is not None, "a measurement that has not begun can't end"
        running, self._running = self._running, None
        if running.asker is not None:
            self._bytes[running.asker].refund(max(0, running.bytes_max - used_bytes))

    def describe(self, *, now_ns: int) -> str:
        """What is going on, for people; empty when nothing is."""
        if self._running is None:
            return ""
        by = f"asked by {self._running.asker}, " if self._running.asker is not None else ""
        return f"{self._running.what} ({by}since {(now_ns - self._running.since_ns) // NS_PER_S} s)"

    def may_echo(self, peer: str, *, now_ns: int) -> bool:
        """Whether one more echo of this peer is answered."""
        return self._echoes[peer].try_spend(1, now_ns=now_ns)


class ProbesExpected:
    """Which probes of one peer are welcome: those of a measurement that was agreed to, and not more than agreed."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def expect(self, measurement: int, bytes_max: int) -> None:
        """Probes of a measurement may come from now on; those of the oldest before it no longer."""
        while len(self._left) >= PROBED_MAX:
            del self._left[next(iter(self._left))]
        self._left[measurement] = bytes_max

    def arrive(self, measurement: int, raw_bytes: int) -> None:
        """A transfer of probes begins.

        Raises:
            ProtocolViolation: nobody asked for it, or it is more than what was agreed to.
        """
        left = self._left.get(measurement)
        if left is None:
            raise ProtocolViolation(f"a probe of {raw_bytes} bytes for a measurement that was not agreed to")
        if not PROBE_BYTES_MIN <= raw_bytes <= BODY_BYTES_MAX or raw_bytes > left:
            raise ProtocolViolation(
                f"a probe of {raw_bytes} bytes; {left} are left of the measurement, {PROBE_BYTES_MIN} to "
                f"{BODY_BYTES_MAX} fit into one"
            )
        self._left[measurement] = left - raw_bytes
