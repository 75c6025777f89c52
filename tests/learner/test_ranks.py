"""What ranks say to one another, and how many there must be; tests/learner/test_sharded.py has real ones."""

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diloco_node.errors import LearnerError
from diloco_node.learner.ranks import PATIENCE, Boundary, Ranks, _new_group, among_ranks
from diloco_node.shared_memory import MemoryStore
from diloco_node.wire.learner_link import (
    SettingsChanged,
    ShardsGiven,
    SnapshotRequested,
    VersionOffered,
)
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.shard_ranks import Ranks as GroupOfRanks
from tests.kit.shard_ranks import run_program


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
    monkeypatch.setattr(dist, "new_group", lambda **how: None)
    monkeypatch.setattr("diloco_node.learner.ranks._await_all", lambda rank, ranks: None)
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
    orders = (
        ShardsGiven(3, (1, 5), (0, -1)),
        SettingsChanged(16, 96),
        *(VersionOffered(1, 7, -1), VersionOffered(2, 0, 0, is_last=True), VersionOffered(4, 9, 8)),
        *(SnapshotRequested(0, 5, 4), SnapshotRequested(3, 1, 0)),
    )
    assert ranks.share_orders(orders) == orders
    assert [values.dtype for values in sent] == [torch.int64, torch.uint8]
    assert ranks.share_orders(()) == ()


def test_one_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = Ranks()
    assert (ranks.size, ranks.is_first) == (1, True)
    own = Boundary(5, True, has_orders=True, arrived=(3,), global_step=8, part=0.5)
    assert ranks.agree(own, fragments=4) == own
    orders = (VersionOffered(2, 7, -1),)
    assert ranks.share_orders(orders) == orders
    ranks.meet("settle()")
    assert ranks.all_bytes(b"welcome") == [b"welcome"]
    assert ranks.share_bytes(b"welcome") == b"welcome"
    ranks.close()


@pytest.mark.parametrize(("own", "waits"), [(timedelta(hours=5), timedelta(hours=5)), (timedelta(seconds=9), PATIENCE)])
def test_ranks_wait_for_one_another_as_long_as_the_script_says(own: timedelta, waits: timedelta) -> None:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=own)
    try:
        backend: Any = _new_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout == waits
    finally:
        dist.destroy_process_group()


def test_a_group_that_the_script_has_ended_is_named() -> None:
    with (
        pytest.raises(LearnerError, match=r"process group of this region's ranks has ended .* after close\(\)"),
        among_ranks(),
    ):
        dist.broadcast(torch.zeros(1), 0)


PROGRAM = """
import json, logging, os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import diloco_node
from diloco_node.errors import LearnerError
from diloco_node.learner import ranks
kind = sys.argv[1]
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[2:]
ranks.ABSENCE_TOLD, ranks.PATIENCE = timedelta(seconds=0.3), timedelta(seconds=20 if kind == "late" else 2)
dist.init_process_group("gloo", timeout=timedelta(seconds=2))
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("diloco_node").addHandler(Lines())
is_absent = dist.get_rank() == 1
model = torch.nn.Linear(3, 2)
error = ""
try:
    if is_absent and kind != "step":
        time.sleep(1.0)
    if not is_absent or kind != "never":
        diloco = diloco_node.attach(model)
        if not is_absent or kind != "step":
            diloco.step(tokens=1)
            diloco.close()
except LearnerError as problem:
    error = str(problem)
time.sleep(4.0 if is_absent and kind != "late" else 0.0)
print(json.dumps({"error": error, "lines": lines}))
"""


@pytest.mark.e2e
@pytest.mark.no_device("ranks without a device")
@pytest.mark.parametrize(
    ("kind", "error", "line"),
    [
        ("late", "", "attach() waits for rank 1 of 2: every rank calls it, not rank 0 alone"),
        ("never", r"attach\(\) waits for rank 1 of 2", "attach() waits for rank 1 of 2"),
        ("step", r"another rank of this region did not come to the same call .* Every rank calls step\(\)", ""),
    ],
)
def test_a_call_on_rank_0_alone_is_named(tmp_path: Path, kind: str, error: str, line: str) -> None:
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path),
        GroupOfRanks(2, run_program, PROGRAM, kind, *place) as ranks,
    ):
        answer = json.loads(ranks.answer(0))  # type: ignore[arg-type]
        assert re.match(error, answer["error"]) if error else not answer["error"]
        assert [text for text in answer["lines"] if line in text] or not line
