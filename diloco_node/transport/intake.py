"""How fast one peer's messages are taken: what is beyond waits in the peer's own connection, nothing is dropped.

Each kind of message has a token bucket, all kinds together have one, and so have the bytes of the control lane. When
one is empty the peer's connection is not read for a moment, so HTTP/2's flow control stops the peer. An AppendEntries
can come late so, never be lost.

An honest peer never empties one: a leader repeats to each region what each round in flight lacks once a heartbeat, and
the answer has a message for each region. So of one kind it sends at most `regions x rounds in flight` in a heartbeat.
"""

from __future__ import annotations

from typing import Final

from diloco_node.numeric import NS_PER_S
from diloco_node.transport.pacing.token_bucket import TokenBucket

HEADROOM: Final = 4
"""Over what an honest region sends: rounds that are faster than heartbeats, ballots that are repeated."""

MESSAGES_PER_S_MIN: Final = 200
"""A learner's news go out at once, at most 50 times a second; echoes of a measurement 100 times."""

MESSAGES_PER_S: Final = 1000
"""The rate of one kind, where no run's settings are known."""

KINDS: Final = 4
"""So many times the limit of one kind is that of all together: few kinds are frequent at the same time."""

BURST_S: Final = 2
"""Messages that may come at once, in seconds of the rate: they pile up while a line or this process stands still."""

HEARTBEAT_NS_MIN: Final = 10_000_000

BYTES_PER_S: Final = 4 * 2**20
"""A message of the largest size each second in the control lane, as ten thousand entries are: decoding takes 0.1 s."""


def messages_per_s(regions: int, *, rounds_in_flight: int, heartbeat_ns: int) -> int:
    """Return how many messages of one kind a peer of a run may send in a second."""
    honest = regions * rounds_in_flight * NS_PER_S // max(heartbeat_ns, HEARTBEAT_NS_MIN)
    return max(MESSAGES_PER_S_MIN, HEADROOM * honest)


class Intake:
    """The buckets of one peer; they stay when its link goes. per_s: messages of one kind in a second."""

    def __init__(self, per_s: int, *, now_ns: int) -> None:
        self._per_s = per_s
        self._kinds: dict[type, TokenBucket] = {}
        self._all = _bucket(KINDS * per_s, now_ns)
        self._bytes = _bucket(BYTES_PER_S, now_ns)

    def allow(self, per_s: int, *, now_ns: int) -> None:
        """Take so many messages of one kind in a second from now on."""
        if per_s != self._per_s:
            self._per_s, self._all = per_s, _bucket(KINDS * per_s, now_ns)
            self._kinds.clear()

    def take(self, kind: type, size_bytes: int, *, now_ns: int) -> int:
        """Count a message that came. Returns for how many ns nothing more may be read; 0 for honest peers."""
        bucket = self._kinds.get(kind)
        if bucket is None:
            bucket = self._kinds[kind] = _bucket(self._per_s, now_ns)
        return max(
            bucket.charge(1, now_ns=now_ns),
            self._all.charge(1, now_ns=now_ns),
            self._bytes.charge(size_bytes, now_ns=now_ns),
        )


def _bucket(per_s: int, now_ns: int) -> TokenBucket:
    return TokenBucket(per_s, now_ns=now_ns, burst=BURST_S * per_s)
