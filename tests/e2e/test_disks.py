"""Disks that are lost, one after the other: the region comes back by itself, votes again, and every token is booked."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kit.cluster_kit import Cluster, all_train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

SLOW_STEPS = {'step_time_min = "50ms"': 'step_time_min = "100ms"', "sync_every = 16": "sync_every = 8"}
"""Half of the demo's steps for as many rounds: the machine's cores are for the daemons."""


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "run", request.param, changes=SLOW_STEPS)
    try:
        yield made
    finally:
        await made.clear()


async def lose_folder(cluster: Cluster, victim: str) -> None:
    """Kill a region, empty its folder, start it: the others go on meanwhile, and it trains and merges again."""
    before = (await cluster.until_trains([victim]))[victim]
    others = [name for name in cluster.names if name != victim]
    await cluster.kill(victim)
    cluster.wipe(victim)
    await cluster.until_commits(4, others, why=f"without {victim}")
    committed = max(cluster.regions[name].status["rounds_committed"] for name in others)
    await cluster.start(victim)
    after = await cluster.until(
        f"{victim} is back with an empty folder",
        lambda now: all_train(now) and min(now[victim]["versions"]) > max(before["versions"]),
    )
    assert after[victim]["learner"]["incarnation"] > before["learner"]["incarnation"], "a life was handed out twice"
    assert after[victim]["rounds_committed"] >= committed
    await cluster.until_merged(victim, why="after its folder was lost")
    await cluster.until(f"the ledger names the new disk of {victim}", lambda now: is_named(now[victim]))


def is_named(status: dict[str, object]) -> bool:
    """Whether the view names the region's disk: only then its votes count."""
    return status.get("disk_named", True) is True


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_a_follower_and_a_leader_that_lose_their_folders_come_back_and_vote_again(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.until_trains()
    await cluster.until_commits(8)
    leader = await cluster.until_leader()
    follower = next(name for name in cluster.names if name != leader)
    await lose_folder(cluster, follower)
    await lose_folder(cluster, await cluster.until_leader())
    # The third region never lost anything. Without it both wiped ones must vote and acknowledge.
    wiped = [name for name in cluster.names if cluster.lost[name]]
    if len(wiped) == 1:
        wiped.append(leader)
        await lose_folder(cluster, leader)
    third = next(name for name in cluster.names if name not in wiped)
    await cluster.kill(third)
    await cluster.until_commits(4, wiped, why=f"with both wiped regions, without {third}")
    await cluster.start(third)
    await cluster.until_trains()
    await end_and_check(cluster)


@pytest.mark.parametrize("cluster", [5], indirect=True)
async def test_two_of_five_lose_their_folders_one_after_the_other(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.until_trains()
    await cluster.until_commits(8)
    wiped = cluster.names[:2]
    for name in wiped:
        await lose_folder(cluster, name)
    # Of the three that are left two were wiped: a majority needs both.
    stopped = cluster.names[-2:]
    for name in stopped:
        await cluster.kill(name)
    await cluster.until_commits(4, [name for name in cluster.names if name not in stopped], why="with both wiped")
    await cluster.start(*stopped)
    await cluster.until_trains()
    await end_and_check(cluster)


async def end_and_check(cluster: Cluster) -> None:
    await cluster.until_commits(4)
    await cluster.end()
    cluster.check_equal()
    account = cluster.account()
    assert account.faults == ()
    assert account.trained == account.merged + account.carried + account.discarded
    assert account.discarded > 0, "learners died with steps that no merge has"


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files below a folder, by their paths in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
