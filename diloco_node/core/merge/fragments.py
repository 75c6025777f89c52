"""Cut a model into balanced fragments, the same on every region, and name the cut with a digest.

Only names, shapes and merge rules decide: two regions that list the same tensors in another order, in another process,
get the same manifest. Tensors larger than a fragment are first split along their first axis, so that an embedding does
not make one fragment many times the rest. Then the largest piece goes into the fragment that is smallest so far.

Source: Decoupled DiLoCo (arXiv 2604.21428), appendix C, "balanced tensor" fragments; there tensors are never split.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from diloco_node.core.types import SMALL_TENSOR_VALUES, MergeRule
from diloco_node.errors import ConfigError

TENSORS_MAX: Final = 65_536
"""More tensors than any published model has; a list beyond it is a mistake, and would make huge messages."""

FRAGMENTS_MAX: Final = 1_024
"""Every learner reports a position per fragment with each heartbeat."""

RANK_MAX: Final = 8
NAME_CHARACTERS_MAX: Final = 512
VALUES_MAX: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A trainable tensor, as far as the cut depends on it.

    name: unique in the model, printable, at most 512 characters. shape: each at least 1; `()` is a scalar.
    """

    name: str
    shape: tuple[int, ...]
    merge: MergeRule = MergeRule.RDA

    @property
    def rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_size(self) -> int:
        """Values in one row."""
        return prod(self.shape[1:])

    @property
    def size(self) -> int:
        """Values in the tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row_start, row_stop) of one tensor, as a part of a fragment. tensor: index into `Manifest.tensors`.

    value_start, value_stop: the same range in the flattened (row-major) tensor.
    offset: where the piece begins in the fragment's vector.
    """

    tensor: int
    name: str
    row_start: int
    row_stop: int
    value_start: int
    value_stop: int
    offset: int
    merge: MergeRule

    @property
    def size(self) -> int:
        """Values in the piece."""
        return self.value_stop - self.value_start


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed set of pieces, one after the other in a vector of `size` float32 values."""

    index: int
    pieces: tuple[Piece, ...]
    size: int

    @property
    def rules(self) -> tuple[MergeRule, ...]:
        """The merge rule of each piece."""
        return tuple(piece.merge for piece in self.pieces)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        """Values in each piece."""
        return tuple(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole cut: every value of every tensor is in exactly one piece. tensors: sorted by name.

    digest: SHA-256 (hex) of tensors and layout; regions with another digest can't merge.
    """

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    digest: str

    @property
    def size(self) -> int:
        """Values in the model."""
        return sum(fragment.size for fragment in self.fragments)


@dataclass(frozen=True, slots=True)
class _Strip:
    """Rows of a tensor that are not yet in a fragment."""

    tensor: int
    row_start: int
    row_stop: int
    size: int


