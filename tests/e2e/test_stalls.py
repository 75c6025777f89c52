"""A process that stops, or a disk that takes seconds for a sync, holds up nobody else, and the way back is clean."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import gray_region
import pytest

from tests.kit.cluster_kit import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

PROGRAM = str(Path(gray_region.__file__).resolve())
ROUNDS = 8
"""Rounds that the others commit meanwhile: two of each fragment."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end; it may have been replaced meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def slow_disk(faults: Path, region: str) -> Iterator[None]:
    """Each sync of the region's daemon takes ten seconds longer."""
    (faults / region).write_text("slow_fsync")
    try:
        yield
    finally:
        (faults / region).unlink()


async def test_a_stopped_process_holds_up_nobody_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 3)
    try:
        await cluster.start()
        await cluster.until_trains()
        leader = await cluster.until_leader()
        follower, other = cluster.others(leader)
        for region, process in ((follower, "learner"), (other, "daemon"), (leader, "daemon")):
            pids = (await cluster.until_trains())[region]["pids"]
            others = cluster.others(region)
            with stopped(pids[process]):
                now = await cluster.until_commits(ROUNDS, others, why=f"while the {process} of {region} stands still")
                if region == leader:
                    assert {one["leader"] for one in now.values()} <= set(others), "another one leads"
            await cluster.until_merged(region, why=f"after its {process} went on")
            await cluster.until_leader()
        supervisor = cluster.regions[leader].process
        assert supervisor is not None
        with stopped(supervisor.pid):
            await cluster.until_commits(ROUNDS, why="while a supervisor stands still")
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()


async def test_a_disk_that_takes_ten_seconds_for_a_sync_holds_up_nobody_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 3)
    faults = tmp_path / "faults"
    faults.mkdir()
    try:
        for name in cluster.names:
            region = cluster.regions[name]
            region.program, region.env = (PROGRAM,), {gray_region.FAULTS_VARIABLE: str(faults)}
            await region.start(cluster.config)
        await cluster.until_trains()
        leader = await cluster.until_leader()
        for region in (leader, cluster.others(leader)[0]):
            with slow_disk(faults, region):
                others = cluster.others(region)
                now = await cluster.until_commits(ROUNDS, others, why=f"while the disk of {region} is slow")
                if region == leader:
                    assert {one["leader"] for one in now.values()} <= set(others), "it has handed the lead over"
            await cluster.until_merged(region, why="after its disk was well again")
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()
