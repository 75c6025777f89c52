"""daemon/stopping.py: what does not end is named in the log, and the process ends."""

import subprocess
import sys

import pytest

from diloco_node.daemon.node import END_POLL_S
from diloco_node.daemon.stopping import ADMIN_SHARE, DRAIN_SHARE, STOP_S_DEFAULT, STOP_SHARE

STUCK = """
import asyncio, threading, time
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
    StopDeadline("a").arm({code}, 0.25)
    {stop}

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("stop", "where"),
    [
        ("stuck.cancel(); await asyncio.gather(stuck)", "in swallow"),
        ("time.sleep(3600)", "in main"),
    ],
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


THREAD = """
import asyncio, threading, time
from diloco_node.daemon.stopping import StopDeadline

async def main():
    StopDeadline("a").arm(6, {seconds})
    threading.Thread(target=time.sleep, args=({sleep},)).start()

asyncio.run(main())
"""


@pytest.mark.parametrize(("seconds", "sleep", "code"), [(0.2, 3600, 6), (3600, 0, 0)], ids=["stuck", "in time"])
def test_a_thread_that_python_waits_for_is_waited_for_no_longer(seconds: float, sleep: int, code: int) -> None:
    script = THREAD.format(seconds=seconds, sleep=sleep)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == code, process.stderr
    assert ("did not stop in time" in process.stdout + process.stderr) == bool(code)


@pytest.mark.parametrize("stop_s", [2.0, 5.0, STOP_S_DEFAULT], ids=["stop_grace = 10 s", "by default", "nobody kills"])
def test_who_waits_for_others_leaves_a_quarter_of_the_time_for_files_and_links(stop_s: float) -> None:
    assert END_POLL_S + (DRAIN_SHARE + ADMIN_SHARE) * stop_s <= 0.75 * STOP_SHARE * stop_s
