"""What the dashboard costs: processor time of a daemon that is looked at, sizes, and the time to the first paint.

    python benchmarks/page.py [--viewers 10] [--seconds 20] [--json]

A demo of three regions on this machine. The processor time of one daemon is counted for a while without a viewer, with
so many that read its event stream, and without one again: the difference is what they cost. The first paint is that of
the daemon's own page in headless Chromium, where one is installed (the median of five loads).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from diloco_node.cli.admin_client import Target, ask
from diloco_node.daemon.admin import page_files
from diloco_node.lab.chaos.demo_processes import DemoFile
from tests.kit.browser import PROGRAM, chromium

REGIONS: Final = 3
WATCHED: Final = "us-east"
START_S: Final = 240.0
ROUNDS_FIRST: Final = 20
"""Before it counts: everything is loaded and compiled."""

LOADS: Final = 5
PAINT: Final = "JSON.stringify(performance.getEntriesByType('paint').map(one => [one.name, one.startTime]))"


@contextlib.asynccontextmanager
async def demo(folder: Path, seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """One that trains; it is interrupted if it has not ended by itself."""
    words = ("demo", "--regions", str(REGIONS), "--seconds", str(seconds), "--folder", str(folder))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diloco_node.main", *words, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()


async def port_of(folder: Path) -> int:
    """The admin port of the watched region, once it has merged for a while."""
    file = folder / WATCHED / "admin.port"
    async with asyncio.timeout(START_S):
        while True:
            if file.exists():
                port = int(file.read_text())
                status = await asyncio.to_thread(ask, Target(WATCHED, port))
                if status.get("rounds_committed", 0) >= ROUNDS_FIRST:
                    return port
            await asyncio.sleep(0.5)


def daemon_of(folder: Path) -> psutil.Process:
    """The daemon's process of the watched region."""
    supervisor = DemoFile.load(folder).supervisors[WATCHED]
    assert supervisor is not None, "it has just answered"
    return next(one for one in psutil.Process(supervisor.pid).children() if "daemon" in one.cmdline())


async def read_events(url: str) -> None:
    """One viewer, until it is cancelled."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/api/v1/events") as answer:
        async for _ in answer.content.iter_any():
            pass


async def share(daemon: psutil.Process, seconds: float) -> float:
    """Part of a core that it takes."""
    loop = asyncio.get_running_loop()
    before, began_s = daemon.cpu_times(), loop.time()
    await asyncio.sleep(seconds)
    after, took_s = daemon.cpu_times(), loop.time() - began_s
    return (after.user + after.system - before.user - before.system) / took_s


async def paints(url: str, folder: Path) -> dict[str, float]:
    """Milliseconds to the first paint and the first content, medians."""
    found: dict[str, list[float]] = {}
    for _ in range(LOADS):
        async with chromium(folder) as browser:
            tab = await browser.tab()
            await tab.look(width=1280)
            await tab.open(f"{url}/")
            await tab.until("performance.getEntriesByType('paint').length === 2")
            for name, at_ms in json.loads(await tab.evaluate(PAINT)):
                found.setdefault(name, []).append(at_ms)
    return {name: statistics.median(values) for name, values in found.items()}


async def measure(viewers: int, seconds: float, folder: Path) -> dict[str, Any]:
    """All figures, as JSON has them."""
    result: dict[str, Any] = {"viewers": viewers, "seconds": seconds}
    async with demo(folder / "run", 6 * seconds + 60) as process:
        url = f"http://127.0.0.1:{await port_of(folder / 'run')}"
        daemon = daemon_of(folder / "run")
        result["alone"] = [await share(daemon, seconds)]
        looking = [asyncio.ensure_future(read_events(url)) for _ in range(viewers)]
        result["looked_at"] = await share(daemon, seconds)
        assert not any(one.done() for one in looking), "a viewer was turned away"
        for one in looking:
            one.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
        result["alone"].append(await share(daemon, seconds))
        result["viewers_cost"] = result["looked_at"] - statistics.fmean(result["alone"])
        if PROGRAM is not None:
            result["paint_ms"] = await paints(url, folder)
        await process.wait()
    files = [one for one in (Path(page_files.__file__).parent / "page").rglob("*") if one.is_file()]
    result["page_bytes"] = sum(one.stat().st_size for one in files)
    result["report_bytes"] = (folder / "run" / "report.html").stat().st_size
    return result


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three phases")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(arguments.viewers, arguments.seconds, Path(folder)))
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
