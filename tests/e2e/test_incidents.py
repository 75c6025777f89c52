"""Incidents on a demo that runs, and what is said of each while it lasts: the table is in docs/lab/incidents.md."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli import admin_client
from diloco_node.cli.admin_client import ask_all
from diloco_node.cli.places import targets_in
from tests.kit.commands import COMMAND, NO_FORK_SERVER

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]

REGIONS = 3
PATIENCE_S = 240.0
LASTS = "200s"
"""Of a fault: until it was seen, and no longer, for then it is ended."""


async def said(*words: str) -> str:
    """The output of a command that must succeed."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, (words, errors.decode()[-2000:])
    return out.decode()


@contextlib.asynccontextmanager
async def process(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that goes on until the block ends; then it is interrupted, as by Ctrl-C."""
    started = await asyncio.create_subprocess_exec(
        *COMMAND, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **NO_FORK_SERVER, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.returncode is None:
            started.send_signal(2)
        await started.communicate()


async def documents(folder: Path) -> dict[str, dict[str, Any]]:
    """As `status --json` has them. Asked every second, so not by a command: each process would cost half a core."""
    found = await asyncio.to_thread(lambda: ask_all(targets_in(str(folder))))
    return {one["region"]: one for one in found}


def codes(regions: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    """(code, region it is about) of every alert of every region that answers."""
    return {
        (alert["code"], alert["region"])
        for one in regions.values()
        for alert in one.get("health", {}).get("alerts", ())
    }


def tolerances(regions: dict[str, dict[str, Any]]) -> dict[str, int]:
    return {name: one["health"]["failure_tolerance"] for name, one in regions.items() if "health" in one}


async def until(folder: Path, is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
    """The status of all regions as soon as it is so."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        found = await documents(folder)
        if is_so(found):
            return found
        assert asyncio.get_running_loop().time() < deadline, {name: one.get("health") for name, one in found.items()}
        await asyncio.sleep(1.0)


OF_NO_INCIDENT = {"A-STARVED", "A-MERGES-LATE", "A-LOSS-SPIKE"}
"""Alerts that are right where other tests take the processors. A gradient that is far off is told for ten minutes: the
longer a busy machine takes, the likelier there is one."""


def is_sound(regions: dict[str, dict[str, Any]]) -> bool:
    return all(
        one.get("health", {}).get("state") in {"healthy", "degraded"}
        and {alert["code"] for alert in one["health"]["alerts"]} <= OF_NO_INCIDENT
        for one in regions.values()
    )


def has_merged(regions: dict[str, dict[str, Any]]) -> bool:
    return all(one["rounds_committed"] > 8 for one in regions.values())


async def why(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    found = json.loads(await said("why", str(folder), "--json"))
    return found["line"], found["findings"]


async def test_each_incident_is_named_while_it_lasts_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_client, "TIMEOUT_S", 3.0)  # the command's own: here regions are made not to answer
    folder = tmp_path / "run"
    async with process("demo", "--regions", str(REGIONS), "--seconds", "1500", "--folder", str(folder)):
        async with asyncio.timeout(PATIENCE_S):
            while len(list(folder.glob("*/admin.port"))) < REGIONS:  # noqa: ASYNC110 - nothing tells when a file is there
                await asyncio.sleep(0.5)
        await until(folder, lambda found: is_sound(found) and has_merged(found))
        chaos = ("--for", LASTS, "--folder", str(folder))

        # Both at once: a learner is called silent after a minute only.
        async with (
            process("chaos", "strike", "pause", "us-west.learner", *chaos),
            process("chaos", "strike", "pause", "us-east.daemon", *chaos),
        ):
            found = await until(folder, lambda found: tolerances(found) == {"eu-west": 0, "us-west": 0})
            assert ("A-PEER-DOWN", "us-east") in codes(found)
            assert "error" in found["us-east"]
            await until(folder, lambda found: ("A-LEARNER-SILENT", "us-west") in codes(found))
            line, findings = await why(folder)
            assert line.startswith("degraded: ")
            assert any("has reported no step for" in one["text"] for one in findings)
            text = await said("status", str(folder))
            assert "diloco-node start --region us-east" in text
        await until(folder, is_sound)

        async with process("chaos", "strike", "partition", "us-east", *chaos):
            await until(folder, lambda found: ("A-NO-MAJORITY", "us-east") in codes(found))
            line, findings = await why(folder)
            assert line.startswith("degraded: "), "the other two go on"
            assert any("us-east hears 1 of 3 regions; the others merge on" in one["text"] for one in findings)
        await until(folder, is_sound)

        async with process("chaos", "strike", "disk", "us-east", *chaos):
            found = await until(folder, lambda found: ("A-DISK-REFUSED", "us-east") in codes(found))
            _, findings = await why(folder)
            assert any("the disk refuses" in one["text"] for one in findings)
        await until(folder, is_sound)
