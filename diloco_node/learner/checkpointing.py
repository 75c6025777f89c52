"""When a learner's checkpoints are written, and which one its ranks begin with.

Each rank writes what it owns of the optimizer, and its own `stateful`; nothing is gathered for it. A checkpoint counts
when the files of all its ranks are there and whole. Ranks on other hosts have other disks: what a rank needs and does
not see comes from one that does, over the process group. A region that returns with other ranks takes the parts that
its new layout needs.

How often: what one costs, from the first copy to the last sync, may be COST_PART of the time. So a small model, whose
learners may die every few seconds, has one every few seconds, and a large one has one a minute.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load, save

from diloco_node.errors import LearnerError
from diloco_node.learner.checkpoint import (
    NO_PROGRESS,
    Checkpoint,
    CheckpointWriter,
    FileName,
    RankPlace,
    TrainingProgress,
    newest_first,
    read_checkpoint,
    read_usable,
)
from diloco_node.learner.generators import KeptGenerator, as_stateful
from diloco_node.learner.layouts.shard_map import ShardMap
from diloco_node.learner.layouts.tensors import ModelTensors, local_part
from diloco_node.learner.leaving import failure
from diloco_node.learner.loop_state import LoopState
from diloco_node.learner.model_state import unnoticed
from diloco_node.learner.optimizer_parts import OptimizerParts
from diloco_node.learner.ranks import Ranks
from diloco_node.learner.schedules import as_schedule
from diloco_node.learner.several_optimizers import inner_of, scaler_of
from diloco_node.storage.durable import remove_temporaries

COST_PART: Final = 0.01
"""Share of the time that copying and writing checkpoints may take."""

PAUSE_COST_PART: Final = 0.1
"""The same before pauses: an evaluation may be longer than the notice of a machine that is taken away."""

EVERY_MIN_S: Final = 2.0
"""More often brings back nothing: steps that no merge had taken are lost anyway, some ten of them."""

BYTES_PER_S: Final = 1e9
"""How fast the first one is expected to be written; the next ones as fast as the one before."""

MOMENT_BYTES: Final = 8
"""Bytes that AdamW keeps for a parameter."""

log = logging.getLogger("diloco_node.learner")


class Checkpointing:
    """The checkpoints of one rank of a learner.

    optimizer, stateful: what they hold; a gradient scaler that belongs to the optimizer, too. every_s: 0 for none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        stateful: Mapping[str, object],
        *,
        every_s: float,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.optimizer = optimizer
        # Kept already, with the settings of the script.
        members = [] if optimizer is None else [optimizer, *getattr(optimizer, "parts", ()), *inner_of(optimizer)]
        self.stateful = {
            name: as_schedule(as_stateful(name, item))
            for name, item in stateful.items()
            if not any(item is member for member in members) or _has_more(item)
        }
        if (scaler := scaler_of(optimizer)) is not None and scaler not in self.stateful.values():
            self.stateful["gradient scaler"] = scaler
        # What of the loop is not kept; None before `resume`, and where nothing is.
        self._loop_state: LoopState | None = None
        self._every_s = every_s
        self._warn = warn
        self._parts: OptimizerParts | None = None
        # None before `resume`, and where nothing is kept or no rank holds what another does: so it is on all of them.
        self._ranks: Ranks | None = None
        self._writer: CheckpointWriter | None = None
        self._saved_at_s = time.monotonic()
        self._whole: tuple[int, int] | None = None

    def resume(
        self, state_dir: Path, manifest_digest: str, ranks: Ranks, *, tensors: ModelTensors, shards: ShardMap
    ) -> TrainingProgress:
        """Optimizer and `stateful` from the region's last checkpoint, on every rank.

        Returns: where it was written; NO_PROGRESS if there is none.

        Raises LearnerError: the checkpoint does not fit this training script, or only some ranks want one.
        """
        wishes = ranks.all_bytes(b"1" if self._every_s > 0 else b"")
        if not all(wishes):
            if any(wishes):
                raise LearnerError("attach(checkpoint_every_s=0) on some ranks only: give all of them the same")
            return NO_PROGRESS
        folder = state_dir / "learner" / "checkpoints"
        with contextlib.suppress(OSError):  # before the ranks meet in the listing: none of them writes yet
            remove_temporaries(folder)
        if self.optimizer is not None:
            self._parts = OptimizerParts(self.optimizer, tensors, shards, ranks.rank)
        expected_s = MOMENT_BYTES * sum(local_part(tensor).numel() for tensor in tensors.names) / BYTES_PER_S
        self._writer = CheckpointWriter(folder, RankPlace(ranks.rank, ranks.size), took_s=expected_s, warn=self._warn)
        listing = json.dumps([name.text for name in newest_first(folder)]).encode()
        progress = NO_PROGRESS
        for group in _groups([_names(text) for text in ranks.all_bytes(listing)]):
            checkpoint = self._read(folder, manifest_digest, ranks, group)
            if checkpoint is not None:
                self._whole = next(iter(group)).age
                progress = checkpoint.progress
                names = ", ".join(["optimizer", *self.stateful] if self.optimizer is not None else self.stateful)
                log.info("from the checkpoint at step %d: %s", progress.global_step, names or "random generators")
                break
        if self._parts is not None:
            self._parts.begin()
        self._ranks = ranks if shards.copies() else None
        if ranks.is_first:
            self._loop_state = LoopState(tensors, self.stateful, self._warn, self.optimizer)
        return progress

    def _read(
        self, folder: Path, manifest_digest: str, ranks: Ranks, viewers: Mapping[FileName, int]
    ) -> Checkpoint | None:
        """Begin with one checkpoint; None on all ranks if one of its files is of no use.

        viewers: its files, by rank, and the rank that reads each: its writer, or the next that sees it (`_groups`).
        """
        checkpoints = {
            name: read_usable(folder / name.text, manifest_digest)
            for name, viewer in viewers.items()
            if viewer == ranks.rank
        }
        is_whole = all(checkpoint is not None for checkpoint in checkpoints.values())
        if not all(ranks.all_bytes(b"1" if is_whole else b"")):
            return None
        files: dict[FileName, Checkpoint] = {}
        for name, viewer in viewers.items():
            local = checkpoints.get(name)
            document = ranks.share_bytes(b"" if local is None else local.document().encode(), source=viewer)
            files[name] = local or Checkpoint.from_parts(document.decode(), {})
        if len({checkpoint.progress for checkpoint in files.values()}) > 1:
            log.warning("passing over a checkpoint whose files are not of one moment: %s", next(iter(files)).text)
            return None
        of_rank = {name.place.rank: name for name in files}
        # Its own part where it had one; what belongs to nobody is the same in that of rank 0.
        first = ranks.rank if len(files) == ranks.size else 0
        needed_ranks = {first} | (
            set()
            if self._parts is None
            else self._parts.missing({rank: files[name].kept() for rank, name in of_rank.items()}, first)
        )
        for rank, name in of_rank.items():
            if rank in needed_ranks and name not in checkpoints:
                checkpoints[name] = _seen(folder / name.text)
        wishes = ranks.all_bytes(
            json.dumps([rank for rank in needed_ranks if checkpoints.get(of_rank[rank]) is None]).encode()
        )
        for rank in sorted({rank for ranks_wanted in wishes for rank in json.loads(ranks_wanted)}):
            name = of_rank[rank]
            local = checkpoints.get(name)
            is_viewer = viewers[name] == ranks.rank
            body = ranks.share_bytes(save(local.tensors) if is_viewer and local else b"", source=viewers[name])
            if rank in needed_ranks and local is None:
                checkpoints[name] = Checkpoint.from_parts(files[name].document(), load(body))
        base = checkpoints[of_rank[first]]
        assert base is not None
        extras = [checkpoints[of_rank[rank]] for rank in sorted(needed_ranks - {first})]
        base.restore(
            self._parts,
            self.stateful if len(files) == ranks.size else self._movable(ranks),
            rng=first == ranks.rank,
            siblings=[extra.kept() for extra in extras if extra is not None],
        )
        return base

    def _movable(self, ranks: Ranks) -> dict[str, Any]:
        """Return `stateful` for a rank that takes another's: no generators that the script seeds for each rank."""
        generators = {name: item for name, item in self.stateful.items() if isinstance(item, KeptGenerator)}
        states = {name: sha256(item.text().encode()).hexdigest() for name, item in generators.items()}
        rows = [json.loads(text) for text in ranks.all_bytes(json.dumps(states).encode())]
        names = {name for name, state in states.items() if any(row.get(name) != state for row in rows)}
        if ranks.is_first or not names:
            return self.stateful
        log.warning("begun anew, for the region had another number of ranks: %s", ", ".join(sorted(names)))
        return {name: item for name, item in self.stateful.items() if name not in names}

    @property
    def written_step(self) -> int:
        """Step of the checkpoint that was saved last, once this rank's part is on disk; -1 for none."""
        age = None if self._writer is None else self._writer.written
        return -1 if age is None else age[1]

    def all_wrote(self, step: int) -> None:
        """All ranks say that their `written_step` is this one: what is older is not needed any more."""
        if step >= 0 and self._writer is not None and step == self.written_step:
            self._whole = self._writer.written

    @property
    def is_idle(self) -> bool:
        """Whether this rank could write one now; never again, once its state can't be kept: all ranks need theirs."""
        return self._writer is not None and not self._writer.is_busy

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next one."""
        if self._writer is None:
            return False
        pause_s = min(self._every_s, max(EVERY_MIN_S, self._writer.took_s / COST_PART))
        return time.monotonic() - self._saved_at_s >= pause_s

    def stepped(self) -> None:
        """Hear of a step's boundary."""
        if self._parts is not None:
            self._parts.tell_jumps()

    def choose_keepers(self) -> None:
        """Agree on which rank keeps what of the optimizer's state. All ranks call it."""
        if self._ranks is not None and self._ranks.size > 1:
            marks = {} if self._parts is None else self._parts.marks()
            rows = [json.loads(text) for text in self._ranks.all_bytes(json.dumps(marks).encode())]
            if self._parts is not None:
                self._parts.choose(rows, self._ranks.rank)

    def save_before_pause(self, progress: TrainingProgress) -> None:
        """Save where the loop is about to make no steps for long, unless the last one is new for what one takes."""
        writer = self._writer
        if writer is None or writer.is_busy or progress.step <= self.written_step:
            return
        if time.monotonic() - self._saved_at_s >= writer.took_s / PAUSE_COST_PART:
            self.save(progress)

    def save(self, progress: TrainingProgress, *, is_waiting: bool = False) -> None:
        """Copy everything now; it is written in the background. A state that can't be kept ends the checkpoints.

        The first time, only the memory for it is begun, unless `is_waiting`: the checkpoint stays due.
        """
        if self._writer is None:
            return
        before_s, self._saved_at_s = self._saved_at_s, time.monotonic()
        try:
            with unnoticed():  # an average in `stateful` may read the model
                is_copied = self._writer.save(
                    progress, self._parts, self.stateful, whole=self._whole, is_waiting=is_waiting
                )
        except Exception as error:  # noqa: BLE001 - whatever an optimizer of the script's raises, training goes on
            cause = error if isinstance(error, LearnerError) else failure(error).reason
            self._warn(f"no checkpoints of this learner, a restart begins its state anew: {cause}")
            self._writer = None
            return
        if not is_copied:
            self._saved_at_s = before_s
            return
        if self._parts is not None:
            self._parts.tell_drifts()
        if self._loop_state is not None:
            self._loop_state.look(self._writer.copies)

    def give(self, state: Mapping[str, object]) -> None:
        """Note that the loop has been given the merged model, to evaluate it."""
        if self._loop_state is not None:
            self._loop_state.give(state)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the loop has merged parameters, to save them."""
        if self._loop_state is not None:
            self._loop_state.hold(tensors)

    def begin(self, progress: TrainingProgress, *, are_idle: bool) -> None:
        """Save now, or at the next boundary by which all ranks have written the one before: files of one moment.

        are_idle: whether all of them have.
        """
        self._saved_at_s = -math.inf
        if are_idle:
            self.save(progress)

    def finish(self, progress: TrainingProgress) -> None:
        """Wait until what `begin` saved is on disk; save it now if no boundary has."""
        if self._saved_at_s == -math.inf:
            self.save_now(progress)
        self.wait()

    def save_now(self, progress: TrainingProgress) -> None:
        """Save, and wait until it is on disk."""
        self.wait()
        if self._writer is not None and self._writer.is_busy:
            log.warning("no checkpoint: the one before is still being written")
            return
        self.save(progress, is_waiting=True)
        self.wait()

    def wait(self) -> None:
        """Until what was saved last is on disk."""
        if self._writer is not None:
            self._writer.wait()


def _names(text: bytes) -> list[FileName]:
    return [name for item in json.loads(text) if (name := FileName.parse(item)) is not None]


def _has_more(component: Any) -> bool:
    """Whether its state has more than that of an optimizer."""
    with contextlib.suppress(Exception):  # a checkpoint tells of it
        return not component.state_dict().keys() <= {"state", "param_groups"}
    return False


def _groups(listings: list[list[FileName]]) -> list[dict[FileName, int]]:
    """The checkpoints of which all files are there, newest first: its files in the order of ranks, and who reads each.

    The writer of a file reads it where it sees it, else another that does: no rank is to read the files of all.
    """
    seers: dict[FileName, list[int]] = {}
    for rank, names in enumerate(listings):
        for name in names:
            seers.setdefault(name, []).append(rank)
    viewers = {
        name: min(((rank - name.place.rank) % len(listings), rank) for rank in ranks)[1]
        for name, ranks in seers.items()
    }
    groups: dict[tuple[tuple[int, int], int], dict[FileName, int]] = {}
    for name in sorted(viewers, key=lambda name: name.place):
        groups.setdefault((name.age, name.place.ranks), {})[name] = viewers[name]
    whole = [(key, group) for key, group in groups.items() if len(group) == key[1]]
    return [group for _, group in sorted(whole, key=lambda entry: entry[0], reverse=True)]


def _seen(path: Path) -> Checkpoint | None:
    """A file of another rank, where this host has it. Its own reader has already named damage."""
    try:
        return read_checkpoint(path)
    except (OSError, LearnerError):
        return None
