"""The rate at which a counter grows now, not over its whole life. Pure: the caller has the clock."""

from __future__ import annotations

from collections import deque
from typing import Final

from diloco_node.numeric import NS_PER_S

SAMPLES_MAX: Final = 512


class SlidingRate:
    """Growth per second over the last `window_s`; samples closer than a 256th of it are left out, to bound the memory.

    A counter that grows in steps, of whatever length, has a steady rate; one that stands still loses it within the
    window.
    """

    def __init__(self, window_s: float) -> None:
        self._window_ns = int(window_s * NS_PER_S)
        self._samples: deque[tuple[int, float]] = deque(maxlen=SAMPLES_MAX)

    def reset(self) -> None:
        """Forget all samples: the counter begins again."""
        self._samples.clear()

    def add(self, value: float, *, now_ns: int) -> None:
        """Take a sample: the counter stands at `value`, which never falls."""
        samples = self._samples
        if len(samples) > 1 and now_ns - samples[-2][0] < self._window_ns // 256:
            samples[-1] = now_ns, value
        else:
            samples.append((now_ns, value))
        # Two are always kept: steps may be longer than the window.
        while len(samples) > 2 and now_ns - samples[1][0] > self._window_ns:
            samples.popleft()

    def per_second(self, *, now_ns: int) -> float | None:
        """The rate now; None before there are two samples."""
        if len(self._samples) < 2:
            return None
        (first_ns, first), (last_ns, last) = self._samples[0], self._samples[-1]
        usual_ns = (last_ns - first_ns) / (len(self._samples) - 1)
        silent_ns = now_ns - last_ns
        if silent_ns > max(self._window_ns, 4 * usual_ns):
            return 0.0
        return (last - first) * NS_PER_S / max(last_ns - first_ns + max(0.0, silent_ns - 2 * usual_ns), 1.0)
