"""For all tests: nothing here depends on how fast this machine is."""

import gc
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from diloco_node.cli import admin_client
from diloco_node.lab.demo import region_processes as processes
from tests.kit.repository import ROOT

# An example that takes long, or is made slowly, says something about the machine only.
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("thorough"), max_examples=25)
settings.load_profile("quick")  # `make test-all` asks for the other one

# For torch, here and in every learner that a test starts: threads that wait would spin, and take the cores from others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Who runs tests in the background of a script has SIGINT ignored, and all that tests start would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = ("long", "system", "e2e", "world", "seeds")
"""Markers of tests, by how long the longest of each take: the containers take minutes."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before workers start, do once what each of them would do: compile the kernels, and in a new checkout all modules.

    pytest compiles those of the tests itself, for half a minute.
    """
    if not session.config.getoption("numprocesses", None) or hasattr(session.config, "workerinput"):
        gc.disable()  # until all is collected: nothing of it is garbage
        return
    program = "from diloco_node.codec.kernels import warm_up; warm_up()"
    kernels = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    tests = Path(__file__).parent
    if not sys.dont_write_bytecode and not [*tests.glob("__pycache__/test_main.*pytest*")]:
        # Two processes, each with half of the tests. What can't be imported is told by the workers.
        places = sorted(str(place) for place in tests.glob("[!_]*") if place.is_dir() or place.name.startswith("test_"))
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq"]
        quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for collecting in [subprocess.Popen([*command, *places[at::2]], **quiet) for at in (0, 1)]:
            collecting.wait()
    assert kernels.wait() == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest tests first, then by number of tests: no worker is left alone with much in the end."""
    counts = Counter(item.path for item in items)
    ranks: dict[Path, int] = {}
    for item in items:
        rank = next((at for at, name in enumerate(LONGEST_FIRST) if item.get_closest_marker(name)), len(LONGEST_FIRST))
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: (ranks[item.path], -counts[item.path]))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker has all tests of the integrations: to import their libraries takes as long as the tests."""

    class FilesAndIntegrations(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            room = "tests/integrations/"
            return room if nodeid.startswith(room) else str(super()._split_scope(nodeid))

    return FilesAndIntegrations(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """The modules and tests stay: the garbage collector need not walk over a gigabyte of them, not even once."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Workers pick ports for their daemons from different ranges: a port is free until its daemon has started."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    least, end = processes.PORT_MIN, processes.first_ephemeral_port()
    share = (end - least) // count
    with pytest.MonkeyPatch.context() as patch:
        if share > 0:
            last = tmp_path_factory.mktemp("ports") / "range"
            last.write_text(f"{least + (number + 1) * share} 65535\n")
            patch.setattr(processes, "PORT_MIN", least + number * share)
            patch.setattr(processes, "EPHEMERAL_PORTS", last)
        yield


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for a status in this process waits for it: a region that answers late is there."""
    monkeypatch.setattr(admin_client, "TIMEOUT_S", 120.0)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    yield near, far
    near.close()
    far.close()
