"""The bytes of one transfer that have come, when its chunks come over several connections in any order.

Each connection keeps its own order, so on each of them the offsets of one transfer grow. The end of a transfer says how
many chunks went over each connection: when all of these have come the transfer is over, and has every byte or never
will. No clock is needed to tell a chunk that is late from one that is missing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from diloco_node.errors import ProtocolViolation
from diloco_node.wire.envelope import TRANSFER_CONNECTIONS_MAX

ISLANDS_MAX: Final = 4096
"""Runs of bytes with gaps between them. A connection that stands still leaves a gap for each chunk that it holds; at
10 ms of the rate a chunk, that is no more than a few hundred in what any socket holds. Bounds memory and time."""


class Reassembly:
    """The bookkeeping of one transfer; the bytes themselves are the caller's. raw_bytes: of the whole transfer."""

    def __init__(self, raw_bytes: int) -> None:
        self._raw_bytes = raw_bytes
        self.starts: list[int] = []  # of the ranges, ascending; no two of them touch
        self.stops: list[int] = []
        self._chunks = [0] * TRANSFER_CONNECTIONS_MAX
        self._positions = [0] * TRANSFER_CONNECTIONS_MAX  # where the last chunk of each connection ended
        self._announced: tuple[int, ...] | None = None
        self.arrived_bytes = 0

    def take(self, connection: int, offset: int, size: int) -> None:
        """Take a chunk of at least one byte. Raises ProtocolViolation: it is not one that may still come there."""
        stop = offset + size
        if stop > self._raw_bytes:
            raise ProtocolViolation(f"a chunk up to byte {stop} in a transfer of {self._raw_bytes}")
        if offset < self._positions[connection]:
            raise ProtocolViolation(
                f"a chunk at offset {offset} of connection {connection} after {self._positions[connection]}"
            )
        if self._announced is not None and self._chunks[connection] >= self._announced[connection]:
            raise ProtocolViolation(f"more than the {self._announced[connection]} chunks that were announced")
        self._add(offset, stop)
        self._positions[connection] = stop
        self._chunks[connection] += 1
        self.arrived_bytes += size

    def _add(self, offset: int, stop: int) -> None:
        at = bisect_right(self.starts, offset)  # the range that would begin after it
        if (at and self.stops[at - 1] > offset) or (at < len(self.starts) and self.starts[at] < stop):
            raise ProtocolViolation(f"a chunk of bytes {offset} to {stop}, some of which came before")
        joins_before = at > 0 and self.stops[at - 1] == offset
        joins_after = at < len(self.starts) and self.starts[at] == stop
        if joins_before and joins_after:
            self.stops[at - 1] = self.stops.pop(at)
            del self.starts[at]
        elif joins_before:
            self.stops[at - 1] = stop
        elif joins_after:
            self.starts[at] = offset
        else:
            if len(self.starts) >= ISLANDS_MAX:
                raise ProtocolViolation(f"a transfer in more than {ISLANDS_MAX} pieces with gaps between them")
            self.starts.insert(at, offset)
            self.stops.insert(at, stop)

    def end(self, chunks: Sequence[int]) -> None:
        """Take the announcement that no more chunks will be sent. Call once.

        chunks: how many went over each connection; the first one's must all have come, those not named carried none.

        Raises ProtocolViolation: what came does not agree with that.
        """
        assert self._announced is None
        counts = tuple(chunks) + (0,) * (TRANSFER_CONNECTIONS_MAX - len(chunks))
        if self._chunks[0] != counts[0] or any(
            arrivals > count for arrivals, count in zip(self._chunks, counts, strict=True)
        ):
            raise ProtocolViolation(
                f"chunks by connection: {_counts_text(counts)} announced, {_counts_text(self._chunks)} came"
            )
        self._announced = counts

    @property
    def is_over(self) -> bool:
        """Whether the end was announced, and everything before it has come."""
        return self._announced is not None and self._announced == tuple(self._chunks)

    @property
    def is_whole(self) -> bool:
        """Whether every byte has come."""
        return self.arrived_bytes == self._raw_bytes


def _counts_text(counts: Sequence[int]) -> str:
    return "/".join(str(count) for count in counts)
