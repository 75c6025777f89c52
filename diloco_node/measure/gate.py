"""Limits of a measuring end: one measurement at a time, and bounded work for the peers that ask. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.errors import ProtocolViolation
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.pacing.token_bucket import TokenBucket
from diloco_node.wire.measure_messages import BODY_BYTES_MAX, PROBE_BYTES_MIN

REQUEST_BYTES_SAVED_MAX: Final = 96 * 2**30
REQUEST_BYTES_PER_S: Final = 16 * 2**20
"""Limit of what one peer may have a daemon measure: 96 GiB at once, 134 Mbit/s in the long run."""

ECHOES_SAVED_MAX: Final = 400
ECHOES_PER_S: Final = 200
"""Echoes that one peer has answered; twice what a measurement sends."""

PROBED_MAX: Final = 8
"""Measurements whose probes are still taken after their end: those that were on their way."""


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The measurement that is going on: for whom (None: an operator here), since when, bytes taken."""

    purpose: str
    requester: str | None
    since_ns: int
    bytes_max: int


class MeasuringGate:
    """Admits one measurement at a time, and to each peer that asks only so many bytes over time.

    is_bounded: peers that ask have a limit of bytes; an end that does nothing but measure needs none.
    """

    def __init__(self, *, is_bounded: bool) -> None:
        self.is_bounded = is_bounded
        # Made, and full, when a peer asks for the first time.
        self._bytes: dict[str, TokenBucket] = {}
        self._echoes: dict[str, TokenBucket] = {}
        self._running: _Admitted | None = None

    def begin(self, purpose: str, *, requester: str | None, bytes_max: int, now_ns: int) -> str:
        """Begin a measurement; the reason why not, or empty when it has begun and `end` must follow.

        purpose: for people, as "bandwidth to eu". requester: a peer; None: the operator. bytes_max: that may flow.
        """
        if self._running is not None:
            return f"busy with another measurement: {self.describe(now_ns=now_ns)}; try again"
        if requester is not None and self.is_bounded and not self._may_spend(requester, bytes_max, now_ns):
            return (
                f"{requester} has asked for too many bytes lately: a peer may have {REQUEST_BYTES_SAVED_MAX} bytes "
                f"measured at once, and {REQUEST_BYTES_PER_S} bytes/s in the long run; wait, or measure for less time"
            )
        self._running = _Admitted(purpose, requester, now_ns, bytes_max)
        return ""

    def _may_spend(self, peer: str, bytes_max: int, now_ns: int) -> bool:
        bucket = TokenBucket(REQUEST_BYTES_PER_S, burst=REQUEST_BYTES_SAVED_MAX, now_ns=now_ns)
        bucket = self._bytes.setdefault(peer, bucket)
        # A bucket lets through what is over its burst when it is full: a measurement could never be paid back.
        return bytes_max <= REQUEST_BYTES_SAVED_MAX and bucket.try_spend(bytes_max, now_ns=now_ns)

    def end(self, *, used_bytes: int) -> None:
        """It is over; of its bytes so many were used."""
        assert self._running is not None, "a measurement that has not begun can't end"
        running, self._running = self._running, None
        if running.requester is not None and self.is_bounded:
            self._bytes[running.requester].refund(max(0, running.bytes_max - used_bytes))

    def describe(self, *, now_ns: int) -> str:
        """Describe the running measurement, for people; empty when there is none."""
        if self._running is None:
            return ""
        by = f"asked by {self._running.requester}, " if self._running.requester is not None else ""
        return f"{self._running.purpose} ({by}since {(now_ns - self._running.since_ns) // NS_PER_S} s)"

    def may_echo(self, peer: str, *, now_ns: int) -> bool:
        """Whether one more echo of this peer is answered."""
        bucket = TokenBucket(ECHOES_PER_S, burst=ECHOES_SAVED_MAX, now_ns=now_ns)
        return self._echoes.setdefault(peer, bucket).try_spend(1, now_ns=now_ns)


class ProbesExpected:
    """The probes of one peer that are welcome: those of a measurement that was agreed to, up to its bytes."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def expect(self, measurement: int, bytes_max: int) -> None:
        """Probes of a measurement may come from now on; those of the oldest before it no longer."""
        while len(self._left) >= PROBED_MAX:
            del self._left[next(iter(self._left))]
        self._left[measurement] = bytes_max

    def arrive(self, measurement: int, raw_bytes: int) -> None:
        """Probes arrive. Raises ProtocolViolation: nobody requested them, or they are more than what was agreed to."""
        left_bytes = self._left.get(measurement)
        if left_bytes is None:
            raise ProtocolViolation(f"a probe of {raw_bytes} bytes for a measurement that was not agreed to")
        if not PROBE_BYTES_MIN <= raw_bytes <= BODY_BYTES_MAX or raw_bytes > left_bytes:
            raise ProtocolViolation(
                f"a probe of {raw_bytes} bytes; {left_bytes} are left of the measurement, {PROBE_BYTES_MIN} to "
                f"{BODY_BYTES_MAX} fit into one"
            )
        self._left[measurement] = left_bytes - raw_bytes
