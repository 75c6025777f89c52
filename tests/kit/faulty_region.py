"""A region for tests whose learner can be given a fault from outside, while it trains.

    python faulty_region.py start ...       its supervisor: that of a demo, which waits for half a second at most
    python faulty_region.py learn FAULT     its learner: from when `$DILOCO_STATE/fault` is there, it has the fault

| fault | what the learner does then |
|---|---|
| crash | exits with 1, at once, and each time that it is started |
| nan | its loss is NaN, and so are its gradients and parameters |
| spike | its loss and its gradients are a thousand times what they were |

Whoever is started while the file is there waits until it is gone, before it attaches.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_node.config.resolve import NodeConfig
    from diloco_node.supervisor.supervisor_spec import SupervisorSpec

BACKOFF_S = 0.5
"""Ten crashes need some five seconds so, instead of eighty."""

STEP_S = 0.05
FACTORS = {"nan": float("nan"), "spike": 1e3}
FAULT_NAME = "fault"
ATTACHED_NAME = "attached.jsonl"
"""A line for each life that attached: the versions that it began with, and whether it had just those parameters."""


def supervise(arguments: list[str]) -> int:
    """Become the region's supervisor."""
    from diloco_node.cli import start
    from diloco_node.lab.demo.faulty_region import run_start

    prepare = start.prepare

    def prepare_hasty(config: NodeConfig, region: str, command: Sequence[str]) -> SupervisorSpec:
        return dataclasses.replace(prepare(config, region, command), backoff_max_s=BACKOFF_S)

    start.prepare = prepare_hasty
    return run_start(arguments, ("-m", "diloco_node.lab.demo.faulty_region", "daemon"))


def learn(fault: str, folder: Path) -> int:
    """Train until the run is over, or the fault ends it."""
    file = folder / FAULT_NAME
    if fault == "crash" and file.exists():
        return 1
    import torch
    from torch import nn

    import diloco_node

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while file.exists():
        time.sleep(0.05)
    # A checkpoint at each step that may have one: a fault must not come back with the optimizer's moments.
    with diloco_node.attach(model, optimizer, checkpoint_every_s=STEP_S) as diloco:
        merged, own = diloco.global_state_dict(), model.state_dict()
        is_merged = all(torch.equal(own[name], value) for name, value in merged.items())
        with (folder / ATTACHED_NAME).open("a") as lines:
            lines.write(json.dumps({"versions": diloco.versions, "is_merged": is_merged}) + "\n")
        while not diloco.should_stop:
            batch = torch.randn(8, 32)
            loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
            if file.exists():
                if fault == "crash":
                    os._exit(1)  # without a word to its daemon
                loss = loss * FACTORS[fault]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(STEP_S)
            diloco.step(tokens=8, loss=loss)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "learn":
        sys.exit(learn(sys.argv[2], Path(os.environ["DILOCO_STATE"])))
    sys.exit(supervise(sys.argv[1:]))
