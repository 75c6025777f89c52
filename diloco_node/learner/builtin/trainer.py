"""The built-in trainer: a GPT on the bytes of text, AdamW, warm-up and cosine, held-out loss now and then.

It uses `diloco_node.attach` as any training loop would; without a daemon (no `DILOCO_SOCKET`) it trains alone. Its
settings are in the JSON file that `DILOCO_TRAINER` names: `diloco-node start` has checked run.toml and written it.

Moments are in the learner's checkpoint, which `attach` writes. Parameters and the position in the data are the run's.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.attach import Diloco
from diloco_node.learner.builtin.adamw import build_adamw
from diloco_node.learner.builtin.data import Corpus, ShardWindows, Windows, load_corpus
from diloco_node.learner.builtin.model import ByteGPT, token_logits
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.builtin.sharding import begin_ranks, on_ranks, whole_norm
from diloco_node.learner.layouts.device import has_streams
from diloco_node.learner.region_shards import HERE

SETTINGS_VARIABLE: Final = "DILOCO_TRAINER"

SCHEDULE_STEPS_OPEN: Final = 1000
"""Length of the cosine where neither `schedule_steps` nor the run says how long it is."""

LR_FLOOR_OPEN: Final = 0.1
"""Part of the peak that stays after a cosine which does not end with the run: it may go on for long."""

GRADIENT_NORM_MAX: Final = 1.0
SETTLE_S: Final = 1.0
"""An attached learner waits so long for the run's last versions before it measures them."""

_WINDOWS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class TrainerSettings(ModelSettings):
    """Settings of `[model]`, `[data]` and `[run]` under the names that they have in run.toml (docs/settings.md).

    `step_time_min` is in seconds. `warmup_steps` is for benchmarks, run.toml has it not.
    """

    batch: int = 8
    lr: float = 6e-3
    warmup_steps: int = 100
    schedule_steps: int = 0
    eval_every: int = 200
    eval_windows: int = 64
    threads: int = 1
    step_time_min: float = 0.0
    shard: str = "none"
    paths: tuple[str, ...] = ()
    seed: int = 0

    def lr_at(self, step: int, progress: float | None = None) -> float:
        """Learning rate of inner step `step` of the run, counted from 1: warm-up, cosine, then the floor.

        progress: of the run, 0 to 1; None: it does not say, and the cosine follows the step.
        """
        if progress is not None and not self.schedule_steps:
            position, floor = progress, 0.0
        else:
            position, floor = min(1.0, step / (self.schedule_steps or SCHEDULE_STEPS_OPEN)), LR_FLOOR_OPEN
        cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * position))
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        return self.lr * warm * cosine


def read_settings_file() -> dict[str, Any]:
    """Read the sections of run.toml from the file that `DILOCO_TRAINER` names, if it names one. Raises ConfigError."""
    path = os.environ.get(SETTINGS_VARIABLE)
    if not path:
        return {}
    try:
        sections = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{SETTINGS_VARIABLE}={path} can't be read: {problem}; diloco-node start writes it") from None
    if not isinstance(sections, dict):
        raise ConfigError(f"{SETTINGS_VARIABLE}={path} is no JSON object; diloco-node start writes it")
    return sections


def settings_from(sections: Mapping[str, Mapping[str, Any]]) -> TrainerSettings:
    """Pick the trainer's settings; the sections have others too, which are not for it."""
    values = {name: value for section in sections.values() for name, value in section.items()}
    chosen_values = {field.name: values[field.name] for field in fields(TrainerSettings) if field.name in values}
    return TrainerSettings(**chosen_values | {"paths": tuple(values.get("paths", ()))})


