"""Where the time of the last rounds went: by phase, and by the region that was waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from diloco_node.health.reading import Document, number, part, rows, text

ROUNDS_SEEN: Final = 32
"""Committed ones. Older ones say little of what is slow now."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Means over committed rounds.

    Attributes:
        rounds, failed: how many committed rounds this is about, and how many ballots failed beside them.
        seconds: of a round. phases: seconds of each, the longest first.
        waits: ((region, phase), number of rounds) that waited for it most, the most frequent first.
        seen_from: whose log it is.
    """

    rounds: int
    failed: int
    seconds: float
    phases: tuple[tuple[str, float], ...]
    waits: tuple[tuple[tuple[str, str], int], ...]
    seen_from: str


def last_rounds(documents: Sequence[Document]) -> tuple[str, list[Document]]:
    """Whose log says most, and the last committed rounds in it with the ballots that failed since; empty if none does.

    That is the leader's if it was asked, for it knows whom it waits for, and of two that lead the one with the higher
    term; else the longest.
    """
    logs = [(one, rows(one, "round_log")) for one in documents]
    document, log = max(
        ((one, log) for one, log in logs if any(map(_is_committed, log))),
        key=lambda one: (one[0].get("role") == "leader" and (number(one[0], "term") or 0.0), len(one[1])),
        default=({}, []),
    )
    places = [at for at, row in enumerate(log) if _is_committed(row)][-ROUNDS_SEEN:]
    return text(document, "region"), log[places[0] :] if places else []


def _is_committed(row: Document) -> bool:
    return text(row, "outcome") == "committed"


def critical_path(documents: Sequence[Document]) -> CriticalPath | None:
    """Of the last rounds; None without any."""
    seen_from, recent = last_rounds(documents)
    committed = [row for row in recent if _is_committed(row)]
    if not committed:
        return None
    spent = {phase: phase_mean(committed, phase) for phase in ("gather", "reduce", "commit", "apply")}
    named = [part(row, "waited_for") for row in committed]
    waits = Counter((text(late, "region"), text(late, "phase")) for late in named if late)
    return CriticalPath(
        rounds=len(committed),
        failed=len(recent) - len(committed),
        seconds=fmean(number(row, "seconds") or 0.0 for row in committed),
        phases=tuple(sorted(spent.items(), key=lambda one: -one[1])),
        waits=tuple(waits.most_common()),
        seen_from=seen_from,
    )


def phase_mean(log: Sequence[Document], phase: str) -> float:
    """Mean seconds of a phase; a round that does not know it counts as none."""
    return fmean(number(part(row, "phases"), phase) or 0.0 for row in log) if log else 0.0


def cost_of(log: Sequence[Document], region: str, phase: str) -> float | None:
    """Seconds that a round's phase takes longer when it waits for a region: the median of those rounds against that of
    the others; None when there are no others to compare with."""
    late: list[float] = []
    others: list[float] = []
    for row in log:
        seconds = number(part(row, "phases"), phase)
        if _is_committed(row) and seconds is not None:
            waited = part(row, "waited_for")
            (late if (waited.get("region"), waited.get("phase")) == (region, phase) else others).append(seconds)
    return max(0.0, median(late) - median(others)) if late and others else None
