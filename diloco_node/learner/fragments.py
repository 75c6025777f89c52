"""The learner's side of merging: snapshots, outer gradients, and versions applied with carry-over.

`LearnerFragments` belongs to the training thread, which calls it at step boundaries. It keeps `base` (what it last
applied), unresolved snapshots and the positions, which outlive any daemon. Encoding happens in one background thread;
the training thread only copies. The outer gradient is `base - theta` (see `codec.kernels.encode_delta`).

Lifetimes: a snapshot S is unresolved from `snapshot` until a later version of its fragment is applied, or another
snapshot of the fragment replaces it. Asked again for the same version and base it is offered again, bytes unchanged.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.carry import Anchor, CarryPlan, carry_plan, position_after
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import CarryMode, Codec, Contribution, FragmentPosition
from diloco_node.errors import LearnerError, PayloadCorrupt
from diloco_node.learner.layouts.whole import ModelTensors, host_values
from diloco_node.numeric import F32, U8
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    UNATTACHED,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
)

Answer = SnapshotReady | SnapshotDenied | OfferApplied

ENCODER_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class FragmentSettings:
    """What the daemon's Welcome fixes for the fragments; names as there."""

    region: str
    incarnation: int
    codec_up: Codec
    carry: CarryMode
    carry_steps_limit: int


@dataclass(slots=True)
class _Snapshot:
    """S: the parameters of one fragment at a step boundary, until a version resolves it.

    Attributes:
        version, base_version: of the request.
        values: shape (n,), float32, CPU; the first part of `buffer`, which comes from the pool.
        answer: set by the encoder when it is done and the counters are durable.
        encoded: set by the encoder after `answer`.
    """

    number: int
    fragment: int
    version: int
    base_version: int
    step_from: int
    step: int
    tokens_from: int
    tokens: int
    values: Tensor
    buffer: Tensor
    answer: SnapshotReady | SnapshotDenied | None = None
    encoded: threading.Event = field(default_factory=threading.Event)


