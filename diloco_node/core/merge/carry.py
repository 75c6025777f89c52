"""Carry-over: what a learner keeps of its own steps when a new version of a fragment arrives (design part 5).

The learner went on while its contribution was in flight. Overwriting its parameters would throw those steps away;
adding them on top of the new version keeps them, and they reach the others with the next merge.

Steps that a version leaves out grow stale: they were made from parameters that the others have moved on from. So each
version that does not include the learner's newest steps halves what it carries of them (D-Q1). Beyond a limit of steps
the own part shrinks further: two long trajectories have learnt the same things, and adding them up would overshoot.

Held-out loss after 1,200 steps (benchmarks/quality.py, H = 16, M = 4).
Each learner in half of the rounds: keep 1 gave 1.779, keep 0.5 1.728, keep 0 1.740, overwrite 1.743.
A single learner in each round: keep 1 gave 1.820, keep 0.5 1.772, keep 0 was not tried, overwrite 1.807.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from diloco_node.core.types import CarryMode, FragmentPosition

MISSED_KEEP: Final = 0.5
"""The part of its own steps that a learner keeps when a version arrives without them."""

CARRY_FACTOR_MIN: Final = 2.0**-6
"""With less the learner takes the new version as it is."""


class Anchor(StrEnum):
    """Where the learner's own part is measured from."""

    SNAPSHOT = "snapshot"
    """The snapshot that the new version includes."""
    BASE = "base"
    """The version it applied last: nothing of it is in the new version."""
    NONE = "none"
    """Nothing is kept: the new version as it is."""


@dataclass(frozen=True, slots=True)
class CarryPlan:
    """How to apply a new version: `theta = new + lam * (theta - anchor)`.

    carry_factor: lam; 1 for an exact carry-over; 0 with `Anchor.NONE`, and only there.
    """

    anchor: Anchor
    carry_factor: float


def carry_plan(
    mode: CarryMode, *, is_included: bool, versions_missed: int, steps_since_inclusion: int, carry_steps_limit: int
) -> CarryPlan:
    """Decide how a learner takes a new version.

    is_included: one of the versions between its base and the new one includes a snapshot of it.
    versions_missed: how many of the versions up to the new one do not: those after its base, or after the one that
        includes its newest snapshot. 0 only if the new version itself includes it.
    steps_since_inclusion: its steps that are in no version up to the new one.
    carry_steps_limit: at least 1; with more steps than this, `carry_factor` is also multiplied by `limit / steps`.

    Raises ValueError: negative numbers, no limit, or nothing missed by a learner that was not included.
    """
    if carry_steps_limit < 1 or steps_since_inclusion < 0:
        raise ValueError(f"steps {steps_since_inclusion} of at most {carry_steps_limit}: negative, or no limit")
    if versions_missed < (not is_included):
        raise ValueError(f"{versions_missed} versions missed, included: {is_included}")
    if mode is CarryMode.OVERWRITE:
        return CarryPlan(Anchor.NONE, 0.0)
    carry_factor = float(MISSED_KEEP**versions_missed)
    if steps_since_inclusion > carry_steps_limit:
        carry_factor *= carry_steps_limit / steps_since_inclusion
    if carry_factor < CARRY_FACTOR_MIN:
        return CarryPlan(Anchor.NONE, 0.0)
    return CarryPlan(Anchor.SNAPSHOT if is_included else Anchor.BASE, carry_factor)


def position_after(
    position: FragmentPosition,
    *,
    inclusion: tuple[int, int] | None,
    step: int,
    tokens: int,
    version: int,
    mode: CarryMode,
    is_kept: bool = True,
) -> FragmentPosition:
    """Where the learner stands with a fragment after it applied `version`.

    inclusion: (step, tokens) of its newest snapshot that the version includes, None if there is none.
    step, tokens: the learner's counters at the apply.
    mode: under `carry` the counters restart from the snapshot, or go on. Under `overwrite` they restart from the apply:
        the steps since the snapshot (or last inclusion) are gone, and are to be booked as discarded.
    is_kept: False when the plan kept nothing of the own steps (`Anchor.NONE`): they are gone as under `overwrite`.

    Raises ValueError: an older or the same version, or a snapshot outside (last included step, step].
    """
    if version <= position.base_version:
        raise ValueError(f"version {version} does not follow base {position.base_version}")
    if inclusion is not None and not position.included_step < inclusion[0] <= step:
        raise ValueError(f"snapshot at step {inclusion[0]} is not in ({position.included_step}, {step}]")
    cycle_start_step = step if inclusion is None else inclusion[0]
    position_then = replace(position, base_version=version, cycle_start_step=cycle_start_step)
    if mode is CarryMode.OVERWRITE or not is_kept:
        return replace(position_then, included_step=step, included_tokens=tokens)
    if inclusion is not None:
        return replace(position_then, included_step=inclusion[0], included_tokens=inclusion[1])
    return position_then
