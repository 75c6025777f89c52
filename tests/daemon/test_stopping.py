"""daemon/stopping.py: what does not end is named in the log, and the process ends."""

import asyncio
import subprocess
import sys
import time

import pytest

from diloco_node.daemon.stopping import StopDeadline

STUCK = """
import asyncio, time
from diloco_node.daemon.stopping import StopDeadline

async def swallow():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def main():
    stuck = asyncio.create_task(swallow(), name="dialer of b")
    await asyncio.sleep(0)
    with StopDeadline("a", {code}, seconds=0.2):
        {stop}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("stop", "where"),
    [("stuck.cancel(); await asyncio.gather(stuck)", "in swallow"), ("time.sleep(3600)", "in main")],
    ids=["a task that swallows its cancellation", "a loop that is blocked"],
)
@pytest.mark.parametrize("code", [0, 6])
def test_a_process_that_does_not_stop_ends_with_its_code_and_says_what_is_left(
    stop: str, where: str, code: int
) -> None:
    script = STUCK.format(code=code, stop=stop)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == code, process.stderr
    assert "task dialer of b:" in process.stderr
    assert where in process.stderr


async def test_a_stop_in_time_ends_nothing() -> None:
    with StopDeadline("a", 0, seconds=0.05):
        pass
    await asyncio.to_thread(time.sleep, 0.2)  # a process that was ended would not get here
