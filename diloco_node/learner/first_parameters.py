"""Whether a run begins with the parameters that this region's script has made: told before the first step.

The run takes its first parameters from `run.init`, or from the region whose learner was there first. Where one script
loads trained weights and another draws random ones, chance decides, so both norms are told. A region that joins later
has only the digests of those parameters, so the tensors are named.
"""

from __future__ import annotations

import json
from math import inf, isfinite
from typing import Final
from weakref import ref

import numpy as np
import torch
from torch import nn

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.types import FragmentPosition
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.ranks import Ranks
from diloco_node.learner.tensor_forms import sample_of
from diloco_node.wire.learner_link import Welcome

SAME: Final = 2.0**-8
"""Distance, in lengths of the values, that may be between the same parameters in types of different precision."""

NAMES_SHOWN: Final = 4
_TRAINED: Final[list[ref[nn.Module]]] = []
"""A layer of each model that this process has given to a run: what is in it afterwards is no beginning. None of its
tensors: torch can't put another in the place of one with a reference, as where DTensors change their device."""

WAY_ON: Final = "Make or load the same in the scripts of all regions, or set run.init"


class FirstParameters:
    """The parameters as the script has made them, on all ranks; made before the run's overwrite them.

    welcome: it has digests of the fragments that the run began with, or none to compare with.

    Raises LearnerError: the run is to begin with these parameters, and they are not finite.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        fragments: LearnerFragments,
        shards: ShardMap,
        ranks: Ranks,
        welcome: Welcome,
    ) -> None:
        self._tensors = tensors
        cut = fragments.manifest.fragments
        self._slabs = [slab for fragment in cut for slab in shards.owned(fragment, ranks.rank).slabs]
        self._ranks = ranks
        norms = self._norms()
        names = [slab.piece.name for slab, norm in zip(self._slabs, norms, strict=True) if not isfinite(norm)]
        if names and welcome.wants_initial_state:
            raise LearnerError(
                f"the run would begin with this model, and NaN, infinite or huge values are in {_listing(names)}: load "
                "or draw them before attach(), for to_empty() and torch.empty() leave what was in the memory. "
                "Observers have values once a batch went through the model"
            )
        self._square = sum(norm**2 for norm in norms)
        self._samples = [sample_of(tensors.values(slab)) for slab in self._slabs]
        # Tensors of fragments that are not the run's; known on rank 0.
        self._other_names: list[str] = []
        for fragment, digest in zip(cut, welcome.fragment_digests, strict=False):
            whole = fragments.gather(fragment.index, fragments.vector(fragment.index))
            if whole is not None and fragment_digest(theta := whole.numpy(), np.zeros_like(theta)) != digest:
                self._other_names += [piece.name for piece in fragment.pieces]

    def _norms(self) -> list[float]:
        """The norm of each slab that this rank owns."""
        return [
            float(torch.linalg.vector_norm(self._tensors.values(slab), dtype=torch.float32)) for slab in self._slabs
        ]

    def difference(self, positions: list[FragmentPosition]) -> str:
        """Say how they differ from those that the run began with; empty: they don't, or nobody knows. All call it."""
        tensors, modules = self._tensors.names.keys(), self._tensors.model.modules()
        # None: a rank may have frozen layers alone.
        first = next((module for module in modules if not tensors.isdisjoint(module._parameters.values())), None)
        is_trained = first is not None and any(trained() is first for trained in _TRAINED)
        if any(self._ranks.all_bytes(b"1" if is_trained else b"")):
            return ""
        if first is not None:
            _TRAINED.append(ref(first))
        if any(position.base_version for position in positions):
            if not self._other_names:
                return ""
            return (
                "the run began with other parameters than this script's, or of another type, in the fragments of "
                f"{_listing(self._other_names)}. This region goes on from the run's, which the script "
                f"that was first has made. {WAY_ON}"
            )
        names = []
        for slab, before in zip(self._slabs, self._samples, strict=True):
            now = sample_of(self._tensors.values(slab))
            length = torch.maximum(now.square().sum(), before.square().sum())
            # Each by itself: a head that was loaded is a hundredth of a model with many norms of ones.
            # NaN and infinite differ from everything.
            if not float((now - before).square().sum()) <= SAME**2 * float(length) < inf:
                names.append(slab.piece.name)
        numbers = json.dumps([self._square, sum(norm**2 for norm in self._norms()), names]).encode()
        rows = [json.loads(text) for text in self._ranks.all_bytes(numbers)]
        if not (names := [name for row in rows for name in row[2]]):
            return ""
        own, run = (sum(row[column] for row in rows) for column in range(2))
        return (
            f"the run began with other parameters than this script's, in {_listing(names)}: the norm of all is "
            f"{run**0.5:.4g}, here it was {own**0.5:.4g}. They are of run.init, or of the script that was first. "
            f"{WAY_ON}"
        )


def _listing(names: list[str]) -> str:
    """Return the first of the names, each once, and how many there are more."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - NAMES_SHOWN} more" if len(distinct) > NAMES_SHOWN else ""
    return f"{', '.join(map(repr, distinct[:NAMES_SHOWN]))}{more}"
