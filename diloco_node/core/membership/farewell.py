"""The members that the run's authority has signed, shown to regions that were away: to link with them, or to leave.

A region that is there when it is removed reads so in the ledger. One that was away finds the others ahead by rounds
that it need not fetch any more. And one that was away while another came would refuse that one, though it may lead. So
each region shows its roster on each new link, and again after each change: the word of a peer alone does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diloco_node.core.events import StopLearner
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Roster, lines_fault
from diloco_node.core.messages import RosterShown
from diloco_node.core.rounds.context import RoundContext

QUIET_HEARTBEATS: Final = 5
"""A removed region that reads on may find that it was added again: it leaves when nothing more comes for so long."""

NEWS_HEARTBEATS: Final = 25
"""A signed list without this region may be from before it was added again: so long another peer may show a newer one,
5 s by default."""


class Farewell:
    """Asked with each heartbeat, and at each new link.

    Attributes:
        reason: why this region leaves the run; empty while it does not.
        joined: changes of the members when this region asked to join; a list with fewer is from before. It counts while
            the ledger here knows of no change.
    """

    def __init__(self, context: RoundContext, ledger: LedgerCore, roster_fault: Callable[[Roster], str]) -> None:
        self.reason = ""
        self.joined = 0
        self._region, self._ledger = context.region, ledger
        self._history, self._effects = context.history, context.effects
        self._heartbeat_ns = context.settings.heartbeat_ns
        self._roster_fault = roster_fault
        # Changes in the roster that was last shown to all.
        self._shown_changes = 0
        # The last entry of the log, and since when it is the last one.
        self._last_index, self._last_ns = -1, 0
        # The newest list without this region that a peer has shown: its changes, the peer, and since when it is known.
        self._removal: tuple[int, str, int | None] = (0, "", None)
        # Peers of another run by the same name: the changes of its members, and what was told of it.
        self._splits: dict[str, tuple[int, str]] = {}

    def tell(self, peer: str) -> bool:
        """Show a peer the members, if they ever changed. Returns whether it was removed."""
        roster = self._history.roster
        if roster.changes:
            self._effects.send(peer, RosterShown(roster.changes, roster.lines, roster.signature))
        return roster.has_removed(peer)

    def take(self, peer: str, message: RosterShown) -> None:
        """Take the roster that a peer shows, if it is newer than the ledger here and what was shown before.

        A signed list that can't come from the same history is of another run: nothing of it counts, not even that this
        region was removed there. An operator decides which run goes on.
        """
        if self.reason or lines_fault(message.members):
            return
        changes, ledger, own = message.changes, self._ledger, self._own_roster
        roster = Roster(message.members, changes, message.signature)
        known_changes = max(own.changes, ledger.newer_roster.changes)
        is_old = changes <= known_changes or (own.changes == 0 and changes < self.joined)
        is_split = own.changes > 0 and changes > 0 and own.is_split_from(roster)
        if peer in self._splits and not is_split and not self._roster_fault(roster):  # emptied, and added to this run
            _, text = self._splits.pop(peer)
            if ledger.contradictions.get(peer) == text:
                del ledger.contradictions[peer]
        if (is_old and not is_split) or (is_split and self._splits.get(peer, (0,))[0] == changes):
            return
        is_removed = roster.has_removed(self._region)
        if fault := self._roster_fault(roster):
            subject = f"a list without {self._region}" if is_removed else "other members"
            if not is_old:
                self._effects.note("members", f"{peer} shows {subject}: {fault}", is_alarm=True)
        elif is_split:
            text = self._split_text(peer, roster)
            self._splits[peer], ledger.contradictions[peer] = (changes, text), text
            self._effects.note("members", text, is_alarm=True)
        elif is_removed:
            if changes > self._removal[0]:
                self._removal = (changes, peer, self._removal[2])
        else:
            ledger.newer_roster = roster

    @property
    def _own_roster(self) -> Roster:
        """The members as committed. The log of a region that alone votes is, also while it has not begun to lead."""
        roster = self._ledger.disks.roster
        return roster if roster.voters == (self._region,) else self._history.roster

    def _split_text(self, peer: str, roster: Roster) -> str:
        """Name the two runs, and the remedy."""
        sides = f"one of {', '.join(self._own_roster.names)}, one of {', '.join(roster.names)}"
        return (
            f"{self._region} and {peer} are of two runs with one name, {sides}: `members recover --force` was given in "
            "two places, or beside a majority. Nothing is merged between them. Compare `members list` of both, and "
            "decide which run goes on. Stop the regions of the other one, empty their folders, and add them with "
            "`members add`: its work is lost"
        )

    def look(self, *, now_ns: int) -> None:
        """Show the others a change of the members, and who was removed by it. Leave, if the ledger here says so to its
        end."""
        ledger, roster = self._ledger, self._history.roster
        if roster.changes != self._shown_changes:
            self._shown_changes = roster.changes
            # A leader that came after the change sends no entries to a region that it removed.
            for name in roster.memberships:
                if name != self._region:
                    self.tell(name)
        if ledger.last_index != self._last_index:
            self._last_index, self._last_ns = ledger.last_index, now_ns
        if self.reason:
            return
        changes, peer, since_ns = self._removal
        if changes <= max(self._own_roster.changes, ledger.newer_roster.changes):
            self._removal = (0, "", None)
        elif since_ns is None:
            self._removal = (changes, peer, now_ns)
        elif now_ns - since_ns >= NEWS_HEARTBEATS * self._heartbeat_ns:
            self._leave(f"{peer} shows the authority's signature, change {changes} of the members")
            return
        rosters = (roster, ledger.disks.roster)
        if not all(roster.has_removed(self._region) for roster in rosters):
            return
        if now_ns - self._last_ns >= QUIET_HEARTBEATS * self._heartbeat_ns:
            self._leave(f"entry {rosters[0].memberships[self._region].since} of the ledger")

    def _leave(self, evidence: str) -> None:
        self.reason = f"{self._region} was removed from the run by an operator ({evidence})"
        self._effects.note("members", f"{self.reason}: it stops")
        self._effects.emit(StopLearner(self.reason))
