import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco_node.errors import LearnerError
from diloco_node.learner import checkpoint as checkpoint_module
from diloco_node.learner.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RankPlace,
    TrainingProgress,
    newest_first,
    read_checkpoint,
    write_checkpoint,
)
from diloco_node.learner.optimizer_parts import Kept, OptimizerParts
from tests.kit.fsync_kit import traced
from tests.kit.learner_kit import read_newest

DIGEST = "ab" * 32


def progress(step: int, *, incarnation: int = 1, digest: str = DIGEST) -> TrainingProgress:
    return TrainingProgress(digest, incarnation, step + 1000, step, 7 * step)


def checkpoint(step: int, **more: Any) -> Checkpoint:
    return Checkpoint(progress(step, **more), {"state.0.m": torch.full((3,), float(step), device="cpu")}, {}, {})


class Data:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "history": [1, 2.5, None, "x"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["history"] == [1, 2.5, None, "x"]
        self.position = state["position"]


def trained(optimizer_type: type[torch.optim.Optimizer], steps: int, **settings: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias]}]
    optimizer = optimizer_type(groups, lr=0.01, **settings)  # type: ignore[call-arg]
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_type", "settings"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.95)}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True}),
    ],
)
def test_restored_optimizer_takes_the_very_same_step(
    tmp_path: Path, optimizer_type: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    model, optimizer = trained(optimizer_type, 3, **settings)
    writer = CheckpointWriter(tmp_path)
    writer.save(progress(3), OptimizerParts(optimizer), {"data": Data(41)}, is_waiting=True)
    writer.wait()
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    assert found.progress == progress(3)
    again, other = trained(optimizer_type, 0, **settings)
    again.load_state_dict(model.state_dict())
    data = Data()
    found.restore(OptimizerParts(other), {"data": data}, rng=False)
    assert data.position == 41
    for one in (model, again):
        for parameter in one.parameters():
            parameter.grad = torch.full_like(parameter, -0.3)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_random_generator_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    writer = CheckpointWriter(tmp_path)
    writer.save(progress(1), None, {})
    writer.wait()
    expected = torch.randn(4, device="cpu")
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    found.restore(None, {}, rng=False)
    assert not torch.equal(torch.randn(4, device="cpu"), expected)
    found.restore(None, {}, rng=True)
    assert torch.equal(torch.randn(4, device="cpu"), expected)


def test_last_two_are_kept_and_the_newest_incarnation_is_the_newest(tmp_path: Path) -> None:
    for step, incarnation in [(900, 1), (1000, 1), (5, 2)]:
        write_checkpoint(tmp_path, checkpoint(step, incarnation=incarnation))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["learner-00000001-000000001000.safetensors", "learner-00000002-000000000005.safetensors"]
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    assert found.progress.step == 5


@pytest.mark.parametrize("where", ["head", "metadata", "tensors", "cut", "empty"])
def test_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    newest = write_checkpoint(tmp_path, checkpoint(2))
    data = bytearray(newest.read_bytes())
    at = {"head": 3, "metadata": data.index(b"global_step") + 16, "tensors": len(data) - 2}.get(where, 0)
    data[at] ^= 1
    newest.write_bytes({"cut": data[:-5], "empty": b""}.get(where, data))
    with caplog.at_level(logging.WARNING):
        found = read_newest(tmp_path, DIGEST)
    assert found is not None
    assert found.progress.step == 1
    assert "damaged" in caplog.text
    # Writing more removes old checkpoints, and not what people may want to look at.
    for step in (3, 4, 5):
        write_checkpoint(tmp_path, checkpoint(step))
    kept = newest.with_name(newest.name + ".damaged")
    assert kept.read_bytes() == {"cut": data[:-5], "empty": b""}.get(where, bytes(data))
    later = tmp_path / newest_first(tmp_path)[0].text
    later.write_bytes(b"damaged, too")
    read_newest(tmp_path, DIGEST)
    assert [path.name for path in tmp_path.glob("*.damaged")] == [f"{later.name}.damaged"], "one at most"


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(2))
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        data = bytearray(whole)
        data[at] ^= 1 << (at % 8)
        path.write_bytes(data)
        # A flip may also only change a space in the header: then what is read is what was written.
        try:
            found = read_checkpoint(path)
        except LearnerError:
            continue
        assert found.document() == checkpoint(2).document(), at
        assert torch.equal(found.tensors["state.0.m"], checkpoint(2).tensors["state.0.m"])


