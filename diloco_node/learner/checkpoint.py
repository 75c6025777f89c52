"""What a restarted learner can't get from the run: optimizer state, where it was in the data and on the schedule.

Parameters are not in it: a new incarnation takes all of them from the global state. One safetensors file per
checkpoint, with everything that is no tensor as JSON in its metadata, and a SHA-256 over both. Never pickle. The
training thread copies the tensors; a background thread writes a temporary name, fsyncs, renames, fsyncs the folder. The
last two are kept, and a damaged one falls back to the one before. A full disk is logged and never stops training.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from diloco_node.errors import LearnerError
from diloco_node.learner.nested import flatten, unflatten
from diloco_node.learner.ranks import Ranks
from diloco_node.storage.durable import make_folder, sync_folder

FORMAT: Final = 1
KEPT: Final = 2
WRITER_STOP_S: Final = 60.0

_STATEFUL: Final = "stateful"
"""What the names of its tensors begin with."""

log = logging.getLogger("diloco_node.learner")

Json = dict[str, Any]


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
    """Where the learner was.

    Attributes:
        manifest_digest: of the fragments; another one is another model, and the checkpoint is not for it.
        incarnation: that wrote it. global_step: on the schedule. step, tokens: of that incarnation.
    """

    manifest_digest: str
    incarnation: int
    global_step: int
    step: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint in memory.

    Attributes:
        tensors: of the optimizer, the random generator, and `stateful`, CPU.
        optimizer: what of the optimizer is no tensor. stateful: per name, what of it is no tensor.
    """

    progress: TrainingProgress
    tensors: dict[str, Tensor]
    optimizer: Json
    stateful: dict[str, Any]

    def document(self) -> str:
        """Everything that is no tensor, as JSON."""
        parts = {
            "format": FORMAT,
            "progress": {name: getattr(self.progress, name) for name in TrainingProgress.__slots__},
            "optimizer": self.optimizer,
            "stateful": self.stateful,
        }
        return json.dumps(parts, sort_keys=True, allow_nan=False)

    def body(self) -> bytes:
        """The tensors, as safetensors."""
        data: bytes = save(self.tensors)
        return data

    @classmethod
    def from_parts(cls, document: str, body: bytes | dict[str, Tensor]) -> Checkpoint:
        """From `document` and `body`, or the tensors themselves.

        Raises:
            LearnerError: another format. KeyError, TypeError, ValueError, SafetensorError: not ours.
        """
        parts = json.loads(document)
        if parts["format"] != FORMAT:
            raise LearnerError(f"format {parts['format']}, expected {FORMAT}")
        tensors = load(body) if isinstance(body, bytes) else body
        return cls(TrainingProgress(**parts["progress"]), tensors, parts["optimizer"], parts["stateful"])

    def restore(self, optimizer: torch.optim.Optimizer | None, stateful: Mapping[str, Stateful], *, rng: bool) -> None:
        """Put it back.

        Args:
            rng: also torch's random generator on the CPU; not on ranks other than the one that saved.

        Raises:
            LearnerError: the optimizer, or one of the stateful parts, is not what was saved.
        """
        try:
            if optimizer is not None and self.optimizer:
                optimizer.load_state_dict(_unflatten(self.tensors, self.optimizer))
            for name, part in stateful.items():
                if name in self.stateful:
                    part.load_state_dict(unflatten(self.stateful[name], self.tensors))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise LearnerError(
                f"the learner's checkpoint at step {self.progress.global_step} does not fit this training script "
                f"({error}): remove the folder learner/checkpoints to begin with a fresh optimizer"
            ) from error
        if rng and "rng" in self.tensors:
            torch.set_rng_state(self.tensors["rng"])


