"""The tensors of a model that no merge makes equal, in short: regions that train on other ones name them.

Frozen parameters and buffers never travel. A listing has type, shape and length of each, and one projection on random
signs: two tensors at a relative distance d differ there by d lengths or so. Only words follow from it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from diloco_node.core.bounds import LISTING_BYTES_MAX
from diloco_node.escaping import escaped
from diloco_node.wire.tensor_listing import unpack_rows

EQUAL: Final = 2.0**-13
"""Distance, in lengths, between the same values that were computed on two kinds of devices."""

ROUNDED: Final = 2.0**-8
"""The same where the types differ, or where codes of a quantiser were computed."""

FLOATS: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
NAMES_SHOWN: Final = 2
_NAME_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class FrozenTensor:
    """A frozen parameter or a buffer.

    Attributes:
        name: without wrappers. kind: its type, as torch names it. shape: of the whole tensor.
        projection, norm: on random signs, and its length; NaN: they can't be known.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    projection: float
    norm: float

    @property
    def is_packed(self) -> bool:
        """Whether its values are codes, which another region may have of another quantiser."""
        return self.kind not in FLOATS

    @property
    def layer(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]

    def is_far_from(self, twin: FrozenTensor) -> bool:
        """Whether the values of both are other ones, by more than rounding."""
        limit = ROUNDED if self.is_packed or self.kind != twin.kind else EQUAL
        length = max(self.norm, twin.norm)
        return max(abs(self.projection - twin.projection), abs(self.norm - twin.norm)) > limit * length

    def row(self) -> list[Any]:
        """The tensor as JSON has it."""
        return [self.name, self.kind, list(self.shape), *(float(f"{x:.7g}") for x in (self.projection, self.norm))]


def pack_frozen(index: int, tensors: Sequence[FrozenTensor]) -> bytes:
    """Pack a region's tensors; where they are too many, summed by name. index: its place among those of the run."""
    for rows in ([tensor.row() for tensor in tensors], _sums_by_name(tensors), None):
        listing = zlib.compress(json.dumps([index, rows], separators=(",", ":")).encode(), 9)
        if len(listing) <= LISTING_BYTES_MAX:
            break
    return listing


def _sums_by_name(tensors: Sequence[FrozenTensor]) -> list[list[Any]]:
    """Add up tensors of one shape whose names differ in numbers alone, weighted, for they may change places."""
    sums: dict[tuple[str, str, tuple[int, ...]], list[float]] = {}
    for tensor in tensors:
        name = re.sub(r"\d+", "#", tensor.name) + str(list(tensor.shape))
        weight = 1.0 + zlib.crc32(tensor.name.encode()) / 2**32
        row = sums.setdefault((name, tensor.kind, tensor.shape), [0.0, 0.0])
        row[0] += weight * tensor.projection
        row[1] += (weight * tensor.norm) ** 2
    return [FrozenTensor(*key, row[0], row[1] ** 0.5).row() for key, row in sums.items()]


def frozen_difference(own_listing: bytes, first_listing: bytes, regions: Sequence[str]) -> str:
    """Say which tensors differ from those of the region that began the run; empty if none does.

    own_listing, first_listing: of `pack_frozen`. The other region's may be anything, and is escaped.
    regions: those that founded the run, sorted.
    """
    if not own_listing:
        return ""
    (own_index, here), (index, there) = _unpack(own_listing), _unpack(first_listing)
    is_founder = index in range(len(regions))
    if own_index >= 0 and not here and not is_founder:
        return ""  # nothing here could differ
    if own_index < 0 or not is_founder:
        return (
            "frozen tensors are not compared with those of other regions: there are too many, or the run began without "
            "a listing. Have all scripts load the same"
        )
    code_layers = {tensor.layer for tensor in (*here.values(), *there.values()) if tensor.is_packed}
    here, there = _comparable(here, there, code_layers), _comparable(there, here, code_layers)
    pairs = [(here[name], there[name]) for name in here if name in there and here[name].shape == there[name].shape]
    outliers = [own.name for own, first in pairs if own.is_far_from(first)]
    names_of_pairs = {own.name for own, _ in pairs}
    singles = [name for name in {**here, **there} if name not in names_of_pairs]
    kinds = [f"{own.name} ({own.kind} here, {first.kind} there)" for own, first in pairs if own.kind != first.kind]
    clauses = [
        *_clause(outliers, "{} hold other values"),
        *_clause(singles, "{} have another shape, or are on one side only"),
        *_clause(kinds, "{} are of another type"),
    ]
    if not clauses:
        return ""
    return (
        f"frozen tensors are not those of region {regions[index]}, which began the run: of {len(here)}, "
        f"{', '.join(clauses)}. Have the script load and build the same, and start it again: no merge makes them equal"
    )


def _comparable(
    tensors: Mapping[str, FrozenTensor], twins: Mapping[str, FrozenTensor], code_layers: set[str]
) -> dict[str, FrozenTensor]:
    """Leave out quantised layers, but for codes that both have: each region may quantise in its own way."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.layer not in code_layers
        or (name in twins and tensor.is_packed and (tensor.kind, tensor.shape) == (twins[name].kind, twins[name].shape))
    }


def _clause(names: Sequence[str], words: str) -> list[str]:
    if not names:
        return []
    examples = ", ".join(escaped(name[:_NAME_SHOWN]) for name in names[:NAMES_SHOWN])
    return [f"{words.format(len(names))} ({examples}{', ...' if len(names) > NAMES_SHOWN else ''})"]


def _unpack(listing: bytes) -> tuple[int, dict[str, FrozenTensor]]:
    """Place of the region, and its tensors by name; -1 if it is no listing."""
    try:
        index, rows = unpack_rows(listing)
        tensors = [
            FrozenTensor(str(name), str(kind), tuple(map(int, shape)), float(projection), float(norm))
            for name, kind, shape, projection, norm in rows
        ]
        if type(index) is not int:
            return -1, {}
    except (ValueError, TypeError, OverflowError, RecursionError, zlib.error):
        return -1, {}
    return index, {tensor.name: tensor for tensor in tensors}
