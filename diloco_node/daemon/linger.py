"""How long a finished region stays for those that are not: they may still lack bytes that only it can give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LINGER_S: Final = 15.0
"""Without any progress of who lags, whether it is heard or not, it is left alone after this."""

LINGER_MAX_S: Final = 1800.0
"""Nobody keeps a finished region for longer, whatever he asks for."""


class Linger:
    """Decides when a finished region may go. Times are seconds on one monotonic clock."""

    def __init__(self, needed_index: int, *, now_s: float) -> None:
        """Every other region needs the ledger up to `needed_index` applied, which holds the end of the run."""
        self._needed_index = needed_index
        self._started_s = now_s
        self._progress_s = now_s
        self._seen: tuple[object, ...] = ()

    def is_over(self, applied: Iterable[int], *, learner_is_done: bool, serves: int, now_s: float) -> bool:
        """Whether to go.

        Args:
            applied: per other region the last ledger entry that it said it has applied.
            learner_is_done: it has told its last figures, or is gone.
            serves: transfers to regions that fetch what they lack.
        """
        lacking = tuple(index for index in applied if index < self._needed_index)
        if learner_is_done and not lacking:
            return True
        seen = (learner_is_done, lacking)
        if serves or seen != self._seen:
            self._seen, self._progress_s = seen, now_s
        return now_s - self._progress_s >= LINGER_S or now_s - self._started_s >= LINGER_MAX_S
