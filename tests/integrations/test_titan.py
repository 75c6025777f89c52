"""The torchtitan example: what each rank of each region reads. tests/e2e trains with the real library."""

import runpy
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.kit.repository import ROOT

Build = Callable[..., Any]


class Loader:
    """As torchtitan's: the part of a rank, which goes on with the state of as many ranks only."""

    def __init__(self, dp_world_size: int, dp_rank: int) -> None:
        self.part, self.state = (dp_rank, dp_world_size), dict[str, int]()

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["world_size"] == self.part[1], "dp_degree is inconsistent"
        self.state = state


NAMES = (
    "torchtitan",
    "torchtitan.config",
    "torchtitan.protocols",
    "torchtitan.protocols.train_spec",
    "torchtitan.tools",
    "torchtitan.tools.logging",
    "torchtitan.train",
)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the example defines; torchtitan itself wants an accelerator to be imported."""
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, mock.MagicMock(Trainer=object))
    return runpy.run_path(str(ROOT / "examples" / "torchtitan_train.py"))


def test_ranks_of_all_regions_read_parts_of_their_own(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own_part: Callable[[Build], Build] = example["own_part"]
    read = []
    for index in range(3):
        monkeypatch.setattr("diloco_node.place", lambda index=index: (index, 3))
        build = own_part(Loader)
        read += [build(dp_world_size=2, dp_rank=rank).part for rank in range(2)]
    assert sorted(read) == [(rank, 6) for rank in range(6)]


def test_a_position_of_other_members_is_left(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_node.place", lambda: (1, 3))
    loader = example["own_part"](Loader)(dp_world_size=2, dp_rank=0)
    loader.load_state_dict({"world_size": 4, "dp_rank_2": 9})
    assert not loader.state
    loader.load_state_dict({"world_size": 6, "dp_rank_2": 9})
    assert loader.state


def test_several_stages_on_a_rank_are_refused(example: dict[str, Any]) -> None:
    trainer = example["DilocoTrainer"].__new__(example["DilocoTrainer"])
    trainer.model_parts = [object(), object()]
    with pytest.raises(ValueError, match="1F1B"):
        trainer.train()
