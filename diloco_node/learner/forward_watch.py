"""Hooks on a model's `forward` that see what it is given to train on, and the loss that it returns.

A call counts while the module is in training mode and gradients are on, so evaluation and generation do not; and once a
backward pass from its output has come to its end: one that lacked memory has trained nothing, and a batch may be left
out. Where none is seen, as in a loss that the output has no part in, all calls count. Nothing is read from a device: a
count is the shape of a tensor, and the loss stays the tensor that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn

from diloco_node.learner.private_hooks import PrivateHook, private_hooks

TOKEN_NAMES: Final = ("input_ids", "tokens", "inputs_embeds")
"""How a batch calls what it is counted by; the first of them that is there."""

_EMBEDDED_DIMS: Final = 3
_DEPTH_MAX: Final = 4

OUTPUTS_MAX: Final = 16
"""Tensors of an output from which a backward pass is looked for: loss and logits come first, caches last."""


def count_tokens(batch: Any) -> int:
    """Tokens of a batch by its shapes, padding included; of one that holds no token ids, its samples.

    A tensor of integers counts by its elements, one of embeddings (batch, sequence, width) by the first two
    dimensions, any other by its first. Among several tensors the one that is named in `TOKEN_NAMES` counts,
    else the first. 0: there is none.
    """
    hit = _tensor_in(batch, _DEPTH_MAX)
    if hit is None:
        return 0
    name, tensor = hit
    if not tensor.dim():
        return 1
    if not tensor.is_floating_point():
        return tensor.numel()
    is_embedded = name == "inputs_embeds" and tensor.dim() == _EMBEDDED_DIMS
    return tensor.shape[0] * tensor.shape[1] if is_embedded else tensor.shape[0]


def counted_tensor(batch: Any) -> Tensor | None:
    """The tensor by which `count_tokens` counts; None if there is none."""
    hit = _tensor_in(batch, _DEPTH_MAX)
    return None if hit is None else hit[1]


def _tensor_in(batch: Any, depth: int) -> tuple[str, Tensor] | None:
    if isinstance(batch, Tensor):
        return "", batch
    if depth == 0:
        return None
    if isinstance(batch, Mapping):
        for name in TOKEN_NAMES:
            if isinstance(batch.get(name), Tensor):
                return name, batch[name]
        return _first(batch.values(), depth)
    return _first(batch, depth) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else None


def _first(items: Iterable[Any], depth: int) -> tuple[str, Tensor] | None:
    return next((hit for item in items if (hit := _tensor_in(item, depth - 1)) is not None), None)


def _tensors_in(output: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif depth:
        fields = vars(output) if is_dataclass(output) and hasattr(output, "__dict__") else output
        items = fields.values() if isinstance(fields, Mapping) else fields if isinstance(fields, list | tuple) else ()
        for item in items:
            yield from _tensors_in(item, depth - 1)


class ForwardWatch:
    """Hooks on the module that the loop calls, or through which each call passes, for its inputs and its loss."""

    def __init__(self, model: nn.Module) -> None:
        # Of forward passes that came to their end, of one that may raise, and of those with a whole backward pass.
        self._tokens = self._begun = self._trained = 0
        self._loss: Tensor | None = None
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            private_hooks(model, kind)
        note_shapes = PrivateHook(self._note_shapes)
        self._handles = [
            model.register_forward_pre_hook(note_shapes, with_kwargs=True),
            model.register_forward_hook(PrivateHook(self._returned)),
        ]
        # torch only looks whether the number is there. In a file it would be that of the reader's first hook.
        private_hooks(model, "_forward_pre_hooks_with_kwargs")[self._handles[0].id] = note_shapes

    def take(self) -> tuple[int, Tensor | None]:
        """Tokens since the last call of this, and the loss that was returned last; None where none was."""
        pair = self._trained or self._tokens, self._loss
        self._tokens, self._trained, self._loss = 0, 0, None
        return pair

    def _note_shapes(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            named = {name: kwargs[name] for name in TOKEN_NAMES if name in kwargs}  # a mask may come by name, too
            self._begun = count_tokens(named) or count_tokens(args) or count_tokens(kwargs)

    def _returned(self, module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        tokens, self._begun = self._begun, 0
        self._tokens += tokens
        if not torch.compiler.is_compiling():
            self._follow(output, [tokens])
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            self._loss = loss.detach()

    def _follow(self, output: Any, tokens: list[int]) -> None:
        """Count tokens, one number, once: when a backward pass from an output has ended."""

        def count() -> None:
            self._trained += sum(tokens)
            tokens.clear()

        def begin(_: Tensor) -> None:
            torch.autograd.Variable._execution_engine.queue_callback(count)

        for tensor in islice(_tensors_in(output, _DEPTH_MAX), OUTPUTS_MAX):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
