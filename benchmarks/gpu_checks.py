"""The checks of benchmarks/gpu.py, each a function that yields its lines. They run in a process each."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from gpu_daemon import DaemonProcess, ScriptedDaemon, region
from gpu_encode import figures
from gpu_model import DEVICE, FULL, GPT, HAS_DRIVER, Moment, Size, Trainer
from gpu_trace import Trace
from torch import Tensor, nn

import diloco_node
from diloco_node.core.types import RunSettings
from diloco_node.learner.fragment_settings import ENCODER_VARIABLE
from diloco_node.learner.layouts.block_rows import LEVELS, differing_bytes
from diloco_node.planning.plan import Workload, storage
from diloco_node.planning.sizes import even_sizes
from diloco_node.wire.learner_link import NO_SNAPSHOT, SnapshotReady

SLOWER_MAX: Final = 0.01
TIMES: Final = ("host_ms", "device_ms", "inside_ms")
IDLE_MAX_MS: Final = 0.2
DEVICE_BYTES_MAX: Final = 1.0
"""Bytes on the device for a parameter; 1.4 where the device encodes."""

LIBRARIES_BYTES: Final = 100_000_000
"""Of the host, whatever the model: the kernels' machine code, threads, lists of parameters."""

STEPS_LIMIT_S: Final = 120.0
PAUSE_MAX_MS: Final = 20.0
TINY: Final = Size(2, 64, 2, 16, 4, 128, 4, 0, 0, 0, 0)
CYCLES_BEFORE: Final = 2
"""Cycles before anything counts: the first versions touch memory for the first time."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a check says: PASS, FAIL, SKIP or INFO, the figures as text, and as numbers."""

    name: str
    verdict: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


def verdict(is_right: bool) -> str:
    """PASS or FAIL."""
    return "PASS" if is_right else "FAIL"


def in_time(is_right: bool) -> str:
    """The same for what takes time; on a device in software that says nothing."""
    return verdict(is_right) if HAS_DRIVER else "INFO"


def fake() -> Any:
    """The device in software that was imported, or None."""
    return sys.modules.get("tests.kit.fakecuda.fake_device")


# ---- bits ------------------------------------------------------------------------------------------------------------


