"""An optimizer's state as the parts that each rank has of it, and put together again for another layout.

Each part is named by its parameter and by the box of it that the values are for, as everything between the ranks
and regions is. So a region that comes back with another number of ranks, or sharded in another way, goes on with the
moments that it had. Values that have not a parameter's shape, such as a count of steps, are kept whole.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from diloco_node.errors import LearnerError
from diloco_node.learner.layouts.shard_map import Box, ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors, is_sharded, local_part
from diloco_node.learner.nested import check_plain, cut_like, flatten, unflatten
from diloco_node.learner.schedules import (
    BEGIN,
    Changes,
    is_same,
    script_settings,
    take_settings,
    tell_changes,
    without_numpy,
)
from diloco_node.learner.several_optimizers import (
    findings_of,
    inner_of,
    kind_of,
    load_state,
    parameters_of,
    settings_of,
)

Json = dict[str, Any]

LATER_STATES: Final = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""States, zero at first, that optimizers of torch's make in a parameter's first step alone; by the setting for it."""


JUMP_UP: Final = 2.5
JUMP_DOWN: Final = 10.0
"""A rate that begins anew is as high as at first, or is warmed up again. The second step of a warm-up has twice the
rate of the first. A region that was away for long finds it lower."""

log = logging.getLogger("diloco_node.learner")


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of an optimizer's state that one rank keeps.

    Attributes:
        tensors: by `state.INDEX.KEY` or `group.INDEX.KEY`; what of them lies on the rank.
        rest: what is no tensor; `state` by index, `param_groups`, and `kind`, the optimizer's class. `extras`: state of
            no parameter. `narrow`: class and sign of those tensors that the optimizer holds in fewer bits; they are
            kept as floats. `script`: by group what the script had set at `attach`. `dtypes`: by group the settings
            that are types.
        names: of the parameters, by index; "" for one that is not merged. A second optimizer of one has a longer name.
        boxes: of those tensors that have a value for each of their parameter's.
    """

    tensors: dict[str, Tensor]
    rest: Json
    names: list[str] = field(default_factory=list)
    boxes: dict[str, Box] = field(default_factory=dict)

    def document(self) -> Json:
        """All but the tensors, as JSON."""
        boxes = {name: [box.offsets, box.sizes] for name, box in self.boxes.items()}
        return {**self.rest, "names": self.names, "boxes": boxes}

    @classmethod
    def from_document(cls, document: Json, tensors: dict[str, Tensor]) -> Kept:
        """The inverse of `document`. Raises KeyError, TypeError, ValueError: not ours."""
        fields = dict(document)
        names, boxes = fields.pop("names", []), fields.pop("boxes", {})
        box_of = {name: Box(tuple(offsets), tuple(sizes)) for name, (offsets, sizes) in boxes.items()}
        return cls(tensors, fields, names, box_of)


class OptimizerParts:
    """How the parameters of an optimizer are called, and what of them lies here.

    tensors: the model's; None: nothing is known but the order of the parameters. shards: who owns what; what another
    rank owns is not kept. rank: this one.

    Muon of Keller Jordan updates each parameter on one rank, which alone has its momentum, and gathers the parameters.
    So of the ranks that hold the same, that one keeps a state which has written to it since `begin` (`choose`).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: ModelTensors | None = None,
        shards: ShardMap | None = None,
        rank: int = 0,
    ) -> None:
        self._optimizer = optimizer
        self._script = [script_settings(group, findings_of(optimizer)) for group in optimizer.param_groups]
        # By group what only the loop had changed before the restart.
        self._drifts: list[Changes] = []
        # By group the rate of a checkpoint, at the script's scale; 0 where the script has set another.
        self._rates: list[float] = []
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        name_of = {} if tensors is None else tensors.names
        names = [name_of.get(parameter, "") for parameter in self._parameters]
        self._boxes = [
            tensors.boxes[name][0] if tensors is not None and name and tensors.boxes[name] else None for name in names
        ]
        owners = [
            None if box is None or shards is None or not shards.followers(name, box) else shards.owner(name, box)
            for name, box in zip(names, self._boxes, strict=True)
        ]
        # Two optimizers may train one parameter, each with moments of its own.
        counts: Counter[str] = Counter()
        self._names = []
        for name in names:
            counts[name] += 1
            self._names.append(f"{name} ({counts[name]})" if name and counts[name] > 1 else name)
        # Of what several ranks hold, its owner and its name; empty where this rank is alone.
        self._keys = [
            "" if owner is None else f"{owner} {name}" for owner, name in zip(owners, self._names, strict=True)
        ]
        # What others keep, and what they have newer.
        self._other_keys = {key for key, owner in zip(self._keys, owners, strict=True) if owner not in (None, rank)}
        self._old_keys: set[str] = set()
        self._first_writes: dict[str, list[tuple[int, int]]] = {}

    def begin(self) -> None:
        """Note the state that the optimizer begins with."""
        self._first_writes = self._writes()

    def marks(self) -> dict[str, int]:
        """Say what is here of the states that other ranks may have: 0 none, 1 as it was at `begin`, 2 a newer one."""
        writes = self._writes()
        return {
            key: 0 if key not in writes else 1 + (writes[key] != self._first_writes.get(key))
            for key in filter(None, self._keys)
        }

    def choose(self, rows: Sequence[Mapping[str, int]], rank: int) -> None:
        """Keep what no other rank has newer, nor a lower one as new. rows: `marks` of all ranks. rank: this one."""
        best = {key: max((row.get(key, 0), -at) for at, row in enumerate(rows)) for key in rows[rank]}
        self._other_keys = {key for key, mark in rows[rank].items() if best[key] != (mark, -rank)}
        self._old_keys = {key for key, mark in rows[rank].items() if mark < best[key][0]}

    def _writes(self) -> dict[str, list[tuple[int, int]]]:
        """Return by key which tensors each state has, and how often each was written to."""
        states = [getattr(inner, "state", {}).get(parameter) for inner, parameter in self._members()]
        return {
            key: [
                (id(item), 0 if item.is_inference() else item._version)
                for item in state.values()
                if isinstance(item, Tensor)
            ]
            for key, state in zip(self._keys, states, strict=False)
            if state and isinstance(state, Mapping)
        }

    def _members(self) -> list[tuple[torch.optim.Optimizer, Tensor]]:
        """Return each parameter with the optimizer that has its state."""
        return [(inner, parameter) for inner in inner_of(self._optimizer) for parameter in parameters_of(inner)]

    def keep(self) -> Kept:
        """Return what this rank keeps now; not copies.

        Raises LearnerError: the state holds what is neither tensor nor JSON, or a DTensor of another shape than its
        parameter's, or is not in the form of torch.optim. Its groups are not those of `attach`.
        """
        kind = kind_of(self._optimizer)
        if [id(parameter) for _, parameter in self._members()] != [*map(id, self._parameters)]:
            raise LearnerError(f"the groups of {kind} hold other parameters, or in another order, than at attach()")
        state = self._optimizer.state_dict()
        if not {"state", "param_groups"} <= state.keys():
            raise LearnerError(f"the state_dict() of {kind} is not as in torch.optim: give attach what is inside it")
        tensors: dict[str, Tensor] = {}
        boxes: dict[str, Box] = {}
        document: Json = {"kind": kind, "state": {}, "param_groups": [], "narrow": {}, "script": self._script}
        document["types"] = [str(parameter.dtype) for parameter in self._parameters]
        document["dtypes"] = [_dtypes(group) for group in state["param_groups"]]
        extras = {key: values for key, values in state["state"].items() if key not in range(len(self._parameters))}
        if extras:  # belongs to no parameter
            document["extras"] = flatten("extras", extras, tensors)
        for index, values in state["state"].items():
            if index in extras or self._keys[index] in self._old_keys:
                continue
            prefix = f"state.{index}"
            document["state"][str(index)] = _split(
                prefix, values, tensors, takes_lists=not is_sharded(self._parameters[index])
            )
            box, shape = self._boxes[index], local_part(self._parameters[index]).shape
            if box is None and self._names[index]:  # an empty shard: its state is of the parameter's kind all the same
                box = Box((0,) * len(shape), tuple(shape))
            for name in [f"{prefix}.{key}" for key, value in values.items() if isinstance(value, Tensor)]:
                _check_state(f"{name} of {self._names[index]!r}", tensors[name], self._parameters[index])
                local = tensors[name] = local_part(tensors[name])
                check_plain(f"optimizer {name} of {self._names[index]!r}", local)
                if type(local) is not Tensor:
                    document["narrow"][name] = [type(local).__name__, bool(getattr(local, "signed", True))]
                if box is not None and local.shape == shape:
                    boxes[name] = box
                    if self._keys[index] in self._other_keys:
                        del tensors[name], boxes[name]
        settings = settings_of(self._optimizer)
        for index, group in enumerate(state["param_groups"]):
            # What is no JSON, such as a type or an infinite limit, is the script's again after a restart.
            # A rate always comes along: without it the script's would be taken, at a schedule's place.
            plain = {key: without_numpy(value) for key, value in group.items()}
            spares = {key for key in settings - {"lr"} if key in plain and not _can_be_kept(plain[key])}
            values = {key: value for key, value in plain.items() if key not in spares}
            document["param_groups"].append(_split(f"group.{index}", values, tensors))
        return Kept(tensors, document, self._names, boxes)

    def restore(self, saves: Sequence[Kept], *, is_lowered: bool = False) -> None:
        """Take the moments that ranks have kept, in whatever way the model was cut then. Settings stay the script's.

        saves: of all ranks whose parts are needed; first the one from which everything that is not cut is taken.

        Raises LearnerError: a part of a parameter's state is nowhere. ValueError, KeyError, TypeError, RuntimeError: it
        is no state of such an optimizer.
        """
        first, kind = saves[0], kind_of(self._optimizer)
        if first.rest.get("kind", kind) != kind:
            raise ValueError(f"it has the state of {first.rest['kind']}, here is {kind}")
        own_groups = self._optimizer.state_dict()["param_groups"]
        kept_groups = [dict(group) for group in first.rest["param_groups"]]
        for name, tensor in first.tensors.items():
            prefix, _, tail = name.partition(".")
            index, _, key = tail.partition(".")
            if prefix == "group":
                kept_groups[int(index)][key] = tensor
        sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (kept_groups, own_groups))
        if not any(self._names) and sizes != own_sizes:
            raise ValueError(f"groups of {sizes} parameters were kept, {own_sizes} are there")
        settings = settings_of(self._optimizer)
        scripts = [*first.rest.get("script", ()), *({} for _ in kept_groups)]
        changes: Changes = {}
        # By parameter the states that a setting of the script asks for and no checkpoint has yet.
        additions: list[list[str]] = []
        # By parameter whether its group asks for states of the types that it had.
        has_dtypes: list[bool] = []
        groups: list[Json] = []
        for at, own_group in enumerate(own_groups):
            place = self._place_of_group(at, own_group, kept_groups, first.names)
            group, script = (dict(own_group), {}) if place is None else (dict(kept_groups[place]), scripts[place])
            groups.append(group)
            group_changes, drifts = take_settings(group, own_group, settings, script, is_lowered=is_lowered)
            for key, pair in group_changes.items():
                changes[key if changes.get(key) in (None, pair) else f"{key} of group {at}"] = pair
            self._drifts.append(drifts)
            is_other = place is None or ("lr" in group_changes and BEGIN not in group)
            self._rates.append(0.0 if is_other else float(drifts.get("lr", [group.get("lr")])[0] or 0.0))
            settings_now = {key for key, (old, own) in group_changes.items() if own and not old}
            keys = [state for key, state in LATER_STATES.items() if key in settings_now]
            additions += [keys for _ in group["params"]]
            is_typed = place is None or "dtypes" not in first.rest or first.rest["dtypes"][place] == _dtypes(own_group)
            has_dtypes += [is_typed for _ in group["params"]]
        views = [_ByParameter(save) for save in saves]
        state = {index: values for index in range(len(self._parameters)) if (values := self._state_of(index, views))}
        for place, values in state.items():
            parameter = self._parameters[place].detach()
            values |= {key: torch.zeros_like(parameter) for key in additions[place] if key not in values}
        state |= unflatten(first.rest.get("extras", {}), first.tensors)
        load_state(self._optimizer, {"state": state, "param_groups": groups})
        for place, (inner, parameter) in enumerate(self._members()):
            # What an optimizer loads it makes of the parameter's type: moments of float32, and counts, too.
            entries = getattr(inner, "state", {}).get(parameter)
            is_as_before = any(view.type_of(self._names[place], place) == str(parameter.dtype) for view in views)
            is_as_before &= has_dtypes[place]
            if isinstance(entries, dict):
                values = {key: value for key, value in state.get(place, {}).items() if key != "step" and key in entries}
                entries |= {key: _as_kept(value, entries[key], is_same=is_as_before) for key, value in values.items()}
        tell_changes(changes)

    def _place_of_group(self, at: int, own_group: Json, groups: Sequence[Json], names: Sequence[str]) -> int | None:
        """Find the checkpoint's group with most of a group's parameters, or None; by place for those without names.

        Groups may be in another order since, more or fewer.
        """
        own_names = {self._names[index] for index in own_group["params"]} - {""}
        if not own_names:
            is_nameless = at < len(groups) and not any(names[index] for index in groups[at]["params"])
            return at if is_nameless else None
        counts = Counter(
            place for place, group in enumerate(groups) for index in group["params"] if names[index] in own_names
        )
        return counts.most_common(1)[0][0] if counts else None

    def tell_jumps(self) -> None:
        """Log where the first step after a restart was made with quite another rate than the last one before; once."""
        rates, self._rates = self._rates, []
        for group, before, drifts in zip(self._optimizer.param_groups, rates, self._drifts, strict=False):
            now = group.get("lr")
            if not isinstance(now, float) or before / JUMP_DOWN < now < before * JUMP_UP:
                continue
            if before and not ("lr" in drifts and is_same(now, drifts["lr"][1])):  # else `tell_drifts` does
                log.warning(
                    "optimizer: lr is %g in the first step, and was %g at the checkpoint: if a schedule or a count of "
                    "steps begins anew, give it to attach(stateful=...), or count by diloco.global_step",
                    now,
                    before,
                )

    def tell_drifts(self) -> None:
        """Log what the loop had changed before the restart, and has not again by now; once."""
        drifts, self._drifts = self._drifts, []
        for group, changes in zip(self._optimizer.param_groups, drifts, strict=False):
            tell_changes({key: pair for key, pair in changes.items() if is_same(group.get(key), pair[1])})

    def missing(self, documents: Mapping[int, Kept], first: int) -> set[int]:
        """Name the ranks whose parts are needed besides those of rank `first`, by what they say that they have."""
        ranks: set[int] = set()
        views = {rank: _ByParameter(save) for rank, save in documents.items()}
        for name, box in zip(self._names, self._boxes, strict=True):
            having = {rank: boxes for rank, view in views.items() if (boxes := view.boxes_of(name))}
            if box is None:  # an empty shard: only what there is of a state
                ranks.update(() if first in having else sorted(having)[:1])
                continue
            ranks.update(rank for rank, boxes in having.items() if any(map(box.common, boxes)))
        return ranks

    def _state_of(self, index: int, views: Sequence[_ByParameter]) -> Json:
        """The state of one parameter."""
        name, box, parameter = self._names[index], self._boxes[index], self._parameters[index]
        values: Json = {}
        cut: dict[str, list[tuple[Box, Tensor]]] = {}
        narrow: dict[str, tuple[str, bool]] = {}
        for view in views:
            save, at = view.kept, view.place_of(name, index)
            if at is None or str(at) not in save.rest["state"]:
                continue
            values = unflatten(save.rest["state"][str(at)], save.tensors) | values
            for tensor_name in view.tensors.get(str(at), ()):
                key = tensor_name.removeprefix(f"state.{at}.")
                if tensor_name in save.rest.get("narrow", {}):
                    narrow[key] = save.rest["narrow"][tensor_name]
                if tensor_name in save.boxes:
                    cut.setdefault(key, []).append((save.boxes[tensor_name], save.tensors[tensor_name]))
                else:
                    values.setdefault(key, save.tensors[tensor_name])
        for key, pieces in cut.items():
            if box is None:  # nothing of it lies here
                local = pieces[0][1].new_empty(local_part(parameter).shape)
            else:
                local = _joined(f"{key} of {name}", box, pieces)
            values[key] = cut_like(parameter, local) if is_sharded(parameter) else local
        for key, (label, is_signed) in narrow.items():
            values[key] = self._narrow(label, parameter, values[key], is_signed=is_signed)
        return values

    def _narrow(self, label: str, parameter: Tensor, value: Tensor, *, is_signed: bool) -> Tensor:
        """Put a state back into fewer bits, as torchao's optimizers make theirs: as floats all may not fit the device.

        Raises ValueError: this optimizer does not say how.
        """
        makers = [inner._new_buffer for inner in inner_of(self._optimizer) if hasattr(inner, "_new_buffer")]
        if not makers:
            raise ValueError(f"a {label} was kept, which this optimizer does not make")
        narrow: Tensor = makers[0](parameter.detach(), is_signed).copy_(value)
        return narrow


