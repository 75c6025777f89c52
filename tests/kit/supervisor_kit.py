"""A supervisor of small Python programs in place of daemon and learner."""

import sys
import textwrap
import time
from pathlib import Path

from diloco_node.supervisor.supervisor_spec import SupervisorSpec

PATIENCE_S = 180.0


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


# Waits in the style of a real child: until a signal says otherwise.
WAIT = "import signal\nsignal.sigwait([signal.SIGTERM])"


def spec(state_dir: Path, daemon: str, learner: str | None) -> SupervisorSpec:
    return SupervisorSpec(
        region="us-east",
        state_dir=state_dir,
        daemon_command=python(daemon),
        learner_command=None if learner is None else python(learner),
        env={"PLACE": str(state_dir)},
        backoff_min_s=0.01,
        backoff_max_s=0.05,
        daemon_first_s=0.0,
        is_echoing=False,
    )


def lives(state_dir: Path, name: str) -> list[int]:
    """Process ids of a child's lives, as the children noted them."""
    path = state_dir / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


NOTE = """
import os, pathlib, sys
place = pathlib.Path(os.environ["PLACE"])
def note(name):
    with (place / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return len((place / f"{name}.pids").read_text().split())
def wait_for(name, count):
    import time
    path = place / f"{name}.pids"
    while not path.exists() or len(path.read_text().split()) < count:
        time.sleep(0.01)
def wait_until(state):
    import json, time
    path = place / "learner.json"
    while not path.exists() or json.loads(path.read_text())["state"] != state:
        time.sleep(0.01)
"""


def is_gone(pid: int) -> bool:
    """Dead, or a zombie that nobody of ours has to reap; waits for it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


MAIN = """
import pathlib, sys
from diloco_node.supervisor.supervisor import run_supervisor
from diloco_node.supervisor.supervisor_spec import SupervisorSpec
place = pathlib.Path(sys.argv[1])
sys.exit(run_supervisor(SupervisorSpec(
    region="us-east", state_dir=place, env={"PLACE": str(place)}, is_echoing=False,
    stop_s=float(sys.argv[4]), daemon_first_s=0.0,
    daemon_command=[sys.executable, "-c", sys.argv[2]], learner_command=[sys.executable, "-c", sys.argv[3]])))
"""


LEAVE = (
    NOTE
    + """
import time
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, PlaceMark, request_area
area = request_area(pathlib.Path(os.environ["DILOCO_SUPERVISOR"]), PLACE_AREA, PLACE_BYTES)
def mark(**changes):
    area[:] = PlaceMark(os.getpid(), step=9, **changes).encode()
"""
)
"""A learner's program that may `mark` where it stands, as `attach` does."""
