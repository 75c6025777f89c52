"""The built-in trainer: a GPT on bytes or tokens of text, AdamW, warm-up and cosine, held-out loss now and then.

It uses `diloco_node.attach` as any training loop would; without a daemon (no `DILOCO_SOCKET`) it trains alone. Its
settings are a JSON object in the file that `DILOCO_TRAINER` names, which the supervisor writes from run.toml:

================ ========= ==========================================================================================
key              default   what
================ ========= ==========================================================================================
model            {}        `layers`, `dim`, `heads`, `context`, `vocabulary`: see `shape.ModelSettings`; or `hf`,
                           `init`, `context`: see `hf_settings.HfModelSettings`
batch            8         sequences per inner step
lr               0.006     peak learning rate of AdamW
steps            1000      length of the cosine schedule; a learner alone stops there, an attached one when told to
ends_with_run    true      where the run says how far it is on its way to its end, the schedule is as long as the run
warmup           100       steps of linear warm-up
lr_floor         0.1       the schedule ends at this part of the peak, and stays there
weight_decay     0.1       on matrices
optimizer        adamw     or `muon` (matrices; the rest AdamW), or `adamw8bit` (bitsandbytes or torchao)
clip             1.0       the gradient's norm is cut to this; 0: it is not
accumulate       1         micro-batches that a batch is computed in; divides it
precision        float32   of the arithmetic; `bf16`: autocast, parameters stay float32
compile          false     `torch.compile`
shard            none      on several ranks: `fsdp`, or `ddp`, which `none` is there too; see `sharding`
checkpoint_activations     keep no activations inside blocks, compute them again; false by default
seed             0         of parameters and of data order; the same in all regions
data             []        files and folders of text, JSONL or Parquet, `hf:NAME`; empty: the standard library's sources
tokenizer        ""        a `tokenizer.json`, or a folder that has one; empty: bytes
text_field       "text"    of a row of JSONL, Parquet or a dataset, what holds its text
streaming        false     rows are read and tokenised as they are trained: see `stream`
cache            ""        where tokenised corpora are kept; empty: `data.token_cache()`
eval_every       200       steps of the run between held-out losses; 0: only at the end
eval_windows     64        held-out windows of one evaluation
threads          1         of torch
min_step_seconds 0         pacing for demos and tests: a step takes at least this long
settle_seconds   1         how long an attached learner waits for the run's last versions before it measures them
================ ========= ==========================================================================================

Moments and data position are in the learner's checkpoint, which `attach` writes; parameters come from the run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.attach import Diloco
from diloco_node.learner.builtin.data import Corpus, RegionSampler, Windows, load_corpus
from diloco_node.learner.builtin.hf_model import HfCausalLM
from diloco_node.learner.builtin.hf_settings import HfModelSettings, model_from
from diloco_node.learner.builtin.model import ByteGPT, token_logits
from diloco_node.learner.builtin.optimizers import KINDS, build_optimizer, set_rate
from diloco_node.learner.builtin.shape import ModelSettings
from diloco_node.learner.builtin.sharding import SHARDS, begin_ranks, on_ranks, whole_norm
from diloco_node.learner.builtin.stream import StreamSampler, TextStream

SETTINGS_VARIABLE: Final = "DILOCO_TRAINER"
PRECISIONS: Final = ("float32", "bf16")
BETAS: Final = (0.9, 0.99)
"""Of AdamW. A learner sees a small batch, so its squared gradients are noisy and want to be averaged for longer than
the usual 0.95 does (docs/notebook/results-quality.md)."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The settings of the table above, checked.

    Raises:
        ConfigError: a value is out of range or of a wrong type.
    """

    model: ModelSettings | HfModelSettings = field(default_factory=ModelSettings)
    batch: int = 8
    lr: float = 6e-3
    steps: int = 1000
    ends_with_run: bool = True
    warmup: int = 100
    lr_floor: float = 0.1
    weight_decay: float = 0.1
    seed: int = 0
    data: tuple[str, ...] = ()
    tokenizer: str = ""
    text_field: str = "text"
    streaming: bool = False
    cache: str = ""
    eval_every: int = 200
    eval_windows: int = 64
    threads: int = 1
    min_step_seconds: float = 0.0
    settle_seconds: float = 1.0
    optimizer: str = "adamw"
    clip: float = 1.0
    accumulate: int = 1
    precision: str = "float32"
    compile: bool = False
    checkpoint_activations: bool = False
    shard: str = "none"

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("steps", 1), ("warmup", 0), ("seed", 0), ("eval_every", 0)):
            self._check_whole(name, low)
        self._check_whole("eval_windows", 1)
        self._check_whole("threads", 1)
        self._check_whole("accumulate", 1)
        if self.batch % self.accumulate:
            raise ConfigError(
                f"trainer.accumulate is {self.accumulate}: it must divide trainer.batch, which is {self.batch}"
            )
        for name in ("ends_with_run", "compile", "checkpoint_activations", "streaming"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"trainer.{name} is {getattr(self, name)!r}: use true or false")
        for name, known in (("optimizer", KINDS), ("precision", PRECISIONS), ("shard", SHARDS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"trainer.{name} is {getattr(self, name)!r}: use one of {', '.join(known)}")
        for name in ("tokenizer", "text_field", "cache"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"trainer.{name} is {getattr(self, name)!r}: use a text")
        if isinstance(self.lr_floor, bool) or not isinstance(self.lr_floor, int | float) or not 0 <= self.lr_floor <= 1:
            raise ConfigError(f"trainer.lr_floor is {self.lr_floor!r}: use a part of the peak, from 0 to 1")
        for name in ("lr", "weight_decay", "clip", "min_step_seconds", "settle_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1e3:
                raise ConfigError(f"trainer.{name} is {value!r}: use a number from 0 to 1000")

    def _check_whole(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"trainer.{name} is {value!r}: use a whole number, at least {low}")

    def lr_at(self, step: int, progress: float | None = None) -> float:
        """Learning rate of inner step `step` of the run, counted from 1: warm-up, cosine, then the floor.

        Args:
            progress: of the run, 0 to 1; None: it does not say, and the cosine follows the step.
        """
        warm = min(1.0, step / self.warmup) if self.warmup else 1.0
        done = min(1.0, step / self.steps) if progress is None or not self.ends_with_run else progress
        return self.lr * warm * (self.lr_floor + (1 - self.lr_floor) * 0.5 * (1 + math.cos(math.pi * done)))


def settings_from(values: Mapping[str, Any]) -> TrainerSettings:
    """Settings from a JSON object.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value out of range.
    """
    unknown = sorted(set(values) - {one.name for one in fields(TrainerSettings)})
    if unknown:
        raise ConfigError(
            f"unknown trainer settings {', '.join(unknown)}: see `python -m pydoc diloco_node.learner.builtin.trainer`"
        )
    given = dict(values)
    model, data = given.pop("model", {}), given.pop("data", [])
    if not isinstance(model, Mapping):
        raise ConfigError(f"trainer.model is {model!r}: use an object such as {{'layers': 2, 'dim': 64}}")
    if not isinstance(data, list | tuple) or not all(isinstance(path, str) for path in data):
        raise ConfigError(f"trainer.data is {data!r}: use a list of paths")
    return TrainerSettings(model=model_from(model), data=tuple(data), **given)


def settings_from_environment() -> TrainerSettings:
    """The settings in the file that `DILOCO_TRAINER` names; the defaults without it.

    Raises:
        ConfigError: the file can't be read or is no JSON object, or a setting is wrong.
    """
    path = os.environ.get(SETTINGS_VARIABLE)
    if not path:
        return TrainerSettings()
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{SETTINGS_VARIABLE}={path}: can't read trainer settings: {problem}") from problem
    if not isinstance(values, dict):
        raise ConfigError(
            f"{SETTINGS_VARIABLE}={path}: trainer settings must be a JSON object, found {type(values).__name__}"
        )
    return settings_from(values)


def open_data(settings: TrainerSettings) -> Corpus | TextStream:
    """The data that the settings name.

    Raises:
        ConfigError: they can't be read, or there is too little of them.
    """
    if settings.streaming:
        return TextStream(
            settings.data,
            tokenizer=settings.tokenizer,
            text_field=settings.text_field,
            held_out_tokens=settings.eval_windows * (settings.model.context + 1),
        )
    return load_corpus(
        settings.data, tokenizer=settings.tokenizer, text_field=settings.text_field, cache=settings.cache
    )


def held_out_loss(
    model: ByteGPT | HfCausalLM,
    windows: Windows,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    windows_at_once: int = 64,
) -> float:
    """Mean loss in nats per token over windows of shape (n, context + 1).

    Args:
        model: its own parameters are used unless others are given.
        parameters: by name, as `global_state_dict` returns them; any float dtype.
    """
    if isinstance(model, HfCausalLM):
        tokens = torch.from_numpy(windows.astype(np.int64)).to(next(model.module.parameters()).device)
        with torch.no_grad():
            parts = (model.summed_loss(part, parameters).item() for part in torch.split(tokens, windows_at_once))
            return sum(parts) / tokens[:, 1:].numel()
    named: dict[str, Tensor] = dict(model.named_parameters())
    if parameters is not None:
        named = {name: parameters[name].to(own.device, torch.float32) for name, own in named.items()}
    rotary = (model.get_buffer("rotary_cosine"), model.get_buffer("rotary_sine"))
    tokens = torch.from_numpy(windows.astype(np.int64)).to(rotary[0].device)
    total = 0.0
    with torch.no_grad():
        for part in torch.split(tokens, 64):
            logits = token_logits(model.settings, named, part[:, :-1], rotary)
            targets = part[:, 1:].reshape(-1)
            total += functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
    return total / tokens[:, 1:].numel()


def make_optimizer(model: nn.Module, settings: TrainerSettings) -> torch.optim.Optimizer:
    """The one that is set, with weight decay on matrices only."""
    return build_optimizer(model, settings.optimizer, lr=settings.lr, weight_decay=settings.weight_decay, betas=BETAS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, in nats per token where it is a loss.

    `loss_first` and `loss_last` are None if no step was made, `val_loss` on ranks that did not compute it,
    `val_loss_global` also without a daemon.
    """

    steps: int
    tokens: int
    loss_first: float | None
    loss_last: float | None
    val_loss: float | None
    val_loss_global: float | None


