"""Nested Python values as JSON and tensors, and back: what a loop wants kept is seldom JSON alone. Never pickle.

Plain JSON stays itself. Everything else becomes an object with the key "$", which names its kind. Tensors and arrays
are put beside it by name. Dictionaries come back as `dict` with their keys, whatever mapping they were. The part on
this rank stands for a DTensor; it comes back where the same part lies.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.tensors import boxes_of, is_sharded, local_part

DEPTH_MAX: Final = 64
WIDE: Final = (torch.complex128, torch.complex32)
"""Types that safetensors has no name for; they are kept as pairs of real numbers."""

_COMPLEX: Final = "complex "
_SHARD: Final = "shard"
_ARRAYS: Final = ("tensor", "array", f"{_COMPLEX}tensor", f"{_COMPLEX}array", _SHARD)
_KIND: Final = "$"
_VALUE: Final = "v"


def flatten(label: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON. `label` is the first part of the names of its tensors.

    tensors: takes its tensors, which are no copies, and its arrays, which are.

    Raises LearnerError: a part of it is of a type that can't be kept.
    """
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return _flatten_array(label, value, tensors)
    if isinstance(value, np.generic):
        return _tag("scalar", [value.dtype.str, flatten(label, value.item(), tensors)])
    if isinstance(value, float):
        return value if math.isfinite(value) else _tag("float", repr(value))
    if isinstance(value, bytes | bytearray):
        return _tag("bytes", base64.b64encode(value).decode())
    return _flatten_container(label, value, tensors)


def _tag(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: kind, _VALUE: value}


def _flatten_array(label: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    kind = "tensor"
    if not isinstance(value, Tensor):
        try:
            kind, value = "array", torch.from_numpy(value.copy())
        except TypeError as error:
            raise LearnerError(f"{label} can't be kept in a checkpoint: {error}") from error
    if is_sharded(value):
        return _tag(_SHARD, [_put(label, value, tensors), *_place(label, value)])
    check_plain(label, value)
    if value.dtype in WIDE:
        return _tag(_COMPLEX + kind, _put(label, torch.view_as_real(value.detach().resolve_conj()), tensors))
    return _tag(kind, _put(label, value, tensors))


def check_plain(label: str, tensor: Tensor) -> None:
    """Raise LearnerError: it is no dense tensor with values of its own, as a checkpoint keeps."""
    is_plain = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
    if tensor.is_meta or not is_plain:
        kind = "a tensor without values (meta)" if tensor.is_meta else f"a {tensor.layout} tensor of {tensor.dtype}"
        raise LearnerError(
            f"{label} can't be kept in a checkpoint: it is {kind}, and only dense ones can, not quantised or nested: "
            "have state_dict() return a dense one, or leave it out"
        )


def _place(name: str, tensor: Tensor) -> list[Any]:
    """Where the part of a DTensor on this rank lies, as JSON: its whole shape, and offsets and sizes of its boxes."""
    boxes = [[list(box.offsets), list(box.sizes)] for box in boxes_of(name, tensor)]
    return [list(tensor.shape), boxes]


def cut_like(like: Any, local: Tensor) -> Tensor:
    """Return a DTensor that is cut as another, of the values on this rank."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(local_part(like).device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _array(kind: str, value: Any, tensors: Mapping[str, Tensor], own: Callable[[], Mapping[str, Tensor]]) -> Any:
    if kind == _SHARD:
        return _cut(value, tensors, own)
    tensor = tensors[value]
    # Bytes are states of generators, on the CPU: no loader is asked for them, which may start its workers for that.
    if kind.endswith("tensor") and tensor.dtype != torch.uint8 and (like := own().get(value)) is not None:
        tensor = tensor.to(like.device) if like.shape == tensor.shape else tensor
    tensor = torch.view_as_complex(tensor) if kind.startswith(_COMPLEX) else tensor
    return tensor if kind.endswith("tensor") else tensor.numpy()


def _cut(fields: list[Any], tensors: Mapping[str, Tensor], own: Callable[[], Mapping[str, Tensor]]) -> Tensor:
    name, *place = fields
    like = own().get(name)
    here = None if like is None or not is_sharded(like) else _place(name, like)
    if like is None or here != place:
        now = "it is not cut over ranks" if here is None else f"this rank has {here[1]} of {here[0]}"
        raise ValueError(
            f"of {name} the part {place[1]} (offsets, sizes) of {place[0]} was kept for this rank, now {now}: start "
            "with the ranks and the sharding as before"
        )
    return cut_like(like, tensors[name])


def _put(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    """Under this name, or a longer one: a key may hold a dot itself."""
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _flatten_container(label: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    if label.count(".") > DEPTH_MAX:
        raise LearnerError(f"{label[:200]}... can't be kept in a checkpoint: it is nested more than {DEPTH_MAX} deep")
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: flatten(f"{label}.{key}", item, tensors) for key, item in value.items()}
        pairs = [
            [flatten(f"{label}.key{at}", key, tensors), flatten(f"{label}.{at}", item, tensors)]
            for at, (key, item) in enumerate(value.items())
        ]
        return _tag("dict", pairs)
    if isinstance(value, list | tuple | set | frozenset):
        items = [flatten(f"{label}.{at}", item, tensors) for at, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return _tag("tuple" if isinstance(value, tuple) else "set", items)
    raise LearnerError(
        f"{label} can't be kept in a checkpoint: it is a {type(value).__name__}; numbers, texts, bytes, tensors, "
        "arrays, and lists, tuples, sets and dictionaries of them can"
    )


def unflatten(document: Any, tensors: Mapping[str, Tensor], own: Callable[[], Mapping[str, Tensor]] = dict) -> Any:
    """Return the value that `flatten` was given.

    own: returns the tensors that `flatten` finds here now, under the same label. DTensors are cut like those, other
        tensors put on the device of those with their shape.

    Raises KeyError, ValueError, TypeError: the document is none of `flatten`, a tensor is missing, or of a DTensor
    another part lies here.
    """
    if isinstance(document, list):
        return [unflatten(item, tensors, own) for item in document]
    if not isinstance(document, dict):
        return document
    if _KIND not in document:
        return {key: unflatten(item, tensors, own) for key, item in document.items()}
    kind, value = document[_KIND], document[_VALUE]
    if kind in _ARRAYS:
        return _array(kind, value, tensors, own)
    if kind == "dict":
        return {unflatten(key, tensors, own): unflatten(item, tensors, own) for key, item in value}
    return _PLAIN[kind](unflatten(value, tensors, own))


_PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    "scalar": lambda fields: np.dtype(fields[0]).type(fields[1]),
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tuple": tuple,
    "set": set,
}
