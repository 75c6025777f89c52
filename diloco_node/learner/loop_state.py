"""Changes of a training loop that no checkpoint has: named in one line, for a restart begins them anew in silence.

- Buffers and frozen parameters of the model, such as running statistics, or a teacher that follows its student.
- What else lives in the process: other modules whose values move, optimizers, gradient scalers, schedules, generators
  of NumPy and Python, and data loaders without a position. They are found by their classes among all objects.

It looks at checkpoints number 1, 2, 4, 8 ..., for a search takes as long as several steps. The values compared are
samples, and nothing waits for a device.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from diloco_node.learner.data_positions import is_under_way, may_read, reach
from diloco_node.learner.frozen_tensors import running_buffers
from diloco_node.learner.generators import KeptGenerator
from diloco_node.learner.layouts.device import Room
from diloco_node.learner.layouts.names import plain_name
from diloco_node.learner.layouts.shard_map import Box, whole_box
from diloco_node.learner.layouts.tensors import ModelTensors, boxes_of, is_sharded, local_part
from diloco_node.learner.living_objects import living_objects
from diloco_node.learner.loss import LateLoss
from diloco_node.learner.model_watch import COPY_LIKENESS
from diloco_node.learner.optimizer_record import NOISE
from diloco_node.learner.schedules import KeptSchedule, below_wrapper, schedules_of
from diloco_node.learner.several_optimizers import inner_of
from diloco_node.learner.tensor_forms import sample_of, stack

T = TypeVar("T")

GENERATORS: Final = (np.random.Generator, np.random.RandomState, random.Random)
HOLDERS: Final = (nn.Module, DataLoader, Sampler, Dataset)
"""Places of torch's generators, which are in no list of objects themselves."""

PARTS: Final = (nn.Module, Tensor, Optimizer, GradScaler, LRScheduler, _BaseDataLoaderIter, *GENERATORS)
KINDS: Final = (*PARTS, Room, *HOLDERS)
COPIES: Final = "copies of the parameters, such as averages"
"""Name of tensors that are in no module."""

FROZEN: Final = "frozen parameter"

RUN_MODULE: Final = "diloco_node.learner.attach"
"""Where the class is by which a schedule asks for the run's step: such a schedule has no position of its own."""


