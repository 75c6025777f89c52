"""builtin/sharding.py on one rank; several are in tests/e2e/test_sharded_regions.py and in `demo --ranks`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diloco_node.learner.builtin.sharding import TrainerRank, _blocks, begin_ranks, on_ranks, whole_norm


def test_without_a_launcher_there_is_one_rank_and_no_group() -> None:
    place = begin_ranks()
    assert (place.rank, place.ranks) == (0, 1)
    assert not torch.distributed.is_initialized()


def test_one_rank_trains_with_the_loss_as_it_is() -> None:
    def loss(windows: Tensor) -> Tensor:
        return windows.sum()

    place = TrainerRank(0, 1, torch.device("cpu"))
    for shard in ("none", "ddp", "fsdp"):
        model = nn.Linear(2, 2)
        assert on_ranks(model, loss, shard=shard, place=place) is loss
        assert type(model) is nn.Linear


def test_what_is_cut_are_the_blocks_of_the_outermost_lists() -> None:
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    model = nn.ModuleDict({"body": nn.ModuleDict({"layers": nn.ModuleList([block, nn.Linear(2, 2)])})})
    assert list(_blocks(model)) == [block, model["body"]["layers"][1]]  # type: ignore[index]


def test_a_norm_of_a_whole_model_is_itself() -> None:
    norm = torch.tensor(2.0)
    assert whole_norm(norm) is norm
