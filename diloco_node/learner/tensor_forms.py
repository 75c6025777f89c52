"""Types, shapes, places and samples of many tensors, compared at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import torch
from torch import Tensor

from diloco_node.learner.layouts.tensors import local_part

SAMPLE_VALUES: Final = 256
"""Values to compare of each tensor, spread over it: a tensor that is loaded differs in nearly all of them."""

_FORM: Final = attrgetter("dtype", "shape")
_VALUES: Final = methodcaller("values")


class TensorForms:
    """Types and shapes as they are when this is made.

    Args:
        tensors: kept.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._forms = [*map(_FORM, self._tensors)]
        self._is_same = _guard_of(self._tensors)

    def difference(self) -> tuple[int, str, str] | None:
        """Number of the first tensor that has another form now, and its form before and now; None: all are the same."""
        if self._is_same(*self._tensors):
            return None
        forms = [*map(_FORM, self._tensors)]
        if forms != self._forms:
            entries = enumerate(zip(self._forms, forms, strict=True))
            number, pair = next((number, pair) for number, pair in entries if pair[0] != pair[1])
            before, now = (f"{dtype} of shape {tuple(shape)}" for dtype, shape in pair)
            return number, before, now
        # The guard sees more: a tensor on another device, one that was frozen, or a loop that calls under autocast.
        self._is_same = _guard_of(self._tensors)
        return None


class TensorPlaces:
    """Contents of modules, in their dictionaries, when this is made."""

    def __init__(self, holders: list[dict[str, Any]]) -> None:
        self._holders, self._sizes = holders, [*map(len, holders)]
        # Half of a model's dictionaries are empty, and their sizes say whether they still are.
        self._filled = [*filter(None, holders)]
        self._values = [*chain.from_iterable(map(_VALUES, holders))]

    @property
    def are_same(self) -> bool:
        """Whether they hold the same now."""
        now = chain.from_iterable(map(_VALUES, self._filled))
        return [*map(len, self._holders)] == self._sizes and all(map(is_, now, self._values))


def sample_of(tensor: Tensor) -> Tensor:
    """Return some values of the part on this rank, spread over it: about SAMPLE_VALUES, float32; a copy."""
    values = local_part(tensor)
    count = values.numel()
    step = max(1, count // SAMPLE_VALUES)
    if not values.is_contiguous():
        values = values.reshape(-1)
    # In one call, for an optimizer's every step takes one: a slice of a flat view would be three.
    return values.as_strided((-(-count // step),), (step,), values.storage_offset()).to(torch.float32, copy=True)


def stack(scalars: Iterable[Tensor]) -> Tensor:
    """Return scalars, of one or more devices, as a tensor of float32 on the first one's."""
    values = list(scalars)
    return torch.stack([value.to(values[0].device, torch.float32) for value in values])


def _guard_of(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Return a function that is True only if tensors have the forms that these have now.

    It is the guard of torch's compiled code, one call for all: a third of the time. Where a torch has it no more, or in
    another way, the function is always False.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides: list[Any] = [[None] * tensor.dim() for tensor in tensors]
        guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check if check(*tensors) else _is_never_same
    except Exception:  # noqa: BLE001 - it is no public part of torch
        return _is_never_same


def _is_never_same(*_: Tensor) -> bool:
    return False
