"""A region's state folder in memory: `storage.store.RegionStore` as the daemon knows it, on a disk that can fail.

A write becomes durable only when the disk has taken its time (`DiskTime`); a process that dies before loses it or
leaves half of it (`Disk.crash`). Reading gives what is in the kernel's memory, which is what is durable here: nobody in
the daemon reads what it has not been told is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.types import Entry, LedgerBase, Recovered
from diloco_node.errors import StorageError
from diloco_node.lab.sim.disk import Disk, DiskPayload, DiskState, LedgerWrite, PayloadKey, RottenKey
from diloco_node.numeric import F32, U8
from diloco_node.storage.durable import DamagedFile

STATES_KEPT = 2
"""As `storage.store` keeps them: the last state, and what it falls back to."""


@dataclass(slots=True)
class DiskTime:
    """The last call's work on the disk: the time it takes, and what is durable after it."""

    ns: int = 0
    writes: list[Callable[[], None]] = field(default_factory=list)

    def begin(self) -> None:
        """A call is made."""
        self.ns, self.writes = 0, []

    def add(self, ns: int, write: Callable[[], None] | None = None) -> None:
        """It waits for the disk so long, and this is durable then."""
        self.ns += ns
        if write is not None:
            self.writes.append(write)


@dataclass(slots=True)
class FolderDisk(Disk):
    """A disk with all the states that a folder keeps.

    Attributes:
        damaged: payloads and states whose bytes are wrong, which nobody knows before they are read.
        is_full: every write is refused.
        fsync_failures: so many of the next writes are refused after they were made, perhaps.
    """

    damaged: set[RottenKey] = field(default_factory=set)
    is_full: bool = False
    fsync_failures: int = 0

    def put_state(self, fragment: int, state: DiskState) -> None:
        """A state file is there."""
        self.keep_state(fragment, state)
        self.damaged.discard((fragment, state.version))
        self.rotten.discard((fragment, state.version))

    def put_payload(self, key: PayloadKey, payload: DiskPayload) -> None:
        """A payload file is there."""
        self.payloads[key] = payload
        self.damaged.discard(key)
        self.rotten.discard(key)

    def drop_state(self, fragment: int, version: int) -> None:
        """A state file is gone."""
        self.older_states.pop((fragment, version), None)
        self.damaged.discard((fragment, version))
        self.find_newest(fragment)

    def set_aside_state(self, fragment: int, version: int) -> None:
        """A damaged state file was found, or none."""
        if (fragment, version) in self.damaged:
            self.rotten.add((fragment, version))
        self.drop_state(fragment, version)

    def set_aside_payload(self, key: PayloadKey) -> None:
        """A damaged payload file was found, or none."""
        if key in self.damaged:
            self.rotten.add(key)
        self.drop_payload(key)

    def drop_payload(self, key: PayloadKey) -> None:
        """A payload file is gone."""
        self.payloads.pop(key, None)
        self.damaged.discard(key)

    def versions(self, fragment: int) -> list[int]:
        """Return the versions of a fragment's states, sorted."""
        return sorted(version for number, version in self.older_states if number == fragment)

    def find_newest(self, fragment: int) -> None:
        """Keep `states` true."""
        versions = self.versions(fragment)
        if versions:
            self.states[fragment] = self.older_states[fragment, versions[-1]]
        else:
            self.states.pop(fragment, None)