def test_checkpoint_of_another_model_is_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    write_checkpoint(tmp_path, checkpoint(2, digest="cd" * 32))
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    assert found.progress.step == 1
    assert read_newest(tmp_path, "ef" * 32) is None
    assert read_newest(tmp_path / "nothing-there", DIGEST) is None


def test_diverged_moments_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = trained(torch.optim.AdamW, 1)
    next(iter(optimizer.state.values()))["exp_avg"][0] = float("nan")
    writer = CheckpointWriter(tmp_path)
    with caplog.at_level(logging.WARNING):
        writer.save(progress(1), OptimizerParts(optimizer), {}, is_waiting=True)
        writer.wait()
    assert "not finite" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_disk_that_refuses_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way of the folder")
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints")
    with caplog.at_level(logging.WARNING):
        writer.save(progress(1), None, {})
        writer.wait()
    assert "training goes on" in caplog.text


def test_nothing_half_written_stays_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: object, path: Path, __: object) -> None:
        path.write_bytes(b"as much as fits")
        raise OSError(28, "No space left on device")

    write_checkpoint(tmp_path, checkpoint(1))
    with monkeypatch.context() as full:
        full.setattr(checkpoint_module, "save_file", fill)
        with pytest.raises(OSError, match="No space"):
            write_checkpoint(tmp_path, checkpoint(2))
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "learner-00000001-000000000002.partial").write_bytes(b"killed in the middle")
    write_checkpoint(tmp_path, checkpoint(3))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".safetensors"] * 2


@pytest.mark.no_device("it compares with what lies on the CPU")
def test_what_is_saved_is_the_moment_of_the_call(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD, 2, momentum=0.9)
    expected = {id(p): s["momentum_buffer"].clone() for p, s in optimizer.state.items()}
    writer = CheckpointWriter(tmp_path)
    writer.save(progress(1), OptimizerParts(optimizer), {})
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    writer.wait()
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    assert torch.equal(found.tensors["state.0.momentum_buffer"], expected[id(model.weight)])
    writer.save(progress(2), OptimizerParts(optimizer), {})  # and the copies' memory is used again, for the new values
    writer.wait()
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    assert not found.tensors["state.0.momentum_buffer"].any()


def test_state_that_can_not_be_kept_is_named(tmp_path: Path) -> None:
    class Odd(Data):
        def state_dict(self) -> dict[str, Any]:
            return {"generator": object()}

    with pytest.raises(LearnerError, match=r"stateful\.data\.generator can't be kept"):
        CheckpointWriter(tmp_path).save(progress(1), None, {"data": Odd()})


def test_a_part_that_has_another_name_than_before_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.save(progress(1), None, {"data": Data(), "schedule": Data()}, is_waiting=True)
    writer.wait()
    kept = read_newest(tmp_path, DIGEST)
    assert kept is not None
    kept.restore(None, {"data": Data()}, rng=False)
    assert "begun anew" not in caplog.text
    kept.restore(None, {"data": Data(), "scheduler": Data()}, rng=False)
    assert "has no 'scheduler': begun anew; it has 'schedule', which attach() was not given" in caplog.text


def test_another_optimizer_is_a_clear_error(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.AdamW, 1)
    writer = CheckpointWriter(tmp_path)
    writer.save(progress(1), OptimizerParts(optimizer), {}, is_waiting=True)
    writer.wait()
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())  # one group, not two
    with pytest.raises(LearnerError, match="remove the folder learner/checkpoints"):
        found.restore(OptimizerParts(other), {}, rng=False)


