"""Optimizers that update each parameter on one rank alone, and gather what it becomes: Keller Jordan's Muon does."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco_node.shared_memory import MemoryStore
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.shard_ranks import Ranks, run_program

pytestmark = [pytest.mark.e2e, pytest.mark.no_device("its ranks gather on the host")]

LOOP = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
import diloco_node

class Muon(torch.optim.Optimizer):
    # github.com/KellerJordan/Muon, without the Newton-Schulz iteration, and with the second moment of NorMuon.
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))
    @torch.no_grad()
    def step(self, closure=None):
        size, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (size - len(params) % size)
            for base in range(len(params))[::size]:
                if base + rank < len(params):
                    p = params[base + rank]
                    state = self.state[p]
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                        state["row_mean"] = torch.zeros_like(p[:, :1])
                    state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                    state["row_mean"].lerp_(p.grad.square().mean(1, keepdim=True), 0.1)
                    p.add_(state["momentum_buffer"], alpha=-group["lr"])
                dist.all_gather(padded[base:base + size], padded[base + rank])

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, size, life = dist.get_rank(), dist.get_world_size(), int(sys.argv[3])
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[1:3]
torch.manual_seed(3)
model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
muon = Muon([p for p in model.parameters() if p.ndim == 2])
adam = torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.01)
def moments():
    # Where they are trained: of Muon on the rank whose turn it is.
    owners = {p: at % size for at, p in enumerate(muon.param_groups[0]["params"])}
    return {f"{name} {key}": float(value.double().sum()) for name, p in model.named_parameters()
            for key, value in {**muon.state, **adam.state}.get(p, {}).items() if owners.get(p, rank) == rank}
diloco = diloco_node.attach(model, [muon, adam])
first = moments()
for step in range(3):
    for at, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * life + 10 * step + at))
    muon.step(); adam.step()
    diloco.step(tokens=4)
if sys.argv[4] == "closes":
    diloco.close()
else:
    whole = diloco._checkpoints._whole
    while diloco._checkpoints._whole == whole:  # the checkpoint of a boundary, which all ranks have written
        time.sleep(0.01)
        diloco.step(tokens=4)
print(json.dumps([first, moments()]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["closes", "is killed"])
def test_moments_that_one_rank_has_alone_come_back_also_with_other_ranks(end: str, tmp_path: Path) -> None:
    theta, versions = None, None
    kept: dict[str, float] = {}
    for life, count in enumerate([2, 2, 3, 1]):
        with ExitStack() as stack:
            stack.enter_context(MemoryStore(tmp_path / "memory.sock"))
            daemon = stack.enter_context(FakeDaemon(tmp_path, theta=theta, versions=versions))
            place = [str(tmp_path / name) for name in ("learner.sock", "memory.sock")]
            ranks = stack.enter_context(Ranks(count, run_program, LOOP, *place, str(life), end))
            told = [json.loads(str(answer)) for answer in ranks.answers()]
            theta, versions = daemon.theta, daemon.versions
        first = {name: value for row, _ in told for name, value in row.items()}
        assert first == kept, life
        kept = {name: value for _, row in told for name, value in row.items()}
        assert len(kept) == 5 * 2 + 5 * 3, "of Muon's matrices and AdamW's biases"
        assert kept != first
