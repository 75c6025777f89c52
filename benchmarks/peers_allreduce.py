"""The plain arm of benchmarks/peers.py: torch.distributed's all-reduce of the whole outer gradient over Gloo, float32.

With Gloo's own limit of 30 minutes. Nothing catches an error: that is for systems above it.
"""

from __future__ import annotations

from peers_learner import Outer, Training, main
from torch import distributed


def train(training: Training) -> None:
    """Join the group, then merge by the mean of what each region changed."""
    spec, regions = training.spec, len(training.spec.addresses)
    address = f"tcp://{spec.addresses[0]}:{spec.port}"
    distributed.init_process_group("gloo", init_method=address, rank=training.rank, world_size=regions)
    outer = Outer(training.model)

    def merge() -> bool:
        delta = outer.delta()
        distributed.all_reduce(delta)
        outer.step(delta.div_(regions))
        return True

    training.rounds(merge)


if __name__ == "__main__":
    main(train)
