"""The state that a restarted learner can't get from the run: optimizer, place in the data and on the schedule.

Parameters are not in it: a new incarnation takes all of them from the global state. A checkpoint is one
safetensors file. Everything else is JSON in its metadata, with a SHA-256 over both. Never pickle. The
training thread copies the tensors, those of a GPU by its own copy engine, which nobody waits for here (D-094). A
background thread makes the memory for that before the first time, and then writes a temporary name, fsyncs, renames,
fsyncs the folder. The last two are kept, and a damaged one falls back to the one before. A full disk is logged and
never stops training. Each of several ranks writes its own part (`learner.checkpointing`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from diloco_node.atomic_file import sync_folder
from diloco_node.errors import LearnerError
from diloco_node.learner.data_positions import check_workers
from diloco_node.learner.generators import generator_states, restore_generators
from diloco_node.learner.layouts.capture import relax_capture
from diloco_node.learner.layouts.device import has_streams, record_event
from diloco_node.learner.layouts.page_locked import page_locked
from diloco_node.learner.layouts.tensors import is_sharded, local_part
from diloco_node.learner.leaving import failure
from diloco_node.learner.nested import flatten, unflatten
from diloco_node.learner.optimizer_parts import Json, Kept, OptimizerParts
from diloco_node.learner.schedules import lowers_rates, place_schedule
from diloco_node.storage.durable import make_folder

FORMAT: Final = 2
WRITER_STOP_S: Final = 60.0
BYTES_PER_S_MIN: Final = 1e8
"""A disk that writes so much is waited for at the end, however large the state is."""

DAMAGED: Final = ".damaged"

_STATEFUL: Final = "stateful"
_GENERATORS: Final = "rng"
"""Prefixes of the names of their tensors."""

log = logging.getLogger("diloco_node.learner")


class Stateful(Protocol):
    """Part of a training loop that a checkpoint keeps: a data loader's position, a schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Nested values: see `learner.nested`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take what `state_dict` gave."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where the learner was. step, tokens: of that incarnation. Another manifest is another model."""

    manifest_digest: str
    incarnation: int
    global_step: int
    step: int
    tokens: int


NO_PROGRESS: Final = TrainingProgress("", incarnation=0, global_step=0, step=0, tokens=0)


@dataclass(frozen=True, slots=True, order=True)
class RankPlace:
    """A rank, and how many there are."""

    rank: int
    ranks: int


ALONE: Final = RankPlace(0, 1)