@pytest.mark.parametrize(
    ("before", "now"), [(torch.optim.AdamW, torch.optim.SGD), (torch.optim.SGD, torch.optim.AdamW)]
)
def test_another_class_of_optimizer_is_named_before_it_fails_in_its_first_step(
    tmp_path: Path, before: type[torch.optim.Optimizer], now: type[torch.optim.Optimizer]
) -> None:
    _, optimizer = trained(before, 1)
    writer = CheckpointWriter(tmp_path)
    writer.save(progress(1), OptimizerParts(optimizer), {}, is_waiting=True)
    writer.wait()
    found = read_newest(tmp_path, DIGEST)
    assert found is not None
    _, other = trained(now, 0)
    with pytest.raises(LearnerError, match=rf"has the state of {before.__name__}, here is {now.__name__}\): remove"):
        found.restore(OptimizerParts(other), {}, rng=False)
    del found.optimizer["kind"]  # as it was written before there was one
    _, same = trained(before, 0)
    found.restore(OptimizerParts(same), {}, rng=False)


@pytest.mark.parametrize("error", [AssertionError, AttributeError])
def test_a_state_that_its_part_does_not_take_is_refused_with_the_remedy(error: type[Exception]):
    class Refusing(Data):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise error("dp_degree is inconsistent")

    before = Checkpoint(progress(1), {}, {}, {"data": Data().state_dict()})
    with pytest.raises(LearnerError, match=r"dp_degree is inconsistent.*remove the folder learner/checkpoints"):
        before.restore(None, {"data": Refusing()}, rng=False)


