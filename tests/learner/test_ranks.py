"""Two real ranks over Gloo under one fake daemon: same values on both, one sum of tokens, one end."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diloco_node.core.types import Codec
from diloco_node.errors import LearnerError
from diloco_node.learner.ranks import Boundary, Orders, Ranks
from diloco_node.shared_memory import MemoryStore
from diloco_node.storage.trained import read_trained
from diloco_node.wire.learner_link import (
    Done,
    OfferApplied,
    RunAdvanced,
    ShardsGiven,
    SnapshotReady,
    SnapshotRequested,
    VersionOffered,
)
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon
from tests.kit.ports import free_port

SCRIPT = """
import hashlib, json, sys, time
import torch, torch.distributed as dist
from torch import nn
import diloco_node
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7 + rank)                      # different parameters before attach
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(getattr(torch, sys.argv[1]))
if sys.argv[2] == "odd":
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
def digest():
    data = b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()
seen, run = [], []
with diloco_node.attach(model, optimizer) as diloco:
    seen.append(digest())
    while not diloco.should_stop:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()
        diloco.step(tokens=3 + rank)
        seen.append(digest())
        run.append((diloco.global_step, diloco.progress))
        time.sleep(0.001)
    print(json.dumps({"rank": rank, "seen": seen, "run": run, "steps": diloco.steps, "tokens": diloco.tokens,
                      "region": diloco.region, "regions": diloco.regions, "index": diloco.region_index}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.e2e
@pytest.mark.no_device("its ranks are processes without one")
@pytest.mark.parametrize(("dtype", "defaults"), [("bfloat16", ""), ("float32", "odd")])
def test_two_ranks_stay_equal_through_merges(tmp_path: Path, dtype: str, defaults: str) -> None:
    with MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path, codec=Codec.FP32) as daemon:
        processes = start_ranks(tmp_path, dtype, defaults)
        daemon.wait_for(OfferApplied, 2)
        for version in range(1, 4):
            daemon.send(RunAdvanced(1000 * version, version / 4))
            daemon.want(0)
            ready = daemon.wait_for(SnapshotReady, version)
            merged = daemon.theta[0] - daemon.decoded(0) + 0.5
            daemon.commit(0, merged, ready.contribution.snapshot if version != 2 else -1)
            daemon.wait_for(OfferApplied, 2 + version)
        time.sleep(0.05)
        daemon.stop_learner()
        answers = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in processes]
        done = daemon.wait_for(Done)
    assert [process.returncode for process in processes] == [0, 0]
    first, second = sorted(answers, key=lambda answer: answer["rank"])
    assert first["seen"] == second["seen"]
    assert len(set(first["seen"])) > 4
    assert first["run"] == second["run"], "one learning rate on all ranks"
    assert {0.25, 0.5, 0.75} <= {part for _, part in first["run"]}
    assert first["run"][-1][0] >= 3000
    for answer in (first, second):
        assert answer["steps"] == done.step
        assert answer["tokens"] == 7 * answer["steps"]  # 3 and 4 of the two ranks
        assert (answer["region"], answer["regions"], answer["index"]) == ("us-east", 3, 1)
    assert done.tokens == 7 * done.step
    assert read_trained(tmp_path)[0].tokens == done.tokens
    assert len(daemon.attaches) == 1


def start_ranks(folder: Path, dtype: str, defaults: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    shared = os.environ | {
        "DILOCO_SOCKET": str(folder / "learner.sock"),
        "DILOCO_SUPERVISOR": str(folder / "memory.sock"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), dtype, defaults]
    return [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]


def test_launcher_without_process_group_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(LearnerError, match=r"WORLD_SIZE is 8.*init_process_group"):
        Ranks()


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_of_fewer_ranks_than_were_started_is_refused(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each group would be a learner, and take the other's place."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda backend: None)
    for launched in ("4", "8"):
        monkeypatch.setenv("WORLD_SIZE", launched)
        with pytest.raises(
            LearnerError, match=rf"WORLD_SIZE is {launched}, but torch.distributed has {size} ranks: each"
        ):
            Ranks()
    for launched in ("1", "", "?", "-1"):  # of the hosts, as some clusters count; or of nobody
        monkeypatch.setenv("WORLD_SIZE", launched)
        assert Ranks().size == size


def test_orders_are_on_the_way_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "broadcast", lambda values, source, group: sent.append(values))
    ranks = Ranks()
    ranks.size = 2
    orders = Orders(
        (SnapshotRequested(0, 5, 4), SnapshotRequested(3, 0, -1)),
        (VersionOffered(1, 7, -1), VersionOffered(2, 0, 0, is_last=True), VersionOffered(4, 9, 8)),
        wants_initial_state=True,
    )
    assert ranks.share_orders(orders, fragments=5) == orders
    assert ranks.share_orders(Orders(), fragments=5) == Orders()
    assert [values.dtype for values in sent] == [torch.int64] * 2
    shards = Orders(deal=ShardsGiven(3, (1, 5), (0, -1)), carry_steps_limit=96)
    assert ranks.share_orders(shards, fragments=5) == shards


def test_one_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks()
    assert (ranks.size, ranks.is_first) == (1, True)
    own = Boundary(5, True, has_orders=True, arrived=(3,), global_step=8, part=0.5)
    assert ranks.agree(own, fragments=4) == own
    orders = Orders(offers=(VersionOffered(2, 7, -1),))
    assert ranks.share_orders(orders, fragments=4) == orders
    ranks.meet("settle()")
    assert ranks.all_bytes(b"welcome") == [b"welcome"]
    assert ranks.share_bytes(b"welcome") == b"welcome"
    ranks.close()
