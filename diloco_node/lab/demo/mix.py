"""`demo --speeds`, `--batches`, `--ranks` and `--shard`: learners that differ, as settings of each region's `start`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from diloco_node.cli.options import parse_option
from diloco_node.errors import ConfigError

SPEEDS_APART_MAX: Final = 16.0
"""The bound to which the leader believes reported step times (`core.merge.schedule`)."""

BATCH_MAX: Final = 1024
RANKS_MAX: Final = 16
SHARDS: Final = ("none", "ddp", "fsdp")


@dataclass(frozen=True, slots=True)
class LearnerMix:
    """How the learners of a demo differ.

    Attributes:
        speeds: relative, one for each region in the order of their names; empty: all the same.
        batches: sequences in an inner step, in the same order; empty: as run.toml says.
        ranks: processes of each learner; empty: one. shards: how their model is cut; empty: it is not.
    """

    speeds: tuple[float, ...] = ()
    batches: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    shards: tuple[str, ...] = ()

    def step_seconds(self, fastest_s: float, index: int) -> float:
        """An inner step of a region takes at least so long; of the fastest `fastest_s`."""
        return fastest_s * max(self.speeds) / self.speeds[index] if self.speeds else fastest_s

    def median_step_seconds(self, fastest_s: float) -> float:
        """Return the step time of the middle learner; of an even number, the slower one of the middle two."""
        times = sorted(self.step_seconds(fastest_s, index) for index in range(len(self.speeds)))
        return times[len(times) // 2] if times else fastest_s

    def tokens_per_second(self, fastest_s: float, regions: int, *, batch: int, context: int) -> float:
        """Return the rate of all regions if nothing holds them up. `batch`: for learners without one of their own."""
        batches = self.batches or (batch,) * regions
        return sum(batch * context / self.step_seconds(fastest_s, index) for index, batch in enumerate(batches))

    def settings(self, fastest_s: float, index: int) -> tuple[str, ...]:
        """Return a region's settings for `start --set`."""
        settings = [f"model.step_time_min={round(1000 * self.step_seconds(fastest_s, index))}ms"] if self.speeds else []
        for name, values in (("batch", self.batches), ("ranks", self.ranks), ("shard", self.shards)):
            settings += [f"model.{name}={values[index]}"] if values else []
        return tuple(settings)


def parse_mix(speeds: str, batches: str, names: Sequence[str], *, ranks: str = "", shards: str = "") -> LearnerMix:
    """From the command line.

    speeds, batches, ranks, shards: with commas, one for each of `names`; "" for none.

    Raises ConfigError: a wrong number of them, or one that can't be.
    """
    mix = LearnerMix(
        parse_option("--speeds", speeds, _speeds),
        parse_option("--batches", batches, partial(_counts, most=BATCH_MAX)),
        parse_option("--ranks", ranks, partial(_counts, most=RANKS_MAX)),
        parse_option("--shard", shards, _shards),
    )
    lists = (mix.speeds, mix.batches, mix.ranks, mix.shards)
    for flag, values in zip(("--speeds", "--batches", "--ranks", "--shard"), lists, strict=True):
        if values and len(values) != len(names):
            raise ConfigError(f"{flag} has {len(values)} values for {len(names)} regions: give one for each, in order")
    return mix


def _speeds(text: str) -> tuple[float, ...]:
    values = tuple(float(word) for word in text.split(",")) if text else ()
    if values and not all(math.isfinite(speed) and 0 < speed <= SPEEDS_APART_MAX * min(values) for speed in values):
        raise ValueError(f"use positive numbers, the largest at most {SPEEDS_APART_MAX:g} times the smallest")
    return values


def _counts(text: str, *, most: int) -> tuple[int, ...]:
    values = tuple(int(word) for word in text.split(",")) if text else ()
    if values and not (min(values) >= 1 and max(values) <= most):
        raise ValueError(f"use whole numbers from 1 to {most}")
    return values


def _shards(text: str) -> tuple[str, ...]:
    values = tuple(text.split(",")) if text else ()
    if not set(values) <= set(SHARDS):
        raise ValueError(f"use {', '.join(SHARDS)}")
    return values