class FakeStore:
    """A region's folder as a process has it open.

    Args:
        disk: what survives the process. time: what a call waits for the disk is added here.
        fsync_ns: draws the time of one fsync.
        later: calls something in so many ns, unless the process is dead by then; for a disk that lies.
    """

    def __init__(
        self,
        disk: FolderDisk,
        time: DiskTime,
        fsync_ns: Callable[[], int],
        later: Callable[[int, Callable[[], None]], None],
    ) -> None:
        self._disk = disk
        self._time = time
        self._fsync_ns = fsync_ns
        self._later = later
        self.lies_ns = 0
        self._term = disk.term
        self._vote = disk.voted_for

    def wait_for_disk(self, operation: str) -> int:
        """Wait for an fsync; its time is added. Raises StorageError if the disk refuses."""
        ns = self._fsync_ns()
        self._time.add(ns)
        if self._disk.is_full:
            raise StorageError(f"can't {operation}: No space left on device")
        if self._disk.fsync_failures:
            self._disk.fsync_failures -= 1
            raise StorageError(f"can't {operation}: Input/output error")
        return ns

    def _write_file(self, operation: str, write: Callable[[], None]) -> None:
        """A whole file, renamed when it is complete: there or not."""
        self.wait_for_disk(operation)
        self._disk.late_writes.append(write)
        self._durable(partial(self._disk.fsync_write, write))

    def _durable(self, fsync: Callable[[], None]) -> None:
        if self.lies_ns:
            self._later(self.lies_ns, fsync)
        else:
            self._time.add(0, fsync)

    def load(self, fragments: int) -> Recovered:
        """See RegionStore: damaged states fall back, damaged payloads count as missing."""
        disk = self._disk
        for fragment in range(fragments):
            for version in reversed(disk.versions(fragment)):
                if (fragment, version) not in disk.damaged:
                    break
                disk.set_aside_state(fragment, version)
        newest = {fragment: state.version for fragment, state in disk.states.items()}
        for key in sorted(disk.payloads):
            if key in disk.damaged and key[1] > newest.get(key[0], -1):
                disk.set_aside_payload(key)
        return disk.recovered(fragments)

    def persist(
        self,
        term: int,
        voted_for: str,
        truncate_from: int,
        entries: Sequence[Entry],
        base: LedgerBase | None = None,
    ) -> None:
        """See RegionStore."""
        assert term >= self._term, (term, self._term)
        vote = LedgerWrite(term, voted_for, 0, ())
        write = LedgerWrite(term, voted_for, truncate_from, tuple(entries), base)
        if (term, voted_for) != (self._term, self._vote) and (truncate_from or entries or base is not None):
            # Two files: the vote may be written when the disk refuses the ledger.
            self.wait_for_disk("write the vote")
            self._queue(vote)
            self._term, self._vote = term, voted_for
        self.wait_for_disk("append to the ledger")
        self._queue(write)
        self._term, self._vote = term, voted_for

    def _queue(self, write: LedgerWrite) -> None:
        self._disk.ledger_queue.append(write)
        self._durable(self._disk.fsync_ledger)

    def store_payload(self, fragment: int, version: int, digest: bytes, chunks: Sequence[Any]) -> None:
        """See RegionStore."""
        payload = DiskPayload((), b"".join(bytes(chunk) for chunk in chunks))
        put = partial(self._disk.put_payload, (fragment, version, digest), payload)
        self._write_file("write a payload", put)

    def read_payload(self, fragment: int, version: int, digest: bytes) -> U8:
        """See RegionStore."""
        key = (fragment, version, digest)
        payload = self._disk.payloads.get(key)
        if payload is None or key in self._disk.damaged:
            self._disk.set_aside_payload(key)
            raise DamagedFile(f"payload {fragment}.{version}: fetch it from a peer")
        return np.frombuffer(payload.data, np.uint8).copy()

    def store_state(self, fragment: int, version: int, theta: F32, momentum: F32, digest: bytes) -> None:
        """See RegionStore."""
        assert theta.shape == momentum.shape, (theta.shape, momentum.shape, digest)
        state = DiskState(version, theta.copy(), momentum.copy())
        self._write_file("write a state", partial(self._disk.put_state, fragment, state))

    def read_state(self, fragment: int, version: int) -> tuple[F32, F32]:
        """See RegionStore."""
        state = self._disk.older_states.get((fragment, version))
        if state is None or (fragment, version) in self._disk.damaged:
            self._disk.set_aside_state(fragment, version)
            raise DamagedFile(f"state {fragment}.{version}: fetch it from a peer")
        return state.theta.copy(), state.momentum.copy()

    def read_state_bytes(self, fragment: int, version: int, digest: bytes) -> U8:
        """See RegionStore."""
        theta, momentum = self.read_state(fragment, version)
        if fragment_digest(theta, momentum) != digest:
            raise DamagedFile(f"state {fragment}.{version}: another one")
        return np.concatenate((theta, momentum)).view(np.uint8)

    def set_states_aside(self, fragment: int, version_min: int) -> None:
        """See RegionStore; a rename that the disk never refuses."""
        self._time.add(self._fsync_ns())
        self._disk.set_states_aside(fragment, version_min)

    def state_versions(self, fragment: int) -> tuple[int, ...]:
        """See RegionStore."""
        return tuple(self._disk.versions(fragment))

    def prune(self, fragment: int, keep_from_version: int) -> None:
        """See RegionStore."""
        versions = self._disk.versions(fragment)
        oldest_kept = versions[-STATES_KEPT:][0] if versions else -1
        for version in versions[:-STATES_KEPT]:
            if version < keep_from_version:
                self._disk.drop_state(fragment, version)
        for key in [key for key in self._disk.payloads if key[0] == fragment]:
            if key[1] < keep_from_version and key[1] <= oldest_kept:
                self._disk.drop_payload(key)

    def save_counters(self, incarnation: int, counters: tuple[int, int]) -> None:
        """Save the steps and tokens of a learner's incarnation; they never go back."""

        def write() -> None:
            counters_before = self._disk.counters.get(incarnation, (0, 0))
            self._disk.counters[incarnation] = max(counters_before, counters)

        self._write_file("save counters", write)

    def write_final(self, on_done: Callable[[], None]) -> None:
        """The final model; `on_done` is called when it is durable."""
        self._write_file("write the final model", on_done)

    def close(self) -> None:
        """Nothing is open."""
