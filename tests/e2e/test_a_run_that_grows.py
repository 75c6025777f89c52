"""A run that grows and shrinks: a fourth region joins by one address and gets a vote; others lose theirs, and leave."""

import asyncio
from pathlib import Path

import pytest

from diloco_node.config.resolve import load_config
from diloco_node.errors import ConfigError
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports, order_finish
from diloco_node.transport.authority import add_regions
from tests.e2e.test_members_of_a_run import members, order, until_ended, until_kinds
from tests.kit.cluster_kit import WAIT_S, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]
JOINER = "ap-new"


async def until_says(joiner: RegionProcess, words: str) -> None:
    """Until a region that only waits has said so."""
    async with asyncio.timeout(WAIT_S):
        while words not in joiner.last_lines():
            assert not joiner.has_exited, joiner.last_lines(20)
            await asyncio.sleep(0.2)


async def until_member(cluster: Cluster, names: list[str]) -> None:
    """Until each of these regions is linked with the joiner and shows it."""
    await cluster.until(
        "they are linked with it",
        lambda now: all(
            any(peer["name"] == JOINER and peer["link"] == "up" for peer in now[name]["peers"]) for name in names
        ),
        names,
    )


async def joined(cluster: Cluster, leader: str, place: str) -> tuple[RegionProcess, str, Path]:
    """Add a fourth region and start it by a member's address. The process, its address, and the run.toml it wrote."""
    add_regions(cluster.folder / "certs", [JOINER])
    port, admin_port = free_ports(2)
    address, written = f"127.0.0.1:{port}", cluster.folder / "joiner" / "run.toml"
    options = ("--join", place, "--state-dir", str(cluster.folder), "--certs", str(cluster.folder / "certs"))
    options += ("--advertise", address, "--admin-port", str(admin_port))
    joiner = RegionProcess(JOINER, admin_port, cluster.folder / JOINER, settings=("learner.preload=",), options=options)
    await joiner.start(written)
    await until_says(joiner, f"`diloco-node members add {JOINER} {leader} --address {address}")
    assert not written.exists()
    answer = await order(cluster, leader, "add", JOINER, "--address", address)
    assert f"{JOINER} is a contributor when a majority agrees" in answer
    await until_says(joiner, f"{JOINER} is a member of run")
    cluster.regions[JOINER], cluster.lost[JOINER] = joiner, []
    cluster.names.append(JOINER)
    joiner.options = ()  # from here on by the run.toml that it has written
    return joiner, address, written


async def grown(cluster: Cluster) -> tuple[RegionProcess, Path]:
    """A run of three to which a fourth region has come, and in which it has a vote; its process and run.toml."""
    founders = list(cluster.names)
    await cluster.start()
    await cluster.until_trains()
    leader = await cluster.until_leader()
    first = cluster.others(leader)[0]
    config = load_config(cluster.config)
    place = str(config.regions[first].address)
    with pytest.raises(ConfigError, match=f"{place} is the address of {first}"):
        await members(cluster, leader, "add", JOINER, "--address", place)
    with pytest.raises(ConfigError, match="give the order to "):
        await members(cluster, first, "add", JOINER, "--address", "127.0.0.1:1")

    joiner, _, written = await joined(cluster, leader, place)
    taken = load_config(written)
    assert (taken.rounds, taken.model, taken.run.id) == (config.rounds, config.model, config.run.id)
    await until_member(cluster, founders)
    await cluster.until_merged(JOINER, why="as a contributor")
    assert "3 voters" in await members(cluster, leader, "list")
    await order(cluster, leader, "promote", JOINER)
    await until_kinds(cluster, cluster.names, **{JOINER.replace("-", "_"): "voter"})
    return joiner, written


async def test_a_run_of_three_grows_to_four(cluster: Cluster) -> None:
    """The command says what the daemon answers; tests/core and tests/daemon have each refusal, in each state."""
    await grown(cluster)
    await cluster.end()
    cluster.check_equal()


