"""The check `checkpoint` of benchmarks/gpu.py: pauses of the loop while its state is copied and written."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from gpu_daemon import DaemonProcess
from gpu_lines import Line, in_time, verdict
from gpu_model import DEVICE, Moment, Size, Trainer
from torch import Tensor

import diloco_node
from diloco_node.learner.checkpoint import newest_first, read_checkpoint

PAUSE_MAX_MS: Final = 20.0


def checkpoint(size: Size) -> Iterator[Line]:
    """The longest gap between launches while the optimizer's state is written; 1 GB for GPT-2."""
    trainer = Trainer(size)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    trainer.optimizer.step()
    values = torch.zeros(1024, device=DEVICE)
    saves: list[dict[str, float]] = []
    with (
        DaemonProcess(size.fragments) as _,
        diloco_node.attach(trainer.model, trainer.optimizer, checkpoint_every_s=2.0) as diloco,
    ):
        checkpoints = diloco._checkpoints
        deadline_s = time.monotonic() + 15
        while len(saves) < 3 and time.monotonic() < deadline_s:
            with torch.no_grad():
                trainer.model.ln_f.weight.add_(1e-6)  # a loop that writes to nothing is refused
            before_s, before = time.perf_counter(), Moment()
            diloco.step(tokens=8)
            step_ms, after = (time.perf_counter() - before_s) * 1e3, Moment()
            if checkpoints.is_idle:
                time.sleep(0.001)
                continue
            longest_ms, began_s = longest_launch_gap_ms(values, lambda: not checkpoints.is_idle), before_s
            torch.cuda.synchronize()
            saves.append(
                {
                    "step_ms": step_ms,
                    "device_ms": before.until(after),
                    "gap_ms": longest_ms,
                    "written_s": time.perf_counter() - began_s,
                }
            )
        checkpoints.wait()
        writer = checkpoints._writer
        names = [] if writer is None else newest_first(writer._folder)
        disk = (
            set() if writer is None or not names else digests(read_checkpoint(writer._folder / names[0].text).tensors)
        )
    if not saves:
        yield Line("checkpoint", "FAIL", "no checkpoint was written")
        return
    missing = len(digests(dict(enumerate(moments(trainer.optimizer)))) - disk)
    yield Line(
        "written", verdict(not missing), f"{missing} of the optimizer's tensors are not on disk as on the device"
    )
    megabytes = 8 * trainer.parameters / 1e6
    text = "; ".join(
        f"{one['step_ms']:.1f} ms in step(), then at most {one['gap_ms']:.1f} ms without a launch, device taken for "
        f"{one['device_ms']:.0f} ms, on disk after {one['written_s']:.1f} s"
        for one in saves
    )
    worst = max(max(one["step_ms"], one["gap_ms"]) for one in saves)
    yield Line(
        "checkpoint", in_time(worst <= PAUSE_MAX_MS), f"{megabytes:.0f} MB: {text}", {"saves": saves, "mb": megabytes}
    )


def moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def digests(tensors: Mapping[Any, Tensor]) -> set[str]:
    """Hashes of the values of tensors, which wait for their device."""
    return {hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() for tensor in tensors.values()}


def longest_launch_gap_ms(values: Tensor, is_going_on: Callable[[], bool]) -> float:
    """Launch small kernels, never many at once, and return the longest time between two launches."""
    longest_s = 0.0
    for number in itertools.count():
        if not number % 100:
            if not is_going_on():
                return longest_s * 1e3
            torch.cuda.synchronize()
            last_s = time.perf_counter()
        values.add_(1.0)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    raise AssertionError
