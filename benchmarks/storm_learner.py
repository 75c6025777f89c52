"""The learner of benchmarks/storm_peers.py: the demo's model, batch and paced step, and a log of what it did.

It imports no more than it needs, and takes the text from one prepared file: after a death it is back sooner.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from region_sampler import RegionSampler
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from diloco_node.learner.builtin.data import Corpus
from diloco_node.learner.builtin.model import ByteGPT
from diloco_node.learner.builtin.shape import ModelSettings

CORPUS_NAME = "train.npy"


@dataclass(frozen=True, slots=True)
class StormSpec:
    """What the driver hands over, the same for all groups of an arm.

    Attributes:
        groups: how many. step_s: a step takes at least this long. seed: of parameters and data.
        layers, dim, heads, context, batch, lr, warmup, schedule_steps: as in the demo's run.toml and its trainer.
        folder: of logs and text.
        sync_every, outer_lr, outer_momentum: of DiLoCo. min_replicas: of lighthouse and manager.
        timeout_s, gloo_timeout_s: of torchft's manager, and of its process group and checkpoints.
        lighthouse: its address. stores: the port of each group's TCPStore.
        checkpoint_every: steps between checkpoints of elastic DDP.
    """

    groups: int
    step_s: float
    seed: int
    layers: int
    dim: int
    heads: int
    context: int
    batch: int
    lr: float
    warmup: int
    schedule_steps: int
    folder: str
    sync_every: int = 0
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    min_replicas: int = 1
    timeout_s: float = 0.0
    gloo_timeout_s: float = 0.0
    lighthouse: str = ""
    stores: tuple[int, ...] = ()
    checkpoint_every: int = 0

    @classmethod
    def read(cls, file: str) -> StormSpec:
        """From the driver's JSON file."""
        return cls(**json.loads(Path(file).read_text()))


class StormLearner:
    """Model, optimizer, data and log of one group. `number` counts inner steps of the run, as far as it knows."""

    def __init__(self, spec: StormSpec, rank: int) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.number = 0
        shape = ModelSettings(layers=spec.layers, dim=spec.dim, heads=spec.heads, context=spec.context)
        self.model = ByteGPT(shape, seed=spec.seed)
        # As `builtin.adamw.build_adamw`; importing that module costs 0.3 s more after every death.
        matrices = [one for one in self.model.parameters() if one.dim() > 1]
        vectors = [one for one in self.model.parameters() if one.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=spec.lr, betas=(0.9, 0.99), fused=True)
        text = np.load(Path(spec.folder) / CORPUS_NAME, mmap_mode="r")
        corpus = Corpus(train=text, held_out=text[:0])
        self._sampler = RegionSampler(
            corpus, region=rank, regions=spec.groups, batch=spec.batch, context=spec.context, seed=spec.seed
        )
        self._log = os.open(Path(spec.folder) / f"{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def step(self, loss_of: Callable[[Tensor], Tensor], after: Callable[[], None] = lambda: None) -> None:
        """One inner step and what belongs to it, `after`; then the rest of its time, as an accelerator would take."""
        started_s = time.monotonic()
        self.number += 1
        spec = self.spec
        warm = min(1.0, self.number / spec.warmup)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, self.number / spec.schedule_steps)))
        for group in self.optimizer.param_groups:
            group["lr"] = spec.lr * warm * cosine
        loss = loss_of(torch.from_numpy(self._sampler.batch_at(self.number)))
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        after()
        time.sleep(max(0.0, spec.step_s - (time.monotonic() - started_s)))

    def log(self, kind: str, **values: Any) -> None:
        """One line, in one write: a SIGKILL leaves a whole line or none."""
        os.write(self._log, (json.dumps({"kind": kind, "at": time.monotonic(), **values}) + "\n").encode())