class LearnerFragments:
    """The model's fragments as one learner holds them.

    Args:
        tensors: the model's parameters.
        manifest: how they are cut; made from the same tensors.
        settings: see FragmentSettings.
        version_area: shape (manifest.size,), float32: versions from the daemon (shared memory).
        contribution_area: shape (sum of encoded bytes,), uint8: contributions to the daemon (shared memory).
        answer: called from the encoder thread with each SnapshotReady or SnapshotDenied.
        before_ready: called in the encoder thread before a snapshot is announced; makes the trained counters durable.

    Attributes:
        positions: per fragment. step, tokens: of this incarnation, at the last boundary.
        carried_steps: sum over applies of the own steps kept; discounted: applies with lam below 1.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        manifest: Manifest,
        settings: FragmentSettings,
        *,
        version_area: F32,
        contribution_area: U8,
        answer: Callable[[Answer], None],
        before_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.manifest = manifest
        self.settings = settings
        self.tensors = tensors
        self.step = 0
        self.tokens = 0
        self.carried_steps = 0
        self.discounted = 0
        self.positions: list[FragmentPosition] = [UNATTACHED for _ in manifest.fragments]
        self._blocks = [FragmentBlocks(part.piece_sizes, settings.codec_up) for part in manifest.fragments]
        sizes = [part.size for part in manifest.fragments]
        self._places = list(torch.split(torch.from_numpy(version_area), sizes))
        self._contribution_area = contribution_area
        self._area_starts = [0, *accumulate(blocks.encoded_bytes for blocks in self._blocks)]
        # One allocation, pinned where there is a GPU, so that copies run at the speed of the bus.
        is_pinned = torch.cuda.is_available()
        self._base = list(torch.split(_room(manifest.size, is_pinned=is_pinned), sizes))
        self._largest = max(sizes)
        self._pool = [_room(self._largest, is_pinned=is_pinned) for _ in range(2)]
        self._is_pinned = is_pinned
        largest_piece = max(piece.size for part in manifest.fragments for piece in part.pieces)
        self._scratch = _room(largest_piece, is_pinned=is_pinned)
        self._snapshots: dict[int, _Snapshot] = {}
        self._last_included: dict[int, int] = {}
        self._own: list[Tensor] | None = None
        self._next_snapshot = 1
        self._answer = answer
        self._encoder = _Encoder(self._encode, before_ready, self._announce)
        # Load or compile the kernel now, not beside the first steps.
        smallest = min(self._blocks, key=lambda blocks: blocks.values)
        zeros = np.zeros(smallest.values, np.float32)
        kernels.encode_delta(smallest, zeros, zeros, np.zeros(smallest.encoded_bytes, np.uint8))

    @property
    def is_placed(self) -> bool:
        """Whether every fragment has been given a version: training may begin."""
        return all(position.base_version >= 0 for position in self.positions)

    def unresolved(self) -> tuple[int, ...]:
        """Per fragment the number of its unresolved snapshot, or NO_SNAPSHOT."""
        held = self._snapshots
        return tuple(held[index].number if index in held else NO_SNAPSHOT for index in range(len(self.positions)))

    def write_initial_state(self) -> None:
        """Copy the model's parameters into the version area, where the daemon takes Theta_0 from."""
        for fragment, place in zip(self.manifest.fragments, self._places, strict=True):
            self.tensors.read(fragment, place)

    def global_vectors(self) -> list[Tensor]:
        """Per fragment the global parameters as last applied: shape (n,), float32. Not copies."""
        return self._base

    def own_vectors(self) -> list[Tensor]:
        """Per fragment what this learner came to by itself: shape (n,), float32, CPU.

        Until the run's last merges begin that is what the model holds now (copies). From then on it is what it held
        just before the first of them: the last rounds take the plain mean whole, so afterwards the own parameters are
        the global ones plus a few steps.
        """
        return self._own if self._own is not None else [self.vector(index) for index in range(len(self.positions))]

    def vector(self, index: int, out: Tensor | None = None) -> Tensor:
        """Fragment `index` as the model holds it now: shape (n,), float32, CPU; a copy, into `out` if given."""
        fragment = self.manifest.fragments[index]
        values = host_values(fragment.size) if out is None else out
        self.tensors.read(fragment, values)
        return values

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, wanted: SnapshotRequested) -> Answer | None:
        """Copy a fragment and have it encoded.

        Returns:
            The answer if it is known at once (denied, or the same snapshot as before), else None: it comes by `answer`.
        """
        self._encoder.check()
        held = self._snapshots.get(wanted.fragment)
        if held is not None and (held.version, held.base_version) == (wanted.version, wanted.base_version):
            return held.answer if held.encoded.is_set() else None
        position = self.positions[wanted.fragment]
        if wanted.base_version != position.base_version:
            reason = f"base is version {position.base_version}, asked for one against {wanted.base_version}"
            return SnapshotDenied(wanted.fragment, wanted.version, reason)
        if self.step <= position.included_step:
            return SnapshotDenied(wanted.fragment, wanted.version, "no steps since the last inclusion")
        if held is not None:
            self._resolve(held)
        fragment = self.manifest.fragments[wanted.fragment]
        # Memory that has been touched before, where there is some: copying into it is fast.
        buffer = self._pool.pop() if self._pool else _room(self._largest, is_pinned=self._is_pinned)
        values = buffer[: fragment.size]
        self.tensors.read(fragment, values)
        taken = _Snapshot(
            number=self._next_snapshot,
            fragment=wanted.fragment,
            version=wanted.version,
            base_version=wanted.base_version,
            step_from=position.included_step,
            step=self.step,
            tokens_from=position.included_tokens,
            tokens=self.tokens,
            values=values,
            buffer=buffer,
        )
        self._next_snapshot += 1
        self._snapshots[wanted.fragment] = taken
        self._encoder.put(taken)
        return None

    def _encode(self, taken: _Snapshot) -> SnapshotReady | SnapshotDenied:
        """In the encoder thread. Base can't change meanwhile: `apply` waits for it."""
        index = taken.fragment
        start = self._area_starts[index]
        out = self._contribution_area[start : start + self._blocks[index].encoded_bytes]
        base, theta = self._base[index].numpy(), taken.values.numpy()
        try:
            norms = kernels.encode_delta(self._blocks[index], base, theta, out)
        except PayloadCorrupt as error:
            return SnapshotDenied(index, taken.version, f"step {taken.step}: {error}")
        contribution = Contribution(
            learner=self.settings.region,
            incarnation=self.settings.incarnation,
            fragment=index,
            base_version=taken.base_version,
            snapshot=taken.number,
            step_from=taken.step_from,
            step_to=taken.step,
            tokens=taken.tokens - taken.tokens_from,
            squared_norms=tuple(norms.tolist()),
        )
        return SnapshotReady(contribution)

    def _announce(self, taken: _Snapshot, answer: SnapshotReady | SnapshotDenied) -> None:
        """In the encoder thread, when the counters are durable."""
        taken.answer = answer
        taken.encoded.set()
        self._answer(answer)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def is_busy(self, index: int) -> bool:
        """Whether the encoder still reads this fragment's base: apply at a later boundary."""
        self._encoder.check()
        held = self._snapshots.get(index)
        return held is not None and not held.encoded.is_set()

    def apply(self, offered: VersionOffered) -> OfferApplied:
        """Take a new version from the version area, keeping the steps that are not in it (design part 5).

        The caller asks `is_busy` first. A version that the learner already has, or an older one, changes nothing.

        Returns:
            What to tell the daemon.

        Raises:
            LearnerError: the daemon names a snapshot that this learner does not have.
        """
        index, version = offered.fragment, offered.version
        position = self.positions[index]
        if version <= position.base_version:
            return OfferApplied(index, position.base_version, position, 1.0, 0)
        taken = self._included(offered)
        if offered.is_last and self._own is None and self.is_placed:
            self._own = self.own_vectors()
        plan, kept_steps = self._plan(position, taken, version)
        fragment, new = self.manifest.fragments[index], self._places[index]
        anchor = {Anchor.SNAPSHOT: taken.values if taken else None, Anchor.BASE: self._base[index], Anchor.NONE: None}
        self.tensors.shift(fragment, new, anchor[plan.anchor], plan.carry_factor, self._scratch)
        self.tensors.held(fragment, new, self._base[index])
        self.positions[index] = position_after(
            position,
            included=None if taken is None else (taken.step, taken.tokens),
            step=self.step,
            tokens=self.tokens,
            version=version,
            mode=self.settings.carry,
            is_kept=plan.anchor is not Anchor.NONE,
        )
        if taken is not None:
            self._last_included[index] = taken.number
        if index in self._snapshots:
            self._resolve(self._snapshots[index])
        carry_factor = 1.0 if position.base_version < 0 else plan.carry_factor
        self.carried_steps += kept_steps
        self.discounted += carry_factor < 1.0
        return OfferApplied(index, version, self.positions[index], carry_factor, kept_steps)

    def _included(self, offered: VersionOffered) -> _Snapshot | None:
        if offered.included_snapshot == NO_SNAPSHOT:
            return None
        if offered.included_snapshot <= self._last_included.get(offered.fragment, NO_SNAPSHOT):
            # The daemon made this offer before it knew what this learner had just applied: the snapshot is in its base.
            return None
        held = self._snapshots.get(offered.fragment)
        if held is None or held.number != offered.included_snapshot:
            raise LearnerError(
                f"fragment {offered.fragment} version {offered.version} includes snapshot {offered.included_snapshot}, "
                f"but this learner (incarnation {self.settings.incarnation}) holds "
                f"{'none' if held is None else held.number}: its steps can't be carried over; restart the learner"
            )
        return held

    def _plan(self, position: FragmentPosition, taken: _Snapshot | None, version: int) -> tuple[CarryPlan, int]:
        """The plan, and how many own steps it keeps."""
        if position.base_version < 0:
            return CarryPlan(Anchor.NONE, 0.0), 0
        since = self.step - (position.included_step if taken is None else taken.step)
        plan = carry_plan(
            self.settings.carry,
            included=taken is not None,
            versions_missed=version - (position.base_version if taken is None else taken.version),
            steps_since_inclusion=since,
            carry_steps_limit=self.settings.carry_steps_limit,
        )
        return plan, since if plan.carry_factor > 0.0 else 0

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def _resolve(self, taken: _Snapshot) -> None:
        del self._snapshots[taken.fragment]
        # While the encoder still reads the values, they are left to the garbage collector.
        if taken.encoded.is_set() and len(self._pool) < len(self.positions):
            self._pool.append(taken.buffer)

    def close(self) -> None:
        """Stop the encoder and let go of the shared memory."""
        self._encoder.close()
        self._places = []
        self._contribution_area = np.zeros(0, np.uint8)


