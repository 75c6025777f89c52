"""The learner of benchmarks/step_cost.py: GPT-2 with 124 M parameters and random weights, whole or cut by FSDP2.

It trains alone for some steps, then attached for as many, then alone again, and writes what it measured as JSON into
the folder that STEP_COST_FOLDER names, one file for each rank.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import diloco_node

BATCH, CONTEXT = 8, 64
WARM_UP = 2
"""Steps before each arm counts: compiled kernels, the optimizer's moments, the first round."""


def private_bytes() -> int:
    """What belongs to this process alone."""
    return int(psutil.Process().memory_full_info().uss)


def main() -> None:
    """Measure both arms."""
    folder, steps = Path(os.environ["STEP_COST_FOLDER"]), int(os.environ["STEP_COST_STEPS"])
    os.sched_setaffinity(0, {int(os.environ["STEP_COST_CORE"])})
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    config = GPT2Config()
    model = GPT2LMHeadModel(config)
    if ranks > 1:
        dist.init_process_group("gloo")
        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ranks == 1)
    draw = torch.Generator().manual_seed(rank)

    def train() -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (BATCH, CONTEXT), generator=draw)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train_alone() -> list[float]:
        seconds: list[float] = []
        for _ in range(WARM_UP + steps):
            started_s = time.perf_counter()
            train()
            seconds.append(time.perf_counter() - started_s)
        return seconds[WARM_UP:]

    before_s = train_alone()
    private_before = private_bytes()
    attached_s: list[float] = []
    inside_s: list[float] = []
    private: list[int] = []
    with diloco_node.attach(model, optimizer) as diloco:
        while not diloco.should_stop and len(attached_s) < WARM_UP + steps:
            started_s = time.perf_counter()
            loss = train()
            trained_s = time.perf_counter()
            diloco.step(tokens=BATCH * CONTEXT, loss=loss)
            ended_s = time.perf_counter()
            attached_s.append(ended_s - started_s)
            inside_s.append(ended_s - trained_s)
            private.append(private_bytes() - private_before)
    result: dict[str, Any] = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "before_s": before_s,
        "attached_s": attached_s[WARM_UP:],
        "after_s": train_alone(),
        "inside_s": inside_s[WARM_UP:],
        "more_bytes": private[WARM_UP:],
    }
    (folder / f"rank-{rank}.partial").write_text(json.dumps(result))
    (folder / f"rank-{rank}.partial").rename(folder / f"rank-{rank}.json")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
