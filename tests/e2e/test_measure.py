"""A run of two regions is measured while it trains: over its own links, behind its rounds, within its budget."""

import asyncio
import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli.plan.inputs import read_mesh
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_report import build_report
from diloco_node.lab.demo.demo_run import Demo
from diloco_node.lab.demo.region_processes import RegionProcess, order_finish
from tests.kit.commands import COMMAND, NO_FORK_SERVER, SMALL_MODEL
from tests.kit.ports import free_port

# Of the gate are tests/cli/measure/test_live_measurement.py, through a daemon of this process, and tests/measure.
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

WAIT_S = 300.0

BUDGET_BYTES_PER_S = 4_000_000
SAVED_S = 0.25
"""So much of the budget a bucket may have saved up, and spent before it is booked."""

ATTEMPTS = 3


async def statuses(demo: Demo) -> dict[str, dict[str, Any]]:
    for region in demo.regions:
        assert not region.has_exited, region.last_lines()
    await asyncio.gather(*(anew(region) for region in demo.regions))
    return {region.name: region.status for region in demo.regions}


async def anew(region: RegionProcess) -> None:
    """Ask until it answers: a poll that gets no answer in time leaves what was known."""
    known, deadline_s = region.status, time.monotonic() + WAIT_S
    while await region.poll() is known:
        assert time.monotonic() < deadline_s, region.last_lines()


async def until_committed(demo: Demo, rounds: int) -> dict[str, dict[str, Any]]:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = await statuses(demo)
        if all(one.get("rounds_committed", 0) >= rounds and one["learner"] for one in found.values()):
            return found
        assert time.monotonic() < deadline_s, f"{rounds} rounds are not committed within {WAIT_S} s"
        await asyncio.sleep(0.3)


async def begin(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    """What a user types, in a process of its own."""
    command = [*COMMAND, "measure", *arguments, "--config", str(folder / "run.toml")]
    return await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def measure(folder: Path, *arguments: str, code: int = 0) -> Any:
    """Its document, or the error. Where it should succeed, again if the machine stood still and no answer came."""
    for attempt in range(ATTEMPTS):
        process = await begin(folder, *arguments)
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        if process.returncode == code:
            break
        print(f"attempt {attempt + 1}: {arguments} ended with {process.returncode}: {err.decode()}")
    assert process.returncode == code, err.decode()
    return err.decode() if code else json.loads(out)


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_links_are_measured_while_the_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    demo = Demo(DemoOptions(regions=2, seconds=120.0, folder=folder, is_json=True), folder)
    demo.prepare()
    for region in demo.regions:
        region.env = region.env | NO_FORK_SERVER | SMALL_MODEL
    with (folder / "run.toml").open("a") as file:
        file.write(f'\n[budget]\negress = "{BUDGET_BYTES_PER_S // 10**6}MB/s"\n')
    here = ("--region", "us-east", "--json")
    try:
        for region in demo.regions:
            await region.start(folder / "run.toml")
        before = await until_committed(demo, 4)
        assert before["us-east"]["budget"]["peers"]["us-west"]["lanes"]["measurement"]["used_bytes"] == 0

        started_s = time.monotonic()
        going = await begin(folder, "bandwidth", "us-west", "--seconds", "60", *here)
        while not (await statuses(demo))["us-east"]["measurement"]:
            assert going.returncode is None, await going.communicate()
            await asyncio.sleep(0.1)
        refused = await measure(folder, "latency", "us-west", "--region", "us-east", code=1)
        assert "carries out another `measure` command" in refused
        going.send_signal(signal.SIGINT)
        await asyncio.wait_for(going.communicate(), WAIT_S)
        deadline_s = time.monotonic() + WAIT_S
        while (await statuses(demo))["us-east"]["measurement"]:
            assert time.monotonic() < deadline_s, "who goes away ends its measurement"
            await asyncio.sleep(0.1)

        bandwidth = await measure(folder, "bandwidth", "us-west", "--seconds", "1", *here)
        after = await statuses(demo)
        elapsed_s = time.monotonic() - started_s
        assert bandwidth["through"] == "daemon"
        assert (bandwidth["limit_bytes_per_second"], bandwidth["limited_by"]) == (BUDGET_BYTES_PER_S, "region")
        assert bandwidth["bytes_per_second"] > 0
        assert bandwidth["wire_bytes_per_second"] > 0
        assert 0 <= bandwidth["retransmitted_bytes"] <= bandwidth["sent_bytes"]
        booked = after["us-east"]["budget"]["peers"]["us-west"]["lanes"]["measurement"]["used_bytes"]
        most = BUDGET_BYTES_PER_S * (elapsed_s + SAVED_S)
        assert bandwidth["wire_bytes"] <= booked <= most
        port = int((folder / "us-east" / "admin.port").read_text())
        assert metric(port, 'diloco_lane_used_bytes_total{lane="measurement",peer="us-west"}') == booked
        assert after["us-west"]["budget"]["peers"]["us-east"]["lanes"]["measurement"]["used_bytes"] == 0
        for name in demo.names:
            assert after[name]["rounds_committed"] > before[name]["rounds_committed"], "merging went on"
            assert after[name]["learner"]["step"] > before[name]["learner"]["step"], "and so did training"
            assert after[name]["rejections"] == []

        await measure(folder, "bandwidth", "us-west", "--reverse", "--seconds", "1", *here)
        after = await statuses(demo)
        assert after["us-west"]["budget"]["peers"]["us-east"]["lanes"]["measurement"]["used_bytes"] > 0
        for name in demo.names:
            assert after[name]["rejections"] == []

        latency = await measure(folder, "latency", "us-west", "--load", "--seconds", "1", *here)
        assert [row["load"] for row in latency["rows"]] == ["none", "out", "in"]
        assert all(row["answered"] > 0 for row in latency["rows"])
        mesh = folder / "mesh.json"
        await measure(folder, "mesh", "--seconds", "1", "--out", str(mesh), *here)
        assert len(read_mesh(mesh).goodput) == 2

        daemon = await measure(folder, "latency", "us-west", "--alone", "--region", "us-east", code=5)
        assert "what answers is the training daemon of us-west" in daemon
        monkeypatch.setenv("DILOCO_REGIONS__US_WEST__MEASURE_PORT", str(free_port()))
        serving = await begin(folder, "serve", "--region", "us-west", "--json")
        assert serving.stdout is not None
        await serving.stdout.readline()
        beside = await measure(folder, "bandwidth", "us-west", "--alone", "--seconds", "1", *here)
        serving.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(serving.wait(), WAIT_S) == 0
        assert beside["bytes_per_second"] > 0
        assert "through" not in beside

        await order_finish(demo.regions[:1], limit_s=WAIT_S, is_given_up=lambda: demo.regions[0].has_exited)
        for region in demo.regions:
            assert region.process is not None
            assert await asyncio.wait_for(region.process.wait(), WAIT_S) == 0, region.last_lines()
    finally:
        await asyncio.gather(*(region.stop() for region in demo.regions))
    report = build_report(folder, demo.names)
    assert report["equal_digests"] is True
    assert report["tokens"]["balanced"] is True