class Tensors(nn.Module):
    """Many tensors of odd shapes."""

    def __init__(self, count: int, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        draw = np.random.default_rng(3)
        for index in range(count):
            shape = tuple(int(size) for size in draw.integers(1, 90, int(draw.integers(1, 4))))
            values = torch.from_numpy(draw.standard_normal(shape[:2]).astype(np.float32))
            self.register_parameter(f"p{index}", nn.Parameter(values.to(dtypes[index % len(dtypes)])))


def life(size: Size, device: str, dtypes: tuple[torch.dtype, ...], *, has_masters: bool) -> dict[str, bytes]:
    """Everything that a learner's merging leaves, by what it is: the same on every device.

    Each round has a snapshot, two steps, and a version that includes it, or, every third one, leaves it out.
    """
    draw = np.random.default_rng(7)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name, region(Path(name)):
        model = Tensors(size.tensors, dtypes).to(device)
        masters = {name: value.detach().float() for name, value in model.named_parameters()} if has_masters else None
        left: dict[str, bytes] = {}

        def move(diloco: Any) -> None:
            for key, parameter in model.named_parameters():
                noise = torch.from_numpy(draw.standard_normal(parameter.shape).astype(np.float32) * 0.01).to(device)
                with torch.no_grad():
                    if masters is None:
                        parameter.add_(noise.to(parameter.dtype))
                    else:
                        parameter.copy_(masters[key].add_(noise))
            diloco.step(tokens=3)

        with (
            ScriptedDaemon(Path(name), fragments=4) as daemon,
            diloco_node.attach(model, masters=masters, checkpoint_every_s=0) as diloco,
        ):
            for number, index in itertools.product(range(size.rounds), range(4)):
                move(diloco)
                taken = daemon.until_ready(diloco, index)
                left[f"contribution {number}.{index}"] = daemon.encoded(index)
                left[f"norms {number}.{index}"] = np.array(taken.squared_norms).tobytes()
                move(diloco)
                theta = daemon.theta[index] + draw.standard_normal(len(daemon.theta[index])).astype(np.float32) * 0.1
                is_left_out = (number + index) % 3 == 2
                daemon.until_applied(diloco, index, theta, NO_SNAPSHOT if is_left_out else taken.snapshot)
            state = diloco.global_state_dict()
        left |= {f"global {key}": raw(value) for key, value in state.items()}
        left |= {f"own {key}": raw(value) for key, value in model.named_parameters()}
        return left | {f"master {key}": raw(value) for key, value in (masters or {}).items()}


def raw(values: Tensor) -> bytes:
    """The bytes of a tensor."""
    return values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def bits(size: Size) -> Iterator[Line]:
    """Snapshots, versions and encoded contributions: equal to the CPU's, whichever encodes."""
    single, half, tiny = torch.float32, torch.bfloat16, torch.float16
    cases = {
        "float32": ((single,), False),
        "bfloat16": ((half,), False),
        "float16": ((tiny,), False),
        "masters": ((half,), True),
        "mixed": ((single, half), False),
    }
    wrong: dict[str, list[str]] = {}
    for label, (dtypes, has_masters) in cases.items():
        expected = life(size, "cpu", dtypes, has_masters=has_masters)
        for encoder in ("host", "device"):
            with patch.dict(os.environ, {ENCODER_VARIABLE: encoder}):
                result = life(size, "cuda", dtypes, has_masters=has_masters)
            wrong[f"{label}, {encoder}"] = [key for key in expected if expected[key] != result.get(key)]
    text = ", ".join(f"{label} {f'differs in {keys[:3]}' if keys else 'equal'}" for label, keys in wrong.items())
    yield Line("bits", verdict(not any(wrong.values())), f"{size.tensors} tensors; {text}", {"wrong": wrong})


# ---- waits -----------------------------------------------------------------------------------------------------------


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


# ---- time, idle, memory ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """Steps in one arm, milliseconds each: by the device's clock, by the host's, and of the boundary on the device."""

    device_ms: float
    host_ms: float
    inside_ms: float
    boundaries_ms: list[float]


Step = Callable[[], tuple[Tensor, Tensor]]


def turn(step: Step, steps: int, boundary: Callable[[Tensor, Tensor], None]) -> Turn:
    """Train, with something between the steps."""
    for _ in range(3):
        boundary(*step())
    torch.cuda.synchronize()
    started_s, first, inside_s, pairs = time.perf_counter(), Moment(), 0.0, []
    for _ in range(steps):
        loss, norm = step()
        before, before_s = Moment(), time.perf_counter()
        boundary(loss, norm)
        inside_s += time.perf_counter() - before_s
        pairs.append((before, Moment()))
    last = Moment()
    torch.cuda.synchronize()
    host_ms = (time.perf_counter() - started_s) * 1e3 / steps
    spans = [before.until(after) for before, after in pairs]
    return Turn(first.until(last) / steps, host_ms, inside_s * 1e3 / steps, spans)


def loop(size: Size) -> Iterator[Line]:
    """Time, idle and memory: GPT-2 alone and attached, in short turns; by graphs, which no slow host disturbs, too."""
    trainer, steps = Trainer(size), max(4, size.steps // 10)
    kinds: dict[str, Step] = {"eager": trainer.step}
    if HAS_DRIVER:
        trainer.capture()
        kinds = {"time": trainer.replay} | kinds
    turns: dict[str, dict[str, list[Turn]]] = {kind: {"alone": [], "attached": []} for kind in kinds}
    versions, steps_attached = 0, 0

    def alone(*_: Tensor) -> None:
        return None

    def attached(loss: Tensor, norm: Tensor) -> None:
        daemon.order()
        diloco.step(tokens=trainer.tokens_a_step, loss=loss, grad_norm=norm)

    first = next(iter(kinds.values()))
    for step in kinds.values():
        turn(step, steps, alone)
    idle = [idle_of(first, alone)]  # before memory is counted: the profiler takes more of it than a learner
    used = [memory_now()]
    reset_memory()
    with (
        DaemonProcess(size.fragments) as daemon,
        diloco_node.attach(trainer.model, trainer.optimizer, checkpoint_every_s=0) as diloco,
    ):
        until_applied(diloco, CYCLES_BEFORE * size.fragments, lambda: attached(*trainer.step()))
        used.append(memory_now())
        beginning = {"alone": [turn(first, steps, alone)], "attached": [turn(first, steps, attached)]}
        beginning["alone"].append(turn(first, steps, alone))
        warm_up(diloco, lambda: attached(*first()))
        for _ in range(size.turns):
            for kind, step in kinds.items():
                turns[kind]["alone"].append(turn(step, steps, alone))
                before, steps_before = sum(diloco.versions), diloco.steps
                turns[kind]["attached"].append(turn(step, steps, attached))
                versions += sum(diloco.versions) - before
                steps_attached += diloco.steps - steps_before
        for kind, step in kinds.items():
            turns[kind]["alone"].append(turn(step, steps, alone))
        idle.append(idle_of(first, attached))
    yield replace(time_line("beginning", beginning, 0.0), verdict="INFO")
    for kind, of_kind in turns.items():
        yield time_line(kind, of_kind, versions / steps_attached)
    yield boundary_line(next(iter(turns.values())))
    if HAS_DRIVER:
        yield idle_line(*idle)
        yield memory_line(dict(zip(("alone", "attached"), used, strict=True)), trainer, size)


def time_line(kind: str, turns: dict[str, list[Turn]], versions: float) -> Line:
    """How much longer a step is than those before and after it: medians, for turns of a shared host differ."""
    single = [turn.host_ms for turn in turns["alone"]]
    pairs = [(before + after) / 2 for before, after in itertools.pairwise(single)]
    slower = [turn.host_ms / pair - 1 for turn, pair in zip(turns["attached"], pairs, strict=True)]
    drift = statistics.median(abs(after / before - 1) for before, after in itertools.pairwise(single))
    median = statistics.median(slower)
    figures = {
        arm: {name: statistics.median(getattr(turn, name) for turn in many) for name in TIMES}
        for arm, many in turns.items()
    }
    return Line(
        kind,
        in_time(median <= SLOWER_MAX + drift),
        f"{'an eager step' if kind == 'eager' or not HAS_DRIVER else 'a captured step'}: "
        f"{figures['alone']['host_ms']:.2f} ms alone, {figures['attached']['host_ms']:.2f} attached "
        f"({median:+.1%}, drift {drift:.1%}); "
        f"by the device's clock {figures['alone']['device_ms']:.2f} and {figures['attached']['device_ms']:.2f}; "
        f"{figures['attached']['inside_ms']:.2f} ms of the host's time in step(); {versions:.2f} versions a step",
        figures | {"slower": slower, "drift": drift, "versions_a_step": versions},
    )


def boundary_line(turns: dict[str, list[Turn]]) -> Line:
    """How long the device is between two steps: work of ours, and waiting for the host."""
    spans = {arm: [span for one in many for span in one.boundaries_ms] for arm, many in turns.items()}
    mean = {arm: statistics.fmean(many) for arm, many in spans.items()}
    more = mean["attached"] - mean["alone"]
    return Line(
        "boundary",
        in_time(more <= IDLE_MAX_MS),
        f"from step to step the device takes {mean['attached']:.3f} ms on average, {max(spans['attached']):.2f} at "
        f"most; alone {mean['alone']:.3f} and {max(spans['alone']):.2f}",
        {"mean_ms": mean, "max_ms": {arm: max(many) for arm, many in spans.items()}},
    )


def idle_of(step: Step, boundary: Callable[[Tensor, Tensor], None], steps: int = 24) -> dict[str, float]:
    """Return what the device does in each step, in milliseconds; seen by the profiler."""
    if not HAS_DRIVER:
        return {}
    torch.cuda.synchronize()
    with Trace(is_annotated=False) as trace:
        for _ in range(steps):
            boundary(*step())
    gaps = trace.device_gaps_ms()
    return {"busy": trace.device_busy_ms() / steps, "idle": sum(gaps) / steps, "longest": max(gaps, default=0.0)}


def idle_line(alone: dict[str, float], attached: dict[str, float]) -> Line:
    """Gaps between kernels, and how long these take."""
    texts = [
        f"{one['idle']:.2f} ms a step, {one['longest']:.2f} at once, busy {one['busy']:.2f}"
        for one in (attached, alone)
    ]
    return Line(
        "idle",
        in_time(attached["idle"] - alone["idle"] <= IDLE_MAX_MS),
        f"the device idles {texts[0]}; alone {texts[1]}",
        {"alone": alone, "attached": attached},
    )


def reset_memory() -> None:
    """Begin to count anew."""
    if HAS_DRIVER:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def memory_now() -> dict[str, int]:
    """Bytes: the most in tensors on the device, page-locked ones in use and reserved, and private ones resident."""
    if not HAS_DRIVER:
        return {}
    statistics_of = getattr(torch.cuda, "host_memory_stats", dict)()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "device": torch.cuda.max_memory_allocated(),
        "pinned": statistics_of.get("active_bytes.current", -1),
        "pinned_reserved": statistics_of.get("allocated_bytes.current", -1),
        "locked": int(status.get("VmPin", "0 kB").split()[0]) * 1024,
        "private": int(status["RssAnon"].split()[0]) * 1024,
    }


def memory_line(used: dict[str, dict[str, int]], trainer: Trainer, size: Size) -> Line:
    """Bytes for a parameter that being attached takes."""
    count = trainer.parameters
    more = {kind: (used["attached"][kind] - used["alone"][kind]) / count for kind in used["alone"]}
    settings = RunSettings(fragments=size.fragments, sync_every=size.fragments)
    plan = storage(Workload(even_sizes(count, size.fragments), ("bench",), settings, step_time_ns=10_000_000))
    # The daemon of this check may have a round of each fragment in flight; a snapshot lasts as long as its round.
    planned = (plan.base + plan.rooms + 4 * count) / count
    return Line(
        "memory",
        verdict(more["device"] <= DEVICE_BYTES_MAX and more["private"] <= planned + LIBRARIES_BYTES / count),
        f"more bytes a parameter when attached: {more['device']:.2f} on the device, {more['pinned_reserved']:.2f} "
        f"page-locked ({more['pinned']:.2f} in use), {more['private']:.2f} private; plan: {planned:.2f} for learner "
        "and a snapshot of each fragment",
        {"more": more, "used": used, "planned": planned},
    )


# ---- checkpoint ------------------------------------------------------------------------------------------------------


def checkpoint(size: Size) -> Iterator[Line]:
    """The longest gap between launches while the optimizer's state is written; 1 GB for GPT-2."""
    trainer = Trainer(size)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
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
    if not saves:
        yield Line("checkpoint", "FAIL", "no checkpoint was written")
        return
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


# ---- graphs ----------------------------------------------------------------------------------------------------------


class Stepper:
    """A small model whose step is eager, captured as a whole, or compiled to graphs."""

    def __init__(self, kind: str, size: Size = TINY) -> None:
        torch.manual_seed(1)
        self.kind = kind
        self.model = GPT(size).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, capturable=HAS_DRIVER)
        self.tokens = torch.randint(size.vocabulary, (size.batch, size.context + 1)).to(DEVICE)
        self.forward: Callable[[Tensor], Tensor] = self.model
        if kind == "reduce-overhead":
            self.forward = torch.compile(self.model, mode="reduce-overhead")
        self.graph: Any = None
        self.loss: Tensor | None = None

    def eager(self) -> Tensor:
        """Forward, backward, AdamW."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.tokens)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def warm_up(self) -> None:
        """Three steps, on a side stream as torch says where they are to be captured."""
        if self.kind == "reduce-overhead":
            for _ in range(3):
                self.eager()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.eager()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self) -> None:
        """Record a whole step, which makes none; the next ones are its replays."""
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self.model(self.tokens)
            self.loss.backward()
            self.optimizer.step()

    def step(self) -> Tensor:
        """One step of any kind; its loss."""
        if self.graph is None:
            return self.eager().clone()
        self.graph.replay()
        assert self.loss is not None
        return self.loss.detach().clone()


def losses(kind: str, *, has_versions: bool) -> list[float]:
    """The losses of a run, with a version of each fragment in turn between its steps."""
    draw = np.random.default_rng(11)
    stepper = Stepper(kind)
    stepper.warm_up()
    if kind == "graph":
        stepper.capture()
    result: list[Tensor] = []
    with (
        tempfile.TemporaryDirectory(prefix="gpu-") as name,
        region(Path(name)),
        ScriptedDaemon(Path(name), fragments=4) as daemon,
        diloco_node.attach(stepper.model, stepper.optimizer, checkpoint_every_s=0) as diloco,
    ):
        for number in range(20):
            for _ in range(2):
                result.append(stepper.step())
                diloco.step(tokens=8, loss=result[-1])
            index = number % 4
            noise = draw.standard_normal(len(daemon.theta[index])).astype(np.float32) * 0.05
            if has_versions:
                daemon.until_applied(diloco, index, daemon.theta[index] + noise)
    return [float(loss) for loss in result]


def graphs(_: Size) -> Iterator[Line]:
    """A whole step as a graph, with versions between its replays: the losses of an eager run."""
    expected, without = losses("eager", has_versions=True), losses("eager", has_versions=False)
    effect = max(abs(a / b - 1) for a, b in zip(expected, without, strict=True))
    yield compared("graphs", losses("graph", has_versions=True), expected, effect)


def compiled(_: Size) -> Iterator[Line]:
    """The same with `torch.compile(mode="reduce-overhead")`."""
    yield compared("compiled", losses("reduce-overhead", has_versions=True), losses("eager", has_versions=True), 1.0)


def capture(size: Size) -> Iterator[Line]:
    """A graph that is captured while snapshots of all fragments are on their way."""
    stepper = Stepper("graph", replace(size, context=16, batch=4) if size is FULL else TINY)
    stepper.warm_up()
    with (
        tempfile.TemporaryDirectory(prefix="gpu-") as name,
        region(Path(name)),
        ScriptedDaemon(Path(name), fragments=4) as daemon,
        diloco_node.attach(stepper.model, stepper.optimizer, checkpoint_every_s=0) as diloco,
    ):
        for index in range(4):
            daemon.want(index)
        time.sleep(0.1)
        stepper.eager()
        diloco.step(tokens=8)
        stepper.capture()
        encoded = daemon.heard(SnapshotReady)
        result = []
        for _ in range(8):
            result.append(stepper.step())
            diloco.step(tokens=8, loss=result[-1])
        daemon.until_heard(diloco, SnapshotReady, 4)  # two at a time are on their way
        is_right = bool(torch.stack(result).isfinite().all())
    yield Line("capture", verdict(is_right), f"{len(result)} replays; {4 - encoded} of 4 snapshots came after it")


def compared(name: str, result: list[float], expected: list[float], effect: float) -> Line:
    """Whether losses are equal, and would not be without the versions."""
    apart = max(abs(a / b - 1) for a, b in zip(result, expected, strict=True))
    return Line(
        name,
        verdict(apart <= 1e-3 < effect),
        f"20 versions between {len(result)} steps: losses {'equal' if not apart else f'apart by {apart:.1e}'}; "
        f"without versions by {effect:.1e}",
        {"apart": apart, "effect": effect},
    )


# ---- several ranks ---------------------------------------------------------------------------------------------------


def ranks(size: Size) -> Iterator[Line]:
    """FSDP2 over NCCL with `grad_norm=`, 50 rounds: the bits of a single process without FSDP."""
    if not HAS_DRIVER or not torch.distributed.is_nccl_available():
        yield Line("ranks", "SKIP", "no NCCL here")
        return
    count, rounds = torch.cuda.device_count(), 50
    script = str(Path(__file__).resolve().parent / "gpu_ranks.py")
    results = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]):
        with tempfile.TemporaryDirectory(prefix="gpu-") as name:
            command = [sys.executable, *launcher, script, name, str(rounds)]
            outcome = subprocess.run(command, capture_output=True, text=True, check=False)
            if outcome.returncode:
                words = outcome.stdout + outcome.stderr
                errors = [line for line in words.splitlines() if "Error" in line and "Elastic" not in line]
                label = f"FSDP2 on {count} GPU(s)" if launcher else "a single process"
                text = (errors or words.splitlines()[-1:] or ["no word"])[0].strip()
                yield Line("ranks", "FAIL", f"{label} ended: {text[:300]}")
                return
            results.append((Path(name) / "parameters.bin").read_bytes())
    is_equal = results[0] == results[1]
    yield Line(
        "ranks",
        verdict(is_equal),
        f"FSDP2 on {count} GPU(s), grad_norm=, {rounds} rounds: parameters {'equal' if is_equal else 'differ'}, "
        "own and global, to a process without FSDP",
    )


def encoding(size: Size) -> Iterator[Line]:
    """What a fragment takes on the device."""
    values = 124_000_000 // 24 if size is FULL else 40_000
    parts = figures(values, 7)
    text = ", ".join(f"{name} {took:.3f}" for name, took in parts.items())
    yield Line("figures", "INFO", f"ms for a fragment of {values / 1e6:.1f} M values: {text}", parts)
    differing = {codec.value: differing_bytes(DEVICE, codec) for codec in LEVELS}
    text = f"in torch's operators, bytes and norms that are not the kernel's: {differing}"
    yield Line("encode", verdict(not any(differing.values())), text, differing)


CHECKS: Final[dict[str, Callable[[Size], Iterator[Line]]]] = {
    "bits": bits,
    "waits": waits,
    "loop": loop,
    "checkpoint": checkpoint,
    "graphs": graphs,
    "capture": capture,
    "compiled": compiled,
    "ranks": ranks,
    "encode": encoding,
}


def relay(name: str, size: Size, write: Callable[[Line], None]) -> None:
    """Run one check; what it raises is a line, too."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        for line in CHECKS[name](size):
            write(line)
    except Exception as error:  # noqa: BLE001 - a check that breaks is a result; the others go on
        words = f"{type(error).__name__}: {error}".strip().splitlines()
        write(Line(name, "FAIL", (words[0] if len(words) < 2 else f"{words[0]} ... {words[-1]}")[:400]))
