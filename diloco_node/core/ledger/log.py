"""The copy of the ledger in a voter's memory, and how much of it is on disk.

A log begins with a base: what stands for the entries that are summed up and gone, or nothing. Three parts follow each
other after it: entries on disk, entries whose write is under way, and (`staged`, followers only) entries
that wait for their payload. Only the first part may be acknowledged; the third is in no vote and in no file.

A disk may lose a payload whose entry it keeps. Such an entry stays in the log and in votes, for others may count on it;
but it and what follows are not acknowledged until the payload is there again. The same holds for entries that are known
to be committed: they go to the disk without their payload, so that a region far behind learns which state to fetch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.events import PersistLedger
from diloco_node.core.ledger.entries import ZERO_HASH, decode_entry, encode_entry
from diloco_node.core.types import NO_BASE, Entry, LedgerBase

STAGED_ENTRIES_MAX: Final = 256
"""A follower keeps at most so many entries waiting for payloads; the leader sends no more beyond what is durable."""

STAGED_BYTES_MAX: Final = 16 << 20
"""And at most so many encoded bytes of them; several times the longest entry, so that one always fits."""


UNPACKED_ENTRIES: Final = 256
"""The newest entries on disk are kept as objects, those before them as their bytes: a round with four members takes 0.8
kB then and not 3.3, and who needs an old one (a region that was away) needs it once."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """An entry as bytes, with what is asked for most."""

    term: int
    hash: bytes
    encoded: bytes


@dataclass(slots=True)
class _Write:
    """A write under way. `last_index` is what will be on disk and still part of the log when it is done."""

    token: int
    last_index: int


class ReplicaLog:
    """Entries base.index + 1..last_index, then the staged ones; who writes them calls `take_change` and `on_written`.

    Invariants: `durable_index <= last_index`; staged entries follow the last one without a gap; the hash of an entry
    fixes everything before it.

    Attributes:
        base: the log begins with it now. is_whole: the disk holds what it stands for.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        may_persist: Callable[[Entry], bool] = lambda _: True,
        *,
        base: LedgerBase = NO_BASE,
        has_base: Callable[[], bool] = lambda: True,
    ) -> None:
        self.base = base
        self._has_base = has_base
        self.is_whole = base.index == 0 or has_base()
        # What was acknowledged before the base came: all there is to say until its states are on the disk.
        self._floor = 0
        self._is_base_new = False
        self._entries: list[Entry | _Packed] = list(entries)
        self._packed_index = base.index
        # Entries that are in the log without their payload.
        self._lost = [entry for entry in entries if not may_persist(entry)]
        self._staged: list[Entry] = []
        self._staged_bytes: list[int] = []
        self._durable_index = self.last_index
        # What the disk has been asked for so far, and from where it must forget before the next append.
        self._requested_index = self.last_index
        self._truncate_from = 0
        self._writes: deque[_Write] = deque()
        self._pack()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries after the base that are on disk or on their way there."""
        return self.slice(self.base.index + 1, self.last_index)

    @property
    def staged(self) -> tuple[Entry, ...]:
        """Entries that wait for their own payload or that of one before them."""
        return tuple(self._staged)

    @property
    def last_index(self) -> int:
        """Index of the last entry, staged ones not counted; the base's if there is none."""
        return self.base.index + len(self._entries)

    @property
    def last_term(self) -> int:
        """Term of that entry; the base's if there is none."""
        return self._entries[-1].term if self._entries else self.base.term

    @property
    def known_index(self) -> int:
        """Index of the last entry, staged ones counted."""
        return self.last_index + len(self._staged)

    @property
    def durable_index(self) -> int:
        """Up to here the log is on disk, payloads too."""
        if not self.is_whole:
            return min(self._durable_index, self._floor)
        return min(self._durable_index, self._lost[0].index - 1) if self._lost else self._durable_index

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Entries that may lack a payload: those in the log that do (`find_lost`), and the staged ones."""
        return (*self._lost, *self._staged)

    @property
    def is_dirty(self) -> bool:
        """The disk has not been asked yet for what the log says."""
        return self._is_base_new or self._requested_index != self.last_index or self._truncate_from > 0

    def entry(self, index: int) -> Entry:
        """The entry, staged or not. Raises IndexError outside base.index + 1..known_index."""
        return _whole(self._at(index))

    def _at(self, index: int) -> Entry | _Packed:
        if not self.base.index < index <= self.known_index:
            raise IndexError(f"entry {index} of {self.base.index + 1}..{self.known_index}")
        if index <= self.last_index:
            return self._entries[index - 1 - self.base.index]
        return self._staged[index - 1 - self.last_index]

    def hash_at(self, index: int) -> bytes:
        """Its hash, also of the base; ZERO_HASH for index 0."""
        if index == 0:
            return ZERO_HASH
        return self.base.hash if index == self.base.index else self._at(index).hash

    def term_at(self, index: int) -> int:
        """Its term, also of the base; 0 for index 0."""
        if index == 0:
            return 0
        return self.base.term if index == self.base.index else self._at(index).term

    def difference(self, index: int, entry_hash: bytes) -> str:
        """Both hashes of an entry, in words."""
        own_hash = self.hash_at(index).hex()[:16] if self.base.index <= index <= self.known_index else "none"
        return f"another entry {index}, {entry_hash.hex()[:16]} instead of {own_hash}"

    def slice(self, first: int, last: int) -> tuple[Entry, ...]:
        """Entries first..last, both counted, staged ones not."""
        start, stop = first - 1 - self.base.index, last - self.base.index
        return tuple(_whole(entry) for entry in self._entries[max(0, start) : max(0, stop)])

    def has(self, index: int, entry_hash: bytes) -> bool:
        """Whether the log, staged entries counted, has exactly this entry there (or its base, or the empty beginning).

        Nothing is known any more of entries before the base.
        """
        is_known = index == 0 or self.base.index <= index <= self.known_index
        return is_known and self.hash_at(index) == entry_hash

    def contradicts(self, index: int, entry_hash: bytes) -> bool:
        """Whether the log has, or had, another entry there or none, as far as it can be told: what the base stands for
        contradicts nothing."""
        return not 0 < index < self.base.index and not self.has(index, entry_hash)

    def first_conflict(self, entries: Sequence[Entry]) -> int:
        """Index of the first entry that the log has otherwise; 0 if none."""
        for entry in entries:
            if entry.index > self.known_index:
                return 0
            if entry.index > self.base.index and self.hash_at(entry.index) != entry.hash:
                return entry.index
        return 0

    def search_hint(self, previous_index: int) -> int:
        """Where the leader should look for the common part after `previous_index` did not match.

        The end of this log if it is shorter, else the entry before the term that conflicts (the whole of that term may
        be unknown to the leader, so one step back for each term is enough). Never before the base: that is committed.
        """
        if previous_index > self.known_index:
            return self.known_index
        index = max(previous_index, self.base.index)
        term = self.term_at(index)
        while index > self.base.index and self.term_at(index) == term:
            index -= 1
        return index

    def append(self, entry: Entry) -> None:
        """Add the next entry; its payload must be on disk. The staged ones must be gone: only leaders append."""
        assert entry.index == self.known_index + 1, (entry.index, self.known_index)
        assert not self._staged, "only a leader appends, and it has nothing staged"
        self._entries.append(entry)

    def truncate(self, first: int) -> None:
        """Forget the entries from `first` on."""
        assert first > self.base.index, (first, self.base.index)
        count = max(0, first - 1 - self.last_index)
        del self._staged[count:]
        del self._staged_bytes[count:]
        if first > self.last_index:
            return
        del self._entries[first - 1 - self.base.index :]
        self._lost = [entry for entry in self._lost if entry.index < first]
        self._packed_index = min(self._packed_index, first - 1)
        if first <= self._requested_index:
            self._truncate_from = min(self._truncate_from, first) if self._truncate_from else first
            self._requested_index = first - 1
        # A write under way may still put the forgotten entries on disk, but they are not part of this log any more.
        self._durable_index = min(self._durable_index, first - 1)
        for write in self._writes:
            write.last_index = min(write.last_index, first - 1)

    def stage(self, entries: Sequence[Entry]) -> None:
        """Take what follows of the entries (no conflict left) until the limits are reached; the rest is dropped."""
        staged_bytes = sum(self._staged_bytes)
        for entry in entries:
            if entry.index <= self.known_index:
                continue
            assert entry.previous == self.hash_at(self.known_index), entry.index
            entry_bytes = len(encode_entry(entry))
            if len(self._staged) >= STAGED_ENTRIES_MAX or staged_bytes + entry_bytes > STAGED_BYTES_MAX:
                return
            self._staged.append(entry)
            self._staged_bytes.append(entry_bytes)
            staged_bytes += entry_bytes

    def compact(self, base: LedgerBase) -> None:
        """Begin with this from now on: the entries up to its index, all acknowledged, are forgotten."""
        assert self.base.index < base.index <= self.durable_index, (base.index, self.durable_index)
        assert self.hash_at(base.index) == base.hash, base.index
        self._begin_with(base)

    def install(self, base: LedgerBase, *, committed_index: int) -> None:
        """Begin with the leader's base, which is ahead of what is committed here.

        Entries behind it stay if they are the leader's too. No more is acknowledged than before, until the disk holds
        the states that the base stands for.

        Args:
            committed_index: up to here the disk holds what is committed.
        """
        self._floor = self.durable_index
        if base.index <= self.last_index and self.has(base.index, base.hash):
            self._lost = [entry for entry in self._lost if entry.index > base.index]
            self._begin_with(base)
        else:
            # What is on disk here behind the committed entries is another log's: it does not count for this one.
            self._floor = min(self._floor, committed_index)
            self.drop_staged()
            self._lost.clear()
            self._entries.clear()
            self._truncate_from = min(self._truncate_from or self.base.index + 1, self.base.index + 1)
            self._durable_index = min(self._durable_index, self._floor)
            for write in self._writes:
                write.last_index = min(write.last_index, self._floor)
            self.base, self._is_base_new = base, True
            self._packed_index = self._requested_index = base.index
        self.is_whole = False

    def _begin_with(self, base: LedgerBase) -> None:
        del self._entries[: base.index - self.base.index]
        self.base, self._is_base_new = base, True
        self._packed_index = max(self._packed_index, base.index)

    def drop_staged(self) -> None:
        """Forget all staged entries; the leader that sent them is gone."""
        self._staged.clear()
        self._staged_bytes.clear()

    def find_lost(self, may_persist: Callable[[Entry], bool]) -> None:
        """Look again of which entries of the log, and of the base, the disk lacks what they name."""
        self.is_whole = self.is_whole or self._has_base()
        self._lost = [entry for entry in self._lost if not may_persist(entry)]

    def promote(self, may_persist: Callable[[Entry], bool], *, committed_index: int = 0) -> None:
        """Move staged entries to the log, in order, up to the first that may not be persisted yet.

        Committed ones go there even without their payload.
        """
        count = 0
        for entry in self._staged:
            if not may_persist(entry):
                if entry.index > committed_index:
                    break
                self._lost.append(entry)
            count += 1
        self._entries += self._staged[:count]
        del self._staged[:count]
        del self._staged_bytes[:count]

    def take_change(self, token: int, term: int, voted_for: str) -> PersistLedger:
        """Return the work for the disk now, so that it follows the log; `on_written(token)` says that it is done."""
        entries = self.slice(self._requested_index + 1, self.last_index)
        base = self.base if self._is_base_new else None
        change = PersistLedger(token, term, voted_for, self._truncate_from, entries, base)
        self._requested_index = self.last_index
        self._truncate_from = 0
        self._is_base_new = False
        self._writes.append(_Write(token, self.last_index))
        return change

    def on_written(self, token: int) -> None:
        """The writes up to this token are on disk."""
        while self._writes and self._writes[0].token <= token:
            self._durable_index = self._writes.popleft().last_index
        self._pack()

    def _pack(self) -> None:
        """Keep old entries that are on disk as bytes; those whose payload it has lost are at hand in `_lost`."""
        for index in range(self._packed_index, min(self._durable_index, self.last_index) - UNPACKED_ENTRIES):
            entry = self.entry(index + 1)
            self._entries[index - self.base.index] = _Packed(entry.term, entry.hash, encode_entry(entry))
            self._packed_index = index + 1


def _whole(entry: Entry | _Packed) -> Entry:
    return decode_entry(entry.encoded) if isinstance(entry, _Packed) else entry
