"""The learner of benchmarks/step_cost.py: GPT-2 with 124 M parameters and random weights, whole or cut by FSDP2.

It trains alone for some steps, then attached for as many, then alone again, and writes what it measured as JSON into
the folder that STEP_COST_FOLDER names, one file for each rank. Without a daemon it only trains: that is the control.
STEP_COST_MODEL changes the model's configuration.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
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


def resident_bytes() -> int:
    """What of this process lies in memory, shared memory and libraries too."""
    return int(psutil.Process().memory_info().rss)


def storages(holder: Any) -> dict[int, int]:
    """Bytes of the memory behind the tensors and arrays that an object holds, in lists as well, by its address."""
    found: dict[int, int] = {}
    waiting = [getattr(holder, name) for name in vars(holder)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, np.ndarray):
            one = torch.from_numpy(one) if one.size else None
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, list | tuple):
            waiting.extend(one)
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif hasattr(one, "buffer"):  # a snapshot
            waiting.append(one.buffer)
        elif hasattr(one, "_zeros"):  # the contribution area
            waiting += [one._area, one._zeros]
        elif hasattr(one, "_free"):  # room for snapshots
            waiting.extend(one._free)
        elif hasattr(one, "anchor_followed"):  # a version on its way
            waiting += [one.new, one.anchor_followed]
    return found


def held_bytes(fragments: Any) -> dict[str, int]:
    """What one rank's `LearnerFragments` holds: in shared memory, and in memory of its own."""
    shared = {
        one.untyped_storage().data_ptr()
        for one in (*fragments._area[:1], torch.from_numpy(fragments._contributions._area))
        if one.numel()
    }
    held = storages(fragments)
    return {
        "base": 4 * sum(one.numel() for one in fragments._base),
        "own": sum(size for at, size in held.items() if at not in shared),
        "shared": sum(size for at, size in held.items() if at in shared),
        "share": sum(part.size for part in fragments._owned),
        "two_fragments": 2 * 4 * max(fragment.size for fragment in fragments.manifest.fragments),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """All of it at once: somebody waits for the file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(path)


def main() -> None:
    """Measure both arms."""
    folder, steps = Path(os.environ["STEP_COST_FOLDER"]), int(os.environ["STEP_COST_STEPS"])
    os.sched_setaffinity(0, {int(os.environ["STEP_COST_CORE"])})
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    config = GPT2Config(**json.loads(os.environ.get("STEP_COST_MODEL", "{}")))
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
    resident: list[int] = []
    held: dict[str, int] = {}
    # A small model would write one every few seconds, and keep a copy of its moments for it.
    with diloco_node.attach(model, optimizer, checkpoint_every_s=0) as diloco:
        while not diloco.should_stop and len(attached_s) < WARM_UP + steps:
            started_s = time.perf_counter()
            loss = train()
            trained_s = time.perf_counter()
            diloco.step(tokens=BATCH * CONTEXT, loss=loss)
            ended_s = time.perf_counter()
            attached_s.append(ended_s - started_s)
            inside_s.append(ended_s - trained_s)
            private.append(private_bytes() - private_before)
            resident.append(resident_bytes())
            if diloco._fragments is not None:
                now = held_bytes(diloco._fragments)
                held = {name: max(size, held.get(name, 0)) for name, size in now.items()}
    result: dict[str, Any] = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "before_s": before_s,
        "attached_s": attached_s[WARM_UP:],
        "after_s": train_alone(),
        "inside_s": inside_s[WARM_UP:],
        "more_bytes": private[WARM_UP:],
        "resident": resident[WARM_UP:],
        "held": held,
    }
    write(folder / f"rank-{rank}.json", result)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
