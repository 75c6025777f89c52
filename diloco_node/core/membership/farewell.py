"""The end of a region's membership: the others say so with the authority's signature, and the region leaves the run.

A region that is there when it is removed reads so in the ledger. One that was away finds the others ahead by rounds
that it need not fetch any more. So whoever knows tells it, on each new link, with the roster that the authority signed:
the word of a peer alone ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import StopLearner
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Roster, lines_fault
from diloco_node.core.messages import RosterShown
from diloco_node.core.rounds.history import RoundHistory

QUIET_HEARTBEATS: Final = 5
"""A removed region that reads on may find that it was added again: it leaves when nothing more comes for so long."""


class Farewell:
    """Asked with each heartbeat, and at each new link.

    Args:
        roster_fault: see `EntryCheck`.

    Attributes:
        reason: why this region leaves the run; empty while it does not.
        joined: changes of the members when this region asked to join; a list with fewer is from before.
    """

    def __init__(
        self,
        *,
        region: str,
        ledger: LedgerCore,
        history: RoundHistory,
        effects: EffectBuffer,
        heartbeat_ns: int,
        roster_fault: Callable[[Roster], str],
    ) -> None:
        self.reason = ""
        self.joined = 0
        self._region, self._ledger, self._history, self._effects = region, ledger, history, effects
        self._quiet_ns = QUIET_HEARTBEATS * heartbeat_ns
        self._roster_fault = roster_fault
        # The last entry of the log, and since when it is the last one.
        self._last_index, self._last_ns = -1, 0

    def tell(self, peer: str) -> bool:
        """Tell a peer that it was removed, if it was. Returns whether."""
        roster = self._history.roster
        if not roster.has_removed(peer):
            return False
        self._effects.send(peer, RosterShown(roster.changes, roster.lines, roster.signature))
        return True

    def take(self, peer: str, message: RosterShown) -> None:
        """Take the roster that a peer shows, if it is newer than the ledger here."""
        changes = message.changes
        is_old = changes <= self._history.roster.changes or changes < self.joined
        if self.reason or is_old or lines_fault(message.members):
            return
        roster = Roster.of_lines(message.members, changes, message.signature)
        if not roster.has_removed(self._region):
            return
        if fault := self._roster_fault(roster):
            self._effects.note("members", f"{peer} shows a list without {self._region}: {fault}", is_alarm=True)
        else:
            self._leave(f"{peer} shows the authority's signature, change {changes} of the members")

    def look(self, *, now_ns: int) -> None:
        """Leave, if the ledger here says so to its end."""
        ledger = self._ledger
        if ledger.last_index != self._last_index:
            self._last_index, self._last_ns = ledger.last_index, now_ns
        rosters = (self._history.roster, ledger.disks.roster)
        if self.reason or not all(roster.has_removed(self._region) for roster in rosters):
            return
        if now_ns - self._last_ns >= self._quiet_ns:
            self._leave(f"entry {rosters[0].memberships[self._region].since} of the ledger")

    def _leave(self, evidence: str) -> None:
        self.reason = f"{self._region} was removed from the run by an operator ({evidence})"
        self._effects.note("members", f"{self.reason}: it stops")
        self._effects.emit(StopLearner(self.reason))
