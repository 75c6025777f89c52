"""A process that is killed or stops, a disk that takes seconds for a sync, or a lack of descriptors: it holds up nobody
else, and the way back is clean. One run of three regions goes through all of it."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import gray_region
import pytest
import pytest_asyncio

from diloco_node.supervisor.preload import FORK_SERVER
from tests.kit.cluster_kit import FAILED_BALLOT_WINDOWS, Cluster, all_train, children, end_process, is_running

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400)]

PROGRAM = str(Path(gray_region.__file__).resolve())


class Run(Cluster):
    """Three regions, and their rounds per step where nothing is wrong. What lies in `faults` can make a disk slow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "run", 3)
        self.usual = 0.0
        self.faults = folder / "faults"
        self.faults.mkdir()
        for region in self.regions.values():
            region.program, region.env = (PROGRAM,), {gray_region.FAULTS_VARIABLE: str(self.faults)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    """One run for all tests; after the last one every region has the same bytes, and every token is booked."""
    run_ = Run(tmp_path_factory.mktemp("stalls"))
    try:
        await run_.start()
        await run_.until_trains()
        await run_.until_commits(4)
        run_.usual = await run_.rounds_per_step()
        yield run_
        await run_.end()
    finally:
        await run_.clear()
    run_.check_equal()
    report = run_.report()
    assert report["equal_digests"] is True
    assert report["tokens"]["balanced"] is True
    assert run_.account().faults == ()


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


@contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing more; it may be replaced meanwhile."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    opened = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def kill(cluster: Cluster, region: str, process: str) -> None:
    """SIGKILL one process of a region, and see the others go on and the region come back."""
    before = await cluster.until_trains()
    pid = before[region]["pids"][process]
    committed = max(status["rounds_committed"] for status in before.values())
    end_process(pid)
    others = [name for name in before if name != region]
    await cluster.until(
        f"the others step and commit after the {process} of {region} was killed",
        lambda now: all(
            now[name]["rounds_committed"] >= committed + 4
            and now[name]["learner"] is not None
            and now[name]["learner"]["step"] >= before[name]["learner"]["step"] + 16
            and now[name]["learner"]["incarnation"] == before[name]["learner"]["incarnation"]
            for name in others
        ),
    )
    after = await cluster.until(
        f"{region} trains and merges again",
        lambda now: (
            all_train(now)
            and now[region]["pids"][process] != pid
            and now[region]["rounds_committed"] >= committed + 8
            and min(now[region]["versions"]) >= max(before[region]["versions"])
        ),
    )
    # The other child of the region was not restarted.
    other = "learner" if process == "daemon" else "daemon"
    assert after[region]["pids"][other] == before[region]["pids"][other]


async def test_killed_learner_daemon_and_leader_come_back(run: Run) -> None:
    leader = await run.until_leader()
    followers = run.others(leader)
    await kill(run, followers[0], "learner")
    await kill(run, followers[1], "daemon")
    await kill(run, leader, "daemon")
    await kill(run, await run.until_leader(), "learner")


async def test_a_stopped_process_holds_up_nobody_else(run: Run) -> None:
    leader = await run.until_leader()
    follower, other = run.others(leader)
    for region, process in ((follower, "learner"), (other, "daemon"), (leader, "daemon")):
        pids = (await run.until_trains())[region]["pids"]
        # No supervisor has a part in rounds.
        with stopped(pids[process]), stopped(pids["supervisor"]):
            why = f"while {process} and supervisor of {region} stand still"
            now = await run.until_paced(run.usual, run.others(region), why=why)
            if region == leader:
                assert leader not in {status["leader"] for status in now.values()}, "another one leads"
        await run.until_merged(region, why=f"after its {process} went on")
        await run.until_leader()


async def test_a_learner_that_dies_while_its_fork_server_stands_still_comes_without_it(run: Run) -> None:
    """The others go on, and the fork server is killed for its silence."""
    region = run.others(await run.until_leader())[0]
    pids = (await run.until_trains([region]))[region]["pids"]
    # The learner is a fork of it, with the same command line.
    [server] = [pid for pid in children(pids["supervisor"]) if is_fork_server(pid) and pid != pids["learner"]]
    with stopped(server):
        end_process(pids["learner"])
        await run.until_paced(run.usual, run.others(region), why=f"while the fork server of {region} stands still")
        await run.until_merged(region, why="without its fork server")
        assert not is_running(server)


def is_fork_server(pid: int) -> bool:
    """Whether the process runs that program, or is a fork of it."""
    return FORK_SERVER.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_disk_that_takes_ten_seconds_for_a_sync_holds_up_nobody_else(run: Run) -> None:
    leader = await run.until_leader()
    for region in (leader, run.others(leader)[0]):
        await run.until_trains()
        with slow_disk(run.faults, region):
            why = f"while the disk of {region} is slow"
            now = await run.until_paced(run.usual, run.others(region), why=why, windows=FAILED_BALLOT_WINDOWS)
            if region == leader:
                assert leader not in {status["leader"] for status in now.values()}, "it has handed the lead over"
        await run.until_merged(region, why="after its disk was well again")


async def test_a_daemon_that_can_open_nothing_more_holds_up_nobody_else(run: Run) -> None:
    leader = await run.until_leader()
    for region in (leader, run.others(leader)[0]):
        pid = (await run.until_trains())[region]["pids"]["daemon"]
        with without_descriptors(pid):
            why = f"while {region} can open nothing more"
            await run.until_paced(run.usual, run.others(region), why=why, windows=FAILED_BALLOT_WINDOWS)
        await run.until_merged(region, why="with descriptors")
