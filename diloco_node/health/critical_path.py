"""The time of the last rounds by phase, and by the region that was waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from diloco_node.health.reading import Document, number, rows, section, text

ROUNDS_SEEN: Final = 32
"""Committed rounds that count. Older ones say little about what is slow now."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """Means over committed rounds, as one region's log has them.

    failed: ballots beside them. seconds: of a round. phases: seconds of each, the longest first. waits: ((region,
    phase), number of rounds) that waited for it most, the most frequent first.
    """

    rounds: int
    failed: int
    seconds: float
    phases: tuple[tuple[str, float], ...]
    waits: tuple[tuple[tuple[str, str], int], ...]
    seen_from: str


def last_rounds(documents: Sequence[Document]) -> tuple[str, list[Document]]:
    """Choose the region with the best log; return it with its last committed rounds and the ballots that failed since.

    The leader's log is best, since a leader knows which region it waits for. The leader with the higher
    term counts. Without a leader the longest log is taken. Empty: no log has a committed round.
    """
    logs = [(document, rows(document, "round_log")) for document in documents]
    document, log = max(
        ((document, log) for document, log in logs if any(map(_is_committed, log))),
        key=lambda entry: (entry[0].get("role") == "leader" and (number(entry[0], "term") or 0.0), len(entry[1])),
        default=({}, []),
    )
    places = [at for at, row in enumerate(log) if _is_committed(row)][-ROUNDS_SEEN:]
    return text(document, "region"), log[places[0] :] if places else []


def _is_committed(row: Document) -> bool:
    return text(row, "outcome") == "committed"


def critical_path(documents: Sequence[Document]) -> CriticalPath | None:
    """Summarize the last rounds; None without a committed one."""
    seen_from, recent = last_rounds(documents)
    rounds = [row for row in recent if _is_committed(row)]
    if not rounds:
        return None
    spent = {
        phase: fmean(number(section(row, "phases"), phase) or 0.0 for row in rounds)  # one that is not known: none
        for phase in ("gather", "reduce", "commit", "apply")
    }
    waits_for = [section(row, "waited_for") for row in rounds]
    waits = Counter((text(late, "region"), text(late, "phase")) for late in waits_for if late)
    return CriticalPath(
        rounds=len(rounds),
        failed=len(recent) - len(rounds),
        seconds=fmean(number(row, "seconds") or 0.0 for row in rounds),
        phases=tuple(sorted(spent.items(), key=lambda phase: -phase[1])),
        waits=tuple(waits.most_common()),
        seen_from=seen_from,
    )


def cost_of(log: Sequence[Document], region: str, phase: str) -> float | None:
    """Seconds that a round's phase takes longer when it waits for a region: the median of those rounds minus the median
    of the others; None when there are no others to compare with."""
    late: list[float] = []
    usual: list[float] = []
    for row in log:
        seconds = number(section(row, "phases"), phase)
        if _is_committed(row) and seconds is not None:
            wait = section(row, "waited_for")
            (late if (wait.get("region"), wait.get("phase")) == (region, phase) else usual).append(seconds)
    return max(0.0, median(late) - median(usual)) if late and usual else None
