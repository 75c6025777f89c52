"""Watches that the training loop trains what `attach` follows, from the first step to the last.

`attach` looks at the model once. Weights that a script loads later would be merged as if they had been trained. A layer
that it replaces would be trained by this region alone. Four signs cost next to nothing:

- the dictionaries of the modules hold the same parameters and modules, and these have the same types and shapes;
- a step of any optimizer calls a hook before and after it: what does the optimizer hold?
- a tensor counts the writes to it: between two steps of its optimizer nobody writes but this learner;
- samples of values, for `tensor.data` counts nothing: before the first step, and between two steps.

An optimizer that trains a copy of the weights (schedule-free, Lookahead) takes the parameters back to where its copy
stands, so versions are half undone. A copy is a state that looks like its parameter and moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import compress
from operator import attrgetter, is_
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as optimizer_hooks

from diloco_node.errors import LearnerError
from diloco_node.learner.late_looks import LateLook, LateLooks
from diloco_node.learner.layouts.capture import is_capturing
from diloco_node.learner.layouts.device import has_streams
from diloco_node.learner.layouts.tensors import ModelTensors
from diloco_node.learner.optimizer_record import FAR, NOISE, TOLD, OptimizerRecord, is_inside_step
from diloco_node.learner.schedules import schedules_of
from diloco_node.learner.several_optimizers import check_kind, inner_of, kind_of, parameters_of
from diloco_node.learner.state_watch import StateWatch
from diloco_node.learner.step_counts import StepCounts, StillWatch
from diloco_node.learner.tensor_forms import (
    LOADED,
    REMEDY,
    TensorForms,
    TensorPlaces,
    check_apart,
    check_not_replaced,
    is_constrained,
    sample_of,
    stack,
)

COPY_LIKENESS: Final = 0.5
"""1 - |state - parameter| / |parameter| of a copy, which is a few steps away; for moments it is about zero or below."""

COPY_LOOKS: Final = frozenset({1, 2, 4, 8, 16, 32, 64})
"""Steps after which an optimizer's states are looked at. Lookahead moves its copy each fifth to tenth step."""

FAR_AT_FIRST: Final = 0.5
"""Change by the first step of a loop, in lengths of the whole model, that is a load and no step."""

LOOKS_WAITED: Final = 8
"""Looks at what others write for which a device is waited. A loop that writes at each step, such as one that clamps
weights, hears a step or two later of a load."""

_TRAINS: Final = attrgetter("requires_grad")


