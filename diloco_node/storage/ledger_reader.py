"""Reading ledgers without changing them: beside the daemon that writes, and back to what was summed up.

In a region with `payload_archive` the old file stays when the ledger begins anew behind a sum. It is called
`ledger-<index of its base>.log`, and is a ledger like any other. So the whole run can be read again, file by file.
Where that name is taken, as after a folder had to begin again, it is `ledger-<index of its base>-1.log`, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diloco_node.core.ledger.summary import summary_of
from diloco_node.core.recovery.replay_plan import find_genesis
from diloco_node.core.types import NO_BASE, Entry, GenesisBody, LedgerBase
from diloco_node.errors import StorageError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage.durable import disk_errors
from diloco_node.storage.ledger_files import LedgerFile


class LedgerReader:
    """Reads one ledger again and again, and decodes nothing twice. base, entries: as of the last `read`."""

    def __init__(self, folder: Path, name: str = LEDGER_NAME) -> None:
        self._folder = folder
        self._name = name
        self._encoded: list[bytes] = []
        self._status: tuple[int, ...] = ()
        self.base = NO_BASE
        self.entries: tuple[Entry, ...] = ()

    def read(self) -> tuple[Entry, ...]:
        """Entries that are new or other ones than at the call before. Raises StorageError."""
        path = self._folder / self._name
        with disk_errors("read", path):
            stat = path.stat()
        status = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if status == self._status:
            return ()
        ledger = LedgerFile(self._folder, self._name)
        bodies = ledger.read()
        missing = ledger.base.index - self.base.index
        is_same_run = 0 <= missing <= len(self.entries)
        before = list(zip(self._encoded, self.entries, strict=True))[missing:] if is_same_run else []
        entries: list[Entry] = []
        for now, (then, entry) in zip(bodies, before, strict=False):
            if now != then:
                break
            entries.append(entry)
        index, previous = (entries[-1].index, entries[-1].hash) if entries else (ledger.base.index, ledger.base.hash)
        new = ledger.decode(bodies[len(entries) :], previous_index=index, previous_hash=previous)
        self._status, self._encoded, self.base, self.entries = status, bodies, ledger.base, (*entries, *new)
        return new


def read_whole_ledger(folder: Path, fragments: int) -> tuple[LedgerBase, tuple[Entry, ...]]:
    """The base, and all entries after it: those of the ledger, and what is kept before it. Raises StorageError: a
    ledger is damaged or missing, or a kept one is of another run."""
    reader = LedgerReader(folder)
    reader.read()
    base, entries = reader.base, reader.entries
    for path in sorted(folder.glob("ledger-*.log"), reverse=True):
        earlier = LedgerReader(folder, path.name)
        earlier.read()
        if not earlier.base.index < base.index <= earlier.base.index + len(earlier.entries):
            continue  # of an attempt to sum up that did not get far, or before a gap
        older = earlier.entries[: base.index - earlier.base.index]
        if older[-1].hash == base.hash:
            base, entries = earlier.base, (*older, *entries)
        elif _genesis(earlier.base, earlier.entries, fragments) != _genesis(base, entries, fragments):
            raise StorageError(
                f"{path} has another entry {base.index} than the ledger goes on from, and another genesis: it is of "
                "another run; move it away"
            )
        # Else its end was never committed, and others came in its place, which this region never had: a gap.
    return base, entries


def _genesis(base: LedgerBase, entries: Sequence[Entry], fragments: int) -> GenesisBody | None:
    return find_genesis(summary_of(base, fragments=fragments), entries)
