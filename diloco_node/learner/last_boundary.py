"""A learner's last step boundary in memory that outlives it, so that a SIGKILL costs the step under way (D-103).

At each boundary the parameters are copied into a file of /dev/shm, and what has changed of bases and snapshots. The
next process attaches as the same incarnation, as a living learner attaches to a new daemon. Whatever a boundary has
to tell the daemon is told after it is saved, so nobody has ever heard of what is not there.

Each vector has two places. A boundary writes into the one that the boundary before does not name, and counts when its
head is whole. There are two heads as well, told apart by their checksum and sequence.

It is for one rank on a CPU, and only as long as it takes COST_PART of the time. On a GPU the copy would wait for the
device. A learner that failed, or was told to stop, leaves nothing: the next one takes the global parameters.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import mmap
import os
import stat
import struct
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from diloco_node.core.bounds import FRAGMENTS, INDEX, INDEX_MAX
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.shapes import Items, Whole
from diloco_node.core.types import FragmentPosition
from diloco_node.errors import LearnerError, ProtocolViolation, StorageError
from diloco_node.learner.layouts.tensors import ModelTensors, local_part
from diloco_node.learner.ranks import Ranks
from diloco_node.learner.snapshots import SnapshotFacts
from diloco_node.shared_memory import boundary_file
from diloco_node.storage.trained import newest_incarnation
from diloco_node.wire.field_bounds import BOUNDS
from diloco_node.wire.learner_link import NO_SNAPSHOT, Attach, Welcome
from diloco_node.wire.message_schema import Schema

COST_PART: Final = 0.01
"""Of the time, as checkpoints may take on disk."""

COPY_BYTES_PER_S: Final = 4e9
"""What a copy is expected to reach before one was made."""

LOOK_STEPS: Final = 20
"""So many are made before what they took is looked at."""

MEMORY_PART: Final = 4
"""At most a quarter of what is free: others use /dev/shm too, such as data loaders."""

BEGUN_MAX: Final = 3
"""Processes that begin at one boundary. Were it the boundary that kills them, the next one takes the global state."""

HEAD_BYTES: Final = 256 * 1024
"""Room for 1,024 fragments, twice what their numbers take at most."""

PLACES: Final = 2
_CHECKED: Final = struct.Struct("<II")

log = logging.getLogger("diloco_node.learner")


@dataclass(frozen=True, slots=True)
class BoundaryFacts:
    """Where a learner stands at a boundary, without the values.

    Attributes:
        step, tokens: of its incarnation. next_snapshot: the number of the next snapshot.
        positions, last_included: per fragment; the latter as `NO_SNAPSHOT` for none.
    """

    step: int
    tokens: int
    next_snapshot: int
    positions: tuple[FragmentPosition, ...]
    last_included: tuple[int, ...]
    unresolved: tuple[SnapshotFacts, ...]


@dataclass(frozen=True, slots=True)
class SavedBoundary:
    """A head: what was saved, by whom, and where its vectors lie.

    Attributes:
        begun: processes that began here. incarnation, run_id, manifest_digest: whose boundary it is.
        parameters_place, base_places, snapshot_places: 0 or 1; the latter two per fragment.
    """

    sequence: int
    begun: int
    run_id: str
    incarnation: int
    manifest_digest: str
    facts: BoundaryFacts
    parameters_place: int
    base_places: tuple[int, ...]
    snapshot_places: tuple[int, ...]

    def attach(self, new: Attach) -> Attach:
        """What the next process says of itself: a new one's words, and where this one was."""
        facts = self.facts
        held = {one.fragment: one.number for one in facts.unresolved}
        return replace(
            new,
            incarnation=self.incarnation,
            run_id=self.run_id,
            step=facts.step,
            tokens=facts.tokens,
            positions=facts.positions,
            snapshots=tuple(held.get(index, NO_SNAPSHOT) for index in range(len(facts.positions))),
        )


