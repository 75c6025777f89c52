"""builtin/sharding.py on one rank, and on two without a daemon; with one: tests/e2e/test_sharded_regions.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diloco_node.learner.builtin.sharding import TrainerRank, begin_ranks, on_ranks, whole_norm
from tests.kit.trainer_ranks import outcomes


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


def test_a_norm_of_a_whole_model_is_itself() -> None:
    norm = torch.tensor(2.0)
    assert whole_norm(norm) is norm


@pytest.mark.no_device("its ranks are processes without one")
def test_a_model_that_is_cut_trains_and_is_evaluated_like_copies_of_it(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("alpha beta gamma delta\n" * 40_000)
    shape = {"layers": 2, "dim": 16, "heads": 2, "context": 16}
    settings = {**shape, "batch": 4, "schedule_steps": 5, "warmup_steps": 0, "eval_windows": 8, "eval_every": 2}
    settings |= {"paths": [str(tmp_path / "words.txt")]}
    copies, cut = outcomes(2, [settings | {"shard": shard} for shard in ("ddp", "fsdp")])
    assert copies["val_loss"] < copies["loss_first"] - 0.2
    assert cut["val_loss"] == pytest.approx(copies["val_loss"], abs=1e-4)
    assert [line.split()[0] for line in cut["said"]] == ["files=1", "step=2", "step=4", "step=5"]
