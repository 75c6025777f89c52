"""Stripes that came before the ballot that explains them: bulk and control are on different connections."""

from __future__ import annotations

from typing import Final

from diloco_node.core.events import ContributionStripeArrived, MergedStripeArrived
from diloco_node.core.types import Ballot

EARLY_MAX: Final = 256
"""Arrivals that are remembered. Of more the oldest ballots' are dropped: their rounds take a further ballot."""

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
        while sum(len(events) for events in self._arrivals.values()) > EARLY_MAX:
            del self._arrivals[min(self._arrivals)]

    def take(self, ballot: Ballot, fragment: int) -> list[Arrival]:
        """What came for a ballot that is known now."""
        return [event for event in self._arrivals.pop(ballot, []) if _fragment_of(event) == fragment]

    def forget(self, fragment: int, ballot: Ballot) -> None:
        """The fragment's round is over with this ballot: drop what came for it and for the ballots before."""
        for older in [one for one in self._arrivals if one <= ballot]:
            left = [event for event in self._arrivals[older] if _fragment_of(event) != fragment]
            if left:
                self._arrivals[older] = left
            else:
                del self._arrivals[older]


def _fragment_of(event: Arrival) -> int:
    return event.fragment if isinstance(event, MergedStripeArrived) else event.contribution.fragment
