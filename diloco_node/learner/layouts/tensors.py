"""A model's trainable parameters as one rank holds them: which there are, and how values get in and out.

Trainable parameters, tied ones once (under the first name), and those buffers that are asked for. Embeddings, the head
and buffers are averaged, everything else follows the run's merge rule. Values leave and enter as float32 on the CPU,
whatever the parameter's type and device. Where an optimizer keeps its own float32 masters, those are read and written,
and the parameter follows.

A DTensor (FSDP2, tensor parallelism) is the part of it that lies on this rank: nothing here communicates, but for
`host_state`. Slicing a DTensor itself would gather all of it, once for each slice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from diloco_node.core.merge.fragments import Manifest, TensorSpec
from diloco_node.core.types import MergeRule
from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.names import buffers_of, by_plain_name, names_of, plain_name, replicas_in, unwrap
from diloco_node.learner.layouts.shard_map import Box, LocalFragment, Slab, whole_box
from diloco_node.learner.layouts.slab_values import carry, cut, first_values, host_copy, joined

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
"""Names of output heads; only at the top of a model, for "output" is also the end of an attention block."""

DTENSOR: Final = "DTensor"
PLAIN: Final = (Tensor, nn.Parameter)
REFUSED_KINDS: Final = frozenset({"FlatParameter", "ShardedTensor", "FullyShardedDataParallel"})
"""By name: importing the classes would import all of torch.distributed."""

MARK_ROWS: Final = 32
"""Rows of a matrix, and as many columns, by which it is told from others: a part of a copy is a copy."""

MATRIX: Final = 2

_HEAD_DEPTH_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class _Tracked:
    parameter: Tensor
    master: Tensor | None

    @property
    def whole(self) -> Tensor:
        """Where the values are: the master if there is one."""
        return self.parameter if self.master is None else self.master

    @property
    def source(self) -> Tensor:
        """The part of them on this rank."""
        return local_part(self.whole)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return type(tensor) not in PLAIN and any(kind.__name__ == DTENSOR for kind in type(tensor).__mro__)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank: detached, the same memory."""
    plain = tensor.detach()
    if not is_sharded(plain):
        return plain
    local: Tensor = plain.to_local()  # type: ignore[attr-defined]
    return local


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what a view of all of a tensor has in common with it, and no other tensor has: here, of one in parts."""
    try:
        if (values := local_part(tensor)).numel():
            return values.device, values.data_ptr(), values.dtype, values.shape, values.stride()
    except RuntimeError:  # a sparse or lazy one has no such memory
        pass
    return (id(tensor),)


class ModelTensors:
    """The trainable tensors of a model.

    Args:
        model, masters, merge, buffers, untied: see `attach`.
        optimizer_tensors: what the optimizers hold: no other parameter is merged. None: all may be trained.

    Attributes:
        specs: one per tensor, with its global shape; `RDA` stands for the run's own rule.
        boxes: by name, which part of it lies on this rank.
        marks: of embeddings and heads, by name: what tells a copy of the same values on another rank.
        idle: trainable parameters that no optimizer holds, by name: they are not merged. strangers: what the optimizers
            hold besides the model.
        unknown: what is wrong with patterns, rules and masters that nothing here fits. Another rank may have it.

    Raises LearnerError: a parameter is sharded in a way that can't be followed, has no memory, or is of a type that
    can't be merged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        masters: Mapping[str, Tensor] | None = None,
        merge: Mapping[str, MergeRule] | None = None,
        buffers: Sequence[str] = (),
        untied: Sequence[str] = (),
        optimizer_tensors: Sequence[Tensor] | None = None,
    ) -> None:
        self.model = unwrap(model)
        # After an evaluation FSDP2 leaves its root unsharded: it names other parameters then, which it throws away, and
        # what is written to the shards is not seen.
        self._resharded = [module for module in self.model.modules() if hasattr(module, "reshard")]
        self.reshard()
        _check_kind("the model", *self.model.modules())  # FSDP1's parameters may look like plain ones
        self._names_of = names_of(self.model)
        masters, merge = by_plain_name(masters or {}, self.model), by_plain_name(merge or {}, self.model)
        untied = list(by_plain_name(dict.fromkeys(untied), self.model))
        self._tracked: dict[str, _Tracked] = {}
        self.boxes: dict[str, list[Box]] = {}
        self.marks: dict[str, str] = {}
        specs = []
        modules = self.model.modules()
        kinds = nn.Embedding, nn.EmbeddingBag  # a script's own may have none, or compute it
        embeddings = {module._parameters.get("weight") for module in modules if isinstance(module, kinds)}
        # A module at two places is not tied: one may be its compiled form, which another region does without.
        uses = Counter(id(tensor) for module in self.model.modules() for tensor in module._parameters.values())
        trainable, self.unknown = _buffers(self.model, buffers)
        holdings, self.strangers = self._holdings(optimizer_tensors, masters)
        self.idle: dict[str, Tensor] = {}
        self._names_of |= {buffer: [name] for name, buffer in trainable.items()}
        for parameter, names in self._names_of.items():
            if torch.nn.parameter.is_lazy(parameter):
                raise LearnerError(f"{names[0]!r} is lazy and has no values yet: run a batch through the model first")
            if not (parameter.requires_grad or names[0] in trainable) or not parameter.numel():
                continue
            master = next((masters[name] for name in names if name in masters), None)
            if holdings is not None and names[0] not in trainable and not holdings & {parameter, master}:
                self.idle[names[0]] = parameter
                continue
            _check(names[0], parameter)
            _check_master(names[0], parameter, master)
            self._tracked[names[0]] = _Tracked(parameter, master)
            self.boxes[names[0]] = boxes_of(names[0], parameter)
            is_at_an_end = parameter in embeddings or any(map(_is_named_averaged, names))
            if is_at_an_end and parameter.dim() == MATRIX and not set(names) & set(untied):
                self.marks[names[0]] = _mark(local_part(parameter))
            rule = next((_rule(merge[name]) for name in names if name in merge), None)
            if rule is None:
                is_averaged = is_at_an_end or names[0] in trainable or uses[id(parameter)] > 1
                rule = MergeRule.AVG if is_averaged else MergeRule.RDA
            specs.append(TensorSpec(names[0], tuple(parameter.shape), rule))
        self.specs = tuple(specs)
        all_names = {name for names in self._names_of.values() for name in names}
        for kind, mapping in (("masters", masters), ("merge", merge), ("untied", untied)):
            for name in sorted(set(mapping) - all_names):
                text = f"{kind}: the model has no parameter {name!r}; known are {sorted(all_names)[:3]}, ..."
                self.unknown[f"{kind} {name}"] = text

    def _holdings(
        self, optimizer_tensors: Sequence[Tensor] | None, masters: Mapping[str, Tensor]
    ) -> tuple[set[Tensor] | None, list[Tensor]]:
        """Return what the optimizers hold, or None where that says nothing of the model; and what is not its."""
        holdings, own = set(optimizer_tensors or ()), {*self._names_of, *masters.values()}
        if holdings & own:
            return holdings, [tensor for tensor in optimizer_tensors or () if tensor not in own]
        if optimizer_tensors is not None and any(map(is_sharded, self._names_of)):
            raise LearnerError(
                "the optimizer holds none of the model's parameters: make it from model.parameters() after "
                "fully_shard or parallelize_module, or pass its masters"
            )
        return None, [*(optimizer_tensors or ())]

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold parts of tensors."""
        return any(map(is_sharded, self._names_of))

    @property
    def devices(self) -> set[torch.device]:
        """Where the values lie now."""
        return {tensor.whole.device for tensor in self._tracked.values()}

    @property
    def names(self) -> dict[Tensor, str]:
        """The tensors that an optimizer may hold, parameters and masters, with their names in the manifest."""
        entries = self._tracked.items()
        pairs = [(tensor, name) for name, entry in entries for tensor in (entry.parameter, entry.master)]
        return {tensor: name for tensor, name in pairs if tensor is not None}

    def check_known(self, all_bytes: Callable[[bytes], list[bytes]]) -> None:
        """Raise LearnerError: a pattern, rule or master fits nothing on any rank. all_bytes: `Ranks.all_bytes`."""
        absent = [set(json.loads(text)) for text in all_bytes(json.dumps(sorted(self.unknown)).encode())]
        if nowhere := sorted(set.intersection(*absent)):
            raise LearnerError(self.unknown[nowhere[0]])

    @property
    def followed(self) -> dict[str, Tensor]:
        """The parameters and buffers that are merged, by their names in the manifest."""
        return {name: tensor.parameter for name, tensor in self._tracked.items()}

    def present(self) -> dict[str, Tensor]:
        """The parameters and buffers that the model has now, by all their names."""
        self.reshard()
        parameters = {name: tensor for tensor, names in names_of(self.model).items() for name in names}
        return buffers_of(self.model) | parameters

    def run_names(self, state: Mapping[str, object]) -> dict[str, str]:
        """Return by name in a `state_dict()` the merged tensors' names in the manifest; they are known by memory."""
        names = {memory_of(tensor.parameter): name for name, tensor in self._tracked.items()}
        places = {key: memory_of(value) for key, value in state.items() if isinstance(value, Tensor)}
        return {key: names[place] for key, place in places.items() if place in names}

    def read(self, local: LocalFragment, out: Tensor) -> None:
        """Copy the values. out: shape (part.size,), float32, CPU; overwritten."""
        with torch.no_grad():
            sources = self.in_place(local.slabs)
            if sources and all(value.is_cpu and value.dtype == out.dtype for value in sources):
                # One call, for of small tensors each costs more than its values. Other types would take it longer.
                torch.cat([value.reshape(-1) for value in sources], out=out)
                return
            for slab, values in zip(local.slabs, sources, strict=True):
                out[slab.span].view(values.shape).copy_(values)

    def write(self, local: LocalFragment, values: Tensor) -> None:
        """Overwrite the values. values: shape (part.size,), float32, CPU; not changed."""
        self.reshard()
        with torch.no_grad():
            for slab, target in zip(local.slabs, self.in_place(local.slabs), strict=True):
                target.copy_(values[slab.span].view(target.shape))
            self.follow(local.slabs)

    def shift(
        self, local: LocalFragment, new: Tensor, anchor: Tensor | None, carry_factor: float, scratch: Tensor
    ) -> None:
        """Carry-over in place: `theta = new + lam * (theta - anchor)`, or without an anchor `theta = new`.

        Each operation is rounded to float32 by itself.

        new, anchor: shape (part.size,), float32, CPU; not changed.
        scratch: shape (at least the largest slab,), float32, CPU; overwritten where parameters are no CPU float32.
        """
        if anchor is None:
            self.write(local, new)
            return
        self.reshard()
        with torch.no_grad():
            for slab, values in zip(local.slabs, self.in_place(local.slabs), strict=True):
                is_direct = values.dtype == torch.float32 and values.device.type == "cpu"
                theta = values if is_direct else scratch[: slab.size].view(values.shape).copy_(values)
                target, start = (vector[slab.span].view(values.shape) for vector in (new, anchor))
                is_buffer = not isinstance(self._tracked[slab.piece.name].parameter, nn.Parameter)
                carry(theta, target, start, carry_factor, keeps_sign=is_buffer)
                if not is_direct:
                    values.copy_(theta)
                self.follow((slab,))

    def held(self, local: LocalFragment, new: Tensor, out: Tensor) -> None:
        """Write what a learner that takes exactly `new` holds: `new` rounded to each parameter's type, as float32."""
        out.copy_(new)
        for slab in local.slabs:
            dtype = self._tracked[slab.piece.name].whole.dtype
            if dtype != torch.float32:
                span = out[slab.span]
                span.copy_(span.to(dtype))

    def sample(self, local: LocalFragment) -> Tensor:
        """The first values of each slab as the *parameters* hold them, masters or not: shape (k,), float32.

        Slabs on other devices than the first one are left out: nothing is moved.
        """
        return joined(
            [first_values(local_part(self._tracked[slab.piece.name].parameter), slab) for slab in local.slabs]
        )

    def sample_gradients(self, local: LocalFragment) -> Tensor | None:
        """Return the gradients of the same values, zero where there is none (any more); None: no dense one is there."""
        parameters = [self._tracked[slab.piece.name].parameter for slab in local.slabs]
        if {torch.strided} != {parameter.grad.layout for parameter in parameters if parameter.grad is not None}:
            return None
        sources = [parameter if parameter.grad is None else parameter.grad for parameter in parameters]
        samples = [first_values(local_part(source), slab) for source, slab in zip(sources, local.slabs, strict=True)]
        rows = zip(parameters, samples, strict=True)
        return joined([torch.zeros_like(values) if parameter.grad is None else values for parameter, values in rows])

    def host_state(self, *, is_whole: bool, is_kept: bool) -> dict[str, Any]:
        """The model's `state_dict()` in whole tensors on the CPU; copies. All ranks call it, where the model is cut.

        States that a script nests in it are left out. is_whole: else without what is merged: buffers and frozen
        parameters are left. is_kept: here; else {} is returned.
        """
        own_state = by_plain_name(self.model.state_dict(), self.model)
        merged_names = {name for names in self._names_of.values() if names[0] in self._tracked for name in names}
        merged_names |= self.run_names(own_state).keys()
        state: dict[str, Any] = {}
        for name, value in own_state.items():
            is_nested = isinstance(value, Mapping) and not name.endswith("_extra_state")
            if is_nested or (name in merged_names and not is_whole):
                continue
            whole: Any = value
            if is_sharded(whole):  # one at a time: a device that trains has no room for the whole model
                whole = whole.detach().full_tensor()  # all ranks, also those that keep nothing
            if is_kept:
                state[name] = tree_map(host_copy, whole)  # of tensors within a script's own states, too
        return state

    def full_state(
        self, manifest: Manifest, vectors: list[Tensor], remainder: dict[str, Any], only: Collection[str] | None = None
    ) -> dict[str, Any]:
        """The model's `state_dict()` with these values as the trainable parameters; on the CPU, parameter types.

        manifest, vectors: all fragments and their values, float32, CPU. remainder: of `host_state`, what is not merged.
        only: the tensors that are wanted, by their names in the manifest.
        """
        wanted = [tensor for tensor in manifest.tensors if only is None or tensor.name in only]
        # Of torch's memory, for a script may resize what it is given.
        values = {spec.name: torch.empty(spec.shape, dtype=torch.float32, device="cpu") for spec in wanted}
        for fragment, vector in zip(manifest.fragments, vectors, strict=True):
            for piece in (piece for piece in fragment.pieces if piece.name in values):
                span = vector[piece.offset : piece.offset + piece.size]
                values[piece.name].view(-1)[piece.value_start : piece.value_stop] = span
        names_of = {names[0]: (parameter, names) for parameter, names in self._names_of.items()}
        state = dict(remainder)
        for name, value in values.items():
            if name not in names_of:  # another rank's, as with pipeline parallelism
                state[name] = value
                continue
            parameter, names = names_of[name]
            state.update(dict.fromkeys(names, value.to(parameter.dtype)))
        own_names = [name for name in by_plain_name(self.model.state_dict(), self.model) if name in state]
        return {name: state[name] for name in dict.fromkeys((*own_names, *state))}

    def devices_of(self, slabs: Sequence[Slab]) -> list[torch.device]:
        """Where the values of each slab lie now."""
        return [self._tracked[slab.piece.name].whole.device for slab in slabs]

    def values(self, slab: Slab) -> Tensor:
        """A view of the slab's values; taken anew each time, for `model.to()` may have moved them."""
        return cut(self._tracked[slab.piece.name].source, slab)

    def in_place(self, slabs: Sequence[Slab]) -> list[Tensor]:
        """The same of each, within `no_grad`: a whole tensor is itself, for each view takes a call of torch."""
        pairs = [(slab, self._tracked[slab.piece.name].whole) for slab in slabs]
        return [whole if type(whole) in PLAIN and slab.is_whole else self.values(slab) for slab, whole in pairs]

    def follow(self, slabs: Sequence[Slab]) -> None:
        """Copy masters that were written into their parameters."""
        pairs = []
        for slab in slabs:
            tensor = self._tracked[slab.piece.name]
            if tensor.master is not None:
                pairs.append((local_part(tensor.parameter)[slab.local], tensor.source[slab.local]))
        if pairs:
            parameters, masters = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(parameters, masters)

    def reshard(self) -> None:
        """Have FSDP2 show the shards, also after an evaluation."""
        for module in self._resharded:
            module.reshard()  # type: ignore[operator]


