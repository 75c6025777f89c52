"""Types, shapes and places of many tensors, compared at each step, samples of their values, and where these lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import torch
from torch import Tensor, nn

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import ModelTensors, is_sharded, local_part

SAMPLE_VALUES: Final = 256
"""Values to compare of each tensor, spread over it: a tensor that is loaded differs in nearly all of them."""

SLICE_VALUES: Final = 64

BORROWED: Final = ("cuda", "xpu")
"""Devices whose addresses say where a slice lies: it is read without a hold on memory that a model may leave."""

REMEDY: Final = (
    "Build, load, freeze and shard the model first, make the optimizer, and call attach() last. To train other tensors "
    "begin a new run: run.init takes the weights of this one"
)

LOADED: Final = (
    "Load weights, and bring them within their constraints, before attach(). A script that goes back to older weights "
    "by itself leaves that out: the learner's next start takes the merged ones, also after a spike with [learner] "
    'on_spike = "rollback". The whole run goes back as a new one, with run.init = "FOLDER@VERSION"'
)

_FORM: Final = attrgetter("dtype", "shape")
_PLACE: Final = methodcaller("data_ptr")
_COUNT: Final = methodcaller("numel")
_VALUES: Final = methodcaller("values")


class TensorForms:
    """Types and shapes as they are when this is made. The tensors are kept."""

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


def check_not_replaced(tensors: ModelTensors) -> None:
    """Raise LearnerError: a tensor that is merged is another one in the model now."""
    present = tensors.present()
    for name, tensor in tensors.followed.items():
        new = present.get(name)
        if new is tensor:
            continue
        if not isinstance(tensor, nn.Parameter):
            raise LearnerError(
                f"buffer {name!r} is another tensor than at attach(), which follows that one: change it in place, "
                "for instance with copy_()"
            )
        if new is not None and is_sharded(new) and not is_sharded(tensor):
            raise LearnerError(f"parameter {name!r} was sharded after attach(), which follows the one before. {REMEDY}")
        if name not in present and (alias := next((key for key, known in present.items() if known is tensor), "")):
            raise LearnerError(
                f"parameter {name!r} is called {alias!r} since attach(): a parametrization, pruning or an adapter was "
                f"put on its layer or taken off, which computes something else with it in this region. {REMEDY}"
            )
        raise LearnerError(
            f"parameter {name!r} is {'another tensor than' if name in present else 'not in the model any more as'} at "
            "attach(): its layer was replaced, or weights were loaded with assign=True. This region would train it "
            f"alone. {REMEDY}"
        )


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Raise LearnerError: two tensors have values in the same memory, so a version of each would overwrite the other's.

    Views that take turns, such as columns of one matrix, are seen only where they begin at the same place.
    """
    ends: dict[torch.device, tuple[int, str]] = {}
    places = [(name, values) for name, tensor in tensors.items() if (values := local_part(tensor)).numel()]
    for name, values in sorted(places, key=lambda entry: _PLACE(entry[1])):
        end, twin = ends.get(values.device, (0, ""))
        if _PLACE(values) < end:
            raise LearnerError(
                f"{name!r} and {twin!r} are two parameters with the same memory, as `a.weight.data = b.weight.data` "
                "or nn.Parameter(b.weight[1:]) makes them: each merge of one would change the other. Tie them as one, "
                "`a.weight = b.weight`, or clone one, before the optimizer is made"
            )
        count = values.numel() if values.is_contiguous() else 1
        ends[values.device] = max((end, twin), (_PLACE(values) + count * values.element_size(), name))


def sample_of(tensor: Tensor) -> Tensor:
    """Return some values of the part on this rank, spread over it: about SAMPLE_VALUES, float32; a copy."""
    values = local_part(tensor)
    count = values.numel()
    step = max(1, count // SAMPLE_VALUES)
    stride = 1
    if not values.is_contiguous():
        values = values.reshape(-1)
        stride = values.stride(0)  # 0 of one value that was expanded
    # In one call, for an optimizer's every step takes one: a slice of a flat view would be three.
    place = (-(-count // step),), (step * stride,), values.storage_offset()
    return values.as_strided(*place).to(torch.float32, copy=True)


class SliceReader:
    """Reads SLICE_VALUES neighbouring values in the middle of each tensor, in one call a device while all stay there.

    The tensors are kept. Left out are those with gaps in their memory.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._sharded = {place for place, tensor in enumerate(self._tensors) if is_sharded(tensor)}
        self._places: list[tuple[Any, ...]] = []
        # By device and number of the tensor. Those of BORROWED keep no memory.
        self._slices: dict[torch.device, dict[int, Tensor]] = {}

    def read(self) -> dict[torch.device, Tensor]:
        """By device the slices, one after another; copies."""
        shards: Sequence[Any] = self._tensors
        if self._sharded:  # `to_local` takes longer than all the rest
            shards = [shard._local_tensor if place in self._sharded else shard for place, shard in enumerate(shards)]
        places: list[tuple[Any, ...]] = [*zip(map(_PLACE, shards), map(_COUNT, shards), strict=True)]
        if places != self._places:
            self._slices, self._places = {}, places
            for number, values in _slices(shards):
                self._slices.setdefault(values.device, {})[number] = values
        return {device: torch.cat([*slices.values()]) for device, slices in self._slices.items()}

    def number_at(self, device: torch.device, place: int) -> int:
        """Number of the tensor whose slice is at a place of what was read of a device."""
        slices = self._slices[device]
        return [*slices][bisect_right([*accumulate(map(_COUNT, slices.values()))], place)]


def _slices(shards: Iterable[Tensor]) -> Iterator[tuple[int, Tensor]]:
    for number, shard in enumerate(shard.detach() for shard in shards):
        count, extent = (
            shard.numel(),
            1 + sum((n - 1) * step for n, step in zip(shard.shape, shard.stride(), strict=True)),
        )
        if count and shard.data_ptr() and (shard.is_contiguous() or extent == count):
            start, size = max(0, count - SLICE_VALUES) // 2, min(count, SLICE_VALUES)
            storage: Any = shard.untyped_storage()
            offset = shard.storage_offset() + start
            if shard.device.type in BORROWED:
                width = shard.element_size()
                place, offset = shard.data_ptr() + start * width, 0
                storage = torch._C._construct_storage_from_data_pointer(place, shard.device, size * width)
            # Of the storage, and no view: its base would look like a copy of the parameter (`loop_state`).
            yield number, shard.new_empty(0).set_(storage, offset, (size,), (1,))


def is_constrained(before: Tensor, now: Tensor, *, by_shrinking: bool = True) -> Tensor:
    """Whether values were cut off at two bounds, as constraints of a loop do, and a load does not.

    by_shrinking: or each stayed or went towards zero, some not all the way, as with a mask or a limit of the norm.
    """
    if not now.numel():
        return torch.ones((), dtype=torch.bool, device=now.device)
    low, high = now.min(), now.max()
    is_shrunk = ((now * before >= 0) & (now.abs() <= before.abs())).all() & now.any()
    is_clamped = (before.clamp(low, high) == now).all()
    return (is_clamped & (low < high)) | is_shrunk if by_shrinking else is_clamped & ((low < high) | is_shrunk)


def stack(scalars: Iterable[Tensor]) -> Tensor:
    """Return scalars, of one or more devices, as a tensor of float32 on the first one's."""
    values = list(scalars)
    return torch.stack([value.to(values[0].device, torch.float32) for value in values])