# Of the gate are the test above, tests/core/test_members.py, where a region leaves, and runs of the simulator.
@pytest.mark.long
async def test_a_run_of_three_grows_to_four_and_shrinks_to_two(cluster: Cluster) -> None:
    founders = list(cluster.names)
    joiner, written = await grown(cluster)
    second = founders[-1]
    await cluster.kill(second)
    await cluster.start(second)  # with its old run.toml
    await until_member(cluster, founders)
    await cluster.until_merged(JOINER, why="with a vote")

    leader = await cluster.until_leader()
    quiet, dead = [name for name in founders if name != leader]
    await order(cluster, leader, "demote", quiet)
    await until_kinds(cluster, cluster.names, **{quiet.replace("-", "_"): "contributor"})
    await cluster.until_merged(quiet, why="without a vote")
    await cluster.kill(dead)
    alive = [leader, quiet, JOINER]
    await cluster.until(
        "it is missed",
        lambda now: not any(peer["is_alive"] for peer in now[leader]["peers"] if peer["name"] == dead),
        alive,
    )
    await order(cluster, leader, "remove", dead)
    await until_kinds(cluster, alive, **{dead.replace("-", "_"): "former"})
    await order(cluster, leader, "promote", quiet)
    await until_kinds(cluster, alive, **{quiet.replace("-", "_"): "voter"})
    with pytest.raises(ConfigError, match=f"removing {JOINER} leaves 2, and the next failure stops merging; --force"):
        await members(cluster, leader, "remove", JOINER)
    await order(cluster, leader, "remove", JOINER, "--force")
    await until_ended(cluster, JOINER, f"{JOINER} was removed from the run by an operator (", "ends with 0")
    cluster.names = [leader, quiet]
    await cluster.until(
        "they know it no more",
        lambda now: all({peer["name"] for peer in status["peers"]} < {leader, quiet} for status in now.values()),
        cluster.names,
    )
    await cluster.start(dead)
    await until_ended(cluster, dead, "shows the authority's signature", "ends with 0")
    await joiner.start(written)
    await until_ended(cluster, JOINER, "was removed from the run by an operator", "ends with 0")
    with pytest.raises(ConfigError, match=f"{leader} leads: asked itself, it hands over"):
        await members(cluster, leader, "remove", leader)
    await cluster.until("it has handed over", lambda now: {one["leader"] for one in now.values()} == {quiet})
    await cluster.until_commits(1, why="with another leader")
    await order_finish([cluster.regions[quiet]], limit_s=WAIT_S)
    for name in cluster.names:
        await until_ended(cluster, name)
    cluster.check_equal()


@pytest.mark.long
async def test_a_region_that_joined_is_killed_removed_wiped_and_added_again(cluster: Cluster) -> None:
    founders = list(cluster.names)
    await cluster.start()
    await cluster.until_trains()
    leader = await cluster.until_leader()
    place = str(load_config(cluster.config).regions[leader].address)
    joiner, address, written = await joined(cluster, leader, place)
    await until_says(joiner, "daemon started")
    await cluster.kill(JOINER)
    await joiner.start(written)
    await until_member(cluster, founders)
    await cluster.kill(JOINER)  # it may fetch the state just now
    await joiner.start(written)
    await cluster.until_merged(JOINER, why="after it was killed twice")
    leader = await cluster.until_leader()
    await order(cluster, leader, "remove", JOINER, "--force")
    await until_ended(cluster, JOINER, f"{JOINER} was removed from the run by an operator", "ends with 0")
    cluster.names = founders
    cluster.wipe(JOINER)
    await cluster.until_commits(1, founders, why="without it")
    await order(cluster, leader, "add", JOINER, "--address", address)
    await joiner.start(written)
    cluster.names = [*founders, JOINER]
    await until_member(cluster, founders)
    await cluster.until_merged(JOINER, why="with an empty folder")
    await cluster.end()
    cluster.check_equal()
