"""The fake devices find what they are for: what is read early, waited for, raced for, or used after it was freed."""

import threading

import pytest
import torch

from tests.kit.fakecuda import fake_device, library

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not fake_device.is_installed(), reason="needs a device in software: make test-device"),
]

VALUES = 1000


def pinned() -> torch.Tensor:
    return torch.zeros(VALUES, device="cpu", pin_memory=True)


def ones() -> torch.Tensor:
    return torch.ones(VALUES, device="cuda")


def event() -> torch.cuda.Event:
    recorded = torch.cuda.Event()
    recorded.record(torch.cuda.current_stream())
    return recorded


def test_what_is_read_before_its_copy_was_waited_for_is_poison() -> None:
    host = pinned()
    host.copy_(ones(), non_blocking=True)
    copied = event()
    assert host.isnan().all()
    copied.synchronize()
    assert (host == 1).all()


def test_memory_that_nothing_was_written_to_is_poison() -> None:
    assert torch.empty(VALUES, device="cuda").cpu().isnan().all()


@pytest.mark.parametrize(
    "reason",
    [
        "item()",
        "D2H pageable",
        "D2H pinned blocking",
        "H2D pageable",
        "event.synchronize",
        "stream.synchronize",
        "shape",
    ],
)
def test_each_wait_is_logged_and_an_error_where_it_is_forbidden(reason: str) -> None:
    values, host = ones(), torch.zeros(VALUES, device="cpu")
    ways = {
        "item()": lambda: values[0].item(),
        "D2H pageable": lambda: host.copy_(values, non_blocking=True),
        "D2H pinned blocking": lambda: pinned().copy_(values),
        "H2D pageable": lambda: values.copy_(host, non_blocking=True),
        "event.synchronize": lambda: event().synchronize(),
        "stream.synchronize": lambda: torch.cuda.current_stream().synchronize(),
        "shape": lambda: values.nonzero(),
    }
    fake_device.reset()
    ways[reason]()
    assert len(fake_device.own_waits()) == 1
    assert reason.split(maxsplit=1)[0] in fake_device.own_waits()[0]
    with pytest.raises(RuntimeError, match="must not"), fake_device.no_waits():
        ways[reason]()


def test_what_is_waited_for_elsewhere_is_not_this_threads() -> None:
    fake_device.reset()
    with fake_device.no_waits():
        values = ones()
        thread = threading.Thread(target=values.cpu)
        thread.start()
        thread.join()
        pinned().copy_(values, non_blocking=True)
    assert fake_device.own_waits() == []
    assert len(fake_device.waits()) == 1


def test_two_streams_without_an_order_are_a_race_under_every_schedule() -> None:
    side = torch.cuda.Stream()
    for schedule in fake_device.SCHEDULES:
        fake_device.schedule(schedule)
        fake_device.reset()
        values = ones()
        with torch.cuda.stream(side):
            copy = values * 2
        values.add_(1)
        torch.cuda.synchronize()
        hazards = fake_device.hazards()
        assert any("mul" in text and "reads" in text for text in hazards), schedule
        assert any("add" in text and "writes" in text for text in hazards), schedule
        assert copy.shape == (VALUES,)
    fake_device.reset()


def test_streams_that_wait_for_each_other_do_not_race() -> None:
    side = torch.cuda.Stream()
    values = ones()
    side.wait_event(event())
    with torch.cuda.stream(side):
        copy = values * 2
        copied = event()
    torch.cuda.current_stream().wait_event(copied)
    values.add_(1)
    assert (copy.cpu() == 2).all()
    assert fake_device.hazards() == []


def test_memory_that_is_freed_while_another_stream_uses_it_is_found() -> None:
    side = torch.cuda.Stream()
    for is_recorded in (False, True):
        values = ones()
        side.wait_event(event())
        with torch.cuda.stream(side):
            pinned().copy_(values, non_blocking=True)
        if is_recorded:
            values.record_stream(side)
        del values
        assert any("freed" in text for text in fake_device.hazards()) is not is_recorded
        torch.cuda.synchronize()
        fake_device.reset()


def test_devices_have_streams_of_their_own() -> None:
    first, second = ones(), torch.ones(VALUES, device="cuda:1")
    moved = first.to("cuda:1", non_blocking=True) + second
    assert fake_device.own_waits() == []
    assert moved.device == torch.device("cuda:1")
    torch.cuda.current_stream(torch.device("cuda:1")).synchronize()
    assert (moved.cpu() == 2).all()
    with pytest.raises(RuntimeError, match="same device"):
        first + torch.ones(VALUES, device="cpu")


def test_an_event_that_is_asked_for_often_comes() -> None:
    host = pinned()
    host.copy_(ones(), non_blocking=True)
    copied = event()
    assert not copied.query()
    assert any(copied.query() for _ in range(VALUES))
    assert (host == 1).all()


def test_training_needs_no_wait() -> None:
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs = torch.ones(4, 8, device="cuda")
    before = model.weight.detach().clone()
    with fake_device.no_waits():
        for _ in range(3):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not torch.equal(before, model.weight)


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(library.NoFakeDevice, match="g\\+\\+"):
        library.build()
