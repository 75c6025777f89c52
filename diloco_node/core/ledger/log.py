"""One voter's copy of the ledger in memory, and how much of it is on disk.

Three parts follow each other: entries on disk, entries whose write is under way, and (`staged`, followers only) entries
that wait for their payload. Only the first part may be acknowledged; the third is in no vote and in no file.

A disk may lose a payload whose entry it keeps. Such an entry stays in the log and in votes, for others may count on it;
but it and what follows are not acknowledged until the payload is there again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from diloco_node.core.ledger.entries import ZERO_HASH, decode_entry, encode_entry
from diloco_node.core.types import Entry

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


@dataclass(frozen=True, slots=True)
class LogChange:
    """What the disk must do to follow the log: forget from `truncate_from` on (0: nothing), then append."""

    truncate_from: int
    entries: tuple[Entry, ...]


class ReplicaLog:
    """Entries 1..last_index, then the staged ones; who writes them calls `take_change` and `written`.

    Invariants: `durable_index <= last_index`; staged entries follow the last one without a gap; the hash of an entry
    fixes everything before it.

    Args:
        entries: what the disk held.
        may_persist: whether an entry's payload is on the disk.
    """

    def __init__(self, entries: Sequence[Entry], may_persist: Callable[[Entry], bool] = lambda _: True) -> None:
        self._entries: list[Entry | _Packed] = list(entries)
        self._packed_index = 0
        # Of what the disk held: entries whose payload it has lost. None is added later, so nobody looks at the others.
        self._lost = [entry for entry in entries if not may_persist(entry)]
        self._staged: list[Entry] = []
        self._staged_bytes: list[int] = []
        self._durable_index = len(self._entries)
        # What the disk has been asked for so far, and from where it must forget before the next append.
        self._requested_index = len(self._entries)
        self._truncate_from = 0
        self._writes: deque[_Write] = deque()
        self._pack()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries that are on disk or on their way there, from index 1."""
        return self.slice(1, len(self._entries))

    @property
    def staged(self) -> tuple[Entry, ...]:
        """Entries that wait for their own payload or that of one before them."""
        return tuple(self._staged)

    @property
    def last_index(self) -> int:
        """Index of the last entry, staged ones not counted; 0 for an empty log."""
        return len(self._entries)

    @property
    def last_term(self) -> int:
        """Term of that entry; 0 for an empty log."""
        return self._entries[-1].term if self._entries else 0

    @property
    def known_index(self) -> int:
        """Index of the last entry, staged ones counted."""
        return len(self._entries) + len(self._staged)

    @property
    def durable_index(self) -> int:
        """Up to here the log is on disk, payloads too."""
        return min(self._durable_index, self._lost[0].index - 1) if self._lost else self._durable_index

    @property
    def waiting(self) -> tuple[Entry, ...]:
        """Entries that may lack a payload: those that the disk has lost (as `find_lost` last found), and all that are
        staged."""
        return (*self._lost, *self._staged)

    @property
    def is_dirty(self) -> bool:
        """The disk has not been asked yet for what the log says."""
        return self._requested_index != len(self._entries) or self._truncate_from > 0

    def entry(self, index: int) -> Entry:
        """The entry, staged or not. Raises IndexError outside 1..known_index."""
        return _whole(self._at(index))

    def _at(self, index: int) -> Entry | _Packed:
        if not 1 <= index <= self.known_index:
            raise IndexError(f"entry {index} of 1..{self.known_index}")
        if index <= len(self._entries):
            return self._entries[index - 1]
        return self._staged[index - 1 - len(self._entries)]

    def hash_at(self, index: int) -> bytes:
        """Its hash; ZERO_HASH for index 0."""
        return self._at(index).hash if index else ZERO_HASH

    def term_at(self, index: int) -> int:
        """Its term; 0 for index 0."""
        return self._at(index).term if index else 0

    def slice(self, first: int, last: int) -> tuple[Entry, ...]:
        """Entries first..last, both counted, staged ones not."""
        return tuple(_whole(one) for one in self._entries[first - 1 : last])

    def has(self, index: int, entry_hash: bytes) -> bool:
        """Whether the log, staged entries counted, has exactly this entry there (index 0: the empty beginning)."""
        return index <= self.known_index and self.hash_at(index) == entry_hash

    def first_conflict(self, entries: Sequence[Entry]) -> int:
        """Index of the first entry that the log has otherwise; 0 if none."""
        for entry in entries:
            if entry.index > self.known_index:
                return 0
            if self.hash_at(entry.index) != entry.hash:
                return entry.index
        return 0

    def search_hint(self, previous_index: int) -> int:
        """Where the leader should look for the common part after `previous_index` did not match.

        The end of this log if it is shorter, else the entry before the term that conflicts (the whole of that term may
        be unknown to the leader, so one step back for each term is enough).
        """
        if previous_index > self.known_index:
            return self.known_index
        index = previous_index
        term = self.term_at(index)
        while index > 0 and self.term_at(index) == term:
            index -= 1
        return index

    def append(self, entry: Entry) -> None:
        """Add the next entry; its payload must be on disk. The staged ones must be gone: only leaders append."""
        assert entry.index == self.known_index + 1, (entry.index, self.known_index)
        assert not self._staged, "only a leader appends, and it has nothing staged"
        self._entries.append(entry)

    def truncate(self, first: int) -> None:
        """Forget the entries from `first` on."""
        assert first >= 1, first
        kept = max(0, first - 1 - len(self._entries))
        del self._staged[kept:]
        del self._staged_bytes[kept:]
        if first > len(self._entries):
            return
        del self._entries[first - 1 :]
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
            is_full = len(self._staged) >= STAGED_ENTRIES_MAX or staged_bytes + entry_bytes > STAGED_BYTES_MAX
            if is_full:
                return
            self._staged.append(entry)
            self._staged_bytes.append(entry_bytes)
            staged_bytes += entry_bytes

    def drop_staged(self) -> None:
        """Forget all staged entries; the leader that sent them is gone."""
        self._staged.clear()
        self._staged_bytes.clear()

    def find_lost(self, may_persist: Callable[[Entry], bool]) -> None:
        """Look again for which entries, of those that the disk held at start, it lacks the payload."""
        self._lost = [entry for entry in self._lost if not may_persist(entry)]

    def promote(self, may_persist: Callable[[Entry], bool]) -> None:
        """Move staged entries to the log, in order, up to the first that may not be persisted yet."""
        count = 0
        while count < len(self._staged) and may_persist(self._staged[count]):
            count += 1
        self._entries += self._staged[:count]
        del self._staged[:count]
        del self._staged_bytes[:count]

    def take_change(self, token: int) -> LogChange:
        """What the disk has to do now; `written(token)` says that it has."""
        change = LogChange(self._truncate_from, self.slice(self._requested_index + 1, len(self._entries)))
        self._requested_index = len(self._entries)
        self._truncate_from = 0
        self._writes.append(_Write(token, len(self._entries)))
        return change

    def written(self, token: int) -> None:
        """The writes up to this token are on disk."""
        while self._writes and self._writes[0].token <= token:
            self._durable_index = self._writes.popleft().last_index
        self._pack()

    def _pack(self) -> None:
        """Keep old entries that are on disk as bytes; those whose payload it has lost are at hand in `_lost`."""
        for index in range(self._packed_index, min(self._durable_index, len(self._entries)) - UNPACKED_ENTRIES):
            one = self.entry(index + 1)
            self._entries[index] = _Packed(one.term, one.hash, encode_entry(one))
            self._packed_index = index + 1


def _whole(one: Entry | _Packed) -> Entry:
    return decode_entry(one.encoded) if isinstance(one, _Packed) else one