def build_manifest(tensors: Sequence[TensorSpec], fragments: int) -> Manifest:
    """Cut the tensors, in any order, into parts of nearly equal size.

    No fragment exceeds the mean by more than the largest piece; a piece is at most one mean fragment, unless a single
    row is larger than that.

    Raises ConfigError: no tensors, a bad name or shape, a duplicate, too much of anything, or more fragments than
    pieces that can be made.
    """
    _check(tensors, fragments)
    in_order = tuple(sorted(tensors, key=lambda spec: spec.name))
    total = sum(spec.size for spec in in_order)
    target = -(-total // fragments)
    strips = [strip for index, spec in enumerate(in_order) for strip in _split(index, spec, target)]
    if len(strips) < fragments:
        raise ConfigError(
            f"rounds.fragments is {fragments}, but this model of {total} values in {len(in_order)} tensors gives only "
            f"{len(strips)} pieces; set it to {len(strips)} or less"
        )
    bins = _pack(strips, fragments)
    layout = tuple(_fragment(index, content, in_order) for index, content in enumerate(bins))
    return Manifest(in_order, layout, _digest(in_order, layout))


def _check(tensors: Sequence[TensorSpec], fragments: int) -> None:
    if not 1 <= fragments <= FRAGMENTS_MAX:
        raise ConfigError(f"rounds.fragments is {fragments}; it must be from 1 to {FRAGMENTS_MAX}")
    if not tensors:
        raise ConfigError("the model has no trainable tensors; check requires_grad of its parameters")
    if len(tensors) > TENSORS_MAX:
        raise ConfigError(f"the model has {len(tensors)} trainable tensors; at most {TENSORS_MAX} are supported")
    names: set[str] = set()
    for spec in tensors:
        _check_tensor(spec)
        if spec.name in names:
            raise ConfigError(f"tensor {spec.name!r} is listed twice; names must be unique (list tied tensors once)")
        names.add(spec.name)
    total = sum(spec.size for spec in tensors)
    if total > VALUES_MAX:
        raise ConfigError(f"the model has {total} values; at most {VALUES_MAX} are supported")


def _check_tensor(spec: TensorSpec) -> None:
    if not spec.name or len(spec.name) > NAME_CHARACTERS_MAX or not spec.name.isprintable():
        raise ConfigError(
            f"tensor name {spec.name[:80]!r} is empty, not printable or longer than {NAME_CHARACTERS_MAX} characters"
        )
    if len(spec.shape) > RANK_MAX:
        raise ConfigError(f"tensor {spec.name!r} has {len(spec.shape)} axes; at most {RANK_MAX} are supported")
    if any(length < 1 for length in spec.shape):
        raise ConfigError(f"tensor {spec.name!r} of shape {spec.shape} holds no values; leave it out of the fragments")


def _split(tensor: int, spec: TensorSpec, target: int) -> Iterator[_Strip]:
    """Whole tensors stay whole up to `target` values; larger ones give strips of a quarter of it, and a rest.

    Quarters, because the strips of a large embedding then fill the gaps that whole tensors leave. For a GPT of 12
    layers in 24 fragments the largest is 10 % over the mean; with strips of a whole fragment it was 20 %. Not below the
    size from which a codec's scales pay.
    """
    slab_values = min(target, max(target // 4, SMALL_TENSOR_VALUES))
    rows_each = spec.rows if spec.size <= target else max(1, slab_values // spec.row_size)
    for start in range(0, spec.rows, rows_each):
        stop = min(start + rows_each, spec.rows)
        yield _Strip(tensor, start, stop, (stop - start) * spec.row_size)


def _pack(strips: Sequence[_Strip], fragments: int) -> list[list[_Strip]]:
    """Largest strip first (ties by name, then rows), into the smallest fragment (ties by index).

    Every fragment gets at least one strip, for strips are not empty and there are at least as many as fragments.
    """
    bins: list[list[_Strip]] = [[] for _ in range(fragments)]
    smallest = [(0, index) for index in range(fragments)]
    # `tensor` is the rank of the name, so it stands for the name here.
    for strip in sorted(strips, key=lambda strip: (-strip.size, strip.tensor, strip.row_start)):
        size, index = smallest[0]
        bins[index].append(strip)
        heapq.heapreplace(smallest, (size + strip.size, index))
    return bins


def _fragment(index: int, strips: Sequence[_Strip], tensors: Sequence[TensorSpec]) -> Fragment:
    pieces = []
    offset = 0
    for strip in sorted(strips, key=lambda strip: (strip.tensor, strip.row_start)):
        spec = tensors[strip.tensor]
        start = strip.row_start * spec.row_size
        pieces.append(
            Piece(
                tensor=strip.tensor,
                name=spec.name,
                row_start=strip.row_start,
                row_stop=strip.row_stop,
                value_start=start,
                value_stop=start + strip.size,
                offset=offset,
                merge=spec.merge,
            )
        )
        offset += strip.size
    return Fragment(index, tuple(pieces), offset)


def _digest(tensors: Sequence[TensorSpec], fragments: Sequence[Fragment]) -> str:
    """SHA-256 of a text with one line per fact; names are printable, so a line break can't be smuggled in."""
    lines = ["diloco-node manifest 1"]
    for spec in tensors:
        lines.append(f"tensor {spec.merge.value} {'x'.join(map(str, spec.shape)) or 'scalar'} {spec.name}")
    for fragment in fragments:
        lines.append(f"fragment {fragment.index} {fragment.size}")
        lines.extend(f"piece {piece.tensor} {piece.row_start} {piece.row_stop}" for piece in fragment.pieces)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
