"""Regions of different sizes in one run: one with two ranks under FSDP2, one with a single process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from diloco_node.cli.demo.processes import free_ports
from tests.kit.cluster_kit import Cluster, all_train
from tests.kit.repository import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

EXAMPLE = str(ROOT / "examples" / "fsdp_loop.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", EXAMPLE]


async def test_a_region_of_two_shards_and_one_of_a_single_process_are_learners_of_one_run(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 2)
    sharded, single = cluster.names
    try:
        await cluster.regions[sharded].start(cluster.config, TORCHRUN)
        await cluster.regions[single].start(cluster.config, [sys.executable, EXAMPLE])
        before = await cluster.until_trains()
        now = await cluster.until_commits(8)
        for name, ranks in ((sharded, 2), (single, 1)):
            learner = now[name]["learner"]
            assert learner["tokens"] == learner["step"] * ranks * 8 * 64, "tokens of all ranks"
        os.kill(before[sharded]["pids"]["learner"], signal.SIGKILL)  # rank 0; the other one follows
        await cluster.until(
            "the ranks are back",
            lambda now: (
                all_train(now) and now[sharded]["learner"]["incarnation"] > before[sharded]["learner"]["incarnation"]
            ),
        )
        await cluster.until_merged(sharded, why="after a rank was killed")
        await cluster.until_commits(4)
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()


async def test_a_region_of_two_hosts_has_its_daemon_on_the_first(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 2)
    sharded, single = cluster.names
    port = str(free_ports(1)[0])
    hosts = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    launcher = [sys.executable, "-m", "torch.distributed.run", *hosts]
    elsewhere = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    second = await asyncio.create_subprocess_exec(
        *launcher, "--node-rank", "1", EXAMPLE, env=elsewhere, start_new_session=True
    )
    try:
        await cluster.regions[sharded].start(cluster.config, [*launcher, "--node-rank", "0", EXAMPLE])
        await cluster.regions[single].start(cluster.config, [sys.executable, EXAMPLE])
        await cluster.until_trains()
        now = await cluster.until_commits(4)
        learner = now[sharded]["learner"]
        assert learner["tokens"] == learner["step"] * 2 * 8 * 64, "tokens of both hosts"
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(second.pid, signal.SIGKILL)
        await second.wait()


async def test_the_built_in_trainer_cuts_its_model_where_it_is_told_to(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 2)
    sharded, _ = cluster.names
    cluster.regions[sharded].settings = ("model.ranks=2", "model.shard=fsdp")
    try:
        await cluster.start()
        await cluster.until_trains()
        now = await cluster.until_commits(8)
        tokens = {name: now[name]["learner"]["tokens"] // now[name]["learner"]["step"] for name in cluster.names}
        assert tokens[sharded] == 2 * tokens[cluster.names[1]], "two ranks, each with a batch of its own"
        await cluster.end()
        cluster.check_equal()
        assert cluster.account().faults == ()
    finally:
        await cluster.clear()
