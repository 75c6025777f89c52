"""A process that is killed or stops, a disk that takes seconds for a sync, no descriptors, no memory: nobody else is
held up, and the way back is clean. One run of three regions goes through all of it."""

import errno
import os
import resource
import signal
import time
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

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
SHORT_OF_MEMORY_BYTES = 192 * 2**20
"""A daemon and a learner need some 300 MiB. With less than this the supervisor would be the largest one."""

GROUP_S = 30.0
LOOK_S = 0.05
"""To get rid of a group of processes, and between two tries."""


class Run(Cluster):
    """Three regions, and their rounds per step where nothing is wrong. What lies in `faults` can make a disk slow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "run", 3, has_fork_servers=True)
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
        run_.check_equal()
        tokens = run_.report()["tokens"]
        assert tokens["faults"] == []
        # A user of the run does not have the lost folders.
        assert {one["learner"] for one in tokens["uncounted"]} == {name for name in run_.names if run_.lost[name]}
        account = run_.account()
        assert account.faults == ()
        assert account.trained == account.merged + account.carried + account.discarded
    finally:
        await run_.clear()


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


@contextmanager
def without_memory(name: str, supervisor: int) -> Iterator[Path]:
    """The region's processes get no more, nor do their children. The kernel kills the largest, so no supervisor."""
    group = MEMORY_GROUPS / name
    home = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    group.mkdir()
    try:
        for pid in (supervisor, *children(supervisor)):
            (group / "cgroup.procs").write_text(str(pid))
        (group / "memory.limit_in_bytes").write_text(str(SHORT_OF_MEMORY_BYTES))
        yield group
    finally:
        (group / "memory.limit_in_bytes").write_text("-1")
        _empty(group, MEMORY_GROUPS / home.rpartition(":")[2].strip("/"))


def _empty(group: Path, home: Path) -> None:
    """Move its processes home and remove it. What is being started, or has just ended, keeps it busy for a while."""
    deadline_s = time.monotonic() + GROUP_S
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (home / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(LOOK_S)
        else:
            return


def killed_for_memory(group: Path) -> int:
    """How many processes of the group the kernel has killed."""
    words = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(words["oom_kill"])


def can_limit_memory() -> bool:
    """Whether this process may make groups of processes with a limit of memory."""
    probe = MEMORY_GROUPS / f"diloco-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


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
            now[name]["rounds_committed"] >= committed + 2
            and now[name]["learner"] is not None
            and now[name]["learner"]["step"] >= before[name]["learner"]["step"] + 8
            and now[name]["learner"]["incarnation"] == before[name]["learner"]["incarnation"]
            for name in others
        ),
    )
    after = await cluster.until(
        f"{region} trains and merges again",
        lambda now: (
            all_train(now)
            and now[region]["pids"][process] != pid
            and now[region]["rounds_committed"] >= committed + 4
            and min(now[region]["versions"]) >= max(before[region]["versions"])
        ),
    )
    # The other child of the region was not restarted.
    other = "learner" if process == "daemon" else "daemon"
    assert after[region]["pids"][other] == before[region]["pids"][other]


async def test_killed_learner_daemon_and_leader_come_back(run: Run) -> None:
    leader = await run.until_leader()
    await kill(run, run.others(leader)[0], "daemon")
    await kill(run, leader, "daemon")
    await kill(run, await run.until_leader(), "learner")


# Of the gate are tests/lab/sim/test_troubles.py, tests/core/ledger/test_disks.py, and
# tests/daemon/test_daemon_on_disk.py, where no incarnation is used again.
@pytest.mark.long
async def test_a_leader_whose_folder_is_lost_comes_back(run: Run) -> None:
    """Where the daemons of the others stand still, one after the other, the test below needs its vote."""
    leader = await run.until_leader()
    before = (await run.until_trains())[leader]
    await run.kill(leader)
    run.wipe(leader)
    await run.until_commits(4, run.others(leader), why=f"without {leader}")
    await run.start(leader)
    after = await run.until(
        f"{leader} is back with an empty folder",
        lambda now: all_train(now) and min(now[leader]["versions"]) > max(before["versions"]),
    )
    assert after[leader]["learner"]["incarnation"] > before["learner"]["incarnation"], "a life was handed out twice"
    await run.until_merged(leader, why="after its folder was lost")


async def test_a_stopped_process_holds_up_nobody_else(run: Run) -> None:
    leader = await run.until_leader()
    for region, process in ((run.others(leader)[0], "learner"), (leader, "daemon")):
        pids = (await run.until_trains())[region]["pids"]
        # No supervisor has a part in rounds.
        with stopped(pids[process]), stopped(pids["supervisor"]):
            why = f"while {process} and supervisor of {region} stand still"
            now = await run.until_paced(run.usual, run.others(region), why=why)
            if region == leader:
                assert leader not in {status["leader"] for status in now.values()}, "another one leads"
        await run.until_merged(region, why=f"after its {process} went on")
        await run.until_leader()


@pytest.mark.long  # of the gate is tests/supervisor/test_preload.py
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


@pytest.mark.long  # of the gate are tests/lab/sim/test_slow_disks.py and tests/storage
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


@pytest.mark.long
async def test_a_leader_whose_daemon_can_open_nothing_more_holds_up_nobody_else(run: Run) -> None:
    """What any daemon lacks then, tests/transport/test_descriptors.py looks at."""
    leader = await run.until_leader()
    with without_descriptors((await run.until_trains())[leader]["pids"]["daemon"]):
        why = f"while {leader} can open nothing more"
        await run.until_paced(run.usual, run.others(leader), why=why, windows=FAILED_BALLOT_WINDOWS)
    await run.until_merged(leader, why="with descriptors")


@pytest.mark.long  # to the others it is a region whose processes are killed, as above
@pytest.mark.skipif(not can_limit_memory(), reason="no memory cgroup (v1) can be made here: NOT TESTED")
async def test_a_region_without_memory_holds_up_nobody_else(run: Run) -> None:
    region = await run.until_leader()
    supervisor, others = run.regions[region].process, run.others(region)
    assert supervisor is not None
    with without_memory(f"diloco-{os.getpid()}", supervisor.pid) as group:
        for pid in children(supervisor.pid):
            end_process(pid)  # the next ones find no room
        why = f"while {region} has no memory"
        await run.until(
            "the kernel has killed a process for want of memory", lambda _: killed_for_memory(group), others
        )
        await run.until_paced(run.usual, others, why=why)
    await run.until_merged(region, why="with memory")
