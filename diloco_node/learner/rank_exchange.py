"""Bytes between the ranks of a region, in the background: from owners to rank 0, and from rank 0 to all holders.

Every rank calls the same methods in the same order, from one thread of its own, on a Gloo group that nothing else uses.
So no message says what it is. Nothing here is larger than one fragment, and nothing is broadcast: each rank gets what
it holds. Each raises LearnerError when another rank is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from diloco_node.core.merge.fragments import Manifest
from diloco_node.learner.layouts.shard_map import LocalFragment, ShardMap, Slab
from diloco_node.learner.layouts.tensors import host_values
from diloco_node.learner.ranks import among_ranks


class RankExchange:
    """See the module.

    Args:
        group: Gloo, of all ranks. rank: this one's. shards: who holds what. manifest: how the model is cut.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, shards: ShardMap, manifest: Manifest) -> None:
        self._group = group
        self._rank = rank
        self._ranks = range(shards.ranks)
        self._manifest = manifest
        self._owned = [[shards.owned(fragment, r) for r in self._ranks] for fragment in manifest.fragments]
        self._followed = [[shards.followed(fragment, r) for r in self._ranks] for fragment in manifest.fragments]
        # By fragment, then (owner, follower): the same slabs as the two see them.
        self._pairs = [_pairs(shards, *parts) for parts in zip(self._owned, self._followed, strict=True)]

    @among_ranks()
    def gather(self, index: int, own: Tensor) -> Tensor | None:
        """Rank 0 gets the whole fragment.

        Args:
            own: shape (owned size,), float32, CPU: what this rank owns.

        Returns:
            Shape (fragment.size,), on rank 0.
        """
        if self._rank:
            if own.numel():
                dist.send(own, 0, group=self._group)
            return None
        fragment = self._manifest.fragments[index]
        parts = [own, *(host_values(part.size) for part in self._owned[index][1:])]
        _wait(dist.irecv(parts[rank], rank, group=self._group) for rank in self._ranks[1:] if parts[rank].numel())
        whole = host_values(fragment.size)
        for part, values in zip(self._owned[index], parts, strict=True):
            for slab in part.slabs:
                self._inside(whole, slab).copy_(values[slab.span].view(slab.shape))
        return whole

    def _pack(self, index: int, whole: Tensor) -> list[Tensor]:
        """On rank 0: what each rank holds of a fragment, what it owns first; ranks that hold the same share it."""
        packed: list[Tensor] = []
        alike: dict[tuple[object, ...], Tensor] = {}
        for owned, followed in zip(self._owned[index], self._followed[index], strict=True):
            slabs = (*owned.slabs, *followed.slabs)
            held = tuple(map(_name, slabs))
            values = alike.get(held)
            if values is None and not (owned.slabs and followed.slabs) and _is_all(slabs, whole):
                values = whole
            if values is None:
                values = host_values(owned.size + followed.size)
                for part, start in ((owned, 0), (followed, owned.size)):
                    room = values[start : start + part.size]
                    for slab in part.slabs:
                        room[slab.span].view(slab.shape).copy_(self._inside(whole, slab))
            alike[held] = values
            packed.append(values)
        return packed

    @among_ranks()
    def scatter(self, index: int, whole: Tensor | None) -> tuple[Tensor, Tensor]:
        """Every rank gets its part of a fragment.

        Args:
            whole: shape (fragment.size,), float32, CPU, on rank 0; may become a part of what is returned.

        Returns:
            What this rank owns, and what it follows: float32, CPU.
        """
        owned, followed = self._owned[index][self._rank], self._followed[index][self._rank]
        if whole is not None:
            packed = self._pack(index, whole)
            _wait(dist.isend(packed[rank], rank, group=self._group) for rank in self._ranks[1:] if packed[rank].numel())
            own = packed[0]
        else:
            own = host_values(owned.size + followed.size)
            if own.numel():
                dist.recv(own, 0, group=self._group)
        return own[: owned.size], own[owned.size :]

    @among_ranks()
    def share_anchor(self, index: int, own: Tensor) -> Tensor:
        """Followers get from owners what their own steps are measured from.

        Args:
            own: shape (owned size,): the anchor of what this rank owns.

        Returns:
            Shape (followed size,): of what it follows.
        """
        followed = host_values(self._followed[index][self._rank].size)
        works, rooms = [], []
        alike: dict[tuple[int, ...], Tensor] = {}
        for (owner, follower), (sent, taken) in self._pairs[index].items():
            if self._rank == owner:
                places = tuple(slab.offset for slab in sent)  # the same for all copies of a model
                packed = alike.get(places)
                if packed is None:
                    packed = alike[places] = torch.cat([own[slab.span] for slab in sent])
                works.append((dist.isend(packed, follower, group=self._group), packed))
            elif self._rank == follower:
                room = host_values(sum(slab.size for slab in taken))
                works.append((dist.irecv(room, owner, group=self._group), room))
                rooms.append((taken, room))
        _wait(work for work, _ in works)
        for taken, room in rooms:
            at = 0
            for slab in taken:
                followed[slab.span] = room[at : at + slab.size]
                at += slab.size
        return followed

    def _inside(self, whole: Tensor, slab: Slab) -> Tensor:
        """Where a slab lies in a fragment's vector."""
        piece = slab.piece
        shape = self._manifest.tensors[piece.tensor].shape
        values = whole[piece.offset : piece.offset + piece.size]
        return values.view(piece.row_stop - piece.row_start, *shape[1:])[slab.inside] if shape else values.view(())


def _pairs(
    shards: ShardMap, owned: Sequence[LocalFragment], followed: Sequence[LocalFragment]
) -> dict[tuple[int, int], tuple[tuple[Slab, ...], tuple[Slab, ...]]]:
    """(owner, follower) -> the slabs that they share, with their places at the owner and at the follower."""
    places = [{_name(slab): slab for slab in part.slabs} for part in owned]
    found: dict[tuple[int, int], list[tuple[Slab, Slab]]] = {}
    for follower, part in enumerate(followed):
        for slab in part.slabs:
            owner = shards.owner(slab.piece.name, slab.box)
            found.setdefault((owner, follower), []).append((places[owner][_name(slab)], slab))
    # All ranks go through the pairs in one order.
    return {
        pair: (tuple(sent for sent, _ in slabs), tuple(taken for _, taken in slabs))
        for pair, slabs in sorted(found.items())
    }


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
