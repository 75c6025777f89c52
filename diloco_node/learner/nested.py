"""Nested Python values as JSON and tensors, and back: what a loop wants kept is seldom JSON alone. Never pickle.

Plain JSON stays itself. Everything else becomes an object with the key "$", which names its kind. Tensors and arrays
are put beside it by name. Dictionaries come back as `dict` with their keys, whatever mapping they were.
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

DEPTH_MAX: Final = 64
_KIND: Final = "$"
_VALUE: Final = "v"


def flatten(label: str, value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON.

    Args:
        label: its name, for messages, and the first part of the names of its tensors.
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
    if isinstance(value, Tensor):
        return _tag("tensor", _put(label, value, tensors))
    try:
        return _tag("array", _put(label, torch.from_numpy(value.copy()), tensors))
    except TypeError as error:
        raise LearnerError(f"{label} can't be kept in a checkpoint: {error}") from error


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


def unflatten(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `flatten` was given.

    Raises KeyError, ValueError, TypeError: the document is none of `flatten`, or a tensor is missing.
    """
    if isinstance(document, list):
        return [unflatten(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    if _KIND not in document:
        return {key: unflatten(item, tensors) for key, item in document.items()}
    kind, value = document[_KIND], document[_VALUE]
    if kind in ("tensor", "array"):
        return tensors[value] if kind == "tensor" else tensors[value].numpy()
    if kind == "dict":
        return {unflatten(key, tensors): unflatten(item, tensors) for key, item in value}
    return _PLAIN[kind](unflatten(value, tensors))


_PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    "scalar": lambda fields: np.dtype(fields[0]).type(fields[1]),
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tuple": tuple,
    "set": set,
}