class LoopState:
    """A search for state of the loop that no checkpoint has. stateful, optimizer: what a checkpoint keeps."""

    def __init__(
        self,
        tensors: ModelTensors,
        stateful: Mapping[str, object],
        warn: Callable[[str], None],
        optimizer: Optimizer | None = None,
    ) -> None:
        self._tensors = tensors
        self._warn = warn
        schedules: list[object] = []
        draws: list[Any] = [random.random, np.random.rand]  # of the process's generators, which a checkpoint keeps
        components: list[object] = [draw.__self__ for draw in draws]
        for component in stateful.values():
            (schedules if isinstance(below_wrapper(component), LRScheduler) else components).append(component)
        members = reach(components)
        # A schedule knows its optimizer, but has nothing of its moments.
        members += [item for item in reach(schedules) if not issubclass(type(item), Optimizer)]
        members += [] if optimizer is None else [optimizer, *inner_of(optimizer)]
        self._optimizer = optimizer
        modules = [module for item in members if isinstance(item, nn.Module) for module in item.modules()]
        member_values = [tensor for module in modules for tensor in _values_of(module).values()]
        # Of all that a checkpoint keeps; what it holds lives as long as the loop.
        self._member_ids = {id(item) for item in (*members, *modules, *member_values)}
        self._member_shards = [item for item in (*members, *member_values) if is_sharded(item) and _is_plain(item)]
        kinds = (*PARTS, torch.Generator, KeptGenerator, KeptSchedule)
        # Parts of `stateful` that are no schedule, scaler or module: they may know where the data are.
        self._readers = [
            item
            for item in stateful.values()
            if not any(isinstance(value, kinds) for value in (item, below_wrapper(item)))
        ]
        # Names that people have been told.
        self._told: set[str] = set()
        self._looks = 0
        # Samples as of attach(), by name; of other modules as of the first look at them.
        self._first = {name: sample_of(tensor) for name, tensor in self._unmerged().items()}
        self._modules: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        living = living_objects(*KINDS)
        self._others(living)
        # Generators and their states when seen first, by address: those that never move need no place.
        self._draws: dict[int, tuple[Any, str]] = {}
        for item in (*living, *_torch_generators(living)):
            if isinstance(item, (*GENERATORS, torch.Generator)):
                self._has_drawn(item)
        # Schedules that were there before, and where they stood: those of earlier training never move.
        schedules = [item for item in living if issubclass(type(item), LRScheduler)]
        self._stands: WeakKeyDictionary[LRScheduler, list[Any]] = WeakKeyDictionary()
        for item in schedules:
            self._stands[cast(LRScheduler, item)] = _ask(_stand, item, [None])
        # Of the optimizers, as of attach(), or as they were seen first.
        self._attributes = self._attributes_now()
        # Samples of the state that the loop took a copy of last: a module that holds it is there to evaluate. Of whole
        # tensors, and of the parts that modules outside of the model hold.
        self._copy: dict[tuple[str, Box | None], Tensor] = {}
        # Tensors that the loop was given, with the writes to each by then: one that it writes to is an average. And of
        # those that it has copied itself the sum of samples, at the last look.
        self._gifts: list[tuple[ref[Tensor], int]] = []
        self._copies: Tensor | float = 0.0
        self._has_copy = torch.zeros((), dtype=torch.bool)
        self._checkpoint_ids: set[int] = set()
        self._moving_copy(living)
        # How many values changed, by name, and their sum, which may be on its way from a device.
        self._changes: dict[str, Tensor] = {}
        self._change_sum = LateLoss()

    def look(self, copies: Iterable[Tensor] = ()) -> None:
        """A checkpoint is written, from these copies: warn of what changes and is not in it."""
        self._checkpoint_ids = {*map(id, copies)}
        self._looks += 1
        objects: list[str] = []
        if self._looks & (self._looks - 1) == 0:
            living = living_objects(*KINDS)
            self._compare(living)
            objects = [*self._objects(living)]
            del living
        if self._new(objects):
            gc.collect()  # an object that nobody has any more is not of the loop
            objects = [*self._objects(living_objects(*KINDS))]
        changes = [name for name, count in self._changes.items() if int(count)] if self._change_sum.fresh() else []
        if COPIES in self._new(changes) and not self._is_copy_left():
            changes.remove(COPIES)
        if names := self._new((*changes, *objects)):
            self._told |= set(names)
            self._warn(
                f"no checkpoint keeps {_summary(names)}: a restart begins with what the script makes. To keep an "
                "object, attach(stateful={name: object}); to merge buffers, attach(buffers=[pattern])"
            )

    def give(self, state: Mapping[str, Any]) -> None:
        """Note what `global_state_dict()` has returned."""
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.hold(tensors.values())
        self._copy = {(name, None): sample_of(tensor) for name, tensor in tensors.items() if _is_plain(tensor)}
        for values in map(_values_of, self._modules):
            for (name, box), _ in _pieces(values):
                # A module of the script's may have another tensor by that name.
                if box is not None and name in tensors and len(box.sizes) == tensors[name].dim():
                    whole = whole_box(tensors[name].shape)
                    self._copy[name, box] = sample_of(tensors[name][box.slices(whole)])

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Note merged parameters that the loop has for a while, to save them."""
        self._gifts = [entry for entry in self._gifts if entry[0]() is not None]
        self._gifts += [(ref(tensor), _writes_to(tensor)) for tensor in tensors]

    def _new(self, names: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name not in self._told]

    def _compare(self, living: Iterable[object]) -> None:
        pairs: list[tuple[str, Tensor, Tensor, Tensor | int]] = [
            (f"{_kind(tensor)} {name!r}", sample_of(tensor), self._first[name], 1)
            for name, tensor in self._unmerged().items()
            if name in self._first
        ]
        for module, values in self._others(living):
            pairs += _ask(partial(self._pairs, module), values, [])
        for key, sample in self._attributes_now().items():
            pairs.append((key[0], sample, self._attributes.setdefault(key, sample), 1))
        self._changes = {}
        for label, new, old, distance in pairs:
            if new.shape != old.shape or new.device != old.device:
                continue
            count = ((new != old) & ~(new.isnan() & old.isnan())).sum()
            if label.startswith(FROZEN):  # adapters are merged into it for an evaluation, and out again
                count = count * ~(torch.dist(new, old) <= NOISE * old.norm())
            if isinstance(distance, Tensor):  # a module may lie on several devices
                count = count.to(distance.device)
            count = count * distance
            self._changes[label] = (
                self._changes[label] + count.to(self._changes[label].device) if label in self._changes else count
            )
        if (is_moving := self._moving_copy(living)) is not None:
            self._changes[COPIES] = is_moving
        if self._changes:
            self._change_sum.offer(stack(self._changes.values()).sum())

    def _pairs(self, module: nn.Module, values: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor, Tensor | int]]:
        """Samples of a module outside of the model, now and when it was seen first."""
        label, first = f"a {type(module).__name__} outside of what attach() was given", self._modules[module]
        distance = self._distance(values)
        return [(label, sample_of(tensor), first[name], distance) for name, tensor in values.items()]

    def _moving_copy(self, living: Iterable[object]) -> Tensor | None:
        """Whether a tensor of no module is a copy of the largest matrix, and has moved since the last look.

        So have averages in a dictionary, and the best weights so far.
        """
        matrices = [value for value in self._tensors.followed.values() if value.dim() > 1 and _is_plain(value)]
        if (largest := max(matrices, key=Tensor.numel, default=None)) is None:
            return None
        gifts = [(gift(), writes) for gift, writes in self._gifts]
        ids = {id(item) for item in self._tensors.names}
        ids |= {id(item) for item, writes in gifts if item is not None and _writes_to(item) == writes}
        ids |= self._member_ids | self._checkpoint_ids | self._moment_ids()
        # Versions on their way look like the model, and another stream writes them.
        ids |= {id(tensor) for item in living if type(item) is Room for tensor in item.tensors()}
        own, shape = sample_of(largest), local_part(largest).shape
        # Memory of the model itself and of DTensors that are kept, and 0 where it was freed.
        values = [*self._tensors.followed.values(), *self._member_shards]
        places = {0, *(local_part(value).data_ptr() for value in values if _is_plain(value))}

        def loose_sample(item: Tensor) -> list[Tensor]:
            is_loose = _is_plain(item) and not item.requires_grad and item.data_ptr() not in places
            return [sample_of(item).to(own.device)] if is_loose else []

        samples = [own]
        for item in living:
            if type(item) is Tensor and item.shape == shape and id(item) not in ids:
                samples += _ask(loose_sample, item, [])
        ways = torch.linalg.vector_norm(torch.stack(samples) - own, dim=1)
        is_like = (ways < COPY_LIKENESS * own.norm()) & (torch.arange(len(samples), device=own.device) > 0)
        before, self._copies = self._copies, (torch.stack(samples).sum(1) * is_like).sum()
        self._has_copy = is_like.any()
        return (self._copies != before) & self._has_copy

    def _is_copy_left(self) -> bool:
        """Whether a copy is more than what nobody has any more. On a device, which is not waited for, it may be."""
        gc.collect()
        self._moving_copy(living_objects(*KINDS))
        return not self._has_copy.is_cpu or bool(self._has_copy)

    def _distance(self, values: Mapping[str, Tensor]) -> Tensor | int:
        """Count the values in which a module differs from the state that was given; 1 if it is another model."""
        counts = []
        for key, tensor in _pieces(values):
            copy = self._copy.get(key)
            sample = sample_of(tensor)
            if copy is None or copy.shape != sample.shape:
                return 1
            counts.append((sample != copy.to(tensor.dtype).to(sample, non_blocking=True)).sum())
        return stack(counts).sum()

    def _unmerged(self) -> dict[str, Tensor]:
        """Buffers and parameters of the model that are in no merge and no checkpoint, but in its `state_dict()`."""
        names, merge_names = self._tensors.names, self._tensors.followed
        ids = {  # of those that are no state, and those that `attach` has named
            id(buffer)
            for module in self._tensors.model.modules()
            for buffer in (*running_buffers(module), *map(module._buffers.get, module._non_persistent_buffers_set))
        }
        present = {
            name: tensor
            for name, tensor in self._tensors.present().items()
            if id(tensor) not in ids and name not in merge_names and tensor not in names and _is_plain(tensor)
        }
        by_id = {id(tensor): name for name, tensor in reversed(present.items()) if id(tensor) not in self._member_ids}
        return {name: present[name] for name in reversed(by_id.values())}

    def _others(self, living: Iterable[object]) -> list[tuple[nn.Module, dict[str, Tensor]]]:
        """Find modules that have values of their own outside of the model, and samples from when they were seen first.

        A module stands for those inside of it.
        """
        model = self._tensors.model
        own = {id(module) for module in model.modules()} | self._member_ids
        own |= {id(tensor) for tensor in _values_of(model).values()} | self._moment_ids()
        modules = [item for item in living if issubclass(type(item), nn.Module)]
        outside = [cast("nn.Module", module) for module in modules if id(module) not in own]
        inner = {id(child) for module in outside for child in [*module.__dict__.get("_modules", {}).values()]}
        pairs = []
        for module in outside:
            values = {} if id(module) in inner else _values_of(module)
            if values := {name: tensor for name, tensor in values.items() if id(tensor) not in own}:
                first = self._modules.setdefault(module, {})
                news = {name: values[name] for name in values.keys() - first.keys()}
                first |= _ask(_samples_of, news, dict[str, Tensor]())
                pairs.append((module, values))
        return pairs

    def _moment_ids(self) -> set[int]:
        """Ids of the tensors of the optimizer's state, which a checkpoint keeps."""
        states = [] if self._optimizer is None else [inner.state.values() for inner in inner_of(self._optimizer)]
        return {id(value) for state in states for item in state if isinstance(item, dict) for value in item.values()}

    def _attributes_now(self) -> dict[tuple[str, int], Tensor]:
        """Return samples of what optimizers have beside their states and may be moments, by name and number."""
        samples: dict[tuple[str, int], Tensor] = {}
        for member in [] if self._optimizer is None else inner_of(self._optimizer):
            samples |= _ask(self._attributes_of, member, dict[tuple[str, int], Tensor]())
        return samples

    def _attributes_of(self, optimizer: torch.optim.Optimizer) -> dict[tuple[str, int], Tensor]:
        shapes = {tensor.shape for tensor in self._tensors.names}
        ids = self._moment_ids() | {*map(id, self._tensors.names)}
        samples: dict[tuple[str, int], Tensor] = {}
        for name, value in vars(optimizer).items():
            items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for number, item in enumerate(items):
                if type(item) is Tensor and item.shape in shapes and id(item) not in ids and _is_plain(item):
                    key = f"attribute {name!r} of {type(optimizer).__name__}, outside of its state_dict()", number
                    samples[key] = sample_of(item)
        return samples

    def _has_drawn(self, generator: Any) -> bool:
        if not (state := _ask(lambda item: KeptGenerator(item).text(), generator, "")):
            return False
        _, first = self._draws.setdefault(id(generator), (generator, state))
        return state != first

    def _objects(self, living: Iterable[object]) -> Iterator[str]:
        """Name scalers, schedules and positions of data that are alive and not kept."""
        others = [item for item in living if not issubclass(type(item), nn.Module | Tensor)]
        members = {member_id for item in others for member_id in _ask(_member_ids, item, set[int]())}
        members |= _name_generators()
        for item in (*others, *_torch_generators(living)):
            if id(item) not in self._member_ids and id(item) not in members and (label := _ask(self._label, item, "")):
                yield label

    def _label(self, item: Any) -> str:
        """Name an object whose state moves and is not kept; an empty text if it has none."""
        kind = type(item)
        if isinstance(item, (*GENERATORS, torch.Generator)):
            return f"a generator ({kind.__module__.partition('.')[0]}'s {kind.__name__})" * self._has_drawn(item)
        if isinstance(item, Optimizer):
            is_kept = any(id(inner) in self._member_ids for inner in inner_of(item))
            has_moments = not self._tensors.names.keys().isdisjoint(item.state)
            return "" if is_kept or not has_moments else f"the moments of {kind.__name__}, which attach() was not given"
        if isinstance(item, GradScaler):
            return f"a {kind.__name__}" if item.is_enabled() else ""
        if isinstance(item, LRScheduler):
            stand = _ask(_stand, item, [None])
            is_other = set(stand) <= {None} or stand == self._stands.get(item)
            asks_run = any(map(_asks_run, getattr(item, "lr_lambdas", ())))
            return "" if is_other or asks_run else f"the position of a {kind.__name__}"
        if isinstance(item, _BaseDataLoaderIter) and is_under_way(item):
            model = self._tensors.model
            model_ids = {*map(id, (*model.modules(), *_values_of(model).values()))}
            is_kept = any(may_read(component, item, model_ids) for component in self._readers)
            text = "the position of a DataLoader (diloco_node.integrations has loaders that keep theirs)"
            return "" if is_kept else text
        return ""


