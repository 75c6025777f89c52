"""Stripes that came before the ballot that explains them: bulk and control are on different connections."""

from __future__ import annotations

from typing import Final

from diloco_node.core.events import ContributionStripeArrived, MergedStripeArrived
from diloco_node.core.types import Ballot

EARLY_MAX: Final = 256
"""Arrivals of one sender that are remembered. Of more its oldest ballots' are dropped: their rounds take a further
ballot."""

Arrival = ContributionStripeArrived | MergedStripeArrived


class EarlyArrivals:
    """By ballot, in the order in which they came."""

    def __init__(self) -> None:
        self._arrivals: dict[Ballot, list[Arrival]] = {}

    @property
    def has_any(self) -> bool:
        """Whether anything is remembered."""
        return bool(self._arrivals)

    def keep(self, event: Arrival) -> None:
        """Remember it."""
        self._arrivals.setdefault(event.ballot, []).append(event)
        sender = _sender_of(event)
        counts = {
            ballot: sum(_sender_of(one) == sender for one in events)
            for ballot, events in sorted(self._arrivals.items())
        }
        while sum(counts.values()) > EARLY_MAX:
            oldest = next(ballot for ballot, count in counts.items() if count)
            self._leave(oldest, [one for one in self._arrivals[oldest] if _sender_of(one) != sender])
            counts[oldest] = 0

    def take(self, ballot: Ballot, fragment: int) -> list[Arrival]:
        """What came for a ballot that is known now."""
        return [event for event in self._arrivals.pop(ballot, []) if _fragment_of(event) == fragment]

    def forget(self, fragment: int, ballot: Ballot) -> None:
        """The fragment's round is over with this ballot: drop what came for it and for the ballots before."""
        for older in [one for one in self._arrivals if one <= ballot]:
            self._leave(older, [event for event in self._arrivals[older] if _fragment_of(event) != fragment])

    def _leave(self, ballot: Ballot, left: list[Arrival]) -> None:
        if left:
            self._arrivals[ballot] = left
        else:
            del self._arrivals[ballot]


def _sender_of(event: Arrival) -> str:
    return event.cut.reducer if isinstance(event, MergedStripeArrived) else event.contribution.learner


def _fragment_of(event: Arrival) -> int:
    return event.fragment if isinstance(event, MergedStripeArrived) else event.contribution.fragment
