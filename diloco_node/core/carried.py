"""What went out to one peer and what was carried of it: over the last second, and while a queue stood.

What is acknowledged while a queue stands is what the link carries. But acknowledgements come in a bunch when the queue
of the other direction drains, and what was sent before a queue was there says nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from diloco_node.transport.pacing.budget import NS_PER_S

KEPT_NS: Final = NS_PER_S

MOST_NS: Final = 90_000_000
FULL_NS: Final = 150_000_000
"""Over a shorter time neither what was carried at most nor what a full link carries can be told."""

FULL_SAMPLES: Final = 32


class Carried:
    """Rates in bytes per second, from what was counted between two samples."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, int]] = deque()  # (ns, bytes sent, carried in them) of the last second
        self._full: deque[int] = deque(maxlen=FULL_SAMPLES)
        self._full_ns = 0

    @property
    def is_whole(self) -> bool:
        """Whether there are samples of a whole second."""
        return self._ns >= KEPT_NS

    @property
    def _ns(self) -> int:
        return sum(ns for ns, _, _ in self._samples)

    @property
    def full(self) -> int:
        """What was carried while the queue that stands, or stood until now, stood; 0: not for long enough to tell.

        The median of the samples: one bunch of acknowledgements, or a queue that seems to stand because pings or echoes
        are late, says nothing.
        """
        return sorted(self._full)[(len(self._full) - 1) // 2] if self._full_ns >= FULL_NS else 0

    @property
    def sent(self) -> int:
        """What was sent in the last second."""
        return sum(sent for _, sent, _ in self._samples) * NS_PER_S // max(1, self._ns)

    @property
    def sent_most(self) -> int:
        """The most that was sent from one sample of the last second to the next."""
        return max((sent * NS_PER_S // ns for ns, sent, _ in self._samples if ns), default=0)

    @property
    def most(self) -> int:
        """The most that was carried in a tenth of the last second; while a rate is being doubled the rest was less."""
        most = ns = carried = 0
        for sample_ns, _, sample_carried in reversed(self._samples):
            ns, carried = ns + sample_ns, carried + sample_carried
            if ns >= MOST_NS:
                most = max(most, carried * NS_PER_S // ns)
                ns = carried = 0
        return most

    def lately(self, window_ns: int) -> int:
        """What was carried in so long; not more than was sent, for acknowledgements come in bunches."""
        ns = sent = carried = 0
        for sample_ns, sample_sent, sample_carried in reversed(self._samples):
            ns, sent, carried = ns + sample_ns, sent + sample_sent, carried + sample_carried
            if ns >= window_ns:
                break
        return min(sent, carried) * NS_PER_S // ns if ns else 0

    def remember(self, elapsed_ns: int, *, sent_bytes_per_s: int, carried_bytes_per_s: int, is_queueing: bool) -> None:
        """A sample came, so long after the one before; a queue stands now, or not."""
        sent, carried = sent_bytes_per_s * elapsed_ns // NS_PER_S, carried_bytes_per_s * elapsed_ns // NS_PER_S
        self._samples.append((elapsed_ns, sent, carried))
        while self._ns - self._samples[0][0] >= KEPT_NS:
            self._samples.popleft()
        if is_queueing:
            self._full_ns += elapsed_ns
            self._full.append(carried_bytes_per_s)

    def drained(self) -> None:
        """The queue is gone."""
        self._full.clear()
        self._full_ns = 0

    def clear(self) -> None:
        """What comes now has nothing to do with what was."""
        self._samples.clear()
        self.drained()
