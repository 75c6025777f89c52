"""Facts about an optimizer between two steps: what it trains, how often that was written to, and samples of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final

import torch
from torch import Tensor
from torch.optim import optimizer as optimizer_module

from diloco_node.learner.layouts.tensors import local_part
from diloco_node.learner.tensor_forms import SliceReader, is_constrained, sample_of

TOLD: Final = 0.05
"""Change that is told and ends nobody: the most that a constraint counts as, or a write to other tensors alone."""

FAR: Final = 0.1
"""Change between two steps, in lengths of the values, that is a load and no constraint or noise."""

TORN_STEPS: Final = 4.0
"""A step that raised has written at most as much as so many of the whole steps around it, else weights were loaded."""

NOISE: Final = 1e-5
"""Change of a climb or an average that was taken out again by arithmetic."""

COPY_VALUES_MIN: Final = 16
"""A state with fewer values may look like its parameter by chance."""

_WRITES: Final = attrgetter("_version")
_FAREST: Final = 1e30
_STEPS_FILE: Final = optimizer_module.__file__

_State = tuple[str, str, Tensor, Tensor]


@dataclass(slots=True)
class OptimizerRecord:
    """An optimizer that trains tensors which are merged, by name.

    Attributes:
        renormed: tensors that forward passes shorten: only a change beyond FAR is one.
        writes: how often each was written to, when this learner or the optimizer did so last, and where the largest
            lies. largest: its place. sample: of it at that time, for a load changes all; slices: of all, by device.
        steps: since `attach`. counted_steps: of the optimizer whose steps count, when this one's last step began.
        told_steps: that the loop had told when `sample` was taken. untold_steps: of this optimizer since then.
        is_stepping: it is in a step: what it writes was not noted yet.
        is_captured: a CUDA graph recorded a step of it since its writes were noted.
        before: samples of its tensors before a step after which its states are looked at, by name.
        states: samples of its states when looked at last, and how much they were like their parameter when looked at
            first, by names of parameter and state. siblings: records of optimizers that hold some of the same tensors.
    """

    tensors: dict[str, Tensor]
    renormed: Container[Tensor] = ()
    writes: list[int] = field(default_factory=list)
    steps: int = 0
    counted_steps: int = 0
    told_steps: int = 0
    untold_steps: int = 0
    is_stepping: bool = False
    is_captured: bool = False
    sample: Tensor | None = None
    slices: dict[torch.device, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    states: dict[tuple[str, str], tuple[Tensor, Tensor]] = field(default_factory=dict)
    siblings: list[OptimizerRecord] = field(default_factory=list)
    _taken_steps: int = 0
    # The sample before `sample`; and those with which steps began that followed one that raised.
    _earlier: Tensor | None = None
    _tears: list[Tensor] = field(default_factory=list)
    largest: int = field(init=False)
    _reader: SliceReader = field(init=False)

    def __post_init__(self) -> None:
        self.largest = max(enumerate(self.tensors.values()), key=lambda entry: entry[1].numel())[0]
        self._reader = SliceReader(self._sliced.values())

    def take_steps(self) -> int:
        """Steps since the last call of this."""
        count, self._taken_steps = self.steps - self._taken_steps, self.steps
        return count

    def count_writes(self) -> list[int]:
        """How often each was written to, and where the largest lies."""
        # `tensor.data = ...` counts nothing, but puts other memory in its place.
        return [*map(_WRITES, self.tensors.values()), local_part(self._largest).data_ptr()]

    def is_followed(self, told_steps: int) -> bool:
        """Whether no step between was hidden, as those of a captured graph are: it would have moved the tensors."""
        return self.sample is not None and told_steps - self.told_steps <= 1

    def change(self) -> Tensor:
        """How far the tensors on the device of the largest have moved since `sample`, in lengths; a scalar there."""
        return self.look()[0][0]

    def look(self) -> list[tuple[Tensor, Callable[[], str]]]:
        """By device the change, and what names a tensor that has changed, which waits for the device.

        The first is that of the largest. A change is TOLD at most where a constraint wrote, or where only tensors other
        than the largest have changed.
        """
        assert self.sample is not None
        now = sample_of(self._largest).to(self.sample.device)
        change = now.new_zeros(())
        if not now.is_cpu or not torch.equal(now, self.sample):
            change = _apart(now, self.sample)
            change = torch.where(is_constrained(self.sample, now), change.clamp(max=TOLD), change)
            if self._largest in self.renormed:
                change = torch.where(change > FAR, change, 0.0)
        changes: list[tuple[Tensor, Callable[[], str]]] = [(change, lambda: self.name)]
        for device, slices in self._reader.read().items():
            before = self.slices.get(device)
            if before is None or before.shape != slices.shape or (slices.is_cpu and torch.equal(slices, before)):
                continue
            entry = _apart(slices, before).clamp(max=TOLD), partial(self._name_of_change, before, slices)
            if device == now.device:
                changes[0] = torch.maximum(change, entry[0]), entry[1]
            else:
                changes.append(entry)
        return changes

    def _name_of_change(self, before: Tensor, now: Tensor) -> str:
        """Name the first tensor whose slice differs; the largest where none does."""
        differing = (before != now).nonzero()
        return [*self._sliced][self._reader.number_at(now.device, int(differing[0]))] if len(differing) else self.name

    @property
    def _sliced(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor not in self.renormed}

    @property
    def name(self) -> str:
        """Name of the largest."""
        return [*self.tensors][self.largest]

    @property
    def _largest(self) -> Tensor:
        return [*self.tensors.values()][self.largest]

    def note(self, *, is_step: bool = False) -> None:
        """Take the values as this learner has written them, or the optimizer, by `tensor.data` perhaps."""
        writes = self.count_writes()
        if is_step or writes != self.writes:
            self._earlier, self._tears = self.sample, []
            self.writes, self.sample = writes, sample_of(self._largest)
            self.slices = self._reader.read()

    def tear(self) -> None:
        """Note where a step begins that follows one which raised, for want of memory say: that has written a part."""
        self._tears.append(sample_of(self._largest))

    def torn_change(self) -> float:
        """Return how far a load after a step that raised has moved the largest, in lengths; 0.0: a part of a step did.

        Known after the whole step that follows: how far one goes depends on the learning rate.
        """
        if not self._tears or self.sample is None:
            return 0.0
        start = self._tears[-1]
        steps = [
            (sample_of(self._largest), start),
            (self.sample, self.sample if self._earlier is None else self._earlier),
        ]
        usual = max(float(torch.dist(now, before)) for now, before in steps)
        is_part = float(torch.dist(start, self.sample)) <= TORN_STEPS * len(self._tears) * usual
        return 0.0 if is_part else float(_apart(start, self.sample))

    def likenesses(
        self, optimizer: torch.optim.Optimizer, merge_tensors: Container[Tensor]
    ) -> dict[tuple[str, str], Tensor]:
        """Compare states with their parameters, by names of both. A copy moves; first parameters, kept by some, don't.

        The values at a step's begin are no copy either: SAM takes them anew in each step, to go back to them. Nor are
        those at its end, as ASGD has them before its averages begin.
        """
        likenesses = {}
        for name, key, tensor, state in self.shaped_alike(optimizer, merge_tensors):
            sample, parameter = sample_of(state), sample_of(tensor)
            apart = torch.linalg.vector_norm(sample - parameter) / torch.linalg.vector_norm(parameter)
            likeness = 1.0 - apart
            # A copy begins as one. A moment may come to look like its parameter, where decay outweighs gradients.
            before, first = self.states.get((name, key), (sample, likeness))
            self.states[name, key] = sample, first
            began = self.before[name] if name in self.before else before  # noqa: SIM401 - mypy
            is_copy = (sample != before).any() & (sample != began).any() & (apart > NOISE)
            likenesses[name, key] = torch.where(is_copy, torch.minimum(first, likeness), 0.0)
        return likenesses

    def shaped_alike(self, optimizer: torch.optim.Optimizer, merge_tensors: Container[Tensor]) -> Iterator[_State]:
        """Each (name, key, tensor, state) of a state that has its tensor's shape, and may be a copy of it."""
        for name, tensor in self.tensors.items():
            for key, state in optimizer.state.get(tensor, {}).items():
                if not isinstance(state, Tensor) or state.shape != tensor.shape or state in merge_tensors:
                    continue
                if key == "ax" and isinstance(optimizer, torch.optim.ASGD):  # an average that it never steps from
                    continue
                values = local_part(state)
                is_apart = values.data_ptr() != local_part(tensor).data_ptr()
                if state.is_floating_point() and values.numel() >= COPY_VALUES_MIN and is_apart:
                    yield name, key, tensor, state


def is_inside_step() -> bool:
    """Whether the step whose hook calls this is one inside another: more than one of torch's frames is on the stack."""
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        count += frame.f_code.co_filename == _STEPS_FILE
    return count > 1


def _apart(now: Tensor, before: Tensor) -> Tensor:
    """Distance in lengths of the values before; 0 where those are zero or not finite: nobody can say how far is far.

    Values that are huge now are as far as can be. The snapshot tells of NaN and infinite ones.
    """
    way = torch.linalg.vector_norm(now - before, dtype=torch.float32)
    length = torch.linalg.vector_norm(before, dtype=torch.float32)
    distance = (way / length).nan_to_num(0.0, posinf=_FAREST)
    return torch.where((length > 0.0) & length.isfinite() & now.isfinite().all(), distance, 0.0)
