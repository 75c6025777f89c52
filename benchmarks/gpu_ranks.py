"""The learner of the check `ranks` in benchmarks/gpu.py: one process, or FSDP2 over NCCL under torchrun.

    gpu_ranks.py FOLDER ROUNDS [MODULE]

A MODULE that is imported before torch makes devices in software, whose collectives are Gloo's.

Rank 0 leads its own daemon. All ranks train on the same batch, so the gradients, and all that follows, are those of a
single process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if sys.argv[3:]:
    importlib.import_module(sys.argv[3])

import numpy as np
import torch
import torch.distributed as dist
from gpu_daemon import POLL_S, ScriptedDaemon, region
from gpu_model import GPT, HAS_DRIVER, Size
from torch import nn
from torch.distributed.fsdp import fully_shard

import diloco_node
from diloco_node.wire.learner_link import SnapshotReady

SIZE = Size(2, 64, 2, 16, 4, 128, 4, 0, 0, 0, 0)


class Learner:
    """A rank: its model, sharded if there are several, and on rank 0 the daemon.

    Args:
        stack: closes what is opened.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.is_sharded = "RANK" in os.environ
        self.is_first = os.environ.get("RANK", "0") == "0"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.manual_seed(5)
        self.model = GPT(SIZE).to(device)
        self._group = None
        if self.is_sharded:
            if HAS_DRIVER:
                dist.init_process_group("nccl", device_id=device)
            else:
                from tests.kit.fakecuda.host_collectives import begin_ranks

                begin_ranks()
            stack.callback(dist.destroy_process_group)
            self._group = dist.new_group(backend="gloo")
            for block in self.model.h:
                fully_shard(block)
            fully_shard(self.model)
            for module in (*self.model.h, self.model) if not HAS_DRIVER else ():
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no averages
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._tokens = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.context + 1)).to(device)
        self.daemon: ScriptedDaemon | None = None
        if self.is_first:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
            stack.enter_context(region(folder))
            self.daemon = stack.enter_context(ScriptedDaemon(folder, fragments=SIZE.fragments))
        self.diloco = stack.enter_context(diloco_node.attach(self.model, self._optimizer, checkpoint_every_s=0))

    def until(self, is_done: Callable[[ScriptedDaemon], bool]) -> None:
        """Go through boundaries without a step until rank 0 sees something."""
        while True:
            flag = [self.daemon is None or is_done(self.daemon)]
            if self._group is not None:
                dist.broadcast_object_list(flag, 0, group=self._group, device=torch.device("cpu"))
            if flag[0]:
                return
            self.diloco.settle(POLL_S)

    def train(self) -> None:
        """One step."""
        loss = self.model(self._tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1e3)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.diloco.step(tokens=self._tokens.numel(), loss=loss, grad_norm=norm)


def main() -> None:
    """Train for some rounds, and write the global and the own parameters."""
    out, rounds = Path(sys.argv[1]), int(sys.argv[2])
    draw = np.random.default_rng(13)
    with contextlib.ExitStack() as stack:
        learner = Learner(stack)
        daemon = learner.daemon
        for number in range(rounds):
            index = number % SIZE.fragments
            learner.train()
            if daemon is not None:
                daemon.want(index)
            learner.until(lambda daemon, number=number: daemon.heard(SnapshotReady) > number)
            learner.train()
            if daemon is not None:
                snapshot = daemon.wait_for(SnapshotReady, number + 1).contribution.snapshot
                noise = draw.standard_normal(len(daemon.theta[index])).astype(np.float32) * 0.01
                daemon.commit(index, daemon.theta[index] - daemon.decoded(index) + noise, snapshot)
            learner.until(lambda daemon, index=index: learner.diloco.versions[index] == daemon.versions[index])
        states = learner.diloco.global_state_dict(), learner.diloco.own_state_dict()
        if learner.is_first:
            values = [value.float().cpu().numpy().tobytes() for state in states for value in state.values()]
            (out / "parameters.bin").write_bytes(b"".join(values))


if __name__ == "__main__":
    main()
