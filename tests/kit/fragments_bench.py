"""The fragments of a learner with their memory, without a daemon."""

from __future__ import annotations

import queue
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from diloco_node.codec import kernels
from diloco_node.codec.blocks import FragmentBlocks
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.types import CarryMode, Codec
from diloco_node.learner.contribution_area import area_sizes
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.local_fragments import Answer, LearnerFragments
from diloco_node.learner.snapshots import FragmentSettings
from diloco_node.wire.learner_link import (
    NO_SLOT,
    OfferApplied,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
    version_slots,
)

PATIENCE_S = 180.0


class Bench:
    """Fragments with their memory, and the model they are of."""

    def __init__(
        self,
        model: nn.Module,
        *,
        fragments: int = 1,
        codec: Codec = Codec.FP32,
        carry: CarryMode = CarryMode.CARRY,
        limit: int = 100,
        before_ready: object = None,
    ) -> None:
        self.model = model
        tensors = ModelTensors(model)
        self.manifest = build_manifest(tensors.specs, fragments)
        self.codec = codec
        version_area_bytes, contributions_bytes = area_sizes(self.manifest, codec)
        self.version_area = np.zeros(version_area_bytes // 4, np.float32)
        self.contribution_area = np.zeros(contributions_bytes, np.uint8)
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        settings = FragmentSettings("us-east", 3, codec, carry, limit)
        more = {"before_ready": before_ready} if before_ready is not None else {}
        self.fragments = LearnerFragments(
            tensors,
            self.manifest,
            settings,
            shards=ShardMap(tensors.specs, [tensors.boxes]),
            version_area=self.version_area,
            contribution_area=self.contribution_area,
            answer=self.answers.put,
            **more,
        )
        self.slots = self.version_area.reshape(version_slots(self.manifest))

    def offer(
        self, fragment: int, version: int, values: object, snapshot: int = -1, *, is_last: bool = False
    ) -> OfferApplied:
        slot = next(slot for slot in range(len(self.slots)) if slot not in self.fragments.slots)
        self.slots[slot, : self.manifest.fragments[fragment].size] = values
        applied = self.fragments.apply(VersionOffered(fragment, version, snapshot, is_last, slot))
        for slot in set(range(len(self.slots))) - {*self.fragments.slots}:
            self.slots[slot] = np.nan  # the daemon may write there from now on
        return replace(applied, slot=NO_SLOT)

    def step(self, change: float, *, steps: int = 1, tokens: int = 10) -> None:
        """Inner steps that together move every parameter by `change`."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += change
        self.fragments.step += steps
        self.fragments.tokens += steps * tokens

    def snapshot(self, version: int, *, fragment: int = 0, base: int | None = None) -> Answer:
        wanted = SnapshotRequested(fragment, version, version - 1 if base is None else base)
        answer = self.fragments.snapshot(wanted)
        self.fragments.encode_taken()
        return self.answers.get(timeout=PATIENCE_S) if answer is None else answer

    def ready(self, version: int, *, fragment: int = 0, base: int | None = None) -> SnapshotReady:
        answer = self.snapshot(version, fragment=fragment, base=base)
        assert isinstance(answer, SnapshotReady), answer
        return answer

    def decoded(self, fragment: int = 0) -> np.ndarray:
        blocks = [FragmentBlocks(part.piece_sizes, self.codec) for part in self.manifest.fragments]
        start = sum(block.encoded_bytes for block in blocks[:fragment])
        out = np.zeros(blocks[fragment].values, np.float32)
        kernels.decode(blocks[fragment], self.contribution_area[start : start + blocks[fragment].encoded_bytes], out)
        return out


def one_value(value: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.full((1,), value, dtype=dtype))
    return model


def value(bench: Bench) -> float:
    return float(bench.model.w.detach())
