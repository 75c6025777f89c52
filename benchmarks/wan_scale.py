"""The pure parts of benchmarks/wan.py: how a big run's link is scaled to a small model, and what the logs add up to.

A run of N parameters with steps of t seconds needs, per step, so many bytes as N says, and has t for them. So a link
of `rate` stands in for one of `rate_large` when rate x t / N is the same for both, and a round trip when it is the same
part of a step:

    rate = rate_large x (N / N_large) x (t_large / t)        RTT = RTT_large x (t / t_large)

Then everything that is counted in steps is the same in both, seconds grow by t_large / t and bytes by N_large / N. What
does not scale: packets (1500 bytes), heartbeats (every 200 ms), and how fast a model learns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """The run that is meant: parameters, seconds of an inner step, bit/s in and out of a region, round trip in s."""

    parameters: float = 5e9
    step_s: float = 1.0
    rate_bits_per_s: float = 2e9
    rtt_s: float = 0.040


@dataclass(frozen=True, slots=True)
class Scale:
    """A target, and the small run that stands in for it."""

    target: Target
    parameters: int
    step_s: float

    @property
    def rate_bits_per_s(self) -> float:
        """Of each region of the small run."""
        return (
            self.target.rate_bits_per_s
            * (self.parameters / self.target.parameters)
            * (self.target.step_s / self.step_s)
        )

    @property
    def rtt_s(self) -> float:
        """Between any two regions of the small run."""
        return self.target.rtt_s * self.step_s / self.target.step_s

    def unscaled_s(self, seconds: float) -> float:
        """Seconds of the small run as seconds of the target."""
        return seconds * self.target.step_s / self.step_s

    def unscaled_bytes(self, count: float) -> float:
        """Bytes of the small run as bytes of the target."""
        return count * self.target.parameters / self.parameters


def ring_bytes(parameters: float, regions: int, bytes_each: float = 4.0) -> float:
    """What a region sends, and receives, in one ring all-reduce: 2 (M - 1) / M of the vector."""
    return 2 * (regions - 1) / regions * parameters * bytes_each


def step_figures(logs: Sequence[Sequence[Mapping[str, Any]]], *, warm_up: int) -> dict[str, float]:
    """Step time and bytes of one arm, without its first steps.

    Args:
        logs: per region one record per step in order, with `seconds` (monotonic, at the step's end), `sent` and
            `received` (bytes of the interface until then). warm_up: steps that don't count; at least one.

    Returns:
        `step_seconds` (mean of all regions), `step_seconds_median`, `step_seconds_max` (of single steps),
        `sent_bytes_per_step`, `received_bytes_per_step` (mean of the regions), `steps` (that counted).

    Raises:
        ValueError: a log has no step after the warm-up.
    """
    short = min(len(log) for log in logs)
    if warm_up < 1 or short <= warm_up:
        raise ValueError(f"the shortest log has {short} steps; {warm_up} of them (at least 1) are for warming up")
    times, spans, sent, received = [], [], [], []
    for log in logs:
        counted = log[warm_up - 1 :]
        steps = len(counted) - 1
        first, last = counted[0], counted[-1]
        times.append((last["seconds"] - first["seconds"]) / steps)
        spans += [after["seconds"] - before["seconds"] for before, after in pairwise(counted)]
        sent.append((last["sent"] - first["sent"]) / steps)
        received.append((last["received"] - first["received"]) / steps)
    return {
        "step_seconds": statistics.fmean(times),
        "step_seconds_median": statistics.median(spans),
        "step_seconds_max": max(spans),
        "sent_bytes_per_step": statistics.fmean(sent),
        "received_bytes_per_step": statistics.fmean(received),
        "steps": short - warm_up,
    }


def steps_to(curve: Sequence[tuple[int, float]], loss: float) -> int | None:
    """The first step at which a held-out loss is at most `loss`; None: never.

    Args:
        curve: (step, held-out loss), rising in step.
    """
    return next((step for step, value in curve if value <= loss), None)


def same_losses(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two arms trained the same way so far: their losses step by step, as far as both go, within 1e-4."""
    pairs = list(zip(ours, theirs, strict=False))
    return bool(pairs) and all(abs(one - other) <= 1e-4 * abs(other) for one, other in pairs)


def comparison(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """What the arms are compared by; None where an arm was not run, or did not get to the loss.

    Returns:
        `ddp_over_ours`: step time of DDP over ours. `sync_over_ours`. `ours_over_alone`: 1.0 is no slow-down.
        `loss_time_ddp_over_ours`, `loss_time_sync_over_ours`: seconds to the loss.
    """

    def ratio(one: str, other: str, key: str) -> float | None:
        above, below = arms.get(one, {}).get(key), arms.get(other, {}).get(key)
        return above / below if above is not None and below else None

    return {
        "ddp_over_ours": ratio("ddp", "ours", "step_seconds"),
        "sync_over_ours": ratio("sync_diloco", "ours", "step_seconds"),
        "ours_over_alone": ratio("ours", "alone", "step_seconds"),
        "loss_time_ddp_over_ours": ratio("ddp", "ours", "seconds_to_loss"),
        "loss_time_sync_over_ours": ratio("sync_diloco", "ours", "seconds_to_loss"),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    scale = Scale(Target(**result["target"]), result["parameters"], result["paced_step_seconds"])
    target, shown = scale.target, []
    shown.append(
        f"target   {target.parameters / 1e9:g} B parameters, {target.step_s:g} s a step, {result['regions']} regions, "
        f"{target.rate_bits_per_s / 1e9:g} Gbit/s in and out of each, round trip {target.rtt_s * 1e3:g} ms"
    )
    shown.append(
        f"scaled   {scale.parameters / 1e6:.2f} M parameters, {scale.step_s:g} s a step: "
        f"rate x N/N_large x t_large/t = {scale.rate_bits_per_s / 1e6:.2f} Mbit/s, "
        f"RTT x t/t_large = {scale.rtt_s * 1e3:g} ms; H = {result['sync_every']}, P = {result['fragments']}"
    )
    shown += [f"note     {note}" for note in result["notes"]]
    shown.append("")
    shown.append(
        f"{'':<12}{'step':>9}{'median':>9}{'sent a step':>13}{'to loss ' + format(result['loss'], '.2f'):>22}"
        f"   | {'step':>9}{'sent a step':>13}{'to loss':>11}"
    )
    for name, arm in result["arms"].items():
        steps, seconds = arm.get("steps_to_loss"), arm.get("seconds_to_loss")
        reached = f"{steps} steps, {_span(seconds)}" if seconds is not None else "not reached"
        large = _span(scale.unscaled_s(seconds)) if seconds is not None else "-"
        shown.append(
            f"{name:<12}{_span(arm['step_seconds']):>9}{_span(arm['step_seconds_median']):>9}"
            f"{_size(arm['sent_bytes_per_step']):>13}{reached:>22}   | "
            f"{_span(scale.unscaled_s(arm['step_seconds'])):>9}"
            f"{_size(scale.unscaled_bytes(arm['sent_bytes_per_step'])):>13}{large:>11}"
        )
    shown.append(f"{'':<12}{'as run':>31}{'':>22}   | scaled back to the target")
    shown.append("")
    for key, value in result["comparison"].items():
        shown.append(f"{key:<26}{'-' if value is None else format(value, '.4g')}")
    return shown


def _span(seconds: float) -> str:
    for limit, size, unit in (
        (1.0, 1e-3, "ms"),
        (600.0, 1.0, "s"),
        (7200.0 * 3, 60.0, "min"),
        (172_800.0, 3600.0, "h"),
    ):
        if seconds < limit:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 86_400:.3g} d"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
