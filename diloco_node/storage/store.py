"""A region's state folder: term and vote, ledger, payloads, states. Files that it has reported as written survive a
power cut.

::

    lock          held while a daemon runs on the folder
    disk.id       random id of the folder        (disk_id)
    vote.bin      term and vote                  (ledger_files)
    ledger.log    entries                        (ledger_files)
    ledger-*.log  earlier ones, in an archive    (ledger_reader)
    payloads/     merged outer gradients         (tensor_files)
    state/        parameters and momentum        (tensor_files)
    *.damaged     files whose checksum was wrong, set aside for a person to look at

A folder whose ledger or vote is damaged or gone sets aside what is left of them, and begins again with another id. The
ledger of the others tells it what it lacks, and counts it again when it has caught up. A damaged state falls back to
its predecessor, a damaged payload counts as missing: both can be had from a peer, and `Recovered` says what is there.
A file that can't be read for another reason (a wrong user, too many open files) is an error, and stays what it is.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import numpy as np

from diloco_node.atomic_file import sync_folder
from diloco_node.core.types import Entry, LedgerBase, Recovered
from diloco_node.errors import DiskRefused, LedgerGone, LedgerLost, StorageError
from diloco_node.file_lock import lock_file
from diloco_node.numeric import F32, U8
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import tensor_files
from diloco_node.storage.disk_id import DiskIdFile, set_aside
from diloco_node.storage.durable import DamagedFile, disk_errors, make_folder, remove_temporaries
from diloco_node.storage.ledger_files import LEDGER_END_NAME, VOTE_NAME, LedgerFile, VoteFile
from diloco_node.storage.ledger_reader import LedgerReader

STATES_KEPT: Final = 2
"""The newest states of a fragment that are never pruned: the last one and what it falls back to. The states that others
may fetch are older as a rule, for the ledger names a state after it was written: the caller of `prune` says which."""

Buffer = bytes | bytearray | memoryview | U8


class RegionStore:
    """The folder of one region. `load` first; close it at the end.

    Threads: `persist` from one thread at a time; the others from any.

    Args:
        folder: made if it is missing.
        is_read_only: for `load` and what reads: nothing is made, locked, set aside or repaired, so a daemon may run on
            the folder meanwhile.
        is_archive: payloads, first states and the whole ledger are kept (`ledger_reader`).

    Attributes:
        set_aside: names of damaged files that were found and renamed, since the folder was opened.
        lost: what was wrong with vote or ledger, if the folder had to begin again with another id; else empty.

    Raises StorageError: another daemon holds the folder, or it can't be used.
    """

    def __init__(self, folder: Path, *, is_read_only: bool = False, is_archive: bool = False) -> None:
        self.folder = folder
        self._is_read_only = is_read_only
        self._is_archive = is_archive
        self._payloads = folder / "payloads"
        self._states = folder / "state"
        self.set_aside: list[str] = []
        self.lost = ""
        self._lock = -1
        if not is_read_only:
            with disk_errors("use", folder):
                make_folder(folder)
                for path in (self._payloads, self._states):
                    path.mkdir(exist_ok=True)  # `load` makes the names durable
                self._lock = _lock(folder / "lock")
        self._disk_id = DiskIdFile(folder)
        self._vote = VoteFile(folder)
        self._ledger = LedgerFile(folder)

    def load(self, fragments: int) -> Recovered:
        """Read and check everything that recovery needs. Once, before anything else.

        States and the payloads after them are read whole; of other payloads the headers, and none of an archive's older
        ones. Raises StorageError: the disk refuses; or vote or ledger are damaged or missing, and nothing may be
        changed.
        """
        self._disk_id.read()
        if self._is_read_only:
            reader = LedgerReader(self.folder)
            entries, base = reader.read(), reader.base
            self._vote.open(is_new=False)  # after the ledger: a daemon writes a new term here first
            self._check_vote(entries, base)
        else:
            entries = self._recover()
            base = self._ledger.base
        on_disk = self._listing(self._states)
        newest = [self._newest_state(on_disk[fragment]) for fragment in range(fragments)]
        states, digests = tuple(version for version, _ in newest), tuple(digest for _, digest in newest)
        payloads = frozenset(self._whole_payloads(states, on_disk))
        vote, disk = self._vote, self._disk_id.value
        return Recovered(vote.term, vote.voted_for, entries, states, payloads, digests, base, disk, self._disk_id.life)

    def _recover(self) -> tuple[Entry, ...]:
        """Entries, vote and an id; what a crash has left is cleared away. Raises StorageError: the disk refuses."""
        with disk_errors("read", self.folder):
            for folder in (self.folder, self._payloads, self._states):
                remove_temporaries(folder)
                # A process that was killed may have given names that are in the kernel's memory only.
                sync_folder(folder)
        try:
            entries = self._open_ledger()
        except DiskRefused:
            raise
        except StorageError as error:
            self._begin_again(str(error))
            entries = self._open_ledger()
        self._disk_id.begin()
        return entries

    def begin_again(self, why: str, fragments: int) -> Recovered:
        """Give vote and ledger up, for what they say makes no sense; as `load` does with damaged ones. Same errors."""
        self._begin_again(why)
        return self.load(fragments)

    def _open_ledger(self) -> tuple[Entry, ...]:
        """Vote and ledger. Raises StorageError: they are damaged, or one of them is gone."""
        if self._disk_id.value and not (self._vote.exists and self._ledger.exists):
            raise StorageError(f"{self.folder}: vote.bin or ledger.log is missing, the folder's id is not")
        # Made in this order: a folder with a ledger has a vote, one with a vote above term 0 has a whole ledger.
        self._vote.open(is_new=not self._ledger.exists)
        entries = self._ledger.open(is_new=self._vote.term == 0)
        self._check_vote(entries, self._ledger.base)
        return entries

    def _check_vote(self, entries: Sequence[Entry], base: LedgerBase) -> None:
        """Check that the vote is as new as the ledger. Raises StorageError."""
        last_term = entries[-1].term if entries else base.term
        if last_term > self._vote.term:
            raise StorageError(
                f"{self.folder}: vote.bin is of term {self._vote.term}, the last entry of term {last_term}: "
                "vote.bin is an older copy"
            )

    def _begin_again(self, why: str) -> None:
        """Set aside what is left of vote and ledger; the id goes first. Raises StorageError: the disk refuses."""
        self._disk_id.retire()
        self._ledger.close()
        self.lost = why
        with disk_errors("set aside the damaged ledger in", self.folder):
            for name in (LEDGER_NAME, LEDGER_END_NAME, VOTE_NAME):
                set_aside(self.folder / name)
        self._vote, self._ledger = VoteFile(self.folder), LedgerFile(self.folder)

    def close(self) -> None:
        """Close the files and let the folder go. May be called twice."""
        self._ledger.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- the ledger ----

    def persist(
        self, term: int, voted_for: str, truncate_from: int, entries: Sequence[Entry], base: LedgerBase | None = None
    ) -> None:
        """Make term, vote and log durable before returning. base: the log is to begin with it (`begin_with`).

        Term and vote go first: a newer term and an older log is a state that any voter may be in.

        Raises StorageError: the disk refused, or (`LedgerGone`) what was durable can't be read any more, and the
        folder's id is taken away: a new process begins again. LedgerLost: that could not be done either.
        """
        if (term, voted_for) != (self._vote.term, self._vote.voted_for):
            assert term >= self._vote.term, (term, self._vote.term)
            self._vote.write(term, voted_for)
        try:
            if base is not None:
                archive = self.folder / f"ledger-{self._ledger.base.index:012d}.log" if self._is_archive else None
                self._ledger.begin_with(base, truncate_from, entries, kept_as=archive)
            elif truncate_from or entries:
                self._ledger.append(truncate_from, entries)
        except LedgerLost as error:
            try:
                self._disk_id.retire()
            except StorageError:
                raise error from None
            raise LedgerGone(str(error)) from error

    @property
    def cut_bytes(self) -> int:
        """Bytes of an interrupted write that `load` cut off at the end of the ledger."""
        return self._ledger.cut_bytes

    # ---- payloads ----

    def store_payload(self, fragment: int, version: int, digest: bytes, chunks: Sequence[Buffer]) -> None:
        """Write a payload of merged stripes in block order, durably. digest: over those of its stripes, as the ledger
        has it; checked when it is read. Raises StorageError."""
        views = [memoryview(cast(bytes, chunk)).cast("B") for chunk in chunks if len(chunk)]
        path = self._payloads / tensor_files.payload_name(fragment, version, digest)
        tensor_files.write_payload(path, views, fragment=fragment, version=version, digest=digest)

    def read_payload(self, fragment: int, version: int, digest: bytes) -> U8:
        """A payload, shape (encoded bytes,), uint8, owned by the caller, checked. Raises StorageError: there is none,
        or it is damaged (and set aside)."""
        path = self._payloads / tensor_files.payload_name(fragment, version, digest)
        header, content = self._read(path)
        if header.digest != digest:
            raise StorageError(f"{path} is the payload {header.digest.hex()}, not {digest.hex()}")
        return content

    # ---- states ----

    def store_state(self, fragment: int, version: int, theta: F32, momentum: F32, digest: bytes) -> None:
        """Write parameters and momentum, shape (n,), float32, durably; the digest unchecked. Raises StorageError."""
        if theta.shape != momentum.shape:
            raise ValueError(f"parameters {theta.shape} and momentum {momentum.shape} of fragment {fragment}")
        path = self._states / tensor_files.state_name(fragment, version)
        tensor_files.write_state(path, theta, momentum, fragment=fragment, version=version, digest=digest)

    def read_state(self, fragment: int, version: int) -> tuple[F32, F32]:
        """Parameters and momentum, each shape (n,), float32, the caller's. Raises as `read_payload`."""
        _, content = self._read(self._states / tensor_files.state_name(fragment, version))
        theta, momentum = np.split(content.view(np.float32), 2)
        return theta, momentum

    def read_state_bytes(self, fragment: int, version: int, digest: bytes) -> U8:
        """Parameters and momentum as bytes, if they have this digest. Raises DamagedFile: there is no such state.
        StorageError: it can't be read now."""
        path = self._states / tensor_files.state_name(fragment, version)
        header, content = self._read(path)
        if header.digest != digest:
            raise DamagedFile(f"{path} is the state {header.digest.hex()}, not {digest.hex()}")
        return content

    def set_states_aside(self, fragment: int, version_min: int) -> None:
        """Rename the states of the fragment from this version on; durable when this returns. Raises StorageError."""
        for version, path in self._listing(self._states)[fragment]:
            if version >= version_min:
                self._put_aside(path)
        with disk_errors("use", self._states):
            sync_folder(self._states)

    def state_digest(self, fragment: int, version: int) -> bytes:
        """The digest that was given with the state. Raises StorageError: there is none, or its header is damaged."""
        return tensor_files.read_header(self._states / tensor_files.state_name(fragment, version)).digest

    def state_versions(self, fragment: int) -> tuple[int, ...]:
        """Versions of this fragment whose state is on disk, sorted."""
        return tuple(version for version, _ in self._listing(self._states)[fragment])

    # ---- pruning ----

    def prune(self, fragment: int, keep_from_version: int) -> None:
        """Remove payloads and states of versions before `keep_from_version`, but nothing that recovery may need: the
        last STATES_KEPT states, and every payload after the older one. An archive keeps more. Raises StorageError."""
        states = self._listing(self._states)[fragment]
        kept_states = states[-STATES_KEPT:]
        oldest_kept = kept_states[0][0] if kept_states else -1
        first = 1 if self._is_archive else 0
        surplus = [path for version, path in states[:-STATES_KEPT] if first <= version < keep_from_version]
        # An archive's folder has more and more names: it is not even listed.
        payloads = [] if self._is_archive else self._listing(self._payloads)[fragment]
        surplus += [path for version, path in payloads if version < keep_from_version and version <= oldest_kept]
        with disk_errors("remove old files from", self.folder):
            for path in surplus:
                path.unlink(missing_ok=True)

    # ---- reading and setting aside ----

    def _listing(self, folder: Path) -> dict[int, list[tuple[int, Path]]]:
        """Return (version, path) of each fragment's files, sorted; empty for those without files."""
        versions: dict[int, list[tuple[int, Path]]] = defaultdict(list)
        for path in sorted(folder.glob("f*.bin")):
            version = tensor_files.named_version(path)
            if version is not None:
                versions[version[0]].append((version[1], path))
        for files in versions.values():
            files.sort()
        return versions

    def _read(self, path: Path) -> tuple[tensor_files.TensorHeader, U8]:
        try:
            return tensor_files.read_content(path)
        except DamagedFile as error:
            if self._is_read_only:
                raise
            if path.exists():
                self._put_aside(path)
            raise DamagedFile(f"{error}; it is set aside as {path.name}.damaged: fetch it from a peer") from error
        except StorageError as error:
            if not path.exists():
                raise DamagedFile(f"{path} does not exist: fetch it from a peer") from error
            raise

    def _put_aside(self, path: Path) -> None:
        if self._is_read_only:
            return
        with disk_errors("set aside", path):
            path.rename(path.with_name(path.name + ".damaged"))
        self.set_aside.append(path.name)

    def _newest_state(self, files: Sequence[tuple[int, Path]]) -> tuple[int, bytes]:
        """Version and digest of the newest whole one; (-1, b"") if there is none."""
        for version, path in reversed(files):
            try:
                header, _ = self._read(path)
            except DamagedFile:
                continue
            return version, header.digest
        return -1, b""

    def _whole_payloads(
        self, states: Sequence[int], on_disk: Mapping[int, Sequence[tuple[int, Path]]]
    ) -> list[tuple[int, int, bytes]]:
        whole = []
        listing = self._listing(self._payloads)
        for fragment, state_version in enumerate(states):
            oldest = min([state_version, *(version for version, _ in on_disk[fragment] if version)])
            for version, path in listing[fragment]:
                if version < oldest and self._is_archive:
                    continue  # recovery needs none of them, and they become more and more
                try:
                    if version > state_version:
                        header, _ = self._read(path)
                    else:
                        header = tensor_files.read_header(path)
                except DamagedFile:
                    if path.exists():
                        self._put_aside(path)
                    continue
                except StorageError:
                    if path.exists():
                        raise
                    continue  # a daemon that runs on the folder has pruned it meanwhile
                whole.append((fragment, version, header.digest))
        return whole


def _lock(path: Path) -> int:
    """Hold the lock file; the kernel lets it go with the process, whatever happens to it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock_file(descriptor, path)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StorageError(
            f"{path.parent} is in use by another daemon (process {holder}): stop that one first, or use another folder"
        ) from error
    except DiskRefused:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