class ModelWatch:
    """A watch for weights and layers that `attach` does not follow.

    Made when the model holds the run's parameters; `close` takes the hooks away.

    is_auto: the optimizer's steps are told, and not by the loop. refuse: hears of what is refused: a loop may catch it.
    """

    def __init__(
        self,
        tensors: ModelTensors,
        warn: Callable[[str], None],
        optimizer: torch.optim.Optimizer | None = None,
        stateful: Iterable[object] = (),
        *,
        is_auto: bool = False,
        refuse: Callable[[LearnerError], None] = lambda _: None,
    ) -> None:
        self._tensors = tensors
        self._warn = warn
        self._refuse = refuse
        # Why nothing of the model may be merged any more; empty: it may.
        self._refusal = ""
        members = [] if optimizer is None else inner_of(optimizer)
        # The optimizer whose steps are told, if not the loop itself tells them.
        self._step_optimizer = members[0] if is_auto else None
        self._states = StateWatch(members, schedules_of(stateful), warn)
        # Merged tensors and masters, with their names.
        self._names = tensors.names
        self._forms = TensorForms(self._names)
        self._present = tensors.present()
        self._places = self._places_now()
        # Those that have made a step; None for one that trains something else. And what they held then.
        self._optimizers: WeakKeyDictionary[torch.optim.Optimizer, OptimizerRecord | None] = WeakKeyDictionary()
        self._holdings: WeakKeyDictionary[torch.optim.Optimizer, list[Tensor]] = WeakKeyDictionary()
        # Parameters that an optimizer holds, and that get no gradients.
        self._constants: set[Tensor] = set()
        followed = tensors.followed
        # Parameters and masters, but no buffers: a forward pass may change those before the first step.
        self._weights = {
            tensor: name
            for tensor, name in self._names.items()
            if isinstance(tensor, nn.Parameter) or followed[name] is not tensor
        }
        # Those that forward passes shorten, row by row.
        self._renormed = {
            weight
            for module in tensors.model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
            if (weight := module._parameters.get("weight")) is not None  # a script's own may have none, or compute it
        }
        # Their values as `attach` wrote them; empty once they were compared.
        self._written = [sample_of(tensor) for tensor in self._weights]
        self._steps = StepCounts(warn)
        self._still = StillWatch(self._names, self._weights, warn)
        # Those that this learner had written when it was asked last; -1: it was not.
        self._versions = -1
        # Once True nothing more is said of writes.
        self._has_warned = False
        self._own_tensors = {*tensors.present().values(), *tensors.names, *tensors.strangers}
        # What is on its way from a device.
        self._looks = LateLooks()
        # Greatest change of the tensors of an optimizer since it stepped last that is not on its way to the host; what
        # names a tensor, which waits for a device; and whether it may have been put back.
        self._change: tuple[Tensor, Callable[[], str], bool] | None = None
        # Looks at counted writes of others.
        self._writes_seen = 0
        self._handles = (
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_step),
        )

    def close(self) -> None:
        """Take the hooks away, and let go of the memory that was read."""
        for handle in self._handles:
            handle.remove()
        self._optimizers.clear()
        self._looks, self._change = LateLooks(), None

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Look, and raise what it refuses again at each later look: a loop may catch it, and go on."""
        if self._refusal:
            raise LearnerError(self._refusal)
        try:
            yield
        except LearnerError as error:
            self._refusal = str(error)
            self._refuse(error)
            raise

    def check(self, has_orders: bool) -> None:
        """Look at the model at a step boundary, before anything of it is sent, or changed by a version.

        has_orders: something may be. Else samples of a device are left to the next look: there each is a launch.

        Raises LearnerError: one was loaded, replaced or resized since `attach`, or an optimizer trains a copy of it.
        """
        with self._refusing():
            self._check_model()
            self._still.check(self._steps.told)
            self._states.check()
            if self._steps.tell(filter(None, self._optimizers.values())):
                self._still.begin_again()
            self.check_writes(is_sampled=has_orders or next((weight.is_cpu for weight in self._weights), True))
            if self._written:
                # The first step was made by no optimizer that calls hooks: a loop's own arithmetic, or a compiled step.
                self._compare(is_trained=True)
            self._hear()
            for record in filter(None, self._optimizers.values()):
                if record.sample is not None and not record.is_stepping and not record.is_followed(self._steps.told):
                    record.note(is_step=True)  # a replay of a captured step counts no writes

    def note_writes(self, versions: int) -> None:
        """Say how many versions this learner has written into the parameters so far."""
        if versions == self._versions:
            return
        self._versions = versions
        self._still.note_writes()
        if self._written:
            self._written = [sample_of(tensor) for tensor in self._weights]
        for record in filter(None, self._optimizers.values()):
            if record.sample is not None:
                record.note(is_step=True)  # a write to the local part of a sharded tensor is not counted

    def _places_now(self) -> TensorPlaces:
        merge_tensors = set(self._tensors.followed.values())
        modules = [*self._tensors.model.modules()]
        holders: list[dict[str, Any]] = [
            holder for module in modules for holder in (module._parameters, module._modules)
        ]
        holders += [module._buffers for module in modules if not merge_tensors.isdisjoint(module._buffers.values())]
        return TensorPlaces(holders)

    def _check_forms(self) -> None:
        if difference := self._forms.difference():
            number, before, now = difference
            name = [*self._names.values()][number]
            raise LearnerError(f"{name!r} is {now} now, at attach() it was {before}. {REMEDY}")

    def _check_model(self) -> None:
        self._check_forms()
        if self._places.are_same:
            return
        # The same tensors may be set again, as sharding does around a forward pass.
        check_not_replaced(self._tensors)
        present = self._tensors.present()
        own_names = [name for name in present if self._present.get(name) in self._names]
        if strays := [name for name in own_names if present[name] is not self._present[name]]:
            raise LearnerError(
                f"{strays[0]!r} was tied to {self._names[self._present[strays[0]]]!r} at attach(), and is another "
                f"tensor now: this region would have it alone. {REMEDY}"
            )
        new = [name for name in present if present[name].requires_grad and name not in self._present]
        if new:
            raise LearnerError(
                f"the model has {len(new)} parameters that it had not at attach(), such as {new[0]!r}: this region "
                f"would have them alone. {REMEDY}"
            )
        self._places = self._places_now()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or is_capturing():
            return
        # After a refusal the process may go on with another model.
        if not self._refusal or not self._names.keys().isdisjoint(parameters_of(optimizer)):
            with self._refusing():
                self._look_before_step(optimizer)

    def _look_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        record = self._record_of(optimizer)
        # A step may call that of its base class, of which hooks tell, too.
        if record is None or (record.is_stepping and is_inside_step()):
            return
        self._check_forms()
        is_torn, record.is_stepping = record.is_stepping, True
        is_inner = any(sibling.is_stepping for sibling in record.siblings) and is_inside_step()
        if COPY_LOOKS & {record.steps + 1, record.steps + 2}:
            record.before = {name: sample_of(tensor) for name, tensor in record.tensors.items()}
        record.counted_steps = self._counted_steps()
        self._states.check()
        if self._written:
            self._compare(is_trained=False)
        elif is_torn:
            record.tear()
        elif not is_inner:  # else what the optimizer around it writes is of a step as well
            self._check_record(record)
        if record.sample is None:
            record.note()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        record = None if torch.compiler.is_compiling() else self._optimizers.get(optimizer)
        if record is None:
            self._note_beside(optimizer)
            return
        if is_capturing():
            record.is_captured = True
            return
        with self._refusing():
            self._look_after_step(optimizer, record)

    def _note_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer of something else than the model, that `attach` has not named already."""
        own = self._own_tensors
        values = [tensor for tensor in parameters_of(optimizer) if tensor.requires_grad and tensor not in own]
        if optimizer in self._optimizers and values:
            self._steps.stepped_beside(optimizer, sum(map(Tensor.numel, values)))

    def _look_after_step(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        writes = record.writes
        if (change := record.torn_change()) > FAR:
            self._judge(partial(str, record.name), change)
        record.note(is_step=True)
        self._steps.moves += record.writes != writes
        untold_steps = record.untold_steps if record.told_steps == self._steps.told else 0
        record.untold_steps, record.told_steps = untold_steps + record.is_stepping, self._steps.told
        for sibling in record.siblings:
            if sibling.sample is not None:
                sibling.note(is_step=True)
        self._steps.stepped(record.untold_steps)
        record.steps += record.is_stepping  # a step may call that of its base class, see above
        record.is_stepping = False
        self._states.stepped(optimizer)
        if self._step_optimizer not in (None, optimizer, *inner_of(optimizer)):
            self._check_counted(optimizer, record)
        if record.steps in COPY_LOOKS:
            self._look_at_states(optimizer, record)

    def _counted_steps(self) -> int:
        record = None if self._step_optimizer is None else self._optimizers.get(self._step_optimizer)
        return 0 if record is None else record.steps

    def _check_counted(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        """Refuse an optimizer that trains in place of the one whose steps are counted. One around that steps it, too:
        torchtitan's container is an optimizer itself."""
        counted_tensors = set() if self._step_optimizer is None else set(parameters_of(self._step_optimizer))
        is_in_place = not counted_tensors.isdisjoint(record.tensors.values())
        if is_in_place and record.counted_steps == self._counted_steps():
            raise LearnerError(
                f'{kind_of(optimizer)} makes a step, and attach(step="auto") counts those of another optimizer: give '
                "attach() the one that trains, after it was made"
            )

    def _record_of(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord | None:
        """Return what is known of an optimizer; look at it when it is new, or has other parameters than before."""
        parameters, holding = parameters_of(optimizer), self._holdings.get(optimizer, ())
        is_same = len(holding) == len(parameters) and all(map(is_, parameters, holding))
        if optimizer in self._optimizers and is_same and not any(map(_TRAINS, self._constants)):
            return self._optimizers[optimizer]
        # By the model as it is now: a layer that is unfrozen or new is in it, but is not followed.
        own_names = {parameter: name for name, parameter in self._tensors.present().items()}
        strangers = [parameter for parameter in parameters if parameter in own_names.keys() - self._names.keys()]
        trainees = [parameter for parameter in strangers if parameter.requires_grad]
        if alone := [own_names[parameter] for parameter in trainees if is_lazy(parameter) or parameter.numel()]:
            check_not_replaced(self._tensors)
            raise LearnerError(
                f"an optimizer trains {len(alone)} parameters of the model that attach() does not follow, such as "
                f"{alone[0]!r}: then they were frozen, or absent, or no optimizer that attach() was given held them. "
                f"This region would train them alone. {REMEDY}"
            )
        tensors = {self._names[parameter]: parameter for parameter in parameters if parameter in self._names}
        if tensors:
            check_kind(optimizer)
        self._optimizers[optimizer] = record = OptimizerRecord(tensors, self._renormed) if tensors else None
        self._holdings[optimizer] = parameters
        for sibling in filter(None, self._optimizers.values()):
            if record is not None and sibling is not record and not sibling.tensors.keys().isdisjoint(tensors):
                record.siblings.append(sibling)
                sibling.siblings.append(record)
        # One without values trains nothing: whether it takes a gradient changes nothing.
        self._constants.update(set(strangers) - set(trainees))
        return self._optimizers[optimizer]

    def _compare(self, *, is_trained: bool) -> None:
        """Compare all values with what `attach` wrote, just before the first step of an optimizer.

        is_trained: the first step was made already; then only a model that is far from what it was counts.
        """
        samples, self._written = self._written, []
        pairs = [(sample_of(tensor), sample) for tensor, sample in zip(self._weights, samples, strict=True)]
        counts = [(new != old).sum() * ~(torch.dist(new, old) <= NOISE * old.norm()) for new, old in pairs]
        differing = [
            n * ~is_constrained(sample, value, by_shrinking=tensor in self._renormed)
            for tensor, n, (value, sample) in zip(self._weights, counts, pairs, strict=True)
        ]
        count = stack(differing).sum()
        if not is_trained:
            names = [*self._weights.values()]
            write_counts = [n * (tensor not in self._renormed) for tensor, n in zip(self._weights, counts, strict=True)]
            self._note_change(
                stack(write_counts).sum().clamp(max=TOLD), lambda: next(compress(names, map(int, write_counts)))
            )
        else:
            distance = stack((value - sample).square().sum() for value, sample in pairs).sum()
            length = stack(sample.square().sum() for _, sample in pairs).sum()
            count = count * (distance > FAR_AT_FIRST**2 * length)
        self._looks.note(count, 0.0, partial(self._judge_values, differing))
        self._hear()

    def _judge_values(self, differing: list[Tensor], count: float) -> None:
        """Say that values are not as `attach` wrote them. differing: how many, by tensor."""
        if not count:
            return
        names = [name for name, number in zip(self._weights.values(), differing, strict=True) if int(number)]
        raise LearnerError(
            f"{len(names)} of {len(differing)} tensors are not as attach() wrote them, such as {names[0]!r}: "
            "weights were loaded or drawn anew before the first step, and would be merged as if they had been trained. "
            f"{REMEDY}. What forward passes write, such as a codebook, is a buffer for attach(buffers=)"
        )

    def _check_writes(self, record: OptimizerRecord) -> bool:
        """Did somebody write to parameters since the last step: a load, a constraint, averages swapped in and out?"""
        if record.is_captured:
            # A capture counts writes and makes none; its replays make them and count none.
            record.is_captured = False
            record.note()
            return False
        writes = record.count_writes()
        if record.sample is None or writes == record.writes:
            return False
        names, at = [*record.tensors, record.name], record.largest
        tensors = [*record.tensors.values(), None]
        rows = [row for row in zip(names, writes, record.writes, tensors, strict=True) if row[1] != row[2]]
        foreign = [row for row in rows if row[3] not in self._renormed]
        name = partial(str, (foreign or rows)[0][0])
        # Averages, or a climb, in and out again; or `model.to()`.
        may_be_restored = not foreign or writes[-1] != record.writes[-1] or writes[at] != record.writes[at]
        change = record.change()
        self._writes_seen += 1
        if self._writes_seen <= LOOKS_WAITED:
            self._judge(name, float(change), may_be_restored=may_be_restored)
        else:
            self._note_change(change, name, may_be_restored=may_be_restored)
        return True

    def _check_record(self, record: OptimizerRecord, *, is_sampled: bool = True) -> None:
        """Look for writes since the last step; with samples also for those that no count tells."""
        if not self._check_writes(record) and is_sampled and record.is_followed(self._steps.told):
            for change, name in record.look():
                self._note_change(change, name)
        self._hear()

    def _note_change(self, change: Tensor, name: Callable[[], str], *, may_be_restored: bool = True) -> None:
        """Judge a change; one on a device when it has come, with those that follow until it may be sent."""
        if not has_streams(change.device):
            self._judge(name, float(change), may_be_restored=may_be_restored)
        elif self._change is None:
            self._change = change, name, may_be_restored
        else:
            before, name_before, might_be_restored = self._change
            change = torch.maximum(before, change.to(before.device))
            is_restored = may_be_restored and might_be_restored
            self._change = change, lambda: name_before() if float(before) else name(), is_restored

    def _hear(self) -> None:
        """Judge what has come from a device, and send the next change on its way."""
        self._looks.hear()
        if not self._looks.coming:
            self._send()

    def _send(self) -> None:
        if self._change is not None:
            change, name, may_be_restored = self._change
            self._change = None
            self._looks.note(change, FAR, partial(self._judge, name, may_be_restored=may_be_restored))

    def pending_looks(self) -> tuple[LateLook, ...]:
        """The looks of a device that were ordered so far, and may refuse what the model holds now."""
        self._send()
        return self._looks.coming

    def _judge(self, name: Callable[[], str], change: float, *, may_be_restored: bool = False) -> None:
        """Say that a tensor was changed by something else than its optimizer, by so many of its lengths."""
        if change > FAR:
            raise LearnerError(
                f"{name()!r}, and others, were changed between two steps by something else than their optimizer: "
                "weights were loaded, drawn anew or scaled, or mixed with a copy (averages, Lookahead), and would be "
                f"merged as if they had been trained. {LOADED}"
            )
        if not self._has_warned and not (may_be_restored and change <= NOISE):
            self._has_warned = True
            check_apart(self._tensors.followed)  # one that was tied by `.data` since
            self._warn(
                f"{name()!r} was written to by something else than its optimizer. What is written is merged as if it "
                "had been trained: load weights before attach()"
            )

    def check_writes(self, *, is_sampled: bool = True) -> None:
        """Raise LearnerError: weights were loaded since the last step of an optimizer. A loop may leave with that."""
        for record in self._optimizers.values():
            if record is not None and not record.is_stepping:
                self._check_record(record, is_sampled=is_sampled)

    def foreign_write(self) -> str:
        """Say what was written to a tensor since the last step, if it is still there. Waits for the device."""
        # What a loop writes after each step, such as a constraint, is in what it has sent already.
        for record in filter(None, self._optimizers.values()):
            limit = FAR if self._has_warned else NOISE
            if record.is_followed(self._steps.told) and float(record.change()) > limit:
                return (
                    f"{record.name!r} was written to after the last step, such as by a load of the best weights: that "
                    "is not merged, nor are the steps that no merge has taken yet"
                )
        return ""

    def _look_at_states(self, optimizer: torch.optim.Optimizer, record: OptimizerRecord) -> None:
        likeness = record.likenesses(optimizer, self._names)
        if likeness:
            greatest = stack(likeness.values()).nan_to_num(0.0, 0.0, 0.0).max()
            self._looks.note(greatest, COPY_LIKENESS, partial(self._judge_likeness, likeness))

    def _judge_likeness(self, likeness: dict[tuple[str, str], Tensor], greatest: float) -> None:
        if greatest > COPY_LIKENESS:
            (name, key), _ = max(likeness.items(), key=lambda entry: float(entry[1]))
            kinds = sorted({kind_of(optimizer) for optimizer, record in self._optimizers.items() if record})
            raise LearnerError(
                f"the optimizer ({', '.join(kinds)}) trains a copy of {name!r}, its state {key!r}: it would take back "
                "a part of each merge. Use one without (AdamW with a schedule, not a schedule-free one), or give "
                "float32 masters to attach(..., masters={name: tensor})"
            )
