"""Types and shapes of many tensors, compared at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final

from torch import Tensor

_FORM: Final = attrgetter("dtype", "shape")


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


def _guard_of(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Return a function that is True only if tensors have the forms that these have now.

    It is the guard of torch's compiled code, one call for all: a third of the time. Where a torch has it no more, or in
    another way, the function is always False.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
        strides = [[None] * tensor.dim() for tensor in tensors]
        guards: Any = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check if check(*tensors) else _is_never_same
    except Exception:  # noqa: BLE001 - it is no public part of torch
        return _is_never_same


def _is_never_same(*_: Tensor) -> bool:
    return False
