"""The checks `time`, `eager`, `boundary`, `idle` and `memory` of benchmarks/gpu.py: a loop alone and attached."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from gpu_daemon import DaemonProcess
from gpu_lines import Line, in_time, verdict
from gpu_model import HAS_DRIVER, Moment, Size, Trainer
from gpu_trace import Trace
from gpu_waits import CYCLES_BEFORE, until_applied, warm_up
from torch import Tensor

import diloco_node
from diloco_node.core.types import RunSettings
from diloco_node.planning.plan import FragmentSize, Workload, fragment_sizes, storage

SLOWER_MAX: Final = 0.01
TIMES: Final = ("host_ms", "device_ms", "inside_ms")
IDLE_MAX_MS: Final = 0.2
SAMPLES_BYTES: Final = 1 << 20
"""On the device besides fragments on their way: a few values of each tensor, and sums of them."""

LIBRARIES_BYTES: Final = 250_000_000
"""Of the host, whatever the model: the kernels' machine code, threads, lists of parameters: 46 MB on a CPU, and the
driver's."""


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
        sizes = fragment_sizes(diloco._fragments.manifest)
        snapshots = len(diloco._fragments._snapshots) + len(diloco._fragments._rooms)
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
        yield memory_line(dict(zip(("alone", "attached"), used, strict=True)), trainer, sizes, snapshots)


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


def memory_line(
    used: dict[str, dict[str, int]], trainer: Trainer, fragments: tuple[FragmentSize, ...], snapshots: int
) -> Line:
    """Bytes for a parameter that being attached takes, and what `plan` says of the same fragments and snapshots.

    A snapshot lasts as long as its round, of which this daemon has many in flight. Its memory, and that of the spare
    ones, is as large as the largest fragment.
    """
    count = trainer.parameters
    more = {kind: (used["attached"][kind] - used["alone"][kind]) / count for kind in used["alone"]}
    settings = RunSettings(fragments=len(fragments), sync_every=len(fragments))
    plan = storage(Workload(fragments, ("bench",), settings, step_time_ns=10_000_000))
    largest = 4 * max(fragment.values for fragment in fragments)
    planned, rooms = (plan.base + plan.rooms + snapshots * largest) / count, plan.rooms / count
    is_planned = more["device"] <= rooms + SAMPLES_BYTES / count
    return Line(
        "memory",
        verdict(is_planned and more["private"] <= planned + LIBRARIES_BYTES / count),
        f"more bytes a parameter when attached: {more['device']:.2f} on the device (plan: {rooms:.2f}), "
        f"{more['pinned_reserved']:.2f} page-locked ({more['pinned']:.2f} in use), {more['private']:.2f} private "
        f"(plan: {planned:.2f} with {snapshots} snapshots, and {LIBRARIES_BYTES / count:.2f} that don't grow)",
        {"more": more, "used": used, "planned": planned, "planned_device": rooms, "snapshots": snapshots},
    )
