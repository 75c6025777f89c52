"""Repeated log lines are told once in a window of time and counted: a peer that floods can't fill the log.

The number is told when the window is over. Lines of one kind that all differ are bounded as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Final

from diloco_node.numeric import NS_PER_S

WINDOW_NS: Final = 10 * NS_PER_S

CAUSES_MAX: Final = 200
"""Different lines of one kind in a window. Twenty rounds a second, each told when it opens and when it commits, stay
at it; a flood comes to some 4 KB a second."""

_OTHERS: Final = object()
"""The cause of all lines that are over the limit."""

_NUMBER: Final = re.compile(r"(?<![\w-])-?\d[\w.]*")


def numberless(text: str) -> str:
    """The text with its numbers left out: sizes and counters vary, the cause is the same. Digits within a name stay."""
    return _NUMBER.sub("#", text)


class Repeats:
    """Decides which lines are told. causes_max: different lines of one kind that are told in a window."""

    def __init__(self, now_ns: Callable[[], int], *, causes_max: int = CAUSES_MAX) -> None:
        self._now_ns = now_ns
        self._causes_max = causes_max
        self._since_ns = now_ns()
        self._counts: dict[str, dict[Hashable, int]] = {}

    def end_window(self) -> list[tuple[str, int]]:
        """When a window is over: how many lines of each kind it held back, sorted. Empty in the middle of one."""
        now_ns = self._now_ns()
        if now_ns - self._since_ns < WINDOW_NS:
            return []
        counts, self._counts, self._since_ns = self._counts, {}, now_ns
        totals = ((kind, sum(causes.values())) for kind, causes in sorted(counts.items()))
        return [(kind, count) for kind, count in totals if count]

    def is_new(self, kind: str, cause: Hashable) -> bool:
        """Whether to tell this line; it is counted as held back if not. `kind` is one of a few, never a peer's word."""
        causes = self._counts.setdefault(kind, {})
        if cause in causes:
            causes[cause] += 1
            return False
        if len(causes) >= self._causes_max:
            causes[_OTHERS] = causes.get(_OTHERS, 0) + 1
            return False
        causes[cause] = 0
        return True
