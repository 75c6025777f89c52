"""Patience with payloads: those that somebody is sending already are not fetched."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.participant import RoundParticipant
from diloco_node.core.types import EntryBody, RoundBody


class PayloadPatience:
    """Waits a while for the merged stripes of a round before its payload is fetched.

    A majority may hold a payload, and its entry come, while the last merged stripe is still on its way to here.
    """

    def __init__(self, participant: RoundParticipant, history: RoundHistory) -> None:
        self._participant, self._history = participant, history
        self._since_ns: dict[bytes, int] = {}

    def lacking(self, missing: Sequence[EntryBody], *, now_ns: int) -> list[EntryBody]:
        """Return the payloads to fetch, of those that the ledger waits for.

        Ask again with all missing ones, whenever they may have changed."""
        since = {
            body.payload_digest: self._since_ns.get(body.payload_digest, now_ns)
            for body in missing
            if isinstance(body, RoundBody)
        }
        self._since_ns = since
        patience_ns = self._history.settings.ballot_deadline_min_ns // 2
        return [
            body
            for body in missing
            if not isinstance(body, RoundBody)
            or not self._participant.is_following(body)
            or (now_ns - since[body.payload_digest] >= patience_ns and not self._participant.is_storing(body))
        ]
