"""Which rank of a region holds which part of each tensor, and which one owns it: what all ranks agree on at `attach`.

A rank holds boxes of tensors, as a DTensor names them (offsets and sizes along each axis): rows with FSDP, columns with
row-parallel layers, both on a two-dimensional mesh, all of it with DistributedDataParallel. A box that several ranks
hold is owned by the lowest of them; the others follow. Boxes are whole or disjoint, and cover each tensor once.

Pure: no torch, no communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from diloco_node.core.merge.fragments import Fragment, Piece, TensorSpec
from diloco_node.errors import LearnerError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A part of a tensor: [offset, offset + size) along each axis; of a scalar there are none."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Values in it."""
        return prod(self.sizes)

    def meets(self, other: Box) -> bool:
        """Whether they have a value in common."""
        return all(
            max(low, start) < min(low + size, start + length)
            for low, size, start, length in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ) and bool(self.volume and other.volume)


@dataclass(frozen=True, slots=True)
class Slab:
    """What of one piece of a fragment lies in one box.

    Attributes:
        piece: of the fragment.
        inside: slices of the piece's values, seen as (rows of the piece, further axes of the tensor).
        local: the same values in the box.
        shape: of both.
    """

    piece: Piece
    box: Box
    inside: tuple[slice, ...]
    local: tuple[slice, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values in it."""
        return prod(self.shape)


class ShardMap:
    """See the module.

    Args:
        tensors: the model's, with their global shapes.
        held: by rank, the boxes that it holds of each tensor by name; empty ones are allowed.

    Attributes:
        ranks: how many.

    Raises:
        LearnerError: boxes overlap without being equal, lie outside of their tensor, or leave a part of it to nobody.
    """

    def __init__(self, tensors: Sequence[TensorSpec], held: Sequence[Mapping[str, Iterable[Box]]]) -> None:
        self.ranks = len(held)
        self._holders: dict[str, dict[Box, list[int]]] = {tensor.name: {} for tensor in tensors}
        for rank, boxes_of in enumerate(held):
            for name, boxes in boxes_of.items():
                if name not in self._holders:
                    raise LearnerError(f"rank {rank} holds {name!r}, which rank 0's model does not have")
                for box in boxes:
                    if box.volume:
                        self._holders[name].setdefault(box, []).append(rank)
        for tensor in tensors:
            _check_cover(tensor, sorted(self._holders[tensor.name]))

    def owner(self, name: str, box: Box) -> int:
        """The rank that keeps base and snapshots of a box."""
        return min(self._holders[name][box])

    def followers(self, name: str, box: Box) -> tuple[int, ...]:
        """The other ranks that hold it."""
        owner = self.owner(name, box)
        return tuple(rank for rank in sorted(set(self._holders[name][box])) if rank != owner)

    def slabs(self, fragment: Fragment, rank: int | None = None) -> tuple[Slab, ...]:
        """What of a fragment a rank owns, or all of it: in the order of pieces, then of boxes."""
        found = []
        for piece in fragment.pieces:
            for box in sorted(self._holders[piece.name]):
                if rank is None or self.owner(piece.name, box) == rank:
                    slab = _slab(piece, box)
                    if slab is not None:
                        found.append(slab)
        return tuple(found)


def _check_cover(tensor: TensorSpec, boxes: Sequence[Box]) -> None:
    for box in boxes:
        is_inside = len(box.offsets) == len(tensor.shape) and all(
            low >= 0 and low + size <= length
            for low, size, length in zip(box.offsets, box.sizes, tensor.shape, strict=True)
        )
        if not is_inside:
            raise LearnerError(f"{tensor.name!r} of shape {tensor.shape} has no part {box.offsets} + {box.sizes}")
    for at, box in enumerate(boxes):
        other = next((one for one in boxes[at + 1 :] if box.meets(one)), None)
        if other is not None:
            raise LearnerError(
                f"parts of {tensor.name!r} overlap: {box.offsets} + {box.sizes} and {other.offsets} + {other.sizes}. "
                "Attach the model with one layout on all ranks"
            )
    covered = sum(box.volume for box in boxes)
    if covered != tensor.size:
        raise LearnerError(
            f"ranks hold {covered} of the {tensor.size} values of {tensor.name!r}: all ranks of the region must "
            "attach, each with its own part of the model"
        )


def _slab(piece: Piece, box: Box) -> Slab | None:
    if not box.sizes:
        return Slab(piece, box, (), (), ())
    start, stop = max(piece.row_start, box.offsets[0]), min(piece.row_stop, box.offsets[0] + box.sizes[0])
    if start >= stop:
        return None
    further = tuple(slice(low, low + size) for low, size in zip(box.offsets[1:], box.sizes[1:], strict=True))
    return Slab(
        piece,
        box,
        inside=(slice(start - piece.row_start, stop - piece.row_start), *further),
        local=(slice(start - box.offsets[0], stop - box.offsets[0]), *(slice(0, size) for size in box.sizes[1:])),
        shape=(stop - start, *box.sizes[1:]),
    )
