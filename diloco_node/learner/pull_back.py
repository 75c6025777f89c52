"""Notices an optimizer, or a wrapper of one, that takes back a share of each version, for whatever reason.

An optimizer that averages with a copy of the weights, or interpolates with older ones, takes back a fifth or a half of
each merge. No single step proves that, for training moves the parameters as well. But training moves them alike from
step to step, while what takes back does so at once: in the first step after a version, or in one of the next ten.

So of each version's way the share is measured that each of the next steps takes back. The first step is compared with
the later ones over several versions; and of ten steps the one that stands out. A step that the gradient itself leads
back is no such thing. A copy that is followed slowly, by some percent a step, looks like training: it is not found.

Nothing waits for a device: the numbers are read when they are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import Final

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

STEPS_OF_JUMP: Final = 8
"""With fewer, one of them stands out by chance."""

VERSIONS: Final = 10
"""The last ones that are judged together."""

VERSIONS_MIN: Final = 5
SHARE: Final = 0.12
"""Part of a version's way, taken back by one step more than by others. A fifth is found, also beside some noise."""

DEVIATIONS: Final = 5.0
"""The share must stand out by so many standard errors, or median deviations of the other steps."""

LEADS_BACK: Final = 0.5
"""Cosine between the gradient and a version's way, from which on the gradient itself leads back."""

VERSIONS_MAX: Final = 64
"""After so many versions nothing more is looked at."""

TRIALS_MAX: Final = 2
"""Versions that are looked at together: each costs some twenty kernels of a device in each step."""

_NUMBERS: Final = 3


@dataclass(slots=True)
class _VersionTrial:
    """A version and the steps after it.

    Attributes:
        move: way of the version, and last: the values at the boundary before, samples on their device.
        length: norm of `move`.
        rows: per boundary (share of the way gained, cosine of gradient and way, whether anything moved).
    """

    local: LocalFragment
    move: Tensor
    last: Tensor
    length: Tensor
    rows: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Judgement of a version: the share that its first step took back beyond later ones, and whether one stood out."""

    first: float
    is_jump: bool


class PullBackCheck:
    """Use `begin` when a version was applied, `look` at each boundary before anything is applied.

    Attributes:
        fault: what was found, in words; empty before.
    """

    def __init__(self, tensors: ModelTensors, fragments: int) -> None:
        self.fault = ""
        self._tensors = tensors
        # By fragment the version that is looked at, and the numbers of one that are on their way.
        self._trials: dict[int, _VersionTrial] = {}
        self._late: dict[int, LateNumbers] = {}
        make: Callable[[int, int], Tensor] = page_locked if any(map(has_streams, tensors.devices)) else host_values
        self._places = make(fragments, STEPS * _NUMBERS)
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
            move = after - before
            self._trials[local.index] = _VersionTrial(local, move, after, move.norm())

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
        now, move = self._tensors.sample(trial.local), trial.move
        gradient = self._tensors.sample_gradients(trial.local)
        step, trial.last = now - trial.last, now
        share, cosine = (step * move).sum() / trial.length.square(), torch.zeros_like(trial.length)
        if gradient is not None:
            cosine = ((gradient * move).sum() / (gradient.norm() * trial.length)).nan_to_num(0.0)
        return torch.stack([share, cosine, (step != 0).any().float()])

    def _finish(self, index: int) -> None:
        """Order the numbers of a version; they are lost where those of the one before are still on their way."""
        trial = self._trials.pop(index, None)
        if trial is not None and len(trial.rows) >= STEPS_MIN and index not in self._late:
            self._late[index] = LateNumbers(torch.cat(trial.rows), self._places[index])

    def _judge(self, numbers: Sequence[float]) -> None:
        rows = [tuple(numbers[at : at + _NUMBERS]) for at in range(0, len(numbers), _NUMBERS)]
        verdict = judge_version([(share, cosine) for share, cosine, has_moved in rows if has_moved])
        if verdict is None or self.fault:
            return
        self._verdicts.append(verdict)
        self.fault = fault_of(list(self._verdicts))


def judge_version(steps: Sequence[tuple[float, float]]) -> _Verdict | None:
    """Judge a version by (share of its way gained, cosine of gradient and way) of each step; None: nothing to say."""
    shares = [share for share, _ in steps]
    if len(shares) < STEPS_MIN or not all(abs(share) < float("inf") for share in shares):
        return None
    later = shares[1:]
    # Training that slows down takes back less from step to step: the first one is expected where the next ones point.
    usual = min(median(later), 2.0 * later[0] - later[1] if len(later) > 1 else later[0])
    first = _beyond(usual - shares[0], later, steps[0][1])
    worst = min(range(len(shares)), key=shares.__getitem__)
    neighbours = [share for at, share in enumerate(shares) if at != worst]
    spread = median(abs(share - median(neighbours)) for share in neighbours)
    jump = _beyond(median(neighbours) - shares[worst], neighbours, steps[worst][1])
    return _Verdict(first, len(shares) >= STEPS_OF_JUMP and jump >= max(SHARE, DEVIATIONS * spread))


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
    jumps = sum(verdict.is_jump for verdict in verdicts)
    if jumps >= VERSIONS_MIN and 2 * jumps > len(verdicts):
        return f"within {STEPS} steps after a version one step takes back {SHARE:.0%} of it or more"
    return ""