_PLACE: Final = Whole(0, PLACES - 1)
_HEADS: Final[Schema[SavedBoundary]] = Schema(
    {1: SavedBoundary},
    bounds=BOUNDS
    | {
        "sequence": INDEX,
        "number": INDEX,
        "begun": Whole(0, BEGUN_MAX),
        "next_snapshot": INDEX,
        "last_included": Items(FRAGMENTS, Whole(-1, INDEX_MAX)),
        "unresolved": Items(FRAGMENTS),
        "tokens_from": BOUNDS["tokens"],
        "parameters_place": _PLACE,
        "base_places": Items(FRAGMENTS, _PLACE),
        "snapshot_places": Items(FRAGMENTS, _PLACE),
    },
)


class Savable(Protocol):
    """What `LearnerFragments` gives and takes."""

    manifest: Manifest

    def facts(self) -> BoundaryFacts:
        """Where it stands now."""
        ...

    def read(self, index: int, out: Tensor) -> None:
        """Copy the parameters of a fragment, shape (n,), float32, CPU."""
        ...

    def write(self, index: int, values: Tensor) -> None:
        """Overwrite the parameters of a fragment."""
        ...

    def global_vectors(self) -> list[Tensor]:
        """Per fragment its base."""
        ...

    def snapshot_values(self, index: int) -> Tensor:
        """Of the unresolved snapshot of a fragment."""
        ...

    def begin_at(self, facts: BoundaryFacts, *, bases: Sequence[Tensor], snapshots: Sequence[Tensor]) -> None:
        """Stand where `facts` say, but for the parameters. Vectors per fragment, copied."""
        ...


