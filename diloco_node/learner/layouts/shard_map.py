"""The map from ranks of a region to the parts of each tensor that they hold and own. All agree on it at `attach`.

A rank holds boxes of tensors, as a DTensor names them (offsets and sizes along each axis): rows with FSDP, columns with
row-parallel layers, both on a two-dimensional mesh, all of it with DistributedDataParallel. A box that several ranks
hold is owned by the lowest of them; the others follow. Boxes are whole or disjoint, and cover each tensor once.

Pure: no torch, no communication.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from diloco_node.core.merge.fragments import Fragment, Piece, TensorSpec
from diloco_node.core.types import MergeRule
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

    def slices(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in a box around it."""
        starts = [low - outer_low for low, outer_low in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def common(self, box: Box) -> Box | None:
        """The values that are in both; None: there are none."""
        axes = zip(self.offsets, self.sizes, box.offsets, box.sizes, strict=True)
        if any(low + size <= box_low or box_low + box_size <= low for low, size, box_low, box_size in axes):
            return None  # as a rule, in a check of all pairs
        lows = tuple(map(max, self.offsets, box.offsets))
        sizes = tuple(
            min(low + size, box_low + box_size) - max(low, box_low)
            for low, size, box_low, box_size in zip(self.offsets, self.sizes, box.offsets, box.sizes, strict=True)
        )
        return Box(lows, sizes) if all(size > 0 for size in sizes) else None


@dataclass(frozen=True, slots=True)
class Slab:
    """The values of one piece of a fragment that lie in one box.

    Attributes:
        inside: slices of the piece's values, seen as (rows of the piece, further axes of the tensor).
        local: the same values in the box.
        shape: of both.
        offset: where it begins in the vector of a `LocalFragment`.
    """

    piece: Piece
    box: Box
    inside: tuple[slice, ...]
    local: tuple[slice, ...]
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        """Values in it."""
        return prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its box."""
        return self.shape == self.box.sizes

    @property
    def span(self) -> slice:
        """Its place in the vector of a `LocalFragment`."""
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class LocalFragment:
    """The part of a fragment that one rank holds: slabs, one after the other in a vector of `size` float32 values."""

    index: int
    slabs: tuple[Slab, ...]
    size: int


class ShardMap:
    """The owners and holders of each box of each tensor.

    holdings: by rank, the boxes that it holds of each tensor by name; empty ones are allowed.

    Raises LearnerError: boxes overlap without being equal, lie outside of their tensor, or leave a part of it to
    nobody.
    """

    def __init__(self, tensors: Sequence[TensorSpec], holdings: Sequence[Mapping[str, Iterable[Box]]]) -> None:
        self.ranks = len(holdings)
        self._holders: dict[str, dict[Box, list[int]]] = {tensor.name: {} for tensor in tensors}
        for rank, boxes_of in enumerate(holdings):
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

    def copies(self) -> list[tuple[str, Box]]:
        """Boxes that several ranks hold, with the names of their tensors; in one order on all ranks."""
        return [(name, box) for name, boxes in self._holders.items() for box in boxes if self.followers(name, box)]

    @property
    def is_first_whole(self) -> bool:
        """Whether rank 0 owns all of the model: nothing needs to be gathered."""
        return all(self.owner(name, box) == 0 for name, boxes in self._holders.items() for box in boxes)

    def owned(self, fragment: Fragment, rank: int) -> LocalFragment:
        """Return the part of a fragment that a rank owns."""
        return self._local(fragment, lambda name, box: self.owner(name, box) == rank)

    def followed(self, fragment: Fragment, rank: int) -> LocalFragment:
        """Return the part of a fragment that a rank holds and another one owns."""
        return self._local(fragment, lambda name, box: rank in self.followers(name, box))

    def _local(self, fragment: Fragment, is_wanted: Callable[[str, Box], bool]) -> LocalFragment:
        """In the order of pieces, then of boxes."""
        slabs, offset = [], 0
        for piece in fragment.pieces:
            for box in sorted(self._holders[piece.name]):
                slab = _slab(piece, box) if is_wanted(piece.name, box) else None
                if slab is not None:
                    slabs.append(replace(slab, offset=offset))
                    offset += slab.size
        return LocalFragment(fragment.index, tuple(slabs), offset)


def describe(
    specs: Sequence[TensorSpec], boxes: Mapping[str, Sequence[Box]], marks: Mapping[str, str] | None = None
) -> bytes:
    """Describe one rank's part of the model, as JSON. marks: see `ModelTensors`."""
    marks = marks or {}
    entries = [
        [
            spec.name,
            spec.shape,
            spec.merge.value,
            [[box.offsets, box.sizes] for box in boxes[spec.name]],
            marks.get(spec.name, ""),
        ]
        for spec in specs
    ]
    return json.dumps(entries).encode()


def agreed(documents: Sequence[bytes]) -> tuple[tuple[TensorSpec, ...], ShardMap]:
    """Put together what all ranks `describe`; each comes to the same. Raises LearnerError: that is no model."""
    specs: dict[str, tuple[TensorSpec, int]] = {}
    holdings: list[dict[str, list[Box]]] = []
    alike: dict[tuple[Box, str], list[tuple[str, int]]] = {}
    for rank, document in enumerate(documents):
        boxes_of: dict[str, list[Box]] = {}
        for name, shape, rule, boxes, mark in json.loads(document):
            spec = TensorSpec(name, tuple(shape), MergeRule(rule))
            before, first = specs.setdefault(name, (spec, rank))
            if before != spec:
                raise LearnerError(
                    f"{name!r} is {before.shape} and merged by {before.merge} on rank {first}, but {spec.shape} and "
                    f"{spec.merge} on rank {rank}: all ranks of a region must build the same model"
                )
            boxes_of[name] = [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]
            for box in boxes_of[name] if mark else ():
                alike.setdefault((box, mark), []).append((name, rank))
        holdings.append(boxes_of)
    for copies in alike.values():
        _check_not_tied(copies, holdings)
    tensors = tuple(spec for spec, _ in specs.values())
    return tensors, ShardMap(tensors, holdings)


def _check_not_tied(copies: Sequence[tuple[str, int]], holdings: Sequence[Mapping[str, object]]) -> None:
    """Raise LearnerError: tensors of one value and several names are on ranks of which none has both."""
    first, rank = copies[0]
    for name, other_rank in copies:
        if name != first and not any(first in names and name in names for names in holdings):
            raise LearnerError(
                f"{first!r} on rank {rank} and {name!r} on rank {other_rank} begin with the same values: a weight that "
                "is tied across pipeline stages would be merged as two tensors, which come apart. Put both on one "
                f"stage. If the loop trains them as two tensors, say so on all ranks: attach(..., untied=({name!r},))"
            )


def join(first: LocalFragment, second: LocalFragment) -> LocalFragment:
    """One vector of both, the second after the first."""
    slabs = (*first.slabs, *(replace(slab, offset=first.size + slab.offset) for slab in second.slabs))
    return LocalFragment(first.index, slabs, first.size + second.size)


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def _check_cover(tensor: TensorSpec, boxes: Sequence[Box]) -> None:
    for box in boxes:
        is_inside = len(box.offsets) == len(tensor.shape) and all(
            low >= 0 and low + size <= length
            for low, size, length in zip(box.offsets, box.sizes, tensor.shape, strict=True)
        )
        if not is_inside:
            raise LearnerError(f"{tensor.name!r} of shape {tensor.shape} has no part {box.offsets} + {box.sizes}")
    for at, box in enumerate(boxes):
        twin = next((later for later in boxes[at + 1 :] if box.common(later)), None)
        if twin is not None:
            raise LearnerError(
                f"parts of {tensor.name!r} overlap: {box.offsets} + {box.sizes} and {twin.offsets} + {twin.sizes}. "
                "Attach the model with one layout on all ranks"
            )
    volume = sum(box.volume for box in boxes)
    if volume != tensor.size:
        raise LearnerError(
            f"ranks hold {volume} of the {tensor.size} values of {tensor.name!r}: all ranks of the region must "
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
