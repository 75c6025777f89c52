"""Notes about regions that come, go and are shut out: events, and marks on the page's curves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from diloco_node.core.events import Note
from diloco_node.core.view import PeerView


class Presence:
    """Remembers which peers were there at the last look."""

    def __init__(self) -> None:
        # By peer, in words; before the first look all are away.
        self._states: dict[str, str] = {}

    def look(self, peers: Sequence[PeerView], shut_out: Collection[str]) -> list[Note]:
        """Tell each change since the last look. `shut_out`: peers in quarantine, which are told as an alarm."""
        notes = []
        for peer in peers:
            is_out = peer.region in shut_out
            state = "is shut out" if is_out else "is here" if peer.is_alive else "is gone"
            if state != self._states.get(peer.region, "is gone"):
                notes.append(Note("peer", f"{peer.region} {state}", is_alarm=is_out))
            self._states[peer.region] = state
        return notes