def _ask(look: Callable[[Any], T], stranger: object, default: T) -> T:
    """Look at an object of the script's, whatever state it is in: the default, if it can't be looked at.

    It may be half built, by an error or by a thread at this moment; or have no state, as the system's generator.
    """
    try:
        return look(stranger)
    except Exception:  # noqa: BLE001 - whatever a class of the script's raises, it must not end the learner
        return default


def _member_ids(schedule: Any) -> set[int]:
    return {*map(id, getattr(schedule, "_schedulers", ()))}


def _torch_generators(living: Iterable[object]) -> list[torch.Generator]:
    """Return generators of torch's that the script or its objects hold, but for those that are seeded each epoch."""
    holders = [item for item in living if issubclass(type(item), HOLDERS) and not hasattr(type(item), "set_epoch")]
    spaces = [getattr(item, "__dict__", {}) for item in (*holders, sys.modules.get("__main__"))]
    values = [value for space in spaces for value in [*space.values()] if type(value) is torch.Generator]
    return list({id(value): value for value in values if value is not torch.default_generator}.values())


def _name_generators() -> set[int]:
    """Return ids of Python's own generators for names of files and of semaphores."""
    semaphores = getattr(sys.modules.get("multiprocessing.synchronize"), "SemLock", None)
    sequences = tempfile._get_candidate_names(), getattr(semaphores, "_rand", None)  # type: ignore[attr-defined]
    return {id(getattr(sequence, "_rng", None)) for sequence in sequences}


