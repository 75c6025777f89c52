"""A region that lacks memory holds up nobody else, and the way back is clean."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster, children, end_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
SHORT_OF_MEMORY_BYTES = 192 * 2**20
"""A daemon and a learner need some 300 MiB. With less than this the supervisor would be the largest one."""

GROUP_S = 30.0
LOOK_S = 0.05
"""To get rid of a group of processes, and between two tries."""


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


@pytest.mark.skipif(not can_limit_memory(), reason="no memory cgroup (v1) can be made here: NOT TESTED")
async def test_a_region_without_memory_holds_up_nobody_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 3)
    try:
        await cluster.start()
        await cluster.until_trains()
        usual = await cluster.rounds_per_step()
        region = await cluster.until_leader()
        supervisor = cluster.regions[region].process
        assert supervisor is not None
        with without_memory(f"diloco-{os.getpid()}", supervisor.pid) as group:
            for pid in children(supervisor.pid):
                end_process(pid)  # the next ones find no room
            await cluster.until_paced(usual, cluster.others(region), why=f"while {region} has no memory")
            assert killed_for_memory(group) > 0
        await cluster.until_merged(region, why="with memory")
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()