class _ByParameter:
    """An index by parameter of what one rank has kept. tensors: their names, by the parameter's index, as text."""

    def __init__(self, save: Kept) -> None:
        self.kept = save
        self.tensors = _by_index(save.tensors)
        self._boxes = _by_index(save.boxes)
        self._places = {name: at for at, name in enumerate(save.names) if name}

    def place_of(self, name: str, index: int) -> int | None:
        """Where a parameter was among those of the rank; one that is not merged has no name, only its place."""
        if name:
            return self._places.get(name)
        return index if self.kept.names[index : index + 1] in ([], [""]) else None

    def type_of(self, name: str, index: int) -> str:
        """Return the type that a parameter had; empty: nobody knows."""
        at, types = self.place_of(name, index), self.kept.rest.get("types")
        return "" if at is None or types is None else types[at]

    def boxes_of(self, name: str) -> list[Box]:
        """Return the boxes of a parameter's state."""
        return [self.kept.boxes[key] for key in self._boxes.get(str(self._places.get(name)), ())]


def _by_index(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names `state.INDEX.KEY` by INDEX."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind, _, tail = name.partition(".")
        if kind == "state":
            groups.setdefault(tail.partition(".")[0], []).append(name)
    return groups


def _check_state(label: str, value: Tensor, parameter: Tensor) -> None:
    if is_sharded(value) and value.shape != parameter.shape:
        raise LearnerError(
            f"optimizer {label} is cut over ranks and has the shape {tuple(value.shape)}, its parameter has "
            f"{tuple(parameter.shape)}: only what has its parameter's shape can be cut again for other ranks"
        )


def _joined(label: str, box: Box, pieces: Sequence[tuple[Box, Tensor]]) -> Tensor:
    """The values of a box, of parts that do not overlap unless they are the same."""
    for piece_box, values in pieces:
        if piece_box == box:
            return values
    whole = pieces[0][1].new_empty(box.sizes)
    boxes: set[Box] = set()
    count = 0
    for piece_box, values in pieces:
        if piece_box in boxes or (common := box.common(piece_box)) is None:
            continue
        boxes.add(piece_box)
        whole[common.slices(box)] = values[common.slices(piece_box)]
        count += common.volume
    if count != box.volume:
        raise LearnerError(f"of {label} only {count} of {box.volume} values were kept")
    return whole


def _split(prefix: str, values: Json, tensors: dict[str, Tensor], *, takes_lists: bool = False) -> Json:
    """Return what is no tensor as JSON. takes_lists: also lists of tensors, and the like; of a cut one all is cut."""
    plain: Json = {}
    for key, value in values.items():
        label = f"optimizer {prefix}.{key}"
        if isinstance(value, Tensor):
            tensors[f"{prefix}.{key}"] = value
        elif takes_lists and not any(isinstance(leaf, np.ndarray) for leaf in tree_leaves(value)):
            plain[key] = flatten(label, value, tensors)
        else:
            try:
                plain[key] = json.loads(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError) as error:
                text = f"{label} can't be kept in a checkpoint: {error}; only tensors and JSON can"
                raise LearnerError(text) from error
    return plain


def _can_be_kept(value: object) -> bool:
    try:
        return isinstance(value, Tensor) or bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return False


def _dtypes(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that are a type of tensors, or the name of one."""
    types = {
        key: getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
        for key, value in group.items()
    }
    return {key: str(value) for key, value in types.items() if isinstance(value, torch.dtype)}


def _as_kept(value: Any, entry: Any, *, is_same: bool) -> Any:
    """Return what an optimizer has loaded with texts as they were kept, and if `is_same` the types, too."""
    again = partial(_as_kept, is_same=is_same)
    if isinstance(value, Tensor) and isinstance(entry, Tensor) and value.shape == entry.shape:
        return value.to(entry.device) if is_same and value.dtype != entry.dtype else entry
    if isinstance(value, list | tuple) and isinstance(entry, list | tuple) and len(value) == len(entry):
        items = map(again, value, entry)
        return type(entry)(*items) if hasattr(entry, "_fields") else type(entry)(items)
    if isinstance(value, dict) and isinstance(entry, dict) and value.keys() == entry.keys():
        return {key: again(item, entry[key]) for key, item in value.items()}
    return value if isinstance(value, str) else entry
