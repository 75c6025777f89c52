"""Ages of the others' state folders: an older copy of a folder (a snapshot, a backup, a cloned machine) is found out.

Each start of a daemon counts up in its folder, and each daemon tells what its log holds. A folder that comes with a
start that is known of another life, or with a log that ends before what it told to be committed there, is an older
copy. Its votes and acknowledgements count no more, as those of a folder that was lost, until the leader has had it
named anew (`core.membership.replacement`).

This is in memory only: a region that restarted since has forgotten it, and the others remember. A copy of the last
life that lacks nothing committed is not found out; it may lack a vote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.core.ledger.disks import DiskView, expulsion_fault
from diloco_node.core.ledger.roster import NO_DISK
from diloco_node.core.types import FolderLife

LIFE_BITS: Final = 32
"""Random bits of a life, below the count of starts."""


def next_life(life: int, chance: int) -> int:
    """Return the next life of a folder: one more start.

    chance: LIFE_BITS random bits, which tell two copies of a folder apart that were started as often.
    """
    return (starts_of(life) + 1) << LIFE_BITS | chance


def starts_of(life: int) -> int:
    """Return how often the folder was started."""
    return life >> LIFE_BITS


@dataclass(slots=True)
class _Memory:
    """The folder of a region since the ledger named it.

    Attributes:
        naming: so many folders of the region the ledger had named. folder: its newest life.
        index: the last committed entry that it surely held in that life.
        acknowledged_index: also in a later life, perhaps: that one may acknowledge before it tells that it began.
        is_heard: the life was told since the link last changed, so what came over it is this life's.
        fault: why it is an older copy; empty if it is none.
    """

    naming: int
    folder: FolderLife
    index: int
    acknowledged_index: int = 0
    is_heard: bool = True
    fault: str = ""

    def settle(self) -> None:
        """Whatever was acknowledged up to now, this life did."""
        self.index = max(self.index, self.acknowledged_index)


class FolderLives:
    """Ages of the others' state folders. disks: the folders that count."""

    def __init__(self, disks: DiskView) -> None:
        self._disks = disks
        self._memories: dict[str, _Memory] = {}

    def hear(self, peer: str, folder: FolderLife) -> str:
        """Take what a region tells of its folder. Return why it is an older copy; empty if that is no news, or it is
        none."""
        memory = self._memory(peer)
        if memory is None or memory.folder.disk != folder.disk:
            if self._disks.counts(peer, folder.disk):
                self._memories[peer] = _Memory(self._naming(peer), folder, folder.commit_index)
            return ""
        if memory.fault:
            return ""
        if folder.life == memory.folder.life:
            memory.settle()
        else:
            memory.fault = _difference(memory, folder)
        memory.folder, memory.index, memory.is_heard = folder, max(memory.index, folder.commit_index), True
        return memory.fault

    def hold(self, peer: str, index: int) -> None:
        """Take that a region has acknowledged all entries up to this one, which are committed."""
        if (memory := self._memories.get(peer)) is not None:
            memory.acknowledged_index = max(memory.acknowledged_index, index)

    def link_changed(self, peer: str) -> None:
        """Take that the link with a region was lost or made: another process may be there from now on."""
        if (memory := self._memories.get(peer)) is not None and memory.is_heard:
            memory.settle()
            memory.is_heard = False

    def is_older(self, peer: str) -> bool:
        """Whether the folder that the ledger names is an older copy, and the others can do without it.

        Where they can't (one of two regions), it counts all the same: nothing is committed that the others lack.
        """
        memory = self._memory(peer)
        return memory is not None and bool(memory.fault) and not expulsion_fault(self._disks.roster.voter_disks, peer)

    def is_renewed(self, peer: str) -> bool:
        """Whether the ledger has named the folder anew, and nothing was heard of it since."""
        return peer in self._memories and self._disks.disk_of(peer) != NO_DISK and self._memory(peer) is None

    def _memory(self, peer: str) -> _Memory | None:
        """Return what is known of the folder that counts: one that was named anew since is another one."""
        memory = self._memories.get(peer)
        is_named = memory is not None and self._disks.counts(peer, memory.folder.disk)
        return memory if memory and is_named and memory.naming == self._naming(peer) else None

    def _naming(self, peer: str) -> int:
        """Count the folders of a region that the ledger has named so far."""
        return self._disks.roster.memberships[peer].folders


def _difference(memory: _Memory, folder: FolderLife) -> str:
    starts, starts_before = starts_of(folder.life), starts_of(memory.folder.life)
    if starts <= starts_before:
        return f"it comes with start {starts}, and was already at start {starts_before}"
    if folder.end_index < memory.index:
        return f"its ledger ends at entry {folder.end_index}, and it had committed up to entry {memory.index}"
    return ""