def held_out_loss(model: ByteGPT, windows: Windows, parameters: Mapping[str, Tensor] | None = None) -> float:
    """Mean loss in nats per byte over windows of shape (n, context + 1), of the model's own parameters or of others by
    name, of any float dtype."""
    values: dict[str, Tensor] = dict(model.named_parameters())
    if parameters is not None:
        values = {name: parameters[name].to(parameter.device, torch.float32) for name, parameter in values.items()}
    rotary = (model.get_buffer("rotary_cosine"), model.get_buffer("rotary_sine"))
    tokens = torch.from_numpy(windows.astype(np.int64)).to(rotary[0].device)
    total = 0.0
    with torch.no_grad():
        for batch in torch.split(tokens, _WINDOWS_AT_ONCE):
            logits = token_logits(model.settings, values, batch[:, :-1], rotary)
            targets = batch[:, 1:].reshape(-1)
            total += functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    return total / tokens[:, 1:].numel()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, in nats per byte where it is a loss.

    `loss_first` and `loss_last` are None if no step was made, `val_loss` on ranks that did not compute it, and after an
    interruption; `val_loss_global` also without a daemon.
    """

    steps: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    val_loss: float | None
    val_loss_global: float | None


class Trainer:
    """The run of one learner: `run` returns when the daemon says stop, or, alone, at the end of the schedule."""

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        corpus: Corpus | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.corpus = corpus or load_corpus(settings.paths)
        self.corpus.held_out_windows(1, settings.context)  # refuses text that is too short, before it joins
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
        self.place = begin_ranks()
        if self.place.rank == 0:  # regions with other files train on other rows
            train, held_out = self.corpus.train.nbytes, self.corpus.held_out.nbytes
            self.say(f"files={self.corpus.files} train_bytes={train} held_out_bytes={held_out}")
        self.model = ByteGPT(settings, seed=settings.seed).to(self.place.device)
        self._loss = on_ranks(self.model, self.model.loss, shard=settings.shard, place=self.place)
        self.optimizer = build_adamw(self.model, lr=settings.lr)

    def run(self, attach: Callable[..., AbstractContextManager[Diloco]]) -> Outcome:
        """Train. attach: `diloco_node.attach` or a stand-in. Raises LearnerError: the loss is not finite."""
        HERE.use(self)
        with attach(self.model, self.optimizer) as diloco:
            sampler = ShardWindows(
                self.corpus,
                own=lambda: diloco.shards,
                batch=self.settings.batch,
                context=self.settings.context,
                seed=self.settings.seed,
                rank=self.place.rank,
                ranks=self.place.ranks,
            )
            return self._loop(diloco, sampler)

    def _loop(self, diloco: Diloco, sampler: ShardWindows) -> Outcome:
        settings, steps = self.settings, 0
        first: Tensor | None = None
        last: Tensor | None = None
        tokens_per_step = settings.batch * settings.context
        steps_alone = settings.schedule_steps or SCHEDULE_STEPS_OPEN
        # By where the run is: a process that dies before it has made so many steps would never come to it.
        interval = settings.eval_every or math.inf
        evaluation_count = diloco.global_step // interval
        while not diloco.should_stop and (diloco.is_attached or steps < steps_alone):
            start_s = time.monotonic()
            lr = settings.lr_at(diloco.global_step + 1, diloco.progress)
            loss, norm = self._inner_step(sampler.next_batch(), lr=lr)
            steps += 1
            time.sleep(max(0.0, settings.step_time_min - (time.monotonic() - start_s)))
            last = loss
            first = loss if first is None else first
            # A device would be waited for. There `step` ends the run, or the next evaluation does.
            if loss.is_cpu:
                self._finite(loss, steps)
            diloco.step(tokens=tokens_per_step, loss=loss, grad_norm=norm)
            if diloco.global_step // interval > evaluation_count:
                evaluation_count = diloco.global_step // interval
                self._evaluate(diloco, steps, self._finite(loss, steps))
        first_loss, last_loss = (None if loss is None else self._finite(loss, steps) for loss in (first, last))
        if diloco.is_interrupted:  # others wait for its last steps, and its machine may be gone soon
            return Outcome(steps, steps * tokens_per_step, first_loss, last_loss, None, None)
        if diloco.is_attached:
            diloco.settle(SETTLE_S)
        val_loss, everybodys = self._evaluate(diloco, steps, last_loss)
        return Outcome(steps, steps * tokens_per_step, first_loss, last_loss, val_loss, everybodys)

    def _finite(self, loss: Tensor, step: int) -> float:
        value = float(loss)
        if not math.isfinite(value):
            raise LearnerError(f"the loss is {value} at step {step}: lower model.lr (now {self.settings.lr})")
        return value

    def _inner_step(self, windows: Windows, *, lr: float) -> tuple[Tensor, Tensor]:
        """Make one step. Returns the loss, and the norm of the gradient before it was clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        batch = torch.from_numpy(windows)
        if has_streams(self.place.device):
            batch = batch.pin_memory()  # else the copy is waited for
        loss = self._loss(batch.to(self.place.device, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = whole_norm(clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX))
        self.optimizer.step()
        return loss.detach(), norm

    def _evaluate(self, diloco: Diloco, steps: int, loss: float | None) -> tuple[float | None, float | None]:
        held_out = self.corpus.held_out_windows(self.settings.eval_windows, self.settings.context)
        is_cut = self.place.ranks > 1 and self.settings.shard == "fsdp"
        if self.place.rank and not is_cut:
            return None, None
        # Where ranks have parts of the model, all of them give theirs to rank 0.
        states = [diloco.own_state_dict(), *([diloco.global_state_dict()] if diloco.is_attached else [])]
        if self.place.rank:
            return None, None
        val_loss, *global_losses = [held_out_loss(self.model, held_out, state) for state in states]
        everybodys = global_losses[0] if global_losses else None
        diloco.evaluated(val_loss=val_loss, val_loss_global=everybodys)
        global_text = "" if everybodys is None else f" val_loss_global={everybodys:.4f}"
        loss_text = "" if loss is None else f" loss={loss:.4f}"
        self.say(f"step={steps}{loss_text} val_loss={val_loss:.4f}{global_text}")
        return val_loss, everybodys
