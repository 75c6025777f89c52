"""Real regions whose scripts differ in all but the tensors' names: one model is trained, and what differs is told."""

import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from diloco_node.health.alerts import find_alerts
from tests.kit.cluster_kit import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1200)]

SCRIPT = """
import sys
import time
import torch
import diloco_node
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

torch.set_num_threads(1)
torch.manual_seed(0)
base = torch.nn.Linear(32, 32).requires_grad_(False)
torch.manual_seed(int(sys.argv[1] == "other"))  # as where one script alone loads weights
adapter = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
if sys.argv[1] == "other":
    base.weight.data.mul_(1.01)  # another revision of the same base
    adapter[1] = torch.compile(adapter[1], backend="eager")
    adapter[2] = checkpoint_wrapper(adapter[2])
model = torch.nn.ModuleDict({"base": base, "adapter": adapter})
optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-3)
with diloco_node.attach(model, optimizer) as diloco:
    while not diloco.should_stop:
        values = torch.randn(8, 32)
        loss = (adapter(base(values)) - values).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
        diloco.step(tokens=8, loss=loss)
"""


async def test_a_region_with_another_base_other_weights_and_wrappers_is_told_and_trains_the_same_model(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    cluster = Cluster(tmp_path / "run", 2, changes={"sync_every = 16": "sync_every = 8"})
    try:
        for name, word in zip(cluster.names, ("same", "other"), strict=True):
            await cluster.regions[name].start(cluster.config, (sys.executable, str(script), word))
        await cluster.until_trains()
        statuses = await cluster.until(
            "one is told of its base", lambda now: any(status["base_difference"] for status in now.values())
        )
        (odd,) = [name for name in cluster.names if statuses[name]["base_difference"]]
        (first,) = cluster.others(odd)
        assert f"region {first}, which began the run" in statuses[odd]["base_difference"]
        assert "1 hold other values (base.weight)" in statuses[odd]["base_difference"]
        assert "A-BASE-DIFFERS" in {alert.code for alert in find_alerts(statuses[odd])}
        after = await cluster.until_commits(4, why="though the bases differ")
        assert not after[first]["base_difference"], "its own base is the run's"
        # Whose script does not begin the run hears whose parameters it has now.
        assert "other parameters than this script's" in (cluster.folder / odd / "logs" / "start.log").read_text()
        assert "other parameters than" not in (cluster.folder / first / "logs" / "start.log").read_text()
        await cluster.end()
        cluster.check_equal()
        names = set(load_file(cluster.folder / odd / "final.safetensors"))
        assert names == {f"adapter.{block}.{name}" for block in range(4) for name in ("weight", "bias")}
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
