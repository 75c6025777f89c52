"""A run that goes on: certificates renewed, their authority replaced, one revoked; a region expelled."""

import asyncio
import os
import signal
from collections.abc import Iterable

import pytest

from diloco_node.cli.orders import give_order
from diloco_node.errors import ConfigError
from diloco_node.transport.authority import drop_old_authority, renew_authority, renew_regions
from diloco_node.transport.certificates import load_identity
from tests.kit.cluster_kit import Cluster, Statuses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SOON_S = 60.0
"""On a machine that others use, too: what should be there within seconds."""


def fingerprint(cluster: Cluster, name: str) -> str:
    """Of the certificate in the region's folder."""
    return load_identity(cluster.folder / "certs" / name).certificate.fingerprint.hex()


def row(status: dict, peer: str) -> dict:
    return next(row for row in status["peers"] if row["name"] == peer)


def is_linked_anew(cluster: Cluster, statuses: Statuses) -> bool:
    """Whether each region is linked with every other one by the certificates that lie in their folders."""
    return all(
        (certificate := row(statuses[name], peer)["certificate"]) is not None
        and certificate["fingerprint"] == fingerprint(cluster, peer)
        and certificate["has_newest_of_ours"]
        for name in cluster.names
        for peer in cluster.others(name)
    )


def hang_up(cluster: Cluster, names: Iterable[str]) -> None:
    """SIGHUP to `diloco-node start` of each."""
    for name in names:
        process = cluster.regions[name].process
        assert process is not None
        os.kill(process.pid, signal.SIGHUP)


async def until_linked(cluster: Cluster, why: str) -> None:
    await cluster.until(why, lambda now: is_linked_anew(cluster, now), wait_s=SOON_S)


async def until_shut_out(cluster: Cluster, victim: str, *words: str) -> None:
    """Until no other region has a link with it, and each says why."""
    await cluster.until(
        f"{victim} has no link: {words}",
        lambda now: all(
            row(now[name], victim)["certificate"] is None
            and any(word in row(now[name], victim)["error"] for word in words)
            for name in now
        ),
        cluster.others(victim),
        wait_s=SOON_S,
    )


async def order(cluster: Cluster, leader: str, path: str, region: str) -> None:
    await asyncio.to_thread(give_order, cluster.regions[leader].state_dir, path, {"peer": region})


async def test_a_run_of_two_years_needs_no_stop(cluster: Cluster) -> None:
    certs = cluster.folder / "certs"
    await cluster.start()
    await cluster.until_trains()
    await cluster.until_commits(2)
    before = await cluster.statuses()

    first = cluster.names[0]
    whole = (certs / first / "node.pem").read_bytes()
    (certs / first / "node.pem").write_bytes(whole[:200])
    hang_up(cluster, [first])
    await cluster.until(
        "a half-written file is told",
        lambda now: any("keeps the certificate that it has" in note["text"] for note in now[first]["notes"]),
        wait_s=SOON_S,
    )
    (certs / first / "node.pem").write_bytes(whole)
    assert is_linked_anew(cluster, await cluster.statuses()), "nothing happened to the links"
    renew_regions(certs, [first])
    hang_up(cluster, [first])
    await until_linked(cluster, f"{first} is renewed")
    await cluster.until_commits(2, why="with a renewed region")

    for step in (renew_authority, renew_regions, drop_old_authority):
        step(certs)
        hang_up(cluster, cluster.names)
        await until_linked(cluster, f"the authority is replaced: {step.__name__}")
        await cluster.until_commits(1, why=step.__name__)
    after = await cluster.statuses()
    for name in cluster.names:
        assert after[name]["learner"]["incarnation"] == before[name]["learner"]["incarnation"]
        assert after[name]["rejections"] == [], after[name]["rejections"]

    leader = await cluster.until_leader()
    victim = cluster.others(leader)[0]
    with pytest.raises(ConfigError, match="leads with this certificate"):
        await order(cluster, leader, "certificates/revoke", leader)
    await order(cluster, leader, "certificates/revoke", victim)
    await until_shut_out(cluster, victim, "is revoked")
    await cluster.until_commits(1, cluster.others(victim), why="without the revoked one")
    renew_regions(certs, [victim])
    hang_up(cluster, [victim])
    await until_linked(cluster, "another certificate after the revoked one")

    with pytest.raises(ConfigError, match="give the order to another region"):
        await order(cluster, leader, "quarantine/add", leader)
    await order(cluster, leader, "quarantine/add", victim)
    await until_shut_out(cluster, victim, "expelled")
    await cluster.until_commits(1, cluster.others(victim), why="without the expelled one")
    await order(cluster, leader, "quarantine/lift", victim)
    await until_linked(cluster, "readmitted")
    await cluster.until_commits(1, why="with the readmitted one")

    await cluster.until_trains()
    await cluster.until_commits(2, why="with everybody again")
    await cluster.end()
    cluster.check_equal()
    assert cluster.account().faults == ()