def test_an_optimizer_with_a_state_dict_of_its_own_form_is_not_kept(tmp_path: Path) -> None:
    """As torchtitan's container of optimizers."""

    class Flat(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"param_groups.weight.lr": 0.1}

    optimizer = Flat(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(LearnerError, match=r"the state_dict\(\) of Flat is not as in torch\.optim"):
        CheckpointWriter(tmp_path).save(progress(1), OptimizerParts(optimizer), {})


def test_parts_travel_to_other_ranks_without_loss() -> None:
    one = Checkpoint(progress(4), {"rng": torch.arange(5, dtype=torch.uint8)}, {"state": {}}, {"d": {"x": [1]}})
    other = Checkpoint.from_parts(one.document(), one.tensors)
    assert other.document() == one.document()
    assert torch.equal(other.tensors["rng"], one.tensors["rng"])
    document = json.loads(one.document()) | {"format": 1}
    with pytest.raises(LearnerError, match="format 1, expected 2"):
        Checkpoint.from_parts(json.dumps(document), {})


def test_a_checkpoint_is_on_disk_before_its_name_and_one_stays_beside_it(tmp_path: Path) -> None:
    """A power cut leaves this one whole, or the one before."""
    folder = tmp_path / "learner" / "checkpoints"
    with traced() as trace:
        path = write_checkpoint(folder, checkpoint(1))
    partial = str(path.with_suffix(".partial"))
    made = [("fsync", str(path)) for path in (tmp_path.parent, tmp_path, folder.parent)]
    written = [("fsync", partial), ("rename", str(path)), ("fsync", str(folder))]
    assert trace == made + written
    write_checkpoint(folder, checkpoint(2))
    left: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        look = lambda *_: left.append([name.step for name in newest_first(folder)])  # noqa: E731
        patch.setattr(checkpoint_module, "save_file", look)
        with pytest.raises(FileNotFoundError):
            write_checkpoint(folder, checkpoint(3))
    assert left == [[2]], "the disk never holds three, and a whole one always"


def test_the_newest_checkpoint_that_all_ranks_have_stays(tmp_path: Path) -> None:
    """Another rank's disk is full, time after time."""
    place = RankPlace(0, 2)
    for rank in range(2):
        write_checkpoint(tmp_path, checkpoint(1), RankPlace(rank, 2))
    for step in (2, 3, 4):
        write_checkpoint(tmp_path, checkpoint(step), place, whole=(1, 1))
    assert [(name.step, name.place.rank) for name in newest_first(tmp_path)] == [(4, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_files_of_a_layout_before_go_on_every_host(rank: int, tmp_path: Path) -> None:
    """Rank 0 is on one host only."""
    for old in (2, 3):
        write_checkpoint(tmp_path, checkpoint(1), RankPlace(old, 4))
    for step in (2, 3):
        write_checkpoint(tmp_path, checkpoint(step), RankPlace(rank, 2), whole=(1, 1))
    assert [name.step for name in newest_first(tmp_path) if name.place.ranks == 4] == [1, 1], "the last whole one"
    write_checkpoint(tmp_path, checkpoint(4), RankPlace(rank, 2), whole=(1, 2))
    assert [name.place for name in newest_first(tmp_path)] == [RankPlace(rank, 2)] * 2


def test_what_was_just_written_stays_beside_files_of_another_run(tmp_path: Path) -> None:
    """A rank's host may have kept the files of a run that was begun anew elsewhere."""
    for step in (1, 2):
        write_checkpoint(tmp_path, checkpoint(step, incarnation=7))
    assert write_checkpoint(tmp_path, checkpoint(3, incarnation=1)).exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_on_a_gpu_is_copied_as_it_was_when_the_loop_goes_on_at_once(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 24, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2):
        moment = optimizer.state[parameter]["momentum_buffer"]
        before = float(moment[0])
        if step == 1:
            assert not writer.save(progress(step), OptimizerParts(optimizer), {}), "memory is made in the background"
            writer.wait()
            moment.fill_(before := 3.0)
        assert writer.save(progress(step), OptimizerParts(optimizer), {})
        moment.fill_(-7.0 * step)  # ordered behind the copy, which nobody has waited for
        writer.wait()
        kept = read_newest(tmp_path, progress(step).manifest_digest)
        assert kept is not None
        assert set(kept.tensors["state.0.momentum_buffer"].tolist()) == {before}
    assert all(tensor.is_pinned() for name, tensor in writer._copies.items() if name.startswith("state."))


class OnDevice(torch.Tensor):
    """A tensor on a GPU of another maker, as far as one can tell."""

    @property
    def device(self) -> Any:
        return torch.device("xpu:0")


class Moments:
    """An optimizer's state of one tensor on a GPU."""

    def keep(self) -> Kept:
        return Kept({"state.0.m": torch.arange(6.0, device="cpu").view(2, 3).as_subclass(OnDevice)}, {})


def test_memory_for_copies_from_a_device_is_made_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[threading.Thread] = []

    def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        makers.append(threading.current_thread())
        return torch.zeros(shape, dtype=dtype, device="cpu")

    monkeypatch.setattr(checkpoint_module, "page_locked", room)
    monkeypatch.setattr(checkpoint_module, "_copied", lambda tensors: [])
    writer = CheckpointWriter(tmp_path)
    assert not writer.save(progress(1), Moments(), {})  # type: ignore[arg-type]
    writer.wait()
    assert not list(tmp_path.iterdir())
    assert writer.save(progress(2), Moments(), {})  # type: ignore[arg-type]
    writer.wait()
    assert writer.written == (1, 2)
    assert read_checkpoint(next(tmp_path.iterdir())).tensors["state.0.m"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert len(makers) == 1, "and used again"
    assert makers[0] is not threading.current_thread()
    late = CheckpointWriter(tmp_path / "last")
    assert late.save(progress(3), Moments(), {}, is_waiting=True), "the last one waits for its memory"  # type: ignore[arg-type]
    late.wait()


def test_the_last_checkpoint_is_waited_for_as_long_as_its_size_takes(tmp_path: Path) -> None:
    class Thread:
        waited_s = 0.0

        def join(self, timeout_s: float) -> None:
            self.waited_s = timeout_s

        def is_alive(self) -> bool:
            return True

    writer = CheckpointWriter(tmp_path)
    writer._thread = Thread()  # type: ignore[assignment]
    writer._copies = {"state.0.m": torch.empty(10**10, device="meta")}
    writer.wait()
    assert writer._thread.waited_s == 460.0  # type: ignore[attr-defined]
