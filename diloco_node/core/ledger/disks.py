"""The ledger's view of the disks: the folder of each region that counts in votes and acknowledgements.

A region's folder has a random id. A folder that was emptied, or lost its files, comes back with another id. It would
have forgotten its votes and acknowledgements. So only folders that the log names count. Genesis names the first ones. A
lost one is replaced by two entries (`DiskNamedBody`): the first takes its id away, the second, once the first is
committed and the new folder has caught up, names the new one. A region that an operator expels is named EXPELLED. To
readmit it takes that away, and then its folder is named as a new one is. A voter that is away for long is named EVICTED
(`core.membership.absence`): it alone counts for no majority, until its folder is named again.

As in Raft's changes of a single member, an entry counts from the moment when it is in the log, committed or not, and
goes with it when it is overwritten. The majority is always that of all voters, whether a folder of them counts or not.

Before genesis nobody is named. A run is founded by all: the founder needs the vote of every region, none of which may
know a view. Else a folder that was just emptied could found the run a second time.

Source: Ongaro's dissertation (2014), section 4.1. Deviation: a region whose folder does not count still counts for the
size of the majority, so that two majorities always meet in a folder that has lost nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from diloco_node.core.ledger.roster import NO_DISK, Roster, majority_of
from diloco_node.core.types import EVICTED, EXPELLED, Entry


def expulsion_fault(disks: Mapping[str, bytes], region: str, alive: Container[str] | None = None) -> str:
    """Say why a region can't be expelled: the others could commit nothing without it. Empty if it can.

    disks: per voter the id that the log names. alive: who is there now; None: all.
    """
    quorum = majority_of(len(disks))
    voting = [
        name
        for name, disk in sorted(disks.items())
        if name != region and disk not in (NO_DISK, EXPELLED) and (alive is None or name in alive)
    ]
    if len(voting) >= quorum:
        return ""
    return f"{quorum} of {len(disks)} regions must vote; without {region} only {len(voting)} can: {', '.join(voting)}"


class DiskView:
    """The members that the log names, and the folder of each.

    Args:
        voters: the regions that found the run.
        base: the roster of earlier entries, if the log begins later than entry 1.

    Attributes:
        known_index: the entries up to here were looked at.
        roster: after the last of them.
    """

    def __init__(self, voters: Iterable[str], base: Roster | None = None) -> None:
        self._founders = Roster.of_voters(voters)
        self._changes: list[tuple[int, Roster]] = []
        self.known_index = 0
        self._base: Roster | None = None
        self.roster = self._founders
        if base:
            self.begin(base, 0)

    @property
    def has_view(self) -> bool:
        """Whether the log names folders: the run is founded."""
        return self._base is not None or bool(self._changes)

    @property
    def last_change_index(self) -> int:
        """Index of the entry that last changed the view; 0 if none in the log did."""
        return self._changes[-1][0] if self._changes else 0

    def begin(self, roster: Roster, index: int) -> None:
        """The log begins anew after this index, and this is what the entries up to there name."""
        self._base, self._changes, self.known_index = roster, [], index
        self.roster = roster

    def disk_of(self, region: str) -> bytes:
        """The id of the region's folder that counts; empty if none does."""
        disk = self.roster.disks.get(region, NO_DISK)
        return NO_DISK if disk in (EXPELLED, EVICTED) else disk

    def counts(self, region: str, disk: bytes) -> bool:
        """Whether this folder is the one of its region that counts."""
        return disk != NO_DISK and self.disk_of(region) == disk

    def follow(self, entries: Iterable[Entry]) -> None:
        """Take the entries that were added to the log."""
        for entry in entries:
            if entry.index <= self.known_index:
                continue
            self.known_index = entry.index
            roster = self.roster.after(entry)
            if roster is not self.roster:
                self._changes.append((entry.index, roster))
                self.roster = roster

    def on_truncation(self, first: int) -> None:
        """The log has forgotten its entries from `first` on."""
        self.known_index = min(self.known_index, first - 1)
        while self._changes and self._changes[-1][0] >= first:
            self._changes.pop()
        self.roster = self._changes[-1][1] if self._changes else self._base or self._founders
