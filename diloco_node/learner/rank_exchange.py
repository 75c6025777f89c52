"""Bytes between the ranks of a region, in the background: from owners to rank 0, and from rank 0 to all holders.

Every rank calls the same methods in the same order, from one thread of its own, on a Gloo group that nothing else uses.
So no message says what it is. Nothing here is larger than one fragment, and each rank gets what it holds. Where all of
them hold the same, as with DistributedDataParallel, it is broadcast, for then ranks pass it on. Each raises
LearnerError when another rank is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_node.core.merge.fragments import Manifest
from diloco_node.learner.layouts.shard_map import LocalFragment, ShardMap, Slab
from diloco_node.learner.layouts.slab_values import host_values
from diloco_node.learner.ranks import among_ranks


class RankExchange:
    """The exchange of fragments between rank 0 and the others, on a Gloo group of all ranks."""

    def __init__(self, group: dist.ProcessGroup, rank: int, shards: ShardMap, manifest: Manifest) -> None:
        self._group = group
        self._rank = rank
        self._ranks = range(shards.ranks)
        self._manifest = manifest
        self._owned = [[shards.owned(fragment, r) for r in self._ranks] for fragment in manifest.fragments]
        self._followed = [[shards.followed(fragment, r) for r in self._ranks] for fragment in manifest.fragments]
        # By fragment, then (owner, follower): the same slabs as the two see them.
        self._pairs = [_pairs(shards, *fragments) for fragments in zip(self._owned, self._followed, strict=True)]
        # By fragment whether rank 0 owns all of it, and each other rank follows all of it.
        self._is_copied = [
            _are_copies(primaries, replicas) for primaries, replicas in zip(self._owned, self._followed, strict=True)
        ]

    @among_ranks()
    def gather(self, index: int, vector: Tensor) -> Tensor | None:
        """Rank 0 gets the whole fragment, shape (fragment.size,); vector: what this rank owns, float32, CPU."""
        if self._rank:
            if vector.numel():
                dist.send(vector, 0, group=self._group)
            return None
        fragment = self._manifest.fragments[index]
        vectors = [vector, *(host_values(local.size) for local in self._owned[index][1:])]
        _wait(dist.irecv(vectors[rank], rank, group=self._group) for rank in self._ranks[1:] if vectors[rank].numel())
        whole = host_values(fragment.size)
        for local, values in zip(self._owned[index], vectors, strict=True):
            for slab in local.slabs:
                self._inside(whole, slab).copy_(values[slab.span].view(slab.shape))
        return whole

    def pack(self, index: int, whole: Tensor) -> list[Tensor]:
        """On rank 0: what each rank holds of a fragment, what it owns first; ranks that hold the same share it."""
        packets: list[Tensor] = []
        alike: dict[tuple[object, ...], Tensor] = {}
        for primary, replica in zip(self._owned[index], self._followed[index], strict=True):
            slabs = (*primary.slabs, *replica.slabs)
            names = tuple(map(_name, slabs))
            values = alike.get(names)
            if values is None and not (primary.slabs and replica.slabs) and _is_all(slabs, whole):
                values = whole
            if values is None:
                values = host_values(primary.size + replica.size)
                for local, start in ((primary, 0), (replica, primary.size)):
                    room = values[start : start + local.size]
                    for slab in local.slabs:
                        room[slab.span].view(slab.shape).copy_(self._inside(whole, slab))
            alike[names] = values
            packets.append(values)
        return packets

    @among_ranks()
    def scatter(self, index: int, whole: Tensor | None) -> tuple[Tensor, Tensor]:
        """Every rank gets the values of a fragment that it owns, and those that it follows: float32, CPU.

        whole: shape (fragment.size,), float32, CPU, on rank 0; may become a part of what is returned.
        """
        primary, replica = self._owned[index][self._rank], self._followed[index][self._rank]
        if self._is_copied[index]:
            packet = host_values(replica.size) if whole is None else whole
            dist.broadcast(packet, 0, group=self._group)
        elif whole is not None:
            packets = self.pack(index, whole)
            _wait(
                dist.isend(packets[rank], rank, group=self._group) for rank in self._ranks[1:] if packets[rank].numel()
            )
            packet = packets[0]
        else:
            packet = host_values(primary.size + replica.size)
            if packet.numel():
                dist.recv(packet, 0, group=self._group)
        return packet[: primary.size], packet[primary.size :]

    @among_ranks()
    def share_anchor(self, index: int, anchor: Tensor) -> Tensor:
        """Followers get from owners what own steps are measured from: shape (followed size,) for (owned size,)."""
        replica_values = host_values(self._followed[index][self._rank].size)
        if self._is_copied[index]:
            dist.broadcast(replica_values if self._rank else anchor, 0, group=self._group)
            return replica_values
        works, rooms = [], []
        alike: dict[tuple[int, ...], Tensor] = {}
        for (owner, follower), (sources, targets) in self._pairs[index].items():
            if self._rank == owner:
                places = tuple(slab.offset for slab in sources)  # the same for all copies of a model
                packet = alike.get(places)
                if packet is None:
                    packet = alike[places] = torch.cat([anchor[slab.span] for slab in sources])
                works.append((dist.isend(packet, follower, group=self._group), packet))
            elif self._rank == follower:
                room = host_values(sum(slab.size for slab in targets))
                works.append((dist.irecv(room, owner, group=self._group), room))
                rooms.append((targets, room))
        _wait(work for work, _ in works)
        for targets, room in rooms:
            at = 0
            for slab in targets:
                replica_values[slab.span] = room[at : at + slab.size]
                at += slab.size
        return replica_values

    def _inside(self, whole: Tensor, slab: Slab) -> Tensor:
        """Where a slab lies in a fragment's vector."""
        piece = slab.piece
        shape = self._manifest.tensors[piece.tensor].shape
        values = whole[piece.offset : piece.offset + piece.size]
        return values.view(piece.row_stop - piece.row_start, *shape[1:])[slab.inside] if shape else values.view(())


