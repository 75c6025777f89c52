"""A model's trainable parameters as the pieces of fragments: which there are, and how values get in and out.

Trainable parameters only, tied ones once (under the first name), buffers not at all. Embeddings and the head are
averaged, everything else follows the run's merge rule. Values leave and enter as float32 on the CPU, whatever the
parameter's type and device. Where an optimizer keeps its own float32 masters, those are read and written, and the
parameter follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from diloco_node.core.merge.fragments import Fragment, Piece, TensorSpec
from diloco_node.core.types import MergeRule
from diloco_node.errors import LearnerError

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

EMBEDDING_NAMES: Final = frozenset(
    {
        "embed_tokens",
        "wte",
        "wpe",
        "tok_embeddings",
        "word_embeddings",
        "position_embeddings",
        "embed_in",
        "embed_positions",
    }
)
"""Modules that hold embeddings under other types than `nn.Embedding` (vocabulary-parallel, hand-written)."""

HEAD_NAMES: Final = frozenset({"lm_head", "output", "head", "embed_out", "output_projection"})
"""What output heads are called; only at the top of a model, for "output" is also the end of an attention block."""

SHARDED_KINDS: Final = frozenset({"DTensor", "FlatParameter", "ShardedTensor"})
"""By name: importing the classes would import all of torch.distributed."""

SAMPLE_VALUES: Final = 1024
"""Of each piece; enough to tell a reverted parameter from a trained one."""

_HEAD_DEPTH_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class _Tracked:
    parameter: nn.Parameter
    master: Tensor | None

    @property
    def source(self) -> Tensor:
        """What holds the values: the master if there is one."""
        return (self.parameter if self.master is None else self.master).detach()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module below DistributedDataParallel and torch.compile, so that names don't depend on them."""
    while True:
        inner = (
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._modules.get("_orig_mod")
        )
        if not isinstance(inner, nn.Module):
            return model
        model = inner


class ModelTensors:
    """The trainable tensors of a model.

    Args:
        model: may be wrapped by DistributedDataParallel or torch.compile.
        masters: name of a parameter -> the optimizer's float32 master of it, same shape.
        merge: name of a parameter -> rule, where the guess (see the module) is wrong.

    Attributes:
        specs: one per tensor; `RDA` stands for the run's own rule.

    Raises:
        LearnerError: a parameter is sharded (DTensor, FSDP), has no memory, or is of a type that can't be merged; a
            master or rule for a parameter that is not there.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        masters: Mapping[str, Tensor] | None = None,
        merge: Mapping[str, MergeRule] | None = None,
    ) -> None:
        self.model = unwrap(model)
        self._names_of = _names_of(self.model)
        masters, merge = masters or {}, merge or {}
        self._tracked: dict[str, _Tracked] = {}
        specs = []
        embeddings = _embedding_parameters(self.model)
        for parameter, names in self._names_of.items():
            if not parameter.requires_grad or not parameter.numel():
                continue
            _check(names[0], parameter)
            master = next((masters[name] for name in names if name in masters), None)
            _check_master(names[0], parameter, master)
            self._tracked[names[0]] = _Tracked(parameter, master)
            rule = next((merge[name] for name in names if name in merge), None)
            if rule is None:
                is_averaged = parameter in embeddings or len(names) > 1 or any(map(_is_named_averaged, names))
                rule = MergeRule.AVG if is_averaged else MergeRule.RDA
            specs.append(TensorSpec(names[0], tuple(parameter.shape), rule))
        self.specs = tuple(specs)
        known = {name for names in self._names_of.values() for name in names}
        for kind, given in (("masters", masters), ("merge", merge)):
            if unknown := sorted(set(given) - known):
                raise LearnerError(
                    f"{kind}: the model has no parameter {unknown[0]!r}; known are {sorted(known)[:3]}, ..."
                )

    def read(self, fragment: Fragment, out: Tensor) -> None:
        """Copy the fragment's values.

        Args:
            out: shape (fragment.size,), float32, CPU; overwritten.
        """
        with torch.no_grad():
            for piece in fragment.pieces:
                target = out[piece.offset : piece.offset + piece.size]
                rows = self._rows(piece)
                target.view(rows.shape).copy_(rows)

    def write(self, fragment: Fragment, values: Tensor) -> None:
        """Overwrite the fragment's values.

        Args:
            values: shape (fragment.size,), float32, CPU. Not changed.
        """
        with torch.no_grad():
            for piece in fragment.pieces:
                rows = self._rows(piece)
                rows.copy_(values[piece.offset : piece.offset + piece.size].view(rows.shape))
                self._follow(piece)

    def shift(
        self, fragment: Fragment, new: Tensor, anchor: Tensor | None, carry_factor: float, scratch: Tensor
    ) -> None:
        """Carry-over in place: `theta = new + lam * (theta - anchor)`, or without an anchor `theta = new`.

        Each operation is rounded to float32 by itself, as in `core.merge.carry.carry_over`.

        Args:
            new, anchor: shape (fragment.size,), float32, CPU. Not changed.
            carry_factor: used with an anchor; 1 keeps all.
            scratch: shape (at least the largest piece,), float32, CPU; overwritten where parameters are no CPU float32.
        """
        if anchor is None:
            self.write(fragment, new)
            return
        with torch.no_grad():
            for piece in fragment.pieces:
                span = slice(piece.offset, piece.offset + piece.size)
                rows = self._rows(piece)
                is_direct = rows.dtype == torch.float32 and rows.device.type == "cpu"
                theta = rows if is_direct else scratch[: piece.size].view(rows.shape).copy_(rows)
                _shift(theta, new[span].view(rows.shape), anchor[span].view(rows.shape), carry_factor)
                if not is_direct:
                    rows.copy_(theta)
                self._follow(piece)

    def held(self, fragment: Fragment, new: Tensor, out: Tensor) -> None:
        """What a learner that takes exactly `new` really holds: `new` rounded to each parameter's type, as float32.

        Args:
            new: shape (fragment.size,), float32, CPU. Not changed.
            out: the same shape; overwritten.
        """
        out.copy_(new)
        for piece in fragment.pieces:
            dtype = self._tracked[piece.name].source.dtype
            if dtype != torch.float32:
                span = out[piece.offset : piece.offset + piece.size]
                span.copy_(span.to(dtype))

    def sample(self, fragment: Fragment) -> Tensor:
        """The first values of each piece as the *parameters* hold them, masters or not: shape (k,), float32, CPU."""
        return self._sample(fragment, lambda parameter: parameter.detach())

    def sample_gradients(self, fragment: Fragment) -> Tensor:
        """Of the same values the gradients, zero where there is none (any more)."""
        return self._sample(fragment, lambda one: torch.zeros_like(one) if one.grad is None else one.grad.detach())

    def _sample(self, fragment: Fragment, values_of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        parts = []
        for piece in fragment.pieces:
            values = values_of(self._tracked[piece.name].parameter)
            rows = values[piece.row_start : piece.row_stop] if values.dim() else values
            parts.append(rows.reshape(-1)[:SAMPLE_VALUES].float().cpu())
        return torch.cat(parts).clone()

    def full_state(self, fragments: tuple[Fragment, ...], vectors: list[Tensor]) -> dict[str, Tensor]:
        """`state_dict()` of the model with these values in place of the trainable parameters; copies, parameter types.

        Args:
            fragments, vectors: all fragments and their values, float32, CPU.
        """
        values = {name: host_values(*tracked.parameter.shape) for name, tracked in self._tracked.items()}
        for fragment, vector in zip(fragments, vectors, strict=True):
            for piece in fragment.pieces:
                span = vector[piece.offset : piece.offset + piece.size]
                values[piece.name].view(-1)[piece.value_start : piece.value_stop] = span
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for parameter, names in self._names_of.items():
            if names[0] in values:
                held = values[names[0]].to(parameter.dtype)
                state.update({name: held.to(state[name].device) for name in names if name in state})
        return state

    def _rows(self, piece: Piece) -> Tensor:
        """A view of the piece's rows; taken anew each time, for `model.to()` may have moved the values."""
        source = self._tracked[piece.name].source
        return source[piece.row_start : piece.row_stop] if source.dim() else source

    def _follow(self, piece: Piece) -> None:
        tracked = self._tracked[piece.name]
        if tracked.master is not None:
            span = slice(piece.row_start, piece.row_stop) if tracked.master.dim() else ...
            tracked.parameter.detach()[span].copy_(tracked.master.detach()[span])


