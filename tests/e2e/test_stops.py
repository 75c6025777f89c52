"""All processes of a region are told to stop at once, as a scheduler does."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.kit.cluster_kit import WAIT_S, Cluster, children

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


async def test_a_region_whose_processes_are_all_told_at_once_loses_no_step(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 3)
    try:
        await cluster.start()
        await cluster.until_trains()
        name = await cluster.until_leader()  # nobody else would merge its last steps
        await cluster.until_merged(name)
        process = cluster.regions[name].process
        assert process is not None
        pids = [*children(process.pid), process.pid]
        for pid in (pid for _ in range(2) for pid in pids):  # one stop may come twice
            os.kill(pid, signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
        log = (cluster.folder / name / "logs" / "supervisor.log").read_text()
        assert "learner exited, code=0" in log, log
        assert "; lost:" not in log, log
        await cluster.start(name)
        await cluster.until_trains()
        await cluster.end()
    finally:
        await cluster.clear()
    cluster.check_equal()
    assert cluster.account().faults == ()