class LastBoundary:
    """See the module. Belongs to the training thread. It holds a lock on the file as long as the process lives.

    Attributes:
        found: what a dead process left, to begin with; None: nothing, or what is of no use.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.found: SavedBoundary | None = None
        self._path = path
        self._descriptor = descriptor
        self._saved: SavedBoundary | None = None
        self._area: mmap.mmap | None = None
        self._vectors: list[list[list[Tensor]]] = []
        self._is_off = False
        self._pid = os.getpid()
        self._began_at_step = -1
        self._first_ns = self._took_ns = self._boundaries = 0
        # A loop that ends by an exception, and closes nothing, was not killed.
        atexit.register(self.forget)

    @classmethod
    def at(cls, path: Path) -> LastBoundary | None:
        """What lies at a path, for this process alone; None: it can't be had.

        A record lock, for one of a file's description would go on with each process that the loop forks. It holds off
        no other of this process: who is attached once more has left, and as one that failed.
        """
        if (older := _of_this_process.pop(path, None)) is not None:
            older.forget()
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.info("no parameters are kept in memory: %s", error)
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(descriptor)
            is_own = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
            if not is_own or info.st_nlink != 1:
                raise OSError(f"{path} belongs to someone else, or is open to others")
            made = cls(path, descriptor)
            made._find(info.st_size)
        except OSError as error:
            log.warning("no parameters are kept in memory: %s", error)
            os.close(descriptor)
            return None
        _of_this_process[path] = made
        return made

    def _find(self, size: int) -> None:
        """Take what a dead process left. It is marked before anybody hears of it: see BEGUN_MAX."""
        if size < PLACES * HEAD_BYTES:
            return
        heads = [_head(os.pread(self._descriptor, HEAD_BYTES, place * HEAD_BYTES)) for place in range(PLACES)]
        newest = max((head for head in heads if head is not None), key=lambda head: head.sequence, default=None)
        if newest is None or newest.begun >= BEGUN_MAX:
            return
        marked = replace(newest, sequence=newest.sequence + 1, begun=newest.begun + 1)
        os.pwrite(self._descriptor, _checked(marked), marked.sequence % PLACES * HEAD_BYTES)
        self.found = self._saved = marked
        self._began_at_step = marked.facts.step

    def begin(self, fragments: Savable, welcome: Welcome) -> bool:
        """Have the fragments stand where the dead process was, if the daemon agrees that this is the same incarnation.

        The parameters follow with `write_parameters`.

        Raises:
            LearnerError: what is there is of another model. The next process begins anew.
        """
        found = self.found
        if found is None or found.incarnation != welcome.incarnation:
            self.drop()
            return False
        manifest = fragments.manifest
        counts = {len(found.base_places), len(found.snapshot_places), len(found.facts.last_included)}
        is_same = (found.manifest_digest, found.run_id) == (manifest.digest, welcome.run_id)
        if not is_same or counts != {len(manifest.fragments)} or os.fstat(self._descriptor).st_size != _size(manifest):
            self.drop()
            raise LearnerError(f"the parameters that are kept in {self._path} are of another model or run")
        self._map(manifest)
        count = range(len(manifest.fragments))
        fragments.begin_at(
            found.facts,
            bases=[self._vectors[1][found.base_places[index]][index] for index in count],
            snapshots=[self._vectors[2][found.snapshot_places[index]][index] for index in count],
        )
        return True

    def write_parameters(self, fragments: Savable) -> None:
        """What `begin` left, once the checkpoint was read: its `stateful` may hold the model, with older parameters."""
        if self.found is not None:
            for index, values in enumerate(self._vectors[0][self.found.parameters_place]):
                fragments.write(index, values)

    def save(self, fragments: Savable, welcome: Welcome, *, step_ns: int) -> None:
        """Save this boundary, if that is cheap enough. Before anything of it is told.

        Args:
            step_ns: usual time of a step; 0: not known yet.
        """
        if self._is_off or (self._area is None and not self._is_made(fragments, step_ns)):
            return
        # This thread's own time: beside busy neighbours a copy is interrupted, and costs no more for that.
        started_ns = time.thread_time_ns()
        self._first_ns = self._first_ns or time.monotonic_ns()
        before, facts = self._saved, fragments.facts()
        index_range = range(len(facts.positions))
        parameters_place = 0 if before is None else 1 - before.parameters_place
        parameters, bases, snapshots = self._vectors
        for index in index_range:
            fragments.read(index, parameters[parameters_place][index])
        base_places = [0] * len(index_range) if before is None else list(before.base_places)
        for index, base in enumerate(fragments.global_vectors()):
            known = None if before is None else before.facts.positions[index].base_version
            if known != facts.positions[index].base_version:
                base_places[index] = 1 - base_places[index]
                bases[base_places[index]][index].copy_(base)
        snapshot_places = [0] * len(index_range) if before is None else list(before.snapshot_places)
        held = frozenset() if before is None else {one.number for one in before.facts.unresolved}
        for one in facts.unresolved:
            if one.number not in held:
                snapshot_places[one.fragment] = 1 - snapshot_places[one.fragment]
                snapshots[snapshot_places[one.fragment]][one.fragment].copy_(fragments.snapshot_values(one.fragment))
        head = SavedBoundary(
            sequence=0 if before is None else before.sequence + 1,
            begun=before.begun if before is not None and facts.step == self._began_at_step else 0,
            run_id=welcome.run_id,
            incarnation=welcome.incarnation,
            manifest_digest=fragments.manifest.digest,
            facts=facts,
            parameters_place=parameters_place,
            base_places=tuple(base_places),
            snapshot_places=tuple(snapshot_places),
        )
        assert self._area is not None
        document, start = _checked(head), head.sequence % PLACES * HEAD_BYTES
        self._area[start : start + len(document)] = document
        self._saved = head
        self._took_ns += time.thread_time_ns() - started_ns
        self._boundaries += 1
        passed_ns = time.monotonic_ns() - self._first_ns
        if self._boundaries >= LOOK_STEPS and self._took_ns > COST_PART * passed_ns:
            took_ms = self._took_ns / self._boundaries / 1e6
            log.info("parameters are not kept in memory any more: that takes %.1f ms of each step", took_ms)
            self.forget()

    def _is_made(self, fragments: Savable, step_ns: int) -> bool:
        """Make the file, once it is known that it pays. False: not yet, or never."""
        size = _size(fragments.manifest)
        copy_ns = 4 * fragments.manifest.size / COPY_BYTES_PER_S * 1e9
        if not step_ns:
            return False
        try:
            free = os.fstatvfs(self._descriptor)
            is_slow = copy_ns > COST_PART * step_ns
            if is_slow or size > free.f_bavail * free.f_bsize // MEMORY_PART:
                why = f"{copy_ns / 1e6:.1f} ms of each step" if is_slow else f"{size / 1e6:.0f} MB of memory"
                log.info("parameters are not kept in memory: that would take %s", why)
                self.forget()
                return False
            os.posix_fallocate(self._descriptor, 0, size)  # a full file system is an error here, not a SIGBUS later
            self._map(fragments.manifest)
        except OSError as error:
            log.info("parameters are not kept in memory: %s", error)
            self.forget()
            return False
        return True

    def _map(self, manifest: Manifest) -> None:
        self._area = mmap.mmap(self._descriptor, _size(manifest))
        values = torch.from_numpy(np.frombuffer(self._area, np.float32, offset=PLACES * HEAD_BYTES))
        sizes = [fragment.size for fragment in manifest.fragments]
        places = [list(torch.split(one, sizes)) for one in torch.split(values, manifest.size)]
        self._vectors = [places[start : start + PLACES] for start in range(0, len(places), PLACES)]

    def drop(self) -> None:
        """Nothing that is there is of use; this process may save anew."""
        self.found = self._saved = None
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)

    def blank(self) -> None:
        """Leave nothing for the next process until the next `save`."""
        if self._area is None or self._saved is None:
            return
        # The newest one last: the one before it is older than what was told since.
        for place in (1 - self._saved.sequence % PLACES, self._saved.sequence % PLACES):
            self._area[place * HEAD_BYTES : (place + 1) * HEAD_BYTES] = bytes(HEAD_BYTES)
        self._saved = None

    def forget(self) -> None:
        """Leave nothing for the next process, and save nothing more."""
        # Not in a process that the loop has forked, and not what has the name by now, of another process.
        if self._descriptor >= 0 and os.getpid() == self._pid and os.fstat(self._descriptor).st_nlink:
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of it; what is saved stays."""
        atexit.unregister(self.forget)
        if _of_this_process.get(self._path) is self:
            del _of_this_process[self._path]
        self._is_off = True
        self.found = self._saved = self._area = None
        self._vectors = []
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


