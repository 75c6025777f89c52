"""The learner's side of merging: snapshots, outer gradients, and versions applied with carry-over.

`LearnerFragments` belongs to the training thread, which calls it at step boundaries. It keeps `base` (what it last
applied), unresolved snapshots and the positions, which outlive any daemon. Encoding happens in one background thread;
the training thread only copies, and for a model on a device only orders copies (`learner.layouts.device`). The outer
gradient is `base - theta` (see `codec.kernels.encode_delta`).

Every rank of a region has one, and all of them go through the same: positions are equal, while base and snapshots are
those of what the rank owns. `base - theta` is computed by owners and gathered on rank 0, which encodes it. A version is
scattered to its holders in the background, and applied at a boundary by which all of them have it. The bits are those
of one rank, for each value goes through the same operations.

Lifetimes: a snapshot S is unresolved from `snapshot` until a later version of its fragment is applied, or another
snapshot of the fragment replaces it. Asked again for the same version and base it is offered again, bytes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from diloco_node.core.merge.carry import Anchor, CarryPlan, carry_plan, position_after
from diloco_node.core.merge.fragments import Manifest
from diloco_node.core.types import NO_STEPS, CarryMode, Contribution, FragmentPosition
from diloco_node.errors import LearnerError, PayloadCorrupt
from diloco_node.learner.contribution_area import ContributionArea
from diloco_node.learner.late_looks import LateLook
from diloco_node.learner.layouts.device import DeviceLane, Room, encodes_there, has_streams
from diloco_node.learner.layouts.page_locked import page_locked
from diloco_node.learner.layouts.shard_map import ShardMap, join
from diloco_node.learner.layouts.slab_values import host_values
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.rank_exchange import RankExchange
from diloco_node.learner.region_shards import HERE
from diloco_node.learner.replica_check import ReplicaCheck
from diloco_node.learner.revert import RevertCheck
from diloco_node.learner.snapshots import ComingVersion, FragmentSettings, HeldSnapshot
from diloco_node.learner.worker import BackgroundWorker
from diloco_node.numeric import F32, U8
from diloco_node.wire.learner_link import (
    NO_SLOT,
    NO_SNAPSHOT,
    UNATTACHED,
    OfferApplied,
    SnapshotDenied,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
    version_slots,
)

SPARE_ROOMS: Final = 2
"""Kept for the next snapshots: as many rounds are in flight by default. When more were, as after ballots that failed,
the memory of the others is given back."""

Answer = SnapshotReady | SnapshotDenied | OfferApplied


class LearnerFragments:
    """The model's fragments as one rank of a learner holds them.

    Args:
        manifest: made from the same tensors.
        version_area: shape (all slots' values,), float32: versions from the daemon (shared memory). On rank 0.
        contribution_area: shape (sum of encoded bytes,), uint8: contributions to the daemon (shared memory). On rank 0.
        answer: called from the encoder thread with each SnapshotReady or SnapshotDenied. On rank 0.
        exchange: with other ranks, if there are any.
        before_ready: called in the encoder thread before a snapshot is announced; makes the trained counters durable.

    Attributes:
        positions, slots: per fragment. step, tokens: of this incarnation, at the last boundary.
        applied: versions written into the model.
        incoming: by fragment the version on its way to all ranks, in the same order on all; gone when it is applied.
        replicas: compares what several ranks hold.
        pending_looks: gives the looks at the model, ordered so far, by which a snapshot may be refused.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        manifest: Manifest,
        settings: FragmentSettings,
        *,
        shards: ShardMap,
        version_area: F32 | None = None,
        contribution_area: U8 | None = None,
        answer: Callable[[Answer], None] = lambda _: None,
        before_ready: Callable[[], None] = lambda: None,
        rank: int = 0,
        exchange: RankExchange | None = None,
    ) -> None:
        self.manifest = manifest
        self.settings = settings
        self.tensors = tensors
        self.shards = shards
        # All of these only grow, the first two at a boundary, before anything is carried out there.
        self.step = self.tokens = 0
        self.applied = 0
        # Per fragment the version in `_base` and what it includes; equal on all ranks.
        self.positions: list[FragmentPosition] = [UNATTACHED for _ in manifest.fragments]
        # None with a single rank. Of several, rank 0 alone has the areas and talks to the daemon.
        self._exchange, self._is_first = exchange, rank == 0
        # Whether other ranks own parts of the fragments: what rank 0 encodes or writes is gathered first.
        self._is_gathered = not self.shards.is_first_whole
        # Per fragment the part that this rank reads and applies, and copies that others own and it applies as well.
        self._owned = [self.shards.owned(fragment, rank) for fragment in manifest.fragments]
        self._followed = [self.shards.followed(fragment, rank) for fragment in manifest.fragments]
        area = np.zeros(0, np.float32) if version_area is None else version_area
        # The version area, shape (slots, values of the largest fragment); empty on other ranks, and once closed. The
        # daemon writes a slot before it offers it, and not again before it is told that nothing here is in it.
        self._area = torch.from_numpy(area).view(-1, version_slots(manifest)[1])
        # The encoder's thread alone writes there.
        self._contributions = ContributionArea(manifest, settings.codec_up, contribution_area)
        sizes = [local.size for local in self._owned]
        # Whether a device encodes what rank 0 holds on it.
        self._is_encoded_there = self._is_first and encodes_there(
            tensors.devices, settings.codec_up, settings.encode, is_gathered=self._is_gathered
        )
        types = {values.dtype for local in self._owned for values in tensors.in_place(local.slabs)}
        is_own = self._is_gathered or self._is_encoded_there or types != {torch.float32}
        # Whether base is what the daemon has offered, where it lies: all of it, not rounded, and read by no device.
        self._is_base_shared = version_area is not None and not is_own
        # Per fragment the slot in which base lies, or NO_SLOT.
        self.slots = [NO_SLOT] * len(manifest.fragments)
        # Per fragment this rank's part of the version last applied. Constant while a snapshot of it is encoded.
        self._base = [place[:size] for place, size in zip(self._area, sizes, strict=False)]
        if not self._is_base_shared:
            self._base = list(torch.split((page_locked if self._is_encoded_there else host_values)(sum(sizes)), sizes))
        # Memory for snapshots, each as large as the largest: what has been touched before is copied into faster.
        self._rooms = [host_values(max(sizes)) for _ in range(SPARE_ROOMS)]
        # Per fragment all that this rank applies: what it owns, then what it follows.
        self._resident = list(map(join, self._owned, self._followed))
        is_on_device = any(map(has_streams, tensors.devices))
        # To and from the device; None if the model is on the CPU. With it `_base` is the worker's.
        self._lane = DeviceLane(tensors, self._owned, self._resident) if is_on_device else None
        slab_sizes = [slab.size for local in self._resident for slab in local.slabs]
        # As large as the largest slab; what is in it is of no use between two calls.
        self._scratch = host_values(max(slab_sizes, default=0) if self._lane is None else 0)
        # By fragment the unresolved snapshot: at most one, against the version in `_base`.
        self._snapshots: dict[int, HeldSnapshot] = {}
        self._taken: list[HeldSnapshot] = []  # at this boundary: the encoder does not have them yet
        self.pending_looks: Callable[[], tuple[LateLook, ...]] = tuple
        self.incoming: dict[int, ComingVersion] = {}
        # By fragment the newest snapshot that an applied version included: no older one is carried over again.
        self._last_included: dict[int, int] = {}
        # The own parameters from just before the run's last merges; None until those begin.
        self._own: list[Tensor] | None = None
        self._ended: set[int] = set()  # fragments that have had a last merge since
        self.revert = RevertCheck(tensors, len(manifest.fragments))
        self.replicas = ReplicaCheck(tensors, self.shards)
        self._next_snapshot, self._answer = 1, answer  # the number grows over all fragments
        # Counts are of rank 0's process; others have none to make durable.
        self._before_ready = before_ready if self._is_first else lambda: None
        # One thread: encoding and exchanges go in the order of the boundaries, the same on all ranks.
        self._worker = BackgroundWorker()
        if self._lane is not None:
            self._worker.put(self._lane.begin)
        if self._is_first:
            self._contributions.warm_up(is_gathered=exchange is not None and self._is_gathered)

    @property
    def is_placed(self) -> bool:
        """Whether every fragment has been given a version: training may begin."""
        return all(position.base_version >= 0 for position in self.positions)

    def unresolved(self) -> tuple[int, ...]:
        """Per fragment the number of its unresolved snapshot, or NO_SNAPSHOT."""
        snapshots = self._snapshots
        indices = range(len(self.positions))
        return tuple(snapshots[at].contribution.snapshot if at in snapshots else NO_SNAPSHOT for at in indices)

    def write_initial_state(self) -> None:
        """Copy the model's parameters into the version area, where the daemon takes Theta_0 from. All ranks call it."""
        for index, local in enumerate(self._owned):
            values = self._base[index]  # no version is there yet
            self.tensors.read(local, values)
            whole = self.gather(index, values)
            if whole is not None:
                self._area[index, : whole.numel()] = whole

    def gather(self, index: int, vector: Tensor) -> Tensor | None:
        """The whole fragment on rank 0, of what each rank owns: in turn with what else is being carried."""
        exchange = self._exchange
        if exchange is None or not self._is_gathered:
            return vector if self._is_first else None
        return self._worker.wait_for(lambda: exchange.gather(index, vector))

    def gathered(self, vectors: list[Tensor]) -> list[Tensor] | None:
        """Whole fragments, of each rank's `global_vectors`, say, on rank 0. All call it, but where rank 0 owns all."""
        whole = [self.gather(index, vector) for index, vector in enumerate(vectors)]
        return [vector for vector in whole if vector is not None] if self._is_first else None

    def global_vectors(self) -> list[Tensor]:
        """Per fragment the global parameters as last applied, what this rank owns: shape (n,), float32. Not copies."""
        if self._lane is not None:
            self._worker.drain()
        return self._base

    def own_vectors(self) -> list[Tensor]:
        """Per fragment what this learner came to by itself, what this rank owns: shape (n,), float32, CPU.

        Until the run's last merges begin that is what the model holds now (copies); from then on what it held just
        before them, for they take the plain mean whole: afterwards it holds the global parameters plus a few steps.
        """
        return self._own if self._own is not None else [self.vector(index) for index in range(len(self.positions))]

    def vector(self, index: int) -> Tensor:
        """Copy this rank's part of fragment `index` as the model holds it now: shape (n,), float32, CPU."""
        values = host_values(self._owned[index].size)
        self.tensors.read(self._owned[index], values)
        return values

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self, request: SnapshotRequested) -> Answer | None:
        """Copy a fragment and have it encoded.

        Returns: the answer if it is known at once (denied, or the same snapshot as before), else None: it comes by
        `answer`, after `encode_taken`.
        """
        self._worker.check()
        previous = self._snapshots.get(request.fragment)
        name = request.version, request.base_version
        if previous is not None and (previous.version, previous.contribution.base_version) == name:
            return previous.answer if previous.encoded.is_set() else None
        position = self.positions[request.fragment]
        if request.base_version != position.base_version:
            reason = f"base is version {position.base_version}, asked for one against {request.base_version}"
            return SnapshotDenied(request.fragment, request.version, reason)
        if self.step <= position.included_step:
            return SnapshotDenied(request.fragment, request.version, NO_STEPS)
        if previous is not None:
            self._resolve(previous)
        local = self._owned[request.fragment]
        buffer = self._rooms.pop() if self._rooms else host_values(max(local.size for local in self._owned))
        values = buffer[: local.size]
        fetch = None if self._lane is None else self._lane.pack(local, values, is_kept=self._is_encoded_there)
        if fetch is None:
            self.tensors.read(local, values)
        contribution = Contribution(
            learner=self.settings.region,
            incarnation=self.settings.incarnation,
            fragment=request.fragment,
            base_version=request.base_version,
            snapshot=self._next_snapshot,
            step_from=position.included_step,
            step_to=self.step,
            tokens=self.tokens - position.included_tokens,
            squared_norms=(),
            rows=HERE.rows(request.fragment, self.step),
        )
        looks = self.pending_looks()
        snapshot = HeldSnapshot(request.version, contribution, self.tokens, values, buffer, fetch, looks)
        self._next_snapshot += 1
        self._snapshots[request.fragment] = snapshot
        self._taken.append(snapshot)
        return None

    def encode_taken(self) -> None:
        """Have the snapshots of this boundary encoded, now that nothing else is to be done before they are told."""
        for snapshot in self._taken:
            encode = partial(self._encode, snapshot)
            if snapshot.fetch is None or (self._exchange is not None and self._is_gathered):
                self._worker.put(encode)  # what all ranks meet in goes in one order
            else:
                snapshot.fetch.add_done_callback(lambda _, encode=encode: self._worker.put(encode))  # type: ignore[misc]
        self._taken.clear()

    def _encode(self, snapshot: HeldSnapshot) -> None:
        """In the worker. Base can't change meanwhile: `is_busy` says so."""
        # A step that others may merge must not be forgotten by a power cut: the counters first.
        durable = self._worker.disk.submit(self._before_ready)
        room = snapshot.fetched()
        answer = self._encoded(snapshot, None if snapshot.refuse() else room)
        if self._lane is not None and room is not None:
            self._lane.give_back(room)
        durable.result()
        snapshot.answer = answer
        snapshot.encoded.set()
        if answer is not None:
            self._answer(answer)

    def _encoded(self, snapshot: HeldSnapshot, room: Room | None) -> SnapshotReady | SnapshotDenied | None:
        """The answer; None on ranks other than 0."""
        contribution, exchange = snapshot.contribution, self._exchange if self._is_gathered else None
        index = contribution.fragment
        # The same subtraction as the kernel's.
        difference = None if exchange is None else exchange.gather(index, self._base[index] - snapshot.values)
        if not self._is_first:
            return None
        try:
            if difference is not None:
                norms = self._contributions.encode_difference(index, difference.numpy())
            else:
                base, lane = self._base[index], self._lane
                blocks = self._contributions.blocks[index]
                rows = None if lane is None or room is None else lane.encode(room, base, blocks)
                norms = self._contributions.encode(index, base.numpy(), snapshot.values.numpy(), rows)
        except PayloadCorrupt as error:
            reason = f"step {contribution.step_to}: {snapshot.refusal or error}"
            return SnapshotDenied(index, snapshot.version, reason)
        return SnapshotReady(replace(contribution, squared_norms=tuple(norms.tolist())))

    # ---- versions ----------------------------------------------------------------------------------------------------
    def is_busy(self, index: int) -> bool:
        """Whether a version of this fragment can't be taken now: its base is still read, or one is on its way."""
        self._worker.check()
        snapshot = self._snapshots.get(index)
        return index in self.incoming or (snapshot is not None and not snapshot.encoded.is_set())

    def has_room(self, order: SnapshotRequested | VersionOffered, *, ahead: int) -> bool:
        """Whether an order can be carried out at this boundary, after `ahead` others of its kind."""
        if self._lane is None:
            return True
        return ahead < self._lane.free[isinstance(order, VersionOffered)]

    def take(self, offer: VersionOffered, values: Tensor | None = None) -> None:
        """Begin to take a version from its slot, or rank 0's `values` (n,), float32, CPU: those stay as they are while
        they are base. Ask `is_busy` first.

        Raises LearnerError: the daemon names a snapshot that this learner does not have.
        """
        index = offer.fragment
        if values is None:
            values = self._area[offer.slot, : self.manifest.fragments[index].size] if self._is_first else self._area
        incoming = self.incoming[index] = ComingVersion(offer, values, offer.slot)
        position, exchange, lane = self.positions[index], self._exchange, self._lane
        if (exchange is None and lane is None) or offer.version <= position.base_version:
            incoming.arrived.set()
            return
        # The newest snapshot stays while a version is coming; what the steps are measured from is known now.
        snapshot = self._included(offer)
        anchor = self._base[index] if snapshot is None else snapshot.values
        is_kept = position.base_version >= 0 and self.settings.carry is CarryMode.CARRY
        if lane is not None:
            incoming.room = lane.reserve(self._resident[index])

        def carry() -> None:
            if exchange is not None:
                # A copy, for what is returned may be a part of it, and the daemon writes the next version there.
                incoming.new = exchange.scatter(index, incoming.place.clone() if self._is_first else None)
                incoming.anchor_followed = exchange.share_anchor(index, anchor) if is_kept else None
            if lane is not None and incoming.room is not None:
                anchors = [vector for vector in (anchor, incoming.anchor_followed) if vector is not None]
                lane.send(incoming.room, incoming.new or (incoming.place,), anchors if is_kept else ())
            incoming.arrived.set()

        self._worker.put(carry)

    def finish_reading(self) -> None:
        """Wait until no slot is read but that of a base: another daemon may write there then. Raises LearnerError."""
        if self.incoming:
            self._worker.drain()
        for incoming in self.incoming.values():
            incoming.place, incoming.slot = incoming.place.clone(), NO_SLOT

    def arrived(self) -> tuple[int, ...]:
        """Fragments, ascending, of which this rank has all of a version that was begun."""
        self._worker.check()
        coming = self.incoming.items()
        return tuple(sorted(index for index, incoming in coming if incoming.arrived.is_set())) if coming else ()

    def apply(self, offer: VersionOffered, values: Tensor | None = None) -> OfferApplied:
        """`take` and `finish` at once, on all ranks. Waits for a device, and for other ranks."""
        self.take(offer, values)
        if self._lane is not None or self._exchange is not None:
            self._worker.drain()
        return self.finish(offer.fragment)

    def finish(self, index: int) -> OfferApplied:
        """Apply what has arrived on all ranks, keeping the steps that are not in it (design part 5).

        A version that the learner already has, or an older one, changes nothing. Returns the answer for the daemon.

        Raises LearnerError: the daemon names a snapshot that this learner does not have.
        """
        incoming, position = self.incoming.pop(index), self.positions[index]
        offer, version = incoming.offered, incoming.offered.version
        if version <= position.base_version:
            return OfferApplied(index, position.base_version, position, 1.0, 0, self.slots[index])
        snapshot = self._included(offer)
        if offer.is_last:
            if self._own is None and self.is_placed:
                self._own = self.own_vectors()
            self._ended.add(index)
        elif index in self._ended and self.is_placed:  # the run goes on: by another leader, or with wider limits
            self._own = None
            self._ended.clear()
        plan, kept_steps = self._plan(position, snapshot, version)
        is_kept = plan.anchor is not Anchor.NONE
        with self.revert.around(self._owned[index]):
            if self._lane is not None and incoming.room is not None:
                self._lane.apply(incoming.room, is_anchored=is_kept, carry_factor=plan.carry_factor)
                self._worker.put(partial(self._keep, index, incoming.room))
            else:
                self._shift(incoming, plan, snapshot)
        if self._is_base_shared:
            self._base[index], self.slots[index] = incoming.place, incoming.slot
        self.positions[index] = position_after(
            position,
            inclusion=None if snapshot is None else (snapshot.contribution.step_to, snapshot.tokens),
            step=self.step,
            tokens=self.tokens,
            version=version,
            mode=self.settings.carry,
            is_kept=is_kept,
        )
        if snapshot is not None:
            self._last_included[index] = snapshot.contribution.snapshot
            HERE.include(index, snapshot.contribution.step_to)
        if index in self._snapshots:
            self._resolve(self._snapshots[index])
        carry_factor = 1.0 if position.base_version < 0 else plan.carry_factor
        self.applied += 1
        return OfferApplied(index, version, self.positions[index], carry_factor, kept_steps, self.slots[index])

    def _shift(self, incoming: ComingVersion, plan: CarryPlan, snapshot: HeldSnapshot | None) -> None:
        """Apply a version on the CPU."""
        index = incoming.offered.fragment
        anchor = anchor_followed = None
        if plan.anchor is not Anchor.NONE:
            anchor = self._base[index] if snapshot is None else snapshot.values
            anchor_followed = incoming.anchor_followed
        new, new_followed = incoming.new or (incoming.place, None)
        self.tensors.shift(self._owned[index], new, anchor, plan.carry_factor, self._scratch)
        if new_followed is not None:
            self.tensors.shift(self._followed[index], new_followed, anchor_followed, plan.carry_factor, self._scratch)
        self._hold(index, new)

    def _hold(self, index: int, new: Tensor) -> None:
        if not self._is_base_shared:
            self.tensors.held(self._owned[index], new, self._base[index])

    def _keep(self, index: int, room: Room) -> None:
        """In the worker: base is what was applied from the room. Snapshots against it come later to the worker."""
        self._hold(index, room.host[0, : self._owned[index].size])
        assert self._lane is not None
        self._lane.give_back(room)

    def _included(self, offer: VersionOffered) -> HeldSnapshot | None:
        if offer.included_snapshot == NO_SNAPSHOT:
            return None
        if offer.included_snapshot <= self._last_included.get(offer.fragment, NO_SNAPSHOT):
            # The daemon made this offer before it knew what this learner had just applied: the snapshot is in its base.
            return None
        snapshot = self._snapshots.get(offer.fragment)
        if snapshot is None or snapshot.contribution.snapshot != offer.included_snapshot:
            raise LearnerError(
                f"fragment {offer.fragment} version {offer.version} includes snapshot {offer.included_snapshot}, "
                f"but this learner (incarnation {self.settings.incarnation}) holds "
                f"{'none' if snapshot is None else snapshot.contribution.snapshot}: its steps can't be carried over; "
                "restart the learner"
            )
        return snapshot

    def _plan(self, position: FragmentPosition, snapshot: HeldSnapshot | None, version: int) -> tuple[CarryPlan, int]:
        """The plan, and how many own steps it keeps."""
        if position.base_version < 0:
            return CarryPlan(Anchor.NONE, 0.0), 0
        since = self.step - (position.included_step if snapshot is None else snapshot.contribution.step_to)
        missed = version - (position.base_version if snapshot is None else snapshot.version)
        mode, limit = self.settings.carry, self.settings.carry_steps_limit
        is_included = snapshot is not None
        plan = carry_plan(
            mode, is_included=is_included, versions_missed=missed, steps_since_inclusion=since, carry_steps_limit=limit
        )
        return plan, since if plan.carry_factor > 0.0 else 0

    def _resolve(self, snapshot: HeldSnapshot) -> None:
        del self._snapshots[snapshot.contribution.fragment]
        # While the encoder still reads the values, they are left to the garbage collector.
        if snapshot.encoded.is_set() and len(self._rooms) < SPARE_ROOMS:
            self._rooms.append(snapshot.buffer)

    def close(self) -> None:
        """Stop the worker and let go of the shared memory."""
        if self._lane is not None:
            self._lane.close()
        self._worker.close()
        self.replicas.close()
        self._area = torch.zeros(0, 0)
        self._contributions.close()
