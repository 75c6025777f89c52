"""A process that stops, or a disk that takes seconds for a sync, holds up nobody else, and the way back is clean."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import gray_region
import pytest

from diloco_node.supervisor.preload import FORK_SERVER
from tests.kit.cluster_kit import FAILED_BALLOT_WINDOWS, Cluster, children, end_process, is_running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

PROGRAM = str(Path(gray_region.__file__).resolve())


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
        usual = await cluster.rounds_per_step()
        leader = await cluster.until_leader()
        follower, other = cluster.others(leader)
        for region, process in ((follower, "learner"), (other, "daemon"), (leader, "daemon")):
            pids = (await cluster.until_trains())[region]["pids"]
            # No supervisor has a part in rounds.
            with stopped(pids[process]), stopped(pids["supervisor"]):
                why = f"while {process} and supervisor of {region} stand still"
                now = await cluster.until_paced(usual, cluster.others(region), why=why)
                if region == leader:
                    assert leader not in {one["leader"] for one in now.values()}, "another one leads"
            await cluster.until_merged(region, why=f"after its {process} went on")
            await cluster.until_leader()
        await lose_a_learner_without_its_fork_server(cluster, usual, follower)
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()


async def lose_a_learner_without_its_fork_server(cluster: Cluster, usual: float, region: str) -> None:
    """The others go on, and the next learner comes without the fork server, which is killed for its silence."""
    pids = (await cluster.until_trains([region]))[region]["pids"]
    # The learner is a fork of it, with the same command line.
    [server] = [pid for pid in children(pids["supervisor"]) if is_fork_server(pid) and pid != pids["learner"]]
    with stopped(server):
        end_process(pids["learner"])
        await cluster.until_paced(usual, cluster.others(region), why=f"while the fork server of {region} stands still")
        await cluster.until_merged(region, why="without its fork server")
        assert not is_running(server)


def is_fork_server(pid: int) -> bool:
    """Whether the process runs that program, or is a fork of it."""
    return FORK_SERVER.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


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
        usual = await cluster.rounds_per_step()
        leader = await cluster.until_leader()
        for region in (leader, cluster.others(leader)[0]):
            with slow_disk(faults, region):
                others = cluster.others(region)
                now = await cluster.until_paced(
                    usual, others, why=f"while the disk of {region} is slow", windows=FAILED_BALLOT_WINDOWS
                )
                if region == leader:
                    assert leader not in {one["leader"] for one in now.values()}, "it has handed the lead over"
            await cluster.until_merged(region, why="after its disk was well again")
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()
