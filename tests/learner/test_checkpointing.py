"""How often checkpoints are written, and which rank reads which file."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco_node.errors import LearnerError
from diloco_node.learner import checkpoint as checkpoint_module
from diloco_node.learner import checkpointing as checkpointing_module
from diloco_node.learner.checkpoint import FileName, RankPlace, TrainingProgress
from diloco_node.learner.checkpointing import Checkpointing, _groups
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.ranks import Ranks
from diloco_node.learner.several_optimizers import as_one

DIGEST = "ab" * 32
PROGRESS = TrainingProgress(DIGEST, 1, 1001, 1, 7)


class Clock:
    """The time of both modules that measure checkpoints. Each look at it takes `look_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.look_s = 0.0
        for module in (checkpoint_module, checkpointing_module):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        self.now_s += self.look_s
        return self.now_s


def begun(
    folder: Path,
    *,
    every_s: float,
    values: int = 8,
    model: nn.Linear | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    stateful: dict[str, Any] | None = None,
    warn: Callable[[str], None] = print,
) -> Checkpointing:
    model = model or nn.Linear(values, 1, bias=False, device="meta" if values > 100 else "cpu")
    checkpoints = Checkpointing(optimizer, stateful or {}, every_s=every_s, warn=warn)
    if values > 100:
        model.weight = nn.Parameter(torch.empty(1).expand(1, values))  # large, and without memory
    tensors = ModelTensors(model)
    checkpoints.resume(folder, DIGEST, Ranks(), tensors=tensors, shards=ShardMap(tensors.specs, [tensors.boxes]))
    return checkpoints


def pause_s(checkpoints: Checkpointing, clock: Clock) -> float:
    """From now until the next one is due, in steps of half a second."""
    begun_s = clock.now_s
    while not checkpoints.is_due:
        clock.now_s += 0.5
        assert clock.now_s < begun_s + 200
    return clock.now_s - begun_s


def test_each_rank_reads_its_own_file_where_it_sees_it() -> None:
    names = [FileName(1, 5, RankPlace(rank, 4)) for rank in range(4)]
    assert _groups([names] * 4) == [dict(zip(names, range(4), strict=True))]
    assert _groups([names] * 2) == [dict(zip(names, (0, 1, 0, 1), strict=True))]
    assert _groups([names[:1], names[1:]]) == [dict(zip(names, (0, 1, 1, 1), strict=True))]


def test_what_a_killed_learner_was_writing_is_gone(tmp_path: Path) -> None:
    """safetensors writes under a name of its own, and renames: as large as a checkpoint."""
    folder = tmp_path / "learner" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / ".tmpkxyaIU").write_bytes(b"half")
    begun(tmp_path, every_s=60)
    assert not list(folder.iterdir())


def test_a_checkpoint_stays_due_until_there_is_memory_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    checkpoints = begun(tmp_path, every_s=10.0)
    assert checkpoints._writer is not None
    monkeypatch.setattr(checkpoints._writer, "save", lambda *given, is_waiting, **how: is_waiting)
    clock.now_s += 11.0
    checkpoints.save(PROGRESS)
    assert checkpoints.is_due
    checkpoints.save(PROGRESS, is_waiting=True)
    assert not checkpoints.is_due


def test_a_small_model_has_a_checkpoint_every_two_seconds_and_a_large_one_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    assert pause_s(begun(tmp_path / "small", every_s=60), clock) == 2.0
    assert pause_s(begun(tmp_path / "middle", every_s=60, values=25_000_000), clock) == 20.0
    assert pause_s(begun(tmp_path / "large", every_s=60, values=10**9), clock) == 60.0
    assert pause_s(begun(tmp_path / "often", every_s=0.5), clock) == 0.5


def test_a_disk_that_refuses_is_asked_again_no_sooner_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    checkpoints = begun(tmp_path, every_s=60)

    def refuse(*_: Any, **__: Any) -> Path:
        raise OSError("planted")

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", refuse)
    checkpoints.save_now(PROGRESS)
    assert checkpoints.written_step == -1
    assert pause_s(checkpoints, clock) == 60.0


def test_checkpoints_that_take_long_are_rarer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the time: one that took 0.25 s comes every 25 s, and no later than it is asked for."""
    clock = Clock(monkeypatch)
    checkpoints = begun(tmp_path, every_s=60)
    for look_s, expected_s in ((0.25, 25.0), (0.75, 60.0), (0.001, 2.0)):
        clock.look_s = look_s
        checkpoints.save_now(PROGRESS)
        clock.look_s = 0.0
        assert checkpoints.written_step == 1
        # It counts from the copy, and whoever measured looked at the clock three times since.
        assert expected_s - 3 * look_s <= pause_s(checkpoints, clock) <= expected_s + 0.5


class Broken:
    """A part of the loop whose state is of no use."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.state_dict = state

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


def raising() -> Any:
    raise IndexError("planted")


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (raising, r"state_dict\(\) of stateful 'part' fails with IndexError: planted"),
        (
            lambda: {"v": torch.ones(2, 2, device="cpu").to_sparse()},
            r"stateful\.part\.v can't be kept in a checkpoint: it is a torch.sp",
        ),
        (lambda: {"v": torch.ones(2, device="meta")}, r"stateful\.part\.v can't be kept .* without values"),
    ],
)
def test_a_state_that_can_not_be_kept_ends_the_checkpoints_of_all_ranks_and_is_told(
    state: Callable[[], Any], named: str, tmp_path: Path
) -> None:
    warnings: list[str] = []
    checkpoints = begun(tmp_path, every_s=60, stateful={"part": Broken(state)}, warn=warnings.append)
    checkpoints.save_now(PROGRESS)
    checkpoints.save_now(PROGRESS)
    (warning,) = warnings
    assert re.search(rf"no checkpoints of this learner, a restart begins its state anew: {named}", warning)
    assert not checkpoints.is_due
    assert not checkpoints.is_idle, "no rank is to write for one that does not"


def test_what_the_writing_thread_can_not_write_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Path:
        raise KeyError("planted")

    monkeypatch.setattr(checkpoint_module, "write_checkpoint", fail)
    warnings: list[str] = []
    checkpoints = begun(tmp_path, every_s=60, warn=warnings.append)
    checkpoints.save_now(PROGRESS)
    checkpoints.save_now(PROGRESS)
    assert warnings == ["no checkpoint of this learner can be written, training goes on: KeyError: 'planted'"]
    assert checkpoints.written_step == -1


def test_a_state_of_an_optimizer_that_belongs_to_no_parameter_comes_back(tmp_path: Path) -> None:
    warnings: list[str] = []
    for at in range(2):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpoints = begun(tmp_path, every_s=60, model=model, optimizer=optimizer, warn=warnings.append)
        others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        assert str(others) == ("{}" if at == 0 else "{'count': 3, 'ema': {'mean': tensor([2.])}}")
        added: dict[Any, Any] = {"count": 3, "ema": {"mean": torch.full((1,), 2.0, device="cpu")}}
        optimizer.state.update(added)
        checkpoints.save_now(PROGRESS)
        assert checkpoints.written_step == 1
    assert not [text for text in warnings if "no checkpoint" in text]
    both = as_one([optimizer, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)])
    assert both is not None
    with pytest.raises(LearnerError, match="SGD has a state 'count' that belongs to no parameter"):
        both.state_dict()


class Counting(torch.optim.SGD):
    """Its state has more than that of its parameters."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.get("count", self.count)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


def test_what_an_optimizer_has_beside_its_groups_is_kept_where_the_script_gives_it_twice(folder: Path) -> None:
    counts = []
    for count in (5, 0):
        model = nn.Linear(8, 1, bias=False)
        optimizer = Counting(model.parameters(), lr=0.1)
        optimizer.count = count
        checkpoints = begun(folder, every_s=60.0, model=model, optimizer=optimizer, stateful={"optimizer": optimizer})
        counts.append(optimizer.count)
        checkpoints.save_now(PROGRESS)
        checkpoints.wait()
    assert counts == [5, 5]
