"""Frames of the measurement call: a session between two measuring ends, and the streams that it fills.

The dialing side opens a call `measure` and says `SessionAsked`; further calls and plain TCP connections begin with
`StreamJoined`. In the session, echoes go between the messages. A data stream of the transport carries the frames of the
bulk lane (`wire.envelope`) after its `StreamJoined`, a plain connection anything.

| kind | after the kind |
|---|---|
| MESSAGE | msgpack message (`MEASUREMENT`) |
| ECHO | sequence u64: send it back as ECHOED |
| ECHOED | sequence u64 |

Connections that two daemons open for one measurement (`core.measuring.AsideOpen`) begin with a frame or with bytes of
their own: the token, and the connection's index.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from diloco_node.core.measuring import TOKEN_BYTES as ASIDE_TOKEN_BYTES
from diloco_node.errors import ProtocolViolation
from diloco_node.wire.schema import Limits, Schema

METHOD: Final = "measure"
MEASUREMENT_VERSION: Final = 1
"""Of these messages; the transport's own version does not matter to them."""

KIND_MESSAGE: Final = 32
KIND_ECHO: Final = 33
KIND_ECHOED: Final = 34

TOKEN_BYTES: Final = 16
CONNECTIONS_MAX: Final = 16
SPAN_NS_MAX: Final = 120_000_000_000
"""No flow is longer, its warm-up apart."""

WARM_UP_NS_MAX: Final = 30_000_000_000

_ECHO: Final = struct.Struct("<BQ")
_PREAMBLE: Final = struct.Struct("<16sQI")

PREAMBLE_BYTES: Final = _PREAMBLE.size

ASIDE_METHOD: Final = "aside"
"""The call of a connection that a daemon opens for one measurement."""

_ASIDE: Final = struct.Struct(f"<{ASIDE_TOKEN_BYTES}sI")

ASIDE_BYTES: Final = _ASIDE.size


class FlowPath(StrEnum):
    """What carries the bytes of a flow."""

    TRANSPORT = "transport"
    """gRPC with mutual TLS, chunks, zstd where it pays: as between daemons."""

    PLAIN = "plain"
    """TCP connections without TLS, for comparison."""


class FlowBody(StrEnum):
    """What is sent."""

    RANDOM = "random"
    """Incompressible bytes: the transport gives zstd up after two tries."""

    INT4 = "int4"
    """Normal values quantised to int4, as a learner's contributions: zstd takes a sixth off."""


@dataclass(frozen=True, slots=True)
class SessionAsked:
    """The dialing side begins."""

    version: int


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """Its answer.

    Attributes:
        token: 16 random bytes that streams and connections of the session must name.
        plain_port: takes plain TCP connections; 0: none.
        congestion_control: the kernel's default there, as cubic.
    """

    version: int
    token: bytes
    plain_port: int
    congestion_control: str


@dataclass(frozen=True, slots=True)
class StreamJoined:
    """The first frame of a data stream: which flow it belongs to. Its index counts from 0."""

    token: bytes
    flow: int
    index: int


@dataclass(frozen=True, slots=True)
class FlowAsked:
    """The dialing side wants a flow.

    Attributes:
        flow: counts up within the session.
        is_dialer_sending: who sends.
        warm_up_ns: is not counted; from the first byte that arrives. span_ns: is counted after it.
    """

    flow: int
    is_dialer_sending: bool
    path: FlowPath
    body: FlowBody
    connections: int
    warm_up_ns: int
    span_ns: int


@dataclass(frozen=True, slots=True)
class FlowReady:
    """The streams of the flow may join now."""

    flow: int


@dataclass(frozen=True, slots=True)
class FlowReceived:
    """What the receiving end counted: bytes per second, and its process' CPU time in `cpu_span_ns`."""

    flow: int
    mean: int
    median: int
    p10: int
    p90: int
    cpu_ns: int
    cpu_span_ns: int


@dataclass(frozen=True, slots=True)
class FlowSent:
    """What the sending end counted after the warm-up; bytes as the kernel tells, -1 where it does not.

    Attributes:
        sent_bytes: TCP payload, retransmissions included. retransmitted_bytes: the part that was sent again.
    """

    flow: int
    cpu_ns: int
    cpu_span_ns: int
    sent_bytes: int
    retransmitted_bytes: int


@dataclass(frozen=True, slots=True)
class FlowStopped:
    """The dialing side has received enough; the answer is `FlowSent`."""

    flow: int


@dataclass(frozen=True, slots=True)
class Declined:
    """No, and why. The session goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class SocketAsked:
    """What does the kernel say of the session's own connection?"""


@dataclass(frozen=True, slots=True)
class SocketTold:
    """Bytes that this end sent and sent again on the session's connection; -1 where the kernel does not tell."""

    sent_bytes: int
    retransmitted_bytes: int