def host_values(*shape: int) -> Tensor:
    """Room for values as they travel: float32 on the CPU, whatever the script has set as torch's defaults."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _shift(theta: Tensor, new: Tensor, anchor: Tensor, carry_factor: float) -> None:
    theta.sub_(anchor)
    if carry_factor != 1.0:
        theta.mul_(carry_factor)
    theta.add_(new)


def _names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter with all its names; several for a tied one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _embedding_parameters(model: nn.Module) -> set[Tensor]:
    embeddings = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return {module.weight for module in embeddings}


def _is_named_averaged(name: str) -> bool:
    modules = name.split(".")[:-1]
    if not modules:
        return False
    return modules[-1] in EMBEDDING_NAMES or (modules[-1] in HEAD_NAMES and len(modules) <= _HEAD_DEPTH_MAX)


def _check(name: str, parameter: nn.Parameter) -> None:
    values = parameter.data
    kinds = {kind.__name__ for kind in (*type(parameter).__mro__, *type(values).__mro__)}
    if kinds & SHARDED_KINDS:
        raise LearnerError(
            f"parameter {name!r} is sharded over ranks ({type(values).__name__}): FSDP and tensor parallelism are not "
            "supported yet. Keep a whole copy on each rank (DistributedDataParallel) and attach that model"
        )
    if parameter.is_meta:
        raise LearnerError(f"parameter {name!r} is on the meta device and has no values: materialize the model first")
    if parameter.dtype not in DTYPES:
        raise LearnerError(
            f"parameter {name!r} has type {parameter.dtype}: only float32, bfloat16 and float16 can be merged; "
            "freeze it (requires_grad=False) or convert it"
        )
    if parameter.layout != torch.strided:
        raise LearnerError(f"parameter {name!r} has layout {parameter.layout}: only dense tensors can be merged")


def _check_master(name: str, parameter: nn.Parameter, master: Tensor | None) -> None:
    if master is not None and (master.dtype != torch.float32 or master.shape != parameter.shape):
        raise LearnerError(
            f"masters[{name!r}] is {master.dtype} of shape {tuple(master.shape)}, "
            f"expected float32 of shape {tuple(parameter.shape)}"
        )