def _buffers(model: nn.Module, patterns: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the buffers whose names fit, by name, and a message for each pattern that fits none."""
    matches: dict[str, Tensor] = {}
    unknown: dict[str, str] = {}
    for pattern in patterns:
        name_pattern = plain_name(pattern, replicas_in(model))
        fitting = {name: buffer for name, buffer in buffers_of(model).items() if fnmatchcase(name, name_pattern)}
        if not fitting:
            all_names = list(buffers_of(model))[:5]
            unknown[f"buffers {pattern}"] = f"buffers: {pattern!r} fits no buffer of the model; it has {all_names}"
        matches |= fitting
    return matches, unknown


def _rule(value: str) -> MergeRule:
    try:
        return MergeRule(value)
    except ValueError as error:
        raise LearnerError(f'merge: {value!r} is no rule: give "avg", or "rda" for the run\'s own') from error


def _mark(values: Tensor) -> str:
    """Digest of some rows of a matrix; empty if all of them are one number, as where nothing is drawn."""
    sample = values[:: max(1, len(values) // MARK_ROWS)][:MARK_ROWS, :MARK_ROWS].float().cpu().contiguous()
    if not sample.numel() or bool((sample == sample.view(-1)[0]).all()):
        return ""
    return sha256(sample.numpy().tobytes()).hexdigest()[:16]


def _is_named_averaged(name: str) -> bool:
    *parents, module, _ = ["", *name.split(".")]
    return module in EMBEDDING_NAMES or (module in HEAD_NAMES and len(parents) <= _HEAD_DEPTH_MAX)


def _check_kind(label: str, *objects: object) -> None:
    kinds = sorted({kind.__name__ for item in objects for kind in type(item).__mro__} & REFUSED_KINDS)
    if kinds:
        raise LearnerError(
            f"{label} is sharded over ranks in an old way ({kinds[0]}): use FSDP2, "
            "torch.distributed.fsdp.fully_shard(model), and attach after it"
        )


def _check(name: str, parameter: Tensor) -> None:
    values = parameter.data
    _check_kind(f"parameter {name!r}", parameter, values)
    if is_sharded(values):
        if any(placement.is_partial() for placement in values.placements):  # type: ignore[attr-defined]
            raise LearnerError(
                f"parameter {name!r} has a Partial placement: no rank has its values. Attach the model outside of a "
                "forward pass, with sharded or replicated parameters"
            )
        values = local_part(values)
    if type(values) not in PLAIN:
        raise LearnerError(
            f"parameter {name!r} is a {type(values).__name__}: only plain tensors and DTensors can be merged. Freeze "
            "it (requires_grad=False), or attach before it is quantised or wrapped"
        )
    if parameter.is_meta:
        raise LearnerError(f"parameter {name!r} is on the meta device and has no values: materialize the model first")
    if parameter.dtype not in DTYPES:
        raise LearnerError(
            f"parameter {name!r} has type {parameter.dtype}: only float32, bfloat16 and float16 can be merged; "
            "freeze it (requires_grad=False), convert it, or leave it out of attach(buffers=)"
        )
    if parameter.layout != torch.strided:
        raise LearnerError(f"parameter {name!r} has layout {parameter.layout}: only dense tensors can be merged")


def _check_master(name: str, parameter: Tensor, master: Tensor | None) -> None:
    if master is None:
        return
    is_like = master.shape == parameter.shape and local_part(master).shape == local_part(parameter).shape
    if master.dtype != torch.float32 or not is_like:
        raise LearnerError(
            f"masters[{name!r}] is {master.dtype} of shape {tuple(master.shape)}, "
            f"expected float32 of shape {tuple(parameter.shape)}"
        )


def boxes_of(name: str, parameter: Tensor) -> list[Box]:
    """Return the boxes of the tensor that lie on this rank."""
    if not is_sharded(parameter.data):
        return [whole_box(parameter.shape)]
    # Part of the protocol of distributed checkpoints (DCP): every tensor that is cut has it.
    chunks = parameter.data.__create_chunk_list__()  # type: ignore[attr-defined]
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    boxes = [box for box in boxes if box.volume]
    shape = tuple(local_part(parameter).shape)
    if boxes and (len(boxes) > 1 or boxes[0].sizes != shape):
        raise LearnerError(
            f"parameter {name!r} lies on this rank as {len(boxes)} parts {[box.sizes for box in boxes]} in a tensor of "
            f"{shape}: shard it so that each rank holds one block"
        )
    return boxes
