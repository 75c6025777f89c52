"""Notices an optimizer, or a wrapper of one, that takes back a share of each version, for whatever reason.

An optimizer that averages with a copy of the weights, or interpolates with older ones, takes back a fifth or a half of
each merge. No single step proves that, for training moves the parameters as well. But training moves them alike from
step to step, while what takes back does so at once: in the first step after a version, or in one of the next ten.

So of each version's way the share is measured that each of the next steps takes back. The part that gradient, its signs
and the learner's own way before the version explain is taken off: descent and momentum lead back as well. The first
step is compared with those some time later; and of each version's steps the one that stands out with those that don't,
all over several versions, for merges may be few steps apart. Less than an eighth in each step is not found.

Nothing waits for a device: the numbers are read when they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from diloco_node.learner.layouts.device import LateNumbers, has_streams
from diloco_node.learner.layouts.page_locked import page_locked
from diloco_node.learner.layouts.shard_map import LocalFragment
from diloco_node.learner.layouts.slab_values import host_values
from diloco_node.learner.layouts.tensors import ModelTensors

STEPS: Final = 10
"""Steps after a version that are looked at. Lookahead interpolates each fifth to tenth step."""

STEPS_MIN: Final = 2
"""With fewer there is nothing to compare the first one with."""

STEPS_OF_JUMP: Final = 4
"""With fewer, the others of a version say too little of how far one of them may be from the rest."""

VERSIONS: Final = 10
"""The last ones that are judged together."""

VERSIONS_MIN: Final = 5
SHARE: Final = 0.12
"""Part of a version's way, taken back by one step more than by others. A fifth is found, also beside some noise."""

DEVIATIONS: Final = 5.0
"""The share of first steps must stand out by so many standard errors."""

JUMP_DEVIATIONS: Final = 12.0
"""One of a version's steps must stand out by so many median deviations of the others of all versions: the least of some
always stands out a little."""

LEADS_BACK: Final = 0.5
"""Cosine between the gradient and a version's way, from which on the gradient itself leads back."""

VERSIONS_MAX: Final = 64
"""After so many versions nothing more is looked at."""

TRIALS_MAX: Final = 2
"""Versions that are looked at together: each costs some twenty kernels of a device in each step."""

COLLINEAR: Final = 1e-4
"""Directions that are nearer to each other, by the square of their sine, count as one."""

_DIRECTIONS: Final = 5
"""The step, and what may explain it: see `PullBackCheck._measure`."""


@dataclass(slots=True)
class _VersionTrial:
    """A version and the steps after it.

    Attributes:
        move: way of the version, and last: the values at the boundary before, samples on their device.
        progress: way of the learner itself since the version before of this fragment; zeros: nobody knows.
        rows: per boundary the products of the directions of `_measure` with each other.
    """

    local: LocalFragment
    move: Tensor
    last: Tensor
    progress: Tensor
    rows: list[Tensor] = field(default_factory=list)


class StepAfter(NamedTuple):
    """A step after a version.

    Attributes:
        share: of the version's way that it gained. cosine: between gradient and way; 0 where there is no gradient.
        rest: the share that gradient and momentum don't explain; None where one of the two is not known.
    """

    share: float
    cosine: float = 0.0
    rest: float | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Judgement of a version: the share that its first step took back beyond later ones, and the one that took most
    beyond the others, which were so far from their median."""

    first: float
    jump: float
    deviations: tuple[float, ...]


class PullBackCheck:
    """Use `begin` when a version was applied, `look` at each boundary before anything is. fault: in words, or empty."""

    def __init__(self, tensors: ModelTensors, fragments: int) -> None:
        self.fault = ""
        self._tensors = tensors
        # By fragment the version that is looked at, and the numbers of one that are on their way.
        self._trials: dict[int, _VersionTrial] = {}
        self._late: dict[int, LateNumbers] = {}
        make: Callable[[int, int], Tensor] = page_locked if any(map(has_streams, tensors.devices)) else host_values
        self._places = make(fragments, STEPS * _DIRECTIONS**2)
        # By fragment the values after the version that was looked at last.
        self._after: dict[int, Tensor] = {}
        self._verdicts: deque[_Verdict] = deque(maxlen=VERSIONS)
        # Versions that were begun, up to VERSIONS_MAX.
        self._versions = 0

    @property
    def is_done(self) -> bool:
        """Whether no further version is looked at."""
        return bool(self.fault) or self._versions >= VERSIONS_MAX

    def wants(self, index: int) -> bool:
        """Whether a version of this fragment is to be told by `begin`."""
        return index in self._trials or (not self.is_done and len(self._trials) < TRIALS_MAX)

    def begin(self, local: LocalFragment, before: Tensor, after: Tensor) -> None:
        """A version was applied: samples of the parameters before and after."""
        self._finish(local.index)
        if not self.is_done and len(self._trials) < TRIALS_MAX:
            self._versions += 1
            earlier = self._after.get(local.index, before)
            is_same = (earlier.device, earlier.shape) == (before.device, before.shape)
            progress = before - (earlier if is_same else before)
            self._trials[local.index] = _VersionTrial(local, after - before, after, progress)
            self._after[local.index] = after
        else:
            self.pass_over(local.index)

    def end(self) -> None:
        """Look at no further version."""
        self._versions = VERSIONS_MAX
        self._trials.clear()

    def pass_over(self, index: int) -> None:
        """A version was applied that is not looked at: the way since the one before it is not the learner's alone."""
        self._after.pop(index, None)

    def look(self) -> None:
        """Measure what the last step took back, and judge the versions whose numbers have come."""
        for index, trial in list(self._trials.items()):
            trial.rows.append(self._measure(trial))
            if len(trial.rows) == STEPS:
                self._finish(index)
        for index, late in list(self._late.items()):
            numbers = late.read()
            if numbers is not None:
                del self._late[index]
                self._judge(numbers)

    def _measure(self, trial: _VersionTrial) -> Tensor:
        """Products of the last step, the version's way and what else may lead it: gradient, its signs, and the way that
        the learner went before, which momentum goes on with."""
        now, gradient = self._tensors.sample(trial.local), self._tensors.sample_gradients(trial.local)
        step, trial.last = now - trial.last, now
        if gradient is None:
            gradient = torch.zeros_like(now)
        directions = torch.stack([step, trial.move, gradient, gradient.sign(), trial.progress])
        return (directions[:, None] * directions).sum(-1).flatten()  # no matrix product: autocast would round it

    def _finish(self, index: int) -> None:
        """Order the numbers of a version; they are lost where those of the one before are still on their way."""
        trial = self._trials.pop(index, None)
        if trial is not None and len(trial.rows) >= STEPS_MIN and index not in self._late:
            self._late[index] = LateNumbers(torch.cat(trial.rows), self._places[index])

    def _judge(self, numbers: Sequence[float]) -> None:
        verdict = judge_version(steps_of(numbers))
        if verdict is None or self.fault:
            return
        self._verdicts.append(verdict)
        self.fault = fault_of(list(self._verdicts))


