"""Any process of any region may be killed: the others go on, and what comes back catches up to the same bytes."""

from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster, all_train, end_process

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


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


async def test_killed_learner_daemon_and_leader_come_back_and_the_digests_stay_equal(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 4)
    try:
        await cluster.start()
        await cluster.until_trains()
        leader = await cluster.until_leader()
        followers = cluster.others(leader)
        await kill(cluster, followers[0], "learner")
        await kill(cluster, followers[1], "daemon")
        await kill(cluster, leader, "daemon")
        await kill(cluster, await cluster.until_leader(), "learner")
        await cluster.end()
    finally:
        await cluster.clear()
    report = cluster.report()
    assert report["equal_digests"] is True
    assert report["tokens"]["faults"] == []
    assert report["tokens"]["balanced"] is True
    cluster.check_equal()
