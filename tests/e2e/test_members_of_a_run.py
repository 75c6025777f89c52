"""Members of a run that goes on: one loses its vote, one that is dead is removed, and one that trains; each is told."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco_node.cli.application import operator_app
from diloco_node.config.resolve import load_config
from diloco_node.errors import ConfigError
from diloco_node.lab.demo.region_processes import order_finish
from diloco_node.transport.authority import init_run
from tests.kit.cluster_kit import WAIT_S, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    run = Cluster(tmp_path / "run", 4, changes={"sync_every = 16": "sync_every = 8"})
    try:
        yield run
    finally:
        await run.clear()


async def members(cluster: Cluster, leader: str, *words: str, key: Path | None = None) -> str:
    """Give the command to a region, with the authority's key; its output, or its refusal as ConfigError."""
    verb, *rest = words
    key = key or cluster.folder / "certs" / "ca.key"
    keys = [] if verb == "list" else ["--ca-key", str(key)]
    name = [] if verb == "recover" else rest[:1]
    command = ["members", verb, *name, str(cluster.regions[leader].state_dir), *rest[len(name) :], *keys]
    result = await asyncio.to_thread(CliRunner().invoke, operator_app(), command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


async def order(cluster: Cluster, leader: str, *words: str) -> str:
    """Give the command to whoever leads by now, on a busy machine another one than before; its output."""
    for _ in range(5):
        try:
            return await members(cluster, leader, *words)
        except ConfigError as error:
            match = re.search("give the order to ([a-z0-9-]+)", str(error))
            if match is None:
                raise
            leader = match.group(1)
    raise AssertionError(f"five leaders refused {words}")


async def until_kinds(cluster: Cluster, names: list[str], **kinds: str) -> None:
    """Until each of these regions has these kinds of members in its ledger."""
    wanted = {name.replace("_", "-"): kind for name, kind in kinds.items()}

    def has_kinds(status: Any) -> bool:
        rows = {row["region"]: row["kind"] for row in status["members"]["rows"]}
        return wanted.items() <= rows.items()

    await cluster.until(f"{kinds}", lambda now: all(map(has_kinds, now.values())), names)


async def until_ended(cluster: Cluster, name: str, *words: str) -> None:
    """Until a region has ended with 0, and its last lines say these words."""
    process = cluster.regions[name].process
    assert process is not None
    lines = cluster.regions[name].last_lines
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 0, lines(20)
    assert all(word in lines(20) for word in words), lines(20)


@pytest.mark.long  # test_a_run_that_grows.py shrinks one, too
async def test_a_run_of_four_shrinks_to_two_and_goes_on(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.until_trains()
    await cluster.until_commits(2)
    leader = await cluster.until_leader()
    quiet, dead, leaver = cluster.others(leader)
    assert "4 voters, 3 must be there: merging goes on with 1 of them away" in await members(cluster, leader, "list")

    init_run(cluster.folder / "others", "another-run", [quiet])
    with pytest.raises(ConfigError, match=r"no authority in the ca\.pem of .* has signed it for these members"):
        await members(cluster, leader, "demote", quiet, key=cluster.folder / "others" / "ca.key")
    with pytest.raises(ConfigError, match=f"give the order to {leader}"):
        await members(cluster, quiet, "demote", dead)
    with pytest.raises(ConfigError, match="nobody is no member of the run"):
        await members(cluster, leader, "remove", "nobody")
    with pytest.raises(ConfigError, match="is a voter already"):
        await members(cluster, leader, "promote", quiet)
    await order(cluster, leader, "demote", quiet)
    await until_kinds(cluster, cluster.names, **{quiet.replace("-", "_"): "contributor"})
    await cluster.until_commits(2, why="with three voters")
    await cluster.until_merged(quiet, why="without a vote")

    await cluster.kill(dead)
    alive = [leader, quiet, leaver]
    await cluster.until(
        "it is missed",
        lambda now: not any(peer["is_alive"] for peer in now[leader]["peers"] if peer["name"] == dead),
        alive,
    )
    with pytest.raises(ConfigError, match="it makes 2 voters, of which 2 must be there"):
        await members(cluster, leader, "demote", leaver, "--force")
    await order(cluster, leader, "remove", dead)
    await until_kinds(cluster, alive, **{dead.replace("-", "_"): "former"})
    await order(cluster, leader, "promote", quiet)
    await until_kinds(cluster, alive, **{quiet.replace("-", "_"): "voter"})
    await cluster.until_commits(1, alive, why="without the dead one")

    with pytest.raises(ConfigError, match=f"removing {leaver} leaves 2, and the next failure stops merging; --force"):
        await members(cluster, leader, "remove", leaver)
    await order(cluster, leader, "remove", leaver, "--force")
    await until_ended(cluster, leaver, f"{leaver} was removed from the run by an operator (entry", "ends with 0")
    rest = [leader, quiet]
    listing = await members(cluster, leader, "list")
    assert "2 voters, 2 must be there: the next failure stops merging" in listing
    await cluster.until(
        "they know it no more",
        lambda now: all({peer["name"] for peer in now[name]["peers"]} == set(rest) - {name} for name in rest),
        rest,
    )
    await cluster.until_commits(2, rest, why="of two")

    await cluster.start(dead)
    await until_ended(cluster, dead, "shows the authority's signature", "ends with 0")
    await cluster.start(leaver)
    await until_ended(cluster, leaver, "was removed from the run by an operator", "ends with 0")

    with pytest.raises(ConfigError, match=f"{leader} leads: asked itself, it hands over"):
        await members(cluster, leader, "remove", leader)
    await cluster.until("it has handed over", lambda now: all(one["leader"] == quiet for one in now.values()), rest)
    await cluster.until_commits(1, rest, why="with another leader")
    await order_finish([cluster.regions[quiet]], limit_s=WAIT_S)
    for name in rest:
        await until_ended(cluster, name)
    cluster.names = rest
    cluster.check_equal()


async def test_one_region_goes_on_alone_after_the_majority_is_lost(cluster: Cluster) -> None:
    await cluster.start()
    await cluster.until_trains()
    await cluster.until_commits(2)
    leader = await cluster.until_leader()
    survivor, *lost = cluster.others(leader)
    before = (await cluster.statuses())[survivor]["rounds_committed"]
    for name in (leader, *lost, survivor):
        await cluster.kill(name)
    with pytest.raises(
        ConfigError, match=f"{survivor} goes on alone from entry .* what they committed without it is lost"
    ):
        await members(cluster, survivor, "recover")
    init_run(cluster.folder / "others", "another-run", [survivor])
    with pytest.raises(ConfigError, match=r"no authority in the ca\.pem of"):
        await members(cluster, survivor, "recover", "--force", key=cluster.folder / "others" / "ca.key")
    await cluster.start(leader)
    await cluster.until("it is there", lambda now: "members" in now[leader], [leader])
    with pytest.raises(ConfigError, match=f"{leader} at .* answers: start {survivor} beside it"):
        await members(cluster, survivor, "recover", "--force")
    await cluster.kill(leader)

    assert f"{survivor} goes on alone" in await members(cluster, survivor, "recover", "--force")
    with pytest.raises(ConfigError, match="is the only member already: start it"):
        await members(cluster, survivor, "recover")
    await cluster.start(survivor)
    await cluster.until("it merges alone", lambda now: now[survivor]["rounds_committed"] > before + 1, [survivor])
    assert "1 voters, 1 must be there: the next failure stops merging" in await members(cluster, survivor, "list")
    await cluster.start(leader)
    await until_ended(cluster, leader, "shows the authority's signature", "ends with 0")
    cluster.wipe(leader)
    await order(cluster, survivor, "add", leader, "--address", str(load_config(cluster.config).regions[leader].address))
    await cluster.start(leader)
    await cluster.until_merged(leader, why="as a contributor, with an empty folder")
    await order_finish([cluster.regions[survivor]], limit_s=WAIT_S)
    for name in (survivor, leader):
        await until_ended(cluster, name)