class _DataPosition:
    """The data position as a part of the learner's checkpoint, which is read before there is a sampler."""

    def __init__(self) -> None:
        self._sampler: RegionSampler | StreamSampler | None = None
        self._state: dict[str, Any] = {}

    def follow(self, sampler: RegionSampler | StreamSampler, *, unsaved_steps: int) -> None:
        """Put the sampler where the checkpoint stood, and so many steps on; now the position is the sampler's."""
        if self._state:
            sampler.restore(self._state)
        for _ in range(unsaved_steps):
            sampler.next_batch()
        self._sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        return self._state if self._sampler is None else self._sampler.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


class Trainer:
    """One learner's run: `run` returns when the daemon says stop, or, alone, after `settings.steps` steps.

    Args:
        settings: see the module.
        corpus: the data; read from `settings.data` if None.
        say: gets one line per evaluation.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        *,
        corpus: Corpus | TextStream | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.corpus = corpus or open_data(settings)
        if isinstance(settings.model, ModelSettings):
            self.corpus.encoding.check_model(settings.model.vocabulary)
        self.corpus.held_out_windows(1, settings.model.context)
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
        self.place = begin_ranks()
        self._lm = _made(settings, self.corpus.encoding.vocabulary, self.place.device)
        self.model = self._lm if isinstance(self._lm, ByteGPT) else self._lm.module
        loss = on_ranks(self.model, self._lm.loss, shard=settings.shard, place=self.place)
        self.optimizer = make_optimizer(self.model, settings)
        self._loss: Callable[[Tensor], Tensor] = torch.compile(loss) if settings.compile else loss

    def run(self, attach: Callable[..., AbstractContextManager[Diloco]]) -> Outcome:
        """Train.

        Args:
            attach: `diloco_node.attach` or a stand-in.

        Raises:
            LearnerError: the loss is not finite: the learning rate is too high, or the data are broken.
        """
        position = _DataPosition()
        with attach(self.model, self.optimizer, stateful={"data": position}) as diloco:
            sampler = self.corpus.sampler(
                region=diloco.region_index,
                regions=diloco.regions,
                batch=self.settings.batch,
                context=self.settings.model.context,
                seed=self.settings.seed,
                rank=self.place.rank,
                ranks=self.place.ranks,
            )
            position.follow(sampler, unsaved_steps=diloco.unsaved_steps)
            return self._loop(diloco, sampler)

    def _loop(self, diloco: Diloco, sampler: RegionSampler | StreamSampler) -> Outcome:
        settings, steps = self.settings, 0
        first: float | None = None
        last: float | None = None
        tokens_per_step = settings.batch * settings.model.context
        # By where the run is: a process that dies before it has made so many steps would never come to it.
        every = settings.eval_every or math.inf
        evaluated = diloco.global_step // every
        while not diloco.should_stop and (diloco.is_attached or steps < settings.steps):
            started = time.monotonic()
            lr = settings.lr_at(diloco.global_step + 1, diloco.progress)
            loss, norm = self._inner_step(sampler.next_batch(), lr=lr)
            steps += 1
            time.sleep(max(0.0, settings.min_step_seconds - (time.monotonic() - started)))
            last = float(loss)
            first = last if steps == 1 else first
            if not math.isfinite(last):
                raise LearnerError(f"the loss is {last} at step {steps}: lower trainer.lr (now {settings.lr})")
            diloco.step(tokens=tokens_per_step, loss=loss, grad_norm=norm)
            if diloco.global_step // every > evaluated:
                evaluated = diloco.global_step // every
                self._evaluate(diloco, steps, last)
        if diloco.is_attached:
            diloco.settle(settings.settle_seconds)
        own, everybodys = self._evaluate(diloco, steps, last)
        return Outcome(steps, steps * tokens_per_step, first, last, own, everybodys)

    def _inner_step(self, windows: Windows, *, lr: float) -> tuple[Tensor, Tensor]:
        """Returns the loss, and the norm of the gradient before it was clipped."""
        set_rate(self.optimizer, lr)
        self.optimizer.zero_grad()
        parts = torch.from_numpy(windows).to(self.place.device).chunk(self.settings.accumulate)
        losses = []
        for part in parts:
            with self._arithmetic():
                loss = self._loss(part) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        norm = whole_norm(clip_grad_norm_(self.model.parameters(), self.settings.clip or math.inf))
        self.optimizer.step()
        return torch.stack(losses).sum(), norm

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """For the forward pass; parameters, gradients and the optimizer stay float32."""
        if self.settings.precision == "float32":
            return nullcontext()
        return torch.autocast(self.place.device.type, torch.bfloat16)

    def _evaluate(self, diloco: Diloco, steps: int, loss: float | None) -> tuple[float | None, float | None]:
        """Held-out loss of the own and of the global parameters; told to the daemon."""
        held_out = self.corpus.held_out_windows(self.settings.eval_windows, self.settings.model.context)
        is_cut = self.place.ranks > 1 and self.settings.shard == "fsdp"
        if self.place.rank and not is_cut:
            return None, None
        # Where ranks have parts of the model, all of them give theirs to rank 0.
        states = [diloco.own_state_dict(), *([diloco.global_state_dict()] if diloco.is_attached else [])]
        if self.place.rank:
            return None, None
        own, *others = [self._held_out(held_out, state) for state in states]
        everybodys = others[0] if others else None
        diloco.evaluated(val_loss=own, val_loss_global=everybodys)
        shown = "" if everybodys is None else f" val_loss_global={everybodys:.4f}"
        trained = "" if loss is None else f" loss={loss:.4f}"
        self.say(f"step={steps}{trained} val_loss={own:.4f}{shown}")
        return own, everybodys

    def _held_out(self, windows: Windows, parameters: Mapping[str, Tensor]) -> float:
        at_once = max(1, self.settings.batch // self.settings.accumulate)
        with self._arithmetic():
            return held_out_loss(self._lm, windows, parameters, windows_at_once=at_once)


def _made(settings: TrainerSettings, vocabulary: int, device: torch.device) -> ByteGPT | HfCausalLM:
    is_checkpointed = settings.checkpoint_activations
    if isinstance(settings.model, HfModelSettings):
        return HfCausalLM(
            settings.model,
            seed=settings.seed,
            vocabulary=vocabulary,
            checkpoint_activations=is_checkpointed,
            device=device,
        )
    return ByteGPT(settings.model, seed=settings.seed, checkpoint_activations=is_checkpointed).to(device)
