"""The check `waits` of benchmarks/gpu.py: nothing in `step()` waits for the device."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from gpu_daemon import DaemonProcess
from gpu_lines import Line, fake, verdict
from gpu_model import DEVICE, HAS_DRIVER, Size, Trainer
from gpu_trace import Trace

import diloco_node

CYCLES_BEFORE: Final = 2
"""Cycles before anything counts: the first versions touch memory for the first time."""

STEPS_LIMIT_S: Final = 120.0


class SyncWarnings:
    """Warnings of torch's sync debug mode, by thread."""

    def __init__(self) -> None:
        self.by_thread: Counter[int] = Counter()

    def __enter__(self) -> SyncWarnings:
        self._before = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = self._show
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._before

    def _show(self, message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchroniz" in str(message):
            self.by_thread[threading.get_ident()] += 1


def waits(size: Size) -> Iterator[Line]:
    """200 steps with an order each: nothing in `step()` waits for the device."""
    trainer = Trainer(size)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    loss = torch.ones((), device=DEVICE)

    def train(diloco: Any) -> None:
        trainer.optimizer.step()
        daemon.order()
        with torch.profiler.record_function("boundary"):
            diloco.step(tokens=8, loss=loss, grad_norm=loss)

    with (
        DaemonProcess(size.fragments) as daemon,
        diloco_node.attach(trainer.model, trainer.optimizer, checkpoint_every_s=0) as diloco,
    ):
        until_applied(diloco, CYCLES_BEFORE * size.fragments, lambda: train(diloco))
        count, device = size.steps // 2, fake()
        if device is not None:
            with device.no_waits():
                steps = until_applied(diloco, count, lambda: train(diloco))
            yield Line("waits", "PASS", f"none in {steps} steps with {count} versions")
            return
        with SyncWarnings() as warned:
            warned_steps = until_applied(diloco, count, lambda: train(diloco))
        in_training, all_threads = warned.by_thread[threading.get_ident()], sum(warned.by_thread.values())
        torch.cuda.synchronize()
        with Trace() as trace:
            traced_steps = until_applied(diloco, count, lambda: train(diloco))
    calls, others = trace.calls_inside("boundary"), trace.calls_outside("boundary")
    stops = {name: count for name, count in calls.items() if "Synchronize" in name or name == "cudaMemcpy"}
    memory = {name: count for name, count in calls.items() if "Alloc" in name or "Free" in name or "Register" in name}
    pageable = trace.pageable_copies("boundary")
    launches = sum(count for name, count in calls.items() if "Launch" in name or "Async" in name)
    elsewhere = {name: count for name, count in others.items() if "Synchronize" in name}
    yield Line(
        "waits",
        verdict(bool(calls) and not in_training and not stops and not pageable),
        f"for each of {count} snapshots and versions: {in_training / count:.1f} waits by the debug mode, "
        f"{sum(stops.values()) / count:.1f} by the profiler {stops}, {pageable / count:.1f} pageable copies, "
        f"{launches / count:.1f} launches; memory {memory}; other threads {elsewhere}",
        {
            "versions": count,
            "steps": [warned_steps, traced_steps],
            "debug_mode": in_training,
            "debug_mode_all_threads": all_threads,
            "calls": dict(calls),
            "elsewhere": elsewhere,
            "pageable": pageable,
        },
    )


def warm_up(diloco: Any, train: Callable[[], None]) -> None:
    """Train until the learner has looked enough at what its optimizer makes of versions: some 320 steps."""
    while HAS_DRIVER and not diloco._fragments.revert._pull_back.is_done:
        until_applied(diloco, 1, train)


def until_applied(diloco: Any, versions: int, train: Callable[[], None]) -> int:
    """Train until so many versions more were applied, and return how many steps that took.

    Raises:
        TimeoutError: it takes too long.
    """
    target, deadline_s = sum(diloco.versions) + versions, time.monotonic() + STEPS_LIMIT_S
    for steps in itertools.count():
        if sum(diloco.versions) >= target:
            return steps
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{steps} steps, and {target - sum(diloco.versions)} versions are still to come")
        train()
        time.sleep(0.005)
    raise AssertionError
