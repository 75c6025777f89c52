"""A model's frozen parameters and buffers in short: regions that train on other ones are told before the first step.

Each value is read once, where it lies, by the thread that attaches and before it trains: 140 million a second on a slow
core (D-142). A tensor that ranks share is projected part by part: the result is that of the whole, however it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from hashlib import shake_128
from math import nan, prod
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.names import buffers_of, names_of
from diloco_node.learner.layouts.tensors import ModelTensors, boxes_of, local_part
from diloco_node.learner.process_signals import place
from diloco_node.learner.ranks import Ranks
from diloco_node.wire.frozen_listing import FrozenTensor, pack_frozen

RUNNING: Final = frozenset({"_NormBase", "ObserverBase", "FakeQuantizeBase", "_SpectralNorm"})
"""Modules whose buffers follow the data or a draw in each region, and have no part in what is merged; by name, for some
are seldom imported."""

CODES: Final = frozenset({torch.uint8, torch.int8, torch.int32})
"""Types of a quantiser's matrices. Other whole numbers are counters, positions and indices."""

MATRIX: Final = 2
CHUNK_VALUES: Final = 1 << 22
"""Values that are taken to float32 at once."""


def frozen_listing(tensors: ModelTensors, ranks: Ranks) -> bytes:
    """Return what `wire.frozen_listing` packs, of all ranks. All of them call it."""
    with torch.no_grad():
        own_rows = [[name, *_row(tensor)] for name, tensor in _constants(tensors)]
    rows: dict[str, tuple[str, list[int], dict[str, list[float]]]] = {}
    for text in ranks.all_bytes(json.dumps(own_rows).encode()):
        for name, kind, shape, box, figures in json.loads(text):
            # A part that several ranks hold counts once.
            rows.setdefault(name, (kind, shape, {}))[2].setdefault(str(box), [prod(box[1]), *figures])
    return pack_frozen(place()[0], [_tensor_of(name, *row) for name, row in rows.items()])


def _tensor_of(name: str, kind: str, shape: list[int], boxes: Mapping[str, list[float]]) -> FrozenTensor:
    volume, projection, square = (sum(column) for column in zip(*boxes.values(), strict=True))
    is_whole = volume == prod(shape)
    return FrozenTensor(name, kind, tuple(shape), projection if is_whole else nan, square**0.5 if is_whole else nan)


def _constants(tensors: ModelTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield what is not merged and ought to be equal in all regions, with its name."""
    model, trainees = tensors.model, set(tensors.followed.values())
    for parameter, names in names_of(model).items():
        if parameter not in trainees and not _is_empty(parameter):
            yield names[0], parameter
    statistics = {buffer for module in model.modules() for buffer in running_buffers(module)}
    for name, buffer in buffers_of(model).items():
        is_known = buffer.is_floating_point() or (buffer.dtype in CODES and buffer.dim() >= MATRIX)
        if is_known and buffer not in trainees | statistics and not _is_empty(buffer):
            yield name, buffer


def _is_empty(tensor: Tensor) -> bool:
    """Whether there are no values (yet)."""
    return tensor.is_meta or nn.parameter.is_lazy(tensor) or tensor.is_nested or not tensor.numel()


def running_buffers(module: nn.Module) -> list[Tensor]:
    """Return what a module writes to in its forward passes, if it is of a known kind: `attach` names it."""
    if RUNNING & {kind.__name__ for kind in type(module).__mro__}:
        return [buffer for buffer in module._buffers.values() if buffer is not None]
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__name__ == "SpectralNorm"]
    # A script's own hook of that name may have one of them.
    buffers = [module._buffers.get(f"{getattr(hook, 'name', '')}_{side}") for hook in hooks for side in "uv"]
    return [buffer for buffer in buffers if buffer is not None]


def _row(tensor: Tensor) -> tuple[str, list[int], list[list[int]], list[float]]:
    """Return type, shape, and of the part on this rank its box, projection and square of its norm."""
    kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    full_box = [[0] * len(shape), shape]
    values = local_part(tensor.data)
    if type(values) is not Tensor or values.layout != torch.strided:
        return "packed", shape, full_box, [nan, nan]
    try:
        boxes = boxes_of("", tensor)
    except LearnerError:
        return kind, shape, full_box, [nan, nan]
    if not boxes:
        return kind, shape, [full_box[0], [0] * len(shape)], [0.0, 0.0]
    try:
        figures = _figures(values, boxes[0].offsets)
    except RuntimeError:  # a type with which torch can't compute: codes of four bits, say
        figures = [nan, nan]
    return kind, shape, [list(boxes[0].offsets), list(boxes[0].sizes)], figures


def _figures(values: Tensor, offsets: tuple[int, ...]) -> list[float]:
    """Return projection and square of the norm of a part that begins at these offsets."""
    if not values.dim():
        values, offsets = values.view(1), (0,)
    row_axis, *axes = (_signs(*axis) for axis in zip(range(values.dim()), offsets, values.shape, strict=True))
    row_signs = reduce(torch.kron, axes, torch.ones(1, device="cpu")).to(values.device)
    rows = max(1, CHUNK_VALUES // row_signs.numel())
    sums = []
    first_signs = row_axis.to(values.device)
    for start in range(0, len(values), rows):
        signs = first_signs[start : start + rows]
        matrix = values[start : start + rows].reshape(len(signs), -1).to(torch.float32)
        # Row by row, and by no product of matrices: both may be off by more than two regions may differ.
        square = torch.linalg.vector_norm(matrix, dim=1).square().sum()
        sums.append(torch.stack(((matrix.mul(row_signs).sum(1) * signs).sum(), square)))
    projection, square = torch.stack(sums).cpu().double().sum(0).tolist()
    return [projection, square]


def _signs(axis: int, start: int, size: int) -> Tensor:
    """Return the signs [start, start + size) of an axis, in float32."""
    draw = np.frombuffer(shake_128(b"%d" % axis).digest((start + size + 7) // 8), np.uint8)
    bits = np.unpackbits(draw)[start : start + size]
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)