@dataclass(frozen=True, slots=True)
class FileName:
    """Name of a checkpoint's file: incarnation, step, and among several ranks the one that wrote it."""

    incarnation: int
    step: int
    place: RankPlace = ALONE

    @property
    def age(self) -> tuple[int, int]:
        """Greater for a newer one."""
        return self.incarnation, self.step

    @property
    def text(self) -> str:
        """As it stands in the folder."""
        of = "" if self.place == ALONE else f"-{self.place.rank:05d}-of-{self.place.ranks:05d}"
        return f"learner-{self.incarnation:08d}-{self.step:012d}{of}.safetensors"

    @classmethod
    def parse(cls, text: str) -> FileName | None:
        """The inverse of `text`; None if it is no such name."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        incarnation, step, rank, ranks = match.groups()
        place = ALONE if rank is None else RankPlace(int(rank), int(ranks))
        return cls(int(incarnation), int(step), place)


_NAME: Final = re.compile(r"learner-(\d{8,})-(\d{12,})(?:-(\d{5})-of-(\d{5}))?\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in memory: tensors, on the CPU, and what of optimizer, `stateful` and generators is none."""

    progress: TrainingProgress
    tensors: dict[str, Tensor]
    optimizer: Json
    stateful: dict[str, Any]
    generators: Json = field(default_factory=dict)

    def document(self) -> str:
        """Everything that is no tensor, as JSON."""
        fields = {
            "format": FORMAT,
            "progress": {name: getattr(self.progress, name) for name in TrainingProgress.__slots__},
            "optimizer": self.optimizer,
            "stateful": self.stateful,
            "generators": self.generators,
        }
        return json.dumps(fields, sort_keys=True, allow_nan=False)

    @classmethod
    def from_parts(cls, document: str, tensors: dict[str, Tensor]) -> Checkpoint:
        """From `document` and tensors. Raises LearnerError: another format. KeyError, TypeError, ValueError."""
        fields = json.loads(document)
        if fields["format"] != FORMAT:
            raise LearnerError(f"format {fields['format']}, expected {FORMAT}")
        progress, generators = TrainingProgress(**fields["progress"]), fields.get("generators", {})
        return cls(progress, tensors, fields["optimizer"], fields["stateful"], generators)

    def kept(self) -> Kept:
        """Return its part of the optimizer."""
        return Kept.from_document(self.optimizer, self.tensors)

    def restore(
        self,
        optimizer: OptimizerParts | None,
        stateful: Mapping[str, Stateful],
        *,
        rng: bool,
        siblings: Sequence[Kept] = (),
    ) -> None:
        """Put it back.

        rng: also the random generators; not on ranks other than the one that saved.
        siblings: what other ranks have kept of the optimizer.

        Raises LearnerError: the optimizer, or one of the stateful parts, is not what was saved.
        """
        try:
            if optimizer is not None and self.optimizer:
                optimizer.restore([self.kept(), *siblings], is_lowered=any(map(lowers_rates, stateful.values())))
            for name, component in stateful.items():
                if name in self.stateful:
                    state = unflatten(self.stateful[name], self.tensors, cache(partial(_own_tensors, name, component)))
                    check_workers(name, component, state)
                    component.load_state_dict(place_schedule(component, state, stateful.values()))
            if news := sorted(stateful.keys() - self.stateful.keys()):
                spares = sorted(self.stateful.keys() - stateful.keys())
                hint = f"; it has {', '.join(map(repr, spares))}, which attach() was not given" if spares else ""
                log.warning("the checkpoint has no %s: begun anew%s", ", ".join(map(repr, news)), hint)
            if rng:  # last, for what was restored may have drawn
                restore_generators(unflatten(self.generators, self.tensors))
        except (ValueError, TypeError, LookupError, RuntimeError, AssertionError, AttributeError) as error:
            raise LearnerError(
                f"the learner's checkpoint at step {self.progress.global_step} does not fit this training script "
                f"({error}): remove the folder learner/checkpoints to begin with a fresh optimizer"
            ) from error


