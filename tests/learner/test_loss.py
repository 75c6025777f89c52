"""learner/loss.py: the newest loss without waiting for a device. No GPU is needed: the device is a fake."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from diloco_node.errors import LearnerError  # noqa: E402
from diloco_node.learner.loss import LateLoss, finite  # noqa: E402


def test_before_the_first_loss_there_is_none() -> None:
    late = LateLoss()
    late.offer(None)
    assert late.newest() is None


@pytest.mark.no_device("of a CPU, where a loss is there at once")
def test_the_newest_value_is_told_of_several_the_mean() -> None:
    late = LateLoss()
    late.offer(2.5)
    assert late.newest() == 2.5
    late.offer(None)
    assert late.newest() == 2.5, "a step without a loss says nothing"
    late.offer(torch.tensor([1.0, 3.0, 5.0], requires_grad=True))
    assert late.newest() == 3.0
    late.offer(torch.tensor(4, dtype=torch.int64))
    assert late.newest() == 4.0


@pytest.mark.no_device("of a CPU, where a loss is there at once")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_none(value: float) -> None:
    late = LateLoss()
    late.offer(1.0)
    late.offer(torch.tensor(value))
    assert late.newest() is None
    assert finite(value) is None
    assert finite(None) is None


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A loss that lies on a second GPU, as far as one can tell."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:1")


class OnOther(torch.Tensor):  # type: ignore[misc]
    """A loss on a device of another maker."""

    @property
    def device(self) -> Any:
        return torch.device("xpu:0")


class Event:
    """Says when the copy that was ordered before it has been made."""

    made: ClassVar[list[Event]] = []

    def __init__(self, **_: Any) -> None:
        self.is_over = False
        self.stream: Any = None
        self.made.append(self)

    def record(self, stream: Any = "of the current device") -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.is_over


@pytest.fixture
def _fake_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory, **how: empty(*given, **how))
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "Event", Event)
        monkeypatch.setattr(module, "current_stream", lambda device: f"of {device}")


@pytest.mark.usefixtures("_fake_devices")
@pytest.mark.parametrize("kind", [OnDevice, OnOther])
def test_a_loss_on_its_way_from_a_device_is_neither_waited_for_nor_overtaken(kind: Any) -> None:
    late = LateLoss()
    late.offer(torch.tensor(7.0).as_subclass(kind))
    assert late.newest() is None, "still on its way"
    late.offer(torch.tensor(8.0).as_subclass(kind))
    assert len(Event.made) == 1, "one at a time: else none would ever arrive at a loop that is ahead of its device"
    Event.made[0].is_over = True
    assert late.newest() == 7.0
    late.offer(torch.tensor(math.nan).as_subclass(kind))
    assert late.newest() == 7.0
    Event.made[1].is_over = True
    assert late.newest() is None


@pytest.mark.usefixtures("_fake_devices")
def test_of_a_loop_that_is_not_ahead_of_its_device_each_loss_is_seen() -> None:
    late, seen = LateLoss(), []
    for value in (7.0, 8.0, math.nan, 9.0):
        late.offer(torch.tensor(value).as_subclass(OnDevice))
        seen.append(late.fresh())
        Event.made[-1].is_over = True
    assert seen[:3] == [None, 7.0, 8.0]
    assert math.isnan(seen[3])
    assert late.fresh() == 9.0


@pytest.mark.usefixtures("_fake_devices")
def test_the_event_is_in_the_stream_of_the_device_that_has_the_loss() -> None:
    LateLoss().offer(torch.tensor(7.0).as_subclass(OnDevice))
    assert [event.stream for event in Event.made] == ["of cuda:1"]


def test_of_a_dtensor_the_value_on_this_rank_is_taken_and_a_part_of_it_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        late = LateLoss("grad_norm")
        late.offer(DTensor.from_local(torch.tensor(3.5), mesh, [Replicate()]))
        assert late.newest() == 3.5
        with pytest.raises(LearnerError, match=r"step\(grad_norm=...\) is a DTensor .*give grad_norm.full_tensor\(\)"):
            late.offer(DTensor.from_local(torch.tensor(3.5), mesh, [Partial()]))
    finally:
        dist.destroy_process_group()


def test_each_value_is_fresh_once_finite_or_not() -> None:
    late = LateLoss()
    assert late.fresh() is None
    late.offer(2.5)
    assert (late.fresh(), late.fresh()) == (2.5, None)
    late.offer(math.inf)
    late.newest()
    assert late.fresh() == math.inf, "who asked for the newest takes nothing away"
    late.offer(None)
    assert late.fresh() is None
