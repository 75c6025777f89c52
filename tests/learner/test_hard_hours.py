"""A loop that lacks memory, whose clock jumps, or that saves with its ranks: steps, tokens and files are right."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import Done, Warned
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program
from tests.kit.watched_model import make, net, train

HUGE = 1 << 60


class Large(nn.Module):
    """For which the memory lacks with more than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        values = self.layer(rows)
        if len(rows) > 4:
            torch.empty(HUGE, device="cpu")
        return values.square().mean()


@pytest.mark.parametrize("step", ["call", "auto"])
def test_a_batch_that_the_memory_lacks_for_is_made_again_and_counts_once(folder: Path, step: Any) -> None:
    torch.manual_seed(0)
    model = Large()
    optimizer = make(model)

    def make_step(rows: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(rows, 6)).backward()
        optimizer.step()
        if step == "call":
            diloco.step(tokens=rows)

    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer, step=step) as diloco:
            for number in range(12):
                try:
                    make_step(8 if number % 3 == 1 else 4)
                except RuntimeError as error:
                    assert "memory" in str(error) or "alloc" in str(error) or "size" in str(error)  # noqa: PT017
                    make_step(4)
        done = daemon.wait_for(Done)
        assert (done.step, done.tokens) == (12, 48)
        assert not [message for message in daemon.said if isinstance(message, Warned)]


def test_a_wall_clock_that_jumps_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = make(model)
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, optimizer, checkpoint_every_s=0.01) as diloco:
            for number in range(20):
                jump_s = (-1) ** number * 1e7 * number
                monkeypatch.setattr(time, "time", lambda: 1e9 + jump_s)  # noqa: B023 - until the next one
                with diloco.busy("evaluation", at_most_s=5.0):
                    train(model, optimizer, diloco)
            diloco.checkpoint()
            assert diloco._checkpoints.written_step == 20
        assert daemon.wait_for(Done).step == 20
        assert not [message for message in daemon.said if isinstance(message, Warned)]


SAVING = """
import json, os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import diloco_node
folder = sys.argv[1]
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = folder + "/learner.sock", folder + "/memory.sock"
os.environ["DILOCO_STOP_S"] = "0.1"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
class Rows:
    position = 0
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]
rows = Rows()
def whole(): return [float(x) for p in model.parameters() for x in p.full_tensor().reshape(-1)]
with diloco_node.attach(model, optimizer, stateful={"rows": rows}) as diloco:
    first = rows.position
    for number in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        rows.position += 4
        diloco.step(tokens=4)
        if number == 3:
            saved = whole()
            parts, moments = get_state_dict(model, optimizer)
            dcp.save({"model": parts, "optimizer": moments, "rows": rows}, checkpoint_id=folder + "/saved")
    diloco.checkpoint()
    steps, tokens, end = diloco.steps, diloco.tokens, whole()
dcp.load({"model": parts, "optimizer": moments, "rows": rows}, checkpoint_id=folder + "/saved")
loaded = [float(x) for name, p in sorted(parts.items()) for x in p.full_tensor().reshape(-1)]
print(json.dumps({"steps": steps, "tokens": tokens, "first": first, "rows": rows.position,
                  "is_saved": sorted(loaded) == sorted(saved), "has_moved": saved != end}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.e2e
@pytest.mark.no_device("torch saves parts of the host's own tensors")
def test_ranks_that_save_by_torchs_own_checkpoints_train_on(tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        for position in (0, 32):
            with Ranks(2, run_program, SAVING, str(tmp_path)) as ranks:
                for answer in map(json.loads, ranks.answers()):
                    assert answer == {
                        "steps": 8, "tokens": 64, "first": position, "rows": position + 16, "is_saved": True,
                        "has_moved": True,
                    }  # fmt: skip
            daemon.wait_for(Done, 1 + position // 32)
        assert not [message for message in daemon.said if isinstance(message, Warned)]
