"""What vote, ledger and the folder's id do to the disk, and what they promise meanwhile. See `tests.kit.power_cut`."""

import errno
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.types import NO_BASE, DiscardedBody, Entry, LeaderBody, LedgerBase, Recovered
from diloco_node.errors import LedgerGone, StorageError
from diloco_node.storage.ledger_files import LEDGER_END_NAME, LEDGER_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from tests.kit.power_cut import RecordedDisk

FRAGMENTS: Final = 2


def chain(count: int, *, term: int = 1, after: tuple[Entry, ...] = (), name: str = "a") -> tuple[Entry, ...]:
    """`after`, and `count` entries more of about half a kilobyte: twelve of them take more than a page."""
    entries = list(after)
    for _ in range(count):
        previous = entries[-1].hash if entries else ZERO_HASH
        body = DiscardedBody(name, 1, 0, 0, 1 + len(entries), 1, f"{len(entries):03d} " * 100)
        entries.append(seal(len(entries) + 1, term, previous, body))
    return tuple(entries)


def region_folder(root: Path) -> Path:
    return root / "state" / "region"


Log = tuple[int, str, LedgerBase, tuple[Entry, ...]]


@dataclass(frozen=True)
class LogNote:
    """What was answered last, what may be there instead, and the folder's id once it was told."""

    told: Log = (0, "", NO_BASE, ())
    maybe: tuple[Log, ...] = ()
    disk: bytes = b""
    lost_disk: bytes = b""


def log_of(recovered: Recovered) -> Log:
    return recovered.term, recovered.voted_for, recovered.base, recovered.entries


class LogScenario:
    """Votes, entries, truncations and sums, with restarts in between, in a folder that keeps everything."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        disk.note = LogNote()
        entries = chain(16)
        other = chain(4, term=3, after=entries[:14], name="b")
        store = self._load(root, disk)
        self._persist(disk, store, 1, "a", 0, entries[:12])
        self._persist(disk, store, 1, "a", 0, entries[12:])
        self._persist(disk, store, 2, "", 0, ())
        self._persist(disk, store, 3, "b", 15, other[14:16])
        base = LedgerBase(13, 1, entries[12].hash, bytes(5000))
        self._persist(disk, store, 3, "b", 0, other[16:17], base)
        self._persist(disk, store, 3, "b", 0, other[17:])
        store.close()
        store = self._load(root, disk)
        self._persist(disk, store, 3, "b", 0, chain(12, term=3, after=other)[18:])
        store.close()

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        store = self._load(root, disk)
        store.close()

    def _load(self, root: Path, disk: RecordedDisk) -> RegionStore:
        store = RegionStore(region_folder(root), is_archive=True)
        recovered = store.load(FRAGMENTS)
        note = disk.note
        assert log_of(recovered) in (note.told, *note.maybe)
        disk.note = LogNote(log_of(recovered), (), recovered.disk)
        return store

    def _persist(
        self,
        disk: RecordedDisk,
        store: RegionStore,
        term: int,
        voted_for: str,
        truncate_from: int,
        entries: tuple[Entry, ...],
        base: LedgerBase | None = None,
    ) -> None:
        before = disk.note.told
        kept = before[3]
        if truncate_from:
            kept = kept[: truncate_from - 1 - before[2].index]
        after_base = base or before[2]
        new = (*kept[after_base.index - before[2].index :], *entries)
        told = (term, voted_for, after_base, new)
        disk.note = replace(disk.note, maybe=((term, voted_for, *before[2:]), told))
        store.persist(term, voted_for, truncate_from, entries, base)
        disk.note = replace(disk.note, told=told, maybe=())

    def check(self, root: Path, note: LogNote) -> None:
        store = RegionStore(region_folder(root))
        try:
            recovered = store.load(FRAGMENTS)
            assert store.lost == ""
            assert store.set_aside == []
            assert log_of(recovered) in (note.told, *note.maybe)
            assert not note.disk or recovered.disk == note.disk
            base, entries = read_whole_ledger(region_folder(root), FRAGMENTS)
            assert (base, entries[recovered.base.index :]) == (NO_BASE, recovered.entries)
            last = recovered.entries[-1] if recovered.entries else recovered.base
            more = seal(last.index + 1, 9, last.hash, LeaderBody("more"))
            store.persist(9, "c", 0, (more,))
        finally:
            store.close()
        store = RegionStore(region_folder(root))
        try:
            again = store.load(FRAGMENTS)
            assert (again.disk, again.entries) == (recovered.disk, (*recovered.entries, more))
        finally:
            store.close()


class DamagedLogScenario(LogScenario):
    """A folder whose ledger is damaged begins again; its old id must never come back."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        store = RegionStore(region_folder(root))
        old = store.load(FRAGMENTS).disk
        entries = chain(14)
        store.persist(1, "a", 0, entries[:12])
        store.persist(1, "a", 0, entries[12:])
        store.close()
        path = region_folder(root) / LEDGER_NAME
        data = path.read_bytes()
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        disk.settle()
        disk.note = LogNote(lost_disk=old)
        store = self._load(root, disk)
        self._persist(disk, store, 2, "b", 0, ())
        self._persist(disk, store, 2, "b", 0, chain(2, term=2))
        store.close()

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        if disk.note is not None:  # else it was killed before there was any damage
            super().restart(root, disk)

    def _load(self, root: Path, disk: RecordedDisk) -> RegionStore:
        lost_disk = disk.note.lost_disk
        store = super()._load(root, disk)
        disk.note = replace(disk.note, lost_disk=lost_disk)
        return store

    def check(self, root: Path, note: LogNote) -> None:
        store = RegionStore(region_folder(root))
        recovered = store.load(FRAGMENTS)
        store.close()
        assert recovered.disk != note.lost_disk
        assert log_of(recovered) in (note.told, *note.maybe)
        if note.disk:
            assert (store.lost, recovered.disk) == ("", note.disk)
            super().check(root, note)


class GoneLogScenario(LogScenario):
    """A sync fails, and what was on the disk can't be read back: the id goes with it."""

    def run(self, root: Path, disk: RecordedDisk) -> None:
        disk.note = LogNote()
        entries = chain(14)
        store = self._load(root, disk)
        self._persist(disk, store, 1, "a", 0, entries[:6])
        end = (region_folder(root) / LEDGER_NAME).stat().st_size
        self._persist(disk, store, 1, "a", 0, entries[6:12])
        (region_folder(root) / LEDGER_END_NAME).unlink()
        disk.settle()

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "lost")

        disk.note = replace(disk.note, maybe=((1, "a", NO_BASE, entries),))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(StorageError):
                store.persist(1, "a", 0, entries[12:])
        os.truncate(region_folder(root) / LEDGER_NAME, end)
        with pytest.raises(LedgerGone):
            store.persist(1, "a", 0, entries[12:])
        disk.settle_file(region_folder(root) / LEDGER_NAME)
        disk.note = replace(disk.note, lost_disk=disk.note.disk)
        store.close()

    def restart(self, root: Path, disk: RecordedDisk) -> None:
        """Killed is not what this one is about."""

    def check(self, root: Path, note: LogNote) -> None:
        store = RegionStore(region_folder(root))
        recovered = store.load(FRAGMENTS)
        store.close()
        if note.lost_disk:
            assert recovered.disk != note.lost_disk