@dataclass(frozen=True, slots=True)
class PairAsked:
    """Measure from where you are to another region, and tell me.

    Attributes:
        region, address: whom to dial, `host:port`. probes_ns: how long to probe the round trip.
        warm_up_ns: 0: by the round trip. span_ns: of the flow from you to there.
        is_plain_too: a plain TCP flow as well.
    """

    region: str
    address: str
    probes_ns: int
    warm_up_ns: int
    span_ns: int
    is_plain_too: bool


@dataclass(frozen=True, slots=True)
class PairMeasured:
    """One way between two regions.

    Attributes:
        p50_ns, p99_ns, jitter_ns: of the round trip, nothing else being sent.
        answered, unanswered: probes.
        bytes_per_s: goodput of the transport on one connection. p10, p90: of its windows.
        plain_bytes_per_s: of a plain TCP connection; 0: not measured.
        sent_bytes, retransmitted_bytes: of the transport's flow; -1: not known.
    """

    p50_ns: int
    p99_ns: int
    jitter_ns: int
    answered: int
    unanswered: int
    bytes_per_s: int
    p10: int
    p90: int
    plain_bytes_per_s: int
    sent_bytes: int
    retransmitted_bytes: int


MeasurementMessage = (
    SessionAsked
    | SessionOpened
    | StreamJoined
    | FlowAsked
    | FlowReady
    | FlowReceived
    | FlowSent
    | FlowStopped
    | Declined
    | SocketAsked
    | SocketTold
    | PairAsked
    | PairMeasured
)

MEASUREMENT_MESSAGES: Final[dict[int, type]] = {
    1: SessionAsked,
    2: SessionOpened,
    3: StreamJoined,
    4: FlowAsked,
    5: FlowReady,
    6: FlowReceived,
    7: FlowSent,
    8: FlowStopped,
    9: Declined,
    10: SocketAsked,
    11: SocketTold,
    12: PairAsked,
    13: PairMeasured,
}

MEASUREMENT: Final[Schema[MeasurementMessage]] = Schema(
    MEASUREMENT_MESSAGES, limits=Limits(message_bytes_max=4096, str_bytes_max=1024, bytes_max=64)
)

SessionFrame = MeasurementMessage | tuple[int, int]
"""A message, or an echo as (kind, sequence)."""


def encode_message(message: MeasurementMessage) -> bytes:
    """A MESSAGE frame."""
    return bytes([KIND_MESSAGE]) + MEASUREMENT.encode(message)


def encode_echo(kind: int, sequence: int) -> bytes:
    """An ECHO or ECHOED frame."""
    return _ECHO.pack(kind, sequence)


def decode_session(frame: bytes) -> SessionFrame:
    """A frame of a session. Raises ProtocolViolation."""
    kind = frame[0] if frame else 0
    if kind == KIND_MESSAGE:
        return MEASUREMENT.decode(memoryview(frame)[1:])
    if kind in (KIND_ECHO, KIND_ECHOED) and len(frame) == _ECHO.size:
        return kind, _ECHO.unpack(frame)[1]
    raise ProtocolViolation(f"frame kind {kind if frame else 'none'} of {len(frame)} bytes in a measurement")


def check_flow(asked: FlowAsked) -> None:
    """Refuse a flow over the limits.

    Raises:
        ProtocolViolation: names the field.
    """
    limits = (("connections", 1, CONNECTIONS_MAX), ("warm_up_ns", 0, WARM_UP_NS_MAX), ("span_ns", 1, SPAN_NS_MAX))
    for name, least, most in limits:
        if not least <= getattr(asked, name) <= most:
            raise ProtocolViolation(f"a flow with {name} {getattr(asked, name)}; {least} to {most} are allowed")


def encode_preamble(joined: StreamJoined) -> bytes:
    """What a plain connection sends first: `PREAMBLE_BYTES` bytes."""
    return _PREAMBLE.pack(joined.token, joined.flow, joined.index)


def decode_preamble(data: bytes) -> StreamJoined:
    """What a plain connection has sent first. Raises ProtocolViolation when it is of another length."""
    if len(data) != _PREAMBLE.size:
        raise ProtocolViolation(f"a plain connection began with {len(data)} bytes; expected {_PREAMBLE.size}")
    return StreamJoined(*_PREAMBLE.unpack(data))


def encode_aside(token: bytes, index: int) -> bytes:
    """What a connection of a daemon's measurement begins with: `ASIDE_BYTES` bytes."""
    return _ASIDE.pack(token, index)


def decode_aside(data: bytes) -> tuple[bytes, int]:
    """Token and index that a connection began with. Raises ProtocolViolation when it is of another length."""
    if len(data) != _ASIDE.size:
        raise ProtocolViolation(f"a connection of a measurement began with {len(data)} bytes; expected {_ASIDE.size}")
    token, index = _ASIDE.unpack(data)
    return token, index