class CheckpointWriter:
    """Writes checkpoints into a folder, one at a time, in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread: threading.Thread | None = None
        self._copies: dict[str, Tensor] = {}

    @property
    def is_busy(self) -> bool:
        """Whether the last one is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self, progress: TrainingProgress, optimizer: torch.optim.Optimizer | None, stateful: Mapping[str, Stateful]
    ) -> None:
        """Copy everything now, write it later. Not while `is_busy`: the copies are reused.

        Raises:
            LearnerError: a state holds what can't be kept.
        """
        assert not self.is_busy
        tensors, rest = ({}, {}) if optimizer is None else _flatten(optimizer.state_dict())
        tensors["rng"] = torch.get_rng_state()
        kept = {name: flatten(f"{_STATEFUL}.{name}", part.state_dict(), tensors) for name, part in stateful.items()}
        checkpoint = Checkpoint(
            progress=progress,
            tensors={name: self._copy(name, tensor) for name, tensor in tensors.items()},
            optimizer=rest,
            stateful=kept,
        )
        self._copies = checkpoint.tensors
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="diloco-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was saved last is on disk."""
        if self._thread is not None:
            self._thread.join(WRITER_STOP_S)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Into the memory of the last copy where it fits: fresh pages cost more than the copying."""
        before = self._copies.get(name)
        if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
            before = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return before.copy_(tensor.detach())

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            write_checkpoint(self._folder, checkpoint)
        except (OSError, SafetensorError, LearnerError) as error:
            log.warning("learner checkpoint not written, training goes on: %s", error)


class Checkpointing:
    """The checkpoints of one learner: when they are written, and the one it begins with.

    Args:
        optimizer, stateful: what they hold. every_s: seconds from one to the next; 0 for none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer | None, stateful: Mapping[str, Stateful], *, every_s: float
    ) -> None:
        self._optimizer = optimizer
        self._stateful = stateful
        self._every_s = every_s
        self._writer: CheckpointWriter | None = None
        self._saved_at_s = time.monotonic()

    def resume(self, state_dir: Path, manifest_digest: str, ranks: Ranks) -> int:
        """Optimizer and `stateful` from the region's last checkpoint, on every rank; parameters come from the run.

        Returns:
            The step on the schedule where it was written; 0 if there is none.

        Raises:
            LearnerError: the checkpoint does not fit this training script.
        """
        if self._every_s <= 0:
            return 0
        found: Checkpoint | None = None
        if ranks.is_first:
            folder = state_dir / "learner" / "checkpoints"
            self._writer = CheckpointWriter(folder)
            found = read_newest(folder, manifest_digest)
        document = ranks.share_bytes(b"" if found is None else found.document().encode())
        body = ranks.share_bytes(b"" if found is None else found.body())
        if not document:
            return 0
        found = found or Checkpoint.from_parts(document.decode(), body)
        found.restore(self._optimizer, self._stateful, rng=ranks.is_first)
        log.info("optimizer and data position from the checkpoint at step %d", found.progress.global_step)
        return found.progress.global_step

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next one, and the last one is on disk."""
        is_time = time.monotonic() - self._saved_at_s >= self._every_s
        return is_time and self._writer is not None and not self._writer.is_busy

    def save(self, progress: TrainingProgress) -> None:
        """Copy everything now; it is written in the background. A state that can't be kept ends the checkpoints."""
        assert self._writer is not None
        self._saved_at_s = time.monotonic()
        try:
            self._writer.save(progress, self._optimizer, self._stateful)
        except LearnerError as error:
            log.warning("no checkpoints of this learner: %s", error)
            self._writer = None

    def save_now(self, progress: TrainingProgress) -> None:
        """Save, and wait until it is on disk; nothing where there are no checkpoints (a rank other than 0)."""
        self.wait()
        if self._writer is not None and self._writer.is_busy:
            log.warning("no checkpoint: the one before is still being written")
        elif self._writer is not None:
            self.save(progress)
            self.wait()

    def wait(self) -> None:
        """Until what was saved last is on disk."""
        if self._writer is not None:
            self._writer.wait()


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write one checkpoint durably, and remove all but the newest two.

    Raises:
        OSError, SafetensorError: the disk.
        LearnerError: the optimizer state is not finite; a restart from it would only diverge again.
    """
    for name, tensor in checkpoint.tensors.items():
        is_optimizers = not name.startswith(f"{_STATEFUL}.")
        if is_optimizers and tensor.is_floating_point() and not math.isfinite(float(tensor.float().sum())):
            raise LearnerError(f"optimizer state {name} is not finite")
    progress = checkpoint.progress
    text = checkpoint.document()
    make_folder(folder)
    _remove_partial(folder)  # of a process that was killed
    path = folder / f"learner-{progress.incarnation:08d}-{progress.step:012d}.safetensors"
    partial = path.with_suffix(".partial")
    try:
        save_file(checkpoint.tensors, partial, {"diloco": text, "sha256": _digest(text, checkpoint.tensors)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError):
        _remove_partial(folder)  # a full disk is not to stay full because of it
        raise
    sync_folder(folder)
    for old in _newest_first(folder)[KEPT:]:
        old.unlink()
    return path


def read_newest(folder: Path, manifest_digest: str) -> Checkpoint | None:
    """The newest whole checkpoint for this model, or None. Damaged ones are logged and passed over."""
    for path in _newest_first(folder):
        try:
            checkpoint = read_checkpoint(path)
        except (OSError, LearnerError) as error:
            log.warning("passing over a damaged checkpoint: %s", error)
            continue
        if checkpoint.progress.manifest_digest == manifest_digest:
            return checkpoint
        log.warning("passing over %s: it is of another model", path)
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one file.

    Raises:
        LearnerError: it is damaged.
    """
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


def _remove_partial(folder: Path) -> None:
    """Remove what was never finished; there is one writer at a time."""
    with contextlib.suppress(OSError):
        for path in folder.glob("learner-*.partial"):
            path.unlink(missing_ok=True)


def _newest_first(folder: Path) -> list[Path]:
    """By incarnation, then step, which only grow; clocks don't."""
    with contextlib.suppress(OSError):
        return sorted(folder.glob("learner-*.safetensors"), reverse=True)
    return []


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _flatten(state: Json) -> tuple[dict[str, Tensor], Json]:
    """An optimizer's `state_dict()` as tensors by name and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    rest: Json = {"state": {}, "param_groups": []}
    for index, values in state["state"].items():
        rest["state"][str(index)] = _split(f"state.{index}", values, tensors)
    for index, group in enumerate(state["param_groups"]):
        rest["param_groups"].append(_split(f"group.{index}", group, tensors))
    return tensors, rest


def _split(prefix: str, values: Json, tensors: dict[str, Tensor]) -> Json:
    plain: Json = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            tensors[f"{prefix}.{key}"] = value
        else:
            plain[key] = _as_json(f"optimizer {prefix}.{key}", value)
    return plain


def _unflatten(tensors: Mapping[str, Tensor], rest: Json) -> Json:
    state: dict[int, Json] = {int(index): dict(values) for index, values in rest["state"].items()}
    groups = [dict(group) for group in rest["param_groups"]]
    for name, tensor in tensors.items():
        kind, _, tail = name.partition(".")
        index, _, key = tail.partition(".")
        if kind == "state":
            state[int(index)][key] = tensor
        elif kind == "group":
            groups[int(index)][key] = tensor
    return {"state": state, "param_groups": groups}


def _as_json(what: str, value: Any) -> Any:
    """The value as JSON gives it back.

    Raises:
        LearnerError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise LearnerError(f"{what} can't be kept in a checkpoint: {error}; only tensors and JSON can") from error
