"""A region's disk: what was fsynced survives, what was not may be torn.

Everything durable is a plain attribute, so that checkers can ask what the disk really holds at any moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_node.core.types import DISK_ID_BYTES, Entry, Recovered
from diloco_node.numeric import F32

PayloadKey = tuple[int, int, bytes]
"""(fragment, version, digest)."""


@dataclass(frozen=True, slots=True)
class DiskPayload:
    """A merged payload on disk: encoded bytes in block order, and the block ranges of its stripes."""

    ranges: tuple[tuple[int, int], ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class DiskState:
    """Parameters and momentum of a fragment at a version, each shape (n,), float32."""

    version: int
    theta: F32
    momentum: F32


@dataclass(frozen=True, slots=True)
class LedgerWrite:
    """One `PersistLedger`: hard state first, then the cut, then the entries one by one."""

    term: int
    voted_for: str
    truncate_from: int
    entries: tuple[Entry, ...]


@dataclass(slots=True)
class Disk:
    """What is fsynced in one region, and what is on its way.

    Attributes:
        term, voted_for, entries: the ledger file.
        payloads: complete payload files.
        states: per fragment the newest state file; at version 0 perhaps Theta_0 of a genesis that never was.
        counters: per incarnation of this region's learner (steps, tokens) trained, as persisted.
        ledger_queue: ledger writes not yet fsynced, in order.
        late_writes: writes whose effect on the durable attributes comes with their fsync.
        votes: every vote that ever was durable, by term; no daemon reads it.
        id: of the folder, random; a lost one comes back with another.
        keeps_vote: False plants a fault: the vote never reaches the disk.
    """

    term: int = 0
    voted_for: str = ""
    entries: list[Entry] = field(default_factory=list)
    payloads: dict[PayloadKey, DiskPayload] = field(default_factory=dict)
    states: dict[int, DiskState] = field(default_factory=dict)
    counters: dict[int, tuple[int, int]] = field(default_factory=dict)
    ledger_queue: list[LedgerWrite] = field(default_factory=list)
    late_writes: list[Callable[[], None]] = field(default_factory=list)
    votes: dict[int, str] = field(default_factory=dict)
    id: bytes = bytes(DISK_ID_BYTES)
    keeps_vote: bool = True

    def fsync_ledger(self) -> None:
        """The oldest ledger write becomes durable."""
        self._apply(self.ledger_queue.pop(0), records=None)

    def fsync_write(self, write: Callable[[], None]) -> None:
        """A write of a whole file (temporary name, fsync, rename) becomes durable."""
        self.late_writes.remove(write)
        write()

    def crash(self, rng: random.Random, *, is_power_cut: bool) -> None:
        """The process dies. What was not fsynced is lost, or torn: a prefix of it may have reached the disk.

        After a power cut mostly nothing of it is there; after a killed process mostly everything, for the kernel
        lives on. Whole files are there or not (they are renamed when they are complete).
        """
        chance = 0.2 if is_power_cut else 0.8
        while self.ledger_queue:
            write = self.ledger_queue.pop(0)
            if rng.random() < chance:
                self._apply(write, records=None)
                continue
            self._apply(write, records=rng.randint(0, 2 + len(write.entries)))
            self.ledger_queue.clear()
        for write_file in self.late_writes:
            if rng.random() < chance / 2:
                write_file()
        self.late_writes.clear()

    def recovered(self, fragments: int) -> Recovered:
        """What a starting daemon finds."""
        return Recovered(
            term=self.term,
            voted_for=self.voted_for,
            entries=tuple(self.entries),
            states=tuple(self.states[p].version if p in self.states else -1 for p in range(fragments)),
            payloads=frozenset(self.payloads),
            disk=self.id,
        )

    def prune(self, fragment: int, keep_versions: int) -> None:
        """Forget payloads of the fragment that are older than its state on disk by more than `keep_versions`."""
        oldest = self.states[fragment].version - keep_versions
        for key in [key for key in self.payloads if key[0] == fragment and key[1] <= oldest]:
            del self.payloads[key]

    def _apply(self, write: LedgerWrite, *, records: int | None) -> None:
        """Apply the first `records` records of the write, all if None."""
        left = 2 + len(write.entries) if records is None else records
        if left >= 1:
            self.term = write.term
            self.voted_for = write.voted_for if self.keeps_vote else ""
            self.votes[self.term] = self.voted_for
        if left >= 2:
            if write.truncate_from:
                del self.entries[write.truncate_from - 1 :]
            self.entries.extend(write.entries[: left - 2])
