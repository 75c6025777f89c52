"""Any process of any region may be killed: the others go on, and what comes back catches up to the same bytes."""

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli.demo.command import DemoOptions
from diloco_node.cli.demo.live import LiveView
from diloco_node.cli.demo.processes import RegionProcess
from diloco_node.cli.demo.report import build_report
from diloco_node.cli.demo.run import Demo

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

WAIT_S = 300.0


class Run:
    """A demo under the test's hands: statuses by region, waiting for facts, killing by process id."""

    def __init__(self, demo: Demo) -> None:
        self.demo = demo

    @property
    def regions(self) -> dict[str, RegionProcess]:
        return {region.name: region for region in self.demo.regions}

    async def statuses(self) -> dict[str, dict[str, Any]]:
        for region in self.demo.regions:
            assert not region.has_exited, region.last_lines()
        await asyncio.gather(*(region.poll() for region in self.demo.regions))
        return {region.name: region.status for region in self.demo.regions}

    async def until(self, what: str, is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            statuses = await self.statuses()
            if all("learner" in status for status in statuses.values()) and is_so(statuses):
                return statuses
            assert time.monotonic() < deadline_s, f"not within {WAIT_S} s: {what}\n{_short(statuses)}"
            await asyncio.sleep(0.3)

    async def kill(self, region: str, process: str) -> None:
        """SIGKILL one process of a region, and see the others go on and the region come back."""
        before = await self.until("everybody trains", _all_train)
        pid = before[region]["pids"][process]
        committed = max(status["rounds_committed"] for status in before.values())
        os.kill(pid, signal.SIGKILL)
        others = [name for name in before if name != region]
        await self.until(
            f"the others step and commit after the {process} of {region} was killed",
            lambda now: all(
                now[name]["rounds_committed"] >= committed + 4
                and now[name]["learner"] is not None
                and now[name]["learner"]["step"] >= before[name]["learner"]["step"] + 16
                and now[name]["learner"]["incarnation"] == before[name]["learner"]["incarnation"]
                for name in others
            ),
        )
        after = await self.until(
            f"{region} trains and merges again",
            lambda now: (
                _all_train(now)
                and now[region]["pids"][process] != pid
                and now[region]["rounds_committed"] >= committed + 8
                and min(now[region]["versions"]) >= max(before[region]["versions"])
            ),
        )
        # The other child of the region was not restarted.
        other = "learner" if process == "daemon" else "daemon"
        assert after[region]["pids"][other] == before[region]["pids"][other]


def _all_train(statuses: dict[str, dict[str, Any]]) -> bool:
    return all(status["state"] == "training" and status["learner"]["step"] > 0 for status in statuses.values())


def _short(statuses: dict[str, dict[str, Any]]) -> str:
    keys = ("state", "role", "leader", "reason", "rounds_committed", "versions", "pids")
    return "\n".join(f"{name}: { {key: status.get(key) for key in keys} }" for name, status in statuses.items())


async def test_killed_learner_daemon_and_leader_come_back_and_the_digests_stay_equal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    demo = Demo(DemoOptions(regions=4, seconds=60.0, folder=folder, is_json=True), folder)
    demo._prepare()
    run = Run(demo)
    try:
        with LiveView("", is_quiet=True) as view:
            await demo._compile(view)
        for region in demo.regions:
            await region.start(folder / "run.toml")
        statuses = await run.until("everybody trains", _all_train)
        leader = statuses[demo.names[0]]["leader"]
        followers = [name for name in demo.names if name != leader]
        await run.kill(followers[0], "learner")
        await run.kill(followers[1], "daemon")
        await run.kill(leader, "daemon")
        statuses = await run.until("a leader is known", lambda now: all(one["leader"] for one in now.values()))
        await run.kill(statuses[demo.names[0]]["leader"], "learner")
        await order_end(demo.regions[0])
        for region in demo.regions:
            assert region.process is not None
            assert await asyncio.wait_for(region.process.wait(), WAIT_S) == 0, region.last_lines()
    finally:
        await asyncio.gather(*(region.stop() for region in demo.regions))
    report = build_report(folder, demo.names)
    assert report["equal_digests"] is True
    assert report["tokens"]["faults"] == []
    assert report["tokens"]["balanced"] is True
    assert report["tokens"]["discarded"] > 0, "two learners died with steps that no merge has"
    hashes = {hashlib.sha256((folder / name / "final.safetensors").read_bytes()).hexdigest() for name in demo.names}
    assert len(hashes) == 1


async def test_a_killed_supervisor_takes_its_children_along_and_the_region_can_be_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    demo = Demo(DemoOptions(regions=3, seconds=60.0, folder=folder, is_json=True), folder)
    demo._prepare()
    run = Run(demo)
    try:
        for region in demo.regions:
            await region.start(folder / "run.toml")
        before = await run.until("everybody trains", _all_train)
        victim = demo.regions[0]
        assert victim.process is not None
        pids = before[victim.name]["pids"]
        victim.process.kill()
        await victim.process.wait()
        deadline_s = time.monotonic() + WAIT_S
        while any(_exists(pids[name]) for name in ("daemon", "learner")):
            assert time.monotonic() < deadline_s, "the children outlive their supervisor"
            await asyncio.sleep(0.05)
        await victim.start(folder / "run.toml")
        committed = before[victim.name]["rounds_committed"]
        await run.until(
            "the region is back and merges",
            lambda now: _all_train(now) and all(one["rounds_committed"] >= committed + 8 for one in now.values()),
        )
        await order_end(victim)
        for region in demo.regions:
            assert region.process is not None
            assert await asyncio.wait_for(region.process.wait(), WAIT_S) == 0, region.last_lines()
    finally:
        await asyncio.gather(*(region.stop() for region in demo.regions))
    report = build_report(folder, demo.names)
    assert report["equal_digests"] is True
    assert report["tokens"]["balanced"] is True, report["tokens"]


async def order_end(region: RegionProcess) -> None:
    """Ask until the order is taken: a busy machine may not answer in time, and the region may have ended by then."""
    deadline_s = time.monotonic() + WAIT_S
    while not (await region.finish() or region.has_exited):
        assert time.monotonic() < deadline_s, region.last_lines()


def _exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
