"""Waits between attempts that double, for whatever dials, starts or asks again."""

from __future__ import annotations


class Backoff:
    """Waits from `min_s` to `max_s`, each twice as long as the one before. It knows no clock: the caller waits."""

    def __init__(self, min_s: float, max_s: float) -> None:
        self.min_s = min_s
        self.max_s = max_s
        self._next_s = min_s

    def next_s(self, *, at_least_s: float = 0.0) -> float:
        """Return the wait before the next attempt, at least so long, and double the one after it."""
        wait_s = max(self._next_s, at_least_s)
        self._next_s = min(2 * wait_s, self.max_s)
        return wait_s

    def reset(self) -> None:
        """Begin again at `min_s`: the last attempt was of use."""
        self._next_s = self.min_s
