"""Copies of the ranks that come apart: by roundings, where gradients are added up, or because nobody does that."""

import json
from pathlib import Path

import pytest

from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import Failed
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program

pytestmark = pytest.mark.e2e

LOOP = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
import diloco_node
from diloco_node.errors import LearnerError
kind = sys.argv[1]
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
draw = torch.Generator().manual_seed(rank)

class Rounding(torch.optim.SGD):  # at random, as torchao's optimizers do, by a seed of each rank
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                exact = parameter.detach().float() - group["lr"] * parameter.grad.float()
                low = exact.view(torch.int32) + torch.randint(1 << 16, exact.shape, dtype=torch.int32, generator=draw)
                parameter.data.copy_((low & -65536).view(torch.float32))

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(torch.bfloat16)
rate = 1e-3 * (1 + 3 * rank) if kind == "rates" else 1e-3
optimizer = Rounding(model.parameters(), lr=rate)
error = ""
try:
    with diloco_node.attach(model, optimizer) as diloco:
        for number in range(40):
            source = torch.Generator().manual_seed(number + (1000 * rank if kind == "alone" else 0))
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=source).to(torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
            diloco.step(tokens=3)
except LearnerError as problem:
    error = str(problem)
values = [parameter.detach().float().sum().item() for parameter in model.parameters()]
print(json.dumps({"steps": diloco.steps, "error": error, "values": values}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.no_device("gradients and roundings are drawn on the host")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("roundings", ""),
        ("alone", "nothing adds up the gradients of the ranks"),
        ("rates", "their gradients are equal, so the ranks make other steps of them"),
    ],
)
def test_copies_may_come_apart_by_roundings_but_by_nothing_else(tmp_path: Path, kind: str, text: str) -> None:
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path) as daemon,
        Ranks(2, run_program, LOOP, kind, *place) as ranks,
    ):
        first, second = (json.loads(answer) for answer in ranks.answers())  # type: ignore[arg-type]
        assert first["error"] == second["error"]
        assert first["values"] != second["values"], "they did come apart"
        if text:
            assert text in first["error"]
            assert first["steps"] <= (1 if kind == "alone" else 40), "though bfloat16 rounds by more than a step"
            assert text in daemon.wait_for(Failed).reason
        else:
            assert (first["error"], first["steps"]) == ("", 40)
