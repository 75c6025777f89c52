"""A region goes on alone after the majority is lost, and another one comes back; orders that tests of members give."""

import asyncio
import re
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


@pytest.mark.long  # of the gate is tests/daemon/test_lone_region.py
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
