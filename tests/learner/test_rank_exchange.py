from typing import Any

import pytest
import torch

from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.learner.layouts.shard_map import Box, ShardMap, whole_box
from diloco_node.learner.rank_exchange import RankExchange

pytestmark = pytest.mark.no_device("what ranks send one another lies on the host")

SPECS = (TensorSpec("a", (8, 3)), TensorSpec("b", (5,)), TensorSpec("c", ()))
GROUP: Any = None


def test_copies_of_a_model_cost_rank_0_no_copy_of_a_fragment_each() -> None:
    manifest = build_manifest(SPECS, 2)
    shards = ShardMap(SPECS, [{spec.name: [whole_box(spec.shape)] for spec in SPECS} for _ in range(8)])
    exchange = RankExchange(GROUP, 0, shards, manifest)
    for fragment in manifest.fragments:
        whole = torch.rand(fragment.size)
        assert all(packed is whole for packed in exchange.pack(fragment.index, whole))
    assert all(exchange._is_copied), "and are broadcast"


def test_ranks_that_hold_the_same_shards_are_sent_the_same_memory() -> None:
    """Two copies of two shards, as with HSDP."""
    manifest = build_manifest(SPECS, 2)
    halves: list[dict[str, list[Box]]] = [
        {"a": [Box((0, 0), (4, 3))], "b": [Box((0,), (3,))], "c": [Box((), ())]},
        {"a": [Box((4, 0), (4, 3))], "b": [Box((3,), (2,))], "c": [Box((), ())]},
    ]
    shards = ShardMap(SPECS, halves * 2)
    exchange = RankExchange(GROUP, 0, shards, manifest)
    assert not any(exchange._is_copied)
    for fragment in manifest.fragments:
        whole = torch.rand(fragment.size)
        packed = exchange.pack(fragment.index, whole)
        assert packed[0].numel() + packed[1].numel() >= fragment.size
        assert len({one.data_ptr() for one in packed if one.numel()}) <= 3
        for (owner, follower), (sent, taken) in exchange._pairs[fragment.index].items():
            assert owner < follower
            assert [(one.piece, one.box, one.inside) for one in sent] == [
                (one.piece, one.box, one.inside) for one in taken
            ]
