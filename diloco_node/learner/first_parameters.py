"""Whether a run begins with the parameters that this region's script has made: told before the first step.

The run takes its first parameters from `run.init`, or from the region whose learner was there first. Where one script
loads trained weights and another draws random ones, chance decides, so both norms are told. A region that joins later
has only the digests of those parameters, so the tensors are named.
"""

from __future__ import annotations

import json
from typing import Final

import numpy as np
import torch

from diloco_node.codec.digest import fragment_digest
from diloco_node.core.types import FragmentPosition
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import LearnerFragments
from diloco_node.learner.model_watch import sample_of
from diloco_node.learner.ranks import Ranks

SAME: Final = 2.0**-8
"""Distance, in lengths of the values, that may be between the same parameters in types of different precision."""

NAMES_SHOWN: Final = 4
WAY_ON: Final = "Make or load the same in the scripts of all regions, or set run.init"


class FirstParameters:
    """The parameters as the script has made them, on all ranks; made before the run's overwrite them.

    Args:
        tensors: the model's. fragments, shards: how it is cut. ranks: of this region.
        digests: of the fragments that the run began with, at version 0; empty: there is nothing to compare.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        fragments: LearnerFragments,
        shards: ShardMap,
        ranks: Ranks,
        digests: tuple[bytes, ...] = (),
    ) -> None:
        self._tensors = tensors
        cut = fragments.manifest.fragments
        self._slabs = [slab for fragment in cut for slab in shards.owned(fragment, ranks.rank).slabs]
        self._ranks = ranks
        self._square = self._square_now()
        self._samples = [sample_of(tensors.values(slab)) for slab in self._slabs]
        # Tensors of fragments that are not the run's; known on rank 0.
        self._other_names: list[str] = []
        for fragment, digest in zip(cut, digests, strict=False):
            whole = fragments.gather(fragment.index, fragments.vector(fragment.index))
            if whole is not None and fragment_digest(theta := whole.numpy(), np.zeros_like(theta)) != digest:
                self._other_names += [piece.name for piece in fragment.pieces]

    def _square_now(self) -> float:
        """Square of the norm of what this rank owns."""
        squares = [
            torch.linalg.vector_norm(self._tensors.values(slab), dtype=torch.float32).double().square().cpu()
            for slab in self._slabs
        ]
        return float(sum(squares))

    def difference(self, positions: list[FragmentPosition]) -> str:
        """Say how they differ from those that the run has begun with; empty if they don't, or nobody can know.

        All ranks call it, with equal positions.
        """
        if any(position.base_version for position in positions):
            return self._late_difference()
        distance = length = 0.0
        for slab, before in zip(self._slabs, self._samples, strict=True):
            now = sample_of(self._tensors.values(slab))
            distance += float((now - before).square().sum())
            length += float(torch.maximum(now.square().sum(), before.square().sum()))
        numbers = json.dumps([self._square, self._square_now(), distance, length]).encode()
        rows = [json.loads(text) for text in self._ranks.all_bytes(numbers)]
        own, run, distance, length = (sum(row[column] for row in rows) for column in range(len(rows[0])))
        if distance <= SAME**2 * length:
            return ""
        return (
            f"the run began with other parameters than this script's: their norm is {run**0.5:.4g}, here it was "
            f"{own**0.5:.4g}. They are of run.init, or of the script that was first. {WAY_ON}"
        )

    def _late_difference(self) -> str:
        names = list(dict.fromkeys(self._other_names))
        if not names:
            return ""
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return (
            "the run began with other parameters than this script's, or of another type, in the fragments of "
            f"{', '.join(map(repr, names[:NAMES_SHOWN]))}{more}. This region goes on from the run's, which the script "
            f"that was first has made. {WAY_ON}"
        )