def _stand(schedule: LRScheduler) -> list[Any]:
    """Return where a schedule stands, or those in it."""
    return [getattr(member, "last_epoch", None) for member in schedules_of([schedule])]


def _values_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; those of a module that can't be looked at are none."""
    return _ask(_plain_values, module, {})


def _plain_values(module: nn.Module) -> dict[str, Tensor]:
    pairs = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in pairs if _is_plain(tensor)}


def _samples_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: sample_of(tensor) for name, tensor in values.items()}


def _pieces(values: Mapping[str, Tensor]) -> list[tuple[tuple[str, Box | None], Tensor]]:
    """Return tensors by their plain name and, where one is cut over ranks, the box of it that lies here."""
    return [
        ((plain_name(name), boxes_of(name, tensor)[0] if is_sharded(tensor) else None), tensor)
        for name, tensor in values.items()
    ]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has values to compare: no quantised, sparse or absent ones."""
    if type(tensor.data) not in (Tensor, nn.Parameter) and not hasattr(tensor, "to_local"):
        return False
    values = local_part(tensor)
    return bool(values.layout == torch.strided and not values.is_meta and values.numel() and not values.is_complex())


def _writes_to(tensor: Tensor) -> int:
    """How often a tensor was written to; those of `inference_mode` don't count that."""
    return 0 if tensor.is_inference() else tensor._version


def _kind(tensor: Tensor) -> str:
    return FROZEN if isinstance(tensor, nn.Parameter) else "buffer"


def _asks_run(function: Any) -> bool:
    """Whether a function reads where the run is."""
    while isinstance(function, partial):
        function = function.func
    values = [getattr(function, "__self__", None)]
    try:
        variables = inspect.getclosurevars(function)
        values += [*variables.nonlocals.values(), *variables.globals.values()]
    except TypeError:
        pass
    return any(
        type(value).__module__ == RUN_MODULE or type(getattr(value, "diloco", None)).__module__ == RUN_MODULE
        for value in values
    )


def _summary(names: list[str]) -> str:
    """The first few of each kind, and how many there are of a kind."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(" '")[0], []).append(name)
    return "; ".join(
        group[0] if len(group) == 1 else f"{len(group)} {kind}s, such as {group[0].partition(' ')[2]}"
        for kind, group in groups.items()
    )