class CheckpointWriter:
    """Writes one rank's checkpoints into a folder, one at a time, in the background.

    warn: tells people, from the thread, what no later checkpoint mends; once.

    Attributes:
        written: age of what was saved last, when it is on disk; None until then, and if it could not be written.
        took_s: seconds that the last one took, with the copying; infinite if it could not be written. Before the first:
            as expected.
    """

    def __init__(
        self,
        folder: Path,
        place: RankPlace = ALONE,
        *,
        took_s: float = 0.0,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.written: tuple[int, int] | None = None
        self.took_s = took_s
        self._folder = folder
        self._place = place
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensor] = {}
        self._warn, self._has_told = warn, False

    @property
    def copies(self) -> Collection[Tensor]:
        """Copies that the last one is written from."""
        return self._copies.values()

    @property
    def is_busy(self) -> bool:
        """Whether the last one is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        progress: TrainingProgress,
        optimizer: OptimizerParts | None,
        stateful: Mapping[str, Stateful],
        *,
        whole: tuple[int, int] | None = None,
        is_waiting: bool = False,
    ) -> bool:
        """Copy everything now, write it later. Not while `is_busy`: the copies are reused.

        whole: see `write_checkpoint`. is_waiting: also for memory, which takes seconds where there is none yet.

        Returns whether it was copied. If not, the memory for copies from a GPU is being made: ask again when not
        `is_busy`. Raises LearnerError: a state holds what can't be kept.
        """
        assert not self.is_busy
        begun_s = time.monotonic()
        self.written = None
        moments = None if optimizer is None else optimizer.keep()
        tensors = {} if moments is None else moments.tensors
        generators = flatten(_GENERATORS, generator_states(), tensors)
        states = {name: _state_of(name, component, tensors) for name, component in stateful.items()}
        tensors = {name: local_part(tensor) for name, tensor in tensors.items()}
        absent = {
            name: tensor
            for name, tensor in tensors.items()
            if has_streams(tensor.device) and not self._has_room(name, tensor)
        }
        if absent:
            shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in absent.items()}
            self._begin(self._make_room, shapes)
            if not is_waiting:
                return False
            self.wait()
        checkpoint = Checkpoint(
            progress=progress,
            tensors={name: self._copy(name, tensor) for name, tensor in tensors.items()},
            optimizer={} if moments is None else moments.document(),
            stateful=states,
            generators=generators,
        )
        self._copies = checkpoint.tensors
        self._begin(self._write, checkpoint, whole, _copied(tensors.values()), begun_s)
        return True

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        self._thread = threading.Thread(target=work, args=arguments, name="diloco-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was saved last is on disk."""
        if self._thread is None:
            return
        size = sum(tensor.nbytes for tensor in self._copies.values())
        self._thread.join(WRITER_STOP_S + size / BYTES_PER_S_MIN)
        if self.is_busy:
            log.warning("a checkpoint of %d MB is not on disk yet: nobody waits for it any longer", size >> 20)

    def _has_room(self, name: str, tensor: Tensor) -> bool:
        before = self._copies.get(name)
        return before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype

    def _make_room(self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        relax_capture()
        self._copies |= {name: page_locked(*shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Into the memory of the last copy where it fits: fresh pages cost more than the copying."""
        before = self._copies[name] if self._has_room(name, tensor) else None
        if before is None:
            before = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return before.copy_(tensor, non_blocking=before.is_pinned())

    def _write(
        self,
        checkpoint: Checkpoint,
        whole: tuple[int, int] | None,
        events: Sequence[Any],
        begun_s: float,
    ) -> None:
        try:
            if events:
                relax_capture()
            for event in events:
                event.synchronize()
            write_checkpoint(self._folder, checkpoint, self._place, whole=whole)
            self.took_s = time.monotonic() - begun_s
            self.written = (checkpoint.progress.incarnation, checkpoint.progress.step)
        except Exception as error:  # noqa: BLE001 - a thread that dies in silence leaves a run without checkpoints
            self.took_s = math.inf  # a disk that refuses is not to be asked every two seconds
            if isinstance(error, OSError | SafetensorError | LearnerError) or self._has_told:
                log.warning("learner checkpoint not written, training goes on: %s", error)
            else:
                self._has_told = True
                self._warn(f"no checkpoint of this learner can be written, training goes on: {failure(error).reason}")


def _state_of(name: str, component: Stateful, tensors: dict[str, Tensor]) -> Any:
    """The state of a part of the loop, as `nested.flatten`. Raises LearnerError: it gives none that can be kept."""
    try:
        return flatten(f"{_STATEFUL}.{name}", component.state_dict(), tensors)
    except LearnerError:
        raise
    except Exception as error:
        raise LearnerError(
            f"state_dict() of stateful {name!r} fails with {failure(error).reason}. Mend it, or leave this part out "
            "of attach(stateful=...)"
        ) from error


def _own_tensors(name: str, component: Stateful) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    with contextlib.suppress(LearnerError):  # a state that comes with the first step
        _state_of(name, component, tensors)
    # A module copies into its own memory: a second copy on its device may not fit there.
    return {key: value for key, value in tensors.items() if is_sharded(value) or not isinstance(component, nn.Module)}


def _copied(tensors: Iterable[Tensor]) -> list[Any]:
    """Return an event for each GPU that copies: it comes when the copies that were ordered so far are made.

    The loop's later orders wait on the device, so an optimizer's next step does not change what is copied.
    """
    return [record_event(device) for device in {tensor.device for tensor in tensors if has_streams(tensor.device)}]


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, place: RankPlace = ALONE, *, whole: tuple[int, int] | None = None
) -> Path:
    """Write one checkpoint durably; before it, remove all but one of this place, and older ones of other layouts.

    So the disk never holds more than two, the one that is being written among them.

    whole: age of the newest one of which all ranks have files: it stays. One rank may fail to write, time after time.

    Raises OSError, SafetensorError: the disk. LearnerError: the optimizer state is not finite; a restart from it would
    only diverge again.
    """
    for name, tensor in checkpoint.tensors.items():
        is_optimizers = not name.startswith(f"{_STATEFUL}.")
        if is_optimizers and tensor.is_floating_point() and not math.isfinite(float(tensor.float().sum())):
            raise LearnerError(f"optimizer state {name} is not finite")
    text = checkpoint.document()
    make_folder(folder)
    _remove_partial(folder, place)  # of a process that was killed
    new = FileName(checkpoint.progress.incarnation, checkpoint.progress.step, place)
    _make_way(folder, new, whole)
    path = folder / new.text
    partial = path.with_suffix(".partial")
    try:
        save_file(checkpoint.tensors, partial, {"diloco": text, "sha256": _digest(text, checkpoint.tensors)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError):
        _remove_partial(folder, place)  # a full disk is not to stay full because of it
        raise
    sync_folder(folder)
    return path


def _make_way(folder: Path, new: FileName, whole: tuple[int, int] | None) -> None:
    """Remove what is not needed beside the new one, which is written next. Raises OSError."""
    names = newest_first(folder)
    own_names = [name for name in names if name.place == new.place and name != new]
    stays = [name for name in own_names if name.age == whole] or own_names[:1]
    for old in own_names:
        if old not in stays:
            (folder / old.text).unlink()
    oldest = whole or (stays[-1].age if stays else None)
    if oldest is not None:
        # Of a layout before this one: nobody begins with those any more. Every rank looks, for each host has its disk.
        for old in names:
            if old.place.ranks != new.place.ranks and old.age < oldest:
                (folder / old.text).unlink(missing_ok=True)


def read_usable(path: Path, manifest_digest: str) -> Checkpoint | None:
    """A file's checkpoint; None, with a warning, if it is damaged or of another model. A damaged one is set aside."""
    try:
        checkpoint = read_checkpoint(path)
    except OSError as error:
        log.warning("passing over a checkpoint that can't be read: %s", error)
        return None
    except LearnerError as error:
        log.warning("passing over a damaged checkpoint, which is kept as *%s: %s", DAMAGED, error)
        _set_aside(path)
        return None
    if checkpoint.progress.manifest_digest == manifest_digest:
        return checkpoint
    log.warning("passing over %s: it is of another model", path)
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one file. Raises LearnerError: it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        text = metadata["diloco"]
        if _digest(text, tensors) != metadata["sha256"]:
            raise LearnerError(f"{path}: the SHA-256 does not match")
        return Checkpoint.from_parts(text, tensors)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise LearnerError(f"{path}: {error}") from error


def _set_aside(path: Path) -> None:
    """Keep it for people, where the next checkpoint would remove it. At most one stays, lest a bad disk fills up."""
    with contextlib.suppress(OSError):
        for old in path.parent.glob(f"learner-*{DAMAGED}"):
            old.unlink(missing_ok=True)
        path.replace(path.with_name(path.name + DAMAGED))


def _remove_partial(folder: Path, place: RankPlace) -> None:
    """Remove what was never finished; there is one writer at a time for a place."""
    with contextlib.suppress(OSError):
        for path in folder.glob("learner-*.partial"):
            name = FileName.parse(path.with_suffix(".safetensors").name)
            if name is None or name.place == place:
                path.unlink(missing_ok=True)


def newest_first(folder: Path) -> list[FileName]:
    """By incarnation, then step, which only grow; clocks don't."""
    with contextlib.suppress(OSError):
        names = [FileName.parse(path.name) for path in folder.glob("learner-*.safetensors")]
        return sorted((name for name in names if name is not None), key=lambda name: name.age, reverse=True)
    return []


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
