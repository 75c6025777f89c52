"""Events that people see as marks on the curves: starts, elections, regions that leave, return, or are left out.

Notes reach back some minutes, curves to the run's beginning. So the history of a run keeps the marks, a letter each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from diloco_node.core.events import Note

Mark = tuple[float, str]
"""When, in seconds since 1970, and the letter; the page has its meaning."""

_EVENTS: Final = (
    ("R", re.compile(r"start:.*has started|learner:.*attached at step")),
    ("L", re.compile(r"leader:.*leads term")),
    ("P", re.compile(r"peer:.* is (gone|here)$")),
    ("Q", re.compile(r"(peer|suspects):.*(is shut out|left out for)")),
)
LETTERS: Final = frozenset(letter for letter, _ in _EVENTS)

MARKS_MAX: Final = 512
PLACES: Final = 64
"""Where there are too many, this part of the time is between two marks of one letter. LETTERS * PLACES < MARKS_MAX."""


def letter_of(note: Note) -> str:
    """The letter of a note; empty for one that is no mark."""
    return next((letter for letter, event in _EVENTS if event.match(f"{note.kind}:{note.text}")), "")


def thin(marks: Iterable[Mark]) -> list[Mark]:
    """The same marks by time; where there are more than MARKS_MAX, of those of a letter that are close the first."""
    by_time = sorted(marks)
    if len(by_time) <= MARKS_MAX:
        return by_time
    gap_s = (by_time[-1][0] - by_time[0][0]) / PLACES
    last: dict[str, float] = {}
    apart = []
    for unix, letter in by_time:
        if letter not in last or unix - last[letter] > gap_s:
            last[letter] = unix
            apart.append((unix, letter))
    return apart