def _pairs(
    shards: ShardMap, primaries: Sequence[LocalFragment], replicas: Sequence[LocalFragment]
) -> dict[tuple[int, int], tuple[tuple[Slab, ...], tuple[Slab, ...]]]:
    """(owner, follower) -> the slabs that they share, with their places at the owner and at the follower."""
    places = [{_name(slab): slab for slab in local.slabs} for local in primaries]
    slabs_of: dict[tuple[int, int], list[tuple[Slab, Slab]]] = {}
    for follower, local in enumerate(replicas):
        for slab in local.slabs:
            owner = shards.owner(slab.piece.name, slab.box)
            slabs_of.setdefault((owner, follower), []).append((places[owner][_name(slab)], slab))
    # All ranks go through the pairs in one order.
    return {
        pair: (tuple(source for source, _ in slabs), tuple(target for _, target in slabs))
        for pair, slabs in sorted(slabs_of.items())
    }


def _are_copies(primaries: Sequence[LocalFragment], replicas: Sequence[LocalFragment]) -> bool:
    slabs = primaries[0].slabs
    is_whole = all(slab.size == slab.piece.size for slab in slabs) and not any(local.slabs for local in primaries[1:])
    return is_whole and all(local.slabs == slabs for local in replicas[1:])


def _name(slab: Slab) -> tuple[object, ...]:
    return slab.piece.name, slab.piece.value_start, slab.box


def _is_all(slabs: Sequence[Slab], whole: Tensor) -> bool:
    """Whether they are the fragment as it is, pieces that are not cut in their order."""
    return all(slab.size == slab.piece.size for slab in slabs) and sum(slab.size for slab in slabs) == whole.numel()


def _wait(works: Iterable[dist.Work | None]) -> None:
    """All of them are begun before the first is waited for."""
    for work in list(works):
        if work is not None:
            work.wait()