def steps_of(numbers: Sequence[float]) -> list[StepAfter]:
    """Read what `_measure` gave of each step; those in which nothing moved are left out."""
    products = np.array(numbers, np.float64).reshape(-1, _DIRECTIONS, _DIRECTIONS)
    products = products[products[:, 0, 0] > 0.0]
    if not np.isfinite(products).all() or not (products[:, 1, 1] > 0.0).all():
        return []
    lengths = np.sqrt(np.maximum(np.diagonal(products, axis1=1, axis2=2), np.finfo(np.float64).tiny))
    cosines = products / (lengths[:, :, None] * lengths[:, None, :])
    shares = np.linalg.pinv(cosines[:, 1:, 1:], rcond=COLLINEAR, hermitian=True) @ cosines[:, 1:, :1]
    return [
        StepAfter(
            float(product[0, 1] / product[1, 1]),
            float(cosine[1, 2]),
            float(share[0, 0] * length[0] / length[1]) if product[2, 2] > 0.0 and product[4, 4] > 0.0 else None,
        )
        for product, share, length, cosine in zip(products, shares, lengths, cosines, strict=True)
    ]


def judge_version(steps: Sequence[StepAfter]) -> _Verdict | None:
    """Judge a version by the steps after it; None: nothing to say."""
    shares = [step.share for step in steps]
    if len(shares) < STEPS_MIN or not all(abs(share) < float("inf") for share in shares):
        return None
    rests = [step.rest for step in steps if step.rest is not None]
    if len(rests) == len(shares):
        later = rests[1:]
        first = _beyond(median(later[len(later) // 2 :]) - rests[0], later, steps[0].cosine)
    else:
        # Training that slows down takes back less from step to step: the first is expected where the next ones point.
        later = shares[1:]
        usual = min(median(later), 2.0 * later[0] - later[1] if len(later) > 1 else later[0])
        first = _beyond(usual - shares[0], later, steps[0].cosine)
    if len(shares) < STEPS_OF_JUMP:
        return _Verdict(first, 0.0, ())
    values = rests if len(rests) == len(shares) else shares
    worst = min(range(len(values)), key=values.__getitem__)
    others = [value for at, value in enumerate(values) if at != worst]
    usual = median(others)
    jump = 0.0 if steps[worst].cosine > LEADS_BACK else usual - values[worst]
    deviations = sorted(abs(value - usual) for value in others)
    # The median of an odd number is one of them: its 0 says nothing about noise.
    return _Verdict(first, jump, tuple(deviations[len(others) % 2 :]))


def _beyond(share: float, neighbours: Sequence[float], cosine: float) -> float:
    """Share that a step takes back beyond its neighbours; 0 where all do as much, or the gradient leads back."""
    return 0.0 if cosine > LEADS_BACK or share < median(map(abs, neighbours)) else share


def fault_of(verdicts: Sequence[_Verdict]) -> str:
    """Say which share of each version is taken back; empty if that is not clear, or none is."""
    if len(verdicts) < VERSIONS_MIN:
        return ""
    firsts = [verdict.first for verdict in verdicts]
    mean, error = fmean(firsts), stdev(firsts) / len(firsts) ** 0.5
    if mean >= max(SHARE, DEVIATIONS * error):
        return f"the first step after a version takes back {mean:.0%} of it"
    spread = median([deviation for verdict in verdicts for deviation in verdict.deviations] or [0.0])
    jumps = sum(verdict.jump >= max(SHARE, JUMP_DEVIATIONS * spread) for verdict in verdicts)
    if jumps >= VERSIONS_MIN and 2 * jumps > len(verdicts):
        return f"within {STEPS} steps after a version one step takes back {SHARE:.0%} of it or more"
    return ""