class _Encoder:
    """One thread that encodes snapshots in the order they were taken, and one that waits for the disk meanwhile."""

    def __init__(
        self,
        encode: Callable[[_Snapshot], SnapshotReady | SnapshotDenied],
        before_ready: Callable[[], None],
        announce: Callable[[_Snapshot, SnapshotReady | SnapshotDenied], None],
    ) -> None:
        self._jobs: queue.SimpleQueue[_Snapshot | None] = queue.SimpleQueue()
        self._encode = encode
        self._before_ready = before_ready
        self._announce = announce
        self._disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="diloco-counters")
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="diloco-encoder", daemon=True)
        self._thread.start()

    def put(self, taken: _Snapshot) -> None:
        self._jobs.put(taken)

    def check(self) -> None:
        """Raise, in the training thread, what ended the encoder."""
        if self._failure is not None:
            raise LearnerError(f"the encoder thread ended: {self._failure!r}") from self._failure

    def _run(self) -> None:
        try:
            while (taken := self._jobs.get()) is not None:
                durable = self._disk.submit(self._before_ready)
                answer = self._encode(taken)
                # A step that others may merge must not be forgotten by a power cut: the counters first.
                durable.result()
                self._announce(taken, answer)
        except Exception as error:  # noqa: BLE001 - a thread's last word; the training thread raises it
            self._failure = error

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(ENCODER_STOP_S)
        self._disk.shutdown(wait=False)


def _room(size: int, *, is_pinned: bool) -> Tensor:
    """Zeros, shape (size,), float32, on the CPU.

    Memory that is not pinned comes from numpy: it asks the kernel for huge pages, torch does not. Copies and encoding
    take a quarter less time with them.
    """
    if is_pinned:
        return torch.zeros(size, dtype=torch.float32, device="cpu", pin_memory=True)
    return torch.from_numpy(np.zeros(size, np.float32))


def area_sizes(manifest: Manifest, codec_up: Codec) -> tuple[int, int]:
    """Bytes of version area and contribution area."""
    encoded = [FragmentBlocks(fragment.piece_sizes, codec_up).encoded_bytes for fragment in manifest.fragments]
    return 4 * manifest.size, sum(encoded)
