"""A region's disk: what was fsynced survives, what was not may be torn.

Everything durable is a plain attribute, so that checkers can ask what the disk really holds at any moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.messages import FinishRequested
from diloco_node.core.types import DISK_ID_BYTES, NO_BASE, Entry, GenesisBody, LedgerBase, Recovered
from diloco_node.numeric import F32

PayloadKey = tuple[int, int, bytes]
"""(fragment, version, digest)."""

RottenKey = tuple[int, int, bytes] | tuple[int, int]
"""A payload's (fragment, version, digest), or a state's (fragment, version)."""


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

    def digest(self) -> bytes:
        """The codec's digest, by which regions compare."""
        return fragment_digest(self.theta, self.momentum)


@dataclass(frozen=True, slots=True)
class LedgerWrite:
    """A `PersistLedger`: hard state first, then the cut, then the entries in order."""

    term: int
    voted_for: str
    truncate_from: int
    entries: tuple[Entry, ...]
    base: LedgerBase | None = None


@dataclass(slots=True)
class Disk:
    """Disk of a region: fsynced contents, and writes on their way.

    Attributes:
        term, voted_for, base, entries: the ledger file; the entries follow the base. payloads: complete payload files.
        states: per fragment the newest state file; at version 0 perhaps Theta_0 of a genesis that never was.
        older_states: state files by fragment and version, the newest one too.
        counters: per incarnation of this region's learner (steps, tokens) trained, as persisted.
        row_marks: per shard of the data, the row up to which a contribution has named it.
        ledger_queue: ledger writes not yet fsynced, in order.
        late_writes: writes whose effect on the durable attributes comes with their fsync.
        votes: every vote that ever was durable, by term; no daemon reads it.
        id: of the folder, random; a lost one comes back with another. life: its last start.
        wishes: for the run's end, of this region's operator and script.
        keeps_vote: False plants a fault: the vote never reaches the disk.
        lost: the disk that was in its place before, and was lost with everything on it.
        rotten: payloads and states that were durable, and gone since their bytes changed: nobody is to blame.
    """

    term: int = 0
    voted_for: str = ""
    base: LedgerBase = NO_BASE
    entries: list[Entry] = field(default_factory=list)
    payloads: dict[PayloadKey, DiskPayload] = field(default_factory=dict)
    states: dict[int, DiskState] = field(default_factory=dict)
    older_states: dict[tuple[int, int], DiskState] = field(default_factory=dict)
    counters: dict[int, tuple[int, int]] = field(default_factory=dict)
    row_marks: Mapping[int, int] = field(default_factory=dict)
    ledger_queue: list[LedgerWrite] = field(default_factory=list)
    late_writes: list[Callable[[], None]] = field(default_factory=list)
    votes: dict[int, str] = field(default_factory=dict)
    id: bytes = bytes(DISK_ID_BYTES)
    life: int = 0
    wishes: tuple[FinishRequested, ...] = ()
    keeps_vote: bool = True
    lost: Disk | None = None
    rotten: set[RottenKey] = field(default_factory=set)

    @property
    def all_counters(self) -> dict[int, tuple[int, int]]:
        """Also those that were lost with the disks before."""
        return {**self.lost.all_counters, **self.counters} if self.lost is not None else self.counters

    def has_had(self, key: PayloadKey) -> bool:
        """Whether the payload is here, or was on a disk before this one that was lost."""
        return key in self.payloads or (self.lost is not None and self.lost.has_had(key))

    def missing_theta_0(self, body: GenesisBody) -> list[int]:
        """The fragments whose first parameters are not here as genesis names them, nor damaged."""
        rotten = {key[0] for key in self.rotten}
        missing = []
        for fragment, digest in enumerate(body.fragment_digests):
            state = self.states.get(fragment)
            is_other = state is not None and state.version == 0 and state.digest() != digest
            if is_other or (state is None and fragment not in rotten):
                missing.append(fragment)
        return missing

    def fsync_ledger(self) -> None:
        """The oldest ledger write becomes durable."""
        self._apply(self.ledger_queue.pop(0), records=None)

    def fsync_write(self, write: Callable[[], None]) -> None:
        """A write of a whole file (temporary name, fsync, rename) becomes durable."""
        self.late_writes.remove(write)
        write()

    def crash(self, rng: random.Random, *, is_power_cut: bool) -> None:
        """The process dies. Writes without an fsync are lost, or torn: a prefix of them may have reached the disk.

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
        """Return what a starting daemon reads."""
        return Recovered(
            term=self.term,
            voted_for=self.voted_for,
            entries=tuple(self.entries),
            states=tuple(self.states[p].version if p in self.states else -1 for p in range(fragments)),
            payloads=frozenset(self.payloads),
            disk=self.id,
            state_digests=tuple(self.states[p].digest() if p in self.states else b"" for p in range(fragments)),
            base=self.base,
            life=self.life,
        )

    def entry(self, index: int) -> Entry | None:
        """The entry at an index, if it is here and not summed up."""
        at = index - 1 - self.base.index
        return self.entries[at] if 0 <= at < len(self.entries) else None

    def holds(self, entry: Entry) -> bool:
        """Whether the entry is here, or summed up."""
        entry_here = self.entry(entry.index)
        return entry.index <= self.base.index or (entry_here is not None and entry_here.hash == entry.hash)

    def keep_state(self, fragment: int, state: DiskState) -> None:
        """A state file is there."""
        self.older_states[fragment, state.version] = state
        newest = self.states.get(fragment)
        if newest is None or newest.version <= state.version:
            self.states[fragment] = state

    def set_states_aside(self, fragment: int, version_min: int) -> None:
        """Forget the states of the fragment from this version on."""
        for key in [key for key in self.older_states if key[0] == fragment and key[1] >= version_min]:
            del self.older_states[key]
        states = [
            state
            for (number, _), state in sorted(self.older_states.items(), key=lambda at: at[0])
            if number == fragment
        ]
        self.states.pop(fragment, None)
        if states:
            self.states[fragment] = states[-1]

    def prune(self, fragment: int, keep_from_version: int) -> None:
        """Forget payloads and states of the fragment before this version, but what this region itself may need."""
        newest = self.states.get(fragment)
        keep_from = min(keep_from_version, -1 if newest is None else newest.version)
        for key in [key for key in self.payloads if key[0] == fragment and key[1] < keep_from]:
            del self.payloads[key]
        for name in [name for name in self.older_states if name[0] == fragment and name[1] < keep_from]:
            del self.older_states[name]

    def _apply(self, write: LedgerWrite, *, records: int | None) -> None:
        """Apply the first `records` records of the write, all if None."""
        records_left = 2 + len(write.entries) if records is None else records
        if records_left >= 1:
            self.term = write.term
            self.voted_for = write.voted_for if self.keeps_vote else ""
            self.votes[self.term] = self.voted_for
        if records_left >= 2:
            if write.truncate_from:
                del self.entries[write.truncate_from - 1 - self.base.index :]
            if write.base is not None:
                # A new file takes the place of the old one: all of it is there, or nothing.
                records_left = 2 + len(write.entries)
                del self.entries[: write.base.index - self.base.index]
                self.base = write.base
            self.entries.extend(write.entries[: records_left - 2])
