"""A rank of the elastic arm of benchmarks/storm_peers.py: torch's DDP over Gloo, started by torchrun.

    torchrun ... storm_elastic.py SPEC.json

Rank 0 writes a checkpoint every few steps; after a restart of the ranks all of them go on from it.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from storm_learner import StormLearner, StormSpec
from torch import Tensor, nn


class _Loss(nn.Module):
    """The model's loss as a module's forward: DDP hooks into that."""

    def __init__(self, learner: StormLearner) -> None:
        super().__init__()
        self.model = learner.model

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss of the windows."""
        return self.model.loss(windows)


def main() -> None:
    """Train until killed."""
    warnings.filterwarnings("ignore", module="torch")
    spec, rank = StormSpec.read(sys.argv[1]), int(os.environ["RANK"])
    learner = StormLearner(spec, rank)
    torch.distributed.init_process_group("gloo")
    file = Path(spec.folder) / "checkpoint.pt"
    if file.exists():
        state = torch.load(file)
        learner.model.load_state_dict(state["model"])
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.number = state["number"]
    wrapped = nn.parallel.DistributedDataParallel(_Loss(learner))

    def save() -> None:
        if rank == 0 and learner.number % spec.checkpoint_every == 0:
            state = {
                "model": learner.model.state_dict(),
                "optimizer": learner.optimizer.state_dict(),
                "number": learner.number,
            }
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            learner.log("saved", step=learner.number)

    learner.step(wrapped, save)
    learner.log("trains")
    while True:
        learner.log("step", step=learner.number)
        learner.step(wrapped, save)


if __name__ == "__main__":
    main()