_of_this_process: Final[dict[Path, LastBoundary]] = {}


def last_boundary_of(tensors: ModelTensors, ranks: Ranks) -> LastBoundary | None:
    """Where this process may save its boundaries; None: nowhere."""
    state_dir = os.environ.get("DILOCO_STATE", "")
    is_on_cpu = all(local_part(one).device.type == "cpu" for one in tensors.names)
    if not state_dir or ranks.size > 1 or not is_on_cpu:
        return None
    with suppress(OSError, StorageError):
        made = LastBoundary.at(boundary_file(Path(state_dir)))
        if made is not None and made.found and made.found.incarnation != newest_incarnation(Path(state_dir)):
            made.drop()  # of a life that was followed by one that kept nothing, or of a folder that was removed
        return made
    return None


def _size(manifest: Manifest) -> int:
    """Bytes of the file: two heads, and two places for parameters, bases and snapshots."""
    return PLACES * HEAD_BYTES + 3 * PLACES * 4 * manifest.size


def _checked(head: SavedBoundary) -> bytes:
    document = _HEADS.encode(head)
    if len(document) > HEAD_BYTES - _CHECKED.size:
        raise LearnerError(f"a step boundary in {len(document)} B: more than {HEAD_BYTES}")
    return _CHECKED.pack(zlib.crc32(document), len(document)) + document


def _head(raw: bytes) -> SavedBoundary | None:
    """What `_checked` made; None: it is not whole."""
    if len(raw) < _CHECKED.size:
        return None
    checksum, length = _CHECKED.unpack_from(raw)
    document = raw[_CHECKED.size : _CHECKED.size + length]
    if len(document) != length or not document or zlib.crc32(document) != checksum:
        return None
    try:
        return _HEADS.decode(document)
    except ProtocolViolation:
        return None
